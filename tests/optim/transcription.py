"""Every rule of `gradvitals.optim`, slowly and literally, in float64 and element by element.

Written from the papers, nothing of `gradvitals` is used: Jiang et al. 2023 (VRGD), You et al. 2017 (LARS), You et al.
2019, Algorithm 2 (LAMB), and torch's own pseudocode of SGD, Adam, AdamW and RMSprop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

Index = tuple[int, ...]
Cells = list[list[tuple[int, Index]]]
"""What is averaged over together: (tensor, element) pairs."""

ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "adam": ADAM,
    "adamw": ADAM | {"weight_decay": 1e-2},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0},
    "lars": {"momentum": 0.9, "weight_decay": 0.0, "trust_coefficient": 1e-3, "eps": 0.0, "nesterov": False},
    "rmsprop": {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0},
}
VR = {"gamma": 0.1, "scale": "paper", "granularity": None}


# -- the statistics of k parts ------------------------------------------------------------------------------------


def mean_of(values: Sequence[float]) -> float:
    """Exact for equal values, so that their variance is exactly 0."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return values[0] + math.fsum(v - values[0] for v in values) / len(values)


def biased_variance(values: Sequence[float]) -> float:
    mean = mean_of(values)
    return math.nan if math.isnan(mean) else math.fsum((v - mean) ** 2 for v in values) / len(values)


def stacked(parts: Sequence[np.ndarray | None], shape: Index) -> np.ndarray:
    """The parts of one tensor; one that did not come counts as zeros."""
    return np.stack([np.zeros(shape) if part is None else np.asarray(part, np.float64) for part in parts])


def moments(parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and biased variance over the first dimension."""
    shape = parts.shape[1:]
    mean, variance = np.zeros(shape), np.zeros(shape)
    for index in np.ndindex(*shape):
        values = [float(v) for v in parts[(slice(None), *index)]]
        mean[index], variance[index] = mean_of(values), biased_variance(values)
    return mean, variance


# -- the factors --------------------------------------------------------------------------------------------------


def layer_name(tensor: str) -> str:
    """The module that holds the tensor."""
    return tensor.rpartition(".")[0]


def cells_of(shapes: Sequence[Index | None], granularity: str, names: Sequence[str] | None = None) -> Cells:
    """Which elements share one mean of r. A shape of None is a tensor that takes no part in this step."""
    grouped: dict[Any, list[tuple[int, Index]]] = {}
    for tensor, shape in enumerate(shapes):
        for index in np.ndindex(*(shape or ())) if shape is not None else ():
            if granularity == "layer":
                assert names is not None
                key: Any = layer_name(names[tensor])
            elif granularity == "row" and len(shape) > 1:
                key = (tensor, index[0])
            elif granularity == "element":
                key = (tensor, index)
            else:
                key = tensor
            grouped.setdefault(key, []).append((tensor, index))
    return list(grouped.values())


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def paper_factors(parts: Sequence[np.ndarray | None], gammas: Sequence[float], cells: Cells) -> list[np.ndarray | None]:
    """s = clip(r / mean r, gamma, 1) with r = mean^2 / biased variance; without variance 1, and not in the mean."""
    both = [None if p is None else moments(p) for p in parts]
    factors = [None if p is None else np.ones(p.shape[1:]) for p in parts]
    for cell in cells:
        ratio: dict[tuple[int, Index], float] = {}
        for tensor, index in cell:
            mean, variance = (m[index] for m in both[tensor])
            if variance > 0:  # not 0, not nan
                ratio[tensor, index] = mean**2 / variance
        average = math.fsum(ratio.values()) / len(ratio) if ratio else math.nan
        for (tensor, index), r in ratio.items():
            gamma = gammas[tensor]
            factors[tensor][index] = clip(r / average, gamma, 1.0) if average > 0 else 1.0
    return factors


def wiener_factors(
    parts: Sequence[np.ndarray | None], gammas: Sequence[float], granularity: str
) -> list[np.ndarray | None]:
    """Shrinkage of a noisy mean: nu is the noise power of the mean, found from the unbiased variance."""
    factors: list[np.ndarray | None] = []
    for part, gamma in zip(parts, gammas, strict=True):
        if part is None:
            factors.append(None)
            continue
        k = len(part)
        mean, variance = moments(part)
        noise = variance * k / (k - 1) / k
        factor = np.ones(mean.shape)
        finite = [i for i in np.ndindex(*mean.shape) if math.isfinite(mean[i]) and math.isfinite(noise[i])]
        if granularity == "hierarchical":
            signal = max(0.0, math.fsum(mean[i] ** 2 - noise[i] for i in finite) / max(len(finite), 1))
            for i in finite:
                if noise[i] > 0:
                    factor[i] = clip(signal / (signal + noise[i]), gamma, 1.0)
        else:
            for cell in cells_of([mean.shape], granularity):
                members = [i for _, i in cell if i in finite]
                power = math.fsum(mean[i] ** 2 for i in members)
                lost = math.fsum(noise[i] for i in members)
                for i in members:
                    if noise[i] > 0:
                        factor[i] = clip(max(0.0, 1 - lost / power) if power > 0 else 0.0, gamma, 1.0)
        factors.append(factor)
    return factors


# -- the rules ----------------------------------------------------------------------------------------------------


def norm(values: Iterable[float]) -> float:
    return math.sqrt(math.fsum(float(v) ** 2 for v in values))


def sgd(w: np.ndarray, g: np.ndarray, s: dict[str, Any], o: dict[str, Any]) -> None:
    """torch.optim.SGD."""
    first = "buffer" not in s
    buffer = s.setdefault("buffer", np.zeros(w.shape))
    for i in np.ndindex(*w.shape):
        d = g[i] + o["weight_decay"] * w[i]
        if o["momentum"]:
            buffer[i] = d if first else o["momentum"] * buffer[i] + (1 - o["dampening"]) * d
            d = d + o["momentum"] * buffer[i] if o["nesterov"] else buffer[i]
        w[i] -= o["lr"] * d


def _adam_direction(g: float, i: Index, s: dict[str, Any], o: dict[str, Any]) -> float:
    b1, b2 = o["betas"]
    s["m"][i] = b1 * s["m"][i] + (1 - b1) * g
    s["v"][i] = b2 * s["v"][i] + (1 - b2) * g**2
    s["largest"][i] = max(s["largest"][i], s["v"][i])
    v = s["largest"][i] if o.get("amsgrad") else s["v"][i]
    m_hat, v_hat = s["m"][i] / (1 - b1 ** s["t"]), v / (1 - b2 ** s["t"])
    return m_hat / (math.sqrt(v_hat) + o["eps"]) if m_hat else 0.0


def _adam_begins(w: np.ndarray, s: dict[str, Any]) -> None:
    s["t"] = s.get("t", 0) + 1
    for name in ("m", "v", "largest"):
        s.setdefault(name, np.zeros(w.shape))


def adam(w: np.ndarray, g: np.ndarray, s: dict[str, Any], o: dict[str, Any]) -> None:
    """Kingma and Ba 2014, with the decay added to the gradient."""
    _adam_begins(w, s)
    for i in np.ndindex(*w.shape):
        w[i] -= o["lr"] * _adam_direction(g[i] + o["weight_decay"] * w[i], i, s, o)


def adamw(w: np.ndarray, g: np.ndarray, s: dict[str, Any], o: dict[str, Any]) -> None:
    """Loshchilov and Hutter 2017: the decay goes past the moments."""
    _adam_begins(w, s)
    for i in np.ndindex(*w.shape):
        w[i] -= o["lr"] * o["weight_decay"] * w[i]
        w[i] -= o["lr"] * _adam_direction(g[i], i, s, o)


def lamb(w: np.ndarray, g: np.ndarray, s: dict[str, Any], o: dict[str, Any]) -> None:
    """You et al. 2019, Algorithm 2, phi the identity; a trust ratio of 1 where a norm is 0."""
    _adam_begins(w, s)
    update = np.zeros(w.shape)
    for i in np.ndindex(*w.shape):
        update[i] = _adam_direction(g[i], i, s, o) + o["weight_decay"] * w[i]
    size, length = norm(w.ravel()), norm(update.ravel())
    trust = size / length if size > 0 and length > 0 else 1.0
    for i in np.ndindex(*w.shape):
        w[i] -= o["lr"] * trust * update[i]


def lars(w: np.ndarray, g: np.ndarray, s: dict[str, Any], o: dict[str, Any]) -> None:
    """You et al. 2017: a learning rate for each tensor inside the momentum; 1 where a norm is 0."""
    size, length = norm(w.ravel()), norm(g.ravel())
    local = 1.0
    if size > 0 and length > 0:
        local = o["trust_coefficient"] * size / (length + o["weight_decay"] * size + o["eps"])
    velocity = s.setdefault("velocity", np.zeros(w.shape))
    for i in np.ndindex(*w.shape):
        d = o["lr"] * local * (g[i] + o["weight_decay"] * w[i])
        velocity[i] = o["momentum"] * velocity[i] + d
        w[i] -= d + o["momentum"] * velocity[i] if o["nesterov"] else velocity[i]


def rmsprop(w: np.ndarray, g: np.ndarray, s: dict[str, Any], o: dict[str, Any]) -> None:
    """torch.optim.RMSprop."""
    square = s.setdefault("square", np.zeros(w.shape))
    buffer = s.setdefault("buffer", np.zeros(w.shape))
    for i in np.ndindex(*w.shape):
        d = g[i] + o["weight_decay"] * w[i]
        square[i] = o["alpha"] * square[i] + (1 - o["alpha"]) * d**2
        d = d / (math.sqrt(square[i]) + o["eps"])
        if o["momentum"]:
            buffer[i] = o["momentum"] * buffer[i] + d
            d = buffer[i]
        w[i] -= o["lr"] * d


RULES: dict[str, Callable[[np.ndarray, np.ndarray, dict[str, Any], dict[str, Any]], None]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
    "lamb": lamb,
    "lars": lars,
    "rmsprop": rmsprop,
}


class Transcription:
    """An optimizer, with or without variance reduction.

    Args:
        rule: Name of the base rule.
        weights: Starting values.
        options: Of each tensor, since every one may be in a group of its own.
        vr: Whether gradients are scaled first.
        names: Of the tensors, for granularity "layer".
    """

    def __init__(
        self,
        rule: str,
        weights: Sequence[np.ndarray],
        options: Sequence[dict[str, Any]],
        *,
        vr: bool = True,
        names: Sequence[str] | None = None,
    ) -> None:
        self.rule, self.vr, self.names = rule, vr, names
        beta3 = 0.9 if rule in ("adam", "adamw", "lamb") else 0.0
        self.options = [DEFAULTS[rule] | VR | {"beta3": beta3, "maximize": False} | o for o in options]
        self.weights = [np.array(w, np.float64) for w in weights]
        self.states: list[dict[str, Any]] = [{} for _ in weights]
        self.steps = 0
        self.factors: list[np.ndarray | None] = []
        """The last step's, as they were used."""

    def _plain_factors(self, parts: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        gammas = [o["gamma"](self.steps) if callable(o["gamma"]) else o["gamma"] for o in self.options]
        first = self.options[0]
        if first["scale"] == "wiener":
            return wiener_factors(parts, gammas, first["granularity"] or "hierarchical")
        shapes = [None if p is None else p.shape[1:] for p in parts]
        return paper_factors(parts, gammas, cells_of(shapes, first["granularity"] or "tensor", self.names))

    def step(self, parts: Sequence[Sequence[np.ndarray | None]]) -> None:
        """Take one step from the contributions of every micro-batch to the gradient, which is their sum.

        Args:
            parts: For each micro-batch its contribution to each tensor, None where there was none.
        """
        whole = [
            None if all(part[i] is None for part in parts) else stacked([part[i] for part in parts], w.shape)
            for i, w in enumerate(self.weights)
        ]
        factors = (
            self._plain_factors(whole) if self.vr else [None if p is None else np.ones(p.shape[1:]) for p in whole]
        )
        for w, part, factor, state, o in zip(self.weights, whole, factors, self.states, self.options, strict=True):
            if part is None or factor is None:
                continue
            if self.vr and o["beta3"]:
                state["p_t"] = state.get("p_t", 0) + 1
                state["p"] = o["beta3"] * state.get("p", np.zeros(w.shape)) + (1 - o["beta3"]) * factor
                factor[...] = state["p"] / (1 - o["beta3"] ** state["p_t"])
            g = np.zeros(w.shape)
            for i in np.ndindex(*w.shape):
                total = math.fsum(part[(slice(None), *i)]) if np.isfinite(part[(slice(None), *i)]).all() else math.nan
                g[i] = factor[i] * total * (-1 if o["maximize"] else 1)
            RULES[self.rule](w, g, state, o)
        self.factors = list(factors)
        self.steps += 1
