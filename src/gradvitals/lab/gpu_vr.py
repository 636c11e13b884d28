"""What variance-reduced steps take on a GPU: adding parts, VRAdamW's two passes, and whole steps beside torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals import kernels, optim

Work = Callable[[], object]
InTurn = Callable[..., dict[str, float]]
Launched = Callable[[Work], tuple[int, float]]

BYTES = {
    "VRGD, second part": 16,
    "VRGD, later parts": 20,
    "VRGD, later parts, added by autograd": 16,
    "torch foreach add": 12,
    "VRAdamW, its two passes": 48,
}
"""A parameter's, in float32. Parts: read, with the sum read and written, and deviations written, and read but for the
second part. FusedReducer: gradient and deviations twice, weight, two moments and the factors' average read and written."""


class _Fresh(torch.autograd.Function):
    """Has gradients of its own for every parameter, as layers do: autograd need not copy them."""

    @staticmethod
    def forward(ctx: Any, given: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.given = given
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch._foreach_mul(list(ctx.given), 1.0)


def backward(parameters: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """One backward that gives every parameter its gradient."""
    loss: Any = _Fresh.apply(list(given), *parameters)  # type: ignore[no-untyped-call]
    loss.backward()


def passes(parameters: Sequence[nn.Parameter]) -> dict[str, Work]:
    """The parts of a variance-reduced step, one by one."""
    adding: Any = kernels.ready("adding")
    sizes, device = [p.numel() for p in parameters], parameters[0].device
    optimizer = optim.VRAdamW(parameters, lr=1e-6)
    given = [1e-3 * torch.randn_like(p) for p in parameters]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few parts, which are meant
        optimizer.zero_grad()
        for _ in range(3):
            backward(parameters, given)
        optimizer.graph_captured()  # what there is now counts again before every step
        optimizer.graph_replayed()
        optimizer.step()
    totals = [p.grad for p in parameters if p.grad is not None]
    noises = [optimizer._parts.noise_of(p) for p in parameters]
    second, later, compared = (adding.Adding(sizes, device) for _ in range(3))

    def step() -> None:
        optimizer.graph_replayed()
        optimizer.step()

    def add(which: Any, *, added: bool, fresh: bool) -> Work:
        return lambda: which.add(given, totals, noises, count=3, rounding=1e-15, added=added, fresh=fresh)

    return {
        "torch foreach add": lambda: torch._foreach_add_(totals, given),
        "VRGD, second part": add(second, added=False, fresh=True),
        "VRGD, later parts": add(later, added=False, fresh=False),
        "VRGD, later parts, added by autograd": add(compared, added=True, fresh=False),
        "VRAdamW, its two passes": step,
    }


def time_steps(
    make: Callable[[], list[nn.Parameter]], num_parts: int, rounds: int, in_turn: InTurn, launched: Launched
) -> dict[str, Any]:
    """A whole step: gradients arrive and are added up, then the update; what collecting adds counts with it.

    Args:
        make: Makes parameters.
        num_parts: Gradients a step is made of.
        rounds: How often each is timed.
        in_turn: Times works.
        launched: Counts the kernels of a work, and the milliseconds that they take.
    """
    plain, reduced = make(), make()
    given = [[1e-3 * torch.randn_like(p) for p in reduced] for _ in range(2)]
    fused = torch.optim.AdamW(plain, lr=1e-6, fused=True)
    vr = optim.VRAdamW(reduced, lr=1e-6, k=num_parts)

    def whole(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Work:
        def work() -> None:
            optimizer.zero_grad()
            for number in range(num_parts):
                backward(parameters, given[number % 2])
            optimizer.step()

        return work

    works = {"fused": fused.step, "fused, whole": whole(fused, plain), "vr, whole": whole(vr, reduced)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few parts, which are meant
        works["fused, whole"]()  # leaves gradients for the step alone
        times = in_turn(works, rounds, repeats=5)
        launches = {name: launched(work) for name, work in works.items()}
    spent = times["fused"] + times["vr, whole"] - times["fused, whole"]
    busy = {name: milliseconds for name, (_, milliseconds) in launches.items()}
    kernels_ms = busy["fused"] + busy["vr, whole"] - busy["fused, whole"]
    return {
        "k": num_parts,
        "fused_ms": times["fused"],
        "vr_ms": spent,
        "ratio": spent / times["fused"],
        "kernels_ms": kernels_ms,
        "kernels_ratio": kernels_ms / busy["fused"],
        "whole_ms": {"fused": times["fused, whole"], "vr": times["vr, whole"]},
        "launches": {"fused": launches["fused, whole"][0], "vr": launches["vr, whole"][0]},
    }
