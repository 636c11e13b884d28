"""What readings should show: the same model, dense, in one process, in float64. Nothing of gradvitals is used here.

Before every step the weights are those that the ranks together have; from them autograd finds the contribution
h = w g of every micro-batch of every data worker to the gradient of the step. All else follows by the definitions in
docs/measuring.md, docs/estimators.md and science.md.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from rank_nets import HEADS, WIDTH, Net, batch, loss_of, new_net
from rank_pieces import put_together
from rank_scenarios import Scenario
from scipy import special

Vector = np.ndarray
Table = dict[str, float]
"""A number for every tensor, layer or head, and under "" for the whole model."""


def merged(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the ranks have seen together: each the tensors that it holds, the last the losses of a pipeline."""
    result: dict[str, Any] = {"scale": records[0]["scale"]}
    for key in ("weights", "grads", "moments"):
        result[key] = []
        for step in zip(*(record[key] for record in records), strict=True):
            names = dict.fromkeys(name for rank in step for name in rank)
            result[key].append({name: put_together([rank[name] for rank in step if name in rank]) for name in names})
    return result


def layer_of(tensor: str) -> str:
    found = re.match(r"(.*?(?:^|\.)\d+)\.", tensor)
    return found.group(1) if found else tensor.rpartition(".")[0] or tensor


def signal_and_noise(parts: Vector, sizes: Vector, weights: Vector) -> tuple[float, float]:
    """Unbiased |mu|^2 and tr Sigma of one sample, from the scatter of the mean gradients g = h / w about their mean."""
    weights = weights / weights.sum()
    means = parts / weights[:, None]
    mean = weights @ means
    scatter = float(weights @ np.square(means - mean).sum(1))
    once, twice = float((weights / sizes).sum()), float((weights**2 / sizes).sum())
    noise = scatter / (once - twice)  # E scatter = (once - twice) tr Sigma
    return float(mean @ mean) - twice * noise, noise  # E |mean|^2 = |mu|^2 + twice tr Sigma


@cache
def student_t(degrees: int) -> float:
    return float(special.stdtrit(degrees, 0.975))


class Step:
    """One step: gradients before the reduction, weights before and after, moments."""

    def __init__(self, scenario: Scenario, number: int, record: Mapping[str, Any], net: Net) -> None:
        self.scenario, self.number, self.net = scenario, number, net
        self.before: dict[str, Vector] = record["weights"][number]
        self.after: dict[str, Vector] = record["weights"][number + 1]
        self.seen: dict[str, Vector] = {n: g / record["scale"][number] for n, g in record["grads"][number].items()}
        self.moments = record["moments"][number]
        self._pairs: dict[str, tuple[float, float]] = {}
        net.load_state_dict({name: torch.from_numpy(value) for name, value in self.before.items()}, strict=False)
        self.parts: list[dict[str, Vector]] = []
        sizes, weights = [], []
        self.losses: list[float] = []
        self.local: list[list[dict[str, Vector]]] = []
        """For each data worker: the mean gradients of its micro-batches, before they are averaged with others'."""
        workers = scenario.num_data
        for worker in range(workers):
            mine, losses = [], []
            for i in range(scenario.micro):
                weight = scenario.weight(worker, i, workers)
                loss, grads = self._gradient(worker, i)
                mine.append({name: weight * grad for name, grad in grads.items()})
                losses.append(loss)
                sizes.append(float(scenario.size(worker, i)))
                weights.append(weight)
            self.parts += mine
            shares = weights[-len(mine) :]
            self.local.append(
                [{n: h / share for n, h in part.items()} for part, share in zip(mine, shares, strict=True)]
            )
            own = [float(scenario.size(worker, i)) for i in range(scenario.micro)]
            self.losses.append(float(np.average(losses, weights=own)))
        told = scenario.tell != "no"
        self.sizes = np.array(sizes) if told else np.ones(len(sizes))
        self.weights = np.array(weights)

    def _gradient(self, worker: int, micro: int) -> tuple[float, dict[str, Vector]]:
        scenario, net = self.scenario, self.net
        net.zero_grad()
        net.leave_out_side(scenario.leaves_out_side(self.number, worker))
        inputs, targets = batch(scenario.seed(self.number, worker, micro), scenario.size(worker, micro))
        loss = loss_of(net(inputs), targets)
        (loss * scenario.plant(self.number, worker)).backward()
        return loss.item(), {n: p.grad.numpy().copy() for n, p in net.named_parameters() if p.grad is not None}

    def vectors(self, name: str, mask: Vector | None = None) -> Vector:
        """What each part adds to the gradient of a tensor, one row a part; nothing is zero."""
        nothing = np.zeros_like(self.before[name])
        rows = [part.get(name, nothing) for part in self.parts]
        return np.stack([row.ravel() if mask is None else row[mask] for row in rows])

    def signal_and_noise(self, name: str, mask: Vector | None = None) -> tuple[float, float]:
        """Of a tensor, or of some of its elements."""
        if mask is not None:
            return signal_and_noise(self.vectors(name, mask), self.sizes, self.weights)
        if name not in self._pairs:
            self._pairs[name] = signal_and_noise(self.vectors(name), self.sizes, self.weights)
        return self._pairs[name]

    def names(self) -> list[str]:
        """Tensors with a gradient."""
        return [name for name in self.before if any(name in part for part in self.parts)]


class Truth:
    """The truth of a run, metric by metric. Steps without a number for a name have none in their table."""

    def __init__(self, scenario: Scenario, record: Mapping[str, Any]) -> None:
        self.scenario = scenario
        net = new_net(scenario.tied).double().freeze(scenario.frozen)
        self.steps = [Step(scenario, number, record, net) for number in range(scenario.steps)]
        carried: dict[str, Vector] = {}
        self.totals: list[dict[str, Vector]] = []
        """The gradient of every step: by the dense model or, where that has another precision, as the ranks had it."""
        self.dense: list[dict[str, Vector]] = []
        for step in self.steps:
            dense = {name: step.vectors(name).sum(0).reshape(step.before[name].shape) for name in step.names()}
            if scenario.fault == "carried":
                dense = {name: carried.get(name, 0) + grad for name, grad in dense.items()}
                carried = dense
            self.dense.append(dense)
            self.totals.append(dense if scenario.exact else step.seen)

    # -- of one step ------------------------------------------------------------------------------------------------

    def of_gradients(self, function: Callable[[Vector], float]) -> list[Table]:
        """A number of the gradient of every tensor, and of all together."""
        return [_each(function, total) for total in self.totals]

    def weight_norm(self) -> list[Table]:
        return [_each(_norm, step.after) for step in self.steps]

    def update_norm(self) -> list[Table]:
        return [_each(_norm, {n: step.after[n] - step.before[n] for n in step.after}) for step in self.steps]

    def update_ratio(self) -> list[Table]:
        pairs = zip(self.update_norm(), self.weight_norm(), strict=True)
        return [{name: update[name] / weight[name] for name in update} for update, weight in pairs]

    def changes(self) -> list[dict[str, Vector]]:
        """The change of all tensors that are not looked up row by row."""
        return [{n: s.after[n] - s.before[n] for n in s.after if n != "embed.weight"} for s in self.steps]

    def update_rms(self) -> list[Table]:
        return [_each(lambda x: math.sqrt(np.square(x).mean()), change) for change in self.changes()]

    def update_cosine(self) -> list[Table]:
        whole = [np.concatenate([x.ravel() for x in change.values()]) for change in self.changes()]
        pairs = itertools.pairwise(whole)
        return [{}, *({"": float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))} for a, b in pairs)]

    def loss(self) -> list[Table]:
        """The mean over data workers, by their samples."""
        sizes = [self.scenario.total(d) if self.scenario.tell != "no" else 1 for d in range(self.scenario.num_data)]
        return [{"": float(np.average(step.losses, weights=sizes))} for step in self.steps]

    def local_norms(self) -> list[list[float]]:
        """For each data worker the root mean square norm of its own gradients, by their weight."""
        return [
            [
                math.sqrt(
                    np.average([sum(float(np.square(g).sum()) for g in part.values()) for part in own], weights=w)
                )
                for own, w in zip(step.local, np.split(step.weights, len(step.local)), strict=True)
            ]
            for step in self.steps
        ]

    # -- by what came before ----------------------------------------------------------------------------------------

    def spikes(self) -> tuple[list[Table], list[Table]]:
        """Every norm over the mean of those before it, and the variation of those before it, from the third on."""
        norms, ratios, variations = self.of_gradients(_norm), [], []
        past: dict[str, list[float]] = {}
        for table in norms:
            ratios.append({n: v / float(np.mean(past[n])) for n, v in table.items() if len(past.get(n, ())) > 1})
            variations.append(
                {n: float(np.std(norms, ddof=1) / np.mean(norms)) for n, norms in past.items() if len(norms) > 1}
            )
            for name, value in table.items():
                if math.isfinite(value):
                    past.setdefault(name, []).append(value)
        return ratios, variations

    def groups(self, names: Sequence[str], kind: str) -> dict[str, dict[str, Vector | None]]:
        """Tensors, and which of their elements, that a number is about."""
        if kind == "values":
            return {"": dict.fromkeys(names)}
        if kind == "tensors":
            return {name: {name: None} for name in names}
        if kind == "heads":
            blocks = sorted({name[: name.index(".attn")] for name in names if ".attn" in name})
            return {
                f"{block}.attn/head{head}": {f"{block}.attn.{part}_proj.weight": _rows(head) for part in "qkv"}
                for block in blocks
                for head in range(HEADS)
            }
        layers: dict[str, dict[str, Vector | None]] = {}
        for name in names:
            layers.setdefault(layer_of(name), {})[name] = None
        return layers

    def parts_gsnr(self, kind: str) -> list[dict[str, tuple[float, float, float]]]:
        """Signal over noise of one part, and the ends of its interval, for every group at every step."""
        pairs = []
        for step in self.steps:
            known = {name: step.signal_and_noise(name) for name in step.names()}  # which are sums over elements
            table = {}
            for group, members in self.groups(step.names(), kind).items():
                each = [known[n] if mask is None else step.signal_and_noise(n, mask) for n, mask in members.items()]
                table[group] = (sum(pair[0] for pair in each), sum(pair[1] for pair in each))
            pairs.append(table)
        return ratios_of_means(pairs, [float(step.sizes.mean()) for step in self.steps])

    def radial_gsnr(self) -> list[dict[str, tuple[float, float, float]]]:
        """The same of the gradient's component along the weights."""
        pairs = []
        for step in self.steps:
            table = {}
            for name in step.names():
                weight = step.before[name].ravel()
                if not weight.any():
                    continue  # there is no direction
                along = step.vectors(name) @ weight / np.linalg.norm(weight)
                table[name] = signal_and_noise(along[:, None], step.sizes, step.weights)
            pairs.append(table)
        return ratios_of_means(pairs, [float(step.sizes.mean()) for step in self.steps])

    def adam_gsnr(self, kind: str) -> list[dict[str, tuple[float, float, float]]]:
        """From the optimizer's moments: sums over a group first, from its second step on."""
        pairs = []
        for step in self.steps:
            known = {name: _adam_pair(*moments) for name, moments in step.moments.items() if moments[0] >= 2}
            table = {}
            for group, members in self.groups(list(known), kind).items():
                if members:
                    table[group] = tuple(np.sum([known[name] for name in members], axis=0))
            pairs.append(table)
        return ratios_of_means(pairs, [1.0] * len(pairs))

    def factors(self, function: Callable[[Vector], float]) -> list[Table]:
        """A number of VRGD's factors: squared mean over variance, over its mean in the tensor, from 0.1 to 1."""
        tables = []
        for step in self.steps:
            factors = {}
            for name in step.names():
                grads = step.vectors(name) / step.weights[:, None]
                variance = grads.var(axis=0)
                known = variance > 1e-14 * np.square(grads).mean(0)
                ratio = np.square(grads.mean(0))[known] / variance[known]
                factors[name] = np.ones(len(variance))
                factors[name][known] = np.clip(ratio / ratio.mean(), 0.1, 1.0) if known.any() else 1.0
            tables.append(_each(function, factors))
        return tables

    def adam_gsnr_of_coordinates(self) -> list[dict[str, Vector]]:
        """The ratio of every coordinate with a second moment."""
        tables = []
        for step in self.steps:
            table = {}
            for name, (t, m, v) in step.moments.items():
                mean, square, c1 = _corrected(t, m, v)
                alive = square > 0
                if t >= 2 and alive.any():
                    noise = (square - mean**2)[alive]
                    table[name] = np.where(noise > 0, (mean**2 - c1 * square)[alive] / noise, np.inf)
            tables.append(table)
        return tables

    def below_one(self) -> list[Table]:
        """Share of these coordinates whose ratio is below 1."""
        return [
            {name: float((each < 1).mean()) for name, each in table.items()}
            for table in self.adam_gsnr_of_coordinates()
        ]

    def window(self, name: str, last: int, length: int) -> tuple[float, float, float]:
        """GSNR of the gradients of `length` steps as if at the same weights, with a jackknife over ten blocks."""
        grads = np.stack([self.totals[step][name].ravel() for step in range(last - length + 1, last + 1)])
        value, blocks = _gsnr(grads), np.split(np.arange(length), 10)
        left = np.array([_gsnr(np.delete(grads, block, axis=0)) for block in blocks])
        error = math.sqrt(9 / 10 * np.square(left - left.mean()).sum())
        half = student_t(9) * error
        return value, value - half, value + half


BETAS = (0.8, 0.95)


def _corrected(t: float, m: Vector, v: Vector) -> tuple[Vector, Vector, float]:
    b1, b2 = BETAS
    c1 = (1 - b1) / (1 + b1) * (1 + b1**t) / (1 - b1**t)
    return m / (1 - b1**t), v / (1 - b2**t), c1


def _adam_pair(t: float, m: Vector, v: Vector) -> tuple[float, float]:
    mean, square, c1 = _corrected(t, m, v)
    return float((mean**2 - c1 * square).sum()), float((square - mean**2).sum())


def _gsnr(grads: Vector) -> float:
    noise = float(grads.var(axis=0, ddof=1).sum())
    mean = grads.mean(0)
    return (float(mean @ mean) - noise / len(grads)) / noise


def _rows(head: int) -> Vector:
    mask = np.zeros((WIDTH, WIDTH), dtype=bool)
    size = WIDTH // HEADS
    mask[head * size : (head + 1) * size] = True
    return mask


def _norm(x: Vector) -> float:
    return float(np.linalg.norm(x))


def _each(function: Callable[[Vector], float], arrays: Mapping[str, Vector]) -> Table:
    whole = np.concatenate([x.ravel() for x in arrays.values()])
    return {"": function(whole), **{name: function(x.ravel()) for name, x in arrays.items()}}


def ratios_of_means(
    pairs: Sequence[Mapping[str, tuple[float, float]]], scales: Sequence[float], window: int = 20
) -> list[dict[str, tuple[float, float, float]]]:
    """Mean signal over mean noise of the last readings, none from before half the steps made, with its interval."""
    history: dict[str, list[tuple[int, float, float]]] = {}
    result = []
    for now, (table, scale) in enumerate(zip(pairs, scales, strict=True)):
        ratios = {}
        for group, (signal, noise) in table.items():
            if not math.isfinite(signal + noise):
                continue
            history.setdefault(group, []).append((now, signal, noise))
            recent = np.array([pair for when, *pair in history[group][-window:] if when >= now / 2])
            x, y = recent.mean(0)
            if y <= 0:
                continue  # moments remember spans of different lengths, so that this may come out
            ratio, half, n = x / y, math.nan, len(recent)
            if n > 1:
                (xx, xy), (_, yy) = np.cov(recent.T)
                error = math.sqrt(max(0.0, xx - 2 * ratio * xy + ratio**2 * yy) / n) / y
                half = student_t(n - 1) * error
            ratios[group] = (scale * ratio, scale * (ratio - half), scale * (ratio + half))
        result.append(ratios)
    return result
