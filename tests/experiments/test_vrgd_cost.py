"""The cost of variance reduction is measured whole on a tiny shape. No test looks at a time of this machine."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from click.testing import CliRunner

from experiments.vrgd import cost
from experiments.vrgd.__main__ import main
from experiments.vrgd.cost import (
    StepCost,
    bytes_per_parameter,
    format_cost,
    run_cost,
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


def test_a_compiled_step_is_timed_beside_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda step: step)
    found = StepCost(SIZES, CPU, ["adamw"]).run_compiled("adamw", 2)
    assert found["ratio"] > 0
    assert len(found["compile_seconds"]) == 2


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
