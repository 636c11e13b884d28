"""The sweep and its tables, on a made-up task whose score is a parabola in the logarithm of the learning rate."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from experiments.vrgd.__main__ import main
from experiments.vrgd.sweep import FIRST_FRESH_SEED, Plan, Record, append_record, read_records, run_sweep
from experiments.vrgd.tables import published, summarise
from experiments.vrgd.trial import Result, Trial, make_groups
from gradvitals.errors import GradvitalsError

BASE = Trial(task="cifar", model="resnet20", batch=4096, optimizer="momentum", arm="base", lr=0.8, seed=0)
VR = replace(BASE, arm="vr")


class Parabola:
    """Best at `best`, by arm; diverges above `limit`. Remembers what was asked of it."""

    def __init__(self, limit: float = math.inf, **best: float) -> None:
        self.best = best
        self.limit = limit
        self.trials: list[Trial] = []

    def __call__(self, trial: Trial) -> Result:
        self.trials.append(trial)
        if trial.lr > self.limit:
            return {"score": math.nan, "train_score": math.nan, "chance": 10.0}
        score = 80 - 5 * math.log2(trial.lr / self.best[trial.arm]) ** 2 + 0.01 * trial.seed
        return {"score": score, "train_score": score + 5, "chance": 10.0}

    def swept(self, arm: str = "base") -> list[float]:
        return sorted({trial.lr for trial in self.trials if trial.arm == arm and trial.seed < FIRST_FRESH_SEED})

    def fresh(self, arm: str = "base") -> list[tuple[float, int]]:
        return [(t.lr, t.seed) for t in self.trials if t.arm == arm and t.seed >= FIRST_FRESH_SEED]


# -- which learning rates are tried ---------------------------------------------------------------------------------


def test_a_best_inside_the_grid_ends_the_sweep_and_fresh_seeds_follow() -> None:
    train = Parabola(base=0.8)
    outcome = run_sweep(train, [BASE], plan=Plan(refine=0, span=1, seeds=2))
    assert train.swept() == [0.4, 0.8, 1.6]
    assert train.fresh() == [(0.8, 100), (0.8, 101)]
    assert (len(outcome.records), outcome.left, outcome.failures) == (5, 0, [])
    assert [record.phase for record in outcome.records] == ["sweep"] * 3 + ["fresh"] * 2


@pytest.mark.parametrize(
    ("best", "limit", "tried", "chosen"),
    [
        pytest.param(0.1, math.inf, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6], 0.1, id="followed down"),
        pytest.param(6.4, math.inf, [0.4, 0.8, 1.6, 3.2, 6.4, 12.8], 6.4, id="followed up"),
        pytest.param(1e9, math.inf, [0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6], 25.6, id="followed up to the reach"),
        pytest.param(1.6, 1.0, [0.4, 0.8, 1.6], 0.8, id="bounded by what diverges"),
        pytest.param(0.1, 0.15, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6], 0.1, id="down where all diverge"),
    ],
)
def test_a_best_at_an_edge_is_followed(best: float, limit: float, tried: list[float], chosen: float) -> None:
    train = Parabola(base=best, limit=limit)
    run_sweep(train, [BASE], plan=Plan(refine=0, span=1, reach=4, seeds=1))
    assert train.swept() == tried
    assert train.fresh() == [(chosen, 100)]


def test_a_learning_rate_leads_with_several_seeds_before_it_is_chosen() -> None:
    scores = {(0.4, 0): 1, (0.8, 0): 3, (1.6, 0): 9, (1.6, 1): -9, (0.8, 1): 2}
    asked: list[tuple[float, int]] = []

    def train(trial: Trial) -> Result:
        asked.append((trial.lr, trial.seed))
        return {"score": float(scores.get((trial.lr, trial.seed), 0))}

    run_sweep(train, [BASE], plan=Plan(refine=0, span=1, sweep_seeds=2, seeds=1))
    assert asked == [*scores, (0.8, 100)]


# -- a file of finished trials --------------------------------------------------------------------------------------


def test_finished_trials_are_never_run_twice(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "trials.jsonl"
    run_sweep(Parabola(base=0.8), [BASE], out=out, plan=Plan(refine=0, span=1, seeds=1))
    again = Parabola(base=0.8, vr=0.8)
    outcome = run_sweep(again, [BASE, VR], out=out, plan=Plan(refine=0, span=1, seeds=2))
    assert [trial for trial in again.trials if trial.arm == "base"] == [replace(BASE, seed=101)]
    assert len(again.trials) == 1 + 5
    assert len(outcome.records) == len(read_records(out)) == 10


def test_a_run_that_was_cut_goes_on_even_after_a_torn_line(tmp_path: Path) -> None:
    out = tmp_path / "trials.jsonl"
    whole = Parabola(base=0.8)
    run_sweep(whole, [BASE], out=out, plan=Plan(refine=0, span=1, seeds=1))
    full = out.read_bytes()
    lines = full.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + lines[2][:25])
    assert len(read_records(out)) == 2
    again = Parabola(base=0.8)
    run_sweep(again, [BASE], out=out, plan=Plan(refine=0, span=1, seeds=1))
    assert again.trials == whole.trials[2:]
    assert [record.trial for record in read_records(out)] == whole.trials


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    out = tmp_path / "trials.jsonl"
    run_sweep(Parabola(base=0.8), [BASE], out=out, plan=Plan(refine=0, span=1, seeds=0))
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0] + b'{"trial": 3}\n' + lines[1])
    with pytest.raises(GradvitalsError, match=r"trials\.jsonl, line 2"):
        read_records(out)


# -- time, errors, processes ----------------------------------------------------------------------------------------


def test_no_trial_begins_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = 0.0
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now)

    def train(trial: Trial) -> Result:
        nonlocal now
        now += 50.0 if trial.arm == "vr" else 10.0
        return {"score": 1.0}

    out, plan = tmp_path / "trials.jsonl", Plan(refine=0, span=3, seeds=2)
    outcome = run_sweep(train, [BASE], plan=plan, minutes=0.5, out=out)
    assert (len(outcome.records), now) == (3, 30.0)
    assert outcome.left == 4 + 2

    # What the file says of earlier runs holds until this one knows better; a slower kind of trial has its own.
    slow = replace(VR, batch=8192)
    outcome = run_sweep(train, [BASE, slow], plan=plan, minutes=0.15, out=out)
    assert (len(outcome.records), now) == (3, 30.0)
    outcome = run_sweep(train, [slow, BASE], plan=plan, minutes=1.2, out=out)
    assert [record.trial.arm for record in outcome.records[3:]] == ["vr", "base", "base"]


def test_an_error_stops_its_group_alone() -> None:
    good = Parabola(base=0.8)

    def train(trial: Trial) -> Result:
        if trial.arm == "vr":
            raise ZeroDivisionError("no parts")
        return good(trial)

    outcome = run_sweep(train, [VR, BASE], plan=Plan(refine=0, span=1, seeds=1))
    assert outcome.failures == [(replace(VR, lr=0.4), "ZeroDivisionError: no parts")]
    assert len(outcome.records) == 4
    assert outcome.left == 0


@pytest.mark.usefixtures("warm_spawn")
def test_several_processes_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import math, os
def train(trial):
    return {"score": 80 - math.log2(trial.lr / 1.6) ** 2 + trial.seed / 1000, "process": os.getpid()}
"""
    (tmp_path / "made_up_task.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import made_up_task  # type: ignore[import-not-found]

    seen: list[tuple[int, int]] = []
    outcomes = [
        run_sweep(
            made_up_task.train,
            [BASE, VR],
            plan=Plan(refine=0, span=1, seeds=2),
            workers=workers,
            progress=lambda done, total, label: seen.append((done, total)),
        )
        for workers in (1, 2)
    ]
    one, two = ({record.trial: record.score for record in outcome.records} for outcome in outcomes)
    assert one == two
    assert len(one) == 2 * (4 + 2)
    here, there = ({record.result["process"] for record in outcome.records} for outcome in outcomes)
    assert len(here) == 1
    assert not here & there
    assert seen[11] == seen[-1] == (12, 12)


# -- groups ---------------------------------------------------------------------------------------------------------


def test_groups_are_all_combinations_that_make_sense() -> None:
    groups = make_groups(
        "cifar",
        models=["resnet20"],
        batches=[4096, 8192],
        optimizers=["momentum"],
        arms=["base", "vr", "mean", "wiener-row"],
        ks=[8],
        epochs=2,
        weight_decay=0,
        start_lr=lambda optimizer, batch: batch / 4096,
        gamma_schedules=["constant", "adaptive"],
    )
    found = [(g.arm, g.gamma, g.gamma_schedule, g.lr) for g in groups if g.batch == 8192]
    assert found == [
        ("base", 0.1, "constant", 2.0),
        ("vr", 0.1, "constant", 2.0),
        ("vr", 0.1, "adaptive", 2.0),
        ("mean", 0.1, "constant", 2.0),
        ("wiener-row", 0.0, "constant", 2.0),
    ]
    assert len(groups) == 10


# -- tables ---------------------------------------------------------------------------------------------------------


def record_of(trial: Trial, score: float, train_score: float = 90.0) -> Record:
    phase: Any = "sweep" if trial.seed < FIRST_FRESH_SEED else "fresh"
    result = {"score": score, "train_score": train_score, "chance": 10.0, "seconds": 2.0}
    return Record(trial=trial, phase=phase, result=result, elapsed=3.0)


def by_hand() -> list[Record]:
    """Base: best inside, at 0.8, fresh 80, 82, 84. VR: best at the low edge, 0.4, fresh 79 and one that diverged."""
    sweep = {"base": {0.4: 70.0, 0.8: 81.0, 1.6: math.nan}, "vr": {0.4: 79.5, 0.8: 78.0, 1.6: 60.0}}
    records = [
        record_of(replace(BASE, arm=arm, lr=lr), score) for arm, scores in sweep.items() for lr, score in scores.items()
    ]
    fresh = {("base", 0.8): (80.0, 82.0, 84.0), ("vr", 0.4): (79.0, math.nan), ("vr", 0.8): (99.0,)}
    for (arm, lr), scores in fresh.items():
        for number, score in enumerate(scores):
            records.append(record_of(replace(BASE, arm=arm, lr=lr, seed=FIRST_FRESH_SEED + number), score))
    return records


def test_a_table_worked_by_hand() -> None:
    (comparison,) = summarise(by_hand())["comparisons"]
    base, vr = comparison["arms"]
    assert (base["arm"], base["best_lr"], base["at_edge"], base["n"], base["diverged"]) == ("base", 0.8, False, 3, 0)
    assert base["mean"] == pytest.approx(82)
    assert base["se"] == pytest.approx(2 / math.sqrt(3))  # deviations -2, 0, 2: variance 8/2, over 3
    assert base["train_minus_test"] == pytest.approx(8)
    assert base["difference"] is None
    assert (base["published"], vr["published"]) == (17.40, 92.70)

    assert (vr["best_lr"], vr["at_edge"], vr["n"], vr["diverged"]) == (0.4, True, 2, 1)
    assert vr["mean"] == pytest.approx((79 + 10) / 2)  # what diverged counts as chance
    assert vr["se"] == pytest.approx(34.5)
    assert vr["difference"] == pytest.approx(44.5 - 82)
    assert vr["difference_se"] == pytest.approx(math.sqrt(34.5**2 + 4 / 3))
    assert vr["paired_se"] == pytest.approx(35.5)  # 79 - 80 = -1 and 10 - 82 = -72: deviations of 35.5
    assert vr["train_minus_test"] == pytest.approx(11)  # of the one that did not diverge
    assert math.isnan(vr["train_minus_test_se"])
    assert vr["sweep"] == {"0.4": 79.5, "0.8": 78.0, "1.6": 60.0}


def test_arms_are_compared_with_the_base_of_the_same_k_and_settings() -> None:
    records = by_hand()
    other_k = [replace(r, trial=replace(r.trial, k=16), result=r.result | {"score": 50.0}) for r in records[:3]]
    other_settings = [replace(r, settings={"warmup": 0.3}) for r in records]
    comparisons = summarise([*records, *other_k, *other_settings])["comparisons"]
    assert [len(comparison["arms"]) for comparison in comparisons] == [2, 1, 2]
    assert repr(comparisons[0]["arms"]) == repr(comparisons[2]["arms"])  # nan is not equal to itself
    assert comparisons[1]["k"] == 16
    assert comparisons[2]["settings"] == {"warmup": 0.3}


@pytest.mark.parametrize(
    ("optimizer", "arm", "batch", "accuracy"),
    [("lars", "base", 2048, 82.39), ("adam", "vr", 256, 92.46), ("lamb", "mean", 256, None), ("sgd", "vr", 256, None)],
)
def test_the_papers_cells(optimizer: str, arm: str, batch: int, accuracy: float | None) -> None:
    assert published(replace(BASE, optimizer=optimizer, arm=arm, batch=batch)) == accuracy
    assert published(replace(BASE, task="text", optimizer=optimizer, arm=arm, batch=batch)) is None


def test_the_table_command_reads_several_files(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, record in enumerate(by_hand()):
        append_record(files[number % 2], record)
    arguments = ["table", *map(str, files)]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0
    base, vr = json.loads(result.stdout)["comparisons"][0]["arms"]
    assert (base["mean"], base["n"], vr["n"], vr["train_minus_test_se"]) == (82.0, 3, 2, "nan")
    assert "44.50 ± 34.50" in CliRunner().invoke(main, arguments).stdout


def test_the_grid_is_refined_around_its_best() -> None:
    """The true best lies between the grid's points: halves of the distance are tried beside the best, and again."""
    train = Parabola(base=0.8 * 2**0.5)
    outcome = run_sweep(train, [BASE], plan=Plan(span=1, refine=1, seeds=2))
    fresh = {record.trial.lr for record in outcome.records if record.phase == "fresh"}
    assert [round(lr / 0.8, 4) for lr in fresh] == [1.4142]
    tried = sorted({trial.lr for trial in train.trials})
    assert [round(lr / 0.8, 4) for lr in tried] == [0.5, 0.7071, 1.0, 1.4142, 2.0]
    finer = Parabola(base=0.8 * 2**0.25)
    run_sweep(finer, [BASE], plan=Plan(span=1, refine=2, seeds=1))
    assert round(finer.trials[-1].lr / 0.8, 4) == 1.1892
    assert len(finer.trials) == len(set(finer.trials))
