"""A step that is skipped changes nothing, bit for bit: as if the batch had never been there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from guarded_kinds import ACT, BAD, DEVICE, HOST, ON_DEVICE, STEPS, never_had_them
from guarded_runs import Run

import gradvitals as gv


@pytest.mark.parametrize("name", HOST)
def test_on_the_host_it_is_as_if_the_batch_had_never_been_there(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizers": HOST[name], "parts": 8 if name == "vr_adamw" else 1}
    bad = {step * settings["parts"]: kind for step, kind in BAD.items()}
    guarded = Run(tmp_path / "run", ACT, bad=bad, **settings).train(range(STEPS)).close()
    assert sorted(set(guarded.kinds())) == [("skip", step) for step in BAD]
    assert guarded.guard.step == STEPS - len(BAD)
    assert guarded.all_bits() == never_had_them(BAD, **settings).all_bits()


@pytest.mark.parametrize("name", DEVICE)
def test_on_the_device_it_is_as_if_the_batch_had_never_been_there(name: str, tmp_path: Path) -> None:
    guarded = Run(tmp_path / "run", ON_DEVICE, optimizers=DEVICE[name], bad=BAD).train(range(STEPS)).close()
    assert guarded.kinds() == [("skip", step) for step in BAD]
    assert guarded.guard.step == STEPS - len(BAD)
    assert guarded.all_bits() == never_had_them(BAD, optimizers=DEVICE[name]).all_bits()


def test_the_device_decides_at_every_step_but_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    decide = gv.guard.actions.DeviceCheck.skips
    monkeypatch.setattr(
        gv.guard.actions.DeviceCheck, "skips", lambda self, *args: asked.append(1) or decide(self, *args)
    )
    Run(tmp_path / "run", ON_DEVICE, optimizers=DEVICE["adamw"]).train(range(10)).close()
    assert len(asked) >= 9
