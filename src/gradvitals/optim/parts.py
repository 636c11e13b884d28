"""The gradients a step is made of: how far they scatter around their mean, without keeping any of them.

During backward a hook on each parameter sees the gradient of one micro-batch before it is added to ``.grad``. With
``.grad`` as the running sum S after d parts, the part p adds to the sum of squared deviations (Welford 1962)

    noise += d / (d - 1) * (p - S / d)^2

which loses nothing to rounding when the parts are almost equal, unlike a sum of squares. One accumulator a parameter
is all there is to keep. Equal parts do not add up exactly, and what is left over would look like noise; so what
rounding alone amounts to is taken off, and noise of zero or less is none.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

HELD_BYTES = 16 * 2**20
"""Gradients held back to be added together: so few that they are still in a GPU's cache by then."""

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


class GradientParts:
    """Counts the gradients each parameter received since the last step and sums their squared deviations.

    A parameter shared between segments that are checkpointed with re-entrant autograd receives several gradients in
    one backward, which count as several parts.
    """

    def __init__(self) -> None:
        self.counts: dict[Tensor, int] = {}
        """Gradients each parameter received since the last step, zero included."""
        self.keeps_norms: Callable[[], bool] = lambda: False
        """Whether to remember the norm of ``.grad``, so as to know by how much it is multiplied before the step."""
        self.blocks: list[Block] = []
        self._settings: dict[Tensor, tuple[int, torch.dtype | None]] = {}
        self._noises: dict[Tensor, Tensor] = {}
        self._dtypes: dict[Tensor, torch.dtype] = {}  # parameters' own, when their accumulators were laid out
        self._awaited: set[int] = set()  # backward passes whose end will be told
        self._touched: dict[Tensor, None] = {}
        self._norms: dict[Tensor, Tensor] = {}
        self._arriving: dict[Tensor, Tensor] = {}
        self._pending: dict[torch.device, dict[Tensor, tuple[Tensor, int]]] = {}
        self._pending_bytes: dict[torch.device, int] = {}
        self._task: int | None = None
        self._num_before_task = 0
        self._lock = threading.RLock()  # backward runs in a thread for each device
        self.when_backward_ends: list[Callable[[], None]] = []
        self.when_given_up: list[Callable[[Tensor], None]] = []
        self._captured: tuple[dict[Tensor, int], dict[Tensor, None], dict[Tensor, Tensor]] | None = None
        self._handles: dict[Tensor, tuple[RemovableHandle, RemovableHandle]] = {}
        weakref.finalize(self, _unhook, self._handles)

    def follow(self, parameters: Iterable[Tensor], *, group: int, dtype: torch.dtype | None) -> None:
        """Collect the gradients of these parameters from now on.

        Args:
            parameters: Leaves that backward reaches.
            group: Those of one group are worked on together.
            dtype: Of their accumulators; None: float32, or float64 where the parameter is.
        """
        for parameter in parameters:
            _refuse_what_has_no_elements_here(parameter)
            self.counts.setdefault(parameter, 0)
            self._settings[parameter] = (group, dtype)
            if parameter not in self._handles:
                frozen = not parameter.requires_grad
                parameter.requires_grad_(True)  # or it takes no hooks, and may be thawed later
                self._handles[parameter] = self._hook(parameter)
                parameter.requires_grad_(not frozen)

    def _hook(self, parameter: Tensor) -> tuple[RemovableHandle, RemovableHandle]:
        reference, owner_reference = weakref.ref(self), weakref.ref(parameter)  # no parameter may keep its optimizer

        # Called for every parameter in every backward: nothing here that can be done later.
        def arriving(grad: Tensor) -> None:
            parts, owner = reference(), owner_reference()
            if parts is not None and owner is not None:
                with parts._lock:
                    parts._arrive(owner, grad)

        def added(owner: Tensor) -> None:
            if (parts := reference()) is not None:
                with parts._lock:
                    parts._count(owner)

        for hook in (arriving, added):
            setattr(hook, "__torch_unserializable__", True)  # noqa: B010 - a saved parameter goes without, unwarned
        return parameter.register_hook(arriving), parameter.register_post_accumulate_grad_hook(added)

    def _arrive(self, parameter: Tensor, grad: Tensor) -> None:
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"a gradient of shape {tuple(grad.shape)} is {grad.layout}; variance-reduced optimizers compare the "
                "elements of dense gradients: build the embedding with sparse=False"
            )
        if parameter.grad is None:
            # The first part becomes .grad; to hold it here would make autograd copy it. Should others have come
            # before, they were given up.
            if self.counts[parameter]:
                self.forget([parameter])
        elif self.counts[parameter]:
            self._arriving[parameter] = grad.detach()

    def _count(self, parameter: Tensor) -> None:
        """A gradient was added to ``.grad``; it is not in ``torch.autograd.grad``, which has hooks called as well."""
        if self._task is None:  # others that begin before this one ends are inside it, as checkpoints have them
            self._task, self._num_before_task = torch._C._current_graph_task_id(), self.num_parts
        self.counts[parameter] += 1
        if (task := torch._C._current_graph_task_id()) not in self._awaited:
            self._awaited.add(task)
            self._flush_when_ends(task)
        part = self._arriving.pop(parameter, None)
        if part is None:
            return
        device = parameter.device
        held = self._pending.setdefault(device, {})
        if parameter in held or self._pending_bytes.get(device, 0) >= HELD_BYTES:
            self._flush(device)
            held = self._pending.setdefault(device, {})
        held[parameter] = (part, self.counts[parameter])
        self._pending_bytes[device] = self._pending_bytes.get(device, 0) + part.numel() * part.element_size()

    def _flush_when_ends(self, task: int) -> None:
        reference = weakref.ref(self)

        def end() -> None:
            if (parts := reference()) is not None:
                parts._end(task)

        # Before anything can clip or unscale .grad. DistributedDataParallel ends its own work the same way.
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end(self, task: int) -> None:
        with self._lock:
            self.flush()
            self._awaited.discard(task)
            self._arriving.clear()
            if task == self._task:
                self._task = None
                for tell in self.when_backward_ends:
                    tell()

    def flush(self) -> None:
        """Add what is held back, before anything but backward changes ``.grad``."""
        with self._lock:
            for device in list(self._pending):
                self._flush(device)

    @torch.no_grad()
    def _flush(self, device: torch.device) -> None:
        held, self._pending_bytes[device] = self._pending.pop(device, {}), 0
        keeps_norms = self.keeps_norms()
        alike: dict[tuple[int, torch.dtype, torch.dtype], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for parameter, (part, count) in held.items():
            if parameter.grad is not None:  # else it was taken away while backward ran
                noise = self.noise_of(parameter)
                kind = (count, noise.dtype, parameter.grad.dtype)
                alike.setdefault(kind, []).append((parameter, part, noise))
                self._touched[parameter] = None
        for (count, dtype, grad_dtype), entries in alike.items():
            parameters, parts, noises = (list(column) for column in zip(*entries, strict=True))
            totals = [_grad(parameter) for parameter in parameters]
            wide = torch.promote_types(dtype, torch.float32)
            deviations = torch._foreach_add(_cast(parts, wide), _cast(totals, wide), alpha=-1 / count)
            narrow, sums = _cast(deviations, dtype), _cast(totals, dtype)
            torch._foreach_addcmul_(noises, narrow, narrow, value=count / (count - 1))
            rounding = rounding_of(grad_dtype, count) / count**2
            torch._foreach_addcmul_(noises, sums, sums, value=-rounding * count / (count - 1))
            if keeps_norms:
                self.note_norms(parameters, totals)

    def note_norms(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Remember the length that gradients had when backward ended."""
        self._norms.update(zip(parameters, torch._foreach_norm(list(grads)), strict=True))

    def noise_of(self, parameter: Tensor) -> Tensor:
        """The sum of squared deviations of a parameter so far. It is changed by the next part and by `forget`."""
        noise = self._noises.get(parameter)
        if noise is None or noise.device != parameter.device or self._dtypes[parameter] != parameter.dtype:
            self._lay_out()
            noise = self._noises[parameter]
        return noise

    def _lay_out(self) -> None:
        """Give every parameter that has none a place to accumulate in."""
        self.blocks = [block for block in self.blocks if block.fits()]
        settled = {parameter for block in self.blocks for parameter in block.parameters}
        for kind, parameters in _chunks((p for p in self.counts if p not in settled), self._kind):
            block = Block(kind, parameters)
            self.blocks.append(block)
            self._noises.update(zip(parameters, block.noises, strict=True))
            self._dtypes.update(dict.fromkeys(parameters, kind.dtype))

    def _kind(self, parameter: Tensor) -> Kind:
        group, dtype = self._settings[parameter]
        noise_dtype = dtype or torch.promote_types(parameter.dtype, torch.float32)
        return Kind(group, parameter.device, parameter.dtype, noise_dtype, odd=bool(parameter.numel() % 4))

    @property
    def num_parts(self) -> int:
        """Micro-batches since the last step: the most gradients that any parameter received and still has."""
        return max((count for p, count in self.counts.items() if p.grad is not None), default=0)

    @property
    def num_parts_with_current(self) -> int:
        """The same while a backward runs, which counts even where it has reached only some parameters, or none."""
        return (self.num_parts if self._task is None else self._num_before_task) + 1

    @torch.no_grad()
    def complete(self, num_parts: int) -> None:
        """Count parts that passed a parameter by: it received zeros from them."""
        if len(self._noises) < len(self.counts):
            self._lay_out()
        self.rescale()
        missed = [(p, count) for p, count in self.counts.items() if 0 < count < num_parts]
        for parameter, count in missed:
            if parameter.grad is not None:
                self._touched[parameter] = None
                noise = self._noises[parameter]
                grad = _grad(parameter).to(noise.dtype)
                noise.addcmul_(grad, grad, value=1 / count - 1 / num_parts)

    @torch.no_grad()
    def rescale(self) -> None:
        """Multiply deviations as ``.grad`` was since backward ended, by a scaler or by clipping.

        By how much is known where norms were kept. Where nothing touched a gradient that is by exactly 1.
        """
        known = [(p, norm) for p, norm in self._norms.items() if p.grad is not None]
        for parameter, norm in known:
            (now,) = torch._foreach_norm([_grad(parameter)])
            self._noises[parameter].mul_((now / norm).square().nan_to_num(nan=1.0, posinf=1.0))

    def note_captured(self) -> None:
        """Remember what has been collected as what a CUDA graph collects whenever it is replayed."""
        self.flush()
        self._captured = dict(self.counts), dict(self._touched), dict(self._norms)
        self.forget()

    def replay(self) -> None:
        """A graph has collected parts, without calling hooks."""
        if self._captured is None:
            raise RuntimeError("no parts of a CUDA graph are known; call graph_captured() right after capturing it")
        counts, touched, norms = self._captured
        self.counts, self._touched, self._norms = dict(counts), dict(touched), dict(norms)

    @torch.no_grad()
    def replace(self, parameters: Sequence[Tensor], noises: Sequence[Tensor]) -> None:
        """Put sums over all ranks in the place of this rank's own."""
        torch._foreach_copy_([self.noise_of(parameter) for parameter in parameters], list(noises))
        self._touched.update(dict.fromkeys(parameters))

    @torch.no_grad()
    def forget(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Begin anew: with some parameters, or with all."""
        if parameters is None:
            if self._touched:
                torch._foreach_zero_([block.flat for block in self.blocks])
            self.counts = dict.fromkeys(self.counts, 0)
            self._task = None
            self._awaited.clear()
            for collected in (self._arriving, self._norms, self._pending, self._pending_bytes, self._touched):
                collected.clear()
            return
        for parameter in parameters:
            for tell in self.when_given_up:
                tell(parameter)
            self.counts[parameter] = 0
            self._arriving.pop(parameter, None)
            self._norms.pop(parameter, None)
            self._pending.get(parameter.device, {}).pop(parameter, None)
            if parameter in self._touched:
                del self._touched[parameter]
                self._noises[parameter].zero_()


def _chunks(parameters: Iterable[Tensor], key: Callable[[Tensor], Kind]) -> list[tuple[Kind, list[Tensor]]]:
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


def rounding_of(dtype: torch.dtype, num_parts: int) -> float:
    """Squared deviation, over squared mean, that rounding leaves between equal parts that are added up.

    Each sum may be rounded the same way, so that errors grow with the number of parts. To allow for that in 16 bits
    would take real noise for rounding; there it is what errors in all directions amount to.
    """
    eps = float(torch.finfo(dtype).eps)
    return eps**2 * (num_parts / 4 if eps > 1e-6 else num_parts**2 / 8)


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


def _refuse_what_has_no_elements_here(parameter: Tensor) -> None:
    if not parameter.is_floating_point():
        raise TypeError(
            f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; expected real floating-point numbers"
        )
    if hasattr(parameter, "placements"):
        raise TypeError(
            "a parameter is a DTensor, sharded by FSDP2 or tensor parallelism; variance-reduced optimizers know only "
            "whole parameters: use DistributedDataParallel and use_ranks(model)"
        )


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(dtype) for tensor in tensors]


def _unhook(handles: dict[Tensor, tuple[RemovableHandle, RemovableHandle]]) -> None:
    for pair in handles.values():
        for handle in pair:
            handle.remove()
