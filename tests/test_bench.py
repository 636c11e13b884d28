"""`gradvitals bench overhead`: its arithmetic with known answers, and one tiny real run. No test looks at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from gradvitals import bench
from gradvitals.bench import BARE, COST_STEPS, RUN, VARIANTS, Round, Runner, Task
from gradvitals.cli import bench as command
from gradvitals.cli import main
from gradvitals.errors import GradvitalsError

TURN_STEPS = 20
TASK = Task(workload="mlp", variant=BARE, device="cpu", compiled=False, threads=1, run="")


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TURN_STEPS", TURN_STEPS)


def rounds(*seconds: float) -> list[Round]:
    return [Round(turns=[(one, False)], cpu_seconds=0.2) for one in seconds]


# -- arithmetic -----------------------------------------------------------------------------------------------------


def test_a_ratio_is_that_of_the_same_round_and_its_median_is_reported() -> None:
    found = bench.summarize(rounds(1.1, 2.4, 3.9), rounds(1.0, 2.0, 3.0))
    assert found["ratios"] == pytest.approx([1.1, 1.2, 1.3])
    assert [found["ratio_low"], found["ratio"], found["ratio_high"]] == pytest.approx([1.15, 1.2, 1.25])
    assert found["ratio_interval"] is None  # three rounds are too few
    assert found["ms"] == pytest.approx(2400)


def test_full_readings_count_as_often_as_they_come_in_a_long_run() -> None:
    plain, full = [(1.0, False)] * 3, [(2.0, True)]
    one = Round(turns=[*plain, (9.0, False), *full], every=5 * TURN_STEPS)
    assert one.typical == pytest.approx(1.0 + 1.0 / 5)  # what held one turn up for 8 s is not ours
    assert one.mean == pytest.approx((3 * 1.0 + 9.0 + 2.0) / 5)
    assert replace(one, every=10 * TURN_STEPS).typical == pytest.approx(1.1)
    assert Round(turns=full, every=1).typical == 2.0


def test_what_recording_costs_is_reported_by_kind_of_step() -> None:
    one = Round()
    costs = [("plain", 10.0), ("plain", 30.0), ("plain", 20.0), ("full", 900.0)]
    one.add({"wall": 0.5, "cpu": 0.25, "full": True, "costs": costs, "every": 50})
    found = bench.summarize([one], rounds(0.5 / TURN_STEPS))
    assert found["cpu_ratio"] == pytest.approx(1.25)
    assert found["host_us"] == {"plain": 20.0, "full": 900.0}
    assert found["measured"] == {"plain": 3, "full": 1}
    assert found["ratio"] == pytest.approx(1.0)
    assert one.turns == [(0.5 / TURN_STEPS, True)]


def test_the_interval_of_a_median_holds_it() -> None:
    draws = np.random.default_rng(0)
    for count in (6, 9, 40):
        found = [bench.median_interval(list(draw)) for draw in draws.lognormal(size=(4000, count))]
        assert 0.945 <= np.mean([low <= 1.0 <= high for low, high in found]) <= 0.99
    assert bench.median_interval([1.0] * 5) is None


# -- workloads ------------------------------------------------------------------------------------------------------


def test_workloads_have_the_sizes_they_are_named_for() -> None:
    sizes = {name: build(torch.device("meta")).num_parameters / 1e6 for name, build in bench.WORKLOADS.items()}
    assert [sizes["gpt-124m"], sizes["gpt-1.3b"]] == pytest.approx([124.4, 1313.6], rel=1e-3)
    mlp = bench.mlp(torch.device("meta"))
    assert sum(isinstance(layer, torch.nn.Linear) for layer in mlp.model) == 7
    assert bench.cnn(torch.device("meta"), width=64).num_parameters == 11_173_962  # ResNet-18 for 32x32 images


def test_a_loop_that_clips_observes_before_it_does() -> None:
    training = bench.transformer(torch.device("cpu"), d_model=8, n_layer=1)
    seen: list[float] = []

    def observe(loss: torch.Tensor) -> None:
        seen.append(loss.item())
        for parameter in training.model.parameters():
            parameter.grad *= 1e6

    returned = training.step(observe)
    norms = [parameter.grad.norm() for parameter in training.model.parameters()]
    assert torch.stack(norms).norm().item() == pytest.approx(bench.MAX_NORM, rel=1e-3)
    assert seen == [returned.item()]


# -- turns ----------------------------------------------------------------------------------------------------------


class FakeRunner:
    """A process on a machine that gets slower all the time."""

    calls: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, task: Task, *, keeps_memory: bool) -> None:
        self.task = task

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append((name, self.task.variant))

    def turn(self) -> dict[str, Any]:
        self.calls.append(("turn", self.task.variant))
        slower = 1.5 if self.task.variant == "histograms" else 1.0
        wall = TURN_STEPS * slower * (1 + 1e-3 * len(self.calls))
        return {"wall": wall, "cpu": 1.0, "full": False, "costs": [], "every": 0}


def test_processes_take_turns_in_an_order_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "Runner", FakeRunner)
    orders = []
    for seed in (0, 1):
        monkeypatch.setattr(FakeRunner, "calls", [])
        tasks = [replace(TASK, variant=one) for one in (BARE, "watch", "histograms")]
        found = bench.time_round(tasks, steps=10 * TURN_STEPS - 1, seed=seed)
        turns = [variant for what, variant in FakeRunner.calls if what == "turn"]
        assert all(len(set(turns[at : at + 3])) == 3 for at in range(0, 30, 3))
        assert len({tuple(turns[at : at + 3]) for at in range(0, 30, 3)}) > 2
        assert found["histograms"].mean / found[BARE].mean == pytest.approx(1.5, rel=0.01)
        assert sorted(FakeRunner.calls[-6:]) == sorted((w, t.variant) for t in tasks for w in ("finish", "kill"))
        orders.append(turns)
    assert orders[0] != orders[1]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_until(holds: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("variant", ["watch", RUN])
def test_processes_are_stopped_between_turns(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVITALS_WORKER", "process")
    runner = Runner(replace(TASK, variant=variant, run=str(tmp_path / "run")))
    try:
        runner.wait_until_ready()
        runner.settle()
        worker = runner._worker
        assert worker is not None
        pids = (runner._process.pid, worker)
        for _ in range(2):
            wait_until(lambda: [state_of(pid) for pid in pids] == ["T", "T"])
            answer = runner.turn()
            assert len(answer["costs"]) >= COST_STEPS
            assert answer["every"] >= 50
        runner.finish()
    finally:
        runner.kill()
    wait_until(lambda: not Path(f"/proc/{worker}").exists())


def test_the_error_of_a_process_is_reported() -> None:
    runner = Runner(replace(TASK, workload="gpt-5"))
    try:
        runner.wait_until_ready()
        with pytest.raises(GradvitalsError, match="timed 'bare' ended with 1: KeyError: 'gpt-5'"):
            runner.settle()
    finally:
        runner.kill()


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_variant_is_timed_and_printed() -> None:
    few = ["--workload", "gpt", "--threads", "1", "--steps", "1", "--rounds", "1"]
    found = CliRunner().invoke(main, ["bench", "overhead", "--device", "cpu", *few, "--json"])
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert "1 of 1 rounds" in found.stderr
    variants = result["workloads"][0]["variants"]
    assert tuple(variants) == VARIANTS
    assert all(one["ratio"] > 0 for one in variants.values())
    watched = {name for name, one in variants.items() if one["measured"]}
    assert watched == {"watch", RUN, "every step", bench.OUR_ADAMW}
    assert variants["every step"]["measured"] == {"full": TURN_STEPS + COST_STEPS}
    text = bench.format_markdown(result)
    for words in (torch.__version__, "| bare again ", "gpt: 0.472M parameters", "- watch: a full reading every"):
        assert words in text


def test_the_command_knows_all_workloads_and_variants() -> None:
    assert (tuple(bench.WORKLOADS), VARIANTS) == (command.WORKLOADS, command.VARIANTS)
