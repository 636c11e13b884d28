"""GSNR from single examples: what each adds to the gradients of normalisation weights, in the ordinary backward.

At a step that is due, a hook on each norm layer keeps hold of its input, which autograd keeps for backward anyway, and
a hook on its output sees the gradient there. Both together give the part of every example in the weight's gradient,
`functional.norm_example_gradients`. Only norms leave the device, as they do for micro-batches.

Held beyond what training holds: examples × width numbers for each layer until its backward has ended, and the
normalised input of one layer at a time, in chunks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.measure import stats
from gradvitals.measure.clock import Clock
from gradvitals.measure.examples_layers import NormLayer
from gradvitals.measure.packet import Packet


class _Call:
    """One call of a norm layer: its input, and the gradient of its output. Either may come first."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.x: Tensor | None = None
        self.version = 0
        self.scale: tuple[Tensor, Tensor] | None = None
        self.grad: Tensor | None = None


class _Hook:
    """A hook on a layer. A copy of the model, or a file it is saved in, has a function that does nothing."""

    def __init__(self, sums: weakref.ref[ExampleSums], index: int) -> None:
        self.sums, self.index = sums, index

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # a file must load where there is no gradvitals

    def __call__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        sums = self.sums()
        if sums is None or sums.layers[self.index].module is not module:
            return
        sums.seen.add(self.index)
        if sums.armed:
            try:
                self.tell(sums, [*args, *kwargs.values()], *output)
            except Exception as error:
                sums._fail(error)

    def tell(self, sums: ExampleSums, given: Sequence[Any], *output: Any) -> None:
        raise NotImplementedError


class _Before(_Hook):
    """Where backward recomputes a segment it may stop inside its last call: only the input is sure to be seen."""

    def tell(self, sums: ExampleSums, given: Sequence[Any], *output: Any) -> None:
        sums._recomputed(self.index, given)


class _After(_Hook):
    def tell(self, sums: ExampleSums, given: Sequence[Any], *output: Any) -> None:
        sums._called(self.index, given, output[0])


class ExampleSums:
    """Norms of what every example of one step adds to the gradients of norm layers.

    A layer that is called several times in one forward has the sum of its calls. A step has a part for each run of the
    autograd engine, as for micro-batches.

    Args:
        layers: The layers, by their weight's row.
        clock: Keeps account of what this costs.
        on_error: Called with an error of ours, after which nothing is collected any more.
    """

    def __init__(self, layers: Sequence[NormLayer], *, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        self.layers = layers
        self.clock = clock
        self.on_error = on_error
        self.armed = False
        """Whether examples are collected."""
        self.seen: set[int] = set()
        """Layers whose calls were seen at all."""
        self._handles: dict[int, list[torch.utils.hooks.RemovableHandle]] = {}
        self._clear()

    def _clear(self) -> None:
        self.packet = Packet()
        self._sizes: dict[int, list[int]] = {}
        self._sums: dict[tuple[int, ...], Tensor] = {}  # by rows of equal width that came together
        self._held: dict[int, Tensor] = {}
        self._run = -1
        self._spoiled: set[int] = set()
        # Calls inside a segment that is checkpointed: the input is there again when backward recomputes it.
        self._waiting: dict[int, weakref.ref[_Call]] = {}

    def arm(self) -> None:
        """Collect from the next forward on."""
        self._clear()
        self.armed = True
        reference = weakref.ref(self)
        for index, layer in enumerate(self.layers):
            if index not in self._handles:  # they may still be there from the step before
                self._handles[index] = [
                    layer.module.register_forward_pre_hook(_Before(reference, index), with_kwargs=True),
                    layer.module.register_forward_hook(_After(reference, index), with_kwargs=True),
                ]

    def disarm(self) -> None:
        """Take the hooks away: an unmeasured step costs nothing.

        Those that were never called stay. `torch.compile` may have found them there, and would compile again without
        them; in what it compiled they do nothing.
        """
        self._unhook(self.seen)

    def stop(self) -> None:
        """Take all hooks away."""
        self._unhook(range(len(self.layers)))

    def _unhook(self, indices: Collection[int]) -> None:
        self.armed = False
        for index in [index for index in self._handles if index in indices]:
            for handle in self._handles.pop(index):
                handle.remove()

    def restart(self) -> None:
        """The batches so far were given up; the backward in progress is the first of the step."""
        run, held = self._run, self._held
        waiting = self._waiting
        self._clear()
        self._waiting = waiting
        if run == torch._C._current_graph_task_id():
            self._run, self._held = run, held

    def finish(self) -> tuple[dict[int, tuple[int, ...]], Packet]:
        """End the step's collection. The hooks stay for the next step, which takes them away or uses them.

        Returns:
            For each row the examples of every micro-batch, and norms: ``examples{i}`` is the root of the sum over the
            examples of micro-batch i of their squared norms, ``examples_sum`` the norm of the sum over all of them.
        """
        self.armed = False
        self._settle()
        sizes = {row: tuple(found) for row, found in self._sizes.items() if row not in self._spoiled}
        if sizes:
            self._add_sums(set(sizes))
        packet = self.packet
        self._clear()
        return sizes, packet

    @torch.no_grad()
    def _add_sums(self, rows: set[int]) -> None:
        """The norm of what all examples of a row add up to."""
        every = [row for together in self._sums for row in together]
        if len(every) == len(set(every)) and rows.issuperset(every):
            for together, sums in self._sums.items():
                self.packet.add("examples_sum", torch.linalg.vector_norm(sums, dim=1), together)
            return
        apart: dict[int, Tensor] = {}
        for together, sums in self._sums.items():
            for row, values in zip(together, sums, strict=True):
                apart[row] = apart[row] + values if row in apart else values
        stats.add_norms(self.packet, "examples_sum", sorted(rows), [apart[row] for row in sorted(rows)])

    def _fail(self, error: Exception) -> None:
        self.stop()
        self._clear()
        self.on_error(error)

    # -- forward ------------------------------------------------------------------------------------------------

    def _called(self, index: int, given: Sequence[Any], output: Any) -> None:
        layer = self.layers[index]
        if not isinstance(output, Tensor) or not output.requires_grad or not layer.weight.requires_grad:
            return
        if torch._C._functorch.is_functorch_wrapped_tensor(output) or _is_captured(output):
            return
        x = given[0].detach() if len(given) == 1 and isinstance(given[0], Tensor) else None
        if x is None or x.shape != output.shape or not layer.fits(x) or not x.numel():
            self._spoiled.add(layer.row)
            return
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            call = _Call(index)
            call.scale = layer.known_scale(output)
            self._expect(call, output, x)
        elif torch._C._current_graph_task_id() != -1:
            pass  # recomputed, and backward uses none of the graph that this builds
        elif self._waits(index) is not None:  # two calls, and what is recomputed will not tell which of them it is
            self._spoiled.add(layer.row)
        else:  # to keep the input here would keep what the segment gives up
            call = _Call(index)
            self._waiting[index] = weakref.ref(call)
            self._expect(call, output, None)

    def _waits(self, index: int) -> _Call | None:
        """The call of a layer whose input is yet to be recomputed."""
        reference = self._waiting.get(index)
        return reference() if reference is not None else None

    def _recomputed(self, index: int, given: Sequence[Any]) -> None:
        """A call is about to be made, perhaps because backward needs what a checkpointed segment gave up."""
        if torch._C._current_graph_task_id() == -1:
            return
        waiting = self._waits(index)
        if waiting is not None and len(given) == 1:
            del self._waiting[index]
            self._hand_in(waiting, x=given[0].detach())

    def _expect(self, call: _Call, output: Tensor, x: Tensor | None) -> None:
        """Have the gradient of an output handed in when backward comes to it."""
        call.x, call.version = x, 0 if x is None else x._version
        reference = weakref.ref(self)  # a graph that is kept must not hold its watcher

        def arrived(grad: Tensor) -> None:
            sums = reference()
            if sums is not None and sums.armed:
                try:
                    sums._hand_in(call, grad=grad)
                except Exception as error:
                    sums._fail(error)

        output.register_hook(arrived)

    # -- backward -----------------------------------------------------------------------------------------------

    def _hand_in(self, call: _Call, *, x: Tensor | None = None, grad: Tensor | None = None) -> None:
        if x is not None:
            call.x, call.version = x, x._version
        if grad is not None:
            call.grad = grad
        if call.x is None or call.grad is None:
            return
        x, grad, scale, unchanged = call.x, call.grad, call.scale, call.x._version == call.version
        call.x = call.grad = call.scale = None  # the graph may live on, for as long as the loop keeps its loss
        if not unchanged or _is_captured(grad):
            self._spoiled.add(self.layers[call.index].row)
            return
        self._add(self.layers[call.index], x, grad, scale)

    @torch.no_grad()
    def _add(self, layer: NormLayer, x: Tensor, grad: Tensor, scale: tuple[Tensor, Tensor] | None) -> None:
        with self.clock:
            run = torch._C._current_graph_task_id()
            if run != self._run:
                self._settle()
                self._run = run
            part = layer.gradients(x, grad, scale)
            held = self._held.get(layer.row)
            if held is None:
                self._held[layer.row] = part
            elif held.shape == part.shape:
                held += part
            elif len(held) == len(part):  # inputs of other lengths come in another number of parts
                self._held[layer.row] = held.sum(1, keepdim=True) + part.sum(1, keepdim=True)
            else:  # calls over different examples
                self._spoiled.add(layer.row)

    @torch.no_grad()
    def _settle(self) -> None:
        """A backward is over: take the norms of what it brought."""
        held, self._held = self._held, {}
        alike: dict[tuple[Any, ...], list[int]] = {}
        for row, parts in held.items():
            sizes = self._sizes.setdefault(row, [])
            alike.setdefault((len(sizes), parts.shape, parts.dtype, parts.device), []).append(row)
            sizes.append(len(parts))
        for (place, *_), rows in alike.items():
            parts = torch.stack([held[row].squeeze(1) if held[row].shape[1] == 1 else held[row].sum(1) for row in rows])
            self.packet.add(f"examples{place}", torch.linalg.vector_norm(parts, dim=(1, 2)), rows)
            together, before = tuple(rows), self._sums.get(tuple(rows))
            self._sums[together] = parts.sum(1) if before is None else before + parts.sum(1)


def _is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, which is not ours to add to."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
