"""The limit of clipping against the norms of a run."""

from __future__ import annotations

import numpy as np
import pytest
from by_hand import Run, healthy_run, only

ALL = ("clip_saturated", "clip_idle")


def clipped(limit: float, steps: int = 700) -> Run:
    run = healthy_run(steps)
    run.values["clip/max_norm"] = np.full(steps, limit)
    return run


def test_a_limit_under_every_norm() -> None:
    run = clipped(0.01)
    finding = only(run.findings(*ALL))
    assert (finding.id, finding.severity, finding.found_step) == ("clip_saturated", "info", 200)
    proposed = finding.evidence["seen"]["max_norm"]
    assert proposed == pytest.approx(np.quantile(run.values["grad/norm"][:200], 0.9), rel=0.1)
    assert f"Clip to {proposed:g}" in finding.fixes[0]


def test_a_limit_a_thousand_times_too_low_is_told_at_once() -> None:
    finding = only(clipped(1e-5).findings(*ALL))
    assert (finding.id, finding.severity, finding.found_step) == ("clip_saturated", "warning", 20)
    assert "summed instead of averaged" in finding.causes[0]
    assert [fix.change for fix in finding.fixes[:2]] == [{}, {"max_norm": finding.evidence["seen"]["max_norm"]}]


def test_a_limit_that_is_never_reached() -> None:
    finding = only(clipped(1000.0).findings(*ALL))
    assert (finding.id, finding.severity, finding.found_step) == ("clip_idle", "info", 500)
    assert "Clip to" in finding.fixes[0]


@pytest.mark.parametrize("limit", [0.15, 0.3, 1.0, np.inf, 0.0])
def test_a_limit_in_reach_is_fine(limit: float) -> None:
    assert clipped(limit).findings(*ALL) == []


def test_a_run_without_clipping_is_fine() -> None:
    assert healthy_run(700).findings(*ALL) == []
