"""AdamW's step by kernels: which parameters go together, where they lie, and the few launches it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradvitals import kernels


@dataclass(frozen=True)
class Vitals:
    """What one step saw in passing, of parameters of one group, device and type."""

    parameters: Sequence[Tensor]
    numbers: Mapping[str, Tensor]
    """By their name, in float64 on the device: one for each parameter.

    Of gradients as they lay in ``.grad``: ``square`` (their norm), ``largest``, ``nonzero``, ``nonfinite``, the inner
    products ``along_weight`` and ``along_momentum``. Norms of weights, ``weight_before`` the step and after it,
    ``weight``; the squared norms of the ``update`` and of the ``momentum_before``; the norm of the ``first`` moment,
    the sum of the ``second``; coordinates ``alive`` (with a second moment) and those ``below_one`` in GSNR; the
    ``step``.
    """
    slices: Mapping[Tensor, Tensor]
    """Norms of the equal parts of gradients that were asked for."""
    betas: tuple[float, float]
    max_norm: float | None


class Batch:
    """Parameters of one group, device and type, and their state."""

    def __init__(
        self, group: int, entries: Sequence[tuple[Tensor, dict[str, Any]]], slices: Mapping[Tensor, int]
    ) -> None:
        adam, cut = modules("adam", "cut")
        self.group = group
        self.parameters = [parameter for parameter, _ in entries]
        self.states = [state for _, state in entries]
        self.device = self.parameters[0].device
        for state in self.states:
            state["step"] = torch.as_tensor(state["step"]).to(self.device, torch.float32, non_blocking=True)
        self.firsts = [state["exp_avg"] for state in self.states]
        self.seconds = [state["exp_avg_sq"] for state in self.states]
        self.steps = [state["step"] for state in self.states]
        self.strides = [parameter.stride() for parameter in self.parameters]
        self.dtypes = (self.parameters[0].dtype, _grad(self.parameters[0]).dtype, self.firsts[0].dtype)
        asked = {place: slices[p] for place, p in enumerate(self.parameters) if p in slices}
        self.cut = cut.Cut([p.numel() for p in self.parameters], self.device, adam.SPAN, asked)
        self.slices: dict[Tensor, slice] = {}
        begin = len(self.parameters)
        for place, number in self.cut.slices.items():
            self.slices[self.parameters[place]] = slice(begin, begin + number)
            begin += number
        self.addresses = {name: cut.Addresses() for name in ("weights", "grads", "firsts", "seconds", "steps")}
        self.extra: dict[str, Any] = {}
        """What a step needs that is more than AdamW's."""

    def holds(self, grads: Sequence[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether state and gradients are still what they were: a loaded checkpoint or a reset brings others."""
        kept = zip(self.parameters, self.states, self.firsts, self.seconds, self.steps, strict=True)
        return (
            all(
                state[p] is entry and entry["exp_avg"] is m and entry["exp_avg_sq"] is v and entry["step"] is step
                for p, entry, m, v, step in kept
            )
            and [grad.stride() for grad in grads] == self.strides
            and {grad.dtype for grad in grads} == {self.dtypes[1]}
        )


class OnePass:
    """Makes the steps of one AdamW, as far as kernels can."""

    needs: ClassVar[str] = "adam"
    """The module of kernels that is given up where a step fails."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.total_norm: Tensor | None = None
        self.has_begun = False
        """Whether some weights have been changed in the step in progress."""
        self._batches: list[Batch] = []
        self._members: list[list[int]] = []
        self._slices: Mapping[Tensor, int] = {}
        self._grads: list[list[Tensor]] = []
        self._readers: dict[tuple[torch.device, torch.dtype], Any] = {}
        self._reachable: tuple[list[int], bool] = ([], False)

    def is_possible(self) -> bool:
        """Whether settings and parameters are such that kernels can make the step."""
        groups = self.optimizer.param_groups
        known = [len(group["params"]) for group in groups]
        if self._reachable[0] != known:
            every = [p for group in groups for p in group["params"]]
            self._reachable = (known, bool(every) and all(kernels.usable(p) for p in every))
        return self._reachable[1] and all(_is_ours(group) for group in groups) and kernels.ready(self.needs) is not None

    def look(self, slices: Mapping[Tensor, int]) -> bool:
        """Look at the gradients. Returns whether kernels can make the step with them."""
        self.has_begun = False
        groups = self.optimizer.param_groups
        present = [[p for p in group["params"] if p.grad is not None] for group in groups]
        members = [list(map(id, some)) for some in present]
        if members != self._members or slices != self._slices or not self._fits():
            if not self._lay_out(present, slices):
                self._members = []
                return False
            self._members, self._slices = members, dict(slices)
            return self._fits()
        return True

    def _fits(self) -> bool:
        self._grads = [[_grad(p) for p in batch.parameters] for batch in self._batches]
        return all(self._holds(batch, grads) for batch, grads in zip(self._batches, self._grads, strict=True))

    def _holds(self, batch: Batch, grads: Sequence[Tensor]) -> bool:
        return batch.holds(grads, self.optimizer.state)

    def _lay_out(self, present: Sequence[Sequence[Tensor]], slices: Mapping[Tensor, int]) -> bool:
        alike: dict[tuple[Any, ...], list[tuple[Tensor, dict[str, Any]]]] = {}
        for index, parameters in enumerate(present):
            self.optimizer._lists_of(self.optimizer.param_groups[index])
            for parameter in parameters:
                grad, state = _grad(parameter), self.optimizer.state[parameter]
                moments = (state["exp_avg"], state["exp_avg_sq"])
                if not all(kernels.usable(t) and t.stride() == parameter.stride() for t in (parameter, grad, *moments)):
                    return False
                if moments[0].dtype != moments[1].dtype or not parameter.numel():
                    return False
                more = self._kind(parameter, grad, state)
                if more is None:
                    return False
                kind = (index, parameter.device, parameter.dtype, grad.dtype, moments[0].dtype, *more)
                alike.setdefault(kind, []).append((parameter, state))
        self._batches = [Batch(kind[0], entries, slices) for kind, entries in alike.items()]
        for batch in self._batches:
            self._complete(batch)
        return True

    # What variance-reduced steps do besides.

    def _kind(self, parameter: Tensor, grad: Tensor, state: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """What else parameters must have in common to go together; None where kernels cannot make the step."""
        return ()

    def _complete(self, batch: Batch) -> None:
        """Add what else a new batch needs."""

    def _reduce(self, batch: Batch, grads: Sequence[Tensor], grads_at: Tensor) -> tuple[Any, Any, bool]:
        """What `prepare` and `update` take to scale gradients, and whether all of it allows wide loads."""
        return None, None, True

    def _after(self, batch: Batch) -> None:
        """The update of a batch has been made."""

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self, *, vitals: bool) -> list[Vitals]:
        """Make the step that was looked at, and say what was seen."""
        optimizer = self.optimizer
        scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        max_norm: float | None = optimizer.max_norm
        self.total_norm = None
        squares = self._squares() if max_norm is not None and self._batches else None
        told = []
        for batch, grads in zip(self._batches, self._grads, strict=True):
            on_device = partial(_to, device=batch.device)
            with torch.cuda.device(batch.device if batch.device.type == "cuda" else -1):
                told += self._step_batch(
                    batch, grads, on_device(squares), max_norm, on_device(scale), on_device(found), vitals
                )
        self._grads = []
        return told

    def _squares(self) -> Tensor:
        """The squared norm of every gradient, in one pass over those of one device and type."""
        (reader,) = modules("reader")
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for batch, grads in zip(self._batches, self._grads, strict=True):
            alike.setdefault((batch.device, batch.dtypes[1]), []).extend(grads)
        found = [
            self._readers.setdefault(kind, reader.Reader()).read(grads, norms=False)[0] for kind, grads in alike.items()
        ]
        return found[0] if len(found) == 1 else torch.cat([part.to(found[0].device) for part in found])

    def _step_batch(
        self,
        batch: Batch,
        grads: Sequence[Tensor],
        squares: Tensor | None,
        max_norm: float | None,
        scale: Tensor | None,
        found: Tensor | None,
        vitals: bool,
    ) -> list[Vitals]:
        adam, sums = modules("adam", "sums")
        group, at = self.optimizer.param_groups[batch.group], batch.addresses
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.device != batch.device:
            lr = float(lr)
        beta1, beta2 = map(float, group["betas"])
        rule = adam.Rule(lr, beta1, beta2, group["eps"], group["weight_decay"], group["maximize"])
        clip = {"squares": squares, "max_norm": max_norm}
        amp = {"grad_scale": scale, "found_inf": found}
        grads_at = at["grads"].table(grads)
        ratios, reduction, well = self._reduce(batch, grads, grads_at)
        prepared = adam.prepare(at["steps"].table(batch.steps), len(batch.steps), rule, **clip, **amp, ratios=ratios)
        lists = {
            "weights": batch.parameters, "firsts": batch.firsts, "seconds": batch.seconds
        }  # fmt: skip
        addresses = {"grads": grads_at} | {name: at[name].table(tensors) for name, tensors in lists.items()}
        aligned = well and all(at[name].aligned for name in addresses)
        tables = adam.Tables(**addresses, dtypes=batch.dtypes, aligned=aligned)
        stochastic = self.optimizer.stochastic_rounding and batch.dtypes[0] == torch.bfloat16
        seed = torch.initial_seed() % 2**31 + 7919 * batch.group if stochastic else None
        try:
            of_chunks = adam.update(
                batch.cut, tables, rule, prepared, vitals=vitals, **amp, seed=seed, reduction=reduction
            )
        except Exception:
            if not self.has_begun:
                torch._foreach_sub_(batch.steps, 1.0)
            raise
        self.has_begun = True
        self._after(batch)
        if squares is not None and self.total_norm is None:
            self.total_norm = prepared.norm[0]
        if of_chunks is None:
            return []
        numbers = sums.finish(batch.cut, of_chunks, maxima=adam.MAXIMA, roots=adam.ROOTS)
        whole = numbers[:, : len(batch.parameters)]
        norms = numbers[0]
        return [
            Vitals(
                parameters=batch.parameters,
                numbers={**dict(zip(adam.VITALS, whole, strict=True)), "step": prepared.steps},
                slices={parameter: norms[part] for parameter, part in batch.slices.items()},
                betas=(beta1, beta2),
                max_norm=max_norm,
            )
        ]


def modules(*names: str) -> list[Any]:
    """Modules of kernels, which are known to be there."""
    return [kernels.ready(name) for name in names]


def _is_ours(group: Mapping[str, Any]) -> bool:
    """Whether a group leaves it to us how its step is made."""
    plain = not (group["amsgrad"] or group["differentiable"]) and group["foreach"] is None
    return plain and not any(isinstance(beta, Tensor) for beta in group["betas"])


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _to(tensor: Tensor | None, *, device: torch.device) -> Tensor | None:
    return tensor if tensor is None else tensor.to(device)
