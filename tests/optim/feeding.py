"""Parameters whose micro-batch gradients are given exactly: the loss (w * c).sum() has the gradient c."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transcription import Transcription

import gradvitals as gv

SHAPES: tuple[tuple[int, ...], ...] = ((4, 5), (6,), (), (3, 2, 2, 2))
"""A matrix, a vector, a scalar and a convolution's kernel."""

Parts = list[list[np.ndarray | None]]
"""For one step: the gradient of each tensor, per micro-batch."""

VR_CLASSES = {"sgd": "VRSGD", "adam": "VRAdam", "adamw": "VRAdamW", "lamb": "VRLAMB", "lars": "VRLARS"}
BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "lamb": lambda *args, **kwargs: gv.optim.LAMB(*args, **kwargs),
    "lars": lambda *args, **kwargs: gv.optim.LARS(*args, **kwargs),
}
VR_NAMES = ("gamma", "beta3", "k", "scale", "granularity", "moments_dtype")


def build(rule: str, params: Any, *, wrap: bool = False, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of a rule, or with `wrap` the wrapper around its base."""
    if not wrap:
        return getattr(gv.optim, VR_CLASSES[rule])(params, **options)
    vr = {name: options.pop(name) for name in VR_NAMES if name in options}
    return gv.optim.VRGD(BASES[rule](params, **options), **vr)


def starting_weights(shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape), np.float32).astype(np.float64) for shape in shapes]


def parameters(weights: Sequence[np.ndarray], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(w, dtype=dtype)) for w in weights]


def gradients(
    steps: int, k: int = 8, shapes: Sequence[tuple[int, ...]] = SHAPES, *, seed: int = 1, signal: float = 0.5
) -> list[Parts]:
    """Signal of each element's own size under unit noise, as numbers that float32 holds exactly."""
    rng = np.random.default_rng(seed)
    means = [signal * rng.standard_normal(shape) for shape in shapes]
    return [
        [[np.asarray(m + rng.standard_normal(m.shape), np.float32).astype(np.float64) for m in means] for _ in range(k)]
        for _ in range(steps)
    ]


def accumulate(params: Sequence[Tensor], parts: Parts, weight: float | None = None) -> None:
    """The ordinary accumulation loop; the loss is multiplied by `weight`, by default 1 / number of micro-batches."""
    weight = 1 / len(parts) if weight is None else weight
    for part in parts:
        pairs = [(p, c) for p, c in zip(params, part, strict=True) if c is not None]
        loss = sum((p * torch.tensor(c, dtype=p.dtype)).sum() for p, c in pairs)
        (loss * weight).backward()


def weighted(parts: Parts, weight: float | None = None) -> Parts:
    """Return what each micro-batch adds to the gradient."""
    weight = 1 / len(parts) if weight is None else weight
    return [[None if c is None else c * weight for c in part] for part in parts]


def train(
    optimizer: torch.optim.Optimizer,
    params: Sequence[Tensor],
    steps: Sequence[Parts],
    *,
    after: Callable[[], Any] = lambda: None,
) -> None:
    for parts in steps:
        accumulate(params, parts)
        optimizer.step()
        optimizer.zero_grad()
        after()


def factors_of_one_step(parts: Parts, *, dtype: torch.dtype = torch.float64, **options: Any) -> list[np.ndarray]:
    """Return the factors of the first VR-SGD step, computed from the change of the weights."""
    params = [nn.Parameter(torch.zeros(np.shape(c), dtype=dtype)) for c in parts[0]]
    optimizer = gv.optim.VRSGD(params, **{"lr": 1.0} | options)
    accumulate(params, parts)
    grads = [p.grad.clone() for p in params]
    optimizer.step()
    return [(-p.detach() / g).double().numpy() for p, g in zip(params, grads, strict=True)]


def compare(
    params: Sequence[Tensor], truth: Transcription, *, rtol: float = 1e-10, atol: float = 1e-12, what: str = "weights"
) -> None:
    for number, (got, expected) in enumerate(zip(params, truth.weights, strict=True)):
        np.testing.assert_allclose(
            got.detach().double().numpy(), expected, rtol=rtol, atol=atol, err_msg=f"{what} of tensor {number}"
        )


LR = {"sgd": 0.1, "adam": 0.02, "adamw": 0.02, "lamb": 0.02, "lars": 1.0}


class Pair:
    """An optimizer and the transcription of its rule, from the same weights.

    Options that are for the optimizer alone, such as `foreach`, do not matter to the transcription.
    """

    def __init__(
        self,
        rule: str,
        *,
        wrap: bool = False,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        names: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float64,
        frozen: Sequence[int] = (),
        **options: Any,
    ) -> None:
        options = {"lr": LR.get(rule, 0.01)} | options
        self.params = parameters(starting_weights(shapes), dtype)
        for number in frozen:
            self.params[number].requires_grad_(False)
        given = self.params if names is None else list(zip(names, self.params, strict=True))
        self.optimizer = build(rule, given, wrap=wrap, **options)
        each = [({"beta3": 0.0} if wrap else {}) | options for _ in shapes]
        self.truth = Transcription(rule, starting_weights(shapes), each, names=names)

    def step(self, *steps: Parts, **tolerance: Any) -> None:
        """Take steps from the gradients of micro-batches; the weights stay equal."""
        for parts in steps:
            accumulate(self.params, parts)
            self.finish(parts, **tolerance)

    def finish(self, parts: Parts, **tolerance: Any) -> None:
        """The optimizer steps with the gradients that it has, the transcription with these micro-batches."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.truth.step(weighted(parts))
        self.compare(**tolerance)

    def compare(self, **tolerance: Any) -> None:
        compare(self.params, self.truth, **tolerance)


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Return whether tensors are equal bit for bit, including NaN."""
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(left, right, strict=True)
    )  # fmt: skip
