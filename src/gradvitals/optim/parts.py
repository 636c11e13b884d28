"""The gradients a step is made of."""

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

BLOCK_BYTES = 256 * 2**20
"""Parameters that are worked on together in a step: it bounds what a step takes of memory for a moment."""


@dataclass(frozen=True)
class Kind:
    """What parameters must have in common to be worked on together."""

    group: int
    device: torch.device
    dtype: torch.dtype
    noise_dtype: torch.dtype
    odd: bool
    """Whether it has a number of elements that no vector instruction likes, and would shift all that follow."""


class Block:
    """The sums of squared deviations of some parameters of one kind, one after the other in one flat tensor."""

    def __init__(self, kind: Kind, parameters: Sequence[Tensor]) -> None:
        self.kind = kind
        self.parameters = list(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=kind.noise_dtype, device=kind.device)
        pieces = self.flat.split(sizes)
        self.noises = [like_in_memory(p, piece) for p, piece in zip(parameters, pieces, strict=True)]
        self.cache: dict[str, Any] = {}
        """What others work out once for this block."""

    def fits(self) -> bool:
        """Whether the parameters still are where and what they were."""
        return all(
            p.device == self.kind.device and p.dtype == self.kind.dtype and p.shape == noise.shape
            for p, noise in zip(self.parameters, self.noises, strict=True)
        )


def in_blocks(parameters: Iterable[Tensor], key: Callable[[Tensor], Kind]) -> list[tuple[Kind, list[Tensor]]]:
    """Parameters of one kind together, in the order given, `BLOCK_BYTES` or one parameter at a time."""
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


def like_in_memory(tensor: Tensor, piece: Tensor) -> Tensor:
    """A view of flat memory with a tensor's shape, and its order of elements where it has no gaps in memory."""
    places = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in places:
        if stride != expected:
            return piece.view(tensor.shape)
        expected *= size
    return piece.as_strided(tensor.shape, tensor.stride(), piece.storage_offset())


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, flat, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def refuse_what_has_no_elements_here(parameter: Tensor) -> None:
    """Refuse a parameter of which no squares of elements can be summed here."""
    if not parameter.is_floating_point():
        raise TypeError(
            f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; expected real floating-point numbers"
        )
    if hasattr(parameter, "placements"):
        raise TypeError(
            "a parameter is a DTensor, sharded by FSDP2 or tensor parallelism; variance-reduced optimizers know only "
            "whole parameters: use DistributedDataParallel and use_ranks(model)"
        )


class Entry:
    """What is known of one parameter. Its hooks have it at hand: tensors are slow to look up by."""

    __slots__ = (
        "after", "arriving", "before", "count", "dirty", "dtype", "empty", "group", "handles", "noise", "noise_dtype",
        "norm", "pending", "readable", "taken", "touched", "weak",
    )  # fmt: skip

    def __init__(self, parameter: Tensor) -> None:
        self.weak = weakref.ref(parameter)
        self.handles: tuple[RemovableHandle, ...] = ()
        self.before: Mapping[int, Any] = {}
        """All hooks that see a gradient before it is added, ours and others'."""
        self.after: Mapping[int, Any] = {}
        """All that are called afterwards."""
        self.group = 0
        self.noise_dtype: torch.dtype | None = None
        self.count = 0
        """Gradients received since the last step."""
        self.noise: Tensor | None = None
        """Where squared deviations are summed, whatever is there now."""
        self.dtype = parameter.dtype
        """The parameter's own, when that was laid out."""
        self.readable = False
        """Whether kernels can read it."""
        self.touched = False
        """Whether there are deviations of parts since the last step."""
        self.dirty = False
        """Whether what is there is of no use, where nothing has been touched."""
        self.arriving: Tensor | None = None
        """A part that autograd is about to add to ``.grad``."""
        self.empty = False
        """Whether a function gave None for a gradient: autograd adds nothing, but calls hooks."""
        self.taken: Tensor | None = None
        """``.grad``, of which autograd is to know nothing for a moment."""
        self.pending = False
        """Whether a part is held."""
        self.norm: Tensor | None = None
        """Of ``.grad`` when backward ended."""

    def forget(self) -> None:
        """Begin anew."""
        self.dirty, self.touched = self.dirty or self.touched, False
        self.count, self.pending = 0, False
        self.arriving = self.taken = self.norm = None


MOST_SETS = 256
"""Sets of tensors that tables are kept for."""


class Held:
    """Parts of one device, of one stream, that are held back: see `GradientParts`."""

    def __init__(self, device: torch.device) -> None:
        self.parts: list[tuple[Tensor, Entry, Tensor, Tensor | None, int, int]] = []
        """Each with its parameter, the sum it goes into, and the count and version of that."""
        self.nbytes = 0
        self.stream = stream_of(device)


class Ending:
    """Called by autograd when a backward ends; one that fails drops it uncalled, before it raises."""

    def __init__(self, parts: weakref.ref[Any], task: int) -> None:
        self._parts, self._task, self._called = parts, task, False

    def __call__(self) -> None:
        """The backward has ended."""
        self._called = True
        if (parts := self._parts()) is not None:
            parts.end(self._task)

    def __del__(self) -> None:
        if not self._called and (parts := self._parts()) is not None:
            parts.fail(self._task)


def stream_of(device: torch.device) -> int:
    """The stream of now, as a number; 0 where there are none."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def on_current_stream(held: Held, device: torch.device) -> None:
    """Have the stream of now wait for what is held, and memory wait for that stream, where it came on another."""
    if held.stream == stream_of(device):
        return
    now = torch.cuda.current_stream(device)
    now.wait_stream(torch.cuda.ExternalStream(held.stream, device))
    for _, _, part, total, *_ in held.parts:
        for tensor in (part, total):
            if tensor is not None:
                tensor.record_stream(now)


@dataclass
class Arrived:
    """Parts of some parameters' gradients, of one device."""

    count: int
    """Parts there are of each with this one: 2 at least."""
    added: bool
    """Whether the sums hold these parts already."""
    fresh: bool
    """Whether there are no deviations yet, whatever is in their place."""
    readable: bool
    """Whether kernels can read deviations, and so whatever is laid out like them."""
    tensors: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Of each the part, the sum of all parts, and the sum of their squared deviations."""

    @property
    def columns(self) -> list[list[Tensor]]:
        """All parts, all sums, all deviations."""
        return [list(column) for column in zip(*self.tensors, strict=True)]

    def split(self) -> list[Arrived]:
        """By what kernels must know of tensors; `readable` then says whether they can read all."""
        found: dict[tuple[Any, ...], Arrived] = {}
        # For every tensor, in every backward: as little as can be.
        for one in self.tensors:
            part, total, noise = one
            strides = noise.stride()
            well = self.readable and total.stride() == strides
            if well and part.stride() != strides:  # as autograd may hand it over, and adds it by itself
                one = (torch.empty_like(noise, dtype=part.dtype).copy_(part), total, noise)
            key = (well, not noise.data_ptr() % ALIGNMENT, part.dtype, total.dtype, noise.dtype)
            same = found.get(key)
            if same is None:
                same = found[key] = Arrived(self.count, self.added, self.fresh, well)
            same.tensors.append(one)
        return list(found.values())


class Adder:
    """Adds parts, and remembers the tables of the sets that come again."""

    def __init__(self) -> None:
        self._sets: dict[tuple[Any, ...], Any] = {}

    @torch.no_grad()
    def add(self, arrived: Arrived) -> None:
        """Take parts of one device into sums and deviations, in place."""
        for some in arrived.split():
            if not (some.readable and self._add_by_kernels(some)):
                add_by_torch(some)

    def _add_by_kernels(self, some: Arrived) -> bool:
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
                if not module.can_be_cut(total.device):
                    return False
                adding = module.Adding(sizes, total.device)
            self._sets[key] = adding  # the last of all
            self._drop_oldest()
            adding.add(
                parts,
                totals,
                noises,
                count=some.count,
                rounding=rounding_of(total.dtype, some.count) / some.count**2,
                added=some.added,
                fresh=some.fresh,
            )
        except Exception as error:
            kernels.give_up("vrgd", error, "parts of batches are added by torch")
            return False
        return True

    def _drop_oldest(self) -> None:
        if len(self._sets) > MOST_SETS:
            # A CUDA graph reads the tables it was captured with whenever it is replayed.
            oldest = next((key for key, adding in self._sets.items() if not adding.captured), None)
            if oldest is not None:
                del self._sets[oldest]


def add_by_torch(some: Arrived) -> None:
    """Take parts of one kind into sums and deviations."""
    (parts, totals, noises), count = some.columns, some.count
    if not some.added:
        torch._foreach_add_(totals, parts)
    if some.fresh:
        torch._foreach_zero_(noises)
    dtype = noises[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    deviations = torch._foreach_add(_cast(parts, wide), _cast(totals, wide), alpha=-1 / count)
    narrow, sums = _cast(deviations, dtype), _cast(totals, dtype)
    torch._foreach_addcmul_(noises, narrow, narrow, value=count / (count - 1))
    rounding = rounding_of(totals[0].dtype, count) / count**2
    torch._foreach_addcmul_(noises, sums, sums, value=-rounding * count / (count - 1))


def rounding_of(dtype: torch.dtype, num_parts: int) -> float:
    """Squared deviation, over squared mean, that rounding leaves between equal parts that are added up.

    Each sum may be rounded the same way, so that errors grow with the number of parts. To allow for that in 16 bits
    would take real noise for rounding; there it is what errors in all directions amount to.
    """
    eps = float(torch.finfo(dtype).eps)
    return eps**2 * (num_parts / 4 if eps > 1e-6 else num_parts**2 / 8)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(dtype) for tensor in tensors]


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
