"""What is told to be fine does not belie what was found."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import gradvitals as gv
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Reading


def fine(folder: Path, *findings: Finding) -> set[str]:
    with RunWriter(folder, meta={"facts": {}}) as writer:
        for step in range(100):
            values = {"loss": 2.0 - 0.01 * step, "grad/norm": 1.0, "lr": 0.1, "update/rms": 0.1}
            writer.write(Reading(step=step, time=float(step), values=values, tensors={"grad/norm": np.ones(1)}))
        for finding in findings:
            writer.write(finding)
        writer.commit()
    with gv.open_run(folder) as run:
        return set(run.verdict.checks_passed)


def test_a_net_that_was_destroyed_has_no_calm_loss(tmp_path: Path) -> None:
    calm = {"loss_rising", "loss_spike", "update_spike", "explosion", "warmup_needed"}
    assert calm <= fine(tmp_path / "calm")
    found = Finding(id="lr_too_high", severity="critical", title="the learning rate of 3 is too high", first_step=0)
    told = fine(tmp_path / "destroyed", found)
    assert not calm & told
    assert {"loss_nonfinite", "stale_gradients"} <= told


def test_where_tensors_are_frozen_not_every_tensor_has_a_gradient(tmp_path: Path) -> None:
    found = Finding(id="frozen_weights", severity="info", title="2 of 10 tensors are frozen", first_step=0)
    assert "dead_tensor" in fine(tmp_path / "calm")
    assert "dead_tensor" not in fine(tmp_path / "frozen", found)
