"""What improves a bad start, with three trainings each: the advice followed by program, and two common searches."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import grid
from experiments.advice.faults import FAULTS
from experiments.advice.tasks import TASKS, Job, Settings, changed, num_steps, train
from gradvitals.advise import CONFIDENCES, Advised, advise
from gradvitals.report.verdict import Verdict
from gradvitals.store import open_run

ROUNDS = 3
KNOWN = frozenset(one.name for one in fields(Settings))
LARGEST, SMALLEST = 1024, 2
"""Batches that a change may ask for."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """One start under one arm."""

    arm: str
    task: str
    place: int
    fault: str
    seed: int
    losses: list[float]
    """Held-out loss of the start, where the arm trained it, and after each round."""
    applied: list[dict[str, Any]]
    """What each round changed, and on whose word."""


# -- the advice, followed by program ---------------------------------------------------------------------------------


def change_of(verdict: Verdict, own: Settings, regression: bool = False) -> tuple[str, dict[str, Any]]:
    """Returns the first change of a verdict that a program can make, and the finding it is of; else nothing.

    Findings that are only notes are left out. A change that names a setting that the training does not have, or has
    already, is none: a longer training is one, because all arms have the same number of samples.
    """
    for finding in (item.finding for item in verdict.ranked if item.weight != "info"):
        for fix in finding.fixes:
            change = applicable(dict(getattr(fix, "change", {})), own)
            if change:
                return finding.id, change
    return "", {}


def applicable(change: dict[str, Any], own: Settings) -> dict[str, Any]:
    """Returns the part of a change that a training has settings for and that changes something."""
    translated = dict(change)
    if change.get("initialization") in ("default", "kaiming"):
        translated["initialization"] = 1.0
    if "batch_size" in change:
        translated["batch_size"] = int(min(max(change["batch_size"], SMALLEST), LARGEST))
    return {name: value for name, value in translated.items() if name in KNOWN and getattr(own, name) != value}


def proposals_of(advised: Advised, own: Settings, sgd: bool) -> tuple[str, dict[str, Any]]:
    """Returns what `gradvitals advise` proposes to change, with fair confidence or better, and the topics."""
    changes: dict[str, dict[str, Any]] = {}
    rate, clip, batch, warmup, decay = (
        piece.values if CONFIDENCES.index(piece.confidence) >= CONFIDENCES.index("fair") else {}
        for piece in (advised.learning_rate, advised.max_grad_norm, advised.batch_size, advised.warmup, advised.decay)
    )
    if rate and rate["proposed"] is not None:
        changes["learning_rate"] = {"lr": rate["proposed"]}
    if clip:
        used, share = clip["clips_at"], clip["clips"]
        if used is None or share > 0.5 or used > 3 * clip["max_norm"]:
            changes["max_grad_norm"] = {"max_norm": clip["max_norm"]}
    # A larger batch saves steps and no samples, of which every training here has the same number.
    if batch and batch["proposed"] is not None and batch["proposed"] < own.batch_size and not changes:
        size = max(int(batch["proposed"]), SMALLEST)
        ratio = size / own.batch_size
        changes["batch_size"] = {"batch_size": size, "lr": own.lr * (ratio if sgd else math.sqrt(ratio))}
    if warmup and warmup["steps"] is not None and warmup["steps"] != warmup["used"]:
        changes["warmup"] = {"warmup": int(warmup["steps"])}
    if decay and decay["step"] is not None and own.decay_step is None:
        changes["decay"] = {"decay_step": int(decay["step"])}
    merged: dict[str, Any] = {}
    for change in changes.values():
        merged |= applicable(change, own)
    return "advise: " + ", ".join(changes), merged


def follow_advice(job: Job, place: int, fault: str, rounds: int = ROUNDS) -> Course:
    """Train, do what the verdict or else the advice says, train again."""
    losses, applied = [], list[dict[str, Any]]()
    for turn in range(rounds + 1):
        with tempfile.TemporaryDirectory(prefix="advice", ignore_cleanup_errors=True) as folder:
            loss, _ = train(job, Path(folder) / "run")
            losses.append(loss)
            if turn == rounds:
                break
            with open_run(Path(folder) / "run") as run:
                who, change = change_of(run.verdict, job.settings)
                found = [f"{item.finding.id} ({item.weight})" for item in run.verdict.ranked]
                if not change:
                    who, change = proposals_of(advise(run), job.settings, TASKS[job.task].optimizer == "sgd")
        if not change:
            losses += [loss] * (rounds - turn)
            applied += [{"by": "nothing to change", "findings": found}] * (rounds - turn)
            break
        before = {name: getattr(job.settings, name) for name in change}
        applied.append({"by": who, "change": change, "before": before, "findings": found})
        job = replace(job, settings=changed(job.settings, **change))
    return Course(arm="advice", task=job.task, place=place, fault=fault, seed=job.seed, losses=losses, applied=applied)


# -- what it is compared with ----------------------------------------------------------------------------------------


def random_settings(own: Settings, good: Settings, draw: random.Random) -> dict[str, Any]:
    """Returns numbers drawn from the range the bad starts come from: around the tuned ones, which no user knows."""
    return {
        "lr": good.lr * 10 ** draw.uniform(-2, 2),
        "batch_size": max(SMALLEST, int(good.batch_size * 2.0 ** draw.randint(-3, 3))),
        "max_norm": draw.choice((None, 0.1, 1.0, 10.0)),
        "warmup": draw.choice((0, 10, 50)),
        "weight_decay": draw.choice((0.0, 1e-4, 1e-2, 0.1)),
        "momentum": draw.choice((0.0, 0.9, 0.95, 0.99)),
    }


def search_randomly(job: Job, place: int, fault: str, good: Settings, rounds: int = ROUNDS) -> Course:
    """Train with random numbers; what is no number stays as the start has it."""
    draw = random.Random(f"search {job.task} {place}")
    applied = [random_settings(job.settings, good, draw) for _ in range(rounds)]
    losses = [train(replace(job, settings=changed(job.settings, **some)))[0] for some in applied]
    return Course(arm="random", task=job.task, place=place, fault=fault, seed=job.seed, losses=losses, applied=applied)


def suggested_lr(lrs: list[float], losses: list[float]) -> float | None:
    """Returns the learning rate at the steepest fall of a range test, as Lightning's `lr_find` suggests it.

    Losses are smoothed as there (0.98, bias-corrected), the first ten and the last are left out, and the test ends
    where the loss is four times the best so far.
    """
    smooth, average, best = list[float](), 0.0, math.inf
    for count, loss in enumerate(losses, start=1):
        average = 0.98 * average + 0.02 * loss
        smooth.append(average / (1 - 0.98**count))
        if count > 1 and smooth[-1] > 4 * best:
            break
        best = min(best, smooth[-1])
    kept = np.array(smooth[10:-1])
    kept = kept[np.isfinite(kept)]
    return lrs[10 + int(np.gradient(kept).argmin())] if len(kept) >= 2 else None


RANGE = (1e-8, 1.0, 100)
"""Lowest and highest learning rate of the range test, and its steps: Lightning's defaults."""


def find_lr(job: Job, place: int, fault: str, rounds: int = ROUNDS) -> Course:
    """Find the learning rate by a range test and train with it; further rounds draw other batches."""
    low, high, count = RANGE
    lrs = [low * (high / low) ** (step / count) for step in range(count)]
    losses, applied = [], list[dict[str, Any]]()
    for turn in range(rounds):
        _, test = train(replace(job, seed=job.seed + 1000 * turn), lrs=iter(lrs))
        lr = suggested_lr(lrs, test)
        applied.append({"lr": lr})
        chosen = job if lr is None else replace(job, settings=changed(job.settings, lr=lr))
        losses.append(train(chosen)[0])
    return Course(arm="finder", task=job.task, place=place, fault=fault, seed=job.seed, losses=losses, applied=applied)


# -- the tuned reference ---------------------------------------------------------------------------------------------

LR_STEP = 3.0
Tried = list[tuple[Settings, float]]
"""Settings and their held-out losses."""


def best_of(tried: Tried) -> Settings:
    """Returns the settings with the lowest loss."""
    return min(tried, key=lambda item: item[1])[0]


def untried(task: str, tried: Tried) -> list[Settings]:
    """Returns the settings to train next; none when the sweep is done.

    First a grid of learning rate and batch, wider until the best lies inside; then clipping, warmup and the rates
    beside the best.
    """
    start = TASKS[task].start
    places = {point: (one, loss) for one, loss in tried if (point := _place(one, start)) is not None}
    points = grid.untried(
        {point: loss for point, (_, loss) in places.items()}, 2, lambda point: _at(start, point) is not None
    )
    if points:
        return [one for point in points if (one := _at(start, point)) is not None]
    best = best_of(list(places.values()))
    steps = num_steps(Job(task=task, settings=best, seed=0))
    rest = [changed(best, lr=best.lr * step) for step in (LR_STEP**-0.5, LR_STEP**0.5)]
    rest += [changed(best, max_norm=norm) for norm in (None, 0.3, 1.0, 3.0)]
    rest += [changed(best, warmup=round(share * steps)) for share in (0.05, 0.15)]
    rest += [changed(best, lr=best.lr * LR_STEP**0.5, warmup=round(0.1 * steps), max_norm=norm) for norm in (None, 1.0)]
    known = {settings for settings, _ in tried}
    return [one for one in rest if one not in known]


def _at(start: Settings, point: grid.Point) -> Settings | None:
    size = start.batch_size * 2.0 ** point[1]
    return changed(start, lr=start.lr * LR_STEP ** point[0], batch_size=int(size)) if size >= SMALLEST else None


def _place(settings: Settings, start: Settings) -> grid.Point | None:
    """Returns where settings are in the grid; None for those beside it."""
    steps = math.log(settings.lr / start.lr, LR_STEP)
    point = (round(steps), round(math.log2(settings.batch_size / start.batch_size)))
    return point if _at(start, point) == settings else None


def to_json(course: Course) -> dict[str, Any]:
    """Returns a course as plain values."""
    return asdict(course)


def every_start(places: int) -> Iterator[tuple[int, int]]:
    """Yields the places of starts with the seed of each: three in turn, which the reference is measured with too."""
    yield from ((place, FIRST_SEED + place % SEEDS) for place in range(places))


FIRST_SEED, SEEDS = 100, 3
"""Seeds that chose nothing."""


# -- jobs of worker processes, which cannot find functions of a `__main__` module --------------------------------------


def loss_of(job: Job) -> float:
    """Returns the held-out loss of one training."""
    return train(job)[0]


def course_of(item: tuple[str, Job, int, Settings]) -> Course:
    """Returns the course of one start under one arm."""
    arm, job, place, good = item
    fault = list(FAULTS)[place]
    if arm == "advice":
        return follow_advice(job, place, fault)
    return search_randomly(job, place, fault, good) if arm == "random" else find_lr(job, place, fault)
