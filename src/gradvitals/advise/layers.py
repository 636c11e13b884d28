"""Which layers need what: no gradient, one that is too small, steps that are too large, nothing but noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradvitals.advise.advice import Advice, CannotTell, Figure, advises_on
from gradvitals.advise.record import AT_ONE_POINT, Floats, Mask, Record
from gradvitals.diagnose.history import finite_median
from gradvitals.format import number, percent
from gradvitals.store.blocks import Kind

NAMES = ("layers",)

MIN_READINGS = 3
"""Per-tensor readings in the second half of the run at least."""
MAX_LATEST = 100
"""The most readings to use."""
MAX_NAMED = 5
"""Layers that are named."""
VANISHING = 1e-4
"""Root mean square of a layer's gradient over the median layer's."""
LARGEST_UPDATE = 0.1
"""Change of a layer's matrices in one step, as a share of their size, that is too large for most steps."""
SMALLEST_UPDATE = 1e-7
"""The same that is too small."""
UNEVEN = 10.0
"""Times the change of the median layer that stands out."""
NOTABLE = 0.01
"""A smaller change is not reported, even if it is larger than those of other layers."""
GROWN = 10.0
"""Times its norm early in the run, beyond what the median layer's has grown by."""
WEAK = 10.0
"""Distance by which a layer's GSNR must lie below the model's, by their intervals."""
MAX_BROKEN = 0.2
"""Share of steps with gradients that are not finite, beyond which single layers say nothing."""
NEAR_EPS = 10.0
"""Times Adam's eps that gradients are above at least, or eps decides about the step."""


class Need(NamedTuple):
    """One layer, what was seen in it, and what it needs."""

    layer: str
    pattern: str
    text: str
    to_do: str
    weight: float
    """Distance from the model, as a factor: the worst come first."""
    values: dict[str, Any]


@advises_on("layers", NAMES)
def advise_layers(record: Record) -> Advice:
    """Returns the few layers that stand out, worst first."""
    seen = _layers(record)
    readings = f"{seen.readings} per-tensor readings"
    if seen.readings < MIN_READINGS:
        raise CannotTell(
            f"the second half of the run has {readings} but needs {MIN_READINGS}: train longer, or use a smaller "
            "tensor_every"
        )
    if seen.share_broken > MAX_BROKEN:
        raise CannotTell(
            f"gradients are NaN or infinite at {100 * seen.share_broken:.0f}% of steps in the second half of the run; "
            "`gradvitals doctor` reports since when and why"
        )
    # One need per layer, the gravest: a layer without a gradient also has no signal.
    needs = [need for place in range(len(seen.names)) if (need := next(_needs(seen, place), None)) is not None]
    needs.sort(key=lambda need: -need.weight)
    more = f" (these are the worst {MAX_NAMED})" if len(needs) > MAX_NAMED else ""
    return Advice(
        answer=f"{len(needs)} of {len(seen.names)} layers stand out{more}." if needs else "No layer stands out.",
        confidence="fair" if seen.readings >= 10 else "low",
        because=f"{readings} in the second half of the run",
        values={
            "layers": [
                {"layer": need.layer, "pattern": need.pattern, "to_do": need.to_do, **need.values}
                for need in needs[:MAX_NAMED]
            ]
        },
        figures=list(_figures(seen, needs[:MAX_NAMED])),
    )


class Layers(NamedTuple):
    """Every layer over the second half of a run, as medians over its readings; NaN if it has none."""

    record: Record
    names: tuple[str, ...]
    since: int
    """First step of the second half of the run."""
    readings: int
    """Per-tensor readings in it."""
    share_broken: float
    """Share of its steps at which a gradient was not finite."""
    norms: Floats
    """Gradient norms."""
    rms: Floats
    """Root mean squares of the gradients' elements."""
    growth: Floats
    """The norms over what they were in the second quarter of the run."""
    updates: Floats
    """Change of the layers' matrices in one step over their size; a bias has no size of its own to compare."""
    gsnr: tuple[Floats, Floats, Floats]
    """The latest GSNR, of the model's source at one point, with its interval."""


def _layers(record: Record) -> Layers:
    run, tensors = record.run, record.run.tensors
    names = run.names("layers") if len(run.names("tensors")) == len(tensors) else ()
    if not names or "grad/norm" not in run.metrics("tensors"):
        raise CannotTell("the run has no readings of single tensors")
    since = record.first_step + (record.last_step - record.first_step) // 2
    place = {name: i for i, name in enumerate(names)}
    layer = np.array([place.get(info.layer, -1) for info in tensors], dtype=np.intp)
    trained = (layer >= 0) & np.array([not info.frozen for info in tensors], dtype=bool)
    matrices = trained & np.array([len(info.shape) >= 2 for info in tensors], dtype=bool)
    missing = np.full(len(names), np.nan)

    def late(
        metric: str, kind: Kind = "tensors", source: str | None = None, begin: int = since, end: int = record.last_step
    ) -> Floats:
        """Returns the latest readings of a metric between two steps, ``[readings, rows]``."""
        steps = run.times(metric, kind=kind, source=source)[0] if metric in run.metrics(kind) else np.zeros(0)
        steps = steps[(steps >= begin) & (steps <= end)][-MAX_LATEST:]
        if not len(steps):
            return np.zeros((0, len(run.names(kind))))
        return run.matrix(metric, kind, source=source, since=int(steps[0]) - 1, until=int(steps[-1]))[1]

    def sums(values: Floats, chosen: Mask) -> Floats:
        out = np.zeros((len(names), len(values)))
        np.add.at(out, layer[chosen], np.nan_to_num(values[:, chosen], posinf=0.0).T)
        return out.T

    def root_sums(values: Floats, chosen: Mask) -> Floats:
        """Returns the norm of every layer from those of its tensors; NaN if it has no such tensor."""
        largest = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
        roots = largest * np.sqrt(sums(np.square(np.where(np.isfinite(values), values, 0.0) / largest), chosen))
        return np.where(sums(np.ones((1, len(tensors))), chosen)[0] > 0, roots, np.nan)

    readings, broken = late("grad/norm"), record.series("grad/nonfinite").since(since).values > 0
    norms = _median(root_sums(readings, trained))
    sizes = sums(np.array([[float(info.numel) for info in tensors]]), trained)[0]
    early = late("grad/norm", begin=(record.first_step + since) // 2, end=since)
    before = _median(root_sums(early, trained)) if len(early) else missing
    moved, weights = late("update/norm"), late("weight/norm")
    count = min(len(moved), len(weights))
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = norms / before
        ratios = root_sums(moved[len(moved) - count :], matrices) / root_sums(weights[len(weights) - count :], matrices)
    source = record.gsnr_source
    known = source in AT_ONE_POINT and source in run.sources("gsnr", "layers")
    parts = [late(name, "layers", source) if known else missing[:0] for name in ("gsnr", "gsnr_low", "gsnr_high")]
    return Layers(
        record=record,
        names=names,
        since=since,
        readings=len(readings),
        share_broken=float(np.mean(broken)) if len(broken) else 0.0,
        norms=norms,
        rms=norms / np.sqrt(np.maximum(sizes, 1.0)),
        growth=growth,
        updates=_median(np.where(np.isfinite(ratios), ratios, np.nan)) if count else missing,
        gsnr=tuple(part[-1] if len(part) else missing for part in parts),  # type: ignore[arg-type]
    )


def _median(values: Floats) -> Floats:
    known = np.isfinite(values)
    out = np.full(values.shape[1], np.nan)
    chosen = known.any(axis=0)
    out[chosen] = np.nanmedian(np.where(known, values, np.nan)[:, chosen], axis=0)
    return out


def _needs(seen: Layers, place: int) -> Iterator[Need]:
    """Yields what one layer needs, the gravest first."""
    layer, facts = seen.names[place], seen.record.facts
    if seen.norms[place] == 0:
        text = f"its gradient is zero or missing at most of {seen.readings} readings"
        to_do = "check that the loss depends on it; freeze it if it should not learn"
        yield Need(layer, "no gradient", text, to_do, math.inf, {"grad_norm": 0.0})
    rms, usual = float(seen.rms[place]), finite_median(seen.rms[seen.rms > 0])
    per_element = f"its gradient is {number(rms)} per element (root mean square)"
    if rms < VANISHING * usual:
        text = f"{per_element}; that of the median layer is {number(usual)}"
        to_do = "check what is between it and the loss (initialization, normalization, residual paths), and float16"
        yield Need(layer, "vanishing", text, to_do, usual / rms, {"rms": rms, "usual": usual})
    growth, median_growth = float(seen.growth[place]), finite_median(seen.growth[seen.growth > 0])
    beyond = growth / max(median_growth, 1.0)
    if GROWN < beyond < math.inf:
        times = f"{number(growth)} times its norm in the second quarter; the median layer is at {number(median_growth)}"
        to_do = "clip it separately (AdaGC), or lower its learning rate"
        yield Need(layer, "growing", f"its norm is {times}", to_do, beyond, {"growth": growth, "usual": median_growth})
    update, typical = float(seen.updates[place]), finite_median(seen.updates[seen.updates > 0])
    values = {"update_ratio": update, "usual": typical}
    text = f"one step changes it by {percent(update)} of its norm, and the median layer by {percent(typical)}"
    if update > LARGEST_UPDATE or (update > NOTABLE and update > UNEVEN * typical):
        factor = update / min(typical, LARGEST_UPDATE) if typical > 0 else update / LARGEST_UPDATE
        lower = number(float(f"{max(factor, 2.0):.1g}"))
        to_do = f"lower its learning rate by a factor of about {lower}"
        yield Need(layer, "moves too far", text, to_do, factor, values)
    elif update > 0 and (update < SMALLEST_UPDATE or update * 100 * UNEVEN < typical):
        to_do = "raise its learning rate, or start with smaller weights"
        yield Need(layer, "hardly moves", text, to_do, typical / update, values)
    if facts.eps is not None and facts.betas is not None and 0 < rms < NEAR_EPS * facts.eps:
        text = f"{per_element}, and Adam's eps is {number(facts.eps)}"
        to_do = f"use a smaller eps, such as {number(rms / 1000)}: the current one limits how far it moves"
        yield Need(layer, "near eps", text, to_do, NEAR_EPS * facts.eps / rms, {"rms": rms, "eps": facts.eps})
    # A signal far below the model's, by intervals that do not meet.
    value, low, high = (float(part[place]) for part in seen.gsnr)
    model = seen.record.averages[-1] if seen.record.averages else None
    if model is not None and model.count >= MIN_READINGS and model.low > 0 and low <= 0 and high * WEAK < model.low:
        embedding = any(word in layer.lower() for word in ("emb", "wte", "wpe", "position"))
        rare = "rows of rare tokens get little signal: " if embedding else ""
        values = {"gsnr": value, "low": low, "high": high, "model": model.value, "batch_size": model.batch_size}
        text = (
            f"its GSNR is {number(value)} ({number(low)} to {number(high)}), and the model's is {number(model.value)}"
        )
        to_do = f"{rare}lower its learning rate, or use a larger batch"
        yield Need(layer, "noise only", text, to_do, model.low / high if high > 0 else 1e6, values)


def _figures(seen: Layers, needs: Sequence[Need]) -> Iterator[Figure]:
    span = {"first_step": seen.since, "last_step": seen.record.last_step}
    for need in needs:
        text = f"{need.layer}, {need.pattern}: {need.text}. Fix: {need.to_do}"
        yield Figure(text=text, values={"layer": need.layer, **need.values}, **span)
    # What the layers have in common, for those that do not stand out.
    for name, what, values in (
        ("update_ratio", "one step changes layers by", seen.updates),
        ("rms", "gradients have a root mean square of", seen.rms),
        ("gsnr", "the GSNR of layers is", seen.gsnr[0]),
    ):
        known = np.flatnonzero(np.isfinite(values))
        if len(known):
            least, most = known[np.argmin(values[known])], known[np.argmax(values[known])]
            ends = [f"{number(float(values[at]))} ({seen.names[at]})" for at in (least, most)]
            numbers = {f"{name}_least": float(values[least]), f"{name}_most": float(values[most])}
            yield Figure(text=f"{what} {' to '.join(ends)}", values=numbers, **span)
