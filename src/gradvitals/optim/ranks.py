"""Ranks as parts of a batch: under DistributedDataParallel the squared deviations are summed over all ranks.

Each rank has the sum S_r of its n parts and their squared deviations. With S the average over ranks, the squared
deviations of all parts of all ranks are (Chan, Golub and LeVeque 1979)

    sum over ranks of  noise_r + (S_r - S)^2 / n

so a second all-reduce of the gradient's size follows the first, bucket by bucket, while backward continues. Only
deviations are summed, so nothing cancels, even if the user's own hook sends 16 bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradvitals import kernels
from gradvitals.optim.parts import GradientParts, rounding_of

CommunicationHook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


class RankSums:
    """Sums the squared deviations of gradients over the ranks of one DistributedDataParallel model.

    Every rank must have the same number of parts in a step.
    """

    def __init__(
        self, model: DistributedDataParallel, parts: GradientParts, hook: CommunicationHook | None, state: Any
    ) -> None:
        self.group = model.process_group
        self.world_size = dist.get_world_size(self.group)
        self.parts = parts
        self._hook = allreduce_hook if hook is None else hook
        self._hook_state = self.group if hook is None else state
        self._running: list[tuple[Any, list[Tensor], list[Tensor]]] = []
        self._averaged: set[Tensor] = set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        parts.when_backward_ends.append(self._wait_for_averages)
        parts.when_discarded.append(lambda parameter: self._averaged.discard(parameter))
        relay = model.__dict__.get("_gradvitals_relay")
        if relay is not None and relay.sums() is not None:
            raise RuntimeError(
                "another variance-reduced optimizer uses the ranks of this model; put all its parameters into groups "
                "of one optimizer"
            )
        if relay is None:
            relay = model.__dict__["_gradvitals_relay"] = _Relay()
            # A lambda, because torch compares a function's annotations with types, and ours are strings.
            model.register_comm_hook(state=relay, hook=lambda relay, bucket: relay.reduce(bucket))
        relay.sums, relay.average = weakref.ref(self), partial(self._hook, self._hook_state)

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket by the user's hook, and start to sum its squared deviations."""
        parts = self.parts
        parts.flush()
        num_parts = parts.num_parts_with_current
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        own = [(parameter, grad) for parameter, grad in pairs if parameter in parts]
        self._check_averaged_once([parameter for parameter, _ in own])
        parameters = [parameter for parameter, _ in own]
        buffer = bucket.buffer()
        kept_in = parts.noise_of(parameters[0]).dtype if own else buffer.dtype
        # A copy, because the hook averages in place, in a dtype wide enough for squares.
        noise = buffer.to(torch.promote_types(kept_in, torch.float32), copy=True)
        starts = [int(grad.storage_offset() - buffer.storage_offset()) for _, grad in own]
        views = _pieces(parameters, starts, noise)
        average = self._hook(self._hook_state, bucket)
        with self._side_stream(noise):
            inside = [self._own_deviations(*pair, num_parts) for pair in zip(parameters, views, strict=True)]
            averaged = _value(average)
            if parts.keeps_norms():
                parts.note_norms(parameters, _pieces(parameters, starts, averaged))
            rounding = rounding_of(buffer.dtype, num_parts * self.world_size)
            noise.sub_(averaged).square_().addcmul_(averaged, averaged, value=-rounding).div_(num_parts)
            for view, deviations in zip(views, inside, strict=True):
                if deviations is not None:
                    view.add_(deviations)
            sent = noise.to(kept_in)
            work = dist.all_reduce(sent, group=self.group, async_op=True)
        self._running.append((work, parameters, _pieces(parameters, starts, sent)))
        return average

    def _own_deviations(self, parameter: Tensor, total: Tensor, num_parts: int) -> Tensor | None:
        """Return the squared deviations of this rank's own parts; one that did not reach the parameter is 0."""
        count = self.parts.count_of(parameter)
        if num_parts == 1 or not count:
            return None
        noise = self.parts.noise_of(parameter)
        return noise if count == num_parts else noise + total.square() * (1 / count - 1 / num_parts)

    def _check_averaged_once(self, parameters: list[Tensor]) -> None:
        # A parameter whose parts were discarded, and that was not reached since, has no gradient.
        if any(p in self._averaged and p.grad is not None for p in parameters):
            raise RuntimeError(
                "gradients were averaged over ranks more than once since the last step; put every backward but the "
                "last of a step under `with model.no_sync():`; averaged gradients hide the deviations of their parts"
            )
        self._averaged.update(parameters)

    def _wait_for_averages(self) -> None:
        """Block changes of gradients until they are compared: they may be views of the buckets."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def finish(self) -> None:
        """Wait for the sums and pass them to the parts."""
        for work, parameters, views in self._running:
            work.wait()
            self.parts.replace(parameters, views)
        self.parts.rescale()
        self.forget()

    def forget(self) -> None:
        """Start a new step."""
        for work, _, _ in self._running:
            work.wait()
        self._running, self._averaged = [], set()

    def _side_stream(self, tensor: Tensor) -> AbstractContextManager[object]:
        """Return the context for the second all-reduce: on a GPU its own stream, so that backward need not wait."""
        if tensor.device.type != "cuda":
            return nullcontext()
        stream = self._streams.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        tensor.record_stream(stream)
        return torch.cuda.stream(stream)


class _Relay:
    """The communication hook of a model: calls the sums of an optimizer while that lives, and then only averages."""

    sums: weakref.ref[RankSums]
    average: Callable[[GradBucket], torch.futures.Future[Tensor]]

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        sums = self.sums()
        return self.average(bucket) if sums is None else sums.reduce(bucket)


def _pieces(parameters: list[Tensor], starts: list[int], flat: Tensor) -> list[Tensor]:
    """Return views of a tensor laid out like a bucket, one per parameter, in its memory order if it has no gaps."""
    pieces = []
    for parameter, start in zip(parameters, starts, strict=True):
        piece = flat[start : start + parameter.numel()]
        if kernels.is_gapless(parameter):
            pieces.append(piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset()))
        else:
            pieces.append(piece.view(parameter.shape))
    return pieces


def _value(future: torch.futures.Future[Tensor]) -> Tensor:
    value: Any = future.wait()
    averaged: Tensor = value[0] if isinstance(value, list) else value
    return averaged
