"""The numbers of a run: trends, noise scale, every layer, and the tensors that stand out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.report.caveats import adam_memory, negative_gsnr
from gradvitals.report.format import duration, number, plural
from gradvitals.report.series import ByLayer, Floats, scan
from gradvitals.report.state import State, metric_of_every_step, num_ranks, progress, state_of
from gradvitals.store.blocks import Kind
from gradvitals.store.reader import Run
from gradvitals.types import FloatArray

NAN = float("nan")
TRENDS = ("loss", "grad/norm", "gsnr", "lr", "vrgd/mean")
LARGE_SPIKE = 5
"""A spike ratio above this is marked."""
ENDS = 10
"""Losses at the start and at the end whose medians are compared."""
MAY_RISE = ("head/signed_weights", "head/chosen", "head/foreign")
"""Facts about the loss, any of which shows that its level means little."""
FAR = 10.0
"""A loss that ends this many times above its start has blown up."""
KINDS_WITH_INTERVALS: tuple[tuple[Kind, str], ...] = (("tensors", "tensor"), ("layers", "layer"))
ALIKE = 0.01
"""Values within this share of each other are alike."""
MAX_WORST = 5
"""Number of tensors in each list of the worst ones."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    """One global metric over the whole run."""

    metric: str
    source: str | None
    first: float
    latest: float
    steps: NDArray[np.int64]
    values: FloatArray

    def to_json(self) -> dict[str, Any]:
        """Returns first, latest and extremes; `gradvitals export` has the whole series."""
        seen = self.values[np.isfinite(self.values)] if np.isfinite(self.values).any() else np.array([NAN])
        own = {"metric": self.metric, "source": self.source, "first": self.first, "latest": self.latest}
        return {**own, "min": seen.min(), "max": seen.max()}


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """The latest noise scale, in samples; NaN if the readings do not identify it."""

    measured: bool
    """Whether the run has it at all: it needs micro-batches and the batch size."""
    value: float
    low: float
    high: float
    source: str | None
    batch_known: bool
    """Whether the loop reported how many samples a step has."""
    identifiable: bool
    """Whether there is a value."""


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


@dataclass(frozen=True, kw_only=True)
class WorstList:
    """The tensors that stand out in one way, the most extreme first; without rows, the remark says why none does."""

    metric: str
    title: str
    remark: str
    rows: tuple[Worst, ...]


WORST_NAMES = {
    "gsnr": "lowest_gsnr",
    "grad/spike_ratio": "largest_spikes",
    "update/ratio": "largest_updates",
    "grad/nonfinite": "nonfinite",
}
"""The lists of the worst tensors by their metric, as JSON names them."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """The largest jump of the gradient norm, and the layers it came from."""

    step: int
    ratio: float
    norm: float
    layers: tuple[Worst, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The numbers that `gradvitals report` shows."""

    run: str
    last_step: int | None
    state: State
    progress: str
    """The state, and how far it is, in words."""
    seconds: float
    num_ranks: int
    num_tensors: int
    num_parameters: int
    dropped: int
    trends: tuple[Trend, ...]
    noise_scale: NoiseScale
    gsnr_source: str | None
    gsnr_batch_size: float | None
    gsnr_caveat: str
    """Why the GSNR must not be taken at face value; empty if it can be."""
    blown_up: str
    """The reason why the GSNR of the layers means nothing, if the run blew up; else empty."""
    largest_spike: Spike | None
    layers_step: int | None
    layers: tuple[LayerRow, ...]
    worst: tuple[WorstList, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the record as plain values except for NaN, which the printer handles."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("worst", "progress")}
        data["trends"] = {trend.metric: trend.to_json() for trend in self.trends}
        data["noise_scale"] = asdict(self.noise_scale)
        data["largest_spike"] = asdict(self.largest_spike) if self.largest_spike else None
        data["layers"] = [asdict(row) for row in self.layers]
        worst = {found.metric: [asdict(row) for row in found.rows] for found in self.worst}
        return data | {name: worst.get(metric, []) for metric, name in WORST_NAMES.items()}

    @property
    def about(self) -> str:
        """The state of the run and its size, in a line."""
        ranks = f"{plural(self.num_ranks, 'rank')}, " if self.num_ranks > 1 else ""
        size = f"{self.num_parameters:,} parameters in {plural(self.num_tensors, 'tensor')}"
        return f"{self.progress}, {duration(self.seconds)}, {ranks}{size}"

    @property
    def shows_gsnr(self) -> bool:
        """Whether the GSNR of layers is known and means something."""
        return not self.blown_up and any(np.isfinite(row.gsnr) for row in self.layers)

    @property
    def gsnr_origin(self) -> str:
        """Source of the layers' GSNR, and the batch size it stands for."""
        at = f" at batch size {number(self.gsnr_batch_size)}" if self.gsnr_batch_size is not None else ""
        return f"GSNR from {self.gsnr_source}{at}"

    @property
    def latest(self) -> dict[str, float]:
        """The newest value of each metric that has a trend."""
        return {trend.metric: trend.latest for trend in self.trends}

    @property
    def no_layers(self) -> str:
        """Why there is nothing to show of layers; empty if there is."""
        known = np.isfinite([(row.grad_norm, row.update_ratio) for row in self.layers]).any()
        return f"Layers are not shown: {self.blown_up}." if self.blown_up and self.layers and not known else ""

    def trend(self, metric: str) -> Trend | None:
        """Returns the trend of one metric, None if the run has none."""
        return next((trend for trend in self.trends if trend.metric == metric), None)


def summarize(run: Run, *, whole_run: bool = True) -> Summary:
    """Reads the numbers of a run; of single tensors, on demand only the latest: reading all of them may take long."""
    source = _first_source(run, "gsnr", "layers") or _first_source(run, "gsnr", "tensors")
    layers_step, layers = layer_rows(run, source)
    worst = worst_lists(run, source, whole_run=whole_run)
    trends = tuple(trend for metric in TRENDS if (trend := _trend(run, metric)) is not None)
    shown = {source: [row.gsnr for row in layers]}
    shown[source] += [row.value for found in worst if found.metric == "gsnr" for row in found.rows]
    for trend in trends:
        if trend.metric == "gsnr":
            shown.setdefault(trend.source, []).append(trend.latest)
    caveats = (negative_gsnr(values, origin) for origin, values in shown.items())
    return Summary(
        run=str(run.path),
        last_step=run.last_step,
        state=state_of(run),
        progress=progress(run),
        seconds=float((run.meta["finished_at"] or run.meta["heartbeat"]) - run.meta["started_at"]),
        num_ranks=num_ranks(run.meta),
        num_tensors=len(run.tensors),
        num_parameters=sum(info.numel for info in run.tensors),
        dropped=run.dropped,
        trends=trends,
        noise_scale=_noise_scale(run),
        gsnr_source=source,
        gsnr_batch_size=_batch_size(run, source),
        gsnr_caveat=(adam_memory(run) if "adam" in shown else "") or next(filter(None, caveats), ""),
        blown_up=how_it_blew_up(run),
        largest_spike=_largest_spike(run),
        layers_step=layers_step,
        layers=layers,
        worst=worst,
    )


def step_batch(run: Run) -> float | None:
    """Returns the samples per step that the loop reported last; None if it did not."""
    counted = metric_of_every_step(run)
    sizes = np.empty(0) if counted is None else run.batch_sizes(counted)[1]
    known = sizes[np.isfinite(sizes)]
    return float(known[-1]) if known.size else None


def _first_source(run: Run, metric: str, kind: Kind) -> str | None:
    return next(iter(run.sources(metric, kind)), None)


def _trend(run: Run, metric: str) -> Trend | None:
    if metric not in run.metrics("values"):
        return None
    source = _first_source(run, metric, "values")
    steps, values = run.series(metric, source=source)
    seen = values[~np.isnan(values)]
    if metric == "gsnr" and not seen.size:
        return None
    first = float(seen[0]) if seen.size else NAN
    return Trend(metric=metric, source=source, steps=steps, values=values, first=first, latest=float(values[-1]))


def _noise_scale(run: Run) -> NoiseScale:
    source = _first_source(run, "noise_scale", "values")
    available = run.metrics("values")

    def latest(metric: str) -> float:
        values = run.series(metric, source=source)[1] if metric in available else np.empty(0)
        return float(values[-1]) if values.size else NAN

    value = latest("noise_scale")
    return NoiseScale(
        measured="noise_scale" in available,
        value=value,
        low=latest("noise_scale_low"),
        high=latest("noise_scale_high"),
        source=source,
        batch_known=step_batch(run) is not None,
        identifiable=bool(np.isfinite(value)),
    )


def _batch_size(run: Run, source: str | None) -> float | None:
    if source is None:
        return None
    kind: Kind = "layers" if source in run.sources("gsnr", "layers") else "tensors"
    sizes = run.batch_sizes("gsnr", kind=kind, source=source)[1][-1:]
    return float(sizes[0]) if sizes.size and not np.isnan(sizes[0]) else None


def _largest_spike(run: Run) -> Spike | None:
    """Returns the largest spike of the norm, with the layers whose tensors spiked then, if these were read."""
    if not {"grad/norm", "grad/spike_ratio"} <= set(run.metrics("values")):
        return None
    steps, ratios = run.series("grad/spike_ratio")
    if not np.isfinite(ratios).any():
        return None
    at = int(np.argmax(np.where(np.isfinite(ratios), ratios, -np.inf)))
    step = int(steps[at])
    norm_steps, norms = run.series("grad/norm")
    norm = float(norms[norm_steps == step][0]) if step in norm_steps else NAN
    layers: tuple[Worst, ...] = ()
    if "grad/spike_ratio" in run.metrics("tensors"):
        _, rows = run.matrix("grad/spike_ratio", since=step - 1, until=step)
        if len(rows):
            by = ByLayer(run)
            layers = _top(run.names("layers"), by.all_layers(by.reduced(rows[0], np.fmax)), step, count=3)
    return Spike(step=step, ratio=float(ratios[at]), norm=norm, layers=layers)


# -- layers, and tensors that stand out ----------------------------------------------------------------------------


def layer_rows(run: Run, source: str | None) -> tuple[int | None, tuple[LayerRow, ...]]:
    """Returns the step of the latest per-tensor reading, and every layer at it in depth order."""
    layers = run.names("layers")
    norm_step, norms = _latest(run, "grad/norm", "tensors")
    gsnr_step, gsnr = _latest(run, "gsnr", "layers", source)
    steps = [step for step in (norm_step, gsnr_step) if step is not None]
    if not steps or not layers:
        return None, ()
    by = ByLayer(run)
    update_step, updates = _latest(run, "update/norm", "tensors")
    weight_step, weights = _latest(run, "weight/norm", "tensors")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = by.norms(updates) / by.norms(weights) * (1 if update_step == weight_step else NAN)
    columns = {
        "grad_norm": by.all_layers(by.norms(norms)),
        "spike_ratio": by.all_layers(by.reduced(_latest(run, "grad/spike_ratio", "tensors")[1], np.fmax)),
        "gsnr": gsnr,
        "gsnr_low": _latest(run, "gsnr_low", "layers", source)[1],
        "gsnr_high": _latest(run, "gsnr_high", "layers", source)[1],
        "update_ratio": by.all_layers(ratios),
    }
    rows = (
        LayerRow(name=name, **{column: float(values[i]) for column, values in columns.items()})
        for i, name in enumerate(layers)
    )
    return max(steps), tuple(rows)


def how_it_blew_up(run: Run) -> str:
    """Returns how a run ended in NaN, or far above the loss it started at; empty if it did neither."""
    for metric, name in (("loss", "loss"), ("grad/norm", "gradient norm")):
        steps, values = run.series(metric) if metric in run.metrics("values") else (np.empty(0), np.empty(0))
        if values.size and not np.isfinite(values[-1]):
            last = np.flatnonzero(np.isfinite(values))[-1:]
            since = f" since step {int(steps[last[0] + 1]):,}" if last.size else " from the start"
            return f"the {name} is NaN or infinite{since}"
        known = values[np.isfinite(values)]
        if metric == "loss" and known.size >= 2 * ENDS and not _may_rise(run):
            first, final = (float(np.median(part)) for part in (known[:ENDS], known[-ENDS:]))
            if final > FAR * first > 0:
                return f"the loss rose from {number(first)} to {number(final)}"
    return ""


def _may_rise(run: Run) -> bool:
    """Returns whether the loss need not fall: in a GAN, or in reinforcement learning."""
    known = run.metrics("values")
    return "step/in_turn" in known or any((run.series(fact)[1] == 1).any() for fact in MAY_RISE if fact in known)


def _alike(run: Run, values: Floats, source: str | None) -> str:
    """Returns why the GSNR of tensors cannot be ranked; empty if it can be."""
    known = values[np.isfinite(values)]
    if known.size > 1 and known.max() - known.min() <= ALIKE * np.abs(known).max():
        return f"all {plural(known.size, 'value')} are alike"
    for kind, name in KINDS_WITH_INTERVALS:
        lows, highs = (_latest(run, f"gsnr_{end}", kind, source)[1] for end in ("low", "high"))
        if len(lows) > 1 and np.isfinite(lows).all() and lows.max() <= highs.min():
            return f"the 95% intervals of all {plural(len(lows), name)} overlap"
    return ""


def worst_lists(run: Run, source: str | None, *, whole_run: bool = True) -> tuple[WorstList, ...]:
    """Returns the tensors that stand out in the whole run, or at the latest reading, each list if there is any."""
    names, now = run.names("tensors"), "at the latest reading"
    origin = f"from {source}, {now}" if source else now
    spikes = "norm over its moving average, in the whole run"
    nonfinite = "elements when first seen; 1: at least one"
    gsnr_step, gsnr = _latest(run, "gsnr", "tensors", source)
    lowest = _top(names, gsnr, gsnr_step, lowest=True)
    update_step, updates = _latest(run, "update/ratio", "tensors")
    why = (how_it_blew_up(run) or _alike(run, gsnr, source)) if gsnr_step is not None else ""
    lists = (
        ("grad/nonfinite", "NaN or Inf in the gradient", nonfinite, _first_nonfinite(run) if whole_run else ()),
        ("gsnr", "Lowest GSNR", f"not ranked: {why}" if why else origin, () if why else lowest),
        ("grad/spike_ratio", "Largest spike ratio", spikes, _largest_spikes(run) if whole_run else ()),
        ("update/ratio", "Largest update/weight", now, _top(names, updates, update_step)),
    )
    return tuple(
        WorstList(metric=metric, title=title, remark=remark, rows=rows)
        for metric, title, remark, rows in lists
        if rows or (why and metric == "gsnr")
    )


def _largest_spikes(run: Run) -> tuple[Worst, ...]:
    """Returns the tensors with the largest spike ratios anywhere in the run, each with the step of its largest."""
    names = run.names("tensors")
    best = np.full(len(names), -np.inf)
    when = np.zeros(len(names), dtype=np.int64)
    for steps, rows in scan(run, "grad/spike_ratio"):
        known = np.where(np.isnan(rows), -np.inf, rows)
        at = known.argmax(axis=0)
        top = known.max(axis=0)
        better = top > best
        best[better], when[better] = top[better], steps[at[better]]
    return _top(names, np.where(best == -np.inf, np.nan, best), when)


def _first_nonfinite(run: Run) -> tuple[Worst, ...]:
    """Returns the tensors whose gradient ever held NaN or Inf, with how many at first and when, the earliest first.

    Those of one step come in the order of backward, so that the list starts where the finding says that it started.
    """
    found: dict[int, Worst] = {}
    names = run.names("tensors")
    for steps, rows in scan(run, "grad/nonfinite"):
        for row in np.flatnonzero((rows > 0).any(axis=0)).tolist():
            if row not in found:
                at = int(np.argmax(rows[:, row] > 0))
                found[row] = Worst(name=names[row], value=float(rows[at, row]), step=int(steps[at]))
    depths = {info.index: info.depth for info in run.tensors}
    order = sorted(found, key=lambda i: (found[i].step, -depths.get(i, -1), -i))
    return tuple(found[i] for i in order[:MAX_WORST])


def _latest(run: Run, metric: str, kind: Kind, source: str | None = None) -> tuple[int | None, Floats]:
    missing = np.full(len(run.names(kind)), np.nan)
    if metric not in run.metrics(kind):
        return None, missing
    steps, _ = run.times(metric, kind=kind, source=source)
    return run.table(metric, kind=kind, source=source, step=int(steps[-1])) if steps.size else (None, missing)


def _top(
    names: Sequence[str], values: Floats, steps: Any, *, lowest: bool = False, count: int = MAX_WORST
) -> tuple[Worst, ...]:
    """Returns the most extreme values with their names; none if there was no reading."""
    known = np.flatnonzero(~np.isnan(values) if lowest else values > 0)  # a largest value of zero is no news
    order = known[np.argsort(values[known] if lowest else -values[known], kind="stable")]
    when = np.broadcast_to(steps, values.shape)
    return tuple(Worst(name=names[i], value=float(values[i]), step=int(when[i])) for i in order[:count])
