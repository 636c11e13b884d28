"""Readings are thinned to stay within the budget, and stay thinned."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import gradvitals as gv
from gradvitals.collect.schedule import ReadSchedule


def run(schedule: ReadSchedule, steps: int, *, step_seconds: float, norm_seconds: float, pause_at: int = -1) -> None:
    for step in range(steps):
        due = schedule.due(step)
        cost = norm_seconds * (due.norm + 4 * due.full)
        wall = 60.0 if step == pause_at else step_seconds
        schedule.account(full=due.full, wall_seconds=wall, cost_seconds=cost, paid_norm=due.norm)


def test_a_norm_that_costs_five_percent_is_read_every_fifth_step_for_good() -> None:
    schedule = ReadSchedule(gv.Config(overhead_budget=0.02), audits=False, adapts=True)
    for steps in (60, 110, 510, 1100):
        run(schedule, steps, step_seconds=0.01, norm_seconds=0.00049)
        assert schedule.norm_every == 5


def test_a_pause_for_an_evaluation_does_not_count_as_step_time() -> None:
    schedule = ReadSchedule(gv.Config(overhead_budget=0.02), audits=False, adapts=True)
    run(schedule, 200, step_seconds=0.01, norm_seconds=0.00049, pause_at=30)
    assert schedule.norm_every == 5


def test_cheap_norms_are_read_at_every_step() -> None:
    schedule = ReadSchedule(gv.Config(overhead_budget=0.02), audits=False, adapts=True)
    run(schedule, 600, step_seconds=0.01, norm_seconds=0.00005)
    assert (schedule.every, schedule.norm_every) == (50, 1)


def test_the_finding_that_readings_are_thinned_tells_what_they_cost(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = gv.Config(quiet=True, overhead_budget=1e-4)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=config) as monitor:
        for _ in range(60):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    thinned = next(finding for finding in monitor.findings if finding.id == "readings_thinned")
    assert thinned.evidence["overhead"] > thinned.evidence["budget"]
