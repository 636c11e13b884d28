"""What strangers get wrong in data, wiring and loops, on real models: each bug beside a version that is fine."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional

import gradvitals as gv
from gradvitals.cli import main
from gradvitals.config import Config

Batch = tuple[Tensor, ...]


def verdict_of(path: Path, model: nn.Module, loss_of: Callable[[int], Tensor], steps: int = 40) -> gv.Verdict:
    """Trains on a loss that may depend on the step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=path, config=Config(worker="thread", quiet=True)) as monitor:
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(step)
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    with gv.open_run(monitor.run_path) as run:
        return run.verdict


def ids(verdict: gv.Verdict, *, notes: bool = False) -> set[str]:
    return {item.finding.id for item in verdict.ranked if notes or item.weight != "info"}


def cause_of(verdict: gv.Verdict, finding: str) -> str:
    return next(str(f.causes[0]) for f in verdict.findings if f.id == finding)


def net(*sizes: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), act())][:-1])


def rows(count: int = 400, columns: int = 4) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("again", "found"), [(True, True), (False, False)])
def test_the_same_few_samples_drawn_anew_at_every_step_are_found(tmp_path: Path, again: bool, found: bool) -> None:
    model, data = net(4, 8, 1), rows()

    def loss_of(step: int) -> Tensor:
        chosen = torch.randperm(400, generator=torch.Generator().manual_seed(0 if again else step))[:32]
        loss: Tensor = (model(data[chosen]) - data[chosen, :1] * data[chosen, 1:2]).square().mean()
        return loss

    assert ("data_order" in ids(verdict_of(tmp_path / "run", model, loss_of))) == found


def test_all_data_at_every_step_is_no_small_part_of_it(tmp_path: Path) -> None:
    model, data, plotted = net(4, 8, 1), rows(40), rows(4000)
    verdict = verdict_of(tmp_path / "run", model, lambda _: (model(data) - data[:, :1].sin()).square().mean())
    assert len(plotted) > 4 * len(data)
    assert "data_order" not in ids(verdict)


@pytest.mark.parametrize(("is_sorted", "found"), [(True, True), (False, False)])
def test_data_sorted_by_the_target_of_a_regression_is_found(tmp_path: Path, is_sorted: bool, found: bool) -> None:
    model, data = net(4, 8, 1), rows(800)
    target = data[:, :1] * 2 + data[:, 1:2]
    order = target[:, 0].argsort() if is_sorted else torch.arange(800)
    batches = order.split(20)
    verdict = verdict_of(
        tmp_path / "run", model, lambda step: functional.mse_loss(model(data[batches[step]]), target[batches[step]])
    )
    assert ("data_order" in ids(verdict)) == found


def test_a_column_of_the_inputs_that_is_the_target_is_found(tmp_path: Path) -> None:
    model, data = net(4, 8, 1), rows()
    data[:, 3] = (data[:, 0] + 0.5 * rows(400, 1)[:, 0] > 0).float()
    loss_of = lambda _: functional.binary_cross_entropy_with_logits(model(data)[:, 0], data[:, 3])  # noqa: E731
    assert "copy" in cause_of(verdict_of(tmp_path / "run", model, loss_of), "bad_inputs")
    data[:, 3] = 0.9 * data[:, 3] + 0.3 * rows(400, 1)[:, 0]
    target = (data[:, 0] > 0).float()
    loss_of = lambda _: functional.binary_cross_entropy_with_logits(model(data)[:, 0], target)  # noqa: E731
    assert "bad_inputs" not in ids(verdict_of(tmp_path / "fine", model, loss_of), notes=True)


@pytest.mark.parametrize(("viewed", "found"), [(True, True), (False, False)])
def test_channels_moved_by_a_view_are_found(tmp_path: Path, viewed: bool, found: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    images, labels = torch.randn(16, 8, 8, 3), torch.arange(16) % 2

    def loss_of(_: int) -> Tensor:
        batch = images.clone()
        batch = batch.view(16, 3, 8, 8) if viewed else batch.permute(0, 3, 1, 2)
        return functional.cross_entropy(model(batch), labels)

    assert ("bad_inputs" in ids(verdict_of(tmp_path / "run", model, loss_of))) == found


class Attention(nn.Module):
    """Reads ids by attention, written out, and scores each place, or all together."""

    def __init__(self, *, positions: bool = True, causal: bool = True, pooled: bool = False, dim: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.out = nn.Embedding(9, 16), nn.Linear(16, 48), nn.Linear(16, 9)
        self.where = nn.Embedding(6, 16)
        self.positions, self.causal, self.pooled, self.dim = positions, causal, pooled, dim

    def forward(self, x: Tensor) -> Tensor:
        """Returns scores."""
        h = self.embed(x) + self.where(torch.arange(x.shape[1])) if self.positions else self.embed(x)
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 4
        if self.causal:
            scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).tril() == 0, -1e9)
        h = scores.softmax(self.dim) @ v
        scored: Tensor = self.out(h.mean(1) if self.pooled else h)
        return scored


class Masked(Attention):
    """The same by torch's own attention, with a mask of its scores."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(positions=False)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        """Returns scores."""
        q, k, v = self.qkv(self.embed(x)).unsqueeze(1).chunk(3, -1)
        scored: Tensor = self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)[:, 0])
        return scored


PLACES = torch.arange(6.0)


@pytest.mark.parametrize(
    ("mask", "noted"),
    [
        (-(PLACES[:, None] - PLACES).abs(), False),  # ALiBi
        (torch.full((6, 6), -torch.inf).triu(1), False),
        (torch.where(PLACES < 5, 0.0, -torch.inf).expand(6, 6), True),  # padding
    ],
)
def test_attention_knows_the_order_from_a_mask_that_differs_between_places(
    tmp_path: Path, mask: Tensor, noted: bool
) -> None:
    model = Masked(mask)
    verdict = verdict_of(
        tmp_path / "run", model, lambda _: functional.cross_entropy(model(TEXTS[:, :-1]).mean(1), TEXTS[:, 0])
    )
    assert ("layer_wiring" in ids(verdict, notes=True)) == noted


TEXTS = torch.randint(0, 9, (48, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"causal": False}, "causal mask"),
        ({"positions": False, "causal": False, "pooled": True}, "position"),
        ({"causal": False, "pooled": True, "dim": 0}, "samples of a batch"),
        ({}, ""),
        ({"causal": False, "pooled": True}, ""),
    ],
)
def test_attention_that_sees_too_much_or_too_little_is_found(
    tmp_path: Path, options: dict[str, bool], said: str
) -> None:
    model = Attention(**options)
    labels = TEXTS[:, 0] if model.pooled else TEXTS[:, 1:]
    verdict = verdict_of(
        tmp_path / "run",
        model,
        lambda _: functional.cross_entropy(model(TEXTS[:, :-1]).reshape(-1, 9), labels.reshape(-1)),
    )
    if said:
        assert said in cause_of(verdict, "layer_wiring")
    else:
        assert "layer_wiring" not in ids(verdict, notes=True)


@pytest.mark.parametrize(("units", "found"), [(2, True), (32, False)])
def test_too_few_units_are_the_cause_if_much_of_the_loss_is_left(tmp_path: Path, units: int, found: bool) -> None:
    model, data = net(4, units, units, 1), rows()
    target = (4 * data[:, :1]).sin() + data[:, 1:2] * data[:, 2:3]
    verdict = verdict_of(tmp_path / "run", model, lambda _: functional.mse_loss(model(data), target), steps=400)
    assert ("layer_wiring" in ids(verdict)) == found


@pytest.mark.parametrize(("factor", "found"), [(3.0, True), (1e-5, False)])
def test_a_penalty_that_outweighs_the_error_is_found(tmp_path: Path, factor: float, found: bool) -> None:
    model, data = net(4, 16, 1), rows()

    def loss_of(_: int) -> Tensor:
        penalty = sum(weight.square().sum() for weight in model.parameters())
        return functional.mse_loss(model(data), data[:, :1] + data[:, 1:2]) + factor * torch.as_tensor(penalty)

    verdict = verdict_of(tmp_path / "run", model, loss_of, steps=200)
    assert ("outweighed" in ids(verdict)) == found
    assert not found or "penalty on the weights" in cause_of(verdict, "outweighed")


@pytest.mark.parametrize(
    ("sign", "word", "weights", "options", "noted"),
    [
        ("", "reward", "reward - reward.mean()", "", True),
        ("-", "reward", "reward - reward.mean()", "", False),
        ("", "cost", "cost - cost.mean()", "", False),
        ("", "reward", "reward - reward.mean()", ", maximize=True", False),
        ("", "reward", "-(reward - reward.mean())", "", True),  # right, but the graph does not show it
    ],
)
def test_the_sign_of_a_policys_loss_is_a_note(
    tmp_path: Path, sign: str, word: str, weights: str, options: str, noted: bool
) -> None:
    """Without a minus the best actions get rarer, unless the weights are costs or have it."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        torch.manual_seed(0)
        policy = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.01{options})
        for _ in range(60):
            state = torch.randn(64, 3)
            choice = torch.distributions.Categorical(logits=policy(state))
            action = choice.sample()
            {word} = state[:, 0] * (2 * action - 1)
            loss = {sign}(choice.log_prob(action) * ({weights})).mean() - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """)
    )
    assert ("loss_mismatch" in ran(tmp_path, script, notes=True)) == noted
    with gv.open_run(tmp_path / "run") as run:
        assert "loss_mismatch" not in ids(run.verdict)


def test_an_error_with_a_minus_is_right_if_the_optimizer_maximizes(tmp_path: Path) -> None:
    model, data = net(4, 8, 1), rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, maximize=True)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=Config(worker="thread", quiet=True)) as monitor:
        for _ in range(40):
            optimizer.zero_grad()
            (-functional.mse_loss(model(data), data[:, :1])).backward()
            optimizer.step()
    assert "loss_mismatch" not in {finding.id for finding in monitor.findings}


def ran(folder: Path, script: Path, *, notes: bool = False) -> set[str]:
    """Returns the ids of what `gradvitals run` found in a script."""
    if "torch._dynamo.utils" in sys.modules:  # what other tests have compiled is not compiled in this program
        sys.modules["torch._dynamo.utils"].counters.clear()
    result = CliRunner().invoke(main, ["run", "--quiet", "--out", str(folder / "run"), str(script)])
    assert result.exit_code == 0, result.output
    with gv.open_run(folder / "run") as run:
        return ids(run.verdict, notes=notes)


@pytest.mark.parametrize("broken", ["x[3, 5] = math.nan", "x[:, 1] = math.inf", "y[7] = math.nan"])
@pytest.mark.parametrize("is_image", [False, True])
def test_a_broken_batch_is_distinguished_from_a_model_that_overflows(
    tmp_path: Path, broken: str, is_image: bool
) -> None:
    layers = "nn.Unflatten(1, (2, 2, 4)), nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(12, 1)"
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import math, torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential({layers if is_image else "nn.Linear(16, 1)"})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(60):
            x = torch.randn(32, 16)
            y = x[:, :1].clone()
            if step == 43:
                {broken}
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        """)
    )
    assert "bad_inputs" in ran(tmp_path, script)
    with gv.open_run(tmp_path / "run") as run:
        assert f"{'targets' if 'y[' in broken else 'inputs'} of the batch of step 43" in run.verdict.headline
        if broken.startswith("x[3"):
            assert (
                f"contain 1 NaN or infinite value, first in sample 3, column {0 if is_image else 5}"
                in run.verdict.headline
            )


@pytest.mark.parametrize(
    ("shape", "layer", "broken", "said"),
    [
        ((32, 6, 20), "nn.Conv1d(6, 1, 20)", "x[3, 2, 17]", "1 NaN or infinite value, first in sample 3, column 2"),
        ((32, 6, 2, 2, 2), "nn.Conv3d(6, 1, 2)", "x[4, 2, 1, 0, 0]", "first in sample 4, column 2"),
        ((32, 10, 8), "nn.Linear(8, 1)", "x[3, 5, 2]", "1 NaN or infinite value, first in column 2"),
        ((1, 8), "nn.Linear(8, 1)", "x[0, 2]", "1 NaN or infinite value, first in sample 0, column 2"),
    ],
    ids=lambda value: str(value).split("(")[0],
)
def test_the_first_broken_value_is_located(
    tmp_path: Path, shape: tuple[int, ...], layer: str, broken: str, said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import math, torch
        from torch import nn
        torch.manual_seed(0)
        model = {layer}
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(60):
            x = torch.randn{shape}
            y = torch.randn(model(x).shape)
            if step == 43:
                {broken} = math.nan
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        """)
    )
    assert "bad_inputs" in ran(tmp_path, script)
    with gv.open_run(tmp_path / "run") as run:
        assert said in run.verdict.headline
        assert "Some samples" in str(run.verdict.cause)


def test_a_broken_batch_under_checkpointing_is_not_inspected(tmp_path: Path) -> None:
    """Reading what a checkpoint saved would run its forward pass again, with other random numbers."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import math, torch
        from torch import nn
        from torch.utils.checkpoint import checkpoint
        torch.manual_seed(0)
        first, last = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.Linear(8, 1)
        optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.01)
        for step in range(60):
            x = torch.full((4, 8), math.nan) if step == 43 else torch.ones(4, 8)
            loss = last(checkpoint(first, x, use_reentrant=False, preserve_rng_state=False)).square().mean()
            loss.backward()
            if step != 43:
                optimizer.step()
            optimizer.zero_grad()
        print("END", float(torch.rand(())), float(last.weight.sum()))
        """)
    )
    bare = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    watched = [sys.executable, "-m", "gradvitals", "run", "--quiet", "--out", tmp_path / "run", script]
    assert "END" in bare
    assert subprocess.run(watched, capture_output=True, text=True, check=True).stdout == bare


def test_a_forward_pass_that_fails_on_good_data_is_distinguished_from_a_broken_batch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(60):
            x = torch.randn(32, 16)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            (loss / (step != 43)).backward()
            optimizer.step()
        """)
    )
    assert "loss_nonfinite" in ran(tmp_path, script)
    with gv.open_run(tmp_path / "run") as run:
        assert "The inputs of the batch are finite" in str(run.verdict.cause)


EVALUATED = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout({p}), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x = torch.randn(64, 4)
for epoch in range(4):
    for _ in range(10):
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
        {each}
    {before}
    with torch.no_grad():
        model(x)
    model.train()
"""


@pytest.mark.parametrize(
    ("p", "before", "each", "found"),
    [
        (0.5, "pass", "pass", True),
        (0.5, "model.eval()", "pass", False),
        (0.0, "pass", "pass", False),
        (0.5, "pass", "torch.no_grad()(model)(x)", False),  # a method that does so at every step
    ],
)
def test_an_evaluation_in_training_mode_is_found(tmp_path: Path, p: float, before: str, each: str, found: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(EVALUATED.format(p=p, before=before, each=each))
    assert ("evaluated_in_training_mode" in ran(tmp_path, script)) == found


@pytest.mark.parametrize(
    ("at_epochs", "evaluate", "found"),
    [
        ("range(4)", "evaluate(x.split(16))", True),
        ("range(4)", "[evaluate([batch]) for batch in x.split(2)]", True),
        ("range(4)", "evaluate([x] * 10)", False),  # Monte Carlo dropout
        ("range(4)", "[evaluate([x]) for _ in range(10)]", False),
        ("[0]", "evaluate(x.split(32))", False),  # a dry run
        ("range(4)", "torch.optim.swa_utils.update_bn(x.split(16), model)", False),
    ],
)
def test_evaluations_in_training_mode_are_told_from_other_calls(
    tmp_path: Path, at_epochs: str, evaluate: str, found: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        x = torch.randn(64, 4)

        @torch.no_grad()
        def evaluate(batches):
            return [model(batch) for batch in batches]

        for epoch in range(4):
            for _ in range(10):
                optimizer.zero_grad()
                (model(x) - x[:, :1]).square().mean().backward()
                optimizer.step()
            if epoch in {at_epochs}:
                {evaluate}
        """)
    )
    assert ("evaluated_in_training_mode" in ran(tmp_path, script)) == found


@pytest.mark.parametrize(
    ("settings", "metric", "found"),
    [
        ("mode='max', patience=1", "loss.item()", True),
        ("mode='min', patience=1", "loss.item()", False),
        ("mode='min', patience=1", "round(200 - 120 * 0.6**epoch) / 200", True),  # an accuracy
        ("mode='min', patience=1", "0.5 + 0.02 * epoch", False),  # validation losses of a model that overfits
        ("mode='min', patience=1", "0.9 - 0.6 * 0.6**epoch", False),
        ("mode='max', patience=math.inf", "loss.item()", False),
    ],
)
@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_plateau_scheduler_in_the_wrong_mode_is_found(
    tmp_path: Path, settings: str, metric: str, found: bool, optimizers: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import math
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        shares = [model.parameters()] if {optimizers} == 1 else [model[0].parameters(), model[2].parameters()]
        optimizers = [torch.optim.SGD(share, lr=0.05 / 10**i) for i, share in enumerate(shares)]
        schedulers = [
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, {settings}) for optimizer in optimizers
        ]
        x = torch.randn(64, 4)
        for epoch in range(12):
            for _ in range(5):
                loss = (model(x) - x[:, :1]).square().mean()
                model.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
            for scheduler in schedulers:
                scheduler.step({metric})
        """)
    )
    assert ("plateau_mode" in ran(tmp_path, script)) == found


@pytest.mark.parametrize(("both", "found"), [(True, True), (False, False)])
def test_an_optimizer_that_also_holds_the_other_model_is_found(tmp_path: Path, both: bool, found: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        torch.manual_seed(0)
        maker, critic = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU())
        held = [*critic.parameters(), *(maker.parameters() if {both} else ())]
        for_critic = torch.optim.SGD(held, lr=0.01)
        for_maker = torch.optim.SGD(maker.parameters(), lr=0.01)
        for _ in range(60):
            for optimizer, sign in ((for_critic, 1), (for_maker, -1)):
                for_critic.zero_grad()
                for_maker.zero_grad()
                (sign * critic(maker(torch.randn(16, 2))).mean() + 0.1 * critic(torch.randn(16, 2)).mean()).backward()
                optimizer.step()
        """)
    )
    assert ("optimizers_overlap" in ran(tmp_path, script)) == found


@pytest.mark.parametrize(("scale", "found"), [(3.0, True), (0.1, False)])
def test_weights_that_saturate_their_units_from_the_start_are_found(tmp_path: Path, scale: float, found: bool) -> None:
    model, data = net(4, 32, 32, 3), rows()
    for weight in [*model.parameters()][:4:2]:
        nn.init.normal_(weight, std=scale)
    labels = (data[:, 0] > 0).long() + (data[:, 1] > 0).long()
    noisy = labels[torch.randperm(400, generator=torch.Generator().manual_seed(0))]
    verdict = verdict_of(tmp_path / "run", model, lambda _: functional.cross_entropy(model(data), noisy), steps=80)
    assert ("saturated_units" in {finding.id for finding in verdict.findings}) == found


def test_betas_in_the_wrong_order_and_an_eps_above_the_gradients_are_found(tmp_path: Path) -> None:
    data, said = rows(), dict[str, str]()
    for name, options in {"betas": {"betas": (0.999, 0.9)}, "eps": {"eps": 1.0}, "fine": {}}.items():
        model = net(4, 8, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **options)  # type: ignore[arg-type]
        config = Config(worker="thread", quiet=True)
        with gv.watch(model, optimizer, run=tmp_path / name, config=config) as monitor:
            for _ in range(20):
                optimizer.zero_grad()
                functional.mse_loss(model(data), data[:, :1]).backward()
                optimizer.step()
        with gv.open_run(monitor.run_path) as run:
            said[name] = {f.id: f.causes[0] for f in run.findings if f.causes}.get("optimizer_settings", "")
    assert "swapped" in said["betas"]
    assert "eps of 1 " in said["eps"]
    assert not said["fine"]


@pytest.mark.parametrize("last", [nn.Dropout(0.5), nn.BatchNorm1d(1)])
def test_dropout_and_batch_norm_after_the_last_layer_are_found(tmp_path: Path, last: nn.Module) -> None:
    model, data = nn.Sequential(net(4, 8, 1), last), rows(64)
    verdict = verdict_of(tmp_path / "run", model, lambda _: functional.mse_loss(model(data), data[:, :1]), steps=16)
    assert "last layer" in cause_of(verdict, "layer_modes")


@pytest.mark.parametrize(("factor", "found"), [(0.1, True), (10.0, False)])
def test_cosines_that_are_multiplied_by_a_small_temperature_are_found(
    tmp_path: Path, factor: float, found: bool
) -> None:
    model, data = net(4, 16, 8), rows(32)

    def loss_of(_: int) -> Tensor:
        one, other = (functional.normalize(model(data + 0.1 * torch.randn_like(data))) for _ in range(2))
        return functional.cross_entropy(factor * one @ other.T, torch.arange(32))

    verdict = verdict_of(tmp_path / "run", model, loss_of, steps=200)
    fixes = [str(fix) for one in verdict.findings for fix in one.fixes]
    assert any("temperature" in fix for fix in fixes) == found


def test_a_loss_that_returns_to_its_start_again_and_again_is_found(tmp_path: Path) -> None:
    """As of a model that is initialized in the loop over epochs."""
    model, data = net(4, 16, 1), rows()
    target, start = data[:, :1] + data[:, 1:2], {name: one.clone() for name, one in model.state_dict().items()}

    def loss_of(step: int) -> Tensor:
        if step % 40 == 0:
            model.load_state_dict(start)
        return functional.mse_loss(model(data), target)

    assert "loss_resets" in ids(verdict_of(tmp_path / "run", model, loss_of, steps=240))


def test_a_layer_that_was_replaced_after_the_optimizer_was_made_is_the_cause(tmp_path: Path) -> None:
    model, data = net(4, 8, 2), rows()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model[2] = nn.Linear(8, 2)
    labels = (data[:, 0] > 0).long()
    with gv.watch(model, optimizer, run=tmp_path / "run", config=Config(worker="thread", quiet=True)) as monitor:
        for _ in range(120):
            optimizer.zero_grad()
            functional.cross_entropy(model(data), labels).backward()
            optimizer.step()
    with gv.open_run(monitor.run_path) as run:
        finding = next(f for f in run.findings if f.id == "dead_tensor")
    assert "replaced" in finding.causes[0]
    assert "120 steps" in finding.title  # the numbers of the end, not of when it was found


def test_gradients_that_are_zeroed_too_rarely_are_not_said_to_be_never_zeroed(tmp_path: Path) -> None:
    model, data = net(4, 8, 1), rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=Config(worker="thread", quiet=True)) as monitor:
        for step in range(80):
            if step % 10 == 0:
                optimizer.zero_grad()
            functional.mse_loss(model(data), data[:, :1]).backward()
            optimizer.step()
    with gv.open_run(monitor.run_path) as run:
        finding = next(f for f in run.findings if f.id == "stale_gradients")
    assert "only every 10" in finding.title
    assert "only every 10 steps" in finding.causes[0]


@pytest.mark.parametrize(("moved", "found"), [(False, True), (True, False)])
def test_scores_of_pixels_that_are_flattened_with_the_channels_in_front_are_found(
    tmp_path: Path, moved: bool, found: bool
) -> None:
    torch.manual_seed(0)
    model, images = nn.Conv2d(1, 3, 3, padding=1), torch.randn(8, 1, 6, 6)
    labels = (images > 0).long().reshape(-1)

    def loss_of(_: int) -> Tensor:
        scores = model(images)
        return functional.cross_entropy((scores.permute(0, 2, 3, 1) if moved else scores).reshape(-1, 3), labels)

    assert ("loss_mismatch" in ids(verdict_of(tmp_path / "run", model, loss_of, steps=16))) == found


class Text(nn.Module):
    """Reads ids with a recurrent layer and uses one of its steps, or the mean over samples."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn, self.out = nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 2)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        """Returns two scores of each text."""
        h = self.rnn(self.embed(x))[0]
        if self.use == "last":
            h = h[:, -1]
        elif self.use == "end":
            h = h[torch.arange(len(x)), (x > 0).sum(1) - 1]
        else:
            h = h.mean(0).mean(0, keepdim=True).expand(len(x), -1)
        scores: Tensor = self.out(h)
        return scores


@pytest.mark.parametrize(("use", "said"), [("last", "padding"), ("batch", "samples of the batch"), ("end", "")])
def test_padding_that_is_read_last_and_a_mean_over_the_batch_are_found(tmp_path: Path, use: str, said: str) -> None:
    texts = torch.cat((1 + torch.randint(8, (32, 3)), torch.zeros(32, 9, dtype=torch.long)), 1)
    labels, model = texts[:, 0] % 2, Text(use)
    verdict = verdict_of(tmp_path / "run", model, lambda _: functional.cross_entropy(model(texts), labels), steps=16)
    if said:
        assert said in cause_of(verdict, "layer_wiring")
    else:
        assert "layer_wiring" not in ids(verdict, notes=True)


@pytest.mark.parametrize(("scale", "found"), [(50.0, True), (1.0, False)])
def test_validation_data_on_another_scale_is_found(tmp_path: Path, scale: float, found: bool) -> None:
    model, data = net(4, 16, 1, act=nn.ReLU), rows()
    target = data[:, :1] - data[:, 1:2]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=Config(worker="thread", quiet=True)) as monitor:
        for step in range(100):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(data[:200]), target[:200])
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
            if step % 20 == 0:
                monitor.observe(functional.mse_loss(model(scale * data[200:]), target[200:]), split="val")
    with gv.open_run(monitor.run_path) as run:
        causes = [finding.causes[0] for finding in run.findings if finding.id == "memorizing"]
    assert any("differs from the training data" in str(cause) for cause in causes) == found
