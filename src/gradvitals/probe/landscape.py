r"""Question "landscape": the loss on the line of the next step, and how sharp it is there.

Gradient descent with learning rate :math:`\eta` is stable while the largest eigenvalue of the Hessian is below
:math:`2/\eta`: the edge of stability. Reference: Cohen et al., "Gradient descent on neural networks typically occurs at
the edge of stability", ICLR 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradvitals.probe.data import Subject
from gradvitals.probe.gradients import dense_gradients, gradients
from gradvitals.probe.layers import planned_update
from gradvitals.probe.state import same_randomness

FACTORS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Points on the line, in units of the learning rate."""

MAX_ITERATIONS = 50
TOLERANCE = 1e-3
RESIDUAL = 0.1
"""An eigenvalue has converged if its relative change and its relative residual are below these."""

DIFFERENCE = 1e-2
"""Step length for finite differences, relative to the norm of the parameters."""

Vector = list[Tensor]


class Curvature:
    """Products of the Hessian of one batch's loss with vectors: by double backward or finite differences."""

    def __init__(self, subject: Subject, parameters: Sequence[nn.Parameter], batch: Any) -> None:
        self.subject, self.parameters, self.batch = subject, list(parameters), batch
        self.method = "double backward"
        self._graph: list[tuple[Tensor, int]] | None = None

    def loss(self) -> float:
        """Returns the loss at the current parameters."""
        with torch.no_grad(), same_randomness():
            return float(self.subject.loss(self.batch))

    def gradient(self) -> Vector:
        """Returns the gradient at the current parameters."""
        with same_randomness():
            return gradients(self.subject.loss(self.batch), self.parameters)

    def forget(self) -> None:
        """Free the graph, which is large."""
        self._graph = None

    def times(self, vector: Vector) -> Vector:
        """Returns the Hessian times a vector."""
        if self.method == "double backward":
            try:
                return self._by_double_backward(vector)
            except (RuntimeError, NotImplementedError):  # an operation without a second derivative
                self.method, self._graph = "differences", None
        scale = DIFFERENCE * max(_norm([p.detach() for p in self.parameters]), 1.0) / max(_norm(vector), 1e-30)
        sides = []
        for sign in (1.0, -1.0):
            with moved(self.parameters, vector, sign * scale):
                sides.append(self.gradient())
        return [(ahead - behind) / (2 * scale) for ahead, behind in zip(*sides, strict=True)]

    def _by_double_backward(self, vector: Vector) -> Vector:
        if self._graph is None:
            # Fused attention kernels have no second derivative.
            with same_randomness(), sdpa_kernel(SDPBackend.MATH):
                loss = self.subject.loss(self.batch)
                found = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
            if any(g is not None and not g.requires_grad for g in found):
                # Either the loss is linear here, or an operation hides its second derivative: autograd cannot tell.
                raise NotImplementedError
            self._graph = [(g, place) for place, g in enumerate(found) if g is not None]
        outputs, at = [g for g, _ in self._graph], [vector[place] for _, place in self._graph]
        product = torch.autograd.grad(outputs, self.parameters, at, retain_graph=True, allow_unused=True)
        return dense_gradients(product, self.parameters)


def top_eigenvalue(curvature: Curvature, tick: Callable[[str], object] = lambda label: None) -> tuple[float, int, bool]:
    r"""Largest eigenvalue of the Hessian by power iteration.

    .. math:: v \leftarrow Hv / \|Hv\|, \qquad \lambda = v'Hv

    This finds the eigenvalue of the largest size. If that one is negative, a second run on
    :math:`H + |\lambda| I`, whose eigenvalues are all positive, finds the largest.

    Returns:
        The eigenvalue, the number of products, and whether it converged.
    """
    value, count, converged = _power_iteration(curvature, 0.0, MAX_ITERATIONS, tick)
    if value < 0:
        # Shifted eigenvalues are close together, so the iteration converges more slowly.
        value, more, converged = _power_iteration(curvature, -value, 2 * MAX_ITERATIONS, tick)
        count += more
    return value, count, converged


def _power_iteration(
    curvature: Curvature, shift: float, limit: int, tick: Callable[[str], object]
) -> tuple[float, int, bool]:
    generator = torch.Generator().manual_seed(0)
    vector = _unit([torch.randn(p.shape, generator=generator).to(p) for p in curvature.parameters])
    value = math.nan
    for iteration in range(1, limit + 1):
        product = curvature.times(vector)
        before, value = value, _dot(vector, product)
        tick("sharpness")
        # The residual: a value that hardly changes may only be converging slowly.
        rest = _norm([h - value * v for h, v in zip(product, vector, strict=True)])
        if abs(value - before) <= TOLERANCE * abs(value) and rest <= RESIDUAL * abs(value):
            return value, iteration, True
        shifted = [h + shift * v for h, v in zip(product, vector, strict=True)] if shift else product
        length = _norm(shifted)
        if length == 0 or not math.isfinite(length):
            return value, iteration, length == 0
        vector = [p / length for p in shifted]
    return value, limit, False


def landscape_record(
    subject: Subject,
    parameters: Sequence[nn.Parameter],
    batch: Any,
    *,
    lr: float | None,
    optimizer: torch.optim.Optimizer | None,
    tick: Callable[[str], object] = lambda label: None,
) -> tuple[dict[str, Any], list[str]]:
    """Returns the answer as a plain record, and notes on what differs from the request.

    The line follows the next step of the optimizer, or else of plain gradient descent.
    """
    notes: list[str] = []
    curvature = Curvature(subject, parameters, batch)
    grad = curvature.gradient()
    direction, name, unit = [-g for g in grad], "gradient", lr
    if optimizer is not None:
        try:
            # The update of a whole step, so that factor 1 is what the optimizer would do.
            direction, name, unit = planned_update(optimizer, parameters, grad), "update", 1.0
        except Exception as error:
            notes.append(f"landscape: the optimizer's step could not be made on a copy ({error}); used the gradient's")
    length = _norm(direction)
    bend = _dot(direction, curvature.times(direction)) / length**2 if length > 0 else math.nan
    value, iterations, converged = top_eigenvalue(curvature, tick)
    curvature.forget()
    if unit is None:
        unit = 1 / abs(bend) if bend and math.isfinite(bend) else 1.0
    steps = [factor * unit for factor in FACTORS]
    losses = []
    for step in steps:
        with moved(parameters, direction, step):
            losses.append(curvature.loss())
        tick("line")
    finite = [(loss, step) for loss, step in zip(losses, steps, strict=True) if math.isfinite(loss)]
    edge = math.nan if math.isnan(value) else 2 / value if value > 0 else math.inf
    record = {
        "direction": name,
        "lr": lr,
        "line": {"factor": list(FACTORS), "step": steps, "loss": losses},
        "unit": unit,
        "best_step": min(finite)[1] if finite else math.nan,
        "curvature": bend,
        "slope": _dot(grad, direction) / length if length > 0 else math.nan,
        "top_eigenvalue": value,
        "iterations": iterations,
        "converged": converged,
        "method": curvature.method,
        "edge": edge,
        "sharpness_limit": 2 / lr if lr else None,
        "lr_over_edge": lr / edge if lr else None,
    }
    return record, notes


@contextmanager
def moved(parameters: Sequence[nn.Parameter], direction: Vector, step: float) -> Iterator[None]:
    """Inside, the parameters are moved by `step` along a direction, as new tensors: nothing is overwritten."""
    home = [p.data for p in parameters]
    try:
        for p, d in zip(parameters, direction, strict=True):
            p.data = p.data + step * d.to(p.dtype)
        yield
    finally:
        for p, data in zip(parameters, home, strict=True):
            p.data = data


def _dot(left: Vector, right: Vector) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(left, right, strict=True))


def _norm(vector: Vector) -> float:
    return math.sqrt(_dot(vector, vector))


def _unit(vector: Vector) -> Vector:
    length = _norm(vector)
    return [v / length for v in vector]
