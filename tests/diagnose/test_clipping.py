"""The limit of clipping against the norms of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from by_hand import Run, healthy_run, only

import gradvitals as gv
from gradvitals.diagnose import RunInfo

ALL = ("clip_saturated", "clip_idle")


def clipped(limit: float, steps: int = 700) -> Run:
    run = healthy_run(steps)
    run.values["clip/max_norm"] = np.full(steps, limit)
    return run


def test_a_limit_under_every_norm() -> None:
    run = clipped(0.01)
    run.info = RunInfo(optimizer="SGD")
    finding = only(run.findings(*ALL))
    assert (finding.id, finding.severity, finding.found_step) == ("clip_saturated", "info", 40)
    proposed = finding.fixes[0].change["max_norm"]
    assert proposed == pytest.approx(np.quantile(run.values["grad/norm"][:40], 0.9), rel=0.1)
    assert f"Clip to {proposed:g} instead of 0.01" in finding.fixes[0]
    run.info = RunInfo(optimizer="AdamW", betas=(0.9, 0.999))  # whose steps are as long without it
    assert run.findings(*ALL) == []


def test_a_limit_far_below_every_norm_is_why_the_loss_is_flat() -> None:
    run = clipped(1e-3, 300)
    run.info = RunInfo(optimizer="SGD")
    run.values["loss"] = np.full(300, 2.3)
    found = {finding.id: finding for finding in run.findings("clip_saturated", "loss_plateau")}
    assert found["loss_plateau"].follows == "clip_saturated"
    assert found["clip_saturated"].severity == "warning"  # as serious as what it does


@pytest.mark.parametrize(("scale", "cause"), [(1.0, "The limit of"), (1e4, "summed instead of averaged")])
def test_a_limit_a_thousand_times_too_low_is_reported_at_once(scale: float, cause: str) -> None:
    run = clipped(1e-5 * scale)
    run.values["grad/norm"] *= scale
    finding = only(run.findings(*ALL))
    assert (finding.id, finding.severity, finding.found_step) == ("clip_saturated", "warning", 20)
    assert cause in finding.causes[0]


def test_gradients_clipped_while_they_carry_the_loss_scale(tmp_path: Path) -> None:
    """A loop that forgets `scaler.unscale_` before it clips makes steps that are far too short."""

    def verdict(*, unscales: bool) -> gv.Verdict:
        torch.manual_seed(0)
        model, x = torch.nn.Linear(4, 1), torch.randn(32, 4)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu")
        config = gv.Config(worker="thread", quiet=True)
        with gv.watch(model, optimizer, run=tmp_path / f"run{unscales}", config=config) as monitor:
            for _ in range(60):
                optimizer.zero_grad()
                loss = (model(x) - x[:, :1]).square().mean()
                scaler.scale(loss).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                monitor.observe(loss)
                scaler.step(optimizer)
                scaler.update()
        with gv.open_run(monitor.run_path) as run:
            return run.verdict

    wrong = verdict(unscales=False)
    assert (wrong.level, wrong.findings[0].id) == ("attention", "clip_saturated")
    assert "before scaler.unscale_(optimizer)" in str(wrong.cause)
    assert verdict(unscales=True).level == "healthy"


def test_a_limit_that_is_never_reached() -> None:
    finding = only(clipped(1000.0).findings(*ALL))
    assert (finding.id, finding.severity, finding.found_step) == ("clip_idle", "info", 500)
    assert "Clip to" in finding.fixes[0]


@pytest.mark.parametrize("limit", [0.15, 0.3, 1.0, np.inf, 0.0])
def test_a_limit_in_reach_is_fine(limit: float) -> None:
    assert clipped(limit).findings(*ALL) == []


def test_a_run_without_clipping_is_fine() -> None:
    assert healthy_run(700).findings(*ALL) == []
