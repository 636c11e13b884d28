"""Rules about data, model and loss, on real models: what an inspected batch shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradvitals as gv
from gradvitals.config import Config

Loss = Callable[[Tensor, Tensor], Tensor]


def verdict_of(path: Path, model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> gv.Verdict:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = Config(worker="thread", quiet=True)
    with gv.watch(model, optimizer, run=path, config=config) as monitor:
        for _ in range(16):
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
    ],
)
def test_a_setup_that_fits_is_healthy(tmp_path: Path, model: nn.Module, loss_fn: Loss, y: Tensor) -> None:
    assert verdict_of(tmp_path / "run", model, loss_fn, X, y).level == "healthy"


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
    assert found.last_step is not None


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


def alike(model: nn.Sequential, value: float) -> nn.Sequential:
    nn.init.constant_(model[0].weight, value)
    return model


@pytest.mark.parametrize(
    ("model", "finding"),
    [
        (Stack(list), "hidden_layers"),
        (Stack(nn.ModuleList), None),
        (Stack(lambda layers: [layer.requires_grad_(False) for layer in layers]), None),
        (alike(net(2), 0.1), "equal_units"),
        (alike(net(2), 0.0), None),
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
