"""Monitor: the one object a user holds. It wires the layers together and holds no maths."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gradvitals import notices
from gradvitals.arguments import check_arguments
from gradvitals.config import Config
from gradvitals.errors import RunError
from gradvitals.judge import Judge, say
from gradvitals.measure import Interpreter, RawStep, Tap
from gradvitals.measure.budget import Budget
from gradvitals.measure.outbox import Job
from gradvitals.measure.sentinel import is_distributed
from gradvitals.measure.sources import missing_sources
from gradvitals.store import THREAD_NAME, BackgroundWriter, call_weakly, free_run_path, next_step, run_id
from gradvitals.types import SOURCES, Action, Finding, Layout, Reading, Source, json_ready

Record = Reading | Finding | Action | Layout

STORED_SPIKE_RATIO = 2.0
"""A step whose norm is this far over its moving average keeps its per-tensor numbers even when not due."""
CLEAN_STEPS = 20
"""After a non-finite gradient, elements are counted until this many steps have been free of them."""
STATE_VERSION = 1


class Monitor:
    """Watches one training run and keeps what it sees. See `gradvitals.watch`, whose arguments it takes."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        run: str | Path | None = None,
        config: Config | None = None,
        batch_size: float | None = None,
        resume: bool = False,
        on_reading: Callable[[Reading], object] | None = None,
    ) -> None:
        self._closed = True  # nothing to close before all of this has worked
        optimizers = check_arguments(model, optimizer, config, batch_size)
        self.config = config if config is not None else Config()
        self._notices: list[Finding] = []
        self._actions: deque[Action] = deque(maxlen=10_000)
        self._at_close: list[Callable[[], object]] = []
        path = Path(run or Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S"))
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
        self._path = path.with_name(f"{path.name}-rank{rank}") if rank else path  # one run a process, so far
        self._resume = resume
        self._readers = [on_reading] if on_reading is not None else []
        self._writer: BackgroundWriter | None = None
        self._layout: Layout | None = None
        self._latest: dict[Source | None, dict[str, float]] = {}
        self._interpreter = Interpreter(self.config, self._on_error)
        self._judge: Judge | None = None
        if self.config.diagnose:
            self._judge = Judge(optimizers, self.config, world_size=world_size, on_error=self._on_rule_error)
        share = self.config.overhead_budget
        self._budget = Budget(share, self.config.tensor_every) if share is not None else None
        self._single_batch_readings = 0
        self._clean_steps = CLEAN_STEPS
        self._aside: list[Record] | None = None
        self._tap = Tap(
            model, optimizers, self.config, deliver=self._deliver, on_error=self._on_error, batch_size=batch_size
        )
        self._closed = False
        if resume:
            self._tap.start(next_step(self._path))
        for source, reason in missing_sources(self.config, optimizers):
            self.report(notices.source_unavailable(source, reason, self._now()))

    # -- in the loop --------------------------------------------------------------------------------------------

    def observe(self, loss: Tensor | float | None = None, *, batch_size: float | None = None) -> None:
        """Tell the Monitor the loss, after backward and before any clipping of your own.

        Optional: without it readings are taken when the optimizer steps, and there is no loss to show. When
        gradients are accumulated it may be called once a step or after every micro-batch.

        Args:
            loss: The loss as you would plot it: not divided by the number of micro-batches, not scaled.
            batch_size: Samples behind this loss; needed only where it differs from step to step or between
                micro-batches.
        """
        if not self._closed:
            self._tap.observe(loss, batch_size)

    @property
    def step(self) -> int:
        """The optimizer step in progress, from 0."""
        return self._tap.step

    @property
    def latest(self) -> dict[str, float]:
        """The newest global value of every metric that has been read so far, the best source first."""
        merged: dict[str, float] = {}
        for source in (*reversed(SOURCES), None):
            merged |= self._latest.get(source, {})
        return merged

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, about training and monitoring. Those without a last step go on."""
        return [*self._notices, *(self._judge.findings if self._judge is not None else ())]

    @property
    def actions(self) -> list[Action]:
        """What a Guard or a schedule did so far, or would have done: the last 10,000; the run keeps all."""
        return list(self._actions)

    @property
    def run_path(self) -> Path:
        """Its folder."""
        return self._path if self._writer is None else self._writer.path

    # -- for those who act on what it sees ----------------------------------------------------------------------

    @property
    def tap(self) -> Tap:
        """Where gradients are read."""
        return self._tap

    @property
    def judge(self) -> Judge | None:
        """Who judges the readings; None where nobody does, or no longer."""
        return None if self._judge is None or self._judge.failed else self._judge

    def add_reader(self, reader: Callable[[Reading], object]) -> None:
        """Have this called with every reading, beside `on_reading`."""
        self._readers.append(reader)

    def record(self, action: Action | Callable[[], Iterable[Record]]) -> None:
        """Keep what was done with the run; or what a function returns, once the steps so far are judged."""
        if isinstance(action, Action):
            self._actions.append(action)
        if self._writer is not None:
            self._writer.put(action)

    def hurry(self) -> None:
        """Have the steps made so far judged now rather than with the next ones; does not wait for it."""
        self._tap.flush()
        if self._writer is not None:
            self._writer.hurry()

    def at_close(self, callback: Callable[[], object]) -> None:
        """Have this called when the Monitor closes, while it still writes."""
        self._at_close.append(callback)

    def state_soon(self) -> Callable[[], dict[str, Any]]:
        """The state of this moment, for who cannot wait for it: what is returned waits for it, on another thread."""
        self._tap.flush()
        own, answer = self._own_state(), SimpleQueue[dict[str, Any]]()

        def tell() -> tuple[()]:
            answer.put(self._judged_state())
            return ()

        if self._writer is None or not self._writer.put(tell):
            tell()
        return lambda: own | answer.get(timeout=60.0)

    # -- the end ------------------------------------------------------------------------------------------------

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until everything read so far is on disk. Returns whether it is."""
        self._tap.flush()
        return self._writer.flush(timeout) if self._writer is not None else True

    def close(self, error: BaseException | None = None) -> None:
        """Stop watching: hooks go, what is on its way is written, the run is marked finished.

        An error that ended training is kept with the run; a ``with`` block tells it by itself.
        """
        if self._closed:
            return
        for callback in self._at_close:
            try:
                callback()
            except Exception as failure:
                self._on_error("close", failure)
        self._closed = True
        if error is not None:
            self.report(notices.training_stopped(error, self._now()))
        self._tap.close()
        if self._writer is not None:
            if self._judge is not None:
                self._writer.put(self._judge.finish)  # after the last step has been judged
            self._writer.close(30.0)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()  # dropped by a function that returned: its last steps are still to be written

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def __repr__(self) -> str:
        return f"Monitor(step={self.step}, run={str(self.run_path)!r}, findings={len(self.findings)})"

    # -- resuming -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs so that windows, step count and record go on where they were."""
        self._tap.flush()
        if self._writer is not None:
            self._writer.drain(30.0)
        return {**self._own_state(), **self._judged_state()}

    def _own_state(self) -> dict[str, Any]:
        number = self._writer.run_id if self._writer is not None else None
        named = {"version": STATE_VERSION, "run": str(self.run_path), "run_id": number}
        return {**named, "tap": self._tap.state_dict()}

    def _judged_state(self) -> dict[str, Any]:
        judged = self._judge.state_dict() if self._judge is not None else None
        return {"interpreter": self._interpreter.state_dict(), "diagnosis": judged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run from a saved state. Call it before the first step.

        Where the saved run's folder is still there, its record is continued; readings it holds from after the
        checkpoint are hidden, not deleted. Else a new record begins at the saved step.
        """
        if state.get("version") != STATE_VERSION:
            raise RunError(f"the state has version {state.get('version')!r}; this gradvitals reads {STATE_VERSION}")
        if self._writer is not None:
            raise RunError(f"load_state_dict was called after {self.step} steps; call it before the first one")
        self._tap.load_state_dict(state["tap"])
        self._interpreter.load_state_dict(state["interpreter"])
        if self._judge is not None and state["diagnosis"] is not None:
            self._judge.load_state_dict(state["diagnosis"])
        for place in (self._path, Path(state["run"])):  # a run that was copied or moved goes on where it is now
            if state["run_id"] is not None and run_id(place) == state["run_id"] and not self._resume:
                self._path, self._resume = place, True

    # -- on the training thread ---------------------------------------------------------------------------------

    def _deliver(self, steps: Sequence[RawStep]) -> None:
        if self._writer is None:
            self._open(steps[0].step)
        assert self._writer is not None
        self._writer.put(Job(steps, self._complete))

    def _open(self, first_step: int) -> None:
        path = self._path if self._resume else free_run_path(self._path)
        if path != self._path:
            say(f"{self._path} holds a run already; this one is kept in {path}", self.config.quiet)
        meta = {"config": json_ready(asdict(self.config)), "extra": json_ready(dict(self.config.extra))}
        meta["torch"] = torch.__version__
        if self._judge is not None:
            if self._tap.autocast is not None:
                self._judge.note_autocast(self._tap.autocast)
            meta["facts"] = self._judge.diagnosis.facts.to_json()
        self._writer = BackgroundWriter(
            path,
            meta=meta,
            resume=self._resume,
            first_step=first_step,
            queue_size=self.config.queue_size,
            on_error=call_weakly(self._on_store_error),
        )
        for record in cast(list[Record], [*self._notices, *self._actions]):
            self._writer.put(record)
        # At exit the last steps are still on their way. Registered after the writer's own, so it runs before it; by a
        # weak reference, so that a Monitor that is dropped can go, and its model with it.
        atexit.register(_close, weakref.ref(self))

    # -- on the writer's thread ---------------------------------------------------------------------------------

    def _complete(self, steps: Sequence[RawStep]) -> Iterable[Record]:
        """Finish the readings of some steps. What is reported meanwhile is kept with them, even while closing."""
        self._aside = []
        try:
            records: list[Record] = []
            for raw in steps:
                try:
                    records += self._records(raw)
                except Exception as error:  # one step is lost, not those around it
                    self._on_error("interpret", error)
            return [*records, *self._aside]
        finally:
            self._aside = None

    def _records(self, raw: RawStep) -> list[Record]:
        started = time.thread_time()
        readings = self._interpreter.finish(raw)
        if not readings:
            return []
        if self._budget is not None:
            readings[0] = self._account(raw, readings[0], time.thread_time() - started)
        for reading in readings:
            self._latest[reading.source] = {**self._latest.get(reading.source, {}), **reading.values}
            self._show(reading)
        self._note_single_batches(raw)
        records: list[Record] = []
        if raw.layout is not self._layout:
            self._layout = raw.layout
            records.append(raw.layout)
        general = readings[0]
        broken = general.values.get("grad/nonfinite", 0) > 0
        self._clean_steps = 0 if broken else self._clean_steps + 1
        self._tap.count_nonfinite = self._clean_steps < CLEAN_STEPS
        remarkable = broken or general.values.get("grad/spike_ratio", 0) >= STORED_SPIKE_RATIO
        records += self._judged(readings, raw.layout)
        if not raw.full and not remarkable:
            readings[0] = replace(general, tensors={})
        return [*records, *readings]

    def _judged(self, readings: Sequence[Reading], layout: Layout) -> Sequence[Finding]:
        try:
            return self._judge.read(readings, layout) if self._judge is not None and not self._judge.failed else ()
        except Exception as error:
            assert self._judge is not None
            self._judge.failed = True  # what it has found stays
            self._on_error("diagnosis", error)
            return ()

    def _show(self, reading: Reading) -> None:
        for reader in list(self._readers):
            try:
                reader(reading)
            except Exception as error:
                self._readers.remove(reader)
                self._on_error("on_reading", error)

    def _account(self, raw: RawStep, reading: Reading, own_seconds: float) -> Reading:
        """Charge this step's cost to the budget and thin the readings where it is overdrawn."""
        assert self._budget is not None
        self._budget.charge(raw.lap, own_seconds, full=raw.full)
        spent, every = self._budget.spent, self._tap.every
        wanted = self._budget.propose(every)
        if wanted != every:
            self._tap.every = wanted
            if wanted > every:
                share = self._budget.share
                self.report(notices.readings_thinned(raw.step, spent=spent, budget=share, before=every, after=wanted))
        return replace(reading, values={**reading.values, "monitor/overhead": spent})

    def _note_single_batches(self, raw: RawStep) -> None:
        if not raw.full or not any(station.micro_batches == 1 for station in raw.stations):
            return
        self._single_batch_readings += 1
        if self._single_batch_readings == 2:
            reason = "this loop runs one backward pass a step; GSNR at one set of weights needs two or more"
            self.report(notices.source_unavailable("micro-batches", reason, raw.step))

    # -- findings of our own ------------------------------------------------------------------------------------

    def report(self, finding: Finding) -> None:
        """Keep what gradvitals has to say about itself with the run."""
        self._notices.append(finding)
        if finding.severity != "info":
            say(str(finding), self.config.quiet)
        if self._aside is not None and threading.current_thread().name == THREAD_NAME:
            self._aside.append(finding)
        elif self._writer is not None:
            self._writer.put(finding)

    def _on_error(self, part: str, error: Exception) -> None:
        self.report(notices.monitor_error(part, error, self._now()))

    def _on_rule_error(self, rule: str, error: Exception) -> None:
        self.report(notices.rule_error(rule, error, self._now()))

    def _on_store_error(self, error: BaseException) -> None:
        self.report(notices.store_error(error, self.run_path, self._now()))

    def _now(self) -> int:
        return self._tap.step if hasattr(self, "_tap") else 0


def _close(reference: weakref.ref[Monitor]) -> None:
    monitor = reference()
    if monitor is not None:
        # Set where an exception nobody caught has ended the program; at a prompt it may be any earlier one.
        monitor.close(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
