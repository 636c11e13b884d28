"""Every detector of the comparison, shown one recording: gradvitals, the presets of other projects, trainpulse."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterable, Iterator

from gradvitals.diagnose import Diagnosis, RunInfo
from gradvitals.diagnose.presets import PRESETS
from gradvitals.lab.faults.recording import Recording
from gradvitals.lab.faults.score import OURS, Alarm
from gradvitals.show import verdict
from gradvitals.show.verdict import Level
from gradvitals.types import Finding

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
