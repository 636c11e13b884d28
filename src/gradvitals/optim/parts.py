"""The gradients a step is made of: how far they scatter around their mean, without keeping any of them.

During backward a hook on each parameter sees the gradient of one micro-batch before it is added to ``.grad``. With
``.grad`` as the running sum S after d parts, the part p adds to the sum of squared deviations (Welford 1962)

    noise += d / (d - 1) * (p - S / d)^2

which loses nothing to rounding when the parts are almost equal, unlike a sum of squares. One accumulator a parameter
is all there is to keep. Equal parts do not add up exactly, and what is left over would look like noise; so what
rounding alone amounts to is taken off, and noise of zero or less is none.

Where there are kernels and nobody else looks, autograd need not add either: ``.grad`` is taken away for the moment in
which it would, the part it leaves instead is held, and one launch adds many of them and compares them at once. By the
end of backward ``.grad`` is what it would have been, to the last bit, and so it is where backward fails.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradvitals import kernels
from gradvitals.optim.adding import Adder, Arrived, Ending, Held, on_current_stream, stream_of
from gradvitals.optim.blocks import Block, Kind, in_blocks, refuse_what_has_no_elements_here
from gradvitals.optim.entry import Entry

HELD_BYTES = 16 * 2**20
"""Gradients held back to be compared together: so few that they are still in a GPU's cache by then."""

ADDED_BYTES = 256 * 2**20
"""Gradients held back to be added and compared together, which reads them once."""


class GradientParts:
    """Counts the gradients each parameter received since the last step and sums their squared deviations.

    A parameter shared between segments that are checkpointed with re-entrant autograd receives several gradients in
    one backward, which count as several parts.
    """

    def __init__(self) -> None:
        self.keeps_norms: Callable[[], bool] = lambda: False
        """Whether to remember the norm of ``.grad``, so as to know by how much it is multiplied before the step."""
        self.blocks: list[Block] = []
        self._entries: dict[Tensor, Entry] = {}
        self._awaited: set[int] = set()  # backward passes whose end will be told
        self._pending: dict[torch.device, Held] = {}
        self._task: int | None = None
        self._num_before_task = 0
        self._adds_in: tuple[int, bool] = (-1, False)  # a backward pass, and whether parts are added here in it
        self._adder = Adder()
        self._lock = threading.RLock()  # backward runs in a thread for each device
        self.when_backward_ends: list[Callable[[], None]] = []
        self.when_given_up: list[Callable[[Tensor], None]] = []
        self._captured: list[tuple[Entry, int, bool, Tensor | None]] | None = None
        weakref.finalize(self, _unhook, self._entries)

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether its gradients are collected."""
        return parameter in self._entries

    def count_of(self, parameter: Tensor) -> int:
        """Gradients a parameter received since the last step."""
        return self._entries[parameter].count

    def follow(self, parameters: Iterable[Tensor], *, group: int, dtype: torch.dtype | None) -> None:
        """Collect the gradients of these parameters from now on.

        Args:
            parameters: Leaves that backward reaches.
            group: Those of one group are worked on together.
            dtype: Of their accumulators; None: float32, or float64 where the parameter is.
        """
        for parameter in parameters:
            refuse_what_has_no_elements_here(parameter)
            entry = self._entries.setdefault(parameter, Entry(parameter))
            entry.group, entry.noise_dtype = group, dtype
            if not entry.handles:
                frozen = not parameter.requires_grad
                parameter.requires_grad_(True)  # or it takes no hooks, and may be thawed later
                entry.handles = self._hook(parameter, entry)
                entry.before, entry.after = parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks
                parameter.requires_grad_(not frozen)

    def _hook(self, parameter: Tensor, entry: Entry) -> tuple[RemovableHandle, RemovableHandle]:
        reference = weakref.ref(self)  # no parameter may keep its optimizer

        # Called for every parameter in every backward: nothing here that can be done later.
        def arriving(grad: Tensor | None) -> None:
            parts, owner = reference(), entry.weak()
            entry.empty = grad is None
            if parts is not None and owner is not None and grad is not None:
                with parts._lock:
                    parts._arrive(owner, entry, grad)

        def added(owner: Tensor) -> None:
            if (parts := reference()) is not None and not entry.empty:
                with parts._lock:
                    parts._count(owner, entry)

        for hook in (arriving, added):
            setattr(hook, "__torch_unserializable__", True)  # noqa: B010 - a saved parameter goes without, unwarned
        return parameter.register_hook(arriving), parameter.register_post_accumulate_grad_hook(added)

    def _arrive(self, parameter: Tensor, entry: Entry, grad: Tensor) -> None:
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"a gradient of shape {tuple(grad.shape)} is {grad.layout}; variance-reduced optimizers compare the "
                "elements of dense gradients: build the embedding with sparse=False"
            )
        if not entry.count or entry.taken is not None:  # taken for a part that is still to come, of another thread
            return
        task = torch._C._current_graph_task_id()
        so_far = parameter.grad
        if so_far is None:
            # The first part becomes .grad; to hold it here would make autograd copy it. Others that had come before
            # were given up.
            self.forget([parameter])
        elif self._adds(parameter, entry, task):
            self._await(task)  # whatever autograd raises now, .grad comes back
            entry.taken, parameter.grad = so_far, None
        else:
            if entry.pending:
                self._flush(parameter.device)
            entry.arriving = grad.detach()

    def _adds(self, parameter: Tensor, entry: Entry, task: int) -> bool:
        """Whether to add the part that arrives to ``.grad`` here, in autograd's place."""
        if not entry.readable:
            return False
        if self._adds_in[0] != task:
            self._adds_in = (task, _nobody_else_adds(parameter))
        # Hooks of others would see .grad gone, or without this part.
        return self._adds_in[1] and len(entry.before) == 1 and len(entry.after) == 1

    def _count(self, parameter: Tensor, entry: Entry) -> None:
        """A gradient was added to ``.grad``; it is not in ``torch.autograd.grad``, which has hooks called as well."""
        task = torch._C._current_graph_task_id()
        self._await(task)
        entry.count += 1
        total = entry.taken
        if total is None:
            part, entry.arriving = entry.arriving, None
        else:
            part, parameter.grad, entry.taken = parameter.grad, total, None
        if part is None:
            return
        device = part.device
        held, most = self._pending.get(device), HELD_BYTES if total is None else ADDED_BYTES
        if held is not None and (entry.pending or held.nbytes >= most or held.stream != stream_of(device)):
            self._flush(device)
            held = None
        if held is None:
            held = self._pending[device] = Held(device)
        entry.pending = True
        version = 0 if total is None else total._version
        held.parts.append((parameter, entry, part, total, entry.count, version))
        held.nbytes += part.nbytes

    def _await(self, task: int) -> None:
        """Hear of the end of a backward, before anything can clip or unscale ``.grad``."""
        if self._task is None:  # others that begin before this one ends are inside it, as checkpoints have them
            self._task, self._num_before_task = task, self.num_parts
        if task not in self._awaited:
            self._awaited.add(task)
            # DistributedDataParallel ends its own work the same way.
            torch.autograd.Variable._execution_engine.queue_callback(Ending(weakref.ref(self), task))

    def end(self, task: int) -> None:
        """A backward has ended."""
        with self._lock:
            self.flush()
            self._awaited.discard(task)
            if task == self._task:
                self._task = None
                for entry in self._entries.values():
                    entry.arriving = None
                for tell in self.when_backward_ends:
                    tell()

    def fail(self, task: int) -> None:
        """A backward has failed: leave ``.grad`` as autograd would have."""
        with self._lock:
            if task in self._awaited:  # and nobody has begun anew since
                self._awaited.discard(task)
                if task == self._task:
                    self._task = None
                self.settle()

    def flush(self) -> None:
        """Add what is held back, before anything but backward changes ``.grad``."""
        with self._lock:
            for device in list(self._pending):
                self._flush(device)

    def settle(self) -> None:
        """The same once no backward is under way: one that failed may have left something undone."""
        with self._lock:
            for parameter, entry in self._entries.items():
                if entry.taken is not None:
                    _put_back(parameter, entry)
                entry.arriving = None
            for device in list(self._pending):
                self._flush(device, failed=True)

    @torch.no_grad()
    def _flush(self, device: torch.device, *, failed: bool = False) -> None:
        held = self._pending.pop(device, None)
        if held is None:
            return
        alike: dict[tuple[int, bool, bool, bool], tuple[list[Tensor], Arrived]] = {}
        for parameter, entry, part, total, count, version in held.parts:
            entry.pending = False
            grad = parameter.grad
            if total is not None and (total is not grad or (failed and total._version != version)):
                entry.count -= 1  # .grad was taken away, or set to zero after a backward that failed
                continue
            if grad is None:
                continue
            noise = entry.noise
            if noise is None or entry.dtype is not parameter.dtype or noise.device != device:
                noise = self._place(parameter, entry)
            key = (count, total is None, entry.touched, entry.readable)
            entry.touched = True
            some = alike.get(key)
            if some is None:
                some = alike[key] = ([], Arrived(count, total is None, not key[2], entry.readable))
            some[0].append(parameter)
            some[1].tensors.append((part, grad, noise))
        on_current_stream(held, device)
        keeps_norms = self.keeps_norms()
        for parameters, arrived in alike.values():
            self._adder.add(arrived)
            if keeps_norms:
                self.note_norms(parameters, [total for _, total, _ in arrived.tensors])

    def note_norms(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Remember the length that gradients had when backward ended."""
        for parameter, norm in zip(parameters, torch._foreach_norm(list(grads)), strict=True):
            self._entries[parameter].norm = norm

    def noise_of(self, parameter: Tensor) -> Tensor:
        """The sum of squared deviations of a parameter so far. It is changed by the next part and by `forget`."""
        entry = self._entries[parameter]
        noise = self._place(parameter, entry)
        if entry.dirty and not entry.touched:
            entry.dirty = False
            noise.zero_()
        return noise

    def _place(self, parameter: Tensor, entry: Entry) -> Tensor:
        if entry.noise is None or entry.dtype != parameter.dtype or entry.noise.device != parameter.device:
            self._lay_out()
        assert entry.noise is not None
        return entry.noise

    def _lay_out(self) -> None:
        """Give every parameter that has none a place to accumulate in."""
        self.blocks = [block for block in self.blocks if block.fits()]
        settled = {parameter for block in self.blocks for parameter in block.parameters}
        for kind, parameters in in_blocks((p for p in self._entries if p not in settled), self._kind):
            block = Block(kind, parameters)
            self.blocks.append(block)
            for parameter, noise in zip(parameters, block.noises, strict=True):
                entry = self._entries[parameter]
                entry.noise, entry.dtype, entry.dirty = noise, kind.dtype, False
                entry.readable = kernels.usable(noise) and bool(noise.numel())

    def _kind(self, parameter: Tensor) -> Kind:
        entry = self._entries[parameter]
        noise_dtype = entry.noise_dtype or torch.promote_types(parameter.dtype, torch.float32)
        return Kind(entry.group, parameter.device, parameter.dtype, noise_dtype, odd=bool(parameter.numel() % 4))

    @property
    def num_parts(self) -> int:
        """Micro-batches since the last step: the most gradients that any parameter received and still has."""
        return max((entry.count for p, entry in self._entries.items() if entry.count and p.grad is not None), default=0)

    @property
    def num_parts_with_current(self) -> int:
        """The same while a backward runs, which counts even where it has reached only some parameters, or none."""
        return (self.num_parts if self._task is None else self._num_before_task) + 1

    @torch.no_grad()
    def complete(self, num_parts: int) -> None:
        """Count parts that passed a parameter by: it received zeros from them."""
        if any(entry.noise is None for entry in self._entries.values()):
            self._lay_out()
        self.rescale()
        for parameter, entry in self._entries.items():
            if 0 < entry.count < num_parts and parameter.grad is not None:
                entry.touched, noise = True, self._place(parameter, entry)
                grad = _grad(parameter).to(noise.dtype)
                noise.addcmul_(grad, grad, value=1 / entry.count - 1 / num_parts)

    @torch.no_grad()
    def rescale(self) -> None:
        """Multiply deviations as ``.grad`` was since backward ended, by a scaler or by clipping.

        By how much is known where norms were kept. Where nothing touched a gradient that is by exactly 1. What no part
        has touched has no deviations.
        """
        stale = []
        for entry in self._entries.values():
            if entry.dirty and not entry.touched and entry.noise is not None:
                entry.dirty = False
                stale.append(entry.noise)
        if stale:
            torch._foreach_zero_(stale)
        for parameter, entry in self._entries.items():
            if entry.norm is not None and entry.noise is not None and parameter.grad is not None:
                (now,) = torch._foreach_norm([_grad(parameter)])
                entry.noise.mul_((now / entry.norm).square().nan_to_num(nan=1.0, posinf=1.0))

    def note_captured(self) -> None:
        """Remember what has been collected as what a CUDA graph collects whenever it is replayed."""
        self.settle()
        self._captured = [(entry, entry.count, entry.touched, entry.norm) for entry in self._entries.values()]
        self.forget()

    def replay(self) -> None:
        """A graph has collected parts, without calling hooks."""
        if self._captured is None:
            raise RuntimeError("no parts of a CUDA graph are known; call graph_captured() right after capturing it")
        for entry, count, touched, norm in self._captured:
            entry.count, entry.touched, entry.norm = count, touched, norm

    @torch.no_grad()
    def replace(self, parameters: Sequence[Tensor], noises: Sequence[Tensor]) -> None:
        """Put sums over all ranks in the place of this rank's own."""
        entries = [self._entries[parameter] for parameter in parameters]
        places = [self._place(parameter, entry) for parameter, entry in zip(parameters, entries, strict=True)]
        torch._foreach_copy_(places, list(noises))
        for entry in entries:
            entry.touched = True

    def forget(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Begin anew: with some parameters, or with all."""
        if parameters is None:
            for entry in self._entries.values():
                entry.forget()
            self._task, self._adds_in = None, (-1, False)
            self._awaited.clear()
            self._pending.clear()
            return
        for parameter in parameters:
            for tell in self.when_given_up:
                tell(parameter)
            entry = self._entries[parameter]
            entry.forget()
            if held := self._pending.get(parameter.device):
                held.parts = [one for one in held.parts if one[1] is not entry]


@torch.no_grad()
def _put_back(parameter: Tensor, entry: Entry) -> None:
    """Give ``.grad`` back, with the part that autograd may have left in its place."""
    total, part, entry.taken = entry.taken, parameter.grad, None
    assert total is not None
    parameter.grad = total if part is None else total.add_(part)


def _nobody_else_adds(parameter: Tensor) -> bool:
    """Whether this backward adds to ``.grad``, without building a graph of it and without ranks that wait for it."""
    if torch.is_grad_enabled() or kernels.ready("adding") is None:
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad
        return False


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()


def _unhook(entries: dict[Tensor, Entry]) -> None:
    for entry in entries.values():
        for handle in entry.handles:
            handle.remove()
