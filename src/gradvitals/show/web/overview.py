"""What the page says about a run in words: JSON records, every text short and without control characters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gradvitals.errors import GradvitalsError
from gradvitals.show.actions import summarise
from gradvitals.show.checkup import num_ranks
from gradvitals.show.ending import state_of
from gradvitals.show.findings import evidence, where
from gradvitals.show.standouts import Worst, extremes, first_nonzero, latest_extremes
from gradvitals.show.verdict import Weighed, about_itself, name_of, when
from gradvitals.show.web.heatmap import available
from gradvitals.show.web.judging import Judged
from gradvitals.show.web.limits import TEXT, short
from gradvitals.show.web.shelf import Place
from gradvitals.store.reader import Run
from gradvitals.types import METRICS, Action, Finding

MOST_FINDINGS = 200
MOST_TENSORS = 50
MOST_ACTIONS = 400
MOST_LEVELS = 64
"""Modules inside one another up to which the layer of an attention head is looked for."""

VITALS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss", ("loss",)),
    ("grad/norm", ("grad/norm",)),
    ("gsnr", ("gsnr", "gsnr_low", "gsnr_high")),
    ("noise_scale", ("noise_scale", "noise_scale_low", "noise_scale_high")),
)
"""The charts of a run, each with the metrics it is drawn from: a value, and the ends of its interval."""

TENSOR_CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("grad/norm", ("grad/norm",)),
    ("gsnr", ("gsnr", "gsnr_low", "gsnr_high")),
    ("update/ratio", ("update/ratio",)),
    ("weight/norm", ("weight/norm",)),
)
"""The charts of one tensor, layer or head."""


def line_of_run(place: Place, run: Run, judged: Judged) -> dict[str, Any]:
    """A run in the list of runs."""
    meta = run.meta
    return {
        "id": place.id,
        "name": short(place.name),
        "state": state_of(run),
        "level": judged.level,
        "line": short(judged.note if judged.level == "unknown" and judged.note else judged.verdict.line, TEXT),
        "last_step": run.last_step,
        "steps": judged.verdict.steps,
        "open": judged.verdict.num_open,
        "started_at": _time(meta["started_at"]),
        "heard_at": _time(meta["finished_at"] or meta["heartbeat"]),
        "charts": _charts(run, VITALS, "values"),
    }


def line_of_trouble(place: Place, error: GradvitalsError, folder: str) -> dict[str, Any]:
    """A run that could not be read, in the list of runs."""
    text = short(str(error).replace(folder, "").lstrip("/"), TEXT)
    return {**line_unread(place), "state": "error", "level": "unknown", "line": text}


def line_unread(place: Place) -> dict[str, Any]:
    """A run that was found and not read yet, in the list of runs."""
    unknown = dict.fromkeys(("last_step", "started_at", "heard_at"))
    own = {"id": place.id, "name": short(place.name), "state": "unread", "level": "pending", "line": "Not read yet."}
    return {**own, **unknown, "steps": 0, "open": 0, "charts": []}


def overview(place: Place, run: Run, judged: Judged) -> dict[str, Any]:
    """Everything about a run that the first screen needs beside the pictures."""
    verdict, meta = judged.verdict, run.meta
    rows = {name: at for at, name in reversed(list(enumerate(run.names("tensors"))))}
    actions, census = run.actions(), run.census()
    return {
        **line_of_run(place, run, judged),
        "told": census["findings"] + census["actions"],
        "segments": census["segments"],
        "pending": judged.pending,
        "note": "" if judged.level == "unknown" else judged.note,
        "now": time.time(),
        "host": short(str(meta["hostname"])),
        "version": short(str(meta.get("version", ""))),
        "num_tensors": len(run.tensors),
        "num_parameters": sum(info.numel for info in run.tensors),
        "num_ranks": num_ranks(meta),
        "dropped": run.dropped,
        "findings": [_finding(item, rows, live=verdict.live) for item in verdict.findings[:MOST_FINDINGS]],
        "num_findings": len(verdict.findings),
        "monitoring": [_note(finding) for finding in about_itself(judged.findings)[:MOST_FINDINGS]],
        "actions": [_action(action) for action in actions[-MOST_ACTIONS:]],
        "num_actions": len(actions),
        "acted": [short(line.strip(), TEXT) for line in summarise(actions).splitlines()] if actions else [],
        "tensor_charts": _charts(run, TENSOR_CHARTS, "tensors"),
        "layer_charts": _charts(run, TENSOR_CHARTS, "layers"),
        "head_charts": _charts(run, TENSOR_CHARTS, "heads"),
        "pictures": available(run),
    }


def layout(run: Run) -> dict[str, Any]:
    """The layers in depth order, and what belongs to each: tensors and attention heads by their rows."""
    names = run.names("layers")
    layers: list[dict[str, Any]] = [{"name": short(name), "tensors": [], "heads": []} for name in names]
    at = {name: number for number, name in enumerate(names)}
    tensors = [short(name) for name in run.names("tensors")]
    infos = run.tensors
    for row, info in enumerate(infos):
        if info.layer in at:
            layers[at[info.layer]]["tensors"].append(row)
    heads = run.names("heads")
    for row, name in enumerate(heads):
        home = _home(name.rpartition("/")[0], at)
        if home is not None:
            layers[home]["heads"].append(row)
    shapes = ["×".join(map(str, info.shape[:8])) or "scalar" for info in infos]
    return {"layers": layers, "tensors": tensors, "shapes": shapes, "heads": [short(name) for name in heads]}


def _home(module: str, at: Mapping[str, int]) -> int | None:
    """The layer that a module is in: the one of its own name, or the innermost that it is below."""
    parts = module.split(".", MOST_LEVELS)
    outer = (".".join(parts[:level]) for level in range(min(len(parts), MOST_LEVELS), 0, -1))
    return next((at[name] for name in (module, *outer) if name in at), None)


def standouts(run: Run) -> dict[str, Any]:
    """The tensors that stand out, as `gradvitals report` names them."""
    rows = {name: at for at, name in reversed(list(enumerate(run.names("tensors"))))}
    source = next(iter(run.sources("gsnr", "tensors")), None)
    lists = (
        ("grad/nonfinite", "NaN or Inf in the gradient, first seen", first_nonzero(run, "grad/nonfinite")),
        ("grad/spike_ratio", "largest spikes of the norm, in the whole run", extremes(run, "grad/spike_ratio")),
        (
            "gsnr",
            f"lowest GSNR now{f', by {source}' if source else ''}",
            latest_extremes(run, "gsnr", source=source, lowest=True),
        ),
        ("update/ratio", "largest update over weight now", latest_extremes(run, "update/ratio")),
    )
    return {
        "lists": [
            {"metric": metric, "title": title, "rows": [_worst(item, rows) for item in found]}
            for metric, title, found in lists
            if found
        ]
    }


def metric_texts() -> dict[str, str]:
    """What each metric means, in a line."""
    return dict(METRICS)


def _worst(item: Worst, rows: Mapping[str, int]) -> dict[str, Any]:
    return {"name": short(item.name), "row": rows.get(item.name), "value": item.value, "step": item.step}


def _charts(run: Run, wanted: Sequence[tuple[str, tuple[str, ...]]], kind: Any) -> list[dict[str, Any]]:
    have = run.metrics(kind)
    return [
        {
            "metric": metric,
            "metrics": [name for name in names if name in have],
            "source": next(iter(run.sources(metric, kind)), None),
        }
        for metric, names in wanted
        if metric in have
    ]


def _finding(item: Weighed, rows: Mapping[str, int], *, live: bool) -> dict[str, Any]:
    finding = item.finding
    return {
        "id": short(finding.id),
        "name": short(name_of(finding.id)),
        "severity": finding.severity,
        "weight": item.weight,
        "open": item.clear is None,
        "title": short(finding.title, TEXT),
        "first_step": finding.first_step,
        "last_step": finding.last_step,
        "found_step": finding.found_step,
        "when": short(when(item, live=live)),
        "where": short(where(finding), TEXT) if finding.tensors else "",
        "rank": finding.rank,
        "num_tensors": len(finding.tensors),
        "tensors": [{"name": short(name), "row": rows.get(name)} for name in finding.tensors[:MOST_TENSORS]],
        "seen": [short(line, TEXT) for line in evidence(finding.evidence)],
        "causes": [short(text, TEXT) for text in finding.causes[:8]],
        "fixes": [short(text, TEXT) for text in finding.fixes[:8]],
    }


def _note(finding: Finding) -> dict[str, Any]:
    return {
        "title": short(finding.title, TEXT),
        "step": finding.first_step,
        "fixes": [short(text, TEXT) for text in finding.fixes[:1]],
    }


def _action(action: Action) -> dict[str, Any]:
    def facts(content: Mapping[str, Any]) -> list[str]:
        return [short(f"{key.replace('_', ' ')}: {value}") for key, value in list(content.items())[:12]]

    return {
        "kind": short(action.kind),
        "step": action.step,
        "taken": action.taken,
        "finding": short(action.finding or ""),
        "text": short(str(action), TEXT),
        "reason": short(action.reason, TEXT),
        "before": facts(action.before),
        "after": facts(action.after),
        "cost": facts(action.cost),
    }


def _time(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
