"""Which layers need what: no gradient, one that is too small, steps that are too large, nothing but noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gradvitals.advise.advice import Advice, Figure, cannot_tell
from gradvitals.advise.record import AT_ONE_POINT, Floats, Record
from gradvitals.format import number
from gradvitals.store.blocks import Kind

TOPIC = "layers"
NAMES = ("layers",)

READINGS = 3
"""Per-tensor readings in the second half of the run at least."""
LATEST = 100
"""Readings that are looked at, at most."""
WORST = 5
"""Layers that are told of."""
VANISHING = 1e-4
"""Root mean square of a layer's gradient over the median layer's."""
LARGEST_UPDATE = 0.1
"""Change of a layer's matrices in one step, as a share of their size, that is too large for most steps."""
SMALLEST_UPDATE = 1e-7
"""The same that is too small."""
UNEVEN = 10.0
"""Times the change of the median layer that stands out."""
NOTABLE = 0.01
"""A change that is larger than those of other layers is told from here on."""
GROWN = 10.0
"""Times its norm early in the run, beyond what the median layer's has grown by."""
WEAK = 10.0
"""How far below the model's GSNR that of a layer lies, by their intervals."""
MOST_BROKEN = 0.2
"""Share of steps with gradients that are not finite, beyond which single layers say nothing."""
EPS_NEAR = 10.0
"""Times Adam's eps that gradients are above at least, or eps decides about the step."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """One layer, what was seen in it, and what it needs."""

    layer: str
    pattern: str
    text: str
    to_do: str
    weight: float
    """How far it is out, as a factor: the worst come first."""
    values: dict[str, Any] = field(default_factory=dict)


def advise_layers(record: Record) -> Advice:
    """The few layers that stand out, worst first."""
    seen = Layers(record)
    if not seen.names or "grad/norm" not in record.run.metrics("tensors"):
        return cannot_tell(TOPIC, "no single tensors were read", NAMES)
    if seen.readings < READINGS:
        why = (
            f"the second half of the run has {seen.readings} per-tensor readings, and it takes {READINGS}: a longer "
            "run, or a smaller tensor_every"
        )
        return cannot_tell(TOPIC, why, NAMES)
    broken = seen.share_broken
    if broken > MOST_BROKEN:
        why = (
            f"gradients are not finite at {100 * broken:.0f} % of the steps in the second half of the run; "
            "`gradvitals doctor` says since when and why"
        )
        return cannot_tell(TOPIC, why, NAMES)
    needs = sorted(_one_each(seen), key=lambda need: -need.weight)
    told = needs[:WORST]
    more = f" (the worst {WORST} of them are named)" if len(needs) > WORST else ""
    kinds = f"{len(needs)} of {len(seen.names)} layers stand out{more}." if needs else "No layer stands out."
    return Advice(
        topic=TOPIC,
        answer=kinds,
        confidence="fair" if seen.readings >= 10 else "low",
        because=f"{seen.readings} per-tensor readings in the second half of the run",
        values={"layers": [_as_values(need) for need in told]},
        figures=(*_figures(seen, told), *_ranges(seen)),
    )


class Layers:
    """Every layer over the second half of a run, as medians over its readings."""

    def __init__(self, record: Record) -> None:
        self.record = record
        described = len(record.run.names("tensors")) == len(record.run.tensors)
        self.names = record.run.names("layers") if described else ()
        self.since = record.first_step + (record.last_step - record.first_step) // 2
        """Where the second half of the run begins."""
        tensors = record.run.tensors
        place = {name: i for i, name in enumerate(self.names)}
        self.layer = np.array([place[info.layer] for info in tensors if info.layer in place], dtype=np.intp)
        self.sizes = np.array([float(info.numel) for info in tensors])
        self.matrix = np.array([len(info.shape) >= 2 for info in tensors], dtype=bool)
        self.trained = np.array([not info.frozen for info in tensors], dtype=bool)

    @cached_property
    def _norms(self) -> Floats:
        return self._late("grad/norm", "tensors")

    @property
    def readings(self) -> int:
        """Per-tensor readings in the second half."""
        return len(self._norms)

    @property
    def share_broken(self) -> float:
        """Share of the steps in the second half at which a gradient was not finite."""
        if "grad/nonfinite" not in self.record.run.metrics("values"):
            return 0.0
        steps, counts = self.record.run.series("grad/nonfinite")
        late = counts[steps >= self.since]
        return float(np.mean(late > 0)) if len(late) else 0.0

    @cached_property
    def norms(self) -> Floats:
        """Gradient norm of each layer; nan where it has none."""
        return _median(self._root_sums(self._norms, self.trained))

    @cached_property
    def rms(self) -> Floats:
        """Root mean square of the gradient's elements, of each layer."""
        sizes = np.maximum(self._sums(self.sizes[None], self.trained)[0], 1.0)
        return np.asarray(self.norms / np.sqrt(sizes), dtype=np.float64)

    @cached_property
    def growth(self) -> Floats:
        """The norm over what it was in the second quarter of the run."""
        begin = (self.record.first_step + self.since) // 2
        early = self._late("grad/norm", "tensors", since=begin, until=self.since)
        before = _median(self._root_sums(early, self.trained)) if len(early) else np.full(len(self.names), np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.divide(self.norms, before)

    @cached_property
    def updates(self) -> Floats:
        """Change of each layer's matrices in one step over their size; a bias has no size of its own to compare."""
        chosen = self.matrix & self.trained
        updates, weights = (self._late(name, "tensors") for name in ("update/norm", "weight/norm"))
        count = min(len(updates), len(weights))
        if not count:
            return np.full(len(self.names), np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self._root_sums(updates[-count:], chosen) / self._root_sums(weights[-count:], chosen)
        return _median(np.where(np.isfinite(ratio), ratio, np.nan))

    @cached_property
    def gsnr(self) -> tuple[Floats, Floats, Floats]:
        """The latest GSNR of each layer, of the model's source at one point, with its interval."""
        missing = np.full(len(self.names), np.nan)
        source = self.record.gsnr_source
        if source not in AT_ONE_POINT or source not in self.record.run.sources("gsnr", "layers"):
            return missing, missing, missing
        parts = [self._late(name, "layers", source) for name in ("gsnr", "gsnr_low", "gsnr_high")]
        return tuple(part[-1] if len(part) else missing for part in parts)  # type: ignore[return-value]

    def _late(
        self, metric: str, kind: Kind, source: str | None = None, since: int | None = None, until: int | None = None
    ) -> Floats:
        """The latest readings of a metric, ``[readings, rows]``."""
        run = self.record.run
        rows = len(run.names(kind))
        if metric not in run.metrics(kind):
            return np.zeros((0, rows))
        steps = run.times(metric, kind=kind, source=source)[0]
        begin, end = since or self.since, until or self.record.last_step
        steps = steps[(steps >= begin) & (steps <= end)]
        if not len(steps):
            return np.zeros((0, rows))
        first = int(steps[-min(LATEST, len(steps))])
        return run.matrix(metric, kind, source=source, since=first - 1, until=int(steps[-1]))[1]

    def _sums(self, values: Floats, chosen: Any) -> Floats:
        out = np.zeros((len(values), len(self.names)))
        for layer, column in zip(self.layer[chosen], np.nan_to_num(values[:, chosen], posinf=0.0).T, strict=True):
            out[:, layer] += column
        return out

    def _root_sums(self, values: Floats, chosen: Any) -> Floats:
        """The norm of every layer from those of its tensors; nan where it has no such tensor."""
        largest = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
        roots = largest * np.sqrt(self._sums(np.square(np.where(np.isfinite(values), values, 0.0) / largest), chosen))
        present = self._sums(np.ones((1, values.shape[1])), chosen)[0] > 0
        return np.where(present, roots, np.nan)


def _median(values: Floats) -> Floats:
    known = np.isfinite(values)
    out = np.full(values.shape[1], np.nan)
    chosen = known.any(axis=0)
    out[chosen] = np.nanmedian(np.where(known, values, np.nan)[:, chosen], axis=0)
    return out


def _middle(values: Floats) -> float:
    known = values[np.isfinite(values) & (values > 0)]
    return float(np.median(known)) if len(known) else math.nan


Look = Callable[[Layers, int], Need | None]


def _one_each(seen: Layers) -> Iterator[Need]:
    """The gravest need of each layer: a layer without a gradient also has no signal."""
    looks: tuple[Look, ...] = (_dead, _vanishing, _exploding, _moves, _below_eps, _noise)
    for place in range(len(seen.names)):
        found = next((need for look in looks if (need := look(seen, place)) is not None), None)
        if found is not None:
            yield found


def _dead(seen: Layers, place: int) -> Need | None:
    if seen.norms[place] != 0:
        return None
    return Need(
        layer=seen.names[place],
        pattern="no gradient",
        text=f"its gradient is zero or missing at most of {seen.readings} readings",
        to_do="check that the loss depends on it; freeze it if it should not learn",
        weight=math.inf,
        values={"grad_norm": 0.0},
    )


def _vanishing(seen: Layers, place: int) -> Need | None:
    usual, own = _middle(seen.rms), float(seen.rms[place])
    if not own < VANISHING * usual:
        return None
    return Need(
        layer=seen.names[place],
        pattern="vanishing",
        text=f"its gradient is {number(own)} an element (root mean square), the median layer's {number(usual)}",
        to_do="look at what is between it and the loss: initialisation, normalisation, residual paths; or float16",
        weight=usual / own,
        values={"rms": own, "usual": usual},
    )


def _exploding(seen: Layers, place: int) -> Need | None:
    usual, own = _middle(seen.growth), float(seen.growth[place])
    beyond = own / max(usual, 1.0)
    if not GROWN < beyond < math.inf:
        return None
    return Need(
        layer=seen.names[place],
        pattern="growing",
        text=f"its norm is {number(own)} times what it was in the second quarter, the median layer's {number(usual)}",
        to_do="clip it by itself (AdaGC), or lower its learning rate",
        weight=beyond,
        values={"growth": own, "usual": usual},
    )


def _moves(seen: Layers, place: int) -> Need | None:
    usual, own = _middle(seen.updates), float(seen.updates[place])
    values = {"update_ratio": own, "usual": usual}
    told = f"one step changes it by {number(own)} of its size, the median layer by {number(usual)}"
    if own > LARGEST_UPDATE or (own > NOTABLE and own > UNEVEN * usual):
        factor = own / min(usual, LARGEST_UPDATE) if usual > 0 else own / LARGEST_UPDATE
        todo = f"a lower learning rate for it, by a factor of about {number(float(f'{max(factor, 2.0):.1g}'))}"
        pattern, weight = "moves too far", factor
    elif own > 0 and (own < SMALLEST_UPDATE or own * 100 * UNEVEN < usual):
        pattern, todo, weight = "hardly moves", "a higher learning rate for it, or smaller weights", usual / own
    else:
        return None
    return Need(layer=seen.names[place], pattern=pattern, text=told, to_do=todo, weight=weight, values=values)


def _below_eps(seen: Layers, place: int) -> Need | None:
    eps, own = seen.record.facts.eps, float(seen.rms[place])
    if eps is None or seen.record.facts.betas is None or not 0 < own < EPS_NEAR * eps:
        return None
    return Need(
        layer=seen.names[place],
        pattern="near eps",
        text=f"its gradient is {number(own)} an element (root mean square), and Adam's eps is {number(eps)}",
        to_do=f"a smaller eps, such as {number(own / 1000)}: with this one, eps sets how far it moves",
        weight=EPS_NEAR * eps / own,
        values={"rms": own, "eps": eps},
    )


def _noise(seen: Layers, place: int) -> Need | None:
    """A layer whose signal is far below the model's, by intervals that do not meet."""
    value, low, high = (float(part[place]) for part in seen.gsnr)
    last = seen.record.averages[-1] if seen.record.averages else None
    if last is None or last.count < READINGS or not last.low > 0 or not (low <= 0 and high * WEAK < last.low):
        return None
    embedding = any(word in seen.names[place].lower() for word in ("emb", "wte", "wpe", "position"))
    rare = "rows of rare tokens get little signal: " if embedding else ""
    return Need(
        layer=seen.names[place],
        pattern="noise only",
        text=f"its GSNR is {number(value)} ({number(low)} to {number(high)}), the model's {number(last.value)}",
        to_do=f"{rare}a lower learning rate for it, or a larger batch",
        weight=last.low / high if high > 0 else 1e6,
        values={"gsnr": value, "low": low, "high": high, "model": last.value, "batch_size": last.batch_size},
    )


def _as_values(need: Need) -> dict[str, Any]:
    return {"layer": need.layer, "pattern": need.pattern, "to_do": need.to_do, **need.values}


def _figures(seen: Layers, needs: list[Need]) -> Iterator[Figure]:
    for need in needs:
        yield Figure(
            text=f"{need.layer}, {need.pattern}: {need.text}. To do: {need.to_do}",
            values={"layer": need.layer, **need.values},
            first_step=seen.since,
            last_step=seen.record.last_step,
        )


def _ranges(seen: Layers) -> Iterator[Figure]:
    """What the layers have in common, for those that do not stand out."""
    gsnr = seen.gsnr[0]
    for name, what, values in (
        ("update_ratio", "one step changes layers by", seen.updates),
        ("rms", "gradients have a root mean square of", seen.rms),
        ("gsnr", "the GSNR of layers is", gsnr),
    ):
        known = np.flatnonzero(np.isfinite(values))
        if not len(known):
            continue
        least, most = (known[int(pick(values[known]))] for pick in (np.argmin, np.argmax))
        text = (
            f"{what} {number(float(values[least]))} ({seen.names[least]}) to {number(float(values[most]))} "
            f"({seen.names[most]})"
        )
        numbers = {f"{name}_least": float(values[least]), f"{name}_most": float(values[most])}
        yield Figure(text=text, values=numbers, first_step=seen.since, last_step=seen.record.last_step)
