"""Monitor and watch(): what a user holds. Records in this process; a worker thinks in another one."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

import gradvitals
from gradvitals import notices
from gradvitals.alerts import Alert, as_alert
from gradvitals.collect.parameters import ParameterTable
from gradvitals.collect.recorder import StepRecorder, missing_sources
from gradvitals.config import Config
from gradvitals.diagnose import RunInfo
from gradvitals.distributed.allreduce import RankReducer
from gradvitals.distributed.shutdown import Shutdown, close_at_exit, is_still
from gradvitals.distributed.topology import (
    RankInfo,
    Rendezvous,
    Topology,
    data_dimensions,
    data_ranks,
    describe_holdings,
    exchange_holdings,
    find_rendezvous,
    fingerprint,
    settings_of,
)
from gradvitals.errors import RunError
from gradvitals.notices import ABOUT_MONITORING
from gradvitals.places import RUNS_FOLDER
from gradvitals.sinks import Sink, as_sink
from gradvitals.store import free_run_path, next_step, run_meta
from gradvitals.store.reader import open_run
from gradvitals.types import Action, Finding, Layout, Reading, json_ready
from gradvitals.worker.channel import Message
from gradvitals.worker.link import WorkerLink
from gradvitals.worker.publish import CLOSE_SECONDS as PUBLISH_SECONDS
from gradvitals.worker.publish import Destination, Publisher, wants_readings
from gradvitals.worker.record import PLAIN, STEP, SUMS, Context, Decoder, Encoder, Part, StepRecord
from gradvitals.worker.sums import PartWeights, StepSums, Table, aggregate, sums_to_bytes
from gradvitals.worker.worker import Setup, print_line

if TYPE_CHECKING:
    from gradvitals.report.verdict import Verdict

STATE_VERSION = 2
JOURNAL_BYTES = 4 << 20
"""Room for steps that the worker did not read yet; more for a model with many tensors."""
BYTES_PER_TENSOR = 4096
RANKS_CLOSE_SECONDS = 10.0
"""Longest time a rank that closes waits for the last steps of the others."""
CLOSE_SECONDS = 30.0
"""Longest time that closing waits for a busy worker."""
HANG_SECONDS = 4.0
"""Longest time it waits for a worker without progress. The journal keeps what that worker did not write."""
SHOW_SECONDS = 2.0
"""Longest time a notebook waits for the newest steps."""

PUBLIC = (
    "close", "findings", "flush", "latest", "load_state_dict", "observe", "run_path", "state_dict", "step", "verdict",
)  # fmt: skip
"""The names of a Monitor that a training loop needs."""

T = TypeVar("T")


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    run: str | Path | None = None,
    config: Config | None = None,
    batch_size: float | None = None,
    resume: bool = False,
    on_reading: Callable[[Reading], object] | None = None,
    guard: Any = None,
    group: Any = None,
    sinks: Sequence[Sink | str] | Sink | str | None = (),
    alerts: Sequence[Alert | str] | Alert | str | None = (),
) -> Monitor:
    """Watch a training run.

    Args:
        model: The model being trained.
        optimizer: The optimizer, or all of them, that step it.
        run: Folder to keep the run in. If a run is there already, the next free name is used (``gpt-2``) and
            printed. None uses ``gradvitals_runs/<date and time>``.
        config: Settings; the defaults are meant to be left alone.
        batch_size: Samples per optimizer step of this process, over all micro-batches. With it, the noise scale is in
            samples.
        resume: Continue the record in `run` rather than start a new one. A Monitor that loads a saved state does so
            by itself.
        on_reading: Called with every `Reading`, on the training thread, a few steps after the step it is of.
        guard: A `Guard` that may act on what is seen. Without one nothing is ever changed.
        group: Under torch.distributed, the process group that trains this model; None for all processes. Every one of
            them must call `watch`. The first one keeps the run.
        sinks: Where readings and findings go besides the run's folder: `gradvitals.sinks`, or their names such as
            ``"tensorboard:logs"``. A sink that fails is dropped, with a finding.
        alerts: Where findings are sent: `gradvitals.alerts`, or their names such as the URL of a webhook.

    Returns:
        The Monitor. Without a Guard, training runs exactly as it would without it. When it is closed, or the program
        ends, it prints the verdict to stderr, unless `Config(quiet=True)`.

    Example:
        >>> import tempfile, torch, gradvitals as gv
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with gv.watch(model, optimizer, run=tempfile.mkdtemp() + "/first") as monitor:
        ...     for _ in range(3):
        ...         loss = model(torch.ones(8, 4)).square().mean()
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         monitor.observe(loss)
        ...         optimizer.step()
        >>> steps, norms = gv.open_run(monitor.run_path).series("grad/norm")
        >>> steps.tolist()
        [0, 1, 2]
    """
    if guard is not None and not hasattr(guard, "attach"):
        raise TypeError(f"watch got {guard!r} as guard; expected a gradvitals.Guard, such as Guard(mode='act')")
    monitor = Monitor(
        model,
        optimizer,
        run=run,
        config=config,
        batch_size=batch_size,
        resume=resume,
        on_reading=on_reading,
        group=group,
        sinks=sinks,
        alerts=alerts,
    )
    monitor.when_closed(print_verdict)
    if guard is not None:
        guard.attach(monitor)
    return monitor


def print_verdict(monitor: Monitor) -> None:
    """Print to stderr how a closed run did; of several ranks one prints it. Silent with `Config(quiet=True)`."""
    from gradvitals.report.verdict import closing_lines

    config = monitor.config
    if monitor._failed and isinstance(sys.exc_info()[1], Exception):
        return  # an error ends a `with` block: nothing goes above its traceback
    if config.quiet or not config.diagnose or not monitor.step or not monitor.speaks or not monitor.run_path.exists():
        return
    with contextlib.suppress(Exception):  # a full disk, say, or a stderr that is gone: it must not end the program
        for line in closing_lines({monitor.run_path: ""}):
            print_line(line)


@dataclass(frozen=True)
class RunSetup:
    """The place of a run and its ranks. The same on all ranks, except for `leads`."""

    path: Path
    resume: bool
    first_step: int
    topology: Topology | None
    leads: bool
    """Whether this rank keeps the run, diagnoses it and prints."""
    asked: Path
    """The path that was asked for."""


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
        sinks: Sequence[Sink | str] | Sink | str | None = (),
        alerts: Sequence[Alert | str] | Alert | str | None = (),
    ) -> None:
        self._closed = True  # nothing to close before all of this has worked
        self._failed = False
        optimizers = check_arguments(model, optimizer, config, batch_size)
        self._destinations: list[Destination] = [*map(as_sink, _listed(sinks)), *map(as_alert, _listed(alerts))]
        self.config = config if config is not None else Config()
        self._findings: dict[tuple[Any, ...], Finding] = {}
        self._notices: list[Finding] = []
        self._latest: dict[str, float] = {}
        self._actions: deque[Action] = deque(maxlen=10_000)
        self._opened: deque[tuple[int, Finding]] = deque(maxlen=100)
        self._readers: list[Callable[[Reading], object]] = [on_reading] if on_reading is not None else []
        self._at_close: list[Callable[[], object]] = []
        self._when_closed: list[Callable[[Monitor], object]] = []
        self._unread: deque[Reading] = deque()
        self._worker = WorkerLink(_weakly(self._take_message))
        self._publisher: Publisher | None = None
        """Of the sinks and alerts that cannot move to the worker."""
        self._state: dict[str, Any] = {}
        self._encoder, self._decoder = Encoder(), Decoder()
        self._table = Table(Context())
        self._weighting = PartWeights(self.config.micro_batch_weights)
        self._layout = Layout()
        _close_earlier(model, optimizers, self.config.quiet)
        table = ParameterTable(model, optimizers, self.config)
        start = _start_run(table, self.config, run=run, resume=resume, group=group, batch_size=batch_size)
        self._start, self._path, self._resume = start, start.path, start.resume
        self._run_id: str | None = None
        self._info = replace(run_info(optimizers), world_size=1 if start.topology is None else start.topology.world)
        self.ranks: Topology | None = start.topology
        """The ranks that train this model; None for a single process."""
        self._reducer: RankReducer | None = None
        if start.topology is not None:
            self._reducer = RankReducer(start.topology, _weakly(self._write_sums), self._on_ranks_lost)
        self._shutdown = Shutdown(start.topology, start.leads, self._reducer, _weakly(self._on_stopped_elsewhere))
        self._recorder = StepRecorder(
            table,
            optimizers,
            self.config,
            deliver=self._deliver,
            prepare=self._prepare_journal,
            write_plain=partial(self._worker.write, PLAIN),
            on_error=self._on_error,
            batch_size=batch_size,
            topology=start.topology,
        )
        self._recorder.on_schedule_change = self._on_schedule_change
        if self._reducer is not None:
            self._recorder.on_groups_end = self._on_groups_end
        if on_reading is not None:
            self.read_every_step()
        self._closed = False
        _open_monitors.add(self)
        close_at_exit(self.close)
        if start.first_step:
            self._recorder.start(start.first_step)
        for source, reason in missing_sources(self.config, optimizers, model):
            self.report(notices.source_unavailable(source, reason, self.step))
        if self._reducer is not None and self.config.overhead_budget is not None:
            self.report(notices.budget_not_obeyed(self.step))

    # -- in the loop --------------------------------------------------------------------------------------------

    def observe(
        self, loss: Tensor | float | None = None, *, batch_size: float | None = None, split: str = "train"
    ) -> None:
        """Report the loss, after backward and before any clipping of your own.

        Optional: without it readings are taken when the optimizer steps, and there is no loss to show. If gradients
        are accumulated it may be called once per step or after every micro-batch.

        Args:
            loss: The loss as you would plot it: not divided by the number of micro-batches, not scaled.
            batch_size: Samples behind this loss; needed only if it differs from step to step or between micro-batches.
            split: ``"val"`` for a validation loss, at any time: gradvitals then sees whether the model memorizes.
        """
        if split not in ("train", "val"):
            raise ValueError(f"observe got {split!r} as split; expected 'train' or 'val'")
        if self._closed:
            return
        if split == "train":
            self._recorder.observe(loss, batch_size)
        elif loss is not None:
            self._recorder.validate(loss)

    @property
    def step(self) -> int:
        """The optimizer step in progress, from 0."""
        return self._recorder.step if hasattr(self, "_recorder") else 0

    @property
    def latest(self) -> dict[str, float]:
        """The newest global value of every metric that was read so far, the best source first."""
        self._receive()
        return dict(self._latest)

    @property
    def findings(self) -> list[Finding]:
        """Findings so far, about training and monitoring. Those without a last step are ongoing."""
        self._receive()
        return [*self._notices, *self._findings.values()]

    @property
    def actions(self) -> list[Action]:
        """The last 10,000 actions that a Guard or a schedule took or proposed; the run keeps all."""
        return list(self._actions)

    @property
    def verdict(self) -> Verdict:
        """The verdict so far: level, headline, cause, fix, findings. Prints itself; a notebook displays it.

        Waits for the steps so far to be diagnosed, then reads the run: for now and then, not for every step.

        Raises:
            RunError: If there are no readings yet.
        """
        self.flush()
        if not self._worker.is_open:
            raise RunError("no step was recorded yet, so there is nothing to judge; call verdict after a step")
        with open_run(self.run_path) as run:
            return run.verdict

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one to print how the run ended."""
        return self._shutdown.speaks

    @property
    def run_path(self) -> Path:
        """Its folder."""
        return self._path

    # -- for those who act on what it sees ----------------------------------------------------------------------

    @property
    def recorder(self) -> StepRecorder:
        """Reads the gradients."""
        return self._recorder

    @property
    def diagnoses(self) -> bool:
        """Whether this rank diagnoses the run."""
        return self.config.diagnose and self._start.leads

    def add_reader(self, reader: Callable[[Reading], object]) -> None:
        """Have this called with every reading, beside `on_reading`. With several ranks, on all of them or on none."""
        self._readers.append(reader)
        self.read_every_step()
        self._worker.command({"do": "wants_readings"})

    def add_sink(self, sink: Sink | str) -> None:
        """Send what is seen from here on to one more sink, as `watch(..., sinks=[...])` does."""
        self._add_destination(as_sink(sink))

    def add_alert(self, alert: Alert | str) -> None:
        """Send findings from here on to one more alert, as `watch(..., alerts=[...])` does."""
        self._add_destination(as_alert(alert))

    def _add_destination(self, destination: Destination) -> None:
        if not self._start.leads:
            return
        self._destinations.append(destination)
        if self._worker.is_open:  # it cannot move to a worker that runs already
            if self._publisher is None:
                self._publisher = Publisher((), _weakly(self.report), self.run_path)
                self._publisher.put([self._layout])
            if wants_readings(destination):
                self._worker.command({"do": "wants_readings"})
            self._publisher.add(destination)

    def record(self, action: Action) -> None:
        """Keep what was done with the run."""
        self._actions.append(action)
        self._worker.command({"do": "action", "action": action.to_json()})
        if self._publisher is not None:
            self._publisher.put([action])

    def start_diagnosis_over(self) -> None:
        """The run was rolled back: diagnose it anew, once the steps so far are diagnosed."""
        self._recorder.flush()
        self._opened.clear()
        self._worker.command({"do": "start_over"})

    def at_close(self, callback: Callable[[], object]) -> None:
        """Have this called when the Monitor closes, while it still writes."""
        self._at_close.append(callback)

    def when_closed(self, callback: Callable[[Monitor], object]) -> None:
        """Have this called with the Monitor once it is closed and everything is written. It must not raise."""
        self._when_closed.append(callback)

    def state_soon(self) -> Callable[[], dict[str, Any]]:
        """Ask for the state of this moment. Returns a function that waits for it."""
        own = self._own_state()
        self._settle()
        request = self._worker.request({"do": "state"})

        def state() -> dict[str, Any]:
            reply = self._worker.wait(request, 60.0) or {}
            return {**own, "worker": reply.get("state") if self._worker.is_open else self._state}

        return state

    # -- the end ------------------------------------------------------------------------------------------------

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until everything read so far is on disk. Returns whether it is."""
        if self._closed:
            return True
        self._settle(timeout)
        if not self._worker.is_open:
            return True
        reply = self._worker.ask({"do": "flush"}, timeout)
        self._receive()
        return reply is not None and bool(reply.get("stored"))

    def _settle(self, timeout: float = CLOSE_SECONDS) -> None:
        """Bring all finished steps to the journal."""
        self._recorder.safe("step", self._recorder.transfer.finish, timeout)
        if self._reducer is not None:
            self._reducer.poll()

    def close(self, error: BaseException | None = None) -> None:
        """Stop watching: hooks go, what is on its way is written, the run is marked finished, with what ended it."""
        if self._closed or not self._worker.is_here:
            return
        for callback in self._at_close:
            try:
                callback()
            except Exception as failure:
                self._on_error("close", failure)
        self._failed = error is not None
        if error is not None:
            self._shutdown.on_error(error)
        self._closed = True
        if error is not None and not self._shutdown.stopped_elsewhere:
            rank = self.ranks.rank if self.ranks is not None else None
            stopped = notices.training_stopped(error, self.step, rank)
            self.report(stopped, aloud=False)  # the traceback shows it
            self._shutdown.tell(error, stopped)
        try:
            for finding in self._recorder.usage_findings() if self._start.leads else ():
                self.report(finding, aloud=False)
        except Exception as failure:
            self._on_error("usage", failure)
        self._recorder.close()
        if self._reducer is not None and not self._reducer.finish(RANKS_CLOSE_SECONDS):
            self._reducer.end()
        self._close_worker()
        self._shutdown.end()
        for told in self._when_closed:
            told(self)

    def _close_worker(self) -> None:
        if not self._worker.is_open:
            return
        hangs, patience = False, HANG_SECONDS if self._latest else CLOSE_SECONDS  # it may not have started yet
        if self._worker.publishes:
            patience += PUBLISH_SECONDS
        if self._publisher is not None:  # before the run file is closed: what fails now is still kept with the run
            hangs = self._worker.ask({"do": "finish"}, CLOSE_SECONDS, patience) is None
            self._publisher.close()
        request = self._worker.request({"do": "close"})
        hangs = hangs or self._worker.wait(request, CLOSE_SECONDS, patience) is None
        self._worker.close(0.0 if hangs else HANG_SECONDS)
        self._receive()

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
        count = sum(finding.id not in ABOUT_MONITORING for finding in self.findings)
        return f"Monitor(step={self.step}, run={str(self.run_path)!r}, findings={count})"

    def __dir__(self) -> list[str]:
        """The names for training loops. The rest is for the Guard, schedules and integrations."""
        return [*PUBLIC, *(name for name in object.__dir__(self) if name.startswith("_"))]

    def _repr_html_(self) -> str:
        from gradvitals.report.notebook import display

        if not self._closed:
            self.flush(SHOW_SECONDS)
        return display(self.run_path if self._worker.is_open else None, repr(self))

    def _ipython_display_(self) -> None:
        """Show a card that follows the training."""
        from gradvitals.report.notebook import show_live

        show_live(self)

    @property
    def is_closed(self) -> bool:
        """Whether it no longer watches."""
        return self._closed

    # -- resuming -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: windows, step count and record continue from it."""
        return self.state_soon()()

    def _own_state(self) -> dict[str, Any]:
        own = {"version": STATE_VERSION, "run": str(self.run_path), "recorder": self._recorder.state_dict()}
        own["opened"] = [[step, finding.to_json()] for step, finding in self._opened]
        if self._reducer is not None:
            own["audit"] = self._reducer.comparison.memory.state_dict()
        return {**own, "run_id": self._run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run from a saved state. Call it before the first step.

        If the saved run's folder is still there, its record is continued; readings it holds from after the checkpoint
        are hidden, not deleted. Else a new record starts at the saved step.
        """
        if state.get("version") != STATE_VERSION:
            raise RunError(f"the state has version {state.get('version')!r}; this gradvitals reads {STATE_VERSION}")
        if self._worker.is_open:
            raise RunError(f"load_state_dict was called after {self.step} steps; call it before the first one")
        self._recorder.load_state_dict(state["recorder"])
        self._state = dict(state["worker"] or {})
        if self._reducer is not None and "audit" in state:
            self._reducer.comparison.memory.load_state_dict(state["audit"])
        self._opened = deque(((step, Finding.from_json(data)) for step, data in state["opened"]), maxlen=100)
        for place in (self._path, Path(state["run"])):  # a run that was copied or moved continues where it is now
            if state["run_id"] is not None and run_meta(place).get("run_id") == state["run_id"] and not self._resume:
                self._path, self._resume = place, True

    # -- recording ----------------------------------------------------------------------------------------------

    def _deliver(self, record: StepRecord, parts: list[Part]) -> None:
        """A step is on the host: into the journal with it, or first to the other ranks."""
        if not self._worker.is_here:
            return
        if self._reducer is not None:
            self._reduce(record, parts, self._recorder.take_context())
        else:
            self._prepare_journal(record.step)
            self._worker.write(STEP, self._encoder.encode(record, parts))
        if self._worker.has_messages:
            self._receive()

    def _prepare_journal(self, step: int) -> None:
        """Have a worker, and the context of this step in its journal; take what the worker has sent."""
        if not self._worker.is_here:
            return
        if not self._worker.is_open:
            self._open(step)
        context = self._recorder.take_context()
        if context is not None:
            self._write_context(context)
        if self._worker.has_messages:
            self._receive()

    def _reduce(self, record: StepRecord, parts: list[Part], context: Context | None) -> None:
        assert self._reducer is not None
        if context is not None:
            self._table = Table(context)
        try:
            data = self._encoder.encode(record, parts)
            self._reducer.add(aggregate(self._decoder.decode(data), self._table, self._weighting))
        except Exception as error:
            self._reducer.leave()  # what comes later would be added to other steps
            self._on_error("aggregate", error)
        self._reducer.poll()

    def _write_sums(self, step: StepSums) -> None:
        """A step of all ranks is complete."""
        if not self._start.leads and not self._readers:
            return
        if not self._worker.is_open:
            self._open(step.step)
        if step.table is not self._written_table:
            self._written_table = step.table
            self._write_context(step.table.context)
        self._worker.write(SUMS, sums_to_bytes(step))

    _written_table: Table | None = None

    def _write_context(self, context: Context) -> None:
        self._layout = context.layout
        if self._publisher is not None:
            self._publisher.put([context.layout])
        self._worker.write_context(context)

    def _open(self, first_step: int) -> None:
        """Start the worker. Everything it needs is known with the first step."""
        start, config = self._start, self.config
        self._path = self._path if self._resume or not start.leads else free_run_path(self._path)
        _kept_in[start.asked.absolute()] = self._path
        if self._path != start.asked and start.leads and not self._resume:
            print_line(f"{start.asked} holds a run already; this one is kept in {self._path}", config.quiet)
        self._run_id = run_meta(self._path).get("run_id") if self._resume else None
        self._run_id = self._run_id or uuid.uuid4().hex
        setup = Setup(
            path=self._path,
            config=config,
            meta=self._describe(),
            facts=self._info.to_json(),
            run_id=self._run_id,
            resume=self._resume,
            first_step=first_step,
            keeps=start.leads,
            diagnoses=self.diagnoses,
            wants_readings=bool(self._readers),
            destinations=list(self._destinations) if start.leads else [],
            state=self._state,
        )
        journal_bytes = max(JOURNAL_BYTES, BYTES_PER_TENSOR * len(self._recorder.table.parameters))
        as_process = start.leads and config.worker_kind() == "process"
        here = self._worker.open(setup, journal_bytes, as_process=as_process)
        if here:
            self._publisher = Publisher(here, _weakly(self.report), setup.path)

    def _describe(self) -> dict[str, Any]:
        """Returns the metadata of the run."""
        config = self.config
        meta: dict[str, Any] = {"config": json_ready(asdict(config)), "extra": json_ready(dict(config.extra))}
        meta["torch"] = str(torch.__version__)  # its own class would have the worker load torch
        if self._start.topology is not None:
            meta["ranks"] = self._start.topology.world
        if (job := elastic_id()) is not None:
            meta["elastic_id"] = job
        if self.diagnoses:
            self._info = replace(self._info, autocast=self._recorder.autocast)
            meta["facts"] = self._info.to_json()
        return meta

    # -- talking to the worker ----------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Take all messages of the worker. Readings are handed on by the thread that trains, and no other."""
        self._worker.receive()
        if self._unread and self._recorder.thread in (None, threading.get_ident()):
            while self._unread:
                self._take_reading(self._unread.popleft())

    def _take_message(self, message: Message) -> None:
        what = message["what"]
        if what == "latest":
            self._latest = message["values"]
        elif what == "finding":
            self._take_finding(message)
        elif what == "readings":
            readings: list[Reading] = message["readings"]
            if self._readers:
                self._unread.extend(readings)
            if self._publisher is not None:
                first = replace(readings[0], tensors={}) if message["plain"] else readings[0]
                self._publisher.put([first, *readings[1:]])
        elif what == "count_nonfinite":
            self._recorder.count_nonfinite = message["value"]

    def _take_finding(self, message: Message) -> None:
        finding = message["finding"]
        if message["notice"]:
            if not any(finding is one or finding == one for one in self._notices):
                self._notices.append(finding)
        else:
            self._findings[finding.id, finding.rank, finding.first_step, finding.found_step, finding.tensors] = finding
            if message["opened"]:
                self._opened.append((message["step"], finding))
        if self._publisher is not None:
            self._publisher.put([finding])

    def _take_reading(self, reading: Reading) -> None:
        if self._reducer is not None and self._reducer.ended:
            return  # what is read now is this rank's own, and nobody must act on that alone
        for reader in list(self._readers):
            try:
                reader(reading)
            except Exception as error:
                self._readers.remove(reader)
                self._on_error("on_reading", error)

    def read_every_step(self) -> None:
        """Read every step and send it by itself: someone acts on what is read."""
        self._recorder.read_every_step()
        if self._reducer is not None:
            self._reducer.each_step = True

    # -- findings about the monitoring itself -------------------------------------------------------------------

    def report(self, finding: Finding, *, aloud: bool = True) -> None:
        """Keep a finding about the monitoring itself with the run, and print it."""
        if self.ranks is not None and not self._start.leads:
            finding = replace(finding, rank=self.ranks.rank)
            if finding.severity != "info" and self._reducer is not None:
                self._reducer.errors += 1  # for the rank that keeps the run
            self._notices.append(finding)
            if notices.is_said(self._notices):
                print_line(str(finding), self.config.quiet or not aloud)
            return
        self._notices.append(finding)
        self._worker.command({"do": "finding", "finding": finding.to_json(), "aloud": aloud})

    def _on_error(self, part: str, error: Exception) -> None:
        self.report(notices.monitor_error(part, error, self.step))

    def _on_schedule_change(self) -> None:
        schedule = self._recorder.schedule
        self.report(
            notices.readings_thinned(
                self.step,
                spent=schedule.spent,
                budget=schedule.share,
                every=schedule.every,
                norm_every=schedule.norm_every,
            )
        )

    def _on_groups_end(self) -> None:
        if self._reducer is not None:
            self._reducer.finish(RANKS_CLOSE_SECONDS)
            self._reducer.end()

    def _on_ranks_lost(self, error: Exception, missing: Sequence[int]) -> None:
        if not self._closed or self._failed:  # at a good end, others may be gone already
            self.report(notices.ranks_lost(error, missing, self.step))

    def _on_stopped_elsewhere(self, finding: Finding) -> None:
        """Another rank stopped: keep why, and the steps up to there, before this rank is ended with it."""
        if self._closed or self._reducer is None or not self._worker.is_open:
            return
        self._shutdown.stopped_elsewhere = True
        self.report(finding, aloud=False)
        if is_still(lambda: self.step):
            self._recorder.transfer.finish(1.0)
            self._reducer.end()
        self._worker.ask({"do": "flush"}, RANKS_CLOSE_SECONDS / 2)


_open_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()
_kept_in: dict[Path, Path] = {}
"""Where the last run of this process is that was to be kept in a folder: beside it, if that held a run already."""


def settled_run(path: Path) -> Path:
    """Return where the run is that this process was asked to keep in a folder, with all its steps so far written."""
    place = _kept_in.get(path.absolute(), path)
    for monitor in list(_open_monitors):
        if monitor.run_path == place and not monitor._closed:
            monitor.flush()
    return place


def _close_earlier(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], quiet: bool) -> None:
    """Close a Monitor that watches this model or optimizer already, as when a notebook's cell is run again."""
    for other in list(_open_monitors):
        table = other.recorder.table
        same = table.model is model or any(one in optimizers for one in table.optimizers)
        if same and not other._closed and other._worker.is_here:
            print_line(f"closed the earlier Monitor of this model, whose run is in {other.run_path}", quiet)
            other.close()


# -- how a run starts ---------------------------------------------------------------------------------------------


def check_arguments(model: Any, optimizer: Any, config: Any, batch_size: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list; errors say what was given and what was expected."""
    if isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, nn.Module):
        raise TypeError("watch got the optimizer first and the model second; call watch(model, optimizer)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch got {_a(model)} as model; expected a torch.nn.Module")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    # Accelerate's wrapper is an Optimizer in name only: the real one is inside.
    optimizers = [getattr(one, "optimizer", one) for one in optimizers]
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(f"watch got {_a(one)} as optimizer; expected a torch.optim.Optimizer or a list of them")
    if not optimizers:
        raise ValueError("watch got an empty list of optimizers; pass the one that steps the model")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"watch got {_a(config)} as config; expected a gradvitals.Config")
    if batch_size is not None and not (isinstance(batch_size, (int, float)) and batch_size > 0):
        raise ValueError(f"batch_size is {batch_size!r}; expected the samples per optimizer step, a positive number")
    return optimizers


def _a(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[:1] in "AEIOaeio" else f"a {name}"


def _listed(given: Any) -> Iterable[Any]:
    return [given] if isinstance(given, (str, Sink, Alert)) else given or ()


def run_info(optimizers: Sequence[torch.optim.Optimizer]) -> RunInfo:
    """Returns the facts about a run that its first optimizer holds."""
    group = optimizers[0].param_groups[0]
    betas: Any = group.get("betas") or ()
    plain = len(betas) >= 2 and all(isinstance(beta, float) for beta in betas)
    return RunInfo(
        optimizer=type(optimizers[0]).__name__,
        betas=(betas[0], betas[1]) if plain else None,
        momentum=_number(group.get("momentum")),
        weight_decay=_number(group.get("weight_decay")),
        eps=_number(group.get("eps")),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _start_run(
    table: ParameterTable,
    config: Config,
    *,
    run: str | Path | None,
    resume: bool,
    group: Any,
    batch_size: float | None,
) -> RunSetup:
    """Find out where a run starts or continues; with several ranks, together with them."""
    path = Path(run or Path(RUNS_FOLDER) / time.strftime("%Y-%m-%d_%H-%M-%S"))
    if not _has_others(group):
        resume = resume or _is_restarted(path)
        return RunSetup(path, resume, next_step(path) if resume else 0, None, True, path)
    rendezvous = find_rendezvous(group, config.rank_timeout)
    topology = _join(rendezvous, table, config, group, batch_size)
    # The first rank keeps the run: where that is, and how far it is, only its disk may know.
    if rendezvous.rank == 0:
        resume = resume or _is_restarted(path)
        kept_at = path if resume else free_run_path(path)
        rendezvous.publish("run", (kept_at, resume, next_step(path) if resume else 0))
    rendezvous.wait(["run"], "say where the run is stored")
    where, continues, first_step = rendezvous.read(["run"])[0]
    return RunSetup(where, continues, first_step, topology, rendezvous.rank == 0, path)


def _join(
    rendezvous: Rendezvous, table: ParameterTable, config: Config, group: Any, batch_size: float | None
) -> Topology:
    """Exchange with the other ranks what each of them holds, and give rows their weights."""
    dims = data_dimensions(table.model)
    holdings, shards, empty = describe_holdings(table.layout, table.slots, list(table.windows), table.parameters, dims)
    stepped = {id(p) for optimizer in table.optimizers for g in optimizer.param_groups for p in g["params"]}
    info = RankInfo(
        version=gradvitals.__version__,
        settings=settings_of(config, batch_size is not None),
        holdings=fingerprint(repr(holdings)),
        shards=shards,
        empty=empty,
        data_ranks=tuple(sorted(data_ranks(table.parameters, dims))),
        idle=tuple(row for row, parameter in enumerate(table.parameters) if id(parameter) not in stepped),
        stage=config.pipeline_stage,
    )
    topology = exchange_holdings(rendezvous, info, holdings, group)
    table.weights = topology.weights.tolist()
    table.change_weights = np.where(topology.is_current, topology.weights, 0.0).tolist()
    return topology


def _has_others(group: Any) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size(group) > 1


def _is_restarted(path: Path) -> bool:
    """Whether torchrun started this process again, for the run that is there."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return False
    return run_meta(path).get("elastic_id") == elastic_id()


def elastic_id() -> str | None:
    """Returns torchrun's id of this job, which stays the same after a restart."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    return "/".join([run, os.environ.get("MASTER_ADDR", ""), os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")])


def _weakly(method: Callable[[T], None]) -> Callable[[T], None]:
    """Call a method as long as its object lives, without keeping it alive."""
    reference = weakref.WeakMethod(method)

    def call(value: T) -> None:
        alive = reference()
        if alive is not None:
            alive(value)

    return call
