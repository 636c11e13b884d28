"""The cost of variance reduction is measured whole on a tiny shape. No test looks at a time of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from experiments.vrgd import cost
from experiments.vrgd.__main__ import main
from experiments.vrgd.cost import (
    Contender,
    StepCost,
    bytes_per_parameter,
    copy_bandwidth,
    format_cost,
    run_compiled,
    run_cost,
    time_collection,
)
from gradvitals import bench

CPU = torch.device("cpu")
SIZES = [torch.Size((16, 16)), torch.Size((16,))]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(
        bench.gpt, n_layer=1, d_model=8, n_head=2, micro_batch_size=2, vocab_size=11, context=4, tied=False,
        bf16=False, num_micro_batches=8,
    )  # fmt: skip
    monkeypatch.setitem(cost.SHAPES, "transformer", small)
    monkeypatch.setitem(cost.COPY_MEGABYTES, "cpu", 1)
    monkeypatch.setitem(cost.COLLECTION_ROUNDS, "cpu", 2)


def test_everything_is_measured_and_shown(tiny: None) -> None:
    result = run_cost("cpu", rounds=2, compiled=False, ranks=False)
    assert json.loads(json.dumps(result, allow_nan=False)) == json.loads(json.dumps(result))
    assert list(result["steps"]) == ["adamw", "momentum", "lamb"]
    for step in result["steps"].values():
        assert 0 < step["ratio_low"] <= step["ratio"] <= step["ratio_high"]
        base, twin = step["floor_ms"]
        assert twin / base == pytest.approx(step["floor_bytes"][1] / step["floor_bytes"][0])
    text = format_cost(result)
    for word in ("adamw", "momentum, compiled", "lamb", "VR / floor", "not asked for", "collecting parts", "VR keeps"):
        assert word in text


def test_the_bytes_an_optimizer_keeps_are_counted() -> None:
    kept = {name: step["persistent_bytes"] for name, step in StepCost(SIZES, CPU).run_eager(1).items()}
    # Momentum, and the summed squared deviations; two moments, the deviations, and the averaged factors; and a number
    # a tensor that counts steps.
    assert kept["momentum"] == pytest.approx([4, 8])
    assert kept["lamb"] == pytest.approx([8, 16], abs=0.1)
    assert kept["adamw"] == pytest.approx([8, 16], abs=0.1)


def test_a_twin_gets_eight_parts_and_the_random_tensors_stay_as_they_are() -> None:
    measured = StepCost(SIZES, CPU, ["momentum"])
    base, twin = measured.pairs["momentum"]
    before = [noise.clone() for noise in measured._noises[0]]
    parameters = [parameter.detach().clone() for parameter in twin.parameters]
    measured.run_eager(1)
    assert twin.optimizer.last_num_parts == 8
    assert all(map(torch.equal, measured._noises[0], before))
    assert not any(map(torch.equal, twin.parameters, parameters))
    assert base.parameters[0].grad is None


def test_ratios_are_taken_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def drifting(
        self: Contender, noises: Sequence[Sequence[Tensor]], step: Callable[[], object]
    ) -> tuple[float, float]:
        nonlocal calls
        calls += 1
        level = 2.0 ** ((calls - 1) // 2)  # a machine that gets twice as slow from round to round
        return level * (1.5 if self.num_parts == 8 else 1.0), 0.1

    measured = StepCost(SIZES, CPU, ["momentum"])
    monkeypatch.setattr(Contender, "time", drifting)
    found = measured.run_eager(5)["momentum"]
    assert [found[name] for name in ("ratio", "ratio_low", "ratio_high")] == pytest.approx([1.5] * 3)


def test_collection_is_compared_with_the_base_before_and_after_it(monkeypatch: pytest.MonkeyPatch, tiny: None) -> None:
    training = cost.SHAPES["transformer"](CPU)
    monkeypatch.setattr(cost, "_forward_and_backward", lambda which, number: _step(which, which is training))
    found = time_collection(training, lambda: cost.SHAPES["transformer"](CPU), 3)
    assert found["ratio"] == pytest.approx(1.04)
    assert found["again"]["ratio"] == pytest.approx(1.0)
    assert found["base_ms"] == pytest.approx(1000)


def _step(training: bench.Training, is_base: bool) -> float:
    for inputs, targets in training.batches[0]:
        training.loss(inputs, targets).backward()
    return 1.0 if is_base else 1.04


def test_a_step_that_cannot_be_compiled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: Callable[[], object]) -> Callable[[], object]:
        raise RuntimeError("no compiler today\nand a long trace")

    monkeypatch.setattr(torch, "compile", broken)
    found = StepCost(SIZES, CPU, ["lamb"]).run_compiled("lamb", 2)
    assert found == {"skipped": "RuntimeError: no compiler today"}


def test_a_compiled_step_is_timed_beside_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda step: step)
    found = StepCost(SIZES, CPU, ["adamw"]).run_compiled("adamw", 2)
    assert found["ratio"] > 0
    assert len(found["compile_seconds"]) == 2


def test_compilation_is_not_begun_without_time_left() -> None:
    found = run_compiled(SIZES, CPU, ["adamw", "lamb"], 2, seconds=0.0)
    assert set(found) == {"adamw", "lamb"}
    assert all("no time left" in result["skipped"] for result in found.values())


def test_a_copy_counts_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(cost.time, "perf_counter", lambda: next(ticks))
    assert copy_bandwidth(CPU, 3) == pytest.approx(2 * 3 * 2**20)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_spawn")
def test_ranks_send_twice_as_much_and_16_bits_halve_it() -> None:
    assert bytes_per_parameter() == {
        "base": 4.0,
        "base, 16-bit hook": 2.0,
        "use_ranks": 8.0,
        "use_ranks, 16-bit hook": 6.0,
        "use_ranks, 16-bit hook, 16-bit moments": 4.0,
    }


def test_the_command(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "bytes_per_parameter", lambda: {"base": 4.0, "use_ranks": 8.0})
    options = ["cost", "--device", "cpu", "--rounds", "1", "--no-compile"]
    done = CliRunner().invoke(main, options)
    assert done.exit_code == 0, done.output
    assert "| use_ranks" in done.output
    with pytest.raises(ValueError, match="expected one of"):
        run_cost("cpu", "gpt-5")
