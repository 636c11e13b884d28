"""Two runs compared: the first step at which they diverge for good, and the settings and findings that differ."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from gradvitals.diagnose.history import finite_median, step_spread
from gradvitals.format import listed, number
from gradvitals.report.catalog import name_of
from gradvitals.report.format import clean, cut, in_sentence, percent, plural
from gradvitals.report.replay import diagnose_run
from gradvitals.report.series import ByLayer, Floats, Steps
from gradvitals.report.state import num_ranks
from gradvitals.report.verdict import LABELS, Level, judge_run
from gradvitals.store.reader import Run, open_run

WINDOW_SHARE = 50
"""Curves are smoothed over one part in this many of the steps that both runs have."""
WINDOW = (5, 101)
"""The least and the most steps of that window."""
NOISE = 4.0
"""Standard errors of the smoothed difference from which two curves are apart."""
SHARE = 0.02
"""Curves that differ by less than this share are not apart, however little noise they have."""
FINAL_SHARE = 20
"""The final value is the median of the last part in this many of the steps."""
SAME = 1e-6
"""Relative difference under which two numbers are the same."""
METRICS = {"loss": "losses", "grad/norm": "gradient norms", "lr": "learning rates"}
MAX_SETTINGS = 20
NAMES = {"extra.program": "script", "extra.model": "model"}
"""Names of the settings that `gradvitals run` keeps."""
IGNORED = ("config.quiet", "config.worker", "config.extra", "extra.command")
"""Settings that say nothing about training."""


@dataclass(frozen=True, kw_only=True)
class CurveDiff:
    """One curve of both runs: from which step on they stay apart, and how far."""

    metric: str
    step: int | None
    """The first step from which on the curves stay apart; None if they do not."""
    a: float
    """The median of run A over `window` steps from there on, or of the last ones if the curves do not separate."""
    b: float
    window: int
    final_a: float
    """The median of the last `final_window` steps of run A."""
    final_b: float
    """The same of run B, which may have more steps or fewer."""
    final_window: int
    last_steps: tuple[int, int]
    """The last step of each run."""
    first_difference: int | None
    """The first step at which the raw numbers differ; None if they never do."""
    layer: str | None = None
    """The layer whose gradient norm this is."""
    apart: tuple[int, int] | None = None
    """If the curves do not stay apart: the first and last step of the longest stretch in which they were."""


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    run: str
    steps: int
    level: Level
    headline: str


@dataclass(frozen=True, kw_only=True)
class RunDiff:
    """The differences between two runs. Prints itself.

    Example:
        >>> print(gv.diff("runs/before", "runs/after"))  # doctest: +SKIP
    """

    a: Side
    b: Side
    common_steps: int
    """Steps that both runs have."""
    curves: tuple[CurveDiff, ...]
    """Loss, gradient norm and learning rate, then the layer that separates first."""
    settings: Mapping[str, tuple[Any, Any]]
    """By name, the values that differ: of A and of B."""
    gained: tuple[str, ...]
    """Ids of findings that only B has."""
    lost: tuple[str, ...]
    """Ids of findings that only A has."""

    def curve(self, metric: str) -> CurveDiff | None:
        """Returns the curve of one metric of the whole run; None if it is not in both."""
        return next((curve for curve in self.curves if curve.metric == metric and curve.layer is None), None)

    def sentences(self) -> tuple[str, ...]:
        """Returns the differences in words, the most important first."""
        lines = [] if self.common_steps else ["The runs have no steps in common, so their curves cannot be compared."]
        lines += [line for curve in self.curves for line in _describe(curve)]
        settings = (f"{cut(name, 60)} {_value(a)} → {_value(b)}" for name, (a, b) in self.settings.items())
        changed = listed(settings, MAX_SETTINGS)
        lines.append(f"Settings that differ (A → B): {changed}." if changed else "All recorded settings are equal.")
        for ids, where in ((self.lost, "A"), (self.gained, "B")):
            names = (
                f"{in_sentence(name_of(name))} [{name}]" + (f" ×{count}" if count > 1 else "")
                for name, count in Counter(ids).items()
            )
            lines += [f"Only in {where}: {', '.join(names)}."] if ids else []
        lines += [] if self.lost or self.gained else ["Both runs have the same findings."]
        return tuple(lines)

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as plain JSON values."""
        return {
            "a": asdict(self.a),
            "b": asdict(self.b),
            "common_steps": self.common_steps,
            "curves": [asdict(curve) for curve in self.curves],
            "settings": {name: {"a": a, "b": b} for name, (a, b) in self.settings.items()},
            "findings": {"gained": list(self.gained), "lost": list(self.lost)},
            "sentences": list(self.sentences()),
        }

    def __str__(self) -> str:
        width = max(len(self.a.run), len(self.b.run))
        head = [
            clean(f"{name}  {side.run:<{width}}  {plural(side.steps, 'step'):>12}  {LABELS[side.level]}")
            for name, side in (("A", self.a), ("B", self.b))
        ]
        return "\n".join([*head, "", *map(clean, self.sentences())])


def diff(a: Run | str | os.PathLike[str], b: Run | str | os.PathLike[str], *, replay: bool = True) -> RunDiff:
    """Compare two runs: from which step on they are apart, and which settings and findings differ. Needs no torch.

    Args:
        a: A run, or its folder.
        b: The run to compare it with.
        replay: Whether the rules first read a run that was recorded without diagnosis, which takes a while if it is
            long.

    Returns:
        The differences; `print` shows them in words.
    """
    with ExitStack() as stack:
        first, second = (run if isinstance(run, Run) else stack.enter_context(open_run(run)) for run in (a, b))
        sides, serious = [], []
        for run in (first, second):
            findings = diagnose_run(run).findings if replay else run.findings
            verdict = judge_run(run, findings)
            sides.append(Side(str(run.path), verdict.steps, verdict.level, verdict.headline))
            serious.append(Counter(one.id for one in findings if one.severity != "info"))
        left, right = _recorded(first), _recorded(second)
        names = [name for name in {**left, **right} if not name.startswith(IGNORED)]
        common, curves = _curves(first, second)
        return RunDiff(
            a=sides[0],
            b=sides[1],
            common_steps=common,
            curves=tuple(curves),
            settings={name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)},
            gained=tuple((serious[1] - serious[0]).elements()),
            lost=tuple((serious[0] - serious[1]).elements()),
        )


# -- curves ----------------------------------------------------------------------------------------------------------


def _curves(a: Run, b: Run) -> tuple[int, list[CurveDiff]]:
    shared = [metric for metric in METRICS if all(metric in run.metrics("values") for run in (a, b))]
    common, curves = 0, []
    for metric in shared:
        own = a.series(metric), b.series(metric)
        steps, left, right = _aligned(*own)
        common = max(common, len(steps))
        if len(steps):
            curve = _curve(metric, steps, left, right)
            final_a, final_b = (finite_median(values[-curve.final_window :]) for _, values in own)
            ends = int(own[0][0][-1]), int(own[1][0][-1])
            curves.append(replace(curve, final_a=final_a, final_b=final_b, last_steps=ends))
    first = _first_layer(a, b)
    return common, curves if first is None else [*curves, first]


def _first_layer(a: Run, b: Run) -> CurveDiff | None:
    """Returns the layer whose gradient norm separates first; None if none does, or the runs share no layers."""
    names = [name for name in a.names("layers") if name in b.names("layers")]
    if not names or not all("grad/norm" in run.metrics("tensors") for run in (a, b)):
        return None
    norms = []
    for run in (a, b):
        steps, rows = run.matrix("grad/norm")
        by = ByLayer(run)
        places = [run.names("layers").index(name) for name in names]
        norms.append((steps, by.all_layers(by.norms(rows))[:, places]))
    steps, left, right = _aligned(*norms)
    curves = [_curve("grad/norm", steps, left[:, at], right[:, at], name) for at, name in enumerate(names)]
    found = (curve for curve in curves if curve.step is not None)
    return min(found, key=lambda curve: curve.step or 0, default=None)


def _aligned(a: tuple[Steps, Floats], b: tuple[Steps, Floats]) -> tuple[Steps, Floats, Floats]:
    steps, left, right = np.intersect1d(a[0], b[0], assume_unique=True, return_indices=True)
    return steps, a[1][left], b[1][right]


def _curve(metric: str, steps: Steps, a: Floats, b: Floats, layer: str | None = None) -> CurveDiff:
    at, width = _separation(a, b)
    separated = at < len(steps)
    there = slice(at, at + width) if separated else slice(-width, None)
    differ = np.flatnonzero(~_same(a, b))
    last = max(1, len(steps) // FINAL_SHARE)
    stretch = None if separated else _longest_apart(a, b)
    return CurveDiff(
        metric=metric,
        step=int(steps[at]) if separated else None,
        a=finite_median(a[there]),
        b=finite_median(b[there]),
        window=len(a[there]),
        final_a=finite_median(a[-last:]),
        final_b=finite_median(b[-last:]),
        final_window=last,
        last_steps=(int(steps[-1]), int(steps[-1])),
        first_difference=int(steps[differ[0]]) if differ.size else None,
        layer=layer,
        apart=None if stretch is None else (int(steps[stretch[0]]), int(steps[stretch[1]])),
    )


def _separation(a: Floats, b: Floats) -> tuple[int, int]:
    """Returns the place from which two curves stay apart by more than their noise, and the width of the smoothing."""
    apart, raw, width = _apart(a, b)
    together, same = np.flatnonzero(~apart), _same(a, b)
    at = int(together[-1]) + 1 if together.size else 0
    # Smoothing shifts a sudden change by up to half a window: the raw numbers show where it was.
    while at < len(a) and same[at]:
        at += 1
    while 0 < at < len(a) and raw[at - 1]:
        at -= 1
    if len(a) - at < width and np.isfinite(a[at:]).all() and np.isfinite(b[at:]).all():
        at = len(a)  # too few steps to call it for good
    return at, width


def _longest_apart(a: Floats, b: Floats) -> tuple[int, int] | None:
    """Returns the first and the last place of the longest stretch in which two curves are apart, if it is no noise."""
    apart, _, width = _apart(a, b)
    ends = np.flatnonzero(np.diff(np.concatenate(([0], apart.astype(int), [0]))))
    if not len(ends):
        return None
    starts, stops = ends[::2], ends[1::2]
    longest = int((stops - starts).argmax())
    return (int(starts[longest]), int(stops[longest]) - 1) if stops[longest] - starts[longest] >= width else None


def _apart(a: Floats, b: Floats) -> tuple[Any, Any, int]:
    """Returns where the smoothed curves are apart, where the raw ones are, and the width of the smoothing.

    Noise grows with what it is noise of, so positive curves are compared by their logarithms.
    """
    width = int(np.clip(len(a) // WINDOW_SHARE, *WINDOW)) | 1
    known = np.isfinite(a) & np.isfinite(b)
    if (np.minimum(a, b)[known] > 0).all():
        with np.errstate(divide="ignore", invalid="ignore"):
            a, b = np.log(a), np.log(b)
        share = np.full(len(a), SHARE)
    else:
        share = SHARE * np.maximum(np.abs(a), np.abs(b))
    noise = step_spread((a - b)[known]) if known.sum() > 1 else 0.0
    smooth = _beyond(_smooth(a, width), _smooth(b, width), np.maximum(NOISE * noise / np.sqrt(width), share))
    return smooth, _beyond(a, b, np.maximum(NOISE * noise, share)), width


def _beyond(a: Floats, b: Floats, least: Floats) -> Any:
    """Returns where two curves differ by more than `least`, or where only one of them is finite."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b) > least
    return np.where(np.isfinite(a) & np.isfinite(b), apart, np.isfinite(a) != np.isfinite(b)) & ~_same(a, b)


def _smooth(values: Floats, width: int) -> Floats:
    if len(values) < width:
        return values
    padded = np.pad(values, width // 2, mode="edge")
    rolled = np.lib.stride_tricks.sliding_window_view(padded, width)
    known = np.isfinite(rolled)
    middle: Floats = np.median(np.where(known, rolled, 0.0), axis=-1)
    if not known.all():
        rows = np.flatnonzero(~known.all(axis=-1))
        middle[rows] = [finite_median(rolled[row]) if 2 * known[row].sum() > width else np.nan for row in rows]
    return middle


def _same(a: Floats, b: Floats) -> Any:
    with np.errstate(invalid="ignore"):
        return (np.abs(a - b) <= SAME * np.maximum(np.abs(a), np.abs(b))) | (np.isnan(a) & np.isnan(b)) | (a == b)


# -- settings and words ----------------------------------------------------------------------------------------------


def _recorded(run: Run) -> dict[str, Any]:
    """Returns everything a run was started with, under flat names."""
    meta = run.meta
    found: dict[str, Any] = {}
    if "lr" in run.metrics("values"):
        rates = run.series("lr")[1]
        found["lr"] = float(f"{np.nanmax(rates):.6g}") if np.isfinite(rates).any() else None
    sizes = run.batch_sizes("loss")[1] if "loss" in run.metrics("values") else np.empty(0)
    found["batch_size"] = float(sizes[-1]) if sizes.size and np.isfinite(sizes[-1]) else None
    found["parameters"] = sum(info.numel for info in run.tensors)
    found["ranks"] = num_ranks(meta)
    found |= _flat("", meta.get("facts")) | _flat("extra.", meta.get("extra")) | _flat("config.", meta.get("config"))
    found["torch"] = meta.get("torch")
    return {NAMES.get(name, name): value for name, value in found.items()}


def _flat(prefix: str, content: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in content.items() if isinstance(content, Mapping) else ():
        found |= _flat(f"{prefix}{name}.", value) or {f"{prefix}{name}": value}
    return found


def _describe(curve: CurveDiff) -> Iterator[str]:
    names, both = f"The {METRICS[curve.metric]}", f"{number(curve.a)} in A, {number(curve.b)} in B"
    from_there = f"(medians of the {curve.window:,} steps from there: {both})"
    if curve.layer is not None:
        yield f"The first layer to diverge is {cut(curve.layer)}, at step {curve.step:,} {from_there}."
        return
    longer = len(set(curve.last_steps)) > 1
    if curve.first_difference is None:
        yield f"{names} are the same at every step{' that both have' if longer else ''}."
    elif curve.apart is not None:
        begin, end = curve.apart
        at_end = f"(medians of the last {curve.window:,} steps: {both})"
        yield f"{names} are apart from step {begin:,} to {end:,} and meet again {at_end}."
    elif curve.step is None:
        yield f"{names} differ from step {curve.first_difference:,} on, but only within their noise."
    elif curve.step == curve.first_difference:
        yield f"{names} diverge for good at step {curve.step:,} {from_there}."
    else:
        first = f"first differ at step {curve.first_difference:,} and diverge for good at step {curve.step:,}"
        yield f"{names} {first} {from_there}."
    if curve.metric == "loss" and (longer or curve.first_difference is not None):
        a, b = curve.final_a, curve.final_b
        of = f"median of the last {curve.final_window:,} steps" if curve.final_window > 1 else "of the last step"
        places = [f" at step {last:,}" if longer else "" for last in curve.last_steps]
        yield f"Final loss ({of}): {number(a)} in A{places[0]}, {number(b)} in B{places[1]}{_change(a, b)}."


def _change(a: float, b: float) -> str:
    if not (np.isfinite(a) and np.isfinite(b)) or a <= 0 or abs(b - a) <= SAME * a:
        return ""
    if b > 2 * a:
        return f" ({number(b / a)} times higher)"
    if a > 10 * b:
        return f" ({number(a / b)} times lower)" if b > 0 else ""
    return f" ({percent(abs(b - a) / a, 2)} {'lower' if b < a else 'higher'})"


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_value, value))})"
    return "none" if value is None else cut(number(value), 60)
