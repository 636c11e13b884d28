"""Staying within a budget: the rule by itself, and a Monitor that finds itself too dear."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Data, assert_no_errors, mlp, regression

import gradvitals as gv
from gradvitals.completion import Completion
from gradvitals.config import LIVE_SOURCES, TENSOR_METRICS
from gradvitals.measure.budget import MAX_EVERY, WARM_UP_STEPS, Budget
from gradvitals.measure.clock import Clock


def fill(budget: Budget, *, every: int, steps: int, wall: float, fixed: float, full: float) -> int:
    for step in range(steps):
        is_full = step % every == 0
        budget.add(full=is_full, wall_seconds=wall, cost_seconds=full if is_full else fixed)
    return budget.propose(every)


def warmed(share: float, every: int) -> Budget:
    budget = Budget(share, every)
    for _ in range(WARM_UP_STEPS):
        budget.add(full=True, wall_seconds=1.0, cost_seconds=1.0)
    return budget


def test_the_first_steps_are_not_counted() -> None:
    assert warmed(0.01, 1).spent == 0


def test_proposes_the_least_cadence_that_fits() -> None:
    # (0.002 + 0.048 / n) / 1 <= 0.01 holds from n = 6 on.
    assert fill(warmed(0.01, 2), every=2, steps=20, wall=1.0, fixed=0.002, full=0.05) == 6


def test_without_plain_steps_all_cost_counts_as_extra() -> None:
    assert fill(warmed(0.01, 1), every=1, steps=10, wall=1.0, fixed=0.0, full=0.05) == 5


def test_never_below_what_the_user_asked_for() -> None:
    assert fill(warmed(0.5, 25), every=25, steps=100, wall=1.0, fixed=0.0, full=0.001) == 25


def test_where_every_step_is_over_the_budget_alone_the_rest_takes_a_tenth_of_it() -> None:
    budget = warmed(0.01, 2)
    assert fill(budget, every=2, steps=20, wall=1.0, fixed=0.02, full=0.05) == 30  # 0.03 / 30 is 0.001
    assert budget.fixed == pytest.approx(0.02)


def test_there_is_a_largest() -> None:
    assert fill(warmed(0.01, 2), every=2, steps=20, wall=1e-5, fixed=0.02, full=0.05) == MAX_EVERY


def test_says_nothing_before_it_knows() -> None:
    assert fill(warmed(0.01, 1), every=1, steps=9, wall=1.0, fixed=0.0, full=0.5) == 1
    assert fill(warmed(0.01, 20), every=20, steps=40, wall=1.0, fixed=0.0, full=0.5) == 20


def test_comes_back_when_steps_get_longer() -> None:
    budget = warmed(0.01, 1)
    assert fill(budget, every=1, steps=10, wall=1.0, fixed=0.0, full=0.095) == 10
    assert fill(budget, every=10, steps=30, wall=10.5, fixed=0.0, full=0.1) == 1


def test_small_changes_are_left_alone() -> None:
    budget = warmed(0.01, 1)
    assert fill(budget, every=1, steps=10, wall=1.0, fixed=0.0, full=0.095) == 10
    assert fill(budget, every=10, steps=30, wall=1.2, fixed=0.0, full=0.1) == 10


def test_spent_is_the_share_of_the_time() -> None:
    budget = warmed(0.01, 1)
    for _ in range(4):
        budget.add(full=True, wall_seconds=2.0, cost_seconds=0.5)
    assert budget.spent == pytest.approx(0.25)


def test_clock_counts_nested_work_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("gradvitals.measure.clock.time.perf_counter", lambda: now[0])
    clock = Clock()
    now[0] = 1.0
    with clock:
        now[0] = 3.0
        with clock:
            now[0] = 4.0
        now[0] = 5.0
    now[0] = 10.0
    lap = clock.lap()
    assert (lap.wall_seconds, lap.cost_seconds()) == (10.0, 4.0)
    assert clock.lap().cost_seconds() == 0.0


def train(path: Path, config: gv.Config, steps: int) -> gv.Monitor:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = Data()
    with gv.watch(model, optimizer, run=path, config=config) as monitor:
        for _ in range(steps):
            regression(model, data.batch(4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.flush()
    assert_no_errors(monitor)
    return monitor


def fake_costs(monkeypatch: pytest.MonkeyPatch, *, full: float, fixed: float) -> None:
    """Steps of one second, of which a full reading and any other take a given share."""
    original = Budget.add

    def add(self: Budget, *, full: bool, wall_seconds: float, cost_seconds: float) -> None:
        assert wall_seconds > 0
        assert cost_seconds > 0
        original(self, full=full, wall_seconds=1.0, cost_seconds=costs[full])

    costs = {True: full, False: fixed}
    monkeypatch.setattr(Budget, "add", add)


def test_monitor_that_is_too_dear_thins_itself_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_costs(monkeypatch, full=0.095, fixed=0.0)
    config = gv.Config(tensor_every=1, quiet=True, overhead_budget=0.01)
    monitor = train(tmp_path / "run", config, 40)
    told = [finding for finding in monitor.findings if finding.id == "readings_thinned"]
    assert len(told) == 1
    assert told[0].severity == "info"
    assert told[0].evidence["before"] == 1
    assert told[0].evidence["after"] == 10
    assert told[0].evidence["overhead"] == pytest.approx(0.095, rel=1e-3)
    with gv.open_run(monitor.run_path) as run:
        assert "readings_thinned" in [finding.id for finding in run.findings()]
        steps = run.matrix("grad/norm")[0].tolist()
        # Five to warm up, ten to measure; the one after had begun when the tenth was judged.
        assert steps == [*range(16), 20, 30]
        assert run.series("grad/norm")[0].tolist() == list(range(40))
        assert run.series("monitor/overhead")[1][12] == pytest.approx(0.095, rel=1e-3)


def test_a_budget_that_no_cadence_obeys_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_costs(monkeypatch, full=0.08, fixed=0.04)
    config = gv.Config(tensor_every=2, quiet=True, overhead_budget=0.01)
    told = [f for f in train(tmp_path / "run", config, 40).findings if f.id == "readings_thinned"]
    assert told[0].title.startswith("what is read at every step takes 4 % of it, over the overhead budget of 1 %")
    assert told[0].evidence["after"] == 40
    assert told[0].cures[0].startswith("raise overhead_budget to 0.05:")


def test_what_judging_takes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[float] = []
    monkeypatch.setattr(Budget, "charge", lambda self, lap, own, *, full: charged.append(own))

    def judged(self: Completion, readings: Any, layout: Any) -> list[Any]:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return []

    monkeypatch.setattr(Completion, "_judged", judged)
    train(tmp_path / "run", gv.Config(tensor_every=1, quiet=True, overhead_budget=0.5), 4)
    assert len(charged) == 4
    assert all(seconds >= 0.01 for seconds in charged[1:])


def test_monitor_within_its_budget_keeps_its_cadence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_costs(monkeypatch, full=0.001, fixed=0.0005)
    monitor = train(tmp_path / "run", gv.Config(tensor_every=2, quiet=True, overhead_budget=0.01), 24)
    assert not [finding for finding in monitor.findings if finding.id == "readings_thinned"]
    with gv.open_run(monitor.run_path) as run:
        assert run.matrix("grad/norm")[0].tolist() == [0, 1, *range(2, 24, 2)]


def test_no_budget_no_account(tmp_path: Path) -> None:
    monitor = train(tmp_path / "run", gv.Config(tensor_every=2, quiet=True), 4)
    with gv.open_run(monitor.run_path) as run:
        assert "monitor/overhead" not in run.metrics()
        assert run.matrix("grad/norm")[0].tolist() == [0, 1, 2]
        assert run.series("grad/norm")[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("metric", ["grad/max", "grad/zero_fraction", "gsnr", "update/norm"])
def test_metrics_not_asked_for_are_not_taken(tmp_path: Path, metric: str) -> None:
    wanted = tuple(name for name in TENSOR_METRICS if name != metric)
    monitor = train(tmp_path / "run", gv.Config(tensor_every=1, quiet=True, metrics=wanted), 3)
    with gv.open_run(monitor.run_path) as run:
        assert metric not in run.metrics("tensors")
        assert "grad/norm" in run.metrics("tensors")


@pytest.mark.parametrize("metric", TENSOR_METRICS)
@pytest.mark.parametrize("source", [source for source in LIVE_SOURCES if source != "ranks"])
def test_every_metric_and_source_works_alone(tmp_path: Path, metric: str, source: str) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = gv.Config(tensor_every=1, quiet=True, metrics=(metric,), sources=(source,), window_steps=20)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=config) as monitor:
        for _ in range(21 if source == "window" else 3):
            for batch in Data().batches((4, 4)):
                regression(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_no_errors(monitor)
    # The first three come with the gsnr they belong to, the last with a variance-reduced optimizer.
    derived = metric in ("gsnr/below_one_fraction", "gsnr/median", "radial_gsnr", "vrgd/mean")
    with gv.open_run(monitor.run_path) as run:
        assert (metric in run.metrics("tensors")) is not derived
