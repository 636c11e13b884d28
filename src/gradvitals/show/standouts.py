"""Which tensors and layers stand out: rows of the report's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradvitals.show.by_layer import ByLayer, Floats
from gradvitals.show.scan import scan
from gradvitals.store.frames import Kind
from gradvitals.store.reader import Run

WORST = 5
"""How many tensors each list of the worst ones names."""


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One layer at the latest per-tensor reading."""

    name: str
    grad_norm: float
    spike_ratio: float
    """The largest of its tensors'."""
    gsnr: float
    gsnr_low: float
    gsnr_high: float
    update_ratio: float


@dataclass(frozen=True, kw_only=True)
class Worst:
    """One tensor or layer that stands out, and when it did."""

    name: str
    value: float
    step: int


def layer_rows(run: Run, source: str | None) -> tuple[int | None, tuple[LayerRow, ...]]:
    """Every layer in depth order at the latest per-tensor reading, and the step of that reading."""
    layers = run.names("layers")
    norm_step, norms = _latest(run, "grad/norm", "tensors")
    gsnr_step, gsnr = _latest(run, "gsnr", "layers", source)
    steps = [step for step in (norm_step, gsnr_step) if step is not None]
    if not steps or not layers:
        return None, ()
    by = ByLayer(run)
    columns = {
        "grad_norm": by.whole(by.norms(norms)),
        "spike_ratio": by.whole(by.reduced(_latest(run, "grad/spike_ratio", "tensors")[1], np.fmax)),
        "gsnr": gsnr,
        "gsnr_low": _latest(run, "gsnr_low", "layers", source)[1],
        "gsnr_high": _latest(run, "gsnr_high", "layers", source)[1],
        "update_ratio": _update_ratios(run, by),
    }
    rows = (
        LayerRow(name=name, **{column: float(values[i]) for column, values in columns.items()})
        for i, name in enumerate(layers)
    )
    return max(steps), tuple(rows)


def layers_hit(run: Run, step: int, count: int = 3) -> tuple[Worst, ...]:
    """The layers whose tensors had the largest spike ratios at a step; none if tensors were not read then."""
    if "grad/spike_ratio" not in run.metrics("tensors"):
        return ()
    steps, rows = run.matrix("grad/spike_ratio", since=step - 1, until=step)
    if not steps.size:
        return ()
    by = ByLayer(run)
    ratios = by.whole(by.reduced(rows[0], np.fmax))
    return _top(run.names("layers"), ratios, [step] * len(ratios), count)


def latest_extremes(run: Run, metric: str, *, source: str | None = None, lowest: bool = False) -> tuple[Worst, ...]:
    """Tensors with the largest (or lowest) values at the latest reading, the most extreme first."""
    step, values = _latest(run, metric, "tensors", source)
    if step is None:
        return ()
    return _top(run.names("tensors"), values, [step] * len(values), WORST, lowest=lowest)


def extremes(run: Run, metric: str) -> tuple[Worst, ...]:
    """Tensors with the largest values anywhere in the run, each with the step of its largest."""
    names = run.names("tensors")
    best = np.full(len(names), -np.inf)
    when = np.zeros(len(names), dtype=np.int64)
    for steps, rows in scan(run, metric):
        known = np.where(np.isnan(rows), -np.inf, rows)
        at = known.argmax(axis=0)
        top = known.max(axis=0)
        better = top > best
        best[better], when[better] = top[better], steps[at[better]]
    return _top(names, np.where(best == -np.inf, np.nan, best), when.tolist(), WORST)


def first_nonzero(run: Run, metric: str) -> tuple[Worst, ...]:
    """Tensors whose value was ever above zero, with its first such value and step, the earliest first.

    Those of one step come as backward comes to them, so that the list begins where a finding says that it began.
    """
    names = run.names("tensors")
    found: dict[int, Worst] = {}
    for steps, rows in scan(run, metric):
        hit = rows > 0
        for i in np.flatnonzero(hit.any(axis=0)):
            at = int(hit[:, i].argmax())
            found.setdefault(int(i), Worst(name=names[i], value=float(rows[at, i]), step=int(steps[at])))
    depths = {info.index: info.depth for info in run.tensors}
    order = sorted(found, key=lambda i: (found[i].step, -depths.get(i, -1), -i))
    return tuple(found[i] for i in order[:WORST])


def _latest(run: Run, metric: str, kind: Kind, source: str | None = None) -> tuple[int | None, Floats]:
    missing = np.full(len(run.names(kind)), np.nan)
    if metric not in run.metrics(kind):
        return None, missing
    steps, _ = run.times(metric, kind=kind, source=source)
    return run.table(metric, kind=kind, source=source, step=int(steps[-1])) if steps.size else (None, missing)


def _update_ratios(run: Run, by: ByLayer) -> Floats:
    update_step, updates = _latest(run, "update/norm", "tensors")
    weight_step, weights = _latest(run, "weight/norm", "tensors")
    if update_step is None or update_step != weight_step:
        return np.full(len(run.names("layers")), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return by.whole(by.norms(updates) / by.norms(weights))


def _top(
    names: Sequence[str], values: Floats, steps: Sequence[int], count: int, *, lowest: bool = False
) -> tuple[Worst, ...]:
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known] if lowest else -values[known], kind="stable")]
    return tuple(Worst(name=names[i], value=float(values[i]), step=int(steps[i])) for i in order[:count])
