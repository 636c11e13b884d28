"""A run that is being written, read on from where the reader was: what `gradvitals watch` knows of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradvitals.show.again import was_diagnosed
from gradvitals.show.checkup import judge_run, num_ranks
from gradvitals.show.curves import Floats, Steps
from gradvitals.show.ending import State, state_of
from gradvitals.show.standouts import LayerRow, Worst, latest_extremes, layer_rows
from gradvitals.show.verdict import Verdict
from gradvitals.store.reader import Run, open_run

METRICS = ("loss", "grad/norm", "gsnr", "noise_scale", "noise_scale_low", "noise_scale_high", "lr", "vrgd/mean")
GONE_SECONDS = 15.0
"""How long a run may be silent before it is taken to have ended without a word."""


@dataclass(frozen=True, kw_only=True)
class LatestTensors:
    """Layers and tensors at the latest reading of them."""

    step: int | None = None
    gsnr_source: str | None = None
    layers: Sequence[LayerRow] = ()
    lowest_gsnr: Sequence[Worst] = ()
    largest_updates: Sequence[Worst] = ()

    @classmethod
    def of(cls, run: Run) -> LatestTensors:
        """Read them from a run."""
        source = next(iter(run.sources("gsnr", "layers")), None)
        step, layers = layer_rows(run, source)
        return cls(
            step=step,
            gsnr_source=source,
            layers=layers,
            lowest_gsnr=latest_extremes(run, "gsnr", lowest=True),
            largest_updates=latest_extremes(run, "update/ratio"),
        )


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A run as it is now."""

    run: str
    state: State
    seconds: float
    num_ranks: int
    num_tensors: int
    num_parameters: int
    last_step: int | None
    series: dict[str, Floats]
    verdict: Verdict | None
    """None for a run that is recorded without diagnosis."""
    latest_tensors: LatestTensors
    ended: bool
    """Whether nothing more is to come."""

    @property
    def latest(self) -> dict[str, float]:
        """The newest value of each metric."""
        return {metric: float(values[-1]) for metric, values in self.series.items() if values.size}

    def to_json(self) -> dict[str, Any]:
        """One line of `gradvitals watch --json`."""
        verdict = self.verdict
        return {
            "run": self.run,
            "state": self.state,
            "seconds": self.seconds,
            "ranks": self.num_ranks,
            "last_step": self.last_step,
            "values": self.latest,
            "verdict": verdict.to_json() if verdict is not None else None,
            "findings": [item.to_json() for item in verdict.findings] if verdict is not None else [],
        }


class Follower:
    """Follows one run. Only what is new is read of its series; a file that was replaced is opened again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._run = open_run(self._path)
        self._file = self._identity()
        self._forget()

    def _forget(self) -> None:
        self._writer = (self._run.meta["hostname"], self._run.meta["pid"], len(self._run.segments))
        self._series: dict[str, tuple[Steps, Floats]] = {}
        self._sources: dict[str, str | None] = {}
        self._shown: list[int] | None = None
        self._latest = LatestTensors()

    def look(self) -> Moment:
        """Read what is new, and tell how the run is."""
        if self._identity() != self._file:
            self._run.close()
            self._open()
        run, meta = self._run, self._run.meta
        if (meta["hostname"], meta["pid"], len(run.segments)) != self._writer:
            self._forget()  # another process goes on with it, perhaps from an earlier step
        available = run.metrics("values")
        for metric in METRICS:
            if metric in available:
                self._read_on(run, metric)
        if (read := self._tensors_read(run)) != self._shown:
            self._shown, self._latest = read, LatestTensors.of(run)
        state = state_of(run)
        silent = time.time() - meta["heartbeat"]
        return Moment(
            run=str(run.path),
            state=state,
            seconds=(meta["finished_at"] or meta["heartbeat"]) - meta["started_at"],
            num_ranks=num_ranks(meta),
            num_tensors=len(run.tensors),
            num_parameters=sum(info.numel for info in run.tensors),
            last_step=run.last_step,
            series={metric: values for metric, (_, values) in self._series.items()},
            verdict=judge_run(run, run.findings()) if was_diagnosed(meta) and run.last_step is not None else None,
            latest_tensors=self._latest,
            ended=state == "finished" or (state == "stopped" and silent > GONE_SECONDS),
        )

    @property
    def is_finished(self) -> bool:
        """Whether the run was closed: far less to read than a look."""
        return self._run.meta["finished_at"] is not None

    def close(self) -> None:
        """Let go of the file."""
        self._run.close()

    def _read_on(self, run: Run, metric: str) -> None:
        source = next(iter(run.sources(metric, "values")), None)
        if source != self._sources.get(metric):
            self._sources[metric] = source
            self._series.pop(metric, None)  # numbers of different sources are never mixed
        steps, values = self._series.get(metric, (np.empty(0, np.int64), np.empty(0)))
        more, new = run.series(metric, source=source, since=int(steps[-1]) if steps.size else None)
        if more.size:
            self._series[metric] = (np.concatenate([steps, more]), np.concatenate([values, new]))

    def _tensors_read(self, run: Run) -> list[int]:
        """When single tensors were last read: reading them is what takes long, and they seldom change."""
        steps = []
        for metric in ("grad/norm", "gsnr", "update/ratio"):
            if metric in run.metrics("tensors"):
                steps += run.times(metric, kind="tensors")[0][-1:].tolist()
        return steps

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._run.file.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino
