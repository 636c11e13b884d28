"""How well detectors do: gradvitals, the presets of other projects and trainpulse on one recording.

The scores are pure functions of what was planted and what was reported.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from benchmarks.faults.presets import PRESETS
from benchmarks.faults.record import Recording
from gradvitals.diagnose import Diagnosis, RunInfo
from gradvitals.report import verdict
from gradvitals.report.verdict import Level
from gradvitals.types import Finding, FloatArray

OURS = "gradvitals"
HEALTHY_STEPS = 10_000
"""False alarms are counted per this many."""

LAST_STEPS = 20
"""The end of a run, to compare losses over."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Something a detector said, when it first said it."""

    id: str
    """The rule; for detectors that have one only, their own name."""
    step: int
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What was wrong with a run, and what would be the right answer."""

    kind: Literal["step", "slow"]
    step: int
    finds: tuple[str, ...]
    place: tuple[str, ...] = ()
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run and what every detector said about it."""

    name: str
    task: str
    seed: int
    steps: int
    fault: Planted | None
    """None for a healthy control."""
    alarms: Mapping[str, Sequence[Alarm]]
    """By detector, in the order they were raised."""
    series: Mapping[str, FloatArray] = field(default_factory=dict)
    """Loss and norms at every step, to see what the fault did."""
    verdict: str = "healthy"
    """What the doctor says at the end."""
    seconds: float = 0.0
    """Processor time to train, with the monitor."""
    diagnosis_ms: float = 0.0
    """To diagnose one step."""


def found(outcome: Outcome, detector: str) -> list[Alarm]:
    """The alarms that recognise the fault, the earliest first."""
    fault = outcome.fault
    if fault is None:
        return []
    alarms = [alarm for alarm in outcome.alarms.get(detector, ()) if alarm.step >= fault.step]
    return [alarm for alarm in alarms if detector != OURS or alarm.id in fault.finds]


def belongs(name: str, place: Iterable[str]) -> bool:
    """Whether a tensor, layer or head is part of a place.

    >>> belongs("blocks.1.attn/head2", ["blocks.1.attn"]), belongs("blocks.10.mlp", ["blocks.1"])
    (True, False)
    """
    return any(name == part or name.startswith((f"{part}.", f"{part}/")) for part in place)


def right_place(alarms: Iterable[Alarm], place: Sequence[str]) -> bool:
    """Whether the first of these alarms that names tensors names the right ones."""
    named = next((alarm.tensors for alarm in alarms if alarm.tensors), ())
    return bool(named) and belongs(named[0], place)


def false_alarms(outcome: Outcome, detector: str) -> list[Alarm]:
    """What was said while nothing was wrong."""
    alarms = outcome.alarms.get(detector, ())
    return [alarm for alarm in alarms if outcome.fault is None or alarm.step < outcome.fault.step]


def healthy_steps(outcome: Outcome) -> int:
    """Steps of a run in which nothing was wrong."""
    return outcome.steps if outcome.fault is None else outcome.fault.step


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How a detector did over some runs with a fault. None where there is nothing to count."""

    runs: int
    found: int
    with_place: int
    placed: int
    delays: tuple[int, ...]
    rules: tuple[str, ...]
    """The rules that found it first, the most frequent first."""

    @property
    def recall(self) -> float | None:
        """Share of runs whose fault was found."""
        return self.found / self.runs if self.runs else None

    @property
    def place(self) -> float | None:
        """Share of those with a place whose place was named right; one that was not found was not placed."""
        return self.placed / self.with_place if self.with_place else None

    @property
    def delay(self) -> float | None:
        """Median steps until found, over those that were."""
        return statistics.median(self.delays) if self.delays else None


def tally(outcomes: Iterable[Outcome], detector: str) -> Tally:
    """Count finds, places and delays of the runs that have a fault."""
    faulty = [(outcome, outcome.fault) for outcome in outcomes if outcome.fault is not None]
    finds = [found(outcome, detector) for outcome, _ in faulty]
    firsts = Counter(alarms[0].id for alarms in finds if alarms)
    return Tally(
        runs=len(faulty),
        found=sum(bool(alarms) for alarms in finds),
        with_place=sum(bool(fault.place) for _, fault in faulty),
        placed=sum(right_place(alarms, fault.place) for alarms, (_, fault) in zip(finds, faulty, strict=True)),
        delays=tuple(alarms[0].step - fault.step for alarms, (_, fault) in zip(finds, faulty, strict=True) if alarms),
        rules=tuple(name for name, _ in firsts.most_common()),
    )


def alarm_rate(outcomes: Iterable[Outcome], detector: str) -> float | None:
    """False alarms in these runs per 10,000 healthy steps; None where there is no healthy step."""
    runs = list(outcomes)
    steps = sum(map(healthy_steps, runs))
    count = sum(len(false_alarms(outcome, detector)) for outcome in runs)
    return HEALTHY_STEPS * count / steps if steps else None


def controls(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The healthy runs."""
    return [outcome for outcome in outcomes if outcome.fault is None]


def faulty(outcomes: Iterable[Outcome], kind: str | None = None) -> list[Outcome]:
    """The runs with a fault, of one kind or all."""
    return [outcome for outcome in outcomes if outcome.fault and kind in (None, outcome.fault.kind)]


# -- what a fault did -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A run beside its healthy twin, which has the same seed, weights and data. NaN where a run has become NaN."""

    loss: float
    """At the end."""
    twin_loss: float
    norm_ratio: float
    """The gradient norm over the twin's: where it is furthest from 1 after the fault was planted."""
    update_ratio: float
    """The same of the update's norm."""
    first_difference: int | None
    """The first step at which loss or norm differ at all; None where they never do."""


def effect(outcome: Outcome, twin: Outcome) -> Effect:
    """What the fault changed."""
    since = outcome.fault.step if outcome.fault else 0
    steps = min(outcome.steps, twin.steps)
    ours, theirs = ({name: series[:steps] for name, series in run.series.items()} for run in (outcome, twin))
    different = [ours[name] != theirs[name] for name in ("loss", "grad/norm") if name in ours and name in theirs]
    at = np.flatnonzero(np.any(different, axis=0)) if different else np.zeros(0)
    return Effect(
        loss=float(np.mean(ours["loss"][-LAST_STEPS:])),
        twin_loss=float(np.mean(theirs["loss"][-LAST_STEPS:])),
        norm_ratio=_furthest_from_one(ours["grad/norm"][since:], theirs["grad/norm"][since:]),
        update_ratio=_furthest_from_one(ours["update/norm"][since:], theirs["update/norm"][since:]),
        first_difference=int(at[0]) if at.size else None,
    )


def _furthest_from_one(ours: FloatArray, theirs: FloatArray) -> float:
    with np.errstate(all="ignore"):
        ratio = ours / theirs
        distance = np.abs(np.log(ratio))
    known = np.flatnonzero(np.isfinite(distance))
    return float(ratio[known[np.argmax(distance[known])]]) if known.size else float("nan")


TRAINPULSE = "trainpulse"
QUIET_STEPS = 20
"""A detector that flags again within this many steps is still on the same matter: one alarm, not many."""

Numbers = tuple[int, float, float, float, float]
"""Of one step: its number, loss, gradient norm, update norm and learning rate."""


def has_trainpulse() -> bool:
    """Whether trainpulse is installed; it is no dependency of gradvitals."""
    return importlib.util.find_spec(TRAINPULSE) is not None


def judge(recording: Recording) -> tuple[dict[str, list[Alarm]], Level, float]:
    """What every detector says about a recording, the verdict, and milliseconds that gradvitals took for a step."""
    start = time.process_time()
    ours, level = diagnose(recording)
    said = {OURS: ours}
    milliseconds = 1000 * (time.process_time() - start) / max(1, len(recording.steps))
    numbers = list(_numbers(recording))
    if has_trainpulse():
        said[TRAINPULSE] = _trainpulse(numbers)
    for name in PRESETS:
        said[name] = _preset(name, numbers)
    return said, level, milliseconds


def diagnose(recording: Recording) -> tuple[list[Alarm], Level]:
    """The findings of gradvitals, each as it was when it first had a severity of warning or above, and its verdict."""
    diagnosis = Diagnosis(info=RunInfo.from_json(recording.facts))
    diagnosis.describe(recording.layout)
    told: set[tuple[str, int]] = set()
    alarms: list[Alarm] = []
    for readings in recording.steps:
        for finding in diagnosis.read(readings):
            if finding.severity != "info" and _key(finding) not in told:
                told.add(_key(finding))
                alarms.append(Alarm(id=finding.id, step=readings[0].step, tensors=finding.tensors))
    diagnosis.finish()
    last = recording.steps[-1][0].step if recording.steps else 0
    return alarms, verdict.judge(diagnosis.findings, last_step=last, steps=len(recording.steps)).level


def _key(finding: Finding) -> tuple[str, int]:
    """Of one finding as long as it goes on."""
    return finding.id, finding.first_step if finding.found_step is None else finding.found_step


def _numbers(recording: Recording) -> Iterator[Numbers]:
    # Where the norm of the update is not read at every step, it follows from what is.
    size = math.sqrt(sum(info.numel for info in recording.layout.tensors))
    for readings in recording.steps:
        values = {name: value for reading in reversed(readings) for name, value in reading.values.items()}
        update = values.get("update/norm", size * values.get("update/rms", math.nan))
        loss, norm, lr = (values.get(name, math.nan) for name in ("loss", "grad/norm", "lr"))
        yield readings[0].step, loss, norm, update, lr


def _preset(name: str, numbers: Iterable[Numbers]) -> list[Alarm]:
    detector = PRESETS[name]()
    return _episodes((name, step) for step, loss, norm, update, _ in numbers if detector.update(loss, norm, update))


def _trainpulse(numbers: Iterable[Numbers]) -> list[Alarm]:
    """As its README has it: loss, gradient norm and learning rate at every step, all settings as they come."""
    from trainpulse import AlertSeverity, Monitor

    monitor = Monitor()
    flags = []
    for step, loss, norm, _, lr in numbers:
        for metric, value in (("loss", loss), ("grad_norm", norm), ("lr", lr)):
            alerts = monitor.log(metric, step, value)
            flags += [(alert.detector, step) for alert in alerts if alert.severity != AlertSeverity.INFO]
    return _episodes(flags)


def _episodes(flags: Iterable[tuple[str, int]]) -> list[Alarm]:
    """Flags of one kind that follow each other closely as one alarm."""
    last: dict[str, int] = {}
    alarms = []
    for name, step in flags:
        if name not in last or step - last[name] > QUIET_STEPS:
            alarms.append(Alarm(id=name, step=step))
        last[name] = step
    return alarms
