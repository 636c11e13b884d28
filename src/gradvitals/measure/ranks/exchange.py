"""Where the ranks' numbers become one: a single sum for each shipment of steps, off the training thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from gradvitals.measure.landed import StepSums, Table
from gradvitals.measure.ranks.comparison import Comparison
from gradvitals.measure.ranks.roster import Roster
from gradvitals.measure.ranks.wire import Kind, OutOfStepError, Wire
from gradvitals.measure.sums import Floats

ROLL_CALL_SECONDS = 5.0
ROLL_CALL_PAUSE = 1.0
"""When ranks are lost, those that are left answer within these times: in all, and after the one before."""

LOOK_SECONDS = 0.5
"""How often a rank that waits for others looks whether it has to."""

LOST_WORDS = ("connection", "peer", "socket", "gloo", "nccl", "timed out", "broken pipe")
"""What the errors of collectives speak of when a rank is gone."""


HEADER_NUMBERS = 7
"""Numbers that are compared before those of each shipment are added up."""


class LostRanksError(RuntimeError):
    """Other ranks do not answer any more."""


class Exchange:
    """Adds up what all ranks have read of some steps. Every rank must bring the same steps in the same order.

    Args:
        roster: Who takes part.
        on_lost: Called once, with the error and the ranks that are missing where that is known, when the exchange has
            ended for good. From then on steps pass through as this rank alone saw them.
    """

    def __init__(self, roster: Roster, on_lost: Callable[[Exception, Sequence[int]], None]) -> None:
        self.roster = roster
        self.wire = Wire(roster)
        self.comparison = Comparison(roster)
        self.ended = False
        """Whether ranks have stopped to exchange numbers."""
        self.leaving = False
        """Whether this rank will say so the next time."""
        self.collectives = 0
        """Collectives so far."""
        self.bytes_sent = 0
        self.troubles = 0
        """Errors of gradvitals on this rank, which the one that keeps the run is to know of."""
        self._on_lost = on_lost
        self._table = Table(roster.layout, roster.slots)
        self._seconds: list[float] = []

    def explain(self, error: BaseException) -> None:
        """Training has ended with an error: if it is that other ranks are gone, find out which."""
        if self.ended or not speaks_of_loss(error):
            return
        self.ended = True
        self._on_lost(LostRanksError(_first_line(error)), missing_ranks(self.roster))

    def end(self) -> None:
        """This rank takes no part any more, nor waits for others: these find out when they wait for it."""
        self.ended = True

    def leave(self) -> None:
        """This rank has missed a step: it tells the others the next time, and all of them end."""
        self.leaving = True

    def share(self, steps: Sequence[StepSums]) -> list[StepSums]:
        """These steps as all ranks together saw them; where others do not answer, as this one alone did."""
        if not self.ended:
            try:
                return self._share(steps)
            except Exception as error:
                known, self.ended = self.ended, True
                if not known and dist.is_initialized():  # else the training has ended, and with it the ranks
                    self._on_lost(error, missing_ranks(self.roster))
        return [self._alone(step) for step in steps] if self.roster.is_replicated else []

    def _alone(self, step: StepSums) -> StepSums:
        """What one rank of a replicated model knows for all: everything but how its gradient came about."""
        step.parts, step.single_part = None, False
        step.ranks = {}
        return step

    def _check(self, steps: Sequence[StepSums], length: int) -> None:
        """Find that all ranks bring the same steps, before anything is added up.

        Gloo ends the process where ranks bring vectors of different lengths, so these are compared first.

        Raises:
            OutOfStepError: On all ranks alike.
        """
        own = np.array([steps[0].step, steps[-1].step, length], dtype=np.float64)
        sent = np.append(np.append(own, -own), float(self.leaving))
        assert len(sent) == HEADER_NUMBERS
        found = self._reduce(sent, dist.ReduceOp.MAX, "what each rank brings", steps)
        if found[-1] > 0:
            raise OutOfStepError("a rank does not take part any more")
        if (found[:3] != -found[3:6]).any():
            least, most = (-found[3:5]).astype(int), found[:2].astype(int)
            raise OutOfStepError(
                f"ranks are at different steps: {least[0]} to {least[1]} on one, {most[0]} to {most[1]} on another"
            )

    def _share(self, steps: Sequence[StepSums]) -> list[StepSums]:
        kinds = [Kind(full=step.full, detail=step.detail) for step in steps]
        self._note_own(steps)
        vectors = [self.wire.pack(step, kind) for step, kind in zip(steps, kinds, strict=True)]
        audits = [step for step in steps if step.audit]
        audit_vectors = [self.comparison.pack(step) for step in audits]
        joined = np.concatenate([*vectors, *audit_vectors])
        self._check(steps, len(joined))
        together = self._reduce(joined, dist.ReduceOp.SUM, "sums", steps)
        ends = np.cumsum([len(vector) for vector in (*vectors, *audit_vectors)])
        cut = np.split(together, ends[:-1])
        table = self._table_of(steps[-1])
        shared = [
            self.wire.unpack(vector, kind, own, table)
            for vector, kind, own in zip(cut[: len(steps)], kinds, steps, strict=True)
        ]
        self._share_largest(steps, shared, kinds)
        seen = dict(zip((step.step for step in audits), zip(audits, cut[len(steps) :], strict=True), strict=True))
        for step in shared:
            if step.step in seen:
                own, vector = seen[step.step]
                self.comparison.unpack(vector, own, step, self._reduce)
        return shared

    def _note_own(self, steps: Sequence[StepSums]) -> None:
        """What this rank tells of itself: whether it had NaN by itself, and at full steps how long they took."""
        for step in steps:
            broken = step.is_broken or (step.loss is not None and not math.isfinite(step.loss))
            if (parts := step.rows.get("parts")) is not None:
                broken |= not np.isfinite(parts.values[parts.present]).all()
            step.ranks["ranks/nonfinite"] = np.array([float(broken)])
            self._seconds.append(step.lap.wall_seconds)
            if step.full:
                step.ranks["ranks/step_seconds"] = np.array([np.mean(self._seconds)])
                step.ranks["ranks/errors"] = np.array([float(self.troubles)])
                self._seconds = []

    def _table_of(self, own: StepSums) -> Table:
        """The rows of all ranks; where all have the same ones, as this rank describes them by now."""
        if self.roster.num_stages == 1:
            return own.table
        return self._table

    def _share_largest(self, steps: Sequence[StepSums], shared: Sequence[StepSums], kinds: Sequence[Kind]) -> None:
        detailed = [place for place, kind in enumerate(kinds) if kind.detail]
        if not detailed:
            return
        vectors = [self.wire.pack_largest(steps[place]) for place in detailed]
        largest = self._reduce(np.concatenate(vectors), dist.ReduceOp.MAX, "largest values", steps)
        for place, vector in zip(detailed, np.split(largest, len(detailed)), strict=True):
            self.wire.unpack_largest(vector, shared[place])

    def _reduce(self, vector: Floats, how: dist.ReduceOp.RedOpType, what: str, steps: Sequence[StepSums]) -> Floats:
        tensor = torch.from_numpy(np.ascontiguousarray(vector))
        self.collectives += 1
        self.bytes_sent += tensor.numel() * tensor.element_size()
        try:
            work = dist.all_reduce(tensor, how, group=self.roster.group, async_op=True)
            while not self._is_done(work):
                pass
        except RuntimeError as error:
            span = f"steps {steps[0].step} to {steps[-1].step}"
            raise LostRanksError(
                f"gradvitals' all-reduce of {what} ({span}, {self.roster.world} ranks) failed: {_first_line(error)}"
            ) from error
        return tensor.numpy()

    def _is_done(self, work: Any) -> bool:
        """Wait a little for the others. Raises where the exchange has ended meanwhile, or where it has failed."""
        try:
            work.wait(timedelta(seconds=LOOK_SECONDS))
        except RuntimeError as error:
            if work.is_completed():
                work.wait()  # it has failed, and says so again; or it was done just after the time was up
                return True
            if self.ended:
                raise LostRanksError("this rank waits for others no more") from error
            return False
        return True


def speaks_of_loss(error: BaseException) -> bool:
    """Whether an error is what a rank gets to see when others are gone."""
    return not isinstance(error, OSError) and any(word in str(error).lower() for word in LOST_WORDS)


def missing_ranks(roster: Roster) -> list[int]:
    """Ranks that have not said that they, too, miss others; none where that cannot be found out."""
    from torch.distributed import distributed_c10d as c10d

    try:
        store = c10d.PrefixStore(f"gradvitals/lost/{roster.group.group_name}", c10d._get_default_store())
        store.set(f"here/{roster.rank}", "1")
        missing, since, deadline = list(range(roster.world)), time.monotonic(), time.monotonic() + ROLL_CALL_SECONDS
        # Those who live have noticed at the same moment; wait until nobody more has come for a while.
        while missing and time.monotonic() < min(deadline, since + ROLL_CALL_PAUSE):
            time.sleep(0.02)
            still = [rank for rank in missing if not store.check([f"here/{rank}"])]
            since = time.monotonic() if len(still) < len(missing) else since
            missing = still
        return missing
    except Exception:  # the store may have died with its rank
        return []


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]
