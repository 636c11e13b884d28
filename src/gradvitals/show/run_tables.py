"""Tables on the page of a run: every layer, the tensors that stand out, the ranks, and how it was recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from gradvitals.show.html import Html, Part, folded, join, table, tag
from gradvitals.show.standouts import LayerRow, Worst
from gradvitals.show.summary import Summary
from gradvitals.show.svg import Axis, bar, interval_mark
from gradvitals.show.text import cut, duration, number
from gradvitals.store.reader import Run

MOST_ROWS = 200
MOST_RANKS = 256
OPENED = 40
"""Rows up to which a table is shown unfolded."""
NAME = 100

RANK_COLUMNS = {
    "ranks/norm": "Own norm",
    "ranks/norm_ratio": "Over the others'",
    "ranks/step_seconds": "Seconds a step",
    "ranks/replica": "Copies differ",
    "ranks/out_of_step": "Out of step",
    "ranks/nonfinite": "NaN or Inf",
    "ranks/errors": "Errors",
}


def layers_table(summary: Summary) -> Html:
    """Every layer at the latest per-tensor reading."""
    rows = summary.layers[:MOST_ROWS]
    largest = max((row.grad_norm for row in rows if math.isfinite(row.grad_norm)), default=0.0)
    known = [value for row in rows for value in (row.gsnr, row.gsnr_low, row.gsnr_high) if value > 0]
    axis = Axis.over(known, 4.0, 116.0, logarithmic=True)
    heads = ["Layer", "Gradient norm", "Spike ratio", "GSNR", "95 % interval", "Update over weight"]
    cells = (_layer_cells(row, largest, axis) for row in rows)
    left = len(summary.layers) - len(rows)
    note = f"The first {len(rows):,} of {len(summary.layers):,} layers; gradvitals export has all." if left > 0 else ""
    whole = table(heads, cells)
    return join(
        [
            whole if len(rows) <= OPENED else folded(f"All {len(rows):,} layers", whole),
            tag("p", note, class_="dim") if note else None,
        ]
    )


def _layer_cells(row: LayerRow, largest: float, axis: Axis) -> list[Part]:
    norm: Part = number(row.grad_norm)
    if math.isfinite(row.grad_norm):
        norm = bar(row.grad_norm, largest, number(row.grad_norm))
    elif math.isinf(row.grad_norm):
        norm = tag("b", "Inf", class_="word critical")
    unknown = math.isnan(row.gsnr_low) or math.isnan(row.gsnr_high)
    return [
        tag("span", cut(row.name, NAME), title=cut(row.name, 300)),
        norm,
        tag("span", number(row.spike_ratio), class_="word warning" if row.spike_ratio > 5 else None),
        number(row.gsnr),
        "-" if unknown else interval_mark(row.gsnr, row.gsnr_low, row.gsnr_high, axis),
        number(row.update_ratio),
    ]


def worst_tables(summary: Summary) -> Html | None:
    """The tensors that stand out, in up to four lists."""
    lists: tuple[tuple[str, str, Sequence[Worst]], ...] = (
        ("Lowest GSNR", "at the latest reading", summary.lowest_gsnr),
        ("Largest spike ratio", "norm over its moving average, in the whole run", summary.largest_spikes),
        ("Largest update over weight", "at the latest reading", summary.largest_updates),
        ("NaN or Inf in the gradient", "elements where first seen; 1: at least one", summary.nonfinite),
    )
    shown = [
        tag(
            "div",
            tag("h3", title),
            tag("p", words, class_="dim"),
            table(
                ["Tensor", "Value", "Step"],
                ([_name(item.name), number(item.value), f"{item.step:,}"] for item in found),
            ),
        )
        for title, words, found in lists
        if found
    ]
    return tag("div", *shown, class_="pairs") if shown else None


def _name(name: str) -> Html:
    return tag("span", cut(name, NAME), title=cut(name, 300))


def ranks_table(run: Run) -> Html | None:
    """One row for each process, with what was last read of it; None where no ranks were compared."""
    count = len(run.names("ranks"))
    columns = [metric for metric in RANK_COLUMNS if metric in run.metrics("ranks")]
    if not count or not columns:
        return None
    values = [_latest_known(run, metric, count) for metric in columns]
    rows = (
        [f"rank {rank}", *(number(float(column[rank])) for column in values)] for rank in range(min(count, MOST_RANKS))
    )
    whole = table(["Rank", *(RANK_COLUMNS[metric] for metric in columns)], rows)
    more = tag("p", f"The first {MOST_RANKS} of {count:,} ranks.", class_="dim") if count > MOST_RANKS else None
    return join([whole if count <= OPENED else folded(f"All {min(count, MOST_RANKS)} ranks", whole), more])


def _latest_known(run: Run, metric: str, count: int) -> np.ndarray[Any, Any]:
    """The last number that each rank has."""
    steps, _ = run.times(metric, kind="ranks")
    latest = np.full(count, np.nan)
    if steps.size:
        _, rows = run.matrix(metric, "ranks", since=int(steps[max(0, steps.size - 200)]) - 1)
        for row in rows:
            latest = np.where(np.isnan(row), latest, row)
    return latest


def settings_table(meta: Mapping[str, Any], summary: Summary) -> Html:
    """How the run was recorded. Where it lay and on which machine is left out: a report is made to be sent."""
    return join(
        [
            _pairs(_about(meta, summary)),
            folded("Settings of the monitoring", _pairs(_known(meta.get("config"))), opened=False),
        ]
    )


def _pairs(rows: Iterable[tuple[str, str]]) -> Html:
    cells = ([cut(name, 60), tag("span", cut(text, 300), class_="left")] for name, text in rows)
    return table(["Setting", "Value"], cells, numbers_from=2)


def _about(meta: Mapping[str, Any], summary: Summary) -> Iterator[tuple[str, str]]:
    started = meta.get("started_at")
    if isinstance(started, (int, float)):
        yield "started", f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M} UTC, for {duration(summary.seconds)}"
    yield "processes", f"{summary.num_ranks:,}"
    yield "watched", f"{summary.num_tensors:,} tensors, {summary.num_parameters:,} parameters"
    for name, key in (("gradvitals", "version"), ("torch", "torch")):
        if key in meta:
            yield name, str(meta[key])
    yield from ((key, text) for key, text in _known(meta.get("facts")) if key != "world_size")
    yield from _known(meta.get("extra"))


def _known(content: Any) -> Iterator[tuple[str, str]]:
    if isinstance(content, Mapping):
        for key, value in list(content.items())[:60]:
            if value not in (None, {}, []) and key != "extra":
                yield str(key), _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
