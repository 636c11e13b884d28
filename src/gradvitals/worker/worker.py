"""The worker: reads the journal of a run, diagnoses its steps and writes them, in a process or thread of its own."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gradvitals import notices
from gradvitals.config import Config
from gradvitals.diagnose import RULES, Diagnosis, RunInfo
from gradvitals.diagnose.engine import LARGE_NORM
from gradvitals.errors import RunError
from gradvitals.store.writer import Record, RunWriter, run_file
from gradvitals.types import SEVERITIES, SOURCES, Action, Finding, Layout, PlainReadings, Reading, Severity, Source
from gradvitals.worker.aggregate import Aggregator
from gradvitals.worker.channel import Channel
from gradvitals.worker.journal import Journal
from gradvitals.worker.publish import Destination, Publisher
from gradvitals.worker.record import (
    COMMAND,
    CONTEXT,
    PLAIN,
    STEP,
    SUMS,
    Context,
    Decoder,
    Places,
    PlainSteps,
    decode_plain,
    join_plain,
)
from gradvitals.worker.sums import PartWeights, StepSums, Table, aggregate, sums_from_bytes

COMMIT_SECONDS = 0.25
"""Interval between reads of the journal, and commits, while a run is young or someone waits for its readings."""

FIRST_STEPS, FIRST_SECONDS = 6, 6.0
"""Until when findings of the first steps wait to be printed."""

YOUNG_SECONDS, CALM_SECONDS = 10.0, 1.0
"""The age from which on a run is read less often, and that interval: a larger batch costs hardly more."""

BUSY_FILL = 0.125
"""Read the journal at the short interval if it is fuller than this share."""

HEARTBEAT_SECONDS = 1.0

MAX_PENDING_BYTES = 64 << 20
"""Readings that may wait while the disk refuses writes; beyond this, or beyond `queue_size`, they are dropped."""

STORED_SPIKE_RATIO = 2.0
"""A step whose norm exceeds its moving average by this factor keeps its per-tensor numbers even if none are due."""

CLEAN_STEPS = 20
"""After a non-finite gradient, non-finite elements are counted until this many steps in a row had none."""

UNKNOWN_WEIGHTS = 20
"""Report unknown micro-batch weights after this many readings of unequal micro-batches."""

SAME_RATE = 1e-6
"""Learning rates with a smaller relative difference are the same."""

OPENED = 100
"""Opened findings that are kept for a Guard."""

TITLE = 110
"""Characters of a finding's title in a live line."""

COLORS = {"red": "1;31", "yellow": "33", "green": "32"}


@dataclass
class Setup:
    """Everything a worker needs to know when it starts."""

    path: Path
    config: Config
    meta: dict[str, Any]
    facts: dict[str, Any]
    run_id: str
    resume: bool = False
    first_step: int = 0
    keeps: bool = True
    """Whether it writes the run. Of several ranks one does; the others only forward readings."""
    diagnoses: bool = True
    wants_readings: bool = False
    """Whether the training process wants every reading."""
    destinations: list[Destination] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    """The state of an earlier worker, for a run that is resumed."""


def print_line(line: str, quiet: bool = False) -> None:
    """Print to stderr, unless `quiet`."""
    if not quiet:
        print(f"gradvitals: {line}", file=sys.stderr, flush=True)


def live_line(finding: Finding) -> str:
    """Returns a finding that has just opened as one short line; `gradvitals doctor` has the rest."""
    level = colored(finding.severity, "red" if finding.severity == "critical" else "yellow")
    since = "at" if finding.found_step in (None, finding.first_step) else "since"
    return f"{level} {since} step {finding.first_step:,}: {_short(finding.title)} [{finding.id}]"


def _short(title: str) -> str:
    """Returns a title that fits into a live line: what comes after its colon is in the report.

    >>> _short("The learning rate of 1 is too high: " + "the loss rose, " * 9)
    'The learning rate of 1 is too high'
    """
    if len(title) <= TITLE:
        return title
    head, colon, _ = title.partition(": ")
    return head if colon and len(head) <= TITLE else f"{title[: TITLE - 1].rpartition(' ')[0]} …"


def _name(finding: Finding) -> str:
    message = RULES[finding.id].message if finding.id in RULES else None
    return f"{message.name} [{finding.id}]" if message is not None else f"[{finding.id}]"


def colored(text: str, color: str) -> str:
    """Returns text with its color if stderr is a terminal that shows colors."""
    if "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" or not sys.stderr.isatty():
        return text
    return f"\x1b[{COLORS[color]}m{text}\x1b[0m"


class LiveDiagnosis:
    """Shows the readings of a live run to the rules, and prints findings when they open, get worse and resolve."""

    def __init__(self, info: RunInfo, config: Config, on_error: Callable[[str, Exception], None]) -> None:
        self._quiet = config.quiet
        self._printed: dict[tuple[Any, ...], Severity] = {}
        self._lines: list[tuple[int, str]] = []
        """Lines to print, each with the step that it names."""
        self.opened: list[tuple[int, Finding]] = []
        """Findings that opened or got worse, each with the step that showed it."""
        self.diagnosis = Diagnosis(info=info, settings=config.rules, on_error=on_error)

    def read(self, readings: Sequence[Reading], layout: Layout) -> list[Finding]:
        """Diagnose one step; returns the findings that are new or have changed."""
        self.diagnosis.describe(layout)
        changed = self.diagnosis.read(readings)
        for finding in changed:
            self._note(finding, readings[0].step)
        return changed

    def print_news(self) -> None:
        """Print what came up since the last call, by step: a finding may concern steps before those of another."""
        lines, self._lines = sorted(self._lines, key=lambda line: line[0]), []
        for _, line in lines:
            print_line(line, self._quiet)

    def _note(self, finding: Finding, step: int) -> None:
        episode = _episode(finding)
        printed = self._printed.get(episode)
        if finding.last_step is not None:
            if self._printed.pop(episode, None) is not None and finding.follows is None:
                resolved = f"{colored('resolved', 'green')} at step {finding.last_step + 1:,}: {_name(finding)}"
                self._lines.append((finding.last_step + 1, resolved))
        elif finding.severity != "info" and (printed is None or _worse(finding.severity, printed)):
            self._printed[episode] = finding.severity
            self.opened = [*self.opened[-OPENED + 1 :], (step, finding)]
            if finding.follows is None:  # its root cause was printed
                worse = f"{colored(finding.severity, 'red')} at step {step:,} (was: {printed}): {_name(finding)}"
                news = (finding.first_step, live_line(finding)) if printed is None else (step, worse)
                self._lines.append(news)

    def start_over(self) -> list[Finding]:
        """Start the diagnosis over after a rollback. Returns the findings that this closed."""
        self.opened = []
        closed = self.diagnosis.start_over()
        self._printed.clear()
        return closed

    def state_dict(self) -> dict[str, Any]:
        """The state of the rules."""
        opened = [[step, finding.to_json()] for step, finding in self.opened]
        return {**self.diagnosis.state_dict(), "opened": opened}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of the rules."""
        self.diagnosis.load_state_dict(state)
        self.opened = [(step, Finding.from_json(finding)) for step, finding in state.get("opened", ())]
        known = [one for one in self.diagnosis.findings if one.last_step is None and one.severity != "info"]
        self._printed = {_episode(finding): finding.severity for finding in known}


def _episode(finding: Finding) -> tuple[Any, ...]:
    return finding.id, finding.first_step, finding.found_step


def _worse(severity: Severity, than: Severity) -> bool:
    return SEVERITIES.index(severity) > SEVERITIES.index(than)


class Worker:
    """Turns the journal of one run into readings, findings and a run file.

    Args:
        setup: The run.
        journal: Written by the training process.
        channel: Carries messages to the training process.
    """

    def __init__(self, setup: Setup, journal: Journal, channel: Channel) -> None:
        self.closed = False
        """Whether the run is closed and everything is written."""
        self._setup, self._journal, self._channel = setup, journal, channel
        self._config = setup.config
        self._started_at = time.monotonic()
        self._decoder = Decoder()
        self._places: dict[bytes, Places] = {}
        self._plain: list[PlainSteps] = []
        self._table = Table(Context())
        self._layout: Layout | None = None
        self._aggregator = Aggregator(self._config, self._on_error)
        info = RunInfo.from_json(setup.facts)
        self.diagnosis = LiveDiagnosis(info, self._config, self._on_rule_error) if setup.diagnoses else None
        self._failed = self._finished = False
        self._notices: list[Finding] = []
        self._latest: dict[Source | None, dict[str, float]] = {}
        self._other_rates: set[int] = set()
        self._single_batch_readings = self._unknown_weights = 0
        self._weighting = PartWeights(self._config.micro_batch_weights)
        self._clean_steps = CLEAN_STEPS
        self._reported_ranks: set[int] = set()
        self._seen_errors: set[tuple[str, type[Exception], str]] = set()
        self._step = setup.first_step
        self.store = _Store(setup, self._on_store_error) if setup.keeps else None
        self._publisher = Publisher((), self.report, setup.path)
        for destination in setup.destinations:
            self._publisher.add(destination)
        if setup.state:
            self._load_state(setup.state)

    # -- draining -----------------------------------------------------------------------------------------------

    @property
    def pause(self) -> float:
        """Seconds until the next drain unless woken earlier."""
        is_calm = time.monotonic() - self._started_at > YOUNG_SECONDS and self._journal.fill < BUSY_FILL
        return CALM_SECONDS if is_calm and not self._setup.wants_readings else COMMIT_SECONDS

    def drain(self) -> int:
        """Process everything in the journal; returns the number of records."""
        count, stored_at = 0, time.monotonic()
        for kind, data in self._journal.read():
            count += 1
            try:
                if kind == PLAIN:
                    self._collect(decode_plain(data, self._places))
                else:
                    self._finish_plain()
                    self._take(kind, data)
            except Exception as error:  # lose this record only
                self._on_error("worker", error)
            looks = count % 64 == 0 and not self.closed
            if looks and (self._journal.fill > 0.5 or time.monotonic() - stored_at > CALM_SECONDS):
                self._store_and_release(at_once=True)
                stored_at = time.monotonic()
        self._store_and_release()
        if count:
            self._channel.send({"what": "latest", "step": self._step, "values": self._newest()})
        return count

    def _store_and_release(self, *, at_once: bool = False) -> None:
        try:
            self._finish_plain()
        except Exception as error:
            self._on_error("worker", error)
        self._print_news()
        if self.store is not None and not self.closed:
            self.store.dropped_before = self._journal.dropped
            self.store.commit() if at_once else self.store.commit_if_due()
        if self.store is None or self.store.is_settled:
            self._journal.release()  # only what is on disk: another worker may have to read the rest

    def _print_news(self, *, at_once: bool = False) -> None:
        """Print new findings; those of the first steps only after the line on what is watched, which takes a few."""
        is_first = self._step < self._setup.first_step + FIRST_STEPS
        is_young = time.monotonic() - self._started_at < FIRST_SECONDS
        if self.diagnosis is not None and (at_once or not (is_first and is_young)):
            self.diagnosis.print_news()

    def _take(self, kind: int, data: bytes) -> None:
        if kind == STEP:
            record = self._decoder.decode(data)
            self._finish(aggregate(record, self._table, self._weighting))
        elif kind == SUMS:
            self._finish(sums_from_bytes(data, self._table))
        elif kind == CONTEXT:
            self.use_context(Context.from_bytes(data))
        elif kind == COMMAND:
            self._obey(json.loads(data))

    def _collect(self, steps: PlainSteps) -> None:
        """Collect consecutive plain steps, to process them together."""
        if self._plain and self._plain[0].places is not steps.places:
            self._finish_plain()
        self._plain.append(steps)

    def _finish_plain(self) -> None:
        """Process the collected plain steps. Rules see one by one only those that are not calm."""
        if not self._plain:
            return
        collected, self._plain = self._plain, []
        plain = self._aggregator.plain(join_plain(collected), self._table)
        end, layout = len(plain), self._table.layout
        if layout is not self._layout:
            self._layout = layout
            self._keep([layout])
        latest = plain.reading(end - 1)
        self._step = max(self._step, latest.step)
        self._latest[None] = {**self._latest.get(None, {}), **latest.values}
        at = 0
        while at < end:
            first = at
            if not (self._publisher or self._setup.wants_readings or self._clean_steps < CLEAN_STEPS):
                if self.diagnosis is None or self._failed:
                    at = skip_calm(plain, at)
                else:
                    at = self.diagnosis.diagnosis.skim(plain, at, layout)
            if at > first and self.store is not None:
                self.store.put(plain.part(first, at))
            if at < end:
                self._show([plain.reading(at)], layout, full=False)
                at += 1

    def use_context(self, context: Context) -> None:
        """Use this context for the following steps."""
        self._table = Table(context)
        if context.autocast is not None and self.diagnosis is not None:
            self.diagnosis.diagnosis.info = replace(self.diagnosis.diagnosis.info, autocast=context.autocast)

    def _finish(self, step: StepSums) -> None:
        self._step = max(self._step, step.step)
        readings = self._aggregator.finish(step)
        if not readings:
            return
        for reading in readings:
            self._latest[reading.source] = {**self._latest.get(reading.source, {}), **reading.values}
        self._note_single_batches(step)
        self._note_unknown_weights(step)
        self._note_errors_elsewhere(step)
        self._note_rates(step)
        layout = step.table.layout
        if layout is not self._layout:
            self._layout = layout
            self._keep([layout])
        self._show(readings, layout, full=step.full)

    def _show(self, readings: list[Reading], layout: Layout, *, full: bool) -> None:
        """Diagnose, store and publish the readings of one step."""
        general = readings[0]
        broken = not general.values.get("grad/nonfinite", 0) <= 0  # NaN: an infinite norm whose elements may be finite
        plain = not full and not broken and not general.values.get("grad/spike_ratio", 0) >= STORED_SPIKE_RATIO
        if self._setup.wants_readings:
            self._channel.send({"what": "readings", "readings": list(readings), "plain": plain})
        self._count_nonfinite(broken or general.values.get("grad/norm", 0) > LARGE_NORM)
        changed = self._diagnose(readings, layout)
        if plain:
            readings[0] = replace(general, tensors={})
        self._keep([*changed, *readings])

    def _count_nonfinite(self, broken: bool) -> None:
        counted = self._clean_steps < CLEAN_STEPS
        self._clean_steps = 0 if broken else self._clean_steps + 1
        if counted != (self._clean_steps < CLEAN_STEPS):
            self._channel.send({"what": "count_nonfinite", "value": not counted})

    def _diagnose(self, readings: Sequence[Reading], layout: Layout) -> list[Finding]:
        if self.diagnosis is None or self._failed:
            return []
        before = self.diagnosis.opened
        try:
            changed = self.diagnosis.read(readings, layout)
        except Exception as error:
            self._failed = True  # keep what was found
            self._on_error("diagnosis", error)
            return []
        opened = {id(finding) for _, finding in self.diagnosis.opened} - {id(finding) for _, finding in before}
        for finding in changed:
            self._send_finding(finding, opened=id(finding) in opened, step=readings[0].step)
        return changed

    def _send_finding(self, finding: Finding, *, opened: bool = False, step: int = 0, notice: bool = False) -> None:
        self._channel.send({"what": "finding", "finding": finding, "opened": opened, "step": step, "notice": notice})

    def _keep(self, records: Sequence[Reading | Finding | Action | Layout]) -> None:
        self._publisher.put(records)
        if self.store is not None:
            for record in records:
                self.store.put(record)

    def _newest(self) -> dict[str, float]:
        """Returns the newest global value of every metric, of the best source that has it."""
        merged: dict[str, float] = {}
        for source in (*reversed(SOURCES), None):
            merged |= self._latest.get(source, {})
        return merged

    # -- what the training process asks for ---------------------------------------------------------------------

    def _obey(self, command: Mapping[str, Any]) -> None:
        self._print_news(at_once=True)  # before what the training process prints once it has its answer
        what = command["do"]
        if what == "finding":
            self.report(Finding.from_json(command["finding"]), aloud=command["aloud"])
        elif what == "action":
            self._keep([Action.from_json(command["action"])])
        elif what == "flush":
            stored = self.store.commit() if self.store is not None else True
            self._channel.send({"what": "done", "id": command["id"], "stored": stored})
        elif what == "state":
            self._channel.send({"what": "done", "id": command["id"], "state": self.state_dict()})
        elif what == "start_over":
            if self.diagnosis is not None:
                closed = self.diagnosis.start_over()
                for finding in closed:
                    self._send_finding(finding)
                self._keep(closed)
        elif what == "wants_readings":
            self._setup.wants_readings = True
        elif what == "finish":
            self._finish_diagnosis()
            self._channel.send({"what": "done", "id": command["id"]})
        elif what == "close":
            self._close(command)

    def _finish_diagnosis(self) -> None:
        if self.diagnosis is None or self._finished:
            return
        self._finished = True
        closing = self.diagnosis.diagnosis.finish()
        for finding in closing:
            self._send_finding(finding)
        self._keep(closing)

    def _close(self, command: Mapping[str, Any]) -> None:
        self._finish_diagnosis()
        self._publisher.close()
        stored = self.store.close() if self.store is not None else True
        self.closed = True
        self._channel.send({"what": "done", "id": command["id"], "stored": stored})

    def abandon(self) -> None:
        """Write what a dead training process left, without marking the run as finished."""
        self.drain()
        self._print_news(at_once=True)
        if not self.closed:
            self._publisher.close()
            if self.store is not None:
                self.store.commit()
                self.store.discard()
            self._journal.release()

    def state_dict(self) -> dict[str, Any]:
        """The state needed to resume the run."""
        diagnosis = self.diagnosis.state_dict() if self.diagnosis is not None else None
        return {"interpreter": self._aggregator.state_dict(), "diagnosis": diagnosis}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._aggregator.load_state_dict(state["interpreter"])
        if self.diagnosis is not None and state["diagnosis"] is not None:
            self.diagnosis.load_state_dict(state["diagnosis"])
            for finding in self.diagnosis.diagnosis.findings:
                self._send_finding(finding)

    # -- findings about the monitoring itself -------------------------------------------------------------------

    def report(self, finding: Finding, *, aloud: bool = True) -> None:
        """Store and print a finding about the monitoring itself."""
        self._notices.append(finding)
        if notices.is_said(self._notices):
            print_line(str(finding), self._config.quiet or not aloud)
        self._send_finding(finding, notice=True)
        self._keep([finding])

    def _on_error(self, part: str, error: Exception) -> None:
        kind = (part, type(error), str(error))
        if kind in self._seen_errors:
            return
        self._seen_errors.add(kind)
        self.report(notices.monitor_error(part, error, self._step))

    def _on_rule_error(self, rule: str, error: Exception) -> None:
        self.report(notices.rule_error(rule, error, self._step))

    def _on_store_error(self, error: BaseException) -> None:
        self.report(notices.store_error(error, self._setup.path, self._step))

    def _note_single_batches(self, step: StepSums) -> None:
        if not step.full or not step.single_part or step.num_sources > 1:
            return
        self._single_batch_readings += 1
        if self._single_batch_readings == 2:
            reason = "this loop runs one backward pass per step; GSNR at one set of weights needs two or more"
            self.report(notices.source_unavailable("micro-batches", reason, step.step))

    def _note_unknown_weights(self, step: StepSums) -> None:
        self._unknown_weights = self._unknown_weights + 1 if step.weights_unknown else self._unknown_weights
        if step.weights_unknown and self._unknown_weights == UNKNOWN_WEIGHTS:
            reason = (
                "they differ in size and their norms do not show how the loop weighs them; set "
                'Config(micro_batch_weights="equal") if it divides each loss by their number, "size" if it weighs '
                "each loss by its samples"
            )
            self.report(notices.source_unavailable("micro-batches", reason, step.step))

    def _note_errors_elsewhere(self, step: StepSums) -> None:
        """Report, once per rank, errors of gradvitals on other ranks, whose numbers may be missing since."""
        for rank, errors in enumerate(step.ranks.get("ranks/errors", ())):
            if errors > 0 and rank not in self._reported_ranks and rank != self._setup.meta.get("rank", 0):
                self._reported_ranks.add(rank)
                self.report(notices.error_on_rank(rank, step.step))

    def _note_rates(self, step: StepSums) -> None:
        """Report, once per rank, a learning rate that differs from the majority's."""
        rates = step.ranks.get("ranks/lr")
        if rates is None or not np.isfinite(rates).any():
            return
        values, counts = np.unique(rates[np.isfinite(rates)], return_counts=True)
        # Without a majority, compare with the first rank's, which the readings show.
        usual = values[counts.argmax()] if 2 * counts.max() > len(rates) or step.lr is None else step.lr
        for rank in np.flatnonzero(np.abs(rates - usual) > SAME_RATE * np.abs(usual)).tolist():
            if rank not in self._other_rates:
                self._other_rates.add(rank)
                self.report(notices.rank_lr_differs(rank, float(rates[rank]), float(usual), step.step))


class _Store:
    """Writes the run file. Reports a disk that refuses writes once, and retries with every commit."""

    def __init__(self, setup: Setup, on_error: Callable[[BaseException], None]) -> None:
        self._setup = setup
        self._on_error = on_error
        self._writer: RunWriter | None = None
        self._broken = False
        self._pending: list[Record] = []
        self._pending_bytes = self._pending_count = 0
        self._dropped = 0
        self.dropped_before = 0
        """Records that found no room in the journal."""
        self._seen_errors: set[tuple[object, ...]] = set()
        self._committed_at = 0.0

    def put(self, record: Record) -> None:
        """Add a record to the next commit. Without room, count it as dropped."""
        if not self._has_room(record) and not self._broken:
            self.commit()
        if not self._has_room(record):
            self._dropped += _num_steps(record)
            return
        self._pending.append(record)
        self._pending_count += _num_steps(record)
        self._pending_bytes += _num_bytes(record)

    def _has_room(self, record: Record) -> bool:
        # Findings, actions and layouts are few and matter more than readings: they get twice the room.
        size = self._setup.config.queue_size
        room = size if isinstance(record, (Reading, PlainReadings)) else 2 * size
        fits = not self._pending or self._pending_bytes + _num_bytes(record) <= MAX_PENDING_BYTES
        return self._pending_count < room and fits

    @property
    def is_settled(self) -> bool:
        """Whether nothing is pending, or the disk currently refuses writes."""
        return self._broken or not self._pending

    def commit_if_due(self) -> None:
        """Commit pending records every `COMMIT_SECONDS`; renew the heartbeat every `HEARTBEAT_SECONDS`."""
        since = time.monotonic() - self._committed_at
        if since >= (COMMIT_SECONDS if self._pending else HEARTBEAT_SECONDS):
            self.commit()

    def commit(self) -> bool:
        """Write and commit pending records; returns whether that worked. If not, they stay pending."""
        self._committed_at = time.monotonic()
        if not self._pending and self._writer is None:
            return True
        try:
            if self._writer is None:
                setup = self._setup
                self._writer = RunWriter(
                    setup.path,
                    meta=setup.meta,
                    resume=setup.resume,
                    first_step=setup.first_step,
                    run_id=setup.run_id,
                )
            elif self._broken:
                self._writer.reopen()
            self._broken = False
            unfit = self._write_pending(self._writer)
            self._writer.dropped = self._dropped + self.dropped_before + unfit
            self._writer.commit()
        except Exception as error:
            self._broken = True
            if self._writer is not None:
                self._writer.discard()
            self._report(error, store=True)
            return False
        self._dropped += unfit
        self._pending, self._pending_bytes, self._pending_count = [], 0, 0
        return True

    def _write_pending(self, writer: RunWriter) -> int:
        """Write all pending records; returns how many cannot be stored at all."""
        unfit = 0
        for record in self._pending:
            try:
                writer.write(record)
            except (sqlite3.Error, OSError, RunError):
                raise
            except Exception as error:
                unfit += _num_steps(record)
                self._report(error)
        return unfit

    def close(self) -> bool:
        """Write what is pending and mark the run as finished."""
        stored = self.commit() or self.commit()  # retry once: the disk may have room again
        try:
            self._dropped += self._pending_count
            if self._writer is not None and not self._broken:
                self._writer.dropped = self._dropped + self.dropped_before
                self._writer.close()
        except Exception as error:
            self._report(error, store=True)
            return False
        return stored

    def discard(self) -> None:
        """Leave the run unfinished."""
        if self._writer is not None:
            self._writer.discard()

    def _report(self, error: BaseException, *, store: bool = False) -> None:
        kind = (type(error), getattr(error, "sqlite_errorname", None))
        if kind in self._seen_errors:
            return
        self._seen_errors.add(kind)
        if store and not isinstance(error, RunError):
            reported: BaseException = RunError(f"{run_file(self._setup.path).parent} could not be written ({error})")
            reported.__cause__ = error
        else:
            reported = error
        self._on_error(reported)


def skip_calm(plain: PlainReadings, start: int) -> int:
    """Returns the first step from `start` on that keeps per-tensor numbers; the number of steps if there is none."""
    if "grad/norm" not in plain.values:
        return len(plain)
    kept = ~(plain.values["grad/nonfinite"][start:] <= 0) | (
        plain.values["grad/spike_ratio"][start:] >= STORED_SPIKE_RATIO
    )
    kept &= plain.present["grad/norm"][start:]
    return start + int(kept.argmax()) if kept.any() else len(plain)


def _num_steps(record: Record) -> int:
    return len(record) if isinstance(record, PlainReadings) else 1


def _num_bytes(record: Record) -> int:
    if not isinstance(record, Reading) or not (record.tensors or record.layers or record.heads or record.ranks):
        return 0
    arrays = (array for kind in (record.tensors, record.layers, record.heads, record.ranks) for array in kind.values())
    return sum(int(getattr(array, "nbytes", 0)) for array in arrays)


class WorkerThread:
    """Runs a worker in a thread of the training process: in notebooks, in tests, and if no process can be started."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._wake = threading.Event()
        self._stopped = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="gradvitals-worker", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have it read the journal now."""
        self._wake.set()

    @property
    def is_alive(self) -> bool:
        """Whether it is running."""
        return os.getpid() == self._pid and self._thread.is_alive()

    def stop(self, seconds: float) -> None:
        """Wait for it to end."""
        self._stopped = True
        self._wake.set()
        if self.is_alive and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._worker.closed:
            self._worker.drain()
            if self._stopped:
                break
            if not self._worker.closed:
                self._wake.wait(self._worker.pause)
                self._wake.clear()
