"""The overhead benchmark runs whole and counts its readings right. No test looks at a time."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gradvitals.measure.budget import Budget, Cadence
from gradvitals.measure.clock import Lap

from gradvitals import bench, open_run
from gradvitals.bench import (
    MONITORED,
    SETTLE_STEPS,
    VARIANTS,
    Stretch,
    WatchedRun,
    format_overhead,
    run_overhead,
    time_monitored,
)
from gradvitals.config import Config
from gradvitals.errors import GradvitalsError

CPU = torch.device("cpu")
TINY = {
    "mlp": partial(bench.mlp, micro_batch_size=2, width=8),
    "cnn": partial(bench.cnn, micro_batch_size=2, width=2),
    "transformer": partial(bench.transformer, d_model=8, n_layer=1),
}


@pytest.mark.parametrize("name", TINY)
def test_a_step_trains_and_shows_its_loss_before_clipping(name: str) -> None:
    training = TINY[name](CPU)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    seen = []

    def observe(loss: torch.Tensor) -> None:
        seen.append(loss.item())
        for parameter in training.model.parameters():
            parameter.grad *= 1e6

    training.step(observe)
    norms = [parameter.grad.norm() for parameter in training.model.parameters()]
    assert torch.stack(norms).norm().item() == pytest.approx(bench.MAX_NORM, rel=1e-3)
    assert [math.isfinite(loss) for loss in seen] == [True]
    assert any(not torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))


def test_micro_batches_add_up_to_the_mean_loss_of_the_whole_batch() -> None:
    training = TINY["mlp"](CPU)
    whole = training.loss(*(torch.cat(parts) for parts in zip(*training.batches[0], strict=True)))
    expected = torch.autograd.grad(whole, list(training.model.parameters()))
    losses: list[float] = []
    grads: list[torch.Tensor] = []

    def observe(loss: torch.Tensor) -> None:
        losses.append(loss.item())
        grads.extend(parameter.grad.clone() for parameter in training.model.parameters())

    training.step(observe)
    assert losses == [pytest.approx(whole.item())]
    for grad, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize(("name", "millions"), [("gpt-124m", 124.4), ("gpt-1.3b", 1313.6)])
def test_the_gpts_have_the_size_they_are_named_for(name: str, millions: float) -> None:
    training = bench.SHAPES[name](torch.device("meta"))
    assert training.num_parameters / 1e6 == pytest.approx(millions, rel=1e-3)
    assert training.model.head.weight is training.model.embed.weight
    assert training.num_micro_batches == 2


@pytest.mark.parametrize("name", bench.DEFAULT_SHAPES["cpu"])
def test_the_small_shapes_have_about_a_million_parameters(name: str) -> None:
    assert 0.9e6 < bench.SHAPES[name](torch.device("meta")).num_parameters < 1.1e6


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor has fewer steps to find its cadence in."""
    monkeypatch.setattr(bench, "THINNING_STEPS", 100)


@pytest.mark.usefixtures("short_search")
def test_variants_are_timed_in_processes_that_take_turns_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.SHAPES, "mlp", TINY["mlp"])
    monkeypatch.setitem(MONITORED, "default", Config(tensor_every=5, window_steps=20, quiet=True))
    lines: list[str] = []
    chosen = ("default", "histograms", "bare")
    result = run_overhead(device="cpu", shapes=["mlp"], variants=chosen, steps=1, rounds=1, progress=lines.append)

    assert json.loads(json.dumps(result)) == result
    assert result["steps"] == 20  # one cycle of the costly metrics
    (shape,) = result["shapes"]
    assert (shape["shape"], shape["tensors"], shape["micro_batches"]) == ("mlp", 10, 2)
    assert tuple(shape["variants"]) == chosen
    assert shape["bare_ms"] > 0
    for found in shape["variants"].values():
        assert 0 < found["ratio_low"] <= found["ratio"] <= found["ratio_high"] < math.inf
        assert found["extra_device_bytes"] is None
    text = format_overhead(result)
    for word in ("mlp", "default", "histograms", "bare, again", torch.__version__):
        assert word in text
    assert any("round 1 of 1" in line for line in lines)


class FakeRunner:
    """Takes as many seconds for a step as it was told; the machine slows down all the time."""

    turns: ClassVar[list[str]] = []

    def __init__(self, task: bench.Task, name: str) -> None:
        self.task, self.name = task, name
        self.cadence = Cadence(150, 50) if task.config is not None else None

    def __enter__(self) -> FakeRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.turns.append(f"end of {self.name}")

    def turn(self, steps: int) -> bench.Taken:
        self.turns.append(self.name)
        assert steps == bench.TURN_STEPS
        seconds = steps * (1.5 if self.name == "histograms" else 1.0) * (1 + 1e-4 * len(self.turns))
        return bench.Taken(seconds, 2 * seconds, 7.0 * steps)

    def finish(self) -> None:
        self.turns.append(f"all well with {self.name}")


@pytest.mark.parametrize(("steps", "made"), [(200, 600), (601, 1200)])
def test_turns_go_round_until_everything_was_read(monkeypatch: pytest.MonkeyPatch, steps: int, made: int) -> None:
    monkeypatch.setattr(bench, "Runner", FakeRunner)
    monkeypatch.setattr(FakeRunner, "turns", [])
    found = bench.time_round("mlp", ["default", "histograms", "bare"], steps=steps)
    turns, ends = FakeRunner.turns[:-8], FakeRunner.turns[-8:]
    everyone = ["bare", "bare steps", "default", "histograms"]
    rows = [turns[at : at + 4] for at in range(0, len(turns), 4)]
    assert all(sorted(row) == everyone for row in rows)
    assert len(rows) == made / bench.TURN_STEPS
    follows = Counter(pairwise(turns))
    assert max(follows.values()) < 0.2 * len(turns)  # nobody always follows the same one
    assert sorted(ends) == sorted(f"{word} {name}" for name in everyone for word in ("all well with", "end of"))
    assert found.base.wall_seconds == pytest.approx(1.0, rel=0.06)
    assert found.variants["histograms"].wall_seconds / found.base.wall_seconds == pytest.approx(1.5, rel=1e-3)
    assert found.variants["default"].cpu_seconds / found.base.cpu_seconds == pytest.approx(1.0, rel=1e-3)
    assert found.base.page_faults == pytest.approx(7.0)
    assert found.cadences == {"default": Cadence(150, 50)}


def test_every_round_has_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "Runner", FakeRunner)
    orders = []
    for seed in (0, 1):
        monkeypatch.setattr(FakeRunner, "turns", [])
        bench.time_round("mlp", ["default", "bare"], steps=1, seed=seed)
        orders.append(FakeRunner.turns)
    assert orders[0] != orders[1]


def quick(folder: Path, **changed: Any) -> bench.Task:
    task = bench.Task(build=TINY["mlp"], config=None, by_hand=None, thinning_steps=0, threads=1, folder=folder)
    return replace(task, **changed)


def test_a_process_is_stopped_when_it_is_not_its_turn(tmp_path: Path) -> None:
    def state(runner: bench.Runner) -> str:
        return Path(f"/proc/{runner._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    with bench.Runner(quick(tmp_path), "bare steps") as runner:
        wait_until(lambda: state(runner) == "T")
        wall, cpu, _ = runner.turn(3)
        assert wall > 0
        assert cpu > 0
        wait_until(lambda: state(runner) == "T")
        runner.finish()
    assert not runner._process.is_alive()


def wait_until(holds: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def breaks(device: torch.device) -> bench.Training:
    raise RuntimeError("no model today")


def ends(device: torch.device) -> bench.Training:
    os._exit(3)


@pytest.mark.parametrize(("build", "words"), [(breaks, "no model today"), (ends, "timed bare steps ended with 3")])
def test_a_process_that_fails_is_told(tmp_path: Path, build: Callable[..., Any], words: str) -> None:
    with pytest.raises(GradvitalsError, match=words), bench.Runner(quick(tmp_path, build=build), "bare steps"):
        pass


def test_a_process_that_is_killed_is_told(tmp_path: Path) -> None:
    with bench.Runner(quick(tmp_path), "bare steps") as runner:
        runner._process.kill()
        runner._process.join()
        with pytest.raises(GradvitalsError, match="timed bare steps ended with -9"):
            runner._ask(5)


def breaks_later(device: torch.device) -> bench.Training:
    """A model whose monitor fails in some step."""
    Tap.read = _fail  # type: ignore[method-assign]
    return TINY["mlp"](device)


def _fail(*args: object) -> None:
    raise RuntimeError("no reading today")


def test_the_time_of_a_monitor_that_gave_up_is_not_taken(tmp_path: Path) -> None:
    task = quick(tmp_path, build=breaks_later, config=Config(quiet=True, window_steps=20))
    with bench.Runner(task, "default") as runner:
        runner.turn(3)
        with pytest.raises(GradvitalsError, match="no reading today"):
            runner.finish()


def tells(device: torch.device) -> bench.Training:
    raise RuntimeError(f"{os.environ.get('MALLOC_MMAP_MAX_', 'any')} mmaps, {torch.get_num_threads()} thread")


@pytest.mark.parametrize(("keeps_memory", "mmaps"), [(True, "0"), (False, "any")])
def test_what_a_process_finds_in_its_environment_is_not_left_in_this_one(
    tmp_path: Path, keeps_memory: bool, mmaps: str
) -> None:
    before = dict(os.environ)
    context = multiprocessing.get_context("fork")  # one that was forked long ago has the environment of then
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method: context)
        patch.delenv("MALLOC_MMAP_MAX_", raising=False)
        task = quick(tmp_path, build=tells, keeps_memory=keeps_memory)
        with pytest.raises(GradvitalsError, match=f"{mmaps} mmaps, 1 thread"), bench.Runner(task, "bare steps"):
            pass
    assert dict(os.environ) == before


def fake_stretches(monkeypatch: pytest.MonkeyPatch, variants: Sequence[str], rounds: int) -> tuple[Any, Any, Any]:
    order: list[str] = []
    lengths: list[int] = []

    def fake(variant: str, training: bench.Training, steps: int, runs: object) -> Stretch:
        order.append(variant)
        lengths.append(steps)
        drift = 1.0 + 0.1 * len(order)  # a machine that slows down all the time
        seconds = drift * (1.5 if variant == "histograms" else 1.0)
        return Stretch(wall_seconds=seconds, cpu_seconds=seconds, peak_bytes=1000 + 7 * (variant == "default"))

    monkeypatch.setattr(bench, "_time_variant", fake)
    monkeypatch.setattr(bench, "time_monitored", lambda *args: None)
    measured = bench.Measured({variant: bench.Ratios() for variant in variants}, lambda line: None)
    bench.time_in_stretches(measured, TINY["mlp"](CPU), 200, rounds)
    return order, lengths, {variant: bench._summary(found) for variant, found in measured.ratios.items()}


def test_variants_take_turns_and_each_has_a_bare_stretch_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    order, lengths, found = fake_stretches(monkeypatch, VARIANTS, rounds=3)
    pieces = ["default"] * 4  # one full reading each, and together one of the costly metrics
    others = [variant for variant in VARIANTS if variant != "default"]
    assert order[0::2] == ["bare"] * (len(pieces + others) * 3 + 1)
    timed = order[1::2]
    assert timed[:9] == [*pieces, *others]
    assert timed[9:18] == [*others, *pieces]
    assert lengths[1:9:2] == [50] * 4
    assert set(lengths[9:19]) == {25}
    assert found["histograms"]["ratio"] == pytest.approx(1.5)
    assert found["default"]["ratios"] == pytest.approx([1.0] * 3)
    assert found["bare"]["ratio_high"] - found["bare"]["ratio_low"] == pytest.approx(0.0)
    assert (found["default"]["extra_device_bytes"], found["bare"]["extra_device_bytes"]) == (7, 0)


@pytest.mark.parametrize("every", [50, 5, 1])
def test_timed_stretches_hold_their_share_of_every_kind_of_reading(every: int, tmp_path: Path) -> None:
    config = Config(tensor_every=every, window_steps=20, quiet=True, overhead_budget=1)
    training, watched = TINY["mlp"](CPU), WatchedRun(tmp_path / "run")
    timed: list[int] = []
    for number in range(config.detail_factor):
        timing = time_monitored(config, training, every, watched)
        assert timing.wall_seconds > 0
        assert timing.flush_seconds is not None
        with open_run(watched.path) as run:
            steps = run.series("loss")[0]
        if number == 0:
            begin = 600 if every == 50 else 500  # past the time when a young run is read more often
            assert steps[: config.window_steps + 1].tolist() == list(range(begin, begin + config.window_steps + 1))
        timed += steps[-every:].tolist()
        assert np.all(np.diff(steps) > 0)
    with open_run(watched.path) as run:
        full, detailed = run.series("weight/norm")[0], run.series("grad/max")[0]
    assert len(set(timed)) == every * config.detail_factor
    assert len(set(timed) & set(full)) == config.detail_factor
    assert len(set(timed) & set(detailed)) == 1


def test_a_run_goes_on_with_what_it_knows_and_has_set_everything_up_before_it_is_timed(tmp_path: Path) -> None:
    config = Config(tensor_every=5, window_steps=20, quiet=True, overhead_budget=1)
    training, watched = TINY["mlp"](CPU), WatchedRun(tmp_path / "run")
    time_monitored(config, training, 5, watched)
    with open_run(watched.path) as run:
        before = run.series("loss")[0]
    time_monitored(config, training, 5, watched)
    with open_run(watched.path) as run:
        since = run.series("loss")[0][len(before) :]
        detailed = run.series("grad/max")[0]
    assert len(since) == 1 + SETTLE_STEPS + 5
    assert since[0] in detailed
    assert since[0] > before[-1]


def test_on_a_cpu_the_cadence_is_found_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def charge(budget: Budget, lap: Lap, own_seconds: float, *, full: bool) -> None:
        """Steps of 1 ms, and what reading them takes by a clock that no other program holds up."""
        cost = 2e-3 if full else 2e-4
        budget.add(full=full, wall_seconds=1e-3 * lap.steps, cost_seconds=cost, steps=lap.steps)

    monkeypatch.setattr(bench, "THINNING_STEPS", 300)
    monkeypatch.setattr(Budget, "charge", charge)
    training, watched = TINY["mlp"](CPU), WatchedRun(tmp_path / "run")
    time_monitored(Config(quiet=True, window_steps=20), training, 50, watched)
    known = (watched.every, watched.step_every)
    assert known == (150, 20)  # 1.8 ms more in 150 steps, 0.2 ms in 20: together within 3 % of the time
    time_monitored(Config(quiet=True, window_steps=20), training, 50, watched)
    assert (watched.every, watched.step_every) == known


@pytest.mark.usefixtures("short_search")
def test_a_monitor_that_gave_up_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no reading today")

    monkeypatch.setattr("gradvitals.measure.tap.Tap.read", broken)
    with pytest.raises(GradvitalsError, match="no reading today"):
        time_monitored(Config(quiet=True), TINY["mlp"](CPU), 25, WatchedRun(tmp_path / "run"))


def test_variants_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter(range(9))

    def fake(shape: str, variants: Sequence[str], steps: int, seed: int, *, keeps_memory: bool) -> bench.Round:
        assert not keeps_memory
        base = Stretch(wall_seconds=1.0, cpu_seconds=1.0, peak_bytes=None, page_faults=7.0)
        slower = replace(base, wall_seconds=1.5 + 0.01 * next(rounds), page_faults=9.0)
        return bench.Round(base=base, variants={"histograms": slower, "bare": base}, cadences={})

    monkeypatch.setattr(bench, "time_round", fake)
    result = run_overhead(device="cpu", shapes=["mlp"], variants=["histograms", "bare"], rounds=9, keeps_memory=False)
    assert json.loads(json.dumps(result)) == result
    found = result["shapes"][0]["variants"]
    assert list(found) == ["histograms", "bare"]
    # Of nine, one on each side: 2 * (1 + 9) / 2**9 = 3.9 % of medians lie outside of the second and the eighth.
    assert found["histograms"]["ratio_interval"] == pytest.approx([1.51, 1.57])
    text = format_overhead(result)
    assert "[+51.00 %, +57.00 %]" in text
    assert "with 7 page faults" in text
    assert next(line for line in text.splitlines() if "histograms" in line).endswith(" 9 |")
    assert "freed memory is left to the C library" in text


def test_the_interval_of_a_median_holds_it() -> None:
    random = np.random.default_rng(0)
    for rounds in (6, 9, 40):
        found = [bench.median_interval(list(draw)) for draw in random.lognormal(size=(4000, rounds))]
        holds = np.mean([low <= 1.0 <= high for low, high in found])
        assert 0.945 <= holds <= 0.99
    assert bench.median_interval([1.0] * 5) is None
    assert bench.median_interval([]) is None


@pytest.mark.parametrize(
    "wrong", [{"shapes": ["gpt-5"]}, {"variants": ["default", "fast"]}, {"device": "meta"}, {"rounds": 0}]
)
def test_what_cannot_be_timed_is_said(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        run_overhead(**{"device": "cpu", **wrong})


def test_before_anything_is_timed_every_kind_of_reading_is_made(tmp_path: Path) -> None:
    config = bench.EVERY_KIND
    watched = WatchedRun(tmp_path / "run")
    time_monitored(config, TINY["mlp"](CPU), 2 * config.detail_factor, watched)
    with open_run(watched.path) as run:
        steps = run.series("loss")[0]
        full, detailed = run.series("weight/norm")[0], run.series("grad/max")[0]
    assert set(detailed) < set(full) < set(steps)
