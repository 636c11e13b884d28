"""What the experiment found: as one object, and as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.scale_adaptation.adaptation import ADAPTS, TensorRow, auc, average_ranks, folds, gains, judge
from experiments.scale_adaptation.run import Results
from experiments.scale_adaptation.simulation import SimRow
from gradvitals.bench import markdown_table

Floats = NDArray[np.float64]

NUM_FOLDS = 5
NEAR = 0.1
"""Share by which a norm may differ from that of noise and count as that."""
LABELS = (0.2, 0.25, 0.3, 0.4, 0.5)
"""Elasticities from which on a tensor could be said to adapt: what depends on the choice is to be seen."""

PREDICTORS: dict[str, Callable[[TensorRow], float]] = {
    "GSNR": lambda row: row.gsnr,
    "radial GSNR": lambda row: row.radial_gsnr,
    "debiased Adam proxy": lambda row: row.adam_gsnr,
    "r* = lr decay / 2": lambda row: -row.critical,
    "GSNR / r*": lambda row: row.gsnr / row.critical,
    "radial GSNR / r*": lambda row: row.radial_gsnr / row.critical,
    "distance from noise's norm": lambda row: abs(math.log(row.norm_ratio)),
    "number of elements": lambda row: -float(row.numel),
}
"""What could tell beforehand which tensors adapt, each so that more should mean yes."""


def summarise(results: Results) -> dict[str, Any]:
    """Everything as plain values: what was found, row by row, and what follows from it."""
    return {
        **results.to_json(),
        "half_noise": half_noise(results.simulation),
        "classifiers": classifiers(results.simulation),
        "roles": by_role(results.adaptation),
        "tensors": by_tensor(results.adaptation),
        "near_noise": by_nearness(results.adaptation),
        "indicators": indicators(results.adaptation),
        "by_label": by_label(results.adaptation),
        "gains": [gain.to_json() for gain in gains(results.cure)],
    }


# -- the simulation -------------------------------------------------------------------------------------------------


def half_noise(rows: Sequence[SimRow]) -> list[dict[str, Any]]:
    """For each case the noise level up to which a tensor follows half of the change; medians over runs."""
    found = []
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        levels = sorted({row.noise_level for row in mine})
        middle = [float(np.median([row.elasticity for row in mine if row.noise_level == level])) for level in levels]
        gsnr = [float(np.median([row.true_gsnr for row in mine if row.noise_level == level])) for level in levels]
        at = next((i for i in range(len(levels) - 1, -1, -1) if middle[i] >= ADAPTS), -1)
        if at < 0 or at == len(levels) - 1:
            level = math.nan if at < 0 else math.inf
            ratio = math.nan
        else:
            share = (middle[at] - ADAPTS) / (middle[at] - middle[at + 1])
            level, ratio = (float(a[at] ** (1 - share) * a[at + 1] ** share) for a in (levels, gsnr))
        change = [float(np.median([row.change for row in mine if row.noise_level == level_])) for level_ in levels]
        found.append({**vars(case), "noise": case.noise, "half": level, "gsnr": ratio, "loudest_change": change[-1]})
    return found


def classifiers(rows: Sequence[SimRow]) -> list[dict[str, Any]]:
    """The threshold classifier of the note, on its own kind of case and on all, with folds held out."""
    found = []
    most = max((row.seed for row in rows if row.case.shape == "matrix"), default=0)
    rows = [row for row in rows if row.seed <= most]  # as many of each shape
    own = [row for row in rows if row.case.noise == "iid" and row.case.shape != "multiplier"]
    groups: dict[str, list[SimRow]] = {}
    for optimizer in ("sgd", "adamw"):
        groups[f"{optimizer}, iid noise"] = [row for row in own if row.case.optimizer == optimizer]
        of_one = [row for row in rows if row.case.optimizer == optimizer and row.case.shape != "multiplier"]
        groups[f"{optimizer}, all noise"] = of_one
    groups["adamw, multipliers too"] = [row for row in rows if row.case.optimizer == "adamw"]
    for name, some in groups.items():
        if not some:
            continue
        labels = np.array([row.elasticity > ADAPTS for row in some])
        as_noted = np.array([row.change > 0.25 for row in some])
        for number in ("gsnr", "radial_gsnr"):
            scores = np.array([getattr(row, number) for row in some])
            fold = folds(len(some), NUM_FOLDS)
            told = judge(scores, labels, fold)
            found.append(
                {"rows": name, "predictor": number, **told.to_json(), "auc_change": judge(scores, as_noted, fold).auc}
            )
    return found


# -- the language models --------------------------------------------------------------------------------------------


def by_role(rows: Sequence[TensorRow]) -> list[dict[str, Any]]:
    """Medians of matrices, vectors and scalars, for each model and schedule and over all."""
    found = []
    wheres = [("all", "all"), *dict.fromkeys((row.model, row.schedule) for row in rows)] if rows else []
    for model, schedule in wheres:
        for kind in ("matrix", "vector", "scalar"):
            mine = [row for row in rows if row.role == kind and model in ("all", row.model)]
            mine = [row for row in mine if schedule in ("all", row.schedule)]
            if mine:
                found.append({"model": model, "schedule": schedule, "role": kind, **_middle(mine)})
    return found


def by_tensor(rows: Sequence[TensorRow]) -> list[dict[str, Any]]:
    """Medians of each kind of tensor, such as all queries, over layers, models and schedules."""
    kinds = list(dict.fromkeys((row.tensor.split(".")[-1], row.role) for row in rows))
    return [
        {"tensor": kind, "role": role, **_middle([row for row in rows if row.tensor.split(".")[-1] == kind])}
        for kind, role in kinds
    ]


def by_nearness(rows: Sequence[TensorRow]) -> list[dict[str, Any]]:
    """Whether tensors that have the norm of noise follow less than others of their role."""
    found = []
    for kind in ("matrix", "vector", "scalar"):
        for near in (True, False):
            mine = [row for row in rows if row.role == kind and (abs(row.norm_ratio - 1) < NEAR) == near]
            if mine:
                elasticity = np.array([row.elasticity for row in mine])
                above = {f"above_{mark}": int((elasticity > mark).sum()) for mark in (0.4, ADAPTS)}
                words = "within a tenth" if near else "further away"
                entry = {"role": kind, "norm": words, "tensors": len(mine), "elasticity": float(np.median(elasticity))}
                found.append(entry | above)
    return found


def _middle(rows: Sequence[TensorRow]) -> dict[str, Any]:
    names = ("elasticity", "norm_ratio", "gsnr", "radial_gsnr", "adam_gsnr")
    middle: dict[str, Any] = {name: float(np.median([getattr(row, name) for row in rows])) for name in names}
    near = float(np.mean([abs(row.norm_ratio - 1) < NEAR for row in rows]))
    return {"tensors": len(rows), **middle, "adapt": float(np.mean([row.adapts for row in rows])), "near_noise": near}


def indicators(rows: Sequence[TensorRow]) -> list[dict[str, Any]]:
    """Each number as a predictor of who adapts: on tensors, models and schedules that were held out."""
    if not rows:
        return []
    labels = np.array([row.adapts for row in rows])
    elasticity = np.array([row.elasticity for row in rows])
    names = sorted({(row.model, row.tensor) for row in rows})
    fold_of = dict(zip(names, folds(len(names), NUM_FOLDS), strict=True))
    held_out: dict[str, list[Any]] = {
        "tensors": [fold_of[row.model, row.tensor] for row in rows],
        "models": [row.model for row in rows],
        "schedules": [row.schedule for row in rows],
    }
    matrix = np.array([row.role == "matrix" for row in rows])
    found = []
    for name, predictor in PREDICTORS.items():
        scores = np.array([predictor(row) for row in rows])
        told = {what: judge(scores, labels, groups) for what, groups in held_out.items()}
        first = told["tensors"]
        entry = {"predictor": name, "auc": first.auc, "threshold": first.threshold, "accuracy": first.accuracy}
        for what, judged in told.items():
            entry |= {f"auc_{what}": judged.held_out_auc, f"accuracy_{what}": judged.held_out_accuracy}
        entry |= {"rank_correlation": rank_correlation(scores, elasticity)}
        entry |= {"rank_correlation_matrices": rank_correlation(scores[matrix], elasticity[matrix])}
        found.append(entry)
    return found


def by_label(rows: Sequence[TensorRow]) -> list[dict[str, Any]]:
    """AUC of each number for other elasticities that count as adapting; first how many tensors these are."""
    if not rows:
        return []
    elasticity = np.array([row.elasticity for row in rows])
    counts = {f"auc_{label}": int((elasticity > label).sum()) for label in LABELS}
    found: list[dict[str, Any]] = [{"predictor": f"tensors that adapt, of {len(rows)}", **counts}]
    for name, predictor in PREDICTORS.items():
        scores = np.array([predictor(row) for row in rows])
        found.append({"predictor": name, **{f"auc_{label}": auc(scores, elasticity > label) for label in LABELS}})
    return found


def rank_correlation(x: Floats, y: Floats) -> float:
    """Spearman's: the correlation of ranks, equal values sharing theirs; nan where one is constant.

    >>> round(rank_correlation(np.array([1.0, 2.0, 5.0]), np.array([10.0, 20.0, 21.0])), 9)
    1.0
    """
    known = np.isfinite(x) & np.isfinite(y)
    a, b = average_ranks(x[known]), average_ranks(y[known])
    if known.sum() < 3 or np.ptp(x[known]) == 0 or np.ptp(y[known]) == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


# -- as text --------------------------------------------------------------------------------------------------------


HALF = {
    "shape": "shape",
    "optimizer": "optimizer",
    "noise": "noise",
    "target": "target",
    "half": "half at noise",
    "gsnr": "GSNR there",
    "loudest_change": "change at most noise",
}
CLASSIFIERS = {
    "rows": "rows",
    "predictor": "predictor",
    "auc": "AUC",
    "threshold": "threshold",
    "accuracy": "accuracy",
    "held_out_auc": "AUC held out",
    "held_out_accuracy": "accuracy held out",
    "auc_change": "AUC of change",
}
MIDDLE = {
    "tensors": "tensors",
    "elasticity": "elasticity",
    "norm_ratio": "norm / noise",
    "gsnr": "GSNR",
    "radial_gsnr": "radial GSNR",
    "adam_gsnr": "Adam GSNR",
    "adapt": "adapt",
    "near_noise": "norm of noise",
}
NEARNESS = {
    "role": "role",
    "norm": "norm against noise",
    "tensors": "tensors",
    "elasticity": "elasticity",
    "above_0.4": "above 0.4",
    f"above_{ADAPTS}": f"above {ADAPTS}",
}
INDICATORS = {
    "predictor": "predictor",
    "auc": "AUC",
    "auc_tensors": "held-out tensors",
    "auc_models": "models",
    "auc_schedules": "schedules",
    "accuracy_models": "accuracy, models",
    "rank_correlation": "ρ",
    "rank_correlation_matrices": "ρ of matrices",
}
GAINS = {
    "arm": "multipliers",
    "lr": "learning rate",
    "decay": "weight decay",
    "loss": "loss",
    "gain": "gain",
    "error": "standard error",
}


def format_results(results: Results) -> str:
    """Tables of all parts that there are."""
    summary = summarise(results)
    parts: list[str] = []
    if results.simulation:
        parts.append("Simulation: up to which noise a tensor follows half of its target's change.\n")
        parts.append(_table(HALF, summary["half_noise"], 4))
        parts.append("\nSimulation: telling by a threshold who adapts; last, who changes its norm by a quarter.\n")
        parts.append(_table(CLASSIFIERS, summary["classifiers"], 2))
    if results.adaptation:
        parts.append("\nLanguage models: medians over tensors; shares that adapt, and that have the norm of noise.\n")
        parts.append(_table({"model": "model", "schedule": "schedule", "role": "role", **MIDDLE}, summary["roles"], 3))
        parts += ["", _table({"tensor": "tensor", "role": "role", **MIDDLE}, summary["tensors"], 2)]
        parts += ["", _table(NEARNESS, summary["near_noise"], 2)]
        parts.append("\nWhat tells who adapts: AUC over all, and held out; rank correlation with the elasticity, ρ.\n")
        parts.append(_table(INDICATORS, summary["indicators"], 1))
        parts.append("\nThe same AUC where another elasticity counts as adapting.\n")
        parts.append(_table({"predictor": "predictor", **{f"auc_{x}": f"{x}" for x in LABELS}}, summary["by_label"], 1))
    if results.cure:
        parts.append("\nMultipliers: loss on unseen text in nats a byte, and its fall against none, seed by seed.\n")
        parts.append(_table(GAINS, summary["gains"], 1, digits=4))
    took = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in results.seconds.items())
    return "\n".join([*parts, f"\n{took} on {results.setting.get('device', 'unknown')}"])


def _table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], words: int, digits: int = 3) -> str:
    """A table of some values of each row, under their heads; the first columns are words."""
    cells = [[_cell(row[key], digits) for key in columns] for row in rows]
    return markdown_table([list(columns.values()), *cells], left=range(words))


def _cell(value: Any, digits: int) -> str:
    if isinstance(value, str) or not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "–"
    return f"{value:.2e}" if value and not 1e-3 <= abs(value) < 1e4 else f"{value:.{digits}g}"
