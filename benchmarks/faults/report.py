"""The results of the zoo, as plain values and as text: side by side, by fault, by rule, and what each fault did."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.faults.score import (
    OURS,
    TRAINPULSE,
    Outcome,
    alarm_rate,
    controls,
    effect,
    false_alarms,
    faulty,
    found,
    healthy_steps,
    tally,
)
from gradvitals.bench import markdown_table

LABELS = {TRAINPULSE: "trainpulse 0.4"}
TWINS = {"mlp": "adamw_cosine", "cnn": "sgd_cosine", "transformer": "adamw_cosine", "rnn": "usual"}
"""The healthy control that differs from the runs of a model in nothing but the fault."""
OTHER_TWINS = {"fp16_unscaled": "small_gradients"}
"""By fault, where it is another."""


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything the tables show, as plain values ready for JSON."""
    outcomes = sorted(outcomes, key=lambda outcome: (outcome.name, outcome.task, outcome.seed))
    return {
        "runs": len(outcomes),
        "seeds": len({outcome.seed for outcome in outcomes}),
        "healthy_steps": sum(map(healthy_steps, controls(outcomes))),
        "train_cpu_seconds": sum(outcome.seconds for outcome in outcomes),
        "diagnosis_ms_per_step": statistics.median(outcome.diagnosis_ms for outcome in outcomes),
        "detectors": [_detector(outcomes, name) for name in _detectors(outcomes)],
        "faults": _by_fault(outcomes),
        "planted": _planted(outcomes),
        "rules": _by_rule(outcomes),
        "models": _by_model(outcomes),
        "effects": _effects(outcomes),
        "verdicts": {
            "faulty": Counter(outcome.verdict for outcome in faulty(outcomes)),
            "healthy": Counter(outcome.verdict for outcome in controls(outcomes)),
        },
    }


def _detectors(outcomes: Iterable[Outcome]) -> list[str]:
    return list(dict.fromkeys(name for outcome in outcomes for name in outcome.alarms))


def _detector(outcomes: Sequence[Outcome], name: str) -> dict[str, Any]:
    step, slow, both = (tally(faulty(outcomes, kind), name) for kind in ("step", "slow", None))
    return {
        "detector": name,
        "recall": both.recall,
        "recall_step": step.recall,
        "recall_slow": slow.recall,
        "place": both.place if name == OURS else None,
        "delay_step": step.delay,
        "delay_slow": slow.delay,
        "false_alarms": alarm_rate(controls(outcomes), name),
        "false_alarms_before_fault": alarm_rate(faulty(outcomes, "step"), name),
    }


def _by_fault(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    rows = []
    for key in dict.fromkeys((outcome.name, outcome.task) for outcome in faulty(outcomes)):
        runs = [outcome for outcome in outcomes if (outcome.name, outcome.task) == key]
        ours = tally(runs, OURS)
        rows.append(
            {
                "fault": key[0],
                "model": key[1],
                "kind": runs[0].fault.kind if runs[0].fault else None,
                "recall": ours.recall,
                "place": ours.place,
                "delay": ours.delay,
                "rules": list(ours.rules),
                "healthy": sum(run.verdict == "healthy" for run in runs),
                "runs": len(runs),
                "others": [name for name in _detectors(runs) if name != OURS and tally(runs, name).recall],
            }
        )
    return rows


def _planted(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    faults = {outcome.name: outcome.fault for outcome in outcomes if outcome.fault}
    return [{"fault": name, "what": fault.description, "finds": list(fault.finds)} for name, fault in faults.items()]


def _by_rule(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    finds = Counter(alarm.id for outcome in outcomes for alarm in {a.id: a for a in found(outcome, OURS)}.values())
    firsts = Counter(alarms[0].id for outcome in outcomes if (alarms := found(outcome, OURS)))
    healthy = Counter(alarm.id for outcome in controls(outcomes) for alarm in false_alarms(outcome, OURS))
    early = Counter(alarm.id for outcome in faulty(outcomes) for alarm in false_alarms(outcome, OURS))
    beside = Counter(
        alarm.id
        for outcome in faulty(outcomes)
        for alarm in outcome.alarms.get(OURS, ())
        if outcome.fault and alarm.step >= outcome.fault.step and alarm.id not in outcome.fault.finds
    )
    return [
        {
            "rule": rule,
            "finds": finds[rule],
            "first": firsts[rule],
            "false_alarms": healthy[rule],
            "before_fault": early[rule],
            "beside_fault": beside[rule],
        }
        for rule in sorted({*finds, *healthy, *early, *beside})
    ]


def _by_model(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    rows = []
    for task in dict.fromkeys(outcome.task for outcome in outcomes):
        runs = [outcome for outcome in outcomes if outcome.task == task]
        ours = tally(runs, OURS)
        wrong = [
            f"{outcome.name}.{outcome.seed} {alarm.id} at {alarm.step}"
            for outcome in controls(runs)
            for alarm in false_alarms(outcome, OURS)
        ]
        rows.append(
            {
                "model": task,
                "recall": ours.recall,
                "place": ours.place,
                "healthy_steps": sum(map(healthy_steps, controls(runs))),
                "false_alarms": alarm_rate(controls(runs), OURS),
                "which": wrong,
            }
        )
    return rows


def _effects(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    healthy = {(run.name, run.task, run.seed): run for run in controls(outcomes)}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for run in faulty(outcomes):
        twin = healthy.get((OTHER_TWINS.get(run.name, TWINS[run.task]), run.task, run.seed))
        if twin is not None and (run.name, run.task) not in rows:  # one seed tells enough
            seen = effect(run, twin)
            rows[run.name, run.task] = {
                "fault": run.name,
                "model": run.task,
                "planted": run.fault.step if run.fault else None,
                "differs_from": seen.first_difference,
                "loss": seen.loss,
                "twin_loss": seen.twin_loss,
                "norm_ratio": seen.norm_ratio,
                "update_ratio": seen.update_ratio,
            }
    return list(rows.values())


# -- in words -------------------------------------------------------------------------------------------------------


def format_zoo(result: dict[str, Any]) -> str:
    """The result as text: Markdown tables."""
    parts = [
        f"{result['runs']} runs, {result['seeds']} seeds, {result['healthy_steps']:,} healthy steps; "
        f"diagnosis takes {result['diagnosis_ms_per_step']:.2f} ms a step",
        _side_by_side(result["detectors"]),
        _verdicts(result["verdicts"]),
        _faults_table(result["faults"]),
        _planted_table(result["planted"]),
        _rules_table(result["rules"]),
        _models_table(result["models"]),
    ]
    if result["effects"]:
        parts.append(_effects_table(result["effects"]))
    return "\n\n".join(part for part in parts if part)


def _side_by_side(rows: Sequence[dict[str, Any]]) -> str:
    recalls, delays = ("recall", "step faults", "slow faults", "right place"), ("delay, step", "delay, slow")
    head = ("detector", *recalls, *delays, "false alarms", "before fault")
    cells = [
        (
            LABELS.get(row["detector"], row["detector"]),
            *(_percent(row[name]) for name in ("recall", "recall_step", "recall_slow", "place")),
            *(_count(row[name]) for name in ("delay_step", "delay_slow")),
            *(_rate(row[name]) for name in ("false_alarms", "false_alarms_before_fault")),
        )
        for row in rows
    ]
    note = "False alarms per 10,000 steps: of healthy runs, and of faulty ones before the fault. Delays are medians.\n"
    note += "Other detectors than gradvitals find a fault by any flag after it, and can name no place."
    return f"Side by side\n\n{markdown_table([head, *cells])}\n\n{note}"


def _verdicts(counts: dict[str, Counter[str]]) -> str:
    said = [
        f"of {sum(levels.values())} {kind} runs " + ", ".join(f"{number} {level}" for level, number in levels.items())
        for kind, levels in counts.items()
        if levels
    ]
    return f"What the doctor says at the end: {'; '.join(said)}. A run that got over its fault may be called healthy."


def _faults_table(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    head = ("fault", "model", "kind", "recall", "place", "delay", "healthy at end", "found by", "others that flag")
    cells = [
        (
            row["fault"],
            row["model"],
            row["kind"],
            _percent(row["recall"]),
            _percent(row["place"]),
            _count(row["delay"]),
            f"{row['healthy']} of {row['runs']}",
            ", ".join(row["rules"]) or "-",
            ", ".join(row["others"]) or "-",
        )
        for row in rows
    ]
    return f"By fault and model, gradvitals\n\n{markdown_table([head, *cells], left=(0, 1, 2, 7, 8))}"


def _planted_table(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    cells = [(row["fault"], row["what"], ", ".join(row["finds"])) for row in rows]
    table = markdown_table([("fault", "what was planted", "found if one of these is said"), *cells], left=(0, 1, 2))
    return f"The faults\n\n{table}"


def _rules_table(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    head = ("rule", "faults found", "found first", "false alarms", "before fault", "beside the fault")
    names = ("finds", "first", "false_alarms", "before_fault", "beside_fault")
    cells = [(row["rule"], *(str(row[name]) for name in names)) for row in rows]
    note = "Beside the fault: findings in a faulty run that do not name its fault, right or wrong."
    return f"By rule\n\n{markdown_table([head, *cells])}\n\n{note}"


def _models_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("model", "recall", "right place", "healthy steps", "false alarms", "which")
    cells = [
        (
            row["model"],
            _percent(row["recall"]),
            _percent(row["place"]),
            str(row["healthy_steps"]),
            _rate(row["false_alarms"]),
            "; ".join(row["which"]) or "-",
        )
        for row in rows
    ]
    return f"By model\n\n{markdown_table([head, *cells], left=(0, 5))}"


def _effects_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("fault", "model", "planted", "differs from", "loss at end", "healthy twin", "norm, x", "update, x")
    cells = [
        (
            row["fault"],
            row["model"],
            *(_count(row[name]) for name in ("planted", "differs_from")),
            *(f"{row[name]:.3g}" for name in ("loss", "twin_loss", "norm_ratio", "update_ratio")),
        )
        for row in rows
    ]
    note = "Against the healthy twin of the same seed: the ratios where they are furthest from 1 after the fault."
    return f"What each fault did\n\n{markdown_table([head, *cells], left=(0, 1))}\n\n{note}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _count(number: float | None) -> str:
    return "-" if number is None else f"{number:g}"


def _rate(number: float | None) -> str:
    return "-" if number is None else f"{number:.1f}"
