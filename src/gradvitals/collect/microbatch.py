"""Measures the gradient of every micro-batch during backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gradvitals.collect import reductions
from gradvitals.collect.parameters import HeadView, without_graph
from gradvitals.collect.reductions import FusedReducer
from gradvitals.collect.schedule import CostTimer
from gradvitals.collect.transfer import ReadingBuffer
from gradvitals.distributed.shards import Summand, is_summand, local, local_like, set_aside, sums_of_partial

FLUSH_BYTES = 64 * 2**20
"""The most bytes of incoming gradients to hold back; backward frees far more than that in activations."""

GPU_FLUSH_BYTES = 256 * 2**20
"""The same on a GPU, where one launch reads any number of tensors."""

BEFORE = -1
"""Stands for earlier runs of the autograd engine."""


class MicrobatchSums:
    """Norms of the gradient of every micro-batch of one step, for one optimizer's tensors and heads.

    A parameter that receives a second gradient starts the next micro-batch. Two cases are miscounted: micro-batches
    without a common parameter count as one, and a parameter shared between segments that are checkpointed with
    re-entrant autograd receives several gradients in one backward. Changes by a user's own gradient hooks are seen if
    these were registered before the reading began.

    Args:
        parameters: All watched parameters, by row.
        heads: Attention heads of weights, by row.
        rows: The rows that this optimizer steps.
        arrivals: Rows in the order in which backward reaches them; shared by all optimizers and extended in place.
        timer: Measures the cost.
        on_error: Called with an internal error, which ends the collection.
        reduced: Whether gradients are reduced over ranks, during backward or after it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        heads: dict[int, HeadView],
        *,
        rows: Sequence[int],
        arrivals: list[int],
        timer: CostTimer,
        on_error: Callable[[Exception], None],
        reduced: bool = False,
    ) -> None:
        self.parameters = parameters
        self.rows = rows
        self.timer = timer
        self.heads = heads
        self.radial = False
        self.reduced = reduced
        self.on_error = on_error
        self.arrivals = arrivals
        """Rows in the order in which backward reaches them, from the output to the input; shared by all optimizers."""
        self._fused = FusedReducer()
        self._arrived: set[int] = set()
        self._places_known = False
        self.armed = False
        """Whether incoming gradients are collected."""
        self._handles: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._clear()

    def _clear(self) -> None:
        self.buffer = ReadingBuffer()
        self.num_seen = 0
        self._fired: dict[int, int] = {}  # rows reached in this micro-batch: the run of the autograd engine
        # Which micro-batch a backward belongs to may only show later, so numbers wait by run of the engine.
        self._drafts: dict[int, ReadingBuffer] = {}
        self._pending: list[tuple[int, Tensor]] = []
        self._pending_bytes = 0
        self._pending_run = BEFORE
        # Partial gradients to sum over ranks, each with its row and, for the radial part, its weight.
        self._summands: dict[int, list[tuple[int, Summand, Tensor | None]]] = {}
        self._settled_summands: list[tuple[int, int, Summand, Tensor | None]] = []

    def arm(self, *, radial: bool) -> None:
        """Collect from the next backward on; with `radial`, also the component along the weights."""
        self.armed, self.radial = True, radial
        self._clear()
        trainable = [row for row in self.rows if self.parameters[row].requires_grad]
        if self._handles.keys() != set(trainable):  # hooks may be left from the previous step
            self._unhook()
            for row in trainable:
                self._follow(row)
        self._places_known = self._known_arrivals().issuperset(trainable)

    def _follow(self, row: int) -> None:
        leaf = self._leaf(row)
        if leaf.requires_grad:
            self._handles[row] = leaf.register_hook(self._hook(row))

    def disarm(self) -> None:
        """Remove the hooks, so that other steps cost nothing."""
        self.armed = False
        self._unhook()

    def _unhook(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def restart(self) -> None:
        """The batches so far were discarded; the backward in progress is the first of the step."""
        run = torch._C._current_graph_task_id()
        self.flush()
        fired, draft, summands = self._fired, self._drafts.get(run), self._summands.get(run)
        self._clear()
        self._fired = fired
        if draft is not None and self.reduced:
            self._drafts = {run: draft}
        if summands is not None and self.reduced:
            self._summands = {run: summands}

    def finish(self) -> tuple[int, ReadingBuffer]:
        """End the step's collection. The hooks stay until the next step removes or reuses them.

        If ranks hold partial sums of a gradient (norm layers under sequence parallelism), this sums them, in one
        collective that all ranks of their group must reach.

        Returns:
            The number of micro-batches and their norms under the names ``micro{i}``, ``micro_heads{i}`` (for weights
            seen head by head) and ``micro_radial{i}``. A single one is measured only if ranks reduce gradients;
            otherwise it is ``.grad`` itself.
        """
        self.armed = False
        self.flush()
        num_micro_batches = self.num_seen + 1 if self._fired or self.num_seen else 0
        self._settle(list(self._drafts), list(self._summands))
        self._add_sums_over_ranks()
        buffer = self.buffer
        self._clear()
        return num_micro_batches, buffer

    def _leaf(self, row: int) -> Tensor:
        """Returns the tensor whose gradient autograd computes for a row."""
        return self.parameters[row]

    def _weight(self, row: int) -> Tensor | None:
        """Returns the values of a row's leaf on this rank; None if they are not in memory."""
        return local(self.parameters[row])

    def _is_fleeting(self, row: int) -> bool:
        """Returns whether the leaf's values exist only during backward."""
        return False

    def _factor(self, row: int) -> float:
        """Returns the factor to multiply a gradient with before measuring it."""
        return 1.0

    # -- one gradient after the other ---------------------------------------------------------------------------

    def _hook(self, row: int) -> Callable[[Tensor], None]:
        reference = weakref.ref(self)  # a parameter must not hold its watcher: see BackwardCounter

        # Runs for every parameter in every backward of a measured step: does only what cannot wait.
        def incoming(grad: Tensor) -> None:
            sums = reference()
            if sums is not None and sums.armed:
                try:
                    sums._incoming(row, grad)
                except Exception as error:
                    sums._fail(error)

        return incoming

    def _fail(self, error: Exception) -> None:
        self.disarm()
        self._clear()
        self.on_error(error)

    def _incoming(self, row: int, grad: Tensor) -> None:
        engine_run = torch._C._current_graph_task_id()
        if row in self._fired:
            self._end_micro_batch(row, engine_run)
        if not self._places_known:
            self._note_arrival(row)
        self._fired[row] = engine_run
        if self.num_seen or self.reduced:
            self._take(row, grad, engine_run)

    def _take(self, row: int, grad: Tensor, engine_run: int) -> None:
        """Hold a gradient back to measure many at once, or measure it now if holding it costs more."""
        leaf = self._leaf(row)
        if is_summand(grad, leaf):
            self._take_summand(row, grad, engine_run)
            return
        grad = local_like(grad, leaf)
        if self.radial and self._is_fleeting(row):
            self._measure(engine_run, [row], [grad])
        elif leaf.grad is not None:
            self._hold(row, grad, engine_run)
        elif grad.is_cuda and grad.numel() <= reductions.SMALL_ELEMENTS:
            # Autograd makes the first gradient of a parameter its .grad: hold a copy, which does not change with it.
            self._hold(row, grad.detach().clone(), engine_run)
        else:  # a pass over it is cheaper than a copy
            self._measure(engine_run, [row], [grad])

    @torch.no_grad()
    def _take_summand(self, row: int, grad: Tensor, engine_run: int) -> None:
        weight = self._weight(row) if self.radial else None
        weight = weight.clone() if weight is not None and self._is_fleeting(row) else weight
        self._summands.setdefault(engine_run, []).append((row, set_aside(grad), weight))

    def _hold(self, row: int, grad: Tensor, engine_run: int) -> None:
        if engine_run != self._pending_run:
            self.flush()
            self._pending_run = engine_run
        self._pending.append((row, grad))
        self._pending_bytes += grad.numel() * grad.element_size()
        if self._pending_bytes >= (GPU_FLUSH_BYTES if grad.is_cuda else FLUSH_BYTES):
            self.flush()

    def _end_micro_batch(self, row: int, engine_run: int) -> None:
        """A row received a second gradient: what came before this backward was the previous micro-batch."""
        early = [r for r, run in self._fired.items() if run == engine_run]
        self._fired = dict.fromkeys(early, engine_run) if self.reduced else self._fired
        if self.reduced and not self._is_fleeting(row) and self.parameters[row].grad is None:
            self.restart()  # the loop discarded the gradients so far
            return
        self.flush()
        if not self.num_seen and not self.reduced:
            # Nothing of the second micro-batch is in .grad yet: it is the first one.
            for r in self._fired:
                self._take_whole(r, engine_run if r in early else BEFORE)
            self.flush()
        before = [run for run in self._drafts if run != engine_run]
        self._settle(before, [run for run in self._summands if run != engine_run])
        self.num_seen += 1
        self._fired = dict.fromkeys(early, engine_run)
        for r in early:  # reached before the row that came again, so nearer the output
            self.arrivals.remove(r)
            self.arrivals.insert(self.arrivals.index(row), r)

    def _take_whole(self, row: int, engine_run: int) -> None:
        parameter = self.parameters[row]
        if parameter.grad is None:
            return
        if is_summand(parameter.grad, parameter):
            self._take_summand(row, parameter.grad, engine_run)
        else:
            self._hold(row, without_graph(local_like(parameter.grad, parameter)), engine_run)
            self._pending_bytes = 0  # .grad stays in memory anyway

    def _settle(self, drafts: Sequence[int], summands: Sequence[int]) -> None:
        """Assign the numbers of these runs of the engine to the micro-batch that ends."""
        index = self.num_seen
        for run in drafts:
            draft = self._drafts.pop(run)
            for device in draft.devices:
                for name, rows, values in draft.parts(device):
                    if isinstance(values, Tensor):
                        self.buffer.add(f"{name}{index}", values, rows)
                    else:
                        self.buffer.add_each(f"{name}{index}", values, rows)
        for run in summands:
            self._settled_summands += [(index, *summand) for summand in self._summands.pop(run)]

    def _note_arrival(self, row: int) -> None:
        if row not in self._known_arrivals():
            previous = next(reversed(self._fired), None) if self.num_seen else None
            place = self.arrivals.index(previous) + 1 if previous is not None else len(self.arrivals)
            self.arrivals.insert(place, row)

    def _known_arrivals(self) -> set[int]:
        if len(self._arrived) != len(self.arrivals):
            self._arrived = set(self.arrivals)
        return self._arrived

    # -- many at once -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Measure the gradients that are held back."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        self._measure(self._pending_run, [row for row, _ in pending], [grad for _, grad in pending])

    @torch.no_grad()
    def _measure(self, engine_run: int, rows: Sequence[int], grads: Sequence[Tensor]) -> None:
        if not rows:
            return
        with self.timer:
            weights = [self._weight(row) for row in rows] if self.radial else [None] * len(rows)
            self._add_norms(self._drafts.setdefault(engine_run, ReadingBuffer()), "", rows, grads, weights)

    @torch.no_grad()
    def _add_sums_over_ranks(self) -> None:
        if not self._settled_summands:
            return
        with self.timer:
            sums = sums_of_partial({i: summand for i, (_, _, summand, _) in enumerate(self._settled_summands)})
            for i, (index, row, _, weight) in enumerate(self._settled_summands):
                self._add_norms(self.buffer, str(index), [row], [sums[i]], [weight])

    def _add_norms(
        self,
        buffer: ReadingBuffer,
        suffix: str,
        rows: Sequence[int],
        grads: Sequence[Tensor],
        weights: Sequence[Tensor | None],
    ) -> None:
        factors = [self._factor(row) for row in rows]
        if factors.count(1.0) != len(factors):
            grads = [grad * factor for grad, factor in zip(grads, factors, strict=True)]
        names = {"norm": f"micro{suffix}"}
        if any(weight is not None for weight in weights):
            names["inner"] = f"micro_radial{suffix}"
        name_of_heads = f"micro_heads{suffix}"
        left = self._fused.read(
            buffer,
            names,
            rows,
            grads,
            others=weights,
            heads=self.heads,
            name_of_heads=name_of_heads,
            heads_instead=True,
        )
        if not left:
            return
        rows, grads, weights = [rows[p] for p in left], [grads[p] for p in left], [weights[p] for p in left]
        rest = add_heads(buffer, name_of_heads, self.heads, rows, grads)
        reductions.add(buffer, f"micro{suffix}", reductions.norms, [rows[p] for p in rest], [grads[p] for p in rest])
        known = {p: weight for p, weight in enumerate(weights) if weight is not None}
        if known:
            along, read = [rows[p] for p in known], [grads[p] for p in known]
            reductions.add_inner_products(buffer, f"micro_radial{suffix}", along, list(known.values()), read)


def add_heads(
    buffer: ReadingBuffer, name: str, heads: dict[int, HeadView], rows: Sequence[int], grads: Sequence[Tensor]
) -> list[int]:
    """Add the norm of each attention head's part of the gradients that have heads.

    Returns:
        Positions of the gradients without heads. The heads of a weight add up to its norm.
    """
    rest: list[int] = []
    for position, (row, grad) in enumerate(zip(rows, grads, strict=True)):
        view = heads.get(row)
        if view is None or grad.is_sparse:
            rest.append(position)
        else:
            buffer.add(name, view.norms(grad), view.slots)
    return rest
