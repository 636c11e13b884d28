"""What the finished trials show: each arm at its own best learning rate, beside its base and the published numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.vrgd.sweep import Record, best_lr, identity, sweep_means
from experiments.vrgd.trial import Trial
from gradvitals.bench import markdown_table

_GAMMA = (0.1, "constant")
_BATCHES = (256, 512, 1024, 2048, 4096, 8192)
_ACCURACY = {
    ("momentum", "base"): (93.68, 93.56, 93.17, 92.19, 17.40, 14.57),
    ("momentum", "vr"): (93.79, 93.71, 93.50, 93.28, 92.70, 90.57),
    ("adam", "base"): (91.88, 92.24, 92.02, 91.98, 59.38, 20.74),
    ("adam", "vr"): (92.46, 92.40, 92.43, 92.10, 91.74, 90.86),
    ("lamb", "base"): (92.08, 92.03, 91.90, 92.13, 58.35, 15.13),
    ("lamb", "vr"): (92.29, 92.34, 92.05, 92.43, 92.04, 91.07),
    ("lars", "base"): (92.30, 92.29, 92.34, 82.39, 27.50, 12.21),
    ("lars", "vr"): (92.35, 92.53, 92.44, 92.79, 92.35, 91.86),
}


def published(trial: Trial) -> float | None:
    """The paper's accuracy for the optimizer, arm, gamma and batch of a trial; None where it has none."""
    row = _ACCURACY.get((trial.optimizer, trial.arm))
    if trial.task != "cifar" or row is None or trial.batch not in _BATCHES:
        return None
    if trial.arm != "base" and (trial.gamma, trial.gamma_schedule) != _GAMMA:
        return None
    return row[_BATCHES.index(trial.batch)]


SHARED = ("task", "model", "batch", "optimizer", "k", "epochs", "weight_decay")
"""What the arms of a comparison have in common."""
DECIMALS = {"cifar": 2}
"""Of a score; 4 for other tasks."""


def summarise(records: Iterable[Record]) -> dict[str, Any]:
    """Everything the tables show, as plain values ready for JSON.

    Returns:
        ``comparisons``, one for each task, model, batch, optimizer, k, length, weight decay and settings, and in each
        its ``arms``:

        - ``best_lr``, the ``sweep`` (mean score of each learning rate), and ``at_edge``: whether the best is the
          lowest or the highest that was tried, so that a better one may lie beyond.
        - ``mean`` and ``se`` over the ``n`` fresh seeds at the best learning rate. A run that diverged (``diverged``)
          counts as its task's chance.
        - ``difference`` to the base arm and its ``difference_se`` (Welch), also from the differences of runs with
          the same seed (``paired_se``).
        - ``train_minus_test``, with its ``train_minus_test_se``, of runs that did not diverge.
        - ``curve``: mean score at points of the training, ``seconds`` of one trial, and the ``published`` score.
    """
    comparisons: dict[object, dict[Trial, list[Record]]] = {}
    for record in _last_of_each(records):
        shared = tuple(getattr(record.trial, name) for name in SHARED)
        arms = comparisons.setdefault((shared, tuple(sorted(record.settings.items()))), {})
        arms.setdefault(identity(record.trial), []).append(record)
    return {"comparisons": [_comparison(arms) for arms in comparisons.values()]}


def _last_of_each(records: Iterable[Record]) -> list[Record]:
    return list({record.key: record for record in records}.values())


def _comparison(arms: dict[Trial, list[Record]]) -> dict[str, Any]:
    trial, some = next(iter(arms.items()))
    rows = {arm: _arm(arm, found) for arm, found in arms.items()}
    base = next((arm for arm in arms if arm.arm == "base"), None)
    if base is not None:
        for arm, row in rows.items():
            if arm is not base:
                row |= _difference(_fresh_scores(arms[arm], row), _fresh_scores(arms[base], rows[base]))
    ordered = sorted(rows.items(), key=lambda pair: pair[0].arm != "base")
    return {
        **{name: getattr(trial, name) for name in SHARED},
        "settings": dict(some[0].settings),
        "arms": [row for _, row in ordered],
    }


def _arm(arm: Trial, records: Sequence[Record]) -> dict[str, Any]:
    scores = {(r.trial.lr, r.trial.seed): r.score for r in records if r.phase == "sweep"}
    tried = sweep_means(scores)
    lr = best_lr(scores) if scores else math.nan
    fresh = [record for record in records if record.phase == "fresh" and record.trial.lr == lr]
    sound = [record for record in fresh if not math.isnan(record.score)]
    gaps = [record.result["train_score"] - record.score for record in sound if "train_score" in record.result]
    values = [_value(record) for record in fresh]
    return {
        "arm": arm.arm,
        "gamma": arm.gamma,
        "gamma_schedule": arm.gamma_schedule,
        "best_lr": lr,
        "at_edge": bool(tried) and lr in (min(tried), max(tried)),
        "sweep": {f"{each:g}": score for each, score in tried.items()},
        "n": len(fresh),
        "diverged": len(fresh) - len(sound),
        "mean": _mean(values),
        "se": _standard_error(values),
        "difference": None,
        "difference_se": None,
        "paired_se": None,
        "train_minus_test": _mean(gaps),
        "train_minus_test_se": _standard_error(gaps),
        "curve": _curve(sound),
        "seconds": statistics.median(record.result.get("seconds", record.elapsed) for record in records),
        "published": published(arm),
    }


def _fresh_scores(records: Sequence[Record], row: dict[str, Any]) -> dict[int, float]:
    at_best = [record for record in records if record.phase == "fresh" and record.trial.lr == row["best_lr"]]
    return {record.trial.seed: _value(record) for record in at_best}


def _value(record: Record) -> float:
    return record.result.get("chance", math.nan) if math.isnan(record.score) else record.score


def _difference(ours: dict[int, float], base: dict[int, float]) -> dict[str, float]:
    both = [ours[seed] - base[seed] for seed in ours if seed in base]
    errors = [_standard_error(list(values.values())) for values in (ours, base)]
    return {
        "difference": _mean(list(ours.values())) - _mean(list(base.values())),
        "difference_se": math.hypot(*errors),
        "paired_se": _standard_error(both),
    }


def _curve(records: Sequence[Record]) -> dict[str, float]:
    names = [name for name in (records[0].result if records else {}) if name.startswith("score@")]
    return {name.removeprefix("score@"): _mean([record.result[name] for record in records]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


# -- in words -------------------------------------------------------------------------------------------------------


def format_tables(summary: dict[str, Any]) -> str:
    """The summary as text: a Markdown table for each comparison."""
    if not summary["comparisons"]:
        return "no finished trials"
    comparisons = summary["comparisons"]
    rows = [row for comparison in comparisons for row in comparison["arms"]]
    note = _NOTE + (_PAPER_NOTE if any(row["published"] is not None for row in rows) else "")
    note += _EDGE_NOTE if any(row["at_edge"] for row in rows) else ""
    return "\n\n".join([*map(_format_comparison, comparisons), note])


_NOTE = (
    "Score: mean ± standard error over n fresh seeds, at the learning rate that was best in the arm's own sweep (last\n"
    "column: tried, score). Minus base: with Welch's standard error, which knows nothing of how the learning rate was\n"
    "chosen. Runs that diverged count as chance. Seconds: median of a trial; it may have shared its device with others."
)
_PAPER_NOTE = "\nPaper: its ResNet-56 on CIFAR-10."
_EDGE_NOTE = "\nedge: the best is the lowest or highest tried; go further with --reach before you believe it."


def _format_comparison(comparison: dict[str, Any]) -> str:
    digits = DECIMALS.get(comparison["task"], 4)
    arms = comparison["arms"]
    title = "{task} {model}, batch {batch}, {optimizer}, k {k}, length {epochs:g}, weight decay {weight_decay:g}"
    settings = "".join(f", {name} {value}" for name, value in comparison["settings"].items())
    has_paper = any(row["published"] is not None for row in arms)
    head = ["arm", "best lr", "score", "n", "diverged", "minus base", "train - test"]
    head += ["paper"] if has_paper else []
    lines = [[*head, "seconds", "sweep"]]
    for row in arms:
        paper = ["-" if row["published"] is None else f"{row['published']:.2f}"] if has_paper else []
        lines.append(
            [
                _label(row),
                f"{row['best_lr']:g}" + (" edge" if row["at_edge"] else ""),
                _plus_minus(row["mean"], row["se"], digits),
                str(row["n"]),
                str(row["diverged"]),
                _plus_minus(row["difference"], row["difference_se"], digits, sign="+"),
                _plus_minus(row["train_minus_test"], row["train_minus_test_se"], digits, sign="+"),
                *paper,
                f"{row['seconds']:.1f}",
                ", ".join(f"{lr}: {_number(score, digits)}" for lr, score in row["sweep"].items()),
            ]
        )
    return f"{title.format(**comparison)}{settings}\n\n{markdown_table(lines, left=(0, len(lines[0]) - 1))}"


def _label(row: dict[str, Any]) -> str:
    if row["arm"] == "base":
        return "base"
    schedule = "" if row["gamma_schedule"] == "constant" else f" {row['gamma_schedule']}"
    return f"{row['arm']} γ {row['gamma']:g}{schedule}"


def _plus_minus(value: float | None, error: float | None, digits: int, sign: str = "") -> str:
    if value is None or math.isnan(value):
        return "-"
    shown = f"{value:{sign}.{digits}f}"
    return shown if error is None or math.isnan(error) else f"{shown} ± {error:.{digits}f}"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"
