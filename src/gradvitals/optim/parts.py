"""The gradients that a step combines, and how far they scatter around their mean, without keeping any of them.

During backward, a hook on each parameter sees the gradient of one micro-batch before it is added to ``.grad``. With
``.grad`` as the running sum S after d parts, the part p adds to the sum of squared deviations (Welford 1962)

    noise += d / (d - 1) * (p - S / d)^2

which, unlike a sum of squares, loses no precision when the parts are almost equal. It needs one accumulator per
parameter. Equal parts do not add up exactly, and the remainder would look like noise; so the expected rounding error is
subtracted, and noise of zero or less counts as none.

If there are kernels and no other hooks, autograd need not add either: ``.grad`` is removed for the moment in which
autograd would add, the part that autograd leaves there instead is held, and one launch adds and compares many of them.
At the end of backward ``.grad`` is what it would have been, bit for bit, even if backward fails.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradvitals import kernels
from gradvitals.kernels.tables import ALIGNMENT

BLOCK_BYTES = 256 * 2**20  # size of a block of parameters, which bounds the temporary memory of a step


@dataclass(frozen=True)
class Kind:
    """The properties that all parameters of a block share."""

    group: int
    device: torch.device
    dtype: torch.dtype
    noise_dtype: torch.dtype


class Block:
    """The sums of squared deviations of some parameters of one kind."""

    def __init__(self, kind: Kind, parameters: Sequence[Tensor]) -> None:
        self.kind = kind
        self.parameters = list(parameters)
        self.noises = [torch.zeros_like(parameter, dtype=kind.noise_dtype) for parameter in parameters]
        self.cache: dict[str, Any] = {}  # what users of the block compute once

    def fits(self) -> bool:
        """Return whether the parameters still have the device, dtype and shape that they had."""
        return all(
            p.device == self.kind.device and p.dtype == self.kind.dtype and p.shape == noise.shape
            for p, noise in zip(self.parameters, self.noises, strict=True)
        )


def in_blocks(parameters: Iterable[Tensor], key: Callable[[Tensor], Kind]) -> list[tuple[Kind, list[Tensor]]]:
    """Group parameters by kind, in order, into blocks of at most `BLOCK_BYTES` or one parameter."""
    found: list[tuple[Kind, list[Tensor]]] = []
    open_chunks: dict[Kind, tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        kind, size = key(parameter), parameter.numel() * parameter.element_size()
        chunk, used = open_chunks.get(kind, ([], BLOCK_BYTES + 1))
        if used + size > BLOCK_BYTES:
            chunk, used = [], 0
            found.append((kind, chunk))
        chunk.append(parameter)
        open_chunks[kind] = (chunk, used + size)
    return found


def check_parameter(parameter: Tensor) -> None:
    """Raise if squared elements of a parameter cannot be summed."""
    if not parameter.is_floating_point():
        raise TypeError(
            f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; expected real floating-point numbers"
        )
    if hasattr(parameter, "placements"):
        raise TypeError(
            "a parameter is a DTensor, sharded by FSDP2 or tensor parallelism; variance-reduced optimizers need "
            "whole parameters: use DistributedDataParallel and use_ranks(model)"
        )


@dataclass(slots=True, eq=False)
class Entry:
    """The state of one parameter. Its hooks hold it, because looking up by tensor is slow."""

    weak: weakref.ref[Tensor]
    dtype: torch.dtype  # the parameter's dtype when `noise` was allocated
    handles: tuple[RemovableHandle, ...] = ()
    before: Mapping[int, Any] = field(default_factory=dict)
    """All hooks that see a gradient before it is added, including ours."""
    after: Mapping[int, Any] | None = None  # all hooks that run after it was added
    group: int = 0
    noise_dtype: torch.dtype | None = None
    count: int = 0  # gradients received since the last step
    noise: Tensor | None = None  # accumulates squared deviations; valid if `touched`
    readable: bool = False  # whether kernels can read `noise`
    touched: bool = False  # whether `noise` has deviations since the last step
    dirty: bool = False  # whether `noise` is stale if not `touched`
    arriving: Tensor | None = None  # a part that autograd is about to add to ``.grad``
    empty: bool = False  # whether the gradient is None: autograd then adds nothing, but calls hooks
    taken: Tensor | None = None  # ``.grad``, while it is hidden from autograd
    pending: bool = False  # whether a part is held back
    norm: Tensor | None = None  # the norm of ``.grad`` when backward ended

    def forget(self) -> None:
        """Discard all parts."""
        self.dirty, self.touched = self.dirty or self.touched, False
        self.count, self.pending = 0, False
        self.arriving = self.taken = self.norm = None


MAX_SETS = 256  # sets of tensors to keep tables for


class HeldParts:
    """Parts of one device and stream that are held back; see `GradientParts`."""

    def __init__(self, device: torch.device) -> None:
        self.parts: list[tuple[Tensor, Entry, Tensor, Tensor | None, int, int]] = []
        """Parameter, entry, part, the sum to add it to (None if autograd adds it), and that sum's count and version."""
        self.nbytes = 0
        self.stream = stream_of(device)


class BackwardEnd:
    """A callback that autograd calls at the end of backward. If backward fails, autograd drops it before it raises."""

    def __init__(self, parts: weakref.ref[Any], task: int) -> None:
        self._parts, self._task, self._called = parts, task, False

    def __call__(self) -> None:
        """Report that backward ended."""
        self._called = True
        if (parts := self._parts()) is not None:
            parts.end_backward(self._task)

    def __del__(self) -> None:
        if not self._called and (parts := self._parts()) is not None:
            parts.fail_backward(self._task)


def stream_of(device: torch.device) -> int:
    """Return the current stream as a number; 0 for devices without streams."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def on_current_stream(held: HeldParts, device: torch.device) -> None:
    """Make the current stream wait for held parts that came on another one, and their memory wait for it."""
    if held.stream == stream_of(device):
        return
    now = torch.cuda.current_stream(device)
    now.wait_stream(torch.cuda.ExternalStream(held.stream, device))
    for _, _, part, total, *_ in held.parts:
        for tensor in (part, total):
            if tensor is not None:
                tensor.record_stream(now)


@dataclass
class PartBatch:
    """One part of each of some parameters' gradients, on one device."""

    count: int  # number of parts including this one; at least 2
    added: bool  # whether the sums already include these parts
    fresh: bool  # whether there are no deviations yet and their memory is uninitialized
    readable: bool  # whether kernels can read the deviations, and so any tensor with the same layout
    tensors: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """For each parameter the part, the sum of all parts, and the sum of their squared deviations."""

    @property
    def columns(self) -> list[list[Tensor]]:
        """All parts, all sums, all deviations."""
        return [list(column) for column in zip(*self.tensors, strict=True)]

    def split(self) -> list[PartBatch]:
        """Split by layout, alignment and dtypes, so that `readable` holds for all tensors of a batch or for none."""
        found: dict[tuple[Any, ...], PartBatch] = {}
        # This runs for every tensor in every backward, so it does as little as possible.
        for one in self.tensors:
            part, total, noise = one
            strides = noise.stride()
            readable = self.readable and total.stride() == strides
            if readable and part.stride() != strides:  # autograd may pass parts in another layout
                one = (torch.empty_like(noise, dtype=part.dtype).copy_(part), total, noise)
            key = (readable, not noise.data_ptr() % ALIGNMENT, part.dtype, total.dtype, noise.dtype)
            same = found.get(key)
            if same is None:
                same = found[key] = PartBatch(self.count, self.added, self.fresh, readable)
            same.tensors.append(one)
        return list(found.values())


class PartAdder:
    """Adds parts, and keeps the tables of sets of tensors that come again."""

    def __init__(self) -> None:
        self._sets: dict[tuple[Any, ...], Any] = {}

    @torch.no_grad()
    def add(self, batch: PartBatch) -> None:
        """Add parts of one device to sums and deviations, in place."""
        for some in batch.split():
            if not (some.readable and self._add_by_kernels(some)):
                add_by_torch(some)

    def _add_by_kernels(self, some: PartBatch) -> bool:
        module, (parts, totals, noises) = kernels.ready("vrgd"), some.columns
        total = totals[0]
        if module is None or not {parts[0].dtype, total.dtype} <= set(kernels.DTYPES):
            return False
        if any([type(tensor) is not Tensor for tensor in (*parts, *totals)]):
            return False
        sizes = tuple([one.numel() for one in totals])
        key = (total.device, noises[0].data_ptr(), sizes)
        try:
            adding = self._sets.pop(key, None)
            if adding is None:
                if not module.can_build_tables(total.device):
                    return False
                adding = module.Adding(sizes, total.device)
            self._sets[key] = adding  # now the newest
            self._drop_oldest()
            rounding = rounding_of(total.dtype, some.count) / some.count**2
            ways = {"added": some.added, "fresh": some.fresh}
            adding.add(parts, totals, noises, count=some.count, rounding=rounding, **ways)
        except Exception as error:
            kernels.give_up("vrgd", error, "torch adds the parts of batches")
            return False
        return True

    def _drop_oldest(self) -> None:
        if len(self._sets) > MAX_SETS:
            # A CUDA graph reads the tables it was captured with at every replay.
            oldest = next((key for key, adding in self._sets.items() if not adding.captured), None)
            if oldest is not None:
                del self._sets[oldest]


def add_by_torch(some: PartBatch) -> None:
    """Add parts of one layout and dtype to sums and deviations."""
    (parts, totals, noises), count = some.columns, some.count
    if not some.added:
        torch._foreach_add_(totals, parts)
    if some.fresh:
        torch._foreach_zero_(noises)
    dtype = noises[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    deviations = torch._foreach_add([p.to(wide) for p in parts], [total.to(wide) for total in totals], alpha=-1 / count)
    narrow, sums = ([tensor.to(dtype) for tensor in tensors] for tensors in (deviations, totals))
    torch._foreach_addcmul_(noises, narrow, narrow, value=count / (count - 1))
    rounding = rounding_of(totals[0].dtype, count) / count**2
    torch._foreach_addcmul_(noises, sums, sums, value=-rounding * count / (count - 1))


def rounding_of(dtype: torch.dtype, num_parts: int) -> float:
    """Return the squared deviation over the squared mean that rounding causes when equal parts are added up.

    All sums may be rounded in the same direction, so errors grow with the number of parts. In 16 bits, that bound would
    hide real noise; there the value is for errors in random directions, and from 16 parts on for the largest error that
    equal parts showed.
    """
    eps = float(torch.finfo(dtype).eps)
    return eps**2 * (max(num_parts / 4, num_parts**2 / 64) if eps > 1e-6 else num_parts**2 / 8)


HELD_BYTES = 16 * 2**20
"""Size of gradients held back to be compared together; small, so that they are still in the GPU's cache."""

ADDED_BYTES = 256 * 2**20  # size of gradients held back to be added and compared together, which reads them once


class GradientParts:
    """Counts the gradients that each parameter received since the last step and sums their squared deviations.

    If segments checkpointed with re-entrant autograd share a parameter, it receives several gradients in one backward,
    which count as several parts.
    """

    def __init__(self) -> None:
        self.keeps_norms: Callable[[], bool] = lambda: False
        """Returns whether to keep the norm of ``.grad``, to find out by how much it is multiplied before the step."""
        self.blocks: list[Block] = []
        self._entries: dict[Tensor, Entry] = {}
        self._awaited: set[int] = set()  # backward passes that will call `end_backward`
        self._pending: dict[torch.device, HeldParts] = {}
        self._task: int | None = None
        self._num_before_task = 0
        self._adding_in: tuple[int, bool] = (-1, False)  # a backward pass, and whether we add its parts
        self._adder = PartAdder()
        self._lock = threading.RLock()  # backward runs in one thread per device
        self.when_backward_ends: list[Callable[[], None]] = []
        self.when_discarded: list[Callable[[Tensor], None]] = []
        self._captured: list[tuple[Entry, int, bool, Tensor | None]] | None = None
        weakref.finalize(self, _unhook, self._entries)

    def __contains__(self, parameter: Tensor) -> bool:
        """Return whether the gradients of a parameter are collected."""
        return parameter in self._entries

    def count_of(self, parameter: Tensor) -> int:
        """Return how many gradients a parameter received since the last step."""
        return self._entries[parameter].count

    def follow(self, parameters: Iterable[Tensor], *, group: int, dtype: torch.dtype | None) -> None:
        """Start to collect the gradients of these parameters, which are leaves.

        `dtype` is that of their accumulators. None: float32, or float64 for float64 parameters.
        """
        for parameter in parameters:
            check_parameter(parameter)
            entry = self._entries.setdefault(parameter, Entry(weakref.ref(parameter), parameter.dtype))
            entry.group, entry.noise_dtype = group, dtype
            if not entry.handles:
                frozen = not parameter.requires_grad
                parameter.requires_grad_(True)  # a frozen parameter takes no hooks, and may be unfrozen later
                entry.handles = self._hook(parameter, entry)
                entry.before, entry.after = parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks
                parameter.requires_grad_(not frozen)

    def _hook(self, parameter: Tensor, entry: Entry) -> tuple[RemovableHandle, RemovableHandle]:
        reference = weakref.ref(self)  # a parameter must not keep its optimizer alive

        # These run for every parameter in every backward, so they postpone what they can.
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
            setattr(hook, "__torch_unserializable__", True)  # noqa: B010 - no warning when a parameter is saved without it
        return parameter.register_hook(arriving), parameter.register_post_accumulate_grad_hook(added)

    def _arrive(self, parameter: Tensor, entry: Entry, grad: Tensor) -> None:
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"a gradient of shape {tuple(grad.shape)} is {grad.layout}; variance-reduced optimizers compare the "
                "elements of dense gradients: build the embedding with sparse=False"
            )
        if not entry.count or entry.taken is not None:  # another thread has hidden .grad for its own part
            return
        task = torch._C._current_graph_task_id()
        so_far = parameter.grad
        if so_far is None:
            # The first part becomes .grad; holding it here would make autograd copy it. Earlier parts were discarded.
            self.forget([parameter])
        elif self._adds_itself(parameter, entry, task):
            self._await(task)  # restores .grad whatever autograd raises
            entry.taken, parameter.grad = so_far, None
        else:
            if entry.pending:
                self._flush(parameter.device)
            entry.arriving = grad.detach()

    def _adds_itself(self, parameter: Tensor, entry: Entry, task: int) -> bool:
        """Return whether to add the arriving part to ``.grad`` in autograd's place."""
        if not entry.readable:
            return False
        if self._adding_in[0] != task:
            self._adding_in = (task, _only_we_add(parameter))
        # Other hooks would see no .grad, or one without this part.
        return self._adding_in[1] and len(entry.before) == 1 and len(entry.after or ()) == 1

    def _count(self, parameter: Tensor, entry: Entry) -> None:
        """Count a gradient that was added to ``.grad``. ``torch.autograd.grad``, which calls hooks too, adds none."""
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
            held = self._pending[device] = HeldParts(device)
        entry.pending = True
        version = 0 if total is None else total._version
        held.parts.append((parameter, entry, part, total, entry.count, version))
        held.nbytes += part.nbytes

    def _await(self, task: int) -> None:
        """Register for the end of a backward pass, before anything can clip or unscale ``.grad``."""
        if self._task is None:  # passes that start before it ends are nested in it, as in checkpointing
            self._task, self._num_before_task = task, self.num_parts
        if task not in self._awaited:
            self._awaited.add(task)
            # DistributedDataParallel finishes in the same way.
            torch.autograd.Variable._execution_engine.queue_callback(BackwardEnd(weakref.ref(self), task))

    def end_backward(self, task: int) -> None:
        """Finish a backward pass."""
        with self._lock:
            self.flush()
            self._awaited.discard(task)
            if task == self._task:
                self._task = None
                for entry in self._entries.values():
                    entry.arriving = None
                for call in self.when_backward_ends:
                    call()

    def fail_backward(self, task: int) -> None:
        """Leave ``.grad`` as autograd would have when a backward pass failed."""
        with self._lock:
            if task in self._awaited:  # and nothing was discarded since
                self._awaited.discard(task)
                if task == self._task:
                    self._task = None
                self.settle()

    def flush(self) -> None:
        """Add held parts, before anything but backward changes ``.grad``."""
        with self._lock:
            for device in list(self._pending):
                self._flush(device)

    def settle(self) -> None:
        """Do the same when no backward is running, and clean up after one that failed."""
        with self._lock:
            for parameter, entry in self._entries.items():
                total, part, entry.taken, entry.arriving = entry.taken, parameter.grad, None, None
                if total is not None:  # autograd may have left a part in its place
                    with torch.no_grad():
                        parameter.grad = total if part is None else total.add_(part)
            for device in list(self._pending):
                self._flush(device, failed=True)

    @torch.no_grad()
    def _flush(self, device: torch.device, *, failed: bool = False) -> None:
        held = self._pending.pop(device, None)
        if held is None:
            return
        alike: dict[tuple[int, bool, bool, bool], tuple[list[Tensor], PartBatch]] = {}
        for parameter, entry, part, total, count, version in held.parts:
            entry.pending = False
            grad = parameter.grad
            if total is not None and (total is not grad or (failed and total._version != version)):
                entry.count -= 1  # .grad was removed, or set to zero after a failed backward
                continue
            if grad is None:
                continue
            noise = entry.noise
            if noise is None or entry.dtype is not parameter.dtype or noise.device != device:
                noise = self._noise(parameter, entry)
            key = (count, total is None, entry.touched, entry.readable)
            entry.touched = True
            some = alike.get(key)
            if some is None:
                some = alike[key] = ([], PartBatch(count, total is None, not key[2], entry.readable))
            some[0].append(parameter)
            some[1].tensors.append((part, grad, noise))
        on_current_stream(held, device)
        keeps_norms = self.keeps_norms()
        for parameters, batch in alike.values():
            self._adder.add(batch)
            if keeps_norms:
                self.note_norms(parameters, [total for _, total, _ in batch.tensors])

    def note_norms(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Keep the norms that gradients have at the end of backward."""
        for parameter, norm in zip(parameters, torch._foreach_norm(list(grads)), strict=True):
            self._entries[parameter].norm = norm

    def noise_of(self, parameter: Tensor) -> Tensor:
        """Return a parameter's sum of squared deviations so far. The next part and `forget` change it."""
        entry = self._entries[parameter]
        noise = self._noise(parameter, entry)
        if entry.dirty and not entry.touched:
            entry.dirty = False
            noise.zero_()
        return noise

    def _noise(self, parameter: Tensor, entry: Entry) -> Tensor:
        if entry.noise is None or entry.dtype != parameter.dtype or entry.noise.device != parameter.device:
            self._allocate()
        assert entry.noise is not None
        return entry.noise

    def _allocate(self) -> None:
        """Allocate accumulators for all parameters that have none."""
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
        return Kind(entry.group, parameter.device, parameter.dtype, noise_dtype)

    @property
    def num_parts(self) -> int:
        """Number of micro-batches since the last step: the most gradients that any parameter received and still has."""
        return max((entry.count for p, entry in self._entries.items() if entry.count and p.grad is not None), default=0)

    @property
    def num_parts_with_current(self) -> int:
        """The same while a backward runs, which counts even if it has reached no parameter yet."""
        return (self.num_parts if self._task is None else self._num_before_task) + 1

    @torch.no_grad()
    def complete(self, num_parts: int) -> None:
        """Count parts that did not reach a parameter as zeros."""
        if any(entry.noise is None for entry in self._entries.values()):
            self._allocate()
        self.rescale()
        for parameter, entry in self._entries.items():
            if 0 < entry.count < num_parts and parameter.grad is not None:
                entry.touched, noise = True, self._noise(parameter, entry)
                grad = _grad(parameter).to(noise.dtype)
                noise.addcmul_(grad, grad, value=1 / entry.count - 1 / num_parts)

    @torch.no_grad()
    def rescale(self) -> None:
        """Multiply deviations by the factor that a scaler or clipping multiplied ``.grad`` by since backward ended.

        The factor comes from the kept norms, if any; it is exactly 1 for an unchanged gradient. Stale accumulators are
        set to 0.
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
        """Keep the collected parts as those that a CUDA graph collects at every replay."""
        self.settle()
        self._captured = [(entry, entry.count, entry.touched, entry.norm) for entry in self._entries.values()]
        self.forget()

    def replay(self) -> None:
        """Count the parts that a graph collected without calling hooks."""
        if self._captured is None:
            raise RuntimeError("no CUDA graph was captured; call graph_captured() right after capturing it")
        for entry, count, touched, norm in self._captured:
            entry.count, entry.touched, entry.norm = count, touched, norm

    @torch.no_grad()
    def replace(self, parameters: Sequence[Tensor], noises: Sequence[Tensor]) -> None:
        """Replace this rank's sums by those over all ranks."""
        entries = [self._entries[parameter] for parameter in parameters]
        places = [self._noise(parameter, entry) for parameter, entry in zip(parameters, entries, strict=True)]
        torch._foreach_copy_(places, list(noises))
        for entry in entries:
            entry.touched = True

    def forget(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Discard the parts of some parameters, or of all."""
        if parameters is None:
            for entry in self._entries.values():
                entry.forget()
            self._task, self._adding_in = None, (-1, False)
            self._awaited.clear()
            self._pending.clear()
            return
        for parameter in parameters:
            for call in self.when_discarded:
                call(parameter)
            entry = self._entries[parameter]
            entry.forget()
            if held := self._pending.get(parameter.device):
                held.parts = [one for one in held.parts if one[1] is not entry]


def _only_we_add(parameter: Tensor) -> bool:
    """Return whether this backward adds to ``.grad``, builds no graph of its own, and no other rank waits for it."""
    if torch.is_grad_enabled() or kernels.ready("vrgd") is None:
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
