"""What a run shows, as numbers: the content of `gradvitals report`, for the screen and for JSON alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.show.adam_memory import doubt_of_adam
from gradvitals.show.again import was_diagnosed
from gradvitals.show.below_zero import about_below_zero, of_tables
from gradvitals.show.checkup import judge_run, knows_batch, num_ranks
from gradvitals.show.ending import State, state_of
from gradvitals.show.standouts import (
    LayerRow,
    Worst,
    extremes,
    first_nonzero,
    latest_extremes,
    layer_rows,
    layers_hit,
)
from gradvitals.show.verdict import Verdict, about_itself
from gradvitals.store.frames import Kind
from gradvitals.store.reader import Run
from gradvitals.types import Action, Finding, FloatArray

NAN = float("nan")


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
        """First, latest and extremes; `gradvitals export` has the whole series."""
        seen = self.values[np.isfinite(self.values)]
        return {
            "metric": self.metric,
            "source": self.source,
            "first": self.first,
            "latest": self.latest,
            "min": seen.min() if seen.size else NAN,
            "max": seen.max() if seen.size else NAN,
        }


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """The latest noise scale, in samples; NaN where the readings do not identify it."""

    measured: bool = False
    """Whether the run has it at all: it needs micro-batches, and the batch size to be told."""
    value: float = NAN
    low: float = NAN
    high: float = NAN
    source: str | None = None
    batch_told: bool = False
    """Whether the loop told how many samples a step has."""

    @property
    def identifiable(self) -> bool:
        """Whether there is a value to speak of."""
        return bool(np.isfinite(self.value))


@dataclass(frozen=True, kw_only=True)
class Spike:
    """The largest jump of the global norm over its moving average, and the layers it hit most."""

    step: int
    ratio: float
    norm: float
    layers: tuple[Worst, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything `gradvitals report` has to say."""

    run: str
    last_step: int | None
    state: State
    """`running`, `finished`, or `stopped` for a run that ended without saying so."""
    seconds: float
    num_ranks: int
    """Processes that it was recorded with."""
    num_tensors: int
    num_parameters: int
    dropped: int
    trends: tuple[Trend, ...]
    noise_scale: NoiseScale
    gsnr_source: str | None
    gsnr_batch_size: float | None
    gsnr_doubt: str
    """Why the GSNR is not to be trusted as it is shown; empty where it is."""
    largest_spike: Spike | None
    layers_step: int | None
    layers: tuple[LayerRow, ...]
    lowest_gsnr: tuple[Worst, ...]
    largest_spikes: tuple[Worst, ...]
    largest_updates: tuple[Worst, ...]
    nonfinite: tuple[Worst, ...]
    diagnosed: bool
    """Whether the training was judged while it was recorded."""
    verdict: Verdict
    """How the run is, with what was found about the training, worst first."""
    monitoring: tuple[Finding, ...]
    """What gradvitals says about itself."""
    actions: tuple[Action, ...]
    """What a Guard or a schedule did, or would have done."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found about the training, worst first."""
        return tuple(item.finding for item in self.verdict.findings)

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values but for NaN, which the printer deals with."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["trends"] = {trend.metric: trend.to_json() for trend in self.trends}
        data["noise_scale"] = {**asdict(self.noise_scale), "identifiable": self.noise_scale.identifiable}
        data["largest_spike"] = asdict(self.largest_spike) if self.largest_spike else None
        for name in ("layers", "lowest_gsnr", "largest_spikes", "largest_updates", "nonfinite"):
            data[name] = [asdict(item) for item in data[name]]
        data["verdict"] = self.verdict.to_json()
        data["findings"] = [item.to_json() for item in self.verdict.findings]
        data["monitoring"] = [finding.to_json() for finding in self.monitoring]
        data["actions"] = [action.to_json() for action in self.actions]
        return data

    def trend(self, metric: str) -> Trend | None:
        """The trend of one metric, None where the run has none."""
        return next((trend for trend in self.trends if trend.metric == metric), None)


def summarize(run: Run) -> Summary:
    """Read from a run what `gradvitals report` shows."""
    meta, findings = run.meta, run.findings()
    source = _first_source(run, "gsnr", "layers") or _first_source(run, "gsnr", "tensors")
    layers_step, layers = layer_rows(run, source)
    trends = [_trend(run, metric) for metric in ("loss", "grad/norm", "gsnr", "vrgd/mean")]
    lowest = latest_extremes(run, "gsnr", source=source, lowest=True)
    return Summary(
        run=str(run.path),
        last_step=run.last_step,
        state=state_of(run),
        seconds=(meta["finished_at"] or meta["heartbeat"]) - meta["started_at"],
        num_ranks=num_ranks(meta),
        num_tensors=len(run.tensors),
        num_parameters=sum(info.numel for info in run.tensors),
        dropped=run.dropped,
        trends=tuple(trend for trend in trends if trend is not None),
        noise_scale=_noise_scale(run),
        gsnr_source=source,
        gsnr_batch_size=_batch_size(run, source),
        gsnr_doubt=_gsnr_doubt(run, source, trends, of_tables(layers, lowest)),
        largest_spike=_largest_spike(run),
        layers_step=layers_step,
        layers=layers,
        lowest_gsnr=lowest,
        largest_spikes=extremes(run, "grad/spike_ratio"),
        largest_updates=latest_extremes(run, "update/ratio"),
        nonfinite=first_nonzero(run, "grad/nonfinite"),
        diagnosed=was_diagnosed(meta),
        verdict=judge_run(run, findings),
        monitoring=about_itself(findings),
        actions=tuple(run.actions()),
    )


def _gsnr_doubt(run: Run, source: str | None, trends: Sequence[Trend | None], in_tables: Sequence[float]) -> str:
    """Why what is shown as GSNR, in tables of this source and as a trend, is not to be taken as it stands."""
    whole = next((trend for trend in trends if trend is not None and trend.metric == "gsnr"), None)
    doubt = doubt_of_adam(run) if "adam" in (source, whole.source if whole else None) else ""
    return (
        doubt
        or about_below_zero(in_tables, source)
        or (about_below_zero([whole.latest], whole.source) if whole else "")
    )


def _first_source(run: Run, metric: str, kind: Kind) -> str | None:
    return next(iter(run.sources(metric, kind)), None)


def _trend(run: Run, metric: str) -> Trend | None:
    if metric not in run.metrics("values"):
        return None
    source = _first_source(run, metric, "values")
    steps, values = run.series(metric, source=source)
    if np.isnan(values).all() and metric == "gsnr":
        return None
    seen = values[~np.isnan(values)]
    first = float(seen[0]) if seen.size else NAN
    return Trend(metric=metric, source=source, steps=steps, values=values, first=first, latest=float(values[-1]))


def _noise_scale(run: Run) -> NoiseScale:
    source = _first_source(run, "noise_scale", "values")
    available = run.metrics("values")
    parts = {}
    for name, metric in (("value", "noise_scale"), ("low", "noise_scale_low"), ("high", "noise_scale_high")):
        values = run.series(metric, source=source)[1] if metric in available else np.empty(0)
        parts[name] = float(values[-1]) if values.size else NAN
    return NoiseScale(source=source, measured="noise_scale" in available, batch_told=knows_batch(run), **parts)


def _batch_size(run: Run, source: str | None) -> float | None:
    if source is None:
        return None
    kind: Kind = "layers" if source in run.sources("gsnr", "layers") else "tensors"
    _, sizes = run.batch_sizes("gsnr", kind=kind, source=source)
    return float(sizes[-1]) if sizes.size and not np.isnan(sizes[-1]) else None


def _largest_spike(run: Run) -> Spike | None:
    if not {"grad/norm", "grad/spike_ratio"} <= set(run.metrics("values")):
        return None
    steps, ratios = run.series("grad/spike_ratio")
    if not np.isfinite(ratios).any():
        return None
    at = int(np.argmax(np.where(np.isfinite(ratios), ratios, -np.inf)))
    step = int(steps[at])
    norm_steps, norms = run.series("grad/norm")
    norm = float(norms[norm_steps == step][0]) if step in norm_steps else NAN
    return Spike(step=step, ratio=float(ratios[at]), norm=norm, layers=layers_hit(run, step))
