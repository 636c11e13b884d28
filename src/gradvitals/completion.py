"""From steps that have reached the host to what is kept of them. All of it happens on the writer's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradvitals import notices
from gradvitals.breath import Breath
from gradvitals.config import Config
from gradvitals.judge import Judge
from gradvitals.measure import Interpreter, RawStep, Tap
from gradvitals.measure.budget import Budget, Cadence
from gradvitals.measure.landed import StepSums, Table, land
from gradvitals.measure.ranks.exchange import Exchange
from gradvitals.types import SOURCES, Action, Finding, Layout, Reading, Source

Record = Reading | Finding | Action | Layout

STORED_SPIKE_RATIO = 2.0
"""A step whose norm is this far over its moving average keeps its per-tensor numbers even when not due."""
MUCH_RARER = 3
"""Readings that are rarer by more than this factor than was told are told of again."""
CLEAN_STEPS = 20
"""After a non-finite gradient, elements are counted until this many steps have been free of them."""


class Completion:
    """Finishes the readings of a run, step by step.

    Args:
        config: What was asked for.
        judge: Who judges the readings; None for nobody.
        exchange: Where several ranks' numbers become one; None for a single process.
        report: Told what gradvitals has to say about itself.
        on_error: Told the name of a part and its error.
        breath: Called between pieces of work.
    """

    def __init__(
        self,
        config: Config,
        judge: Judge | None,
        exchange: Exchange | None,
        report: Callable[[Finding], None],
        on_error: Callable[[str, Exception], None],
        breath: Breath,
    ) -> None:
        self.judge = judge
        self.exchange = exchange
        self.interpreter = Interpreter(config, on_error, breath)
        self.readers: list[Callable[[Reading], object]] = []
        self.latest: dict[Source | None, dict[str, float]] = {}
        self._config = config
        self._report = report
        self._on_error = on_error
        self._breath = breath
        self._table = Table(Layout(), [])
        self._layout: Layout | None = None
        self._beyond_told = False
        self._told = Cadence(config.tensor_every)
        """The rarest cadence that was told of."""
        self._judging_seconds = {True: 0.0, False: 0.0}
        """What it took to judge the last step that was read in full, and the last one that was not."""
        self._writing_seconds = 0.0
        """What it took to write the readings of a step, of those that came last."""
        self._ended, self._last_count = 0.0, 0
        self._single_batch_readings = 0
        self._errors_told: set[int] = set()
        self._clean_steps = CLEAN_STEPS

    def records(self, raws: Sequence[RawStep], tap: Tap) -> Iterable[Record]:
        """What is to be kept of some steps."""
        began = time.thread_time()
        if self._last_count:  # what was returned last has been written since
            self._writing_seconds = (began - self._ended) / self._last_count
        landed = [(raw, step) for raw in raws if (step := self._land(raw)) is not None]
        landing = (time.thread_time() - began) / max(1, len(raws))
        if self.exchange is None:
            together = landed
        elif len(landed) < len(raws):  # others would wait for what this rank does not have
            self.exchange.leave()
            together = []
        else:
            shared = self.exchange.share([step for _, step in landed])
            together = list(zip((raw for raw, _ in landed), shared, strict=False))
        for raw, step in together:
            try:
                yield from self._of_step(raw, step, tap, landing)
            except Exception as error:  # one step is lost, not those around it
                self._on_error("interpret", error)
        self._ended, self._last_count = time.thread_time(), len(raws)

    def newest(self) -> dict[str, float]:
        """The newest global value of every metric, the best source first."""
        merged: dict[str, float] = {}
        for source in (*reversed(SOURCES), None):
            merged |= self.latest.get(source, {})
        return merged

    def state_dict(self) -> dict[str, Any]:
        """All moving averages, and what an audit leaves for the next."""
        state = self.interpreter.state_dict()
        if self.exchange is not None:
            state["audit"] = self.exchange.comparison.memory.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.interpreter.load_state_dict(state)
        if self.exchange is not None and "audit" in state:
            self.exchange.comparison.memory.load_state_dict(state["audit"])

    def _land(self, raw: RawStep) -> StepSums | None:
        self._breath()
        try:
            if raw.layout is not self._table.layout:
                self._table = Table(raw.layout, raw.slots)
            return land(raw, self._table, self._config)
        except Exception as error:
            self._on_error("interpret", error)
            return None

    def _of_step(self, raw: RawStep, step: StepSums, tap: Tap, landing_seconds: float) -> list[Record]:
        started = time.thread_time()
        readings = self.interpreter.finish(step)
        if not readings:
            return []
        if tap.budget is not None and self.exchange is None:
            own = landing_seconds + self._writing_seconds
            own += time.thread_time() - started + self._judging_seconds[raw.full]
            readings[0] = self._account(tap.budget, raw, readings[0], own, tap)
        for reading in readings:
            self.latest[reading.source] = {**self.latest.get(reading.source, {}), **reading.values}
            self._show(reading)
        self._note_single_batches(step)
        self._note_errors_elsewhere(step)
        layout = step.table.layout
        records: list[Record] = []
        if layout is not self._layout:
            self._layout = layout
            records.append(layout)
        general = readings[0]
        broken = general.values.get("grad/nonfinite", 0) > 0
        self._clean_steps = 0 if broken else self._clean_steps + 1
        tap.count_nonfinite = self._clean_steps < CLEAN_STEPS
        remarkable = broken or general.values.get("grad/spike_ratio", 0) >= STORED_SPIKE_RATIO
        started = time.thread_time()
        records += self._judged(readings, layout)
        self._judging_seconds[raw.full] = time.thread_time() - started
        if not raw.full and not remarkable:
            readings[0] = replace(general, tensors={})
        return [*records, *readings]

    def _judged(self, readings: Sequence[Reading], layout: Layout) -> Sequence[Finding]:
        try:
            return self.judge.read(readings, layout) if self.judge is not None and not self.judge.failed else ()
        except Exception as error:
            assert self.judge is not None
            self.judge.failed = True  # what it has found stays
            self._on_error("diagnosis", error)
            return ()

    def _show(self, reading: Reading) -> None:
        if self.exchange is not None and self.exchange.ended:
            return  # what is read now is this rank's own, and nobody must act on that alone
        for reader in list(self.readers):
            try:
                reader(reading)
            except Exception as error:
                self.readers.remove(reader)
                self._on_error("on_reading", error)

    def _account(self, budget: Budget, raw: RawStep, reading: Reading, own_seconds: float, tap: Tap) -> Reading:
        """Charge this step's cost to the budget and thin the readings where it is overdrawn."""
        budget.charge(raw.lap, own_seconds, full=raw.full)
        if budget.free_seconds > 0:
            return reading
        spent, before = budget.spent, tap.cadence
        wanted = budget.propose(before)
        if wanted != before:
            tap.cadence = wanted
            beyond = budget.fixed > budget.share and not budget.thins_steps  # no cadence obeys it: that is told once
            first = wanted != self._told == Cadence(self._config.tensor_every)
            rarer = first or any(new > MUCH_RARER * told for new, told in zip(wanted, self._told, strict=True))
            if rarer and not (beyond and self._beyond_told):
                self._beyond_told, self._told = beyond, wanted
                costs = {"spent": spent, "fixed": budget.fixed, "budget": budget.share}
                heard = "loss" in reading.values or "clip/max_norm" in reading.values
                self._report(notices.readings_thinned(raw.step, **costs, before=before, after=wanted, heard=heard))
        if self._config.overhead_budget is None:
            return reading
        return replace(reading, values={**reading.values, "monitor/overhead": spent})

    def _note_errors_elsewhere(self, step: StepSums) -> None:
        """Say once that gradvitals met an error on another rank, whose numbers may be missing since."""
        for rank, errors in enumerate(step.ranks.get("ranks/errors", ())):
            own = self.exchange is not None and rank == self.exchange.roster.rank
            if errors > 0 and rank not in self._errors_told and not own:
                self._errors_told.add(rank)
                self._report(notices.error_on_rank(rank, step.step))

    def _note_single_batches(self, step: StepSums) -> None:
        if not step.full or not step.single_part or step.num_sources > 1:
            return
        self._single_batch_readings += 1
        if self._single_batch_readings == 2:
            reason = "this loop runs one backward pass a step; GSNR at one set of weights needs two or more"
            self._report(notices.source_unavailable("micro-batches", reason, step.step))
