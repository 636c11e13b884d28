"""Question "layers": activations, effective ranks and the update that the optimizer plans."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from gradvitals.collect.parameters import layer_of
from gradvitals.collect.reductions import odd_stride
from gradvitals.functional.norms import squared_norm

KINDS: dict[Any, str] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu_), "relu"),
    F.relu6: "relu6",
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, Tensor.sigmoid_, torch.sigmoid_, F.sigmoid), "sigmoid"),
    **dict.fromkeys((torch.tanh, Tensor.tanh, Tensor.tanh_, torch.tanh_, F.tanh), "tanh"),
}
RANGES = {"sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}
NEAR = 0.01
"""A value this close to an end of the range, relative to its width, is saturated: its slope is below 4 % of the top."""

ADDITIONS = ("add", "__add__", "__radd__", "add_")
SMOOTH = ("gelu", "silu", "swish", "mish")
"""Parts of class names of activations that use a sigmoid or a tanh and do not saturate."""

CHANNELS_FIRST = (_ConvNd, _NormBase, nn.GroupNorm)

Key = tuple[str, str, int]
"""Module, kind, and the index among calls of this kind in one forward pass."""


@dataclass
class Activation:
    """Sums over all outputs of one activation of one module."""

    active: Tensor
    """For each unit, whether it was ever above zero."""
    zeros: int = 0
    saturated: int = 0
    values: int = 0


class Activations(TorchFunctionMode):
    """Observes the activations of a model while it runs, called as modules or as functions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.found: dict[Key, Activation] = {}
        self.notes: dict[str, None] = {}
        """Names of what could not be observed, once each."""
        self._left_out: set[Key] = set()
        self._modules: list[tuple[str, nn.Module]] = []
        """The modules whose forward is running, the innermost last."""
        self._calls: dict[tuple[str, str], int] = {}
        self._last: tuple[Key, Tensor] | None = None
        self._channels_first: bool | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe inside the block; the hooks are removed afterwards."""
        handles = []
        try:
            for name, module in self.model.named_modules():
                handles.append(module.register_forward_pre_hook(lambda inner, *_, name=name: self._enter(name, inner)))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            with self:
                yield
        finally:
            self._modules.clear()
            self._last = None
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function; count its output if it is an activation."""
        result = func(*args, **(kwargs or {}))
        kind = KINDS.get(func) if callable(func) and isinstance(result, Tensor) else None
        if kind is not None:
            self._count(kind, result)
        elif self._last is not None and self._last[0][1] == "tanh" and getattr(func, "__name__", "") in ADDITIONS:
            # 1 + tanh(...) is a part of GELU, written out, and saturates no more than that does.
            has_one = any(isinstance(arg, (int, float)) and arg == 1 for arg in args)
            if has_one and any(arg is self._last[1] for arg in args):
                self._left_out.add(self._last[0])
        return result

    def _enter(self, name: str, module: nn.Module) -> None:
        if module is self.model:
            self._calls.clear()
            self._channels_first = None
        self._modules.append((name, module))

    def _leave(self, module: nn.Module, _: object, output: Any) -> None:
        if self._modules:
            self._modules.pop()
        if isinstance(module, CHANNELS_FIRST):
            self._channels_first = True
        elif next(module.parameters(recurse=False), None) is not None:
            self._channels_first = False
        # The last activation of a model is meant to reach the ends of its range.
        if module is self.model and self._last is not None and output is self._last[1] and self._last[0][1] in RANGES:
            self._left_out.add(self._last[0])

    def _count(self, kind: str, result: Tensor) -> None:
        values = result.detach()
        name, module = self._modules[-1] if self._modules else ("", self.model)
        if values.dim() == 0 or not values.numel() or any(part in type(module).__name__.lower() for part in SMOOTH):
            return
        number = self._calls[name, kind] = self._calls.get((name, kind), 0) + 1
        key = (name, kind, number)
        self._last = (key, result)
        # Units are channels after a convolution, and the last dimension otherwise.
        first = self._channels_first if self._channels_first is not None else values.dim() >= 4
        unit = 1 if first and values.dim() >= 3 else values.dim() - 1
        active = (values > 0).movedim(unit, 0).flatten(1).any(dim=1) if values.dim() > 1 else values > 0
        record = self.found.setdefault(key, Activation(torch.zeros_like(active)))
        if record.active.shape != active.shape:
            place = name or "the model"
            self.notes[f"layers: {kind} in {place} changes its number of units; some batches were left out"] = None
            return
        record.active |= active
        record.values += values.numel()
        record.zeros += int((values == 0).sum())
        if kind in RANGES:
            low, high = RANGES[kind]
            margin = NEAR * (high - low)
            record.saturated += int(((values < low + margin) | (values > high - margin)).sum())

    def records(self) -> list[dict[str, Any]]:
        """Returns one plain record per activation."""
        return [
            {
                "module": module if number == 1 else f"{module or 'forward'}, {kind} {number}",
                "kind": kind,
                "units": found.active.numel(),
                "dead": (dead := found.active.numel() - int(found.active.sum()) if "relu" in kind else 0),
                "dead_share": dead / max(1, found.active.numel()),
                "zero_share": found.zeros / max(1, found.values),
                "saturated_share": found.saturated / max(1, found.values) if kind in RANGES else math.nan,
                "values": found.values,
            }
            for (module, kind, number), found in self.found.items()
            if (module, kind, number) not in self._left_out
        ]


MAX_ROWS = 512
MAX_COLUMNS = 4096
"""The most rows and columns for an effective rank; larger gradients use every s-th."""


def effective_rank(matrix: Tensor) -> float:
    r"""How many directions a matrix has, weighted by their size.

    .. math:: \exp\Big(-\sum_i p_i \ln p_i\Big), \qquad p_i = \sigma_i / \sum_j \sigma_j

    with the singular values :math:`\sigma_i`. It is 1 for an outer product and n for n equal singular values. The
    singular values come from the smaller Gram matrix, in float64.

    Args:
        matrix: A weight's gradient; dimensions beyond the first are flattened to columns, as for a convolution.

    Returns:
        The effective rank; nan for a vector, for zeros and for non-finite values.

    Example:
        >>> round(effective_rank(torch.eye(3)), 6), round(effective_rank(torch.ones(3, 5)), 6)
        (3.0, 1.0)

    References:
        Roy and Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.
    """
    rows = _as_matrix(matrix)
    largest = float(rows.abs().max()) if rows.numel() else 0.0
    if largest == 0 or not math.isfinite(largest):
        return math.nan
    scaled = rows.double() / largest
    gram = scaled @ scaled.T if len(scaled) <= scaled.shape[1] else scaled.T @ scaled
    values = torch.linalg.eigvalsh(gram).clamp_min(0)
    # An eigenvalue that is only rounding is not a direction.
    values = values[values > values.max() * len(gram) * torch.finfo(torch.float64).eps].sqrt()
    shares = values / values.sum()
    return math.exp(-float((shares * shares.log()).sum()))


def _as_matrix(tensor: Tensor) -> Tensor:
    """Returns a matrix of bounded size; empty for a vector."""
    if tensor.dim() < 2 or not tensor.numel():
        return tensor.new_zeros(0, 0)
    rows = tensor.detach().reshape(tensor.shape[0], -1)
    return rows[:: odd_stride(rows.shape[0], MAX_ROWS), :: odd_stride(rows.shape[1], MAX_COLUMNS)]


def planned_update(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]
) -> list[Tensor]:
    """Returns by how much one optimizer step with these gradients would change each parameter.

    A copy of the optimizer makes the step, with its moments, on copies of the parameters. Errors of that step, such
    as a missing closure, are raised.
    """
    copies = {id(p): nn.Parameter(p.detach().clone()) for p in parameters}
    memo: dict[int, Any] = dict(copies)
    twin = copy.deepcopy(optimizer, memo)
    for p, grad in zip(parameters, grads, strict=True):
        copies[id(p)].grad = grad.to(p.dtype)
    with torch.enable_grad():
        twin.step()
    return [copies[id(p)].detach() - p.detach() for p in parameters]


def layers_record(
    parameters: Mapping[str, nn.Parameter],
    mean_grads: Sequence[Tensor],
    updates: Sequence[Tensor] | None,
    lr: float | None,
    activations: list[dict[str, Any]],
) -> dict[str, Any]:
    """Returns the answer as a plain record."""
    tensors = []
    for i, (name, parameter) in enumerate(parameters.items()):
        grad = mean_grads[i]
        grad_norm, weight_norm = math.sqrt(squared_norm(grad)), math.sqrt(squared_norm(parameter))
        update_norm = math.nan if lr is None else lr * grad_norm
        if updates is not None:
            update_norm = math.sqrt(squared_norm(updates[i]))
        rank, full = effective_rank(grad), min(_as_matrix(grad).shape)
        tensors.append(
            {
                "name": name,
                "layer": layer_of(name),
                "grad_norm": grad_norm,
                "weight_norm": weight_norm,
                "update_norm": update_norm,
                "update_ratio": update_norm / weight_norm if weight_norm > 0 else math.nan,
                "effective_rank": rank,
                "full_rank": full,
                "rank_share": rank / full if full else math.nan,
            }
        )
    by = "optimizer" if updates is not None else "lr" if lr is not None else "none"
    return {"tensors": tensors, "update_by": by, "activations": activations}
