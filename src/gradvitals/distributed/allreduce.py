"""Packs the sums of a step, adds them up over all ranks without waiting, and unpacks them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from gradvitals.distributed.audit import Comparison
from gradvitals.distributed.topology import Topology
from gradvitals.metrics import METRICS, SUMS
from gradvitals.worker.record import STAGES, Context, Floats
from gradvitals.worker.sums import NUM_BLOCKS, PartSums, RowSums, StepSums, Table, WindowSums

SLOTS = ("heads", "parts")
"""Sums of every slice of an attention head, at full steps."""

FLAGS = ("under_scaler", "skipped", "carried", "alternating")
"""True for a step if true on any rank."""

MEANS = ("loss", "lr", "max_norm", "lost_loss", "lost_norm")
"""Averaged over the ranks that know it."""

VALUES = ("val/loss", "clip/scale")
"""Metrics that need no arithmetic: the same."""

PARTS = {"count": 0, "samples": 0, "weight": 1, "weight_per_sample": 1, "square_per_sample": 2}
"""The numbers of `PartSums`, each with the power of the weights that it contains."""

SCALARS = (
    *FLAGS,
    *MEANS,
    *VALUES,
    *(f"{name}_weight" for name in (*MEANS, *VALUES)),
    *("given_up", "batch_size", "batch_told", "uncounted", "unscaled", "clipped", "moments_clipped"),
    *("change_square", "change_dot", "change_dot_told"),
    *("parts_told", "parts_known", *(f"parts_{name}" for name in PARTS)),
)
"""The numbers of a whole step."""

RANK_NUMBERS = tuple(name for name, metric in METRICS.items() if metric.of_ranks == "full")
"""One number per rank, at full steps."""

RANK_FLAGS = tuple(name for name, metric in METRICS.items() if metric.of_ranks == "step")
"""One number per rank, at every step; kept if one of them is not 0."""

LARGEST = tuple(name for name, kind in SUMS.items() if kind.combine == "max")
"""Combined by taking the largest: in a second vector, of detail steps only."""

WINDOW_NUMBERS = 3 + NUM_BLOCKS + 1


@dataclass(frozen=True)
class Kind:
    """The layout of a step's record; the same on all ranks."""

    full: bool
    detail: bool

    @property
    def sums(self) -> tuple[str, ...]:
        """The sums that ranks add up."""
        due = (name for name, one in SUMS.items() if one.is_due(full=self.full, detail=self.detail))
        return tuple(name for name in due if name not in LARGEST)

    @property
    def slots(self) -> tuple[str, ...]:
        """The sums of slices of attention heads."""
        return SLOTS if self.full else ()

    @property
    def ranks(self) -> tuple[str, ...]:
        """The numbers that every rank sends of its own."""
        return RANK_FLAGS + RANK_NUMBERS if self.full else RANK_FLAGS


class StepPacker:
    """Packs the steps of this rank into vectors, and unpacks the sum of all ranks' vectors.

    A vector holds the numbers of the whole step (`SCALARS`); for every sum and tensor, the weighted value and the
    weight, which is 0 on a rank that did not read it; and matrices for slots, ranks and sliding windows.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.num_rows = len(topology.layout.tensors)
        self._local_of = {int(row): index for index, row in enumerate(topology.rows)}

    def _shapes(self, kind: Kind) -> list[tuple[int, ...]]:
        topology = self.topology
        return [
            (len(SCALARS),),
            (len(kind.sums), 2, self.num_rows),
            (len(kind.slots), len(topology.slots)),
            (len(kind.ranks), topology.world),
            (len(topology.windows), WINDOW_NUMBERS),
        ]

    def length(self, kind: Kind) -> int:
        """Returns the length of the vector of such a step."""
        return sum(map(math.prod, self._shapes(kind)))

    def _views(self, vector: Floats, kind: Kind) -> list[Floats]:
        """Returns the parts of a vector, as views."""
        shapes = self._shapes(kind)
        parts = np.split(vector, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    # -- packing ------------------------------------------------------------------------------------------------

    def pack(self, step: StepSums, kind: Kind) -> Floats:
        """Returns this rank's vector of a step."""
        topology, vector = self.topology, np.zeros(self.length(kind))
        scalars, rows, slots, ranks, windows = self._views(vector, kind)
        scalars[:] = self._scalars(step)
        for name, (values, present) in zip(kind.sums, rows, strict=True):
            if (sums := step.rows.get(name)) is not None:
                of, read = SUMS[name], sums.present
                weights = self._weights(is_local=of.is_local)
                if of.of_whole:
                    read = read & topology.is_whole
                if of.after_step:  # a rank that does not step this tensor receives its new values later
                    read = read & topology.is_current
                values[topology.rows] = np.where(read, sums.values * weights, 0.0)
                present[topology.rows] = np.where(read, weights, 0.0)
        for name, values in zip(kind.slots, slots, strict=True):
            if (of_slots := step.slots.get(name)) is not None:
                weights = self._weights(is_local=name == "parts")
                values[topology.slot_numbers] = of_slots * weights[step.table.slot_rows]
        for name, values in zip(kind.ranks, ranks, strict=True):
            values[topology.rank] = step.ranks[name][0] if name in step.ranks else 0.0
        for row, numbers in zip(topology.windows, windows, strict=True):
            here = self._local_of.get(row, -1)
            if (window := step.windows.get(here)) is not None:
                weight = topology.weights[here]
                numbers[:2] = weight, weight * window.square
                if window.block_steps is not None and window.sums is not None:
                    numbers[2], numbers[3:] = weight * window.block_steps, weight * window.sums
        return vector

    def _weights(self, *, is_local: bool) -> Floats:
        """Returns the weights of this rank's rows in the sum; before the reduction, each rank has other gradients."""
        return self.topology.part_weights / self.topology.num_sources if is_local else self.topology.weights

    def _scalars(self, step: StepSums) -> list[float]:
        once = self.topology.share  # a data-parallel worker counts once, however many ranks it has
        size, parts = step.batch_size, step.parts
        numbers = dict.fromkeys(SCALARS, 0.0) | {name: float(getattr(step, name)) for name in FLAGS}
        for name in (*MEANS, *VALUES):
            value = step.values.get(name) if name in VALUES else getattr(step, name)
            if value is not None:
                weight = once * (1.0 if size is None else size) if name == "loss" else 1.0
                numbers[name], numbers[f"{name}_weight"] = weight * value, weight
        numbers["given_up"] = once * step.given_up
        if size is not None:
            numbers |= {"batch_size": once * size, "batch_told": 1.0}
        numbers["uncounted"] = float("nonfinite" in step.rows and not step.counted)
        numbers["unscaled"], numbers["clipped"] = float(step.stage == "unscaled"), float(step.stage == "clipped")
        numbers["moments_clipped"] = float(step.moments_stage == "clipped")
        if step.changes is not None:
            square, dot = step.changes
            numbers |= {"change_square": square, "change_dot": dot or 0.0, "change_dot_told": float(dot is not None)}
        if parts is not None:
            numbers |= {"parts_told": 1.0, "parts_known": float(parts.sizes_known)}
            for name, power in PARTS.items():
                numbers[f"parts_{name}"] = once * getattr(parts, name) / self.topology.num_sources**power
        return list(numbers.values())

    def pack_largest(self, step: StepSums) -> Floats:
        """Returns this rank's numbers of which the largest is taken. NaN counts as infinite."""
        vector = np.full((len(LARGEST), self.num_rows), -math.inf)
        for row, name in zip(vector, LARGEST, strict=True):
            if (sums := step.rows.get(name)) is not None:
                values = np.where(np.isnan(sums.values), math.inf, sums.values)
                row[self.topology.rows] = np.where(sums.present, values, -math.inf)
        return vector.reshape(-1)

    # -- unpacking ----------------------------------------------------------------------------------------------

    def unpack(self, vector: Floats, kind: Kind, own: StepSums, table: Table) -> StepSums:
        """Returns the step of all ranks.

        Args:
            vector: The sum of their vectors.
            kind: What the step records.
            own: The step as this rank packed it, for what is the same everywhere.
            table: The rows of all ranks.
        """
        topology, world = self.topology, self.topology.world
        scalars, rows, slots, ranks, windows = self._views(vector, kind)
        told = dict(zip(SCALARS, scalars.tolist(), strict=True))
        step = StepSums(step=own.step, time=own.time, full=own.full, table=table, wall_seconds=own.wall_seconds)
        step.stage = STAGES[2 if told["clipped"] else 1 if told["unscaled"] else 0]
        step.moments_stage = "clipped" if told["moments_clipped"] else None
        step.batch_size = told["batch_size"] if told["batch_told"] == world else None
        for name in FLAGS:
            setattr(step, name, told[name] > 0)
        for name in MEANS:
            weight = told[f"{name}_weight"]
            setattr(step, name, told[name] / weight if weight else None)
        step.values = {name: told[name] / told[f"{name}_weight"] for name in VALUES if told[f"{name}_weight"]}
        step.given_up = math.ceil(told["given_up"] / self.topology.num_sources - 1e-6)
        if own.lr is not None:
            step.lr = own.lr  # no rank uses the mean of different rates
        step.single_part, step.num_sources = own.single_part, topology.num_sources
        step.weights_unknown = own.weights_unknown
        for name, (values, present) in zip(kind.sums, rows, strict=True):
            if (read := present > 0).any():
                step.rows[name] = RowSums(self._whole(name, values, present, read), read)
        # Ranks begin to count elements once they see a non-finite norm, some a step later than others. Until all
        # count, a tensor counts as one.
        if "nonfinite" in step.rows and told["uncounted"]:
            step.rows["nonfinite"].values = (step.rows["nonfinite"].values > 0).astype(np.float64)
        step.slots = {name: values.copy() for name, values in zip(kind.slots, slots, strict=True)}
        for name, numbers in zip(kind.ranks, ranks, strict=True):
            if name in RANK_NUMBERS or numbers.any():
                step.ranks[name] = numbers.copy()
        if topology.num_stages > 1:
            step.ranks.pop("ranks/lr", None)  # pipeline stages may use different rates
        if "change" in step.rows:
            step.changes = (told["change_square"], told["change_dot"] if told["change_dot_told"] else None)
        if told["parts_told"] == world and "parts" in step.rows:
            known = told["parts_known"] == told["parts_told"]
            step.parts = PartSums(sizes_known=known, **{name: told[f"parts_{name}"] for name in PARTS})
        for row, (weight, square, block_steps, *sums) in zip(topology.windows, windows.tolist(), strict=True):
            if weight > 0:
                whole = topology.expected[row] / weight
                steps = round(block_steps / weight) if block_steps > 0 else None
                step.windows[row] = WindowSums(square * whole, steps, np.array(sums) * whole if steps else None)
        return step

    def _whole(self, name: str, values: Floats, present: Floats, read: NDArray[np.bool_]) -> Floats:
        """Returns the sum of the whole tensor, even if some ranks that hold the same shard did not read it."""
        kind = SUMS[name]
        if kind.is_local:
            return values
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = 1.0 if kind.combine == "mean" else self.topology.expected
            return np.where(read, values * (shares / present), 0.0)

    def unpack_largest(self, vector: Floats, step: StepSums) -> None:
        """Add the largest of all ranks to a step."""
        for name, row in zip(LARGEST, vector.reshape(len(LARGEST), -1), strict=True):
            if (row > -math.inf).any():
                step.rows[name] = RowSums(row.copy(), row > -math.inf)


class OutOfStepError(RuntimeError):
    """Ranks are at different steps."""


STEPS_TOGETHER = 8
"""Steps that ranks add up at once, at most."""

ROLL_CALL_SECONDS = 5.0
ROLL_CALL_PAUSE = 1.0
"""Time to wait for the remaining ranks to respond after some are lost: in all, and per further one."""

LOST_WORDS = ("connection", "peer", "socket", "gloo", "nccl", "timed out", "broken pipe")
"""Words in the errors of collectives when a rank is gone."""

HEADER_NUMBERS = 7
"""Numbers that ranks compare before they add up a chunk."""


class LostRanksError(RuntimeError):
    """Other ranks no longer respond."""


@dataclass
class _Chunk:
    """Some steps that are being added up."""

    steps: list[StepSums]
    kinds: list[Kind]
    vectors: list[Floats]
    audits: list[Floats]
    found: Tensor | None
    """The largest and the smallest over ranks of: the first step, the last step, and the count of numbers."""
    check: Any
    """The collective that fills `found`."""


Collectives = Generator[Any, None, Floats]
"""Yields each collective it starts; resumed when that is done."""


class RankReducer:
    """Adds up the steps of all ranks, asynchronously. Every rank must add the same steps in the same order.

    Nothing waits: a chunk of steps is a generator that starts one collective after the other, and `poll`, called once
    per step, resumes it when the last one is done.

    Args:
        topology: The ranks that take part.
        deliver: Called with every step once it is added up.
        on_lost: Called once, when the exchange fails for good, with the error and the missing ranks if known. From
            then on, this rank delivers its own steps.
    """

    def __init__(
        self,
        topology: Topology,
        deliver: Callable[[StepSums], None],
        on_lost: Callable[[Exception, Sequence[int]], None],
    ) -> None:
        self.topology = topology
        self.packer = StepPacker(topology)
        self.comparison = Comparison(topology)
        self.ended = False
        """Whether ranks stopped exchanging numbers."""
        self.leaving = False
        """Whether this rank asks the others to end with the next chunk."""
        self.each_step = False
        """Whether to send every step on its own, because a Guard acts on it."""
        self.collectives = 0
        """Number of collectives so far."""
        self.bytes_sent = 0
        self.errors = 0
        """Number of errors of gradvitals on this rank, reported to the rank that writes the run."""
        self._deliver = deliver
        self._on_lost = on_lost
        self._table = Table(Context(layout=topology.layout, slots=topology.slots))
        self._seconds: list[float] = []
        self._waiting: list[StepSums] = []
        self._chunks: deque[_Chunk] = deque()
        self._running: Generator[Any, None, list[StepSums]] | None = None
        self._steps: list[StepSums] = []
        self._work: Any = None

    # -- from the training thread -------------------------------------------------------------------------------

    def add(self, step: StepSums) -> None:
        """Add a step of this rank. Chunks end at full readings and at fixed step numbers, the same on all ranks."""
        self._waiting.append(step)
        if step.full or self.each_step or step.step % STEPS_TOGETHER == 0:
            self.send()

    def send(self) -> None:
        """Start to add up the waiting steps."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            try:
                self._chunks.append(self._new_chunk(waiting))
            except Exception as error:
                self._fail(error, waiting)
        self.poll()

    def poll(self) -> None:
        """Continue as far as possible without waiting."""
        while self._running is not None or self._chunks:
            if self._running is None:
                chunk = self._chunks.popleft()
                self._steps = chunk.steps
                if self.ended:
                    self._pass_through()
                    continue
                self._running = self._share(chunk)
            if not self._advance():
                return

    def finish(self, seconds: float) -> bool:
        """Wait up to `seconds` until everything is added up; returns whether it is."""
        self.send()
        deadline = time.monotonic() + seconds
        while self._running is not None and time.monotonic() < deadline:
            time.sleep(0.001)
            self.poll()
        return self._running is None

    def explain(self, error: BaseException) -> None:
        """Training ended with an error: if other ranks are gone, find out which."""
        if not self.ended and speaks_of_loss(error):
            self._lose(LostRanksError(_first_line(error)))

    def end(self) -> None:
        """Stop exchanging numbers at once. Other ranks notice at their next collective."""
        self.ended = True
        self._running = self._work = None
        self._pass_through()
        self._chunks.extend(_Chunk(self._waiting, [], [], [], None, None) for _ in self._waiting[:1])
        self._waiting = []
        self.poll()

    def leave(self) -> None:
        """This rank missed a step: ask all ranks to end with the next chunk."""
        self.leaving = True

    def _advance(self) -> bool:
        """Continue with the running chunk; returns whether it ended."""
        assert self._running is not None
        try:
            if self._work is not None:
                if not self._work.is_completed():
                    return False
                self._wait()
            self._work = next(self._running)
            return self._work.is_completed() and self._advance()
        except StopIteration as stop:
            self._running, self._work, self._steps = None, None, []
            for step in stop.value:
                self._deliver(step)
        except Exception as error:
            self._running = self._work = None
            self._fail(error, self._steps)
        return True

    def _fail(self, error: Exception, steps: list[StepSums]) -> None:
        if dist.is_initialized():  # else training has ended on all ranks
            self._lose(error)
        self.ended = True
        self._steps = steps
        self._pass_through()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            span = f"steps {self._steps[0].step} to {self._steps[-1].step}"
            raise LostRanksError(
                f"gradvitals' all-reduce ({span}, {self.topology.world} ranks) failed: {_first_line(error)}"
            ) from error

    def _lose(self, error: Exception) -> None:
        if not self.ended:
            self.ended = True
            out_of_step = isinstance(error, OutOfStepError)
            self._on_lost(error, [] if out_of_step else missing_ranks(self.topology))

    def _pass_through(self) -> None:
        """Deliver this rank's own steps, without what depends on other ranks, if it holds the whole model."""
        steps, self._steps = self._steps, []
        if self.topology.is_replicated:
            for step in steps:
                step.parts, step.single_part, step.ranks = None, False, {}
                self._deliver(step)

    # -- one chunk ----------------------------------------------------------------------------------------------

    def _new_chunk(self, steps: list[StepSums]) -> _Chunk:
        """Pack some steps, and start to compare with other ranks which steps they pack.

        The comparison has its own process group, so it does not wait for the previous chunk.
        """
        kinds = [Kind(full=step.full, detail=step.detail) for step in steps]
        if self.ended:
            return _Chunk(steps, kinds, [], [], None, None)
        self._note_own(steps)
        vectors = [self.packer.pack(step, kind) for step, kind in zip(steps, kinds, strict=True)]
        audits = [self.comparison.pack(step) for step in steps if step.audit]
        own = np.array([steps[0].step, steps[-1].step, sum(map(len, (*vectors, *audits)))], dtype=np.float64)
        sent = torch.from_numpy(np.append(np.append(own, -own), float(self.leaving)))
        assert len(sent) == HEADER_NUMBERS
        work = self._start(sent, dist.ReduceOp.MAX, self.topology.check_group)
        return _Chunk(steps, kinds, vectors, audits, sent, work)

    def _share(self, chunk: _Chunk) -> Generator[Any, None, list[StepSums]]:
        steps, kinds, vectors = chunk.steps, chunk.kinds, chunk.vectors
        yield chunk.check
        self._compare(chunk)
        detailed = [place for place, kind in enumerate(kinds) if kind.detail]
        largest = None
        joined = torch.from_numpy(np.concatenate([*vectors, *chunk.audits]))
        summing = self._start(joined, dist.ReduceOp.SUM)
        if detailed:
            largest = torch.from_numpy(np.concatenate([self.packer.pack_largest(steps[place]) for place in detailed]))
            finding_largest = self._start(largest, dist.ReduceOp.MAX)
        yield summing
        audits = [step for step in steps if step.audit]
        ends = np.cumsum([len(vector) for vector in (*vectors, *chunk.audits)])
        cut = np.split(joined.numpy(), ends[:-1])
        # Without pipeline stages, the rows of all ranks are this rank's own, which are current.
        table = steps[-1].table if self.topology.num_stages == 1 else self._table
        shared = [
            self.packer.unpack(vector, kind, own, table)
            for vector, kind, own in zip(cut[: len(steps)], kinds, steps, strict=True)
        ]
        if largest is not None:
            yield finding_largest
            for place, vector in zip(detailed, np.split(largest.numpy(), len(detailed)), strict=True):
                self.packer.unpack_largest(vector, shared[place])
        seen = dict(zip((step.step for step in audits), zip(audits, cut[len(steps) :], strict=True), strict=True))
        for step in shared:
            if step.step in seen:
                own, vector = seen[step.step]
                yield from self.comparison.unpack(vector, own, step, self._reduce)
        return shared

    def _compare(self, chunk: _Chunk) -> None:
        """Check that all ranks pack the same steps, before anything is added up.

        Gloo aborts the process if ranks pass vectors of different lengths.

        Raises:
            OutOfStepError: On all ranks alike.
        """
        assert chunk.found is not None
        found = chunk.found.numpy()
        if found[-1] > 0:
            raise OutOfStepError("a rank does not take part any more")
        if (found[:3] != -found[3:6]).any():
            least, most = (-found[3:5]).astype(int), found[:2].astype(int)
            raise OutOfStepError(
                f"ranks are at different steps: {least[0]} to {least[1]} on one, {most[0]} to {most[1]} on another"
            )

    def _note_own(self, steps: Sequence[StepSums]) -> None:
        """Note this rank's own numbers: whether its gradient holds NaN; at full steps, step time, errors and rate."""
        for step in steps:
            broken = step.is_broken or (step.loss is not None and not math.isfinite(step.loss))
            if (parts := step.rows.get("parts")) is not None:
                overflows = step.has("nonfinite") and step.total("nonfinite") == 0
                broken |= not overflows and not np.isfinite(parts.values[parts.present]).all()
            step.ranks["ranks/nonfinite"] = np.array([float(broken)])
            self._seconds.append(step.wall_seconds)
            if step.full:
                step.ranks["ranks/step_seconds"] = np.array([np.mean(self._seconds)])
                step.ranks["ranks/errors"] = np.array([float(self.errors)])
                step.ranks["ranks/lr"] = np.array([math.nan if step.lr is None else step.lr])
                self._seconds = []

    def _reduce(self, vector: Floats, how: dist.ReduceOp.RedOpType) -> Collectives:
        tensor = torch.from_numpy(np.ascontiguousarray(vector))
        yield self._start(tensor, how)
        return tensor.numpy()

    def _start(self, tensor: Tensor, how: dist.ReduceOp.RedOpType, group: Any = None) -> Any:
        self.collectives += 1
        self.bytes_sent += tensor.numel() * tensor.element_size()
        return dist.all_reduce(tensor, how, group=group or self.topology.group, async_op=True)


def speaks_of_loss(error: BaseException) -> bool:
    """Returns whether an error shows that other ranks are gone."""
    return not isinstance(error, OSError) and any(word in str(error).lower() for word in LOST_WORDS)


def missing_ranks(topology: Topology) -> list[int]:
    """Returns the ranks that did not report that they miss others; none if that cannot be found out."""
    from torch.distributed import distributed_c10d as c10d

    try:
        store = c10d.PrefixStore(f"gradvitals/lost/{topology.group.group_name}", c10d._get_default_store())
        store.set(f"here/{topology.rank}", "1")
        missing, since, deadline = list(range(topology.world)), time.monotonic(), time.monotonic() + ROLL_CALL_SECONDS
        # The remaining ranks notice at the same time: wait until no further one reports.
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
