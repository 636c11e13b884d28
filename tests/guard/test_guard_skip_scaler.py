"""A GradScaler does not count a step that the Guard skipped, and may leave out steps of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from guarded_kinds import ACT, DEVICE, HOST, LATE, ON_DEVICE, STEPS, never_had_them
from guarded_runs import Makes, Run, adamw, bits


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=6)


@pytest.mark.parametrize("name", ["momentum", "adamw", "fused"])
def test_a_scaler_does_not_count_it(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizers": HOST[name]}
    guarded = Run(tmp_path / "run", ACT, bad=LATE, scaler=scaler(), **settings).train(range(STEPS)).close()
    assert guarded.kinds() == [("skip", step) for step in LATE]
    assert guarded.all_bits() == never_had_them(LATE, scaler=scaler(), **settings).all_bits()


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_a_scaler_does_not_count_what_the_device_skipped(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizers": DEVICE[name]}
    guarded = Run(tmp_path / "run", ON_DEVICE, bad=LATE, scaler=scaler(), **settings).train(range(STEPS)).close()
    assert guarded.kinds() == [("skip", step) for step in LATE]
    assert guarded.all_bits() == never_had_them(LATE, scaler=scaler(), **settings).all_bits()


def test_one_scaler_of_two_optimizers_does_not_count_it_either(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizers": HOST["two"]}
    guarded = Run(tmp_path / "run", ACT, bad=LATE, scaler=scaler(), **settings).train(range(STEPS)).close()
    assert guarded.all_bits() == never_had_them(LATE, scaler=scaler(), **settings).all_bits()


@pytest.mark.parametrize(
    ("make", "decide"),
    [
        pytest.param(adamw, "host", id="unfused"),
        pytest.param(DEVICE["adamw"], "host", id="fused"),
        pytest.param(DEVICE["adamw"], "device", id="device"),
    ],
)
def test_what_the_scaler_leaves_out_is_its_own_affair_and_does_not_count(
    make: Makes, decide: str, tmp_path: Path
) -> None:
    bad = {5: "nan", 12: "nan"}
    alone = Run(bad=bad, scaler=scaler(), optimizers=make).train(range(STEPS))
    guard = {**ACT, "decide": decide}
    guarded = Run(tmp_path / "run", guard, bad=bad, scaler=scaler(), optimizers=make).train(range(STEPS)).close()
    assert guarded.parameters() == alone.parameters()
    assert bits(guarded.optimizers[0].state_dict()) == bits(alone.optimizers[0].state_dict())
    assert guarded.scaler is not None
    assert alone.scaler is not None
    assert guarded.scaler.state_dict() == alone.scaler.state_dict()
    assert guarded.kinds() == []
    assert guarded.guard.step == STEPS - len(bad)
