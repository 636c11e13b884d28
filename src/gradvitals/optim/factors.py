"""From the parts' sums to a factor for every element: the paper's rule, Wiener's, or the user's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gradvitals.functional import vrgd_scale_from_variance, wiener_scale
from gradvitals.optim.blocks import Block, in_memory_order

Rule = Callable[[Tensor, Tensor, int, float], Tensor]
"""A factor for every element of a tensor, from the mean and biased variance of its parts, their number, and gamma."""

PaperGranularity = Literal["tensor", "layer", "row"]
WienerGranularity = Literal["element", "row", "tensor", "hierarchical"]
Granularity = PaperGranularity | WienerGranularity

GRANULARITIES: dict[str, tuple[str, ...]] = {"paper": get_args(PaperGranularity), "wiener": get_args(WienerGranularity)}
DEFAULT_GRANULARITY = {"paper": "tensor", "wiener": "hierarchical"}


def check_rule(scale: str | Rule, granularity: str | None) -> None:
    """Refuse a rule or a granularity that there is not, with the names of those there are."""
    if callable(scale):
        if granularity is not None:
            raise ValueError(f"granularity is {granularity!r}, but scale is a function, which decides that itself")
        return
    if scale not in GRANULARITIES:
        raise ValueError(f"scale is {scale!r}; expected 'paper', 'wiener' or a function of (mean, variance, k, gamma)")
    if granularity is not None and granularity not in GRANULARITIES[scale]:
        choices = ", ".join(map(repr, GRANULARITIES[scale]))
        raise ValueError(f"granularity is {granularity!r}; expected one of {choices} for scale={scale!r}")


@dataclass
class Share:
    """Some gradients of one group, and what is needed to scale them."""

    parameters: list[Tensor]
    grads: list[Tensor]
    """Sums of `num_added` parts, which are scaled in place."""
    noises: list[Tensor]
    """Summed squared deviations of `num_parts` parts; none where not positive."""
    flat_noise: Tensor
    """The same one after the other."""
    num_added: int
    num_parts: int
    """More than `num_added` where gradients are averages over ranks."""
    gamma: float
    rule: str | Rule
    granularity: str
    layers: list[str]
    averages: list[Tensor | None]
    """Moving averages of the factors, None where there is none yet. Empty where none are kept."""
    weights: list[float]
    """Of the new factors in the averages."""
    compiled_weights: list[Tensor]
    """The same, where the step is compiled."""
    at_once: bool
    block: Block | None
    """Whose parameters these are, where none is missing."""


def factors_of(share: Share) -> list[Tensor]:
    """The factor of every element, by the share's rule."""
    if share.rule == "paper" and share.granularity == "tensor" and share.at_once and not torch.compiler.is_compiling():
        return paper_factors_at_once(share)
    return [_factor(share, *_moments(share, position)) for position in range(len(share.grads))]


def _moments(share: Share, position: int) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of a tensor's parts."""
    noise = share.noises[position]
    wide = torch.promote_types(noise.dtype, torch.float32)
    return share.grads[position].to(wide) / share.num_added, noise.to(wide).clamp(min=0) / share.num_parts


def _factor(share: Share, mean: Tensor, variance: Tensor) -> Tensor:
    if callable(share.rule):
        factor: Any = share.rule(mean, variance, share.num_parts, share.gamma)
        if not isinstance(factor, Tensor) or factor.shape != mean.shape:
            given = f"shape {tuple(factor.shape)}" if isinstance(factor, Tensor) else f"a {type(factor).__name__}"
            raise ValueError(f"scale returned {given}; expected a factor for every element, shape {tuple(mean.shape)}")
        # What holds for every rule need not be in each: without variance there is nothing to divide by.
        return torch.where(variance > 0, factor, 1.0).nan_to_num(nan=1.0)
    if share.rule == "wiener":
        level: Any = share.granularity
        return wiener_scale(mean, variance, share.num_parts, level=level, gamma=share.gamma)
    return vrgd_scale_from_variance(mean, variance, share.gamma, by_row=share.granularity == "row")


def averaged(share: Share, factors: list[Tensor]) -> list[Tensor]:
    """Take the factors into their moving averages, in place, and return those.

    The averages are kept bias-corrected: with weights (1 - beta) / (1 - beta^t) they are what a moving average that
    began at zero is after division by 1 - beta^t.

    Args:
        share: has the averages.
        factors: of this step; they become the average where there is none.
    """
    # A first average is laid out like the gradient and by itself: factors are pieces of one large tensor.
    used = [
        torch.empty_like(grad).copy_(factor) if average is None else average.to(grad.dtype)
        for average, factor, grad in zip(share.averages, factors, share.grads, strict=True)
    ]
    if share.compiled_weights:
        for average, factor, part in zip(used, factors, share.compiled_weights, strict=True):
            average.add_((factor - average) * part)
        return used
    for weight in set(share.weights):  # one, unless parameters were added or had no gradient at times
        alike = [i for i, other in enumerate(share.weights) if other == weight]
        torch._foreach_lerp_([used[i] for i in alike], [factors[i] for i in alike], weight)
    return used


def weights_of(states: Sequence[Mapping[str, Any]], beta3: float) -> list[float]:
    """Of the new factors in each parameter's moving average."""
    steps = [state.get("factor_step", 0) + 1 for state in states]
    by_step = {step: (1 - beta3) / (1 - beta3**step) for step in set(steps)}
    return [by_step[step] for step in steps]


def layers_of(group: dict[str, Any], parameters: Sequence[Tensor]) -> list[str]:
    """The module each parameter belongs to."""
    names = {p: name.rpartition(".")[0] for p, name in zip(group["params"], group["param_names"], strict=True)}
    return [names[parameter] for parameter in parameters]


def factors_of_layers(shares: Sequence[Share]) -> dict[int, list[Tensor]]:
    """The paper's factors where r is divided by its mean over all tensors of a layer, whatever group they are in.

    Returns:
        For the index of each share that is to be treated so, its factors.
    """
    factors = {index: list(share.grads) for index, share in enumerate(shares) if share.layers}
    members: dict[Hashable, list[tuple[int, int]]] = {}
    for index in factors:
        for position, (layer, grad) in enumerate(zip(shares[index].layers, shares[index].grads, strict=True)):
            members.setdefault((layer, grad.device, grad.dtype), []).append((index, position))
    for places in members.values():
        moments = [_moments(shares[index], position) for index, position in places]
        mean, variance = (torch.cat([tensor.flatten() for tensor in column]) for column in zip(*moments, strict=True))
        pieces = vrgd_scale_from_variance(mean, variance, 0.0).split([part.numel() for part, _ in moments])
        for (index, position), (part, _), piece in zip(places, moments, pieces, strict=True):
            factors[index][position] = piece.view(part.shape).clamp(min=shares[index].gamma)
    return factors


def paper_factors_at_once(share: Share) -> list[Tensor]:
    """The paper's factors of all tensors, the same as `vrgd_scale_from_variance` of each, in few operations."""
    sizes = [grad.numel() for grad in share.grads]
    noise = share.flat_noise
    flats = [_flat(grad, like) for grad, like in zip(share.grads, share.noises, strict=True)]
    wide = torch.promote_types(noise.dtype, torch.float32)
    ratio = (flats[0] if len(flats) == 1 else torch.cat(flats)).to(wide).square().div_(noise)
    counted = (noise > 0) & torch.isfinite(ratio)
    inverses = _sums(counted.to(wide).split(sizes)) / _sums(torch.where(counted, ratio, 0.0).split(sizes))
    pieces = ratio.split(sizes)
    torch._foreach_mul_(pieces, inverses.unbind())
    ratio.clamp_(share.gamma, 1.0).masked_fill_(~counted, 1.0).nan_to_num_(nan=1.0)
    return [
        ratio.as_strided(like.shape, like.stride(), piece.storage_offset())
        for piece, like in zip(pieces, share.noises, strict=True)
    ]


def _flat(grad: Tensor, like: Tensor) -> Tensor:
    """A gradient's elements in the order in which another tensor has them in memory."""
    if grad.stride() != like.stride():
        grad = torch.empty_like(like, dtype=grad.dtype).copy_(grad)
    return in_memory_order(grad)


def _sums(tensors: Sequence[Tensor]) -> Tensor:
    """Sums of tensors that have no negative elements: their 1-norms, which foreach has on a GPU."""
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(tensors), 1))
    return torch.stack([tensor.sum() for tensor in tensors])
