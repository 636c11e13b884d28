"""Monitor: the one object a user holds. It wires the layers together and holds no maths."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradvitals import notices
from gradvitals.alerts import Alert, as_alert
from gradvitals.arguments import check_arguments
from gradvitals.beginning import begin, describe
from gradvitals.breath import Breath
from gradvitals.completion import Completion, Record
from gradvitals.config import Config
from gradvitals.errors import RunError
from gradvitals.feed import Feed
from gradvitals.judge import Judge, say
from gradvitals.measure import RawStep, Tap
from gradvitals.measure.outbox import Job
from gradvitals.measure.ranks.exchange import Exchange
from gradvitals.measure.ranks.farewell import is_still
from gradvitals.measure.ranks.roster import Roster
from gradvitals.measure.rows import Rows
from gradvitals.measure.sources import missing_sources
from gradvitals.parting import Parting, close_at_exit
from gradvitals.sinks import Sink, as_sink
from gradvitals.store import THREAD_NAME, BackgroundWriter, call_weakly, free_run_path, run_id
from gradvitals.types import Action, Finding, Reading

STATE_VERSION = 1
RANKS_CLOSE_SECONDS = 10.0
"""How long a rank that closes waits for the others to bring their last steps."""
SHOW_SECONDS = 2.0
"""How long a notebook waits for what is on its way to be shown too."""


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
        group: Any = None,
        sinks: Sequence[Sink | str] = (),
        alerts: Sequence[Alert | str] = (),
    ) -> None:
        self._closed = True  # nothing to close before all of this has worked
        self._failed = False
        optimizers = check_arguments(model, optimizer, config, batch_size)
        self._feed = Feed([*map(as_sink, sinks), *map(as_alert, alerts)], call_weakly(self.report))
        self.config = config if config is not None else Config()
        self._notices: list[Finding] = []
        self._actions: deque[Action] = deque(maxlen=10_000)
        self._at_close: list[Callable[[], object]] = []
        self._when_closed: list[Callable[[Monitor], object]] = []
        rows = Rows(model, optimizers, self.config)
        start = begin(rows, self.config, run=run, resume=resume, group=group, batch_size=batch_size)
        self._start, self._path, self._resume = start, start.path, start.resume
        self.ranks: Roster | None = start.roster
        """Who else trains this model; None for a single process."""
        self._writer: BackgroundWriter | None = None
        self._feed.active = start.leads
        self._breath = breath = Breath()
        judges = self.config.diagnose and start.leads
        judge = Judge(optimizers, self.config, start.world, self._on_rule_error, breath) if judges else None
        exchange = Exchange(start.roster, self._on_ranks_lost) if start.roster is not None else None
        self._parting = Parting(start, exchange, call_weakly(self._on_stopped_elsewhere))
        self._completion = Completion(self.config, judge, exchange, self.report, self._on_error, breath)
        if on_reading is not None:
            self._completion.readers.append(on_reading)
        self._aside: list[Record] | None = None
        self._tap = Tap(
            rows,
            optimizers,
            self.config,
            deliver=self._deliver,
            on_error=self._on_error,
            batch_size=batch_size,
            ranks=start.roster,
        )
        if exchange is not None:
            self._tap.on_groups_end = self._on_groups_end
        self._closed = False
        if start.first_step:
            self._tap.start(start.first_step)
        for source, reason in missing_sources(self.config, optimizers, model):
            self.report(notices.source_unavailable(source, reason, self._now()))
        if exchange is not None and self.config.overhead_budget is not None:
            self.report(notices.budget_not_obeyed(self._now()))

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
        return self._completion.newest()

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, about training and monitoring. Those without a last step go on."""
        return [*self._notices, *(self._judge.findings if self._judge is not None else ())]

    @property
    def actions(self) -> list[Action]:
        """What a Guard or a schedule did so far, or would have done: the last 10,000; the run keeps all."""
        return list(self._actions)

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one to say how the run has ended."""
        return self._parting.speaks

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
        """Who judges the readings; None where nobody does, or no longer. Of several ranks, the first has one."""
        return None if self._judge is None or self._judge.failed else self._judge

    @property
    def _judge(self) -> Judge | None:
        return self._completion.judge

    def add_reader(self, reader: Callable[[Reading], object]) -> None:
        """Have this called with every reading, beside `on_reading`. With several ranks, on all of them or on none."""
        self._completion.readers.append(reader)
        self._tap.send_each_step()

    def add_sink(self, sink: Sink | str) -> None:
        """Send what is seen from here on to one more sink, as `watch(..., sinks=[...])` does."""
        self._feed.add(as_sink(sink))

    def add_alert(self, alert: Alert | str) -> None:
        """Tell findings from here on to one more alert, as `watch(..., alerts=[...])` does."""
        self._feed.add(as_alert(alert))

    def record(self, action: Action | Callable[[], Iterable[Record]]) -> None:
        """Keep what was done with the run; or what a function returns, once the steps so far are judged."""
        if isinstance(action, Action):
            self._actions.append(action)
            self._feed.put([action])
        if self._writer is not None:
            self._writer.put(action if isinstance(action, Action) else partial(self._feed.see, action))

    def hurry(self) -> None:
        """Have the steps made so far judged now rather than with the next ones; does not wait for it."""
        self._tap.flush()
        if self._writer is not None:
            self._writer.hurry()

    def at_close(self, callback: Callable[[], object]) -> None:
        """Have this called when the Monitor closes, while it still writes."""
        self._at_close.append(callback)

    def when_closed(self, callback: Callable[[Monitor], object]) -> None:
        """Have this called with the Monitor once it is closed and everything is written. It must not raise."""
        self._when_closed.append(callback)

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
        """Stop watching: hooks go, what is on its way is written, the run is marked finished, with what ended it."""
        if self._closed:
            return
        for callback in self._at_close:
            try:
                callback()
            except Exception as failure:
                self._on_error("close", failure)
        exchange = self._completion.exchange
        self._failed = error is not None
        if error is not None:
            self._parting.on_error(error)
        self._closed = True
        if error is not None and not self._parting.stopped_elsewhere:
            rank = self.ranks.rank if self.ranks is not None else None
            self.report(notices.training_stopped(error, self._now(), rank))
            self._parting.tell(error, self._notices[-1])
        self._tap.close()
        if self._writer is not None:
            self._writer.put(partial(self._feed.see, partial(list, self._tap.passing.last_step())))
            if self._judge is not None:
                self._writer.put(partial(self._feed.see, self._judge.finish))  # after the last step has been judged
            self._feed.end_with(self._writer)  # before it closes: it keeps what there is to say about a sink
            self._writer.close(30.0 if exchange is None else RANKS_CLOSE_SECONDS)
        self._parting.end()
        for told in self._when_closed:
            told(self)

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

    def _repr_html_(self) -> str:
        from gradvitals.report.notebook import display

        if not self._closed:
            self.flush(SHOW_SECONDS)
        return display(self.run_path if self._writer is not None else None, repr(self))

    # -- resuming -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs so that windows, step count and record go on where they were."""
        self._tap.flush()
        if self._writer is not None:
            self._writer.drain(30.0)
        return {**self._own_state(), **self._judged_state()}

    def _own_state(self) -> dict[str, Any]:
        own = {"version": STATE_VERSION, "run": str(self.run_path), "tap": self._tap.state_dict()}
        return {**own, "run_id": self._writer.run_id if self._writer is not None else None}

    def _judged_state(self) -> dict[str, Any]:
        judged = self._judge.state_dict() if self._judge is not None else None
        return {"interpreter": self._completion.state_dict(), "diagnosis": judged}

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
        self._completion.load_state_dict(state["interpreter"])
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
        exchange = self._completion.exchange
        if not self._writer.put(Job(steps, self._complete, may_wait=exchange is not None)) and exchange is not None:
            exchange.leave()  # what comes later would be added to other steps

    def _open(self, first_step: int) -> None:
        path = self._path if self._resume or not self._start.leads else free_run_path(self._path)
        if path != self._start.asked and self._start.leads and not self._resume:
            say(f"{self._start.asked} holds a run already; this one is kept in {path}", self.config.quiet)
        self._writer = BackgroundWriter(
            path,
            meta=describe(self.config, self._start, self._judge, self._tap.autocast),
            resume=self._resume,
            first_step=first_step,
            queue_size=self.config.queue_size,
            on_error=call_weakly(self._on_store_error),
            keep=self._start.leads,
            breath=self._breath,
        )
        for record in cast(list[Record], [*self._notices, *self._actions]):
            self._writer.put(record)
        self._feed.start(self._writer.path)
        close_at_exit(self.close)  # after the writer has registered its own, so that it runs before it

    # -- on the writer's thread ---------------------------------------------------------------------------------

    def _complete(self, steps: Sequence[RawStep]) -> Iterable[Record]:
        """Finish the readings of some steps. What is reported meanwhile is kept with them, even while closing."""
        self._aside = []
        try:
            return self._feed.see(lambda: [*self._completion.records(steps, self._tap), *(self._aside or ())])
        finally:
            self._aside = None

    # -- findings of our own ------------------------------------------------------------------------------------

    def report(self, finding: Finding, *, aloud: bool = True) -> None:
        """Keep what gradvitals has to say about itself with the run."""
        if self.ranks is not None and not self._start.leads:
            finding = replace(finding, rank=self.ranks.rank)
            if finding.severity != "info" and self._completion.exchange is not None:
                self._completion.exchange.troubles += 1  # for the rank that keeps the run
        self._notices.append(finding)
        if notices.is_said(self._notices):
            say(str(finding), self.config.quiet or not aloud)
        if self._aside is not None and threading.current_thread().name == THREAD_NAME:
            self._aside.append(finding)
            return
        self._feed.put([finding])
        if self._writer is not None:
            self._writer.put(finding)

    def _on_error(self, part: str, error: Exception) -> None:
        self.report(notices.monitor_error(part, error, self._now()))

    def _on_groups_end(self) -> None:
        if self._writer is not None:
            self._writer.drain(RANKS_CLOSE_SECONDS)
        if self._completion.exchange is not None:
            self._completion.exchange.end()

    def _on_ranks_lost(self, error: Exception, missing: Sequence[int]) -> None:
        if not self._closed or self._failed:  # at a good end, others may be gone already
            self.report(notices.ranks_lost(error, missing, self._now()))

    def _on_stopped_elsewhere(self, finding: Finding) -> None:
        """Another rank has stopped: keep why, and the steps up to there, before this rank is ended with it."""
        if self._closed or self._completion.exchange is None or self._writer is None:
            return
        self._parting.stopped_elsewhere = True
        self._completion.exchange.end()
        self.report(finding, aloud=False)
        if is_still(self._now):
            self._tap.outbox.send()
        self._writer.flush(RANKS_CLOSE_SECONDS / 2)

    def _on_rule_error(self, rule: str, error: Exception) -> None:
        self.report(notices.rule_error(rule, error, self._now()))

    def _on_store_error(self, error: BaseException) -> None:
        self.report(notices.store_error(error, self.run_path, self._now()))

    def _now(self) -> int:
        return self._tap.step if hasattr(self, "_tap") else 0
