"""Steps that are passed over: what is read is as if all steps were, and what stands out is seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import Data, assert_no_errors, mlp, regression
from torch import Tensor, nn

import gradvitals as gv
from gradvitals.integrations.backward import observe_part
from gradvitals.measure.budget import Cadence
from gradvitals.measure.cadence import AWAKE_STEPS, Calendar
from gradvitals.measure.passing import LEAST_SEEN, Expectation

STEPS = 120
EVERY = 8
GROWN = 600
"""A step at which nothing is due for being early."""

Damage = Callable[[int, Tensor], Tensor]


def train(
    path: Path,
    step_every: int,
    *,
    steps: int = STEPS,
    clip: float | None = 1e9,
    damage: Damage = lambda step, loss: loss,
    micro_batches: int = 2,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[gv.Monitor, list[Tensor]]:
    torch.manual_seed(0)
    model, data = mlp(), Data()
    stepper = optimizer(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    config = gv.Config(quiet=True, tensor_every=50, window_steps=20, diagnose=False)
    with gv.watch(model, stepper, run=path, config=config) as monitor:
        monitor.recorder.start(GROWN)
        monitor.recorder.cadence = Cadence(50, step_every)
        for step in range(GROWN, GROWN + steps):
            for batch in data.batches((4,) * micro_batches):
                loss = damage(step, regression(model, batch))
                (loss / micro_batches).backward()
                monitor.observe(loss)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            stepper.step()
            stepper.zero_grad()
    assert_no_errors(monitor)
    return monitor, [parameter.detach().clone() for parameter in model.parameters()]


def small() -> tuple[nn.Module, Data, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp()
    return model, Data(), torch.optim.SGD(model.parameters(), lr=1e-2)


@contextmanager
def thinned(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Iterator[gv.Monitor]:
    """A grown run of which one step in `EVERY` is read."""
    with gv.watch(model, optimizer, run=folder / "run", config=gv.Config(quiet=True)) as monitor:
        monitor.recorder.start(GROWN)
        monitor.recorder.cadence = Cadence(50, EVERY)
        yield monitor


def steps_of(monitor: gv.Monitor, metric: str = "loss") -> list[int]:
    with gv.open_run(monitor.run_path) as run:
        return [int(step) for step in run.series(metric)[0]]


def series(monitor: gv.Monitor, metric: str) -> dict[int, float]:
    with gv.open_run(monitor.run_path) as run:
        steps, values = run.series(metric)[:2]
        return dict(zip(map(int, steps), map(float, values), strict=True))


def due(steps: Iterable[int]) -> list[int]:
    return [step for step in steps if step % EVERY == 0 or step % 50 == 0]


@pytest.mark.parametrize("clip", [1e9, None])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_what_is_read_is_as_if_all_steps_were(
    tmp_path: Path, clip: float | None, optimizer: type[torch.optim.Optimizer]
) -> None:
    whole, weights = train(tmp_path / "whole", 1, clip=clip, optimizer=optimizer)
    thin, same = train(tmp_path / "thin", EVERY, clip=clip, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert steps_of(thin) == due(range(GROWN, GROWN + STEPS))
    for metric in ("loss", "grad/norm", "update/rms", "update/cosine", "lr"):
        expected, found = series(whole, metric), series(thin, metric)
        assert len(found) >= STEPS // EVERY - 1
        # Between two readings a step that is due for more may lie; the directions of that one have no step before.
        assert metric == "update/cosine" or set(found) == set(due(range(GROWN, GROWN + STEPS)))
        for step, value in found.items():
            assert value == pytest.approx(expected[step], rel=1e-6, abs=1e-12), (metric, step)
    with gv.open_run(thin.run_path) as run, gv.open_run(whole.run_path) as all_of_it:
        assert run.matrix("grad/norm")[0].tolist() == all_of_it.matrix("grad/norm")[0].tolist()
        np.testing.assert_array_equal(run.matrix("grad/norm")[1], all_of_it.matrix("grad/norm")[1])


def test_update_cosines_are_there_at_every_regular_reading(tmp_path: Path) -> None:
    thin, _ = train(tmp_path / "thin", EVERY)
    assert set(range(GROWN + EVERY, GROWN + STEPS, EVERY)) <= series(thin, "update/cosine").keys()


def test_a_loss_that_is_not_a_number_is_seen_at_once(tmp_path: Path) -> None:
    bad = GROWN + 61
    monitor, _ = train(tmp_path / "run", EVERY, damage=lambda step, loss: loss * math.nan if step == bad else loss)
    assert bad % EVERY
    assert bad in steps_of(monitor)
    assert [s for s in steps_of(monitor) if s > bad] == list(range(bad + 1, GROWN + STEPS))


def test_a_loss_that_stands_out_is_read_and_so_is_what_follows(tmp_path: Path) -> None:
    bad = GROWN + 30
    monitor, _ = train(tmp_path / "run", EVERY, clip=None, damage=lambda step, loss: loss * 50 if step == bad else loss)
    awake = range(bad, bad + AWAKE_STEPS + 1)
    assert bad % EVERY
    assert steps_of(monitor) == sorted({*due(range(GROWN, GROWN + STEPS)), *awake})
    assert {bad, bad + 1} <= series(monitor, "grad/norm").keys()


def test_a_gradient_that_stands_out_is_read_before_it_is_clipped(tmp_path: Path) -> None:
    bad = GROWN + 30

    def same_loss_larger_gradient(step: int, loss: Tensor) -> Tensor:
        return 100 * loss - 99 * loss.detach() if step == bad else loss

    whole, _ = train(tmp_path / "whole", 1, clip=0.1, damage=same_loss_larger_gradient)
    monitor, _ = train(tmp_path / "run", EVERY, clip=0.1, damage=same_loss_larger_gradient)
    assert series(monitor, "loss")[bad] == pytest.approx(series(whole, "loss")[bad])
    assert series(monitor, "grad/norm")[bad] == pytest.approx(series(whole, "grad/norm")[bad], rel=1e-6)
    assert bad + 1 in steps_of(monitor)


def test_a_loop_that_gives_up_batches_without_a_number_is_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    inputs = torch.randn(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    bad = 29
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True, diagnose=False)) as monitor:
        monitor.recorder.start(GROWN)
        monitor.recorder.cadence = Cadence(50, EVERY)
        for batch in range(60):
            loss = model(inputs).square().mean() * (math.nan if batch == bad else 1.0)
            loss.backward()
            monitor.observe(loss)
            if batch != bad:
                optimizer.step()
            optimizer.zero_grad()
    assert_no_errors(monitor)
    assert series(monitor, "batches/given_up") == {GROWN + bad: 1.0}
    assert math.isfinite(series(monitor, "loss")[GROWN + bad])


def test_what_was_told_before_a_step_stood_out_is_not_lost(tmp_path: Path) -> None:
    bad = GROWN + 30
    calls = 0

    def second_part_is_large(step: int, loss: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return loss * 50 if step == bad and calls % 2 == 0 else loss

    whole, _ = train(tmp_path / "whole", 1, damage=second_part_is_large)
    thin, _ = train(tmp_path / "thin", EVERY, damage=second_part_is_large)
    assert series(thin, "loss")[bad] == pytest.approx(series(whole, "loss")[bad])


def test_with_a_closure_every_step_is_read(tmp_path: Path) -> None:
    def run(path: Path, step_every: int) -> dict[int, float]:
        torch.manual_seed(0)
        model, data = mlp(), Data()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with gv.watch(model, optimizer, run=path, config=gv.Config(quiet=True)) as monitor:
            monitor.recorder.start(GROWN)
            monitor.recorder.cadence = Cadence(50, step_every)
            for _ in range(40):
                batch = data.batch(4)

                def closure(batch: tuple[Tensor, Tensor] = batch) -> Tensor:
                    optimizer.zero_grad()
                    loss = regression(model, batch)
                    loss.backward()
                    return loss

                optimizer.step(closure)
        assert_no_errors(monitor)
        return series(monitor, "grad/norm") | {-1: series(monitor, "loss")[GROWN + EVERY]}

    whole, thin = run(tmp_path / "whole", 1), run(tmp_path / "thin", EVERY)
    assert thin == whole


def test_who_acts_has_every_step_read(tmp_path: Path) -> None:
    model, data, optimizer = small()
    with thinned(model, optimizer, tmp_path) as monitor:
        for step in range(40):
            if step == 20:
                monitor.add_reader(lambda reading: None)
            regression(model, data.batch(4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert steps_of(monitor, "grad/norm") == [*due(range(GROWN, GROWN + 20)), *range(GROWN + 20, GROWN + 40)]


def test_the_cadence_is_in_a_checkpoint(tmp_path: Path) -> None:
    monitor, _ = train(tmp_path / "run", EVERY)
    model = mlp()
    resumed = gv.Monitor(model, torch.optim.AdamW(model.parameters()), run=tmp_path / "other")
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.tap.cadence == Cadence(50, EVERY)
    resumed.close()


def test_steps_due_for_more_are_read_whatever_the_cadence() -> None:
    calendar = Calendar(gv.Config(), audits=False)
    calendar.step_every = 7
    read = [step for step in range(600, 700) if calendar.due(step).read]
    assert read == [step for step in range(600, 700) if step % 7 == 0 or step % 50 == 0]
    assert calendar.next_read(603) == 609
    calendar.wake(603)
    assert calendar.next_read(603) == 603
    assert calendar.next_read(604 + AWAKE_STEPS) == 658


def test_nothing_stands_out_in_noise_and_jumps_do() -> None:
    generator = np.random.default_rng(0)
    loss, norm = Expectation(least_ratio=1.05), Expectation(least_ratio=2.0)
    assert not any(loss.stands_out(2.0 + 0.1 * x) for x in generator.standard_normal(20_000))
    assert sum(norm.stands_out(math.exp(0.2 * x)) for x in generator.standard_normal(20_000)) < 20
    assert loss.stands_out(3.0)
    assert norm.stands_out(10.0)


def test_nothing_stands_out_before_anything_is_usual() -> None:
    usual = Expectation(least_ratio=2.0)
    assert not any(usual.stands_out(value) for value in 10.0 ** np.arange(LEAST_SEEN))
    assert usual.stands_out(math.inf)


def test_a_loss_that_falls_through_zero_does_not_stand_out() -> None:
    usual = Expectation(least_ratio=1.05)
    assert not any(usual.stands_out(1.0 - 0.01 * step) for step in range(300))


# -- loops of many kinds: where both read, they read the same -------------------------------------------------------

ODD = GROWN + 43
"""A step between two that are read, at which something happens."""

Loop = Callable[[gv.Monitor, nn.Module, torch.optim.Optimizer, int, Tensor], None]


def _norm_of(model: nn.Module) -> Tensor:
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


def clips_by_hand(
    monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: Tensor
) -> None:
    (loss * (500 if step == ODD else 1)).backward()
    monitor.observe(loss * (500 if step == ODD else 1))
    factor = (0.1 / _norm_of(model)).clamp(max=1.0)
    for parameter in model.parameters():
        parameter.grad.mul_(factor)
    optimizer.step()
    optimizer.zero_grad()


def accumulates(
    monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: Tensor
) -> None:
    for part in range(4):
        share = loss * (500 if step == ODD and part == 2 else 1) / 4
        share.backward(retain_graph=True)
        monitor.observe(4 * share)
    optimizer.step()
    optimizer.zero_grad()


def observes_before_it_zeroes(
    monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: Tensor
) -> None:
    loss = loss * (500 if step == ODD else 1)
    monitor.observe(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def gives_up_a_large_loss(
    monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: Tensor
) -> None:
    if step == ODD and not getattr(optimizer, "gave_up", False):
        optimizer.gave_up = True  # type: ignore[attr-defined]
        (500 * loss).backward(retain_graph=True)
        monitor.observe(500 * loss)
        optimizer.zero_grad()
    loss.backward()
    monitor.observe(loss)
    optimizer.step()
    optimizer.zero_grad()


def clips_others_too(
    monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: Tensor
) -> None:
    other = nn.Linear(2, 2)
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # has no gradients
    (loss * (500 if step == ODD else 1)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    other(torch.ones(2)).sum().backward()
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)


def adds_up(monitor: gv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: Tensor) -> None:
    for part in range(2):
        share = loss * (500 if step == ODD and part == 1 else 1) / 2
        share.backward(retain_graph=True)
        observe_part(monitor, share.detach())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    "loop",
    [clips_by_hand, accumulates, observes_before_it_zeroes, gives_up_a_large_loss, clips_others_too, adds_up],
)
def test_a_step_that_stands_out_is_read_as_it_would_have_been(loop: Loop, beside: bool, tmp_path: Path) -> None:
    def run(path: Path, step_every: int) -> gv.Monitor:
        torch.manual_seed(0)
        model, another = mlp(), nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        inputs, targets = torch.randn(8, 6), torch.randn(8, 3)
        config = gv.Config(quiet=True, diagnose=False, window_steps=20)
        with gv.watch(model, optimizer, run=path, config=config) as monitor:
            second = None
            if beside:  # one who is awake hears all that this one sleeps through
                second = gv.Monitor(another, torch.optim.SGD(another.parameters(), lr=0.1), run=path.parent / "beside")
            monitor.recorder.start(GROWN)
            monitor.recorder.cadence = Cadence(50, step_every)
            for step in range(GROWN, GROWN + 80):
                noise = 0.1 * torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
                loop(monitor, model, optimizer, step, (model(inputs + noise) - targets).square().mean())
            if second is not None:
                second.close()
        assert_no_errors(monitor)
        return monitor

    whole, thin = run(tmp_path / "a" / "whole", 1), run(tmp_path / "b" / "thin", EVERY)
    assert {ODD, ODD + 1} <= set(steps_of(thin, "grad/norm"))
    with gv.open_run(whole.run_path) as run_of_all:
        metrics = {"loss", "grad/norm", "update/rms", "batches/given_up", "batches/given_up_loss", "grad/carried"}
        metrics &= set(run_of_all.metrics())
    for metric in metrics:
        expected, found = series(whole, metric), series(thin, metric)
        both = set(found) if metric in ("loss", "grad/norm", "update/rms") else set(expected) | set(found)
        assert {step: found.get(step) for step in both} == {
            step: pytest.approx(expected.get(step), rel=1e-5) for step in both
        }, metric
    with gv.open_run(whole.run_path) as run_of_all, gv.open_run(thin.run_path) as run_of_some:
        assert set(run_of_some.metrics()) <= set(run_of_all.metrics())


def test_a_scaler_that_comes_into_use_later_has_every_step_read(tmp_path: Path) -> None:
    model, data, optimizer = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with thinned(model, optimizer, tmp_path) as monitor:
        for step in range(60):
            loss = regression(model, data.batch(4))
            if step < 20:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        assert monitor.step == GROWN + 60
    assert_no_errors(monitor)
    with gv.open_run(monitor.run_path) as run:
        assert "step/skipped" not in run.metrics() or not run.series("step/skipped")[1].any()
    assert set(range(GROWN + 20, GROWN + 60)) <= set(steps_of(monitor, "grad/norm"))


def test_going_on_from_another_step_begins_with_one_that_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = mlp(), Data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    laps: list[int] = []
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        charge = monitor.recorder.budget.charge
        monitor.recorder.budget.charge = lambda lap, own, full: (laps.append(lap.steps), charge(lap, own, full=full))
        monitor.recorder.cadence = Cadence(50, EVERY)
        for step in range(30):
            if step in (0, 11):
                monitor.recorder.start(GROWN if step == 0 else 5001)
            regression(model, data.batch(4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert steps_of(monitor, "grad/norm") == [GROWN, GROWN + EVERY, 5001, 5008, 5016]
    assert laps == [1, 8, 1, 7, 8]


@pytest.mark.parametrize("two", [False, True])
def test_a_checkpoint_does_not_make_one_pass_over_who_may_not(tmp_path: Path, two: bool) -> None:
    monitor, _ = train(tmp_path / "run", EVERY)
    model = mlp()
    parts = [list(model.parameters())[n :: 2 if two else 1] for n in range(2 if two else 1)]
    optimizers = [torch.optim.AdamW(part) for part in parts]
    config = gv.Config(quiet=True) if two else gv.Config(quiet=True, overhead_budget=1)
    resumed = gv.Monitor(model, optimizers, run=tmp_path / "other", config=config)
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.tap.cadence == Cadence(50, 1)
    resumed.close()


def test_a_state_of_an_older_version_is_read(tmp_path: Path) -> None:
    monitor, _ = train(tmp_path / "run", EVERY)
    state = monitor.state_dict()
    del state["tap"]["step_every"]
    model = mlp()
    resumed = gv.Monitor(model, torch.optim.AdamW(model.parameters()), run=tmp_path / "other")
    resumed.load_state_dict(state)
    assert resumed.tap.cadence == Cadence(50, 1)
    resumed.close()


@pytest.mark.parametrize("odd", ["seven", -1.0])
def test_a_batch_size_that_is_none_is_said_and_costs_nothing_else(tmp_path: Path, odd: object) -> None:
    model, data, optimizer = small()
    with thinned(model, optimizer, tmp_path) as monitor:
        for step in range(GROWN, GROWN + 60):
            loss = regression(model, data.batch(4))
            loss.backward()
            monitor.observe(loss, batch_size=odd if step == ODD else 4)
            optimizer.step()
            optimizer.zero_grad()
    assert [f.id for f in monitor.findings if f.id == "monitor_error"] == []
    assert [f.id for f in monitor.findings].count("observe_ignored") == 1
    assert steps_of(monitor, "grad/norm")[-1] >= GROWN + 56


def test_one_that_is_far_out_does_not_make_the_next_look_usual() -> None:
    usual = Expectation(least_ratio=1.05)
    assert not any(usual.stands_out(2.0 + 0.1 * math.sin(step)) for step in range(200))
    for huge in (1e4, 1e160, 1e4):
        assert usual.stands_out(huge)
        assert usual.stands_out(100.0)


def test_where_much_stands_out_not_all_that_follows_is_read(tmp_path: Path) -> None:
    often = range(GROWN + 30, GROWN + 150, 20)
    monitor, _ = train(
        tmp_path / "run", EVERY, steps=400, clip=None, damage=lambda step, loss: loss * (50 if step in often else 1)
    )
    read = set(steps_of(monitor))
    assert set(often) <= read
    awake = set(range(often[0], often[0] + AWAKE_STEPS + 1))
    assert read == {*due(range(GROWN, GROWN + 400)), *often, *awake}


@pytest.mark.parametrize("steps", [61, 63, 64])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_run_that_ends_in_steps_that_are_passed_over_knows_how_many_it_made(
    tmp_path: Path, micro_batches: int, steps: int
) -> None:
    whole, _ = train(tmp_path / "whole", 1, steps=steps, micro_batches=micro_batches)
    thin, _ = train(tmp_path / "thin", EVERY, steps=steps, micro_batches=micro_batches)
    last = GROWN + steps - 1
    assert last not in due([last])
    with gv.open_run(thin.run_path) as run:
        assert run.last_step == last
        assert int(run.series("grad/norm")[0][-1]) == GROWN + 56
    if micro_batches == 1:
        assert series(thin, "loss")[last] == pytest.approx(series(whole, "loss")[last])
    else:  # what each of them weighs is not known
        assert last not in series(thin, "loss")


def test_a_run_whose_last_step_was_read_ends_with_it(tmp_path: Path) -> None:
    thin, _ = train(tmp_path / "thin", EVERY, steps=57)
    with gv.open_run(thin.run_path) as run:
        assert run.last_step == GROWN + 56
        assert sum(reading.step == GROWN + 56 and reading.source is None for reading in run.readings()) == 1
