"""What an audit takes along on the training thread: checksums of replicas, prints of samples and random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.measure import stats
from gradvitals.measure.moments import stepping
from gradvitals.measure.packet import Packet
from gradvitals.measure.ranks.checksum import Item, as_words, checksums, halves, is_readable, signed, weights
from gradvitals.measure.ranks.prints import mixed, print_of
from gradvitals.measure.ranks.shards import local

SAMPLES = 16
"""Samples of a batch that are looked at."""

SAMPLE_ELEMENTS = 2**16
"""Elements of each that are, evenly spread."""

MAX_DEPTH = 8
"""Containers inside containers that are searched for tensors."""


class Audit:
    """Adds to the packets of audited steps what ranks must agree in, or must not.

    Args:
        model: The root that the training loop calls. Its first training forward after `arm` shows the samples.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hook: Any = None
        self._is_first = True
        self._samples: Tensor | None = None
        self._error: Exception | None = None

    # -- samples ------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Look at the samples of the next training forward, once. Compiled models are left alone.

        The first call is for nothing: the loop may have the model compiled in its first forward, and what is compiled
        with a hook is compiled again when that is gone. A hook that comes later is not noticed there.
        """
        self._samples, self._error = None, None
        first, self._is_first = self._is_first, False
        if not first and self._hook is None and not _is_compiled(self._model):
            self._hook = self._model.register_forward_pre_hook(_FirstLook(self), with_kwargs=True)

    def disarm(self) -> None:
        """Do not wait for a forward any more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take the prints of the samples in the first argument that holds tensors."""
        self.disarm()
        try:
            self._samples = sample_prints(args, kwargs)
        except Exception as error:  # it must not end training; told with the other instruments' errors
            self._error = error

    @torch.no_grad()
    def fingerprints(self, packet: Packet) -> None:
        """Put prints of the samples seen since `arm`, and of the state of random numbers, into the packet."""
        self.disarm()
        samples, self._samples = self._samples, None
        state = print_of(b"".join(_random_states(self._model)))
        for name, half in zip(("rng_lo", "rng_hi"), halves(torch.tensor([signed(state)])), strict=True):
            packet.add(name, half)
        if samples is not None:
            for name, half in zip(("sample_lo", "sample_hi"), halves(samples), strict=True):
                packet.add(name, half, range(len(samples)))
        error, self._error = self._error, None
        if error is not None:
            raise error

    # -- replicas -----------------------------------------------------------------------------------------------

    def after_step(
        self, packet: Packet, rows: Sequence[int], parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        """Put checksums of this rank's part of parameters, and of their optimizer state, into the packet.

        Rows whose memory cannot be read, or that have no state, are left out.
        """
        held = [(row, local(parameter)) for row, parameter in zip(rows, parameters, strict=True)]
        _add(packet, "check", [Item(row, 0, tensor) for row, tensor in held if is_readable(tensor)])
        # ZeRO spreads the state over ranks: nobody has a copy of another one's.
        state: Mapping[Any, Any] = optimizer.state if stepping(optimizer) is optimizer else {}
        items = [
            Item(row, print_of(name.encode()), tensor)
            for row, parameter in zip(rows, parameters, strict=True)
            for name, tensor in _state_tensors(state.get(parameter) or {})
        ]
        _add(packet, "state", items)


def sample_prints(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """One 64-bit print for each of the first samples; None where the input holds none that can be read.

    All tensors of the argument that have as many rows as its first one count. Padding by zeros does not.
    """
    for argument in (*args, *kwargs.values()):
        tensors = [tensor for tensor in _tensors(argument) if tensor.dim() and tensor.numel()]
        if tensors:
            break
    else:
        return None
    # What requires a gradient is no data: the activations that a later stage of a pipeline is given.
    if any(tensor.requires_grad for tensor in tensors) or not all(is_readable(local(tensor)) for tensor in tensors):
        return None
    count = len(local(tensors[0]))
    total: Tensor | None = None
    for place, tensor in enumerate(map(local, tensors)):
        if len(tensor) != count or tensor.device != tensors[0].device:
            continue
        print_ = _of_rows(tensor[:SAMPLES].detach()) * signed(int(mixed(place)) | 1)
        total = print_ if total is None else total + print_
    assert total is not None
    return total + signed(int(mixed(1)))


def _of_rows(tensor: Tensor) -> Tensor:
    rows = tensor.reshape(len(tensor), -1)
    rows = rows[:, :: stats.odd_stride(rows.shape[1], SAMPLE_ELEMENTS)].contiguous()
    words = as_words(rows)
    return (words.to(torch.int64) * weights(words.device, words.shape[1])).sum(dim=1)


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """All tensors in a container, in order."""
    if isinstance(value, Tensor):
        yield value
    elif depth < MAX_DEPTH:
        for part in _parts(value):
            yield from _tensors(part, depth + 1)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield getattr(value, field.name)


def _state_tensors(state: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """All tensors and numbers of an optimizer's state, by where they are in it."""
    if isinstance(state, Tensor):
        tensor = local(state)
        if is_readable(tensor):
            yield name, tensor
    elif isinstance(state, (bool, int, float)):
        yield name, torch.tensor(float(state), dtype=torch.float64)
    elif isinstance(state, Mapping) and depth < MAX_DEPTH:
        for key, value in state.items():
            yield from _state_tensors(value, f"{name}/{key}", depth + 1)
    elif isinstance(state, (list, tuple)) and depth < MAX_DEPTH:
        for place, value in enumerate(state):
            yield from _state_tensors(value, f"{name}/{place}", depth + 1)


def _add(packet: Packet, name: str, items: Sequence[Item]) -> None:
    for rows, numbers in checksums(items):
        low, high = halves(numbers)
        packet.add(f"{name}_lo", low, rows)
        packet.add(f"{name}_hi", high, rows)


def _random_states(model: nn.Module) -> Iterator[bytes]:
    yield torch.get_rng_state().numpy().tobytes()
    first = next(model.parameters(), None)
    if first is not None and first.is_cuda:
        yield torch.cuda.get_rng_state(first.device).numpy().tobytes()


def _is_compiled(model: nn.Module) -> bool:
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


class _FirstLook:
    """The hook. Copies of the model, in memory or in a file, get one that does nothing."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # it must not become part of what is compiled
            return
        # A forward without gradients is an evaluation, where ranks may well share their data.
        if not module.training or not torch.is_grad_enabled() or _is_capturing():
            return
        self._audit.look(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_look, ()


def _no_look() -> Any:
    return _nothing


def _nothing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    pass


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
