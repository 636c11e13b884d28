"""GSNR from the micro-batches of one step: squared norms of every incoming gradient, no copies kept.

During backward a hook on each parameter sees the gradient before it is added to ``.grad``. The hook only
collects; one multi-tensor norm per `FLUSH_BYTES` does the work. The first micro-batch needs no hook: until the
second arrives, ``.grad`` is its gradient, and not holding a reference lets autograd keep it without a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gradvitals.measure import stats
from gradvitals.measure.clock import Clock
from gradvitals.measure.packet import Packet
from gradvitals.measure.views import HeadView

FLUSH_BYTES = 64 * 2**20
"""Incoming gradients held back at most, while backward frees far more than that in activations."""


class MicrobatchSums:
    """Norms of the gradient of every micro-batch of one step, for one optimizer's tensors and heads.

    A parameter that receives a second gradient starts the next micro-batch. Two cases are miscounted: micro-batches
    that have no parameter in common count as one, and a parameter shared between segments that are checkpointed with
    re-entrant autograd receives several gradients in one backward. Hooks of the user's own that change gradients are
    seen by a reading when they were registered before it began.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        heads: dict[int, HeadView],
        *,
        rows: Sequence[int],
        arrivals: list[int],
        clock: Clock,
        on_error: Callable[[Exception], None],
    ) -> None:
        self.parameters = parameters
        self.rows = rows
        self.clock = clock
        self.heads = heads
        self.radial = False
        self.on_error = on_error
        self.arrivals = arrivals
        """Rows in the order in which backward reaches them, from the output to the input; shared by all optimizers."""
        self._arrived: set[int] = set()
        self._places_known = False
        self.armed = False
        """Whether incoming gradients are collected."""
        self._handles: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._clear()

    def _clear(self) -> None:
        self.packet = Packet()
        self.num_seen = 0
        self._fired: dict[int, int] = {}  # rows reached in this micro-batch, and in which run of the autograd engine
        self._pending: list[tuple[int, Tensor]] = []
        self._pending_bytes = 0

    def arm(self, *, radial: bool) -> None:
        """Collect from the next backward on, with the component along the weights where asked."""
        self.armed, self.radial = True, radial
        self._clear()
        trainable = [row for row in self.rows if self.parameters[row].requires_grad]
        if list(self._handles) != trainable:  # hooks may still be there from the step before
            self._unhook()
            self._handles = {row: self.parameters[row].register_hook(self._hook(row)) for row in trainable}
        self._places_known = self._known_arrivals().issuperset(trainable)

    def disarm(self) -> None:
        """Take the hooks away: an unmeasured step costs nothing."""
        self.armed = False
        self._unhook()

    def _unhook(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def restart(self) -> None:
        """The batches so far were given up; the backward in progress is the first of the step."""
        fired = self._fired
        self._clear()
        self._fired = fired

    def finish(self) -> tuple[int, Packet]:
        """End the step's collection. The hooks stay for the next step, which takes them away or uses them.

        Returns:
            The number of micro-batches and, where there were at least two, their norms under the names
            ``micro{i}``, ``micro_heads{i}`` (for weights seen head by head) and ``micro_radial{i}``.
        """
        self.armed = False
        self.flush()
        num_micro_batches = self.num_seen + 1 if self._fired or self.num_seen else 0
        packet = self.packet
        self._clear()
        return num_micro_batches, packet

    def _hook(self, row: int) -> Callable[[Tensor], None]:
        reference = weakref.ref(self)  # a parameter must not hold its watcher, see Sentinel

        # Called for every parameter in every backward of a measured step: nothing here that can be done later.
        def incoming(grad: Tensor) -> None:
            sums = reference()
            if sums is not None and sums.armed:
                try:
                    sums._incoming(row, grad)
                except Exception as error:
                    sums.disarm()
                    sums._clear()
                    sums.on_error(error)

        return incoming

    def _incoming(self, row: int, grad: Tensor) -> None:
        engine_run = torch._C._current_graph_task_id()
        if row in self._fired:
            self._end_micro_batch(row, engine_run)
        if not self._places_known:
            self._note_arrival(row)
        self._fired[row] = engine_run
        if self.num_seen:
            # Autograd makes the first gradient of a parameter its .grad; what we hold must not change with it.
            self._hold(row, grad if self.parameters[row].grad is not None else grad.detach().clone())

    def _hold(self, row: int, grad: Tensor) -> None:
        self._pending.append((row, grad))
        self._pending_bytes += grad.numel() * grad.element_size()
        if self._pending_bytes >= FLUSH_BYTES:
            self.flush()

    def _end_micro_batch(self, row: int, engine_run: int) -> None:
        """A second gradient came for a row: what came before this backward began was the micro-batch before."""
        early = [r for r, run in self._fired.items() if run == engine_run]
        if not self.num_seen:  # nothing of the second micro-batch has been added yet: .grad is the first
            whole = [(r, grad) for r in self._fired if (grad := self.parameters[r].grad) is not None]
            before = [(r, grad.detach()) for r, grad in whole if r not in early]
            later = [(r, grad.detach().clone()) for r, grad in whole if r in early]
        else:
            before = [entry for entry in self._pending if entry[0] not in early]
            later = [entry for entry in self._pending if entry[0] in early]
        self._pending, self._pending_bytes = [], 0
        self._measure([r for r, _ in before], [grad for _, grad in before])
        self.num_seen += 1
        self._fired = dict.fromkeys(early, engine_run)
        for r, grad in later:
            self._hold(r, grad)
        for r in early:  # reached before the row that came again, so nearer the output
            self.arrivals.remove(r)
            self.arrivals.insert(self.arrivals.index(row), r)

    def _note_arrival(self, row: int) -> None:
        if row not in self._known_arrivals():
            previous = next(reversed(self._fired), None) if self.num_seen else None
            place = self.arrivals.index(previous) + 1 if previous is not None else len(self.arrivals)
            self.arrivals.insert(place, row)

    def _known_arrivals(self) -> set[int]:
        if len(self._arrived) != len(self.arrivals):
            self._arrived = set(self.arrivals)
        return self._arrived

    def flush(self) -> None:
        """Measure what is held back."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        self._measure([row for row, _ in pending], [grad for _, grad in pending])

    @torch.no_grad()
    def _measure(self, rows: Sequence[int], grads: Sequence[Tensor]) -> None:
        if not rows:
            return
        with self.clock:
            self._add_norms(rows, grads)

    def _add_norms(self, rows: Sequence[int], grads: Sequence[Tensor]) -> None:
        index = self.num_seen
        rest = add_heads(self.packet, f"micro_heads{index}", self.heads, rows, grads)
        stats.add_norms(self.packet, f"micro{index}", [rows[p] for p in rest], [grads[p] for p in rest])
        if self.radial:
            weights = [self.parameters[row].detach() for row in rows]
            stats.add_inner_products(self.packet, f"micro_radial{index}", rows, weights, grads)


def add_heads(
    packet: Packet, name: str, heads: dict[int, HeadView], rows: Sequence[int], grads: Sequence[Tensor]
) -> list[int]:
    """Norm of each attention head's part of the gradients that have heads.

    Returns:
        Positions of the other gradients: the heads of a weight add up to its norm, which need not be read again.
    """
    rest: list[int] = []
    for position, (row, grad) in enumerate(zip(rows, grads, strict=True)):
        view = heads.get(row)
        if view is None or grad.is_sparse:
            rest.append(position)
        else:
            packet.add(name, view.norms(grad), view.slots)
    return rest
