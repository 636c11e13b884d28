"""Rules about data, model and loss, on real models: what an inspected batch shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional

import gradvitals as gv
from gradvitals.cli import main
from gradvitals.config import Config

Loss = Callable[[Tensor, Tensor], Tensor]


def verdict_of(
    path: Path,
    model: nn.Module,
    loss_fn: Loss,
    x: Tensor,
    y: Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 16,
) -> gv.Verdict:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    config = Config(worker="thread", quiet=True)
    with gv.watch(model, optimizer, run=path, config=config) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    with gv.open_run(monitor.run_path) as run:
        return run.verdict


def net(outputs: int, *last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs), *last)


X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
LABELS = (X[:, 0] > 0).long()
NUMBERS = X[:, :1] - X[:, 1:2]


@pytest.mark.parametrize(("std", "samples", "found"), [(1.0, 32, True), (0.05, 32, False), (1.0, 2, False)])
def test_embeddings_that_start_far_too_large_are_found(tmp_path: Path, std: float, samples: int, found: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 64), nn.Flatten(), nn.Linear(192, 1))
    nn.init.normal_(model[0].weight, std=std)
    nn.init.normal_(model[2].weight, std=1.0 if std == 1 else 0.05)
    ids = torch.randint(9, (samples, 3))
    verdict = verdict_of(tmp_path / "run", model, functional.mse_loss, ids, torch.randn(samples, 1))
    starts = [one for one in verdict.findings if one.id == "bad_start"]
    assert bool(starts) == found
    assert not found or "Embeddings start too large" in starts[0].causes[0]


def words() -> nn.Sequential:
    """Scores sequences of three ids."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.ReLU(), nn.Linear(24, 2))


class Pooled(nn.Module):
    """Scores sequences of shape (samples, time, columns) by attention over one of their dimensions."""

    def __init__(self, dim: int, columns: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.score, self.out = nn.Linear(columns, 8), nn.Linear(8, 1), nn.Linear(8, 2)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Returns two scores of each sequence."""
        hidden = torch.tanh(self.into(x))
        scores: Tensor = self.out((self.score(hidden).softmax(self.dim) * hidden).sum(1))
        return scores


@pytest.mark.parametrize(
    ("model", "loss_fn", "x", "y", "finding", "said"),
    [
        (net(2, nn.Softmax(1)), functional.cross_entropy, X, LABELS, "loss_mismatch", "softmax"),
        (net(1, nn.Softmax(1)), functional.mse_loss, X, NUMBERS, "loss_mismatch", "single output"),
        (net(1, nn.Sigmoid()), functional.mse_loss, X, 5 * NUMBERS, "loss_mismatch", "cannot reach"),
        (net(1), lambda p, y: (p - y[:, 0]).square().mean(), X, NUMBERS, "loss_mismatch", "broadcast"),
        (net(2), functional.cross_entropy, 100 * X, LABELS, "unscaled_data", "not standardized"),
        (
            net(2),
            functional.cross_entropy,
            X / torch.tensor([1.0, 1, 1, 0]),
            LABELS,
            "bad_inputs",
            "standard deviation",
        ),
        (
            nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)),
            functional.cross_entropy,
            X,
            LABELS,
            "no_nonlinearity",
            "linear",
        ),
        (net(2, nn.Dropout(0.9)), functional.cross_entropy, X, LABELS, "layer_modes", "Dropout"),
        (net(2, nn.Tanh()), functional.cross_entropy, X, LABELS, "loss_mismatch", "Tanh"),
        (net(2, nn.Softmax(0)), lambda p, y: functional.nll_loss((p + 1e-8).log(), y), X, LABELS, "loss_mismatch", "0"),
        (words(), functional.cross_entropy, torch.rand(32, 3).long(), LABELS, "bad_inputs", "same input"),
        (net(2), functional.cross_entropy, X.abs() // 99, LABELS, "bad_inputs", "same input"),
        (Pooled(-1), functional.cross_entropy, X[:, :, None], LABELS, "layer_wiring", "always 1"),
    ],
)
def test_the_verdict_leads_with_what_is_wrong_with_the_setup(
    tmp_path: Path, model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, finding: str, said: str
) -> None:
    verdict = verdict_of(tmp_path / "run", model, loss_fn, x, y)
    assert verdict.worst is not None
    assert verdict.worst.finding.id == finding
    assert said in (verdict.cause or "")
    assert verdict.fix is not None
    assert verdict.fix.text


@pytest.mark.parametrize(
    ("model", "loss_fn", "y"),
    [
        (net(2), functional.cross_entropy, LABELS),
        (net(2, nn.LogSoftmax(1)), functional.nll_loss, LABELS),
        (net(1, nn.Sigmoid()), functional.binary_cross_entropy, LABELS.float()[:, None]),
        (net(1), functional.mse_loss, NUMBERS),
        (nn.Sequential(Pooled(1, 4), nn.Flatten()), functional.cross_entropy, LABELS),
    ],
)
def test_a_setup_that_fits_is_healthy(tmp_path: Path, model: nn.Module, loss_fn: Loss, y: Tensor) -> None:
    x = X[:, None].expand(-1, 3, -1) if isinstance(model[0], Pooled) else X
    assert verdict_of(tmp_path / "run", model, loss_fn, x, y).level == "healthy"


@pytest.mark.parametrize(("rare", "found"), [(2, True), (12, False)])
def test_a_classifier_that_predicts_one_class_for_all_is_found_if_the_others_are_rare(
    tmp_path: Path, rare: int, found: bool
) -> None:
    """Among labels that the inputs do not tell, the rare class is never predicted."""
    y = torch.zeros(32)
    y[:rare] = 1.0
    loss_fn: Loss = lambda p, y: functional.binary_cross_entropy_with_logits(p[:, 0], y)  # noqa: E731
    verdict = verdict_of(tmp_path / "run", net(1), loss_fn, 1e-2 * X, y, steps=300)
    ids = {item.finding.id for item in verdict.ranked if item.weight != "info"}
    assert ("one_class" in ids) == found


def test_an_output_that_is_detached_before_another_model_scores_it_is_found(tmp_path: Path) -> None:
    generator, critic = net(2), net(1)
    critic[0] = nn.Linear(2, 8)
    mine, other = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (generator, critic))
    with gv.watch(generator, mine, run=tmp_path / "run", config=Config(worker="thread", quiet=True)) as monitor:
        for step in range(60):
            optimizer = (other, mine)[step % 2]
            mine.zero_grad()
            other.zero_grad()
            loss = critic(generator(X).detach()).square().mean()
            loss.backward()
            optimizer.step()
    with gv.open_run(monitor.run_path) as run:
        causes = {finding.id: finding.causes[0] for finding in run.findings if finding.causes}
    assert "was detached" in causes["loss_unreached"], causes


class Reader(nn.Module):
    """Reads a sequence, and puts out two scores for it."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU | nn.RNN], at: int = -1, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.out = kind(3, 8, **options), nn.Linear(16 if options.get("bidirectional") else 8, 2)
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scores of one time step of sequences of shape (samples, time, 3)."""
        scores: Tensor = self.out(self.rnn(x)[0][:, self.at])
        return scores


SEQUENCES = torch.randn(32, 6, 3, generator=torch.Generator().manual_seed(3))


class TimeFirst(Reader):
    """The same, with time moved to where the layer expects it."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scores of the last time step."""
        scores: Tensor = self.out(self.rnn(x.transpose(0, 1))[0][-1])
        return scores


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_samples_taken_for_time_steps_are_found(tmp_path: Path, kind: type[nn.LSTM | nn.GRU | nn.RNN]) -> None:
    for number, options in enumerate(({}, {"bidirectional": True})):
        verdict = verdict_of(
            tmp_path / f"bug{number}", Reader(kind, **options), functional.cross_entropy, SEQUENCES, LABELS
        )
        assert verdict.worst is not None
        assert verdict.worst.finding.id == "layer_wiring"
        assert verdict.fix is not None
        assert "batch_first=True" in verdict.fix.text
    for number, model in enumerate((Reader(kind, batch_first=True), TimeFirst(kind))):
        verdict = verdict_of(tmp_path / f"fine{number}", model, functional.cross_entropy, SEQUENCES, LABELS)
        assert verdict.level == "healthy"


def test_a_recurrent_layer_whose_first_step_alone_is_used_is_found(tmp_path: Path) -> None:
    model = Reader(nn.GRU, at=0, batch_first=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    verdict = verdict_of(tmp_path / "run", model, functional.cross_entropy, SEQUENCES, LABELS, optimizer, steps=60)
    assert "first time step" in (verdict.cause or "")


def test_a_softmax_between_layers_is_a_note_until_the_loss_stands_still(tmp_path: Path) -> None:
    hidden = nn.Sequential(nn.Linear(4, 16), nn.Softmax(1), nn.Linear(16, 2))
    verdict = verdict_of(tmp_path / "run", hidden, functional.cross_entropy, X, LABELS)
    assert verdict.level == "healthy"
    assert "layer_wiring" in {item.finding.id for item in verdict.ranked}
    gate = nn.Sequential(nn.Linear(4, 2), nn.Softmax(1), nn.Linear(2, 2))
    verdict = verdict_of(tmp_path / "gate", gate, functional.cross_entropy, X, LABELS)
    assert "layer_wiring" not in {item.finding.id for item in verdict.ranked}


SHARES = functional.one_hot(LABELS, 2).float()


@pytest.mark.parametrize(
    ("last", "loss_fn", "y", "said"),
    [
        (nn.Softmax(1), functional.cross_entropy, SHARES, "softmax"),
        (nn.Softmax(1), lambda p, y: -(torch.log_softmax(p, 1) * y).sum(1).mean(), SHARES, "softmax"),
        (nn.Softmax(1), lambda p, y: functional.kl_div(p, y, reduction="batchmean"), SHARES, "log-probabilities"),
        (nn.Identity(), functional.binary_cross_entropy_with_logits, 2 * SHARES - 1, "from -1 to 1"),
    ],
)
def test_targets_that_are_shares_of_classes_are_looked_at(
    tmp_path: Path, last: nn.Module, loss_fn: Loss, y: Tensor, said: str
) -> None:
    verdict = verdict_of(tmp_path / "bug", net(2, last), loss_fn, X, y)
    assert verdict.worst is not None
    assert verdict.worst.finding.id == "loss_mismatch"
    assert said in (verdict.cause or "")


@pytest.mark.parametrize(
    ("last", "loss_fn"),
    [
        (nn.Identity(), functional.cross_entropy),
        (nn.LogSoftmax(1), lambda p, y: functional.kl_div(p, y, reduction="batchmean")),
        (nn.Softmax(1), functional.mse_loss),
    ],
)
def test_such_targets_under_a_loss_that_expects_them_are_healthy(
    tmp_path: Path, last: nn.Module, loss_fn: Loss
) -> None:
    assert verdict_of(tmp_path / "run", net(2, last), loss_fn, X, SHARES).level == "healthy"


@pytest.mark.parametrize("loss_fn", [functional.binary_cross_entropy_with_logits, functional.cross_entropy])
def test_binary_and_one_hot_labels_that_come_sorted_are_found(tmp_path: Path, loss_fn: Loss) -> None:
    model = net(1 if loss_fn is functional.binary_cross_entropy_with_logits else 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=Config(worker="thread", quiet=True)) as monitor:
        for step in range(40):
            positive = torch.full((32, 1), float(step // 5 % 2))
            y = (
                positive
                if loss_fn is functional.binary_cross_entropy_with_logits
                else torch.cat((positive, 1 - positive), 1)
            )
            optimizer.zero_grad()
            loss = loss_fn(model(torch.randn(32, 4)), y)
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    with gv.open_run(monitor.run_path) as run:
        assert "data_order" in {finding.id for finding in run.findings}


def test_a_root_of_zero_is_named_although_the_first_step_was_not_inspected(tmp_path: Path) -> None:
    """As under `gradvitals run`, which meets the optimizer at its first step."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "net = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.01)\n"
        "for _ in range(20):\n"
        "    x = torch.randn(8, 4)\n"
        "    other = torch.cat((x[:1], torch.randn(7, 4)))\n"
        "    loss = torch.sqrt((net(x) - net(other)).square().sum(1)).mean()\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    result = CliRunner().invoke(main, ["run", "--quiet", "--out", str(tmp_path / "run"), str(script)])
    assert result.exit_code == 0, result.output
    with gv.open_run(tmp_path / "run") as run:
        verdict = run.verdict
    assert "square root" in (verdict.cause or "")
    assert (verdict.fix.text if verdict.fix else "").startswith("Add a small epsilon")


class Tagger(nn.Module):
    """Scores for every token of a text."""

    def __init__(self, transposed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out, self.transposed = nn.Embedding(6, 8), nn.Linear(8, 6), transposed

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns scores of shape (texts, classes, tokens)."""
        scores: Tensor = self.out(torch.tanh(self.embed(tokens)))
        return scores.transpose(1, 2) if self.transposed else scores.view(len(tokens), 6, -1)


TOKENS = torch.randint(1, 6, (8, 12), generator=torch.Generator().manual_seed(2))
PADDED = TOKENS * (torch.arange(12) < 5)
TAGS = TOKENS % 3


def negative(p: Tensor, y: Tensor) -> Tensor:
    return -functional.mse_loss(p, y)


def cut(p: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(p.argmax(1).float(), y.float()).requires_grad_()


@pytest.mark.parametrize(
    ("model", "loss_fn", "x", "y", "finding", "said"),
    [
        (net(4), functional.binary_cross_entropy_with_logits, X, 255 * torch.rand(32, 4), "loss_mismatch", "0 to 1"),
        (Tagger(transposed=False), functional.cross_entropy, TOKENS, TAGS, "loss_mismatch", "reshape"),
        (
            Tagger(),
            functional.cross_entropy,
            PADDED,
            3 * (PADDED > 0) + TAGS * (PADDED > 0),
            "loss_mismatch",
            "padding",
        ),
        (net(1), negative, X, NUMBERS, "loss_mismatch", "minus"),
        (
            net(1),
            lambda p, y: functional.l1_loss(torch.tanh(p).squeeze(1), 50 * y[:, 0]),
            X,
            NUMBERS,
            "loss_mismatch",
            "Tanh",
        ),
        (net(2), cut, X, LABELS, "loss_unreached", "no graph"),
    ],
)
def test_the_verdict_names_a_loss_that_cannot_teach(
    tmp_path: Path, model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, finding: str, said: str
) -> None:
    verdict = verdict_of(tmp_path / "run", model, loss_fn, x, y)
    assert verdict.worst is not None
    assert verdict.worst.finding.id == finding
    assert said in (verdict.cause or "")


@pytest.mark.parametrize(
    ("model", "loss_fn", "x", "y"),
    [
        (Tagger(), functional.cross_entropy, TOKENS, TAGS),
        (Tagger(), lambda p, y: functional.cross_entropy(p, y, ignore_index=0), PADDED, 3 * (PADDED > 0)),
        (net(1), lambda p, y: -(-0.5 * (p - y).square()).mean(), X, NUMBERS),  # a log-likelihood
        (net(1), lambda p, y: -functional.logsigmoid(p * y).mean(), X, NUMBERS),
    ],
)
def test_what_only_resembles_such_a_loss_is_healthy(
    tmp_path: Path, model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor
) -> None:
    assert verdict_of(tmp_path / "run", model, loss_fn, x, y).level == "healthy"


def test_a_model_left_in_evaluation_mode_after_the_first_epoch_is_found(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = Config(worker="thread", quiet=True, tensor_every=10, detail_every=10)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=config) as monitor:
        for number in range(90):
            if number == 20:
                model.eval()
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(X), LABELS)
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    with gv.open_run(monitor.run_path) as run:
        worst = run.verdict.worst
    assert worst is not None
    assert worst.finding.id == "layer_modes"
    assert worst.finding.first_step >= 20


def test_dead_units_stay_a_finding_until_they_are_seen_alive(tmp_path: Path) -> None:
    """Activations are read at few steps; between them, and when the run ends, what was found still holds."""
    model = net(2)
    with torch.no_grad():
        model[0].bias.fill_(-50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=Config(worker="thread", quiet=True)) as monitor:
        for step in range(410):
            if step == 220:
                with torch.no_grad():
                    model[0].bias.zero_()
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(X), LABELS)
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
            if step == 199:
                before = monitor.verdict
    with gv.open_run(monitor.run_path) as run:
        (found,) = (finding for finding in run.findings if finding.id == "dead_units")
    assert before.worst is not None
    assert before.worst.finding.id == "dead_units"
    assert {item.finding.id for item in before.ranked if item.is_open} - {"dead_units"} == {
        item.finding.id for item in before.consequences() if item.is_open
    }
    assert found.last_step is not None


def test_a_rate_that_is_far_too_high_explains_everything_up_to_nan(tmp_path: Path) -> None:
    model = net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    verdict = verdict_of(tmp_path / "run", model, functional.mse_loss, X, NUMBERS, optimizer, steps=60)
    assert verdict.worst is not None
    assert verdict.worst.finding.id == "lr_too_high"
    assert {"loss_nonfinite", "nonfinite"} <= {item.finding.id for item in verdict.consequences()}
    assert all(item in verdict.consequences() for item in verdict.ranked[1:] if item.is_open)


class Stack(nn.Module):
    """Two layers in a row, kept in a list of the given kind."""

    def __init__(self, kind: Callable[[list[nn.Module]], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(4, 8), kind([nn.Linear(8, 8), nn.Linear(8, 2)])

    def forward(self, x: Tensor) -> Tensor:
        """Returns two scores."""
        x = torch.relu(self.first(x))
        for layer in self.layers:  # type: ignore[attr-defined]
            x = torch.tanh(layer(x))
        return 3 * x


def alike(model: nn.Sequential, value: float, *, everywhere: bool = False) -> nn.Sequential:
    for weight in model.parameters() if everywhere else (model[0].weight,):
        nn.init.constant_(weight, value)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize(
    ("model", "finding"),
    [
        (Stack(list), "hidden_layers"),
        (Stack(nn.ModuleList), None),
        (Stack(lambda layers: [layer.requires_grad_(False) for layer in layers]), None),
        (alike(net(2), 0.1), "equal_units"),
        (alike(net(2), 0.0), None),
        (alike(net(2), 0.0, everywhere=True), "equal_units"),
    ],
)
def test_layers_outside_the_model_and_units_alike_are_found(
    tmp_path: Path, model: nn.Module, finding: str | None
) -> None:
    verdict = verdict_of(tmp_path / "run", model, functional.cross_entropy, X, LABELS)
    ids = {item.finding.id for item in verdict.ranked}
    assert ids & {"hidden_layers", "equal_units"} == ({finding} if finding else set())


def test_a_hidden_model_that_another_optimizer_trains_is_no_finding(tmp_path: Path) -> None:
    """As in a GAN whose generator keeps its critic in a tuple, so as not to own it."""
    model, critic = net(2), nn.Linear(2, 1)
    model.critic = (critic,)  # type: ignore[assignment]
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, critic))
    with gv.watch(model, optimizer, run=tmp_path / "run", config=Config(worker="thread", quiet=True)) as monitor:
        for _ in range(20):
            loss = critic(model(X)).square().mean()
            for each in (optimizer, other):
                each.zero_grad()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
            other.step()
    with gv.open_run(monitor.run_path) as run:
        assert "hidden_layers" not in {finding.id for finding in run.findings}
