"""Views of a run for the page: JSON records with short, printable texts, and series and heatmaps as bytes."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradvitals.errors import RunError, RunNotFoundError
from gradvitals.report.catalog import name_of
from gradvitals.report.diff import RunDiff
from gradvitals.report.format import clean, cut, fix_snippet, summarize_actions, where
from gradvitals.report.listing import RunFile
from gradvitals.report.replay import UNDIAGNOSED, was_diagnosed
from gradvitals.report.series import CURVES, CellReducer, Floats, is_averaged, layer_kinds, table_of
from gradvitals.report.state import num_ranks, state_of
from gradvitals.report.summary import worst_lists
from gradvitals.report.verdict import RankedFinding, Verdict, judge_run, self_reports
from gradvitals.store.blocks import Kind
from gradvitals.store.reader import Run, min_max_buckets
from gradvitals.types import Action

MAX_FINDINGS = 200
MAX_TENSORS = 50
MAX_ACTIONS = 400
NAME = 300
"""Characters of a name that are shown."""
NAMES = ("id", "name", "kind", "finding", "host", "version", "A", "B", "before", "after", "cost", "when", "follows")
"""What has names in it; everything else is text."""
TEXT = 2_000
"""Characters of a sentence that are shown."""

TENSOR_CHARTS = ("grad/norm", "gsnr", "update/ratio", "weight/norm")
"""The charts of one tensor, layer or head."""

HeatmapKind = Literal["norm", "gsnr", "update", "dead", "zero"]
HeatmapRows = Literal["layers", "tensors", "heads"]
HEATMAPS: dict[HeatmapKind, str] = {
    "norm": "grad/norm",
    "gsnr": "gsnr",
    "update": "update/ratio",
    "dead": "activation/dead_fraction",
    "zero": "grad/zero_fraction",
}
MAX_COLUMNS = 800
MAX_NUMBERS = 4_000_000
"""Rows × columns of one heatmap."""
NUMBERS_AT_A_TIME = 1 << 20
HEATMAP_HEADER = struct.Struct("<IIdd")
"""Rows, columns, the first step after the last column, and the last step that was read."""
MAX_BUCKETS = 4_000
MAX_METRICS = 4
"""Metrics of one response."""
SERIES_HEADER = struct.Struct("<IIdd")
"""Points, metrics, how many readings they stand for, and the last step of these. Then float64 the last reading of each
metric, which the mean of the last bucket is not."""

_one_heatmap_at_a_time = threading.Semaphore(1)


def short(text: str, limit: int = NAME) -> str:
    """Returns a text as it is shown: control characters as escapes, without its middle if it is very long."""
    return clean(cut(text, limit))


# -- JSON ----------------------------------------------------------------------------------------------------------


def shown(content: Any, limit: int = TEXT) -> Any:
    """Returns a record with every text in it as it is shown."""
    if isinstance(content, str):
        return short(content, limit)
    if isinstance(content, Mapping):
        return {key: shown(value, NAME if key in NAMES else TEXT) for key, value in content.items()}
    return [shown(value, limit) for value in content] if isinstance(content, (list, tuple)) else content


def list_entry(file: RunFile, run: Run) -> dict[str, Any]:
    """Returns a run for the list of runs."""
    return _entry(file, run, judge_run(run, run.findings))


def _entry(file: RunFile, run: Run, verdict: Verdict) -> dict[str, Any]:
    meta = run.meta
    undiagnosed = verdict.steps and not was_diagnosed(meta)
    entry = {
        "id": file.id,
        "name": file.name,
        "state": state_of(run),
        "level": verdict.level if verdict.steps and not undiagnosed else "unknown",
        "line": UNDIAGNOSED if undiagnosed else verdict.headline,
        "last_step": run.last_step,
        "steps": verdict.steps,
        "open": verdict.num_open,
        "started_at": meta["started_at"],
        "heard_at": meta["finished_at"] or meta["heartbeat"],
    }
    return {**shown(entry), "charts": _charts(run, CURVES, "values")}


def unread_entry(file: RunFile) -> dict[str, Any]:
    """Returns a run that was not read yet for the list of runs."""
    unknown = dict.fromkeys(("last_step", "started_at", "heard_at"))
    own = {"id": file.id, "name": short(file.name), "state": "unread", "level": "pending", "line": "Not read yet."}
    return {**own, **unknown, "steps": 0, "open": 0, "charts": []}


def error_entry(file: RunFile, reason: str) -> dict[str, Any]:
    """Returns a run that could not be read for the list of runs."""
    return {**unread_entry(file), "state": "error", "level": "unknown", "line": short(reason, TEXT)}


def overview(file: RunFile, run: Run) -> dict[str, Any]:
    """Returns everything about a run that the first screen needs beside the charts."""
    meta, findings, actions = run.meta, run.findings, run.actions
    verdict = judge_run(run, findings)
    rows = _row_numbers(run)
    about = {
        "told": run.num_records(),
        "segments": len(run.segments),
        "cause": verdict.cause,
        "fix": verdict.fix,
        "now": time.time(),
        "host": str(meta["hostname"]),
        "version": str(meta.get("version", "")),
        "num_tensors": len(run.tensors),
        "num_parameters": sum(info.numel for info in run.tensors),
        "num_ranks": num_ranks(meta),
        "dropped": run.dropped,
        "num_findings": len(verdict.ranked),
        "monitoring": [
            {"title": finding.title, "step": finding.first_step, "fixes": finding.fixes[:1]}
            for finding in self_reports(findings)[:MAX_FINDINGS]
        ],
        "actions": [_action(action) for action in actions[-MAX_ACTIONS:]],
        "num_actions": len(actions),
        "acted": [line.strip() for line in summarize_actions(actions).splitlines()] if actions else [],
    }
    return {
        **_entry(file, run, verdict),
        **shown(about),
        "snippet": _lines(fix_snippet(verdict.fix)),
        "findings": [_finding(item, rows, live=verdict.live) for item in verdict.ranked[:MAX_FINDINGS]],
        "tensor_charts": _charts(run, TENSOR_CHARTS, "tensors"),
        "layer_charts": _charts(run, TENSOR_CHARTS, "layers"),
        "head_charts": _charts(run, TENSOR_CHARTS, "heads"),
        "pictures": _heatmaps(run),
    }


def _lines(snippet: str) -> str:
    return "\n".join(short(line, TEXT) for line in snippet.splitlines()[:20])


def layout(run: Run) -> dict[str, Any]:
    """Returns the layers in depth order, with what they are and the rows of their tensors and attention heads."""
    infos, heads = run.tensors, run.names("heads")
    kinds = layer_kinds(infos)
    layers: dict[str, dict[str, Any]] = {
        name: {"name": short(name), "kind": short(kinds.get(name, "")), "tensors": [], "heads": []}
        for name in run.names("layers")
    }
    for row, info in enumerate(infos):
        if info.layer in layers:
            layers[info.layer]["tensors"].append(row)
    for row, name in enumerate(heads):
        module = name.rpartition("/")[0]
        while module and module not in layers:  # a head belongs to the innermost layer around its module
            module = module.rpartition(".")[0]
        if module in layers:
            layers[module]["heads"].append(row)
    return {
        "layers": list(layers.values()),
        "tensors": [short(name) for name in run.names("tensors")],
        "shapes": ["×".join(map(str, info.shape[:8])) or "scalar" for info in infos],
        "heads": [short(name) for name in heads],
    }


def difference(found: RunDiff, a: RunFile, b: RunFile) -> dict[str, Any]:
    """Returns how run B differs from run A, as `gradvitals diff` prints it, with the names of the runs."""
    return {"names": shown({"A": a.name, "B": b.name}), "sentences": shown(found.sentences())}


def worst_tensors(run: Run) -> dict[str, Any]:
    """Returns the tensors that stand out, as `gradvitals report` lists them."""
    places = _row_numbers(run)
    found = worst_lists(run, next(iter(run.sources("gsnr", "tensors")), None))
    lists = [
        {
            "metric": one.metric,
            "title": f"{one.title}, {one.remark}",
            "rows": [{**asdict(row), "row": places.get(row.name)} for row in one.rows],
        }
        for one in found
    ]
    return {"lists": shown(lists)}


def _row_numbers(run: Run) -> dict[str, int]:
    return {name: at for at, name in reversed(list(enumerate(run.names("tensors"))))}


def _charts(run: Run, wanted: Sequence[str], kind: Kind) -> list[dict[str, Any]]:
    """Returns each chart with its metrics: a value, and the ends of its interval."""
    available = run.metrics(kind)
    return [
        {
            "metric": metric,
            "metrics": [name for name in (metric, f"{metric}_low", f"{metric}_high") if name in available],
            "source": next(iter(run.sources(metric, kind)), None),
        }
        for metric in wanted
        if metric in available
    ]


def _finding(item: RankedFinding, rows: Mapping[str, int], *, live: bool) -> dict[str, Any]:
    finding = item.finding
    kept = ("id", "severity", "title", "first_step", "last_step", "found_step", "rank", "follows")
    about = {
        **{name: getattr(finding, name) for name in kept},
        "name": name_of(finding.id),
        "weight": item.weight,
        "open": item.is_open,
        "when": item.when(live=live),
        "where": where(finding) if finding.tensors else "",
        "num_tensors": len(finding.tensors),
        "tensors": [{"name": name, "row": rows.get(name)} for name in finding.tensors[:MAX_TENSORS]],
        "seen": item.evidence,
        "causes": finding.causes[:8],
        "fixes": finding.fixes[:8],
    }
    return {**shown(about), "snippet": _lines(fix_snippet(next(iter(finding.fixes), None)))}


def _action(action: Action) -> dict[str, Any]:
    def facts(content: Mapping[str, Any]) -> list[str]:
        return [f"{key.replace('_', ' ')}: {value}" for key, value in list(content.items())[:12]]

    kept = {name: getattr(action, name) for name in ("kind", "step", "taken", "reason")}
    changes = {name: facts(getattr(action, name)) for name in ("before", "after", "cost")}
    return {**kept, **changes, "finding": action.finding or "", "text": str(action)}


# -- series --------------------------------------------------------------------------------------------------------


def series_bytes(
    run: Run,
    metrics: Sequence[str],
    *,
    kind: Kind = "values",
    row: int = 0,
    source: str | None = None,
    since: int | None = None,
    until: int | None = None,
    buckets: int = MAX_BUCKETS,
) -> bytes:
    """Returns one or more metrics of one row over steps, in at most `buckets` points that keep every peak.

    The first metric decides which steps there are. Layout, little-endian: `SERIES_HEADER`, float64 steps, float64
    times in seconds since the epoch, then per metric float32 minimum, maximum and mean of each bucket, and how many of
    its readings are NaN or infinite.
    """
    where: dict[str, Any] = {"source": source or next(iter(run.sources(metrics[0], kind)), None), "since": since}
    if kind != "values":
        names = run.names(kind)
        if not 0 <= row < len(names):
            has = f"expected a number from 0 to {len(names) - 1}, as this run has {kind}"
            raise RunNotFoundError(f"row is {row}; {has}")
        where |= {"rank": row} if kind == "ranks" else {kind[:-1]: names[row]}
    with run.moment():
        steps, times = run.times(metrics[0], **where)
        wanted = slice(0, None if until is None else int(np.searchsorted(steps, until, "right")))
        steps, times = steps[wanted], times[wanted]
        known = run.metrics(kind)
        empty = np.zeros(0, dtype=np.int64), np.zeros(0)
        columns = np.full((len(metrics), steps.size), np.nan)
        for column, name in zip(columns, metrics, strict=True):
            own, values = run.series(name, **where) if name in known else empty
            _, at, of = np.intersect1d(steps, own, assume_unique=True, return_indices=True)
            column[at] = values[of]
    last = float(steps[-1]) if steps.size else float("nan")
    parts = [_bucket(steps, column, buckets) for column in columns]
    starts = np.arange(buckets) * steps.size // buckets if steps.size > buckets else np.arange(steps.size)
    body = [SERIES_HEADER.pack(starts.size, len(columns), float(steps.size), last)]
    body += [(columns[:, -1] if steps.size else np.full(len(columns), np.nan)).astype("<f8").tobytes()]
    body += [steps[starts].astype("<f8").tobytes(), times[starts].astype("<f8").tobytes()]
    with np.errstate(over="ignore"):
        body += [array.astype("<f4").tobytes() for part in parts for array in part]
    return b"".join(body)


def _bucket(steps: NDArray[np.int64], values: Floats, buckets: int) -> tuple[Floats, Floats, Floats, Floats]:
    _, low, high = min_max_buckets(steps, values, buckets)
    known = np.isfinite(values)
    if steps.size <= buckets:
        return low, high, low, (~known).astype(np.float64)
    starts = np.arange(buckets) * steps.size // buckets
    counts = np.add.reduceat(known.astype(np.float64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, values, 0.0), starts) / counts
    return low, high, mean, np.diff(starts, append=steps.size) - counts


# -- heatmaps ------------------------------------------------------------------------------------------------------


def _heatmaps(run: Run) -> list[HeatmapKind]:
    available = {*run.metrics("tensors"), *run.metrics("layers")}
    return [name for name, metric in HEATMAPS.items() if metric in available]


def heatmap_bytes(
    run: Run,
    heatmap: HeatmapKind,
    rows: HeatmapRows,
    *,
    columns: int = MAX_COLUMNS,
    since: int | None = None,
    until: int | None = None,
) -> bytes:
    """Returns a heatmap, little-endian: `HEATMAP_HEADER`, float64 first steps of columns, float32 ``[rows, columns]``.

    Raises:
        RunError: If the run has too many rows for a heatmap.
    """
    table = table_of(run, HEATMAPS[heatmap], rows)
    num_rows = len(run.names(rows))
    if table is None or not num_rows:
        return HEATMAP_HEADER.pack(num_rows, 0, 0.0, float("nan"))
    if num_rows * 16 > MAX_NUMBERS:
        raise RunError(f"{num_rows:,} {rows} are too many for one heatmap; open a layer instead")
    with _one_heatmap_at_a_time:
        steps = table.steps(run)
        steps = steps[(steps > (-np.inf if since is None else since)) & (steps <= (np.inf if until is None else until))]
        if not steps.size:
            return HEATMAP_HEADER.pack(num_rows, 0, 0.0, float("nan"))
        columns = max(1, min(columns, MAX_COLUMNS, MAX_NUMBERS // num_rows, steps.size))
        starts_at = np.arange(columns) * steps.size // columns
        column_of = np.searchsorted(starts_at, np.arange(steps.size), "right") - 1
        averaged = is_averaged(HEATMAPS[heatmap])
        cells = CellReducer((columns, num_rows), table.rows, averaged=averaged)
        for own, found in table.read(run, steps, at_a_time=NUMBERS_AT_A_TIME):
            known = np.isin(own, steps)
            cells.add(column_of[np.searchsorted(steps, own[known])], found[known])
    with np.errstate(over="ignore"):
        numbers = np.where(cells.nonfinite & (not averaged), np.inf, cells.cells).T.astype("<f4")
    every = max(1, int(steps[-1] - steps[-2])) if steps.size > 1 else 1
    head = HEATMAP_HEADER.pack(num_rows, columns, float(steps[-1] + every), float(steps[-1]))
    return head + steps[starts_at].astype("<f8").tobytes() + numbers.tobytes()
