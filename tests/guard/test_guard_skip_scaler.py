"""A GradScaler does not count a step that the Guard skipped, and may leave out steps of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_kinds import ACT, DEVICE, HOST, LATE, ON_DEVICE, STEPS, never_had_them
from guarded_runs import Makes, Run, adamw, bits

import gradvitals as gv


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=6)


@pytest.mark.parametrize(
    ("guard", "make"),
    [
        pytest.param(ACT, HOST["adamw"], id="adamw"),
        pytest.param(ACT, HOST["fused"], id="fused"),
        pytest.param(ACT, HOST["two"], id="two"),
        pytest.param(ON_DEVICE, DEVICE["adamw"], id="adamw on the device"),
        pytest.param(ON_DEVICE, DEVICE["momentum"], id="momentum on the device"),
    ],
)
def test_a_scaler_does_not_count_it(guard: dict[str, Any], make: Makes, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizers": make}
    guarded = Run(tmp_path / "run", guard, bad=LATE, scaler=scaler(), **settings).train(range(STEPS)).close()
    assert sorted(set(guarded.kinds())) == [("skip", step) for step in LATE]
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


def test_norms_of_single_tensors_are_free_of_the_scale(tmp_path: Path) -> None:
    guard = {"clip": gv.guard.Clip(mode="on", method="tensor"), "skip": "off", "rollback": "off"}
    scaled, plain = (
        Run(tmp_path / name, guard, bad={25: "huge"}, scaler=one).train(range(30)).close()
        for name, one in (("scaled", scaler()), ("plain", None))
    )
    assert scaled.kinds() == plain.kinds() != []
    for one, other in zip(scaled.guard.actions, plain.guard.actions, strict=True):
        assert one.before["norm"] == pytest.approx(other.before["norm"], rel=1e-4)
