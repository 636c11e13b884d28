"""Staying within a budget: the rule by itself, and a Monitor that finds itself too dear."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import Data, assert_no_errors, mlp, regression

import gradvitals as gv
from gradvitals.completion import Completion
from gradvitals.config import LIVE_SOURCES, TENSOR_METRICS
from gradvitals.measure.budget import MAX_EVERY, STEP_EVERY, WARM_UP_STEPS, Budget, Cadence, budget_for
from gradvitals.measure.clock import Clock


def fill(budget: Budget, *, every: int, steps: int, wall: float, fixed: float, full: float) -> int:
    return fill_both(budget, Cadence(every), steps=steps, wall=wall, fixed=fixed, full=full).every


def fill_both(budget: Budget, now: Cadence, *, steps: int, wall: float, fixed: float, full: float) -> Cadence:
    passed = 0
    for step in range(steps):
        is_full, is_read = step % now.every == 0, step % now.step_every == 0
        passed += 1
        if is_full or is_read:
            cost = full if is_full else fixed
            budget.add(full=is_full, wall_seconds=passed * wall, cost_seconds=cost, steps=passed)
            passed = 0
    return budget.propose(now)


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


# -- steps that are passed over -------------------------------------------------------------------------------------


def test_short_steps_are_passed_over() -> None:
    # Of 0.3 ms, full readings take 4 / 50, which leaves 0.22 for the others: one in six would do, and ten is the next.
    budget = Budget(0.03, 50, thins_steps=True)
    found = fill_both(budget, Cadence(50), steps=200, wall=10e-3, fixed=1.2e-3, full=5.2e-3)
    assert found == Cadence(50, 10)


def test_full_readings_keep_half_of_the_budget_where_steps_are_passed_over() -> None:
    budget = Budget(0.03, 50, thins_steps=True)
    found = fill_both(budget, Cadence(50), steps=200, wall=10e-3, fixed=1.15e-3, full=13.15e-3)
    assert found == Cadence(100, 10)  # 12 / 80 is 0.15


@given(
    fixed=st.floats(1e-4, 3e-3),
    extra=st.floats(0.0, 2e-2),
    wall=st.floats(5e-3, 1.0),
    every=st.integers(2, 100),
    share=st.floats(0.01, 0.2),
)
def test_the_cadence_keeps_the_budget(fixed: float, extra: float, wall: float, every: int, share: float) -> None:
    budget = Budget(share, every, thins_steps=True)
    for number in range(40):
        is_full = number % 4 == 0
        budget.add(full=is_full, wall_seconds=wall, cost_seconds=fixed + extra * is_full)
    found = budget.propose(Cadence(every))
    spent = fixed / found.step_every + extra / found.every
    assert spent <= share * wall * (1 + 1e-9) or found.step_every == STEP_EVERY[-1]
    assert found.every >= every


def test_with_steps_in_between_the_time_of_all_counts() -> None:
    budget = Budget(0.03, 50, thins_steps=True)
    found = fill_both(budget, Cadence(50, 10), steps=400, wall=10e-3, fixed=1.2e-3, full=5.2e-3)
    assert found == Cadence(50, 10)
    assert budget.fixed == pytest.approx(0.12)


def test_where_all_that_is_read_is_read_in_full_steps_are_passed_over_still() -> None:
    costs = {"wall": 2e-3, "fixed": 1.2e-3, "full": 2.2e-3}
    budget = Budget(0.03, 50, thins_steps=True)
    assert fill_both(budget, Cadence(50), steps=200, **costs) == Cadence(50, 50)
    assert fill_both(budget, Cadence(50, 50), steps=1000, **costs) == Cadence(50, 50)


def test_steps_that_get_longer_are_all_read_again() -> None:
    budget = Budget(0.03, 50, thins_steps=True)
    found = fill_both(budget, Cadence(50, 10), steps=400, wall=0.1, fixed=1.2e-3, full=5.2e-3)
    assert found == Cadence(50, 1)


def test_nothing_is_thinned_before_some_seconds_are_spent() -> None:
    costs = {"wall": 10e-3, "fixed": 2e-3, "full": 2e-3}
    budget = Budget(0.03, 50, thins_steps=True, free_seconds=1.0)
    assert fill_both(budget, Cadence(50), steps=450, **costs) == Cadence(50)
    assert fill_both(budget, Cadence(50), steps=100, **costs).step_every > 1


def test_what_was_asked_for_is_kept_where_only_steps_may_be_thinned() -> None:
    budget = Budget(0.03, 5, thins_steps=True, thins_tensors=False)
    found = fill_both(budget, Cadence(5), steps=200, wall=10e-3, fixed=1.18e-3, full=9.18e-3)
    assert found == Cadence(5, 50)  # a tenth of the budget, 0.03 ms, is left for the other steps: one in 40


def test_whose_budget_is_what() -> None:
    plain = budget_for(gv.Config(), alone=True, on_host=True)
    assert plain is not None
    assert (plain.share, plain.thins_steps, plain.thins_tensors) == (0.03, True, True)
    assert plain.free_seconds > 0
    asked = budget_for(gv.Config(tensor_every=5), alone=True, on_host=True)
    assert asked is not None
    assert not asked.thins_tensors
    assert budget_for(gv.Config(), alone=True, on_host=False) is None
    assert budget_for(gv.Config(), alone=False, on_host=True) is None
    assert budget_for(gv.Config(overhead_budget=1), alone=True, on_host=True) is None
    on_a_gpu = budget_for(gv.Config(overhead_budget=0.01), alone=True, on_host=False)
    assert on_a_gpu is not None
    assert (on_a_gpu.share, on_a_gpu.thins_steps, on_a_gpu.free_seconds) == (0.01, False, 0.0)
    less, more = (budget_for(gv.Config(overhead_budget=share), alone=True, on_host=True) for share in (0.01, 0.2))
    assert less is not None
    assert more is not None
    assert (less.free_seconds, more.free_seconds) == (0.0, plain.free_seconds)  # who allows more does not get less


def test_clock_gives_the_time_of_what_was_passed_over_to_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("gradvitals.measure.clock.time.perf_counter", lambda: now[0])
    clock = Clock()
    for end in (10.0, 20.0):
        now[0] = end - 1
        with clock:
            now[0] = end
        clock.pass_over(1)
    now[0] = 30.0
    lap = clock.lap()
    assert (lap.wall_seconds, lap.cost_seconds(), lap.steps) == (30.0, 2.0, 3)
    assert clock.lap().steps == 1


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


def train(path: Path, config: gv.Config, steps: int, *, optimizers: int = 1, observed: bool = False) -> gv.Monitor:
    torch.manual_seed(0)
    model = mlp()
    parts = [list(model.parameters())[n::optimizers] for n in range(optimizers)]
    steppers = [torch.optim.SGD(part, lr=1e-2) for part in parts]
    data = Data()
    with gv.watch(model, steppers, run=path, config=config) as monitor:
        for _ in range(steps):
            loss = regression(model, data.batch(4))
            loss.backward()
            if observed:
                monitor.observe(loss)
            for optimizer in steppers:
                optimizer.step()
                optimizer.zero_grad()
            monitor.flush()
    assert_no_errors(monitor)
    return monitor


def fake_costs(monkeypatch: pytest.MonkeyPatch, *, full: float, fixed: float) -> None:
    """Steps of one second, of which a full reading and any other take a given share."""
    original = Budget.add

    def add(self: Budget, *, full: bool, wall_seconds: float, cost_seconds: float, steps: int) -> None:
        assert wall_seconds > 0
        assert cost_seconds > 0
        original(self, full=full, wall_seconds=float(steps), cost_seconds=costs[full], steps=steps)

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


def test_a_monitor_whose_steps_are_too_short_passes_some_over_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_costs(monkeypatch, full=0.06, fixed=0.04)
    monitor = train(tmp_path / "run", gv.Config(tensor_every=4, quiet=True, overhead_budget=0.02), 60)
    told = [finding for finding in monitor.findings if finding.id == "readings_thinned"]
    assert len(told) == 1
    assert told[0].title.startswith("One step in 5 is read from here on, and single tensors every 4 steps")
    assert (told[0].evidence["steps_before"], told[0].evidence["steps_after"]) == (1, 5)
    with gv.open_run(monitor.run_path) as run:
        steps = run.series("grad/norm")[0].tolist()
        since = told[0].first_step + 2  # the one after had begun
        assert [s for s in steps if s < since] == list(range(since))
        assert [s for s in steps if s >= since] == [s for s in range(since, 60) if s % 5 == 0 or s % 4 == 0]
        assert run.matrix("grad/norm")[0].tolist() == [0, 1, 2, *range(4, 60, 4)]


@pytest.mark.parametrize("observed", [True, False])
def test_passing_over_is_said_once_and_what_is_known_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], observed: bool
) -> None:
    fake_costs(monkeypatch, full=0.06, fixed=0.04)
    config = gv.Config(tensor_every=4, overhead_budget=0.02)
    train(tmp_path / "run", config, 60, observed=observed)
    said = [line for line in capsys.readouterr().err.splitlines() if "is read from here on" in line]
    assert len(said) == 1
    assert ("loss or norm stands out" in said[0]) == observed
    assert ("nothing is known of the others" in said[0]) != observed


def test_a_budget_that_no_cadence_obeys_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_costs(monkeypatch, full=0.08, fixed=0.04)
    config = gv.Config(tensor_every=2, quiet=True, overhead_budget=0.01)
    told = [f for f in train(tmp_path / "run", config, 40, optimizers=2).findings if f.id == "readings_thinned"]
    assert told[0].title.startswith("What is read at every step takes 4% of it, over the overhead budget of 1%")
    assert told[0].evidence["after"] == 40
    assert told[0].fixes[0].startswith("Raise overhead_budget to 0.05:")


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
