"""The source "examples" in watched runs: what is kept, when it is silent and why, and that training does not change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from examples_truth import WIDTH, Net, batch, example_parts, mean_square, randomise
from reference import assert_no_errors, signal_and_noise
from torch import Tensor, nn

import gradvitals as gv
from gradvitals.cli.report import report
from gradvitals.errors import ConfigError

NORMS = ("blocks.0.norm.weight", "blocks.1.norm.weight")


class Run:
    """A few steps of a small model with the source on, and what every example gave in each of them."""

    def __init__(self, path: Path, model: nn.Module, *, optimizer: Any = torch.optim.SGD, **config: Any) -> None:
        self.model = model
        self.optimizer = optimizer(model.parameters(), lr=1e-2)
        self.path, self.config = path / "run", {"tensor_every": 1, "quiet": True, "sources": ("examples",), **config}
        self.truth: list[tuple[dict[str, np.ndarray], list[float]]] = []

    def train(
        self,
        steps: int = 4,
        *,
        sizes: Sequence[int] = (5,),
        equal: bool = False,
        batch_size: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        before: Callable[[], None] = lambda: None,
        loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = mean_square,
        know: bool = True,
    ) -> Run:
        config = gv.Config(**self.config)
        self.monitor = gv.watch(self.model, self.optimizer, run=self.path, config=config, batch_size=batch_size)
        weights = [1 / len(sizes) if equal else size / sum(sizes) for size in sizes]
        for step in range(steps):
            batches = [batch(size, seed=100 * step + i) for i, size in enumerate(sizes)]
            if know:
                each = [w / size for w, size in zip(weights, sizes, strict=True) for _ in range(size)]
                self.truth.append((example_parts(self.model, batches, weights), each))
            before()
            for (x, y), weight in zip(batches, weights, strict=True):
                value = weight * loss(self.model, x, y)
                (scaler.scale(value) if scaler else value).backward()
            if scaler:
                scaler.step(self.optimizer)
                scaler.update()
            else:
                self.optimizer.step()
            self.optimizer.zero_grad()
        self.monitor.close()
        assert_no_errors(self.monitor)
        return self

    def expected(self, names: Sequence[str], until: int, *, size: float = 1.0) -> float:
        """Signal over noise of one example, means over the steps taken first; none from before half of them."""
        sums = []
        for parts, weights in self.truth[math.ceil(until / 2) : until + 1]:
            each = np.array([signal_and_noise(parts[name], [size] * len(weights), weights) for name in names])
            # Of several layers each counts the same.
            sums.append(each[0] if len(names) == 1 else (each / each.sum(1, keepdims=True)).sum(0))
        signal, noise = np.mean(sums, axis=0)
        return float(signal / noise)

    def check(self, *, size: float = 1.0, rtol: float = 1e-4) -> None:
        last = len(self.truth) - 1
        with gv.open_run(self.monitor.run_path) as run:
            steps, gsnr = run.series("gsnr", source="examples")
            assert steps.tolist() == list(range(last + 1))
            assert gsnr[-1] == pytest.approx(size * self.expected(NORMS, last, size=size), rel=rtol)
            assert run.batch_sizes("gsnr", source="examples")[1].tolist() == [size] * (last + 1)
            for name in NORMS:
                _, values = run.series("gsnr", tensor=name, source="examples")
                assert values[-1] == pytest.approx(size * self.expected([name], last, size=size), rel=rtol)
            scale, low = (run.series(name, source="examples")[1][-1] for name in ("noise_scale", "gsnr_low"))
            wanted = 1 / self.expected(NORMS, last, size=size) if low > 0 else math.nan
            assert scale == pytest.approx(wanted, rel=rtol, nan_ok=True)

    def reason(self) -> str:
        with gv.open_run(self.monitor.run_path) as run:
            assert "examples" not in run.sources("gsnr")
        told = [f for f in self.monitor.findings if f.evidence.get("about") == "single examples"]
        assert [f.id for f in told] == ["source_unavailable"]
        return told[0].title


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    model = Net(nn.LayerNorm, **options)
    randomise(model)
    return model


def test_the_store_has_tensors_and_what_they_say_together(tmp_path: Path) -> None:
    run = Run(tmp_path, net()).train(8, sizes=(12,))
    run.check()
    with gv.open_run(run.monitor.run_path) as kept:
        assert np.isnan(kept.series("gsnr", tensor="first.weight", source="examples")[1]).all()
        assert np.isfinite(kept.series("gsnr", layer="blocks.0", source="examples")[1]).all()


def test_a_report_says_what_the_noise_scale_is_of(tmp_path: Path) -> None:
    run = Run(tmp_path, net()).train(12, sizes=(16,), know=False)
    result = CliRunner().invoke(report, [str(run.monitor.run_path)])
    assert result.exit_code == 0
    assert "samples, of norm layers (95 %" in result.output


@pytest.mark.parametrize("equal", [False, True], ids=["by size", "equal weights"])
def test_accumulation_takes_all_examples_together(tmp_path: Path, equal: bool) -> None:
    weights = "equal" if equal else "size"
    Run(tmp_path, net(), micro_batch_weights=weights).train(6, sizes=(2, 6, 4), equal=equal).check()


def test_it_stands_beside_the_other_sources(tmp_path: Path) -> None:
    run = Run(tmp_path, net(), optimizer=torch.optim.AdamW, sources=gv.types.SOURCES).train(6, sizes=(4, 4))
    run.check()
    with gv.open_run(run.monitor.run_path) as kept:
        assert set(kept.sources("gsnr")) >= {"microbatch", "adam", "examples"}


def test_a_batch_size_in_other_units_gives_the_noise_scale_in_these(tmp_path: Path) -> None:
    Run(tmp_path, net()).train(6, sizes=(6,), batch_size=24).check(size=4.0)


def test_loss_scale_is_divided_out(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    Run(tmp_path, net()).train(5, sizes=(6,), scaler=scaler).check()


def test_a_batch_that_is_given_up_does_not_count(tmp_path: Path) -> None:
    run = Run(tmp_path, net())

    def give_up() -> None:
        mean_square(run.model, *batch(9, seed=77)).backward()
        for parameter in run.model.parameters():
            parameter.grad.zero_()

    run.train(5, sizes=(6,), before=give_up).check()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_is_the_same_to_the_last_bit(tmp_path: Path, optimizer: Any) -> None:
    weights = []
    for sources in ((), ("examples",)):
        run = Run(tmp_path / str(len(sources)), net(), optimizer=optimizer, sources=sources)
        run.train(6, sizes=(3, 5), know=False)
        weights.append(torch.cat([parameter.detach().ravel() for parameter in run.model.parameters()]))
    assert torch.equal(*weights)


def test_hooks_are_there_only_for_steps_that_are_read(tmp_path: Path) -> None:
    seen = []
    run = Run(tmp_path, net(), tensor_every=5)
    run.train(12, know=False, before=lambda: seen.append(len(run.model.blocks[0].norm._forward_hooks)))
    assert seen == [1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1, 0]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in run.model.modules())


def test_a_state_goes_on_and_one_from_before_is_taken(tmp_path: Path) -> None:
    run = Run(tmp_path, net()).train(4)
    state = run.monitor.state_dict()
    del state["interpreter"]["examples"]
    other = gv.watch(run.model, run.optimizer, run=tmp_path / "other", config=gv.Config(**run.config))
    other.load_state_dict(state)
    other.close()


# -- where it has nothing to say -------------------------------------------------------------------------------------


def test_off_unless_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, net(), sources=gv.Config().sources).train(3, know=False)
    with gv.open_run(run.monitor.run_path) as kept:
        assert "examples" not in kept.sources("gsnr")
    assert any("gv.types.SOURCES" in finding.title for finding in run.monitor.findings)


@pytest.fixture
def dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_model_says_so_once(tmp_path: Path) -> None:
    model = torch.compile(net(), backend="eager")
    assert "torch.compile" in Run(tmp_path, model).train(5, know=False).reason()


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_step_says_so_once(tmp_path: Path) -> None:
    compiled = torch.compile(mean_square, backend="eager")
    assert "torch.compile" in Run(tmp_path, net()).train(5, know=False, loss=compiled).reason()


def test_positions_folded_into_examples_are_noticed(tmp_path: Path) -> None:
    model = net()
    model.run = lambda block, x: block(x.flatten(0, 1)).view_as(x)
    told = Run(tmp_path, model).train(5, sizes=(6,), batch_size=6, know=False).reason()
    assert "24 examples in a step of 6 samples" in told


def test_a_weight_that_is_used_elsewhere_too_is_left_out(tmp_path: Path) -> None:
    model = net()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mean_square(model, x, y) + sum(block.norm.weight.square().sum() for block in model.blocks)

    told = Run(tmp_path, model).train(5, know=False, loss=loss).reason()
    assert "is not the gradient" in told


def test_one_example_is_not_enough(tmp_path: Path) -> None:
    assert "1 example in a step" in Run(tmp_path, net()).train(5, sizes=(1,), know=False).reason()


def test_a_model_without_norm_layers_says_so_once(tmp_path: Path) -> None:
    told = Run(tmp_path, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())).train(5, know=False).reason()
    assert "the model has no LayerNorm, RMSNorm or GroupNorm" in told


def test_a_bad_dimension_is_refused() -> None:
    with pytest.raises(ConfigError, match="example_dim is -1; expected the number of a dimension"):
        gv.Config(example_dim=-1)
