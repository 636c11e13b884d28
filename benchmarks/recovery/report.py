"""How good each run is beside the clean one of its model and seed, arm beside arm and fault by fault."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Panel, Trace, draw
from benchmarks.recovery.cell import ARMS, CLEAN, EXTRA_BATCHES, FAULTS, ArmName, Cell, FaultName, Result
from benchmarks.recovery.faults import KINDS
from gradvitals.bench import markdown_table

CLOSE = 1.02
"""A run has recovered where its loss is at most this many times the clean run's."""
ENOUGH = 0.95
"""Share of cells that have to recover with the Guard."""

Reference = dict[tuple[str, int, int], float]
"""Loss of the clean run that nobody looked after, by model, seed and steps."""


def references(results: Iterable[Result]) -> Reference:
    """What all others are judged by."""
    return {
        (result.cell.model, result.cell.seed, result.cell.steps): result.loss
        for result in results
        if result.cell.fault == CLEAN and result.cell.arm == "none"
    }


def ratio(result: Result, reference: Reference) -> float:
    """Loss at the end over the clean run's; inf where the model is broken."""
    clean = reference[result.cell.model, result.cell.seed, result.cell.steps]
    return result.loss / clean if math.isfinite(result.loss) else math.inf


def bounded_ratio(result: Result, reference: Reference) -> float:
    """The same, but nobody is worse than having learnt nothing: a mean of this says something."""
    clean = reference[result.cell.model, result.cell.seed, result.cell.steps]
    return min(result.loss, result.untrained) / clean if math.isfinite(result.loss) else result.untrained / clean


def recovered(result: Result, reference: Reference) -> bool:
    """Whether its loss is within two percent of the clean run's, or better."""
    return ratio(result, reference) <= CLOSE


def in_table(results: Iterable[Result]) -> list[Result]:
    """Runs that are a cell of the table: one fault, and long enough to have a reference."""
    known = list(results)
    reference = references(known)
    return [
        result
        for result in known
        if not result.cell.killed and (result.cell.model, result.cell.seed, result.cell.steps) in reference
    ]


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """Everything the tables show, as plain values ready for JSON."""
    reference, cells = references(results), in_table(results)
    return {
        "runs": len(results),
        "seeds": len({result.cell.seed for result in results}),
        "cpu_seconds": sum(result.seconds for result in results),
        "bars": bars(results),
        "arms": [arm_row(cells, arm, reference) for arm in _arms(cells)],
        "rows": [
            fault_row(those, fault, arm, reference)
            for fault in (CLEAN, *FAULTS)
            for arm in _arms(cells)
            if (those := [r for r in cells if (r.cell.fault, r.cell.arm) == (fault, arm)])
        ],
        "clean": clean_rows(results),
        "killed": killed_rows(results),
        "not_recovered": [
            {"cell": result.cell.label, "ratio": ratio(result, reference), "notes": list(result.notes)}
            for result in cells
            if result.cell.arm == "guard" and not recovered(result, reference)
        ],
    }


def _arms(results: Iterable[Result]) -> list[ArmName]:
    found = {result.cell.arm for result in results}
    return [arm for arm in ARMS if arm in found]


def fault_row(results: Sequence[Result], fault: FaultName, arm: ArmName, reference: Reference) -> dict[str, Any]:
    """One arm and one fault, over models and seeds."""
    ratios = [ratio(result, reference) for result in results]
    return {
        "fault": fault,
        "arm": arm,
        "cells": len(results),
        "median": statistics.median(ratios),
        "worst": max(ratios),
        "recovered": statistics.fmean(recovered(result, reference) for result in results),
        "diverged": sum(result.diverged for result in results),
        "batches": statistics.fmean(result.batches for result in results),
        "lost": statistics.fmean(result.lost for result in results),
        "actions": dict(sum((Counter(result.actions) for result in results), Counter[str]())),
    }


def arm_row(results: Sequence[Result], arm: ArmName, reference: Reference) -> dict[str, Any]:
    """One arm over all cells with a fault."""
    those = [result for result in results if result.cell.arm == arm and result.cell.fault != CLEAN]
    return {
        "arm": arm,
        "cells": len(those),
        "mean": statistics.fmean(bounded_ratio(result, reference) for result in those) if those else None,
        "recovered": statistics.fmean(recovered(result, reference) for result in those) if those else None,
        "diverged": sum(result.diverged for result in those),
        "lost": statistics.fmean(result.lost for result in those) if those else None,
    }


def draw_figure(results: Sequence[Result], path: Path) -> None:
    """Draw the loss of every run with a fault, arm beside arm, the best runs first."""
    reference, cells = references(results), [one for one in in_table(results) if one.cell.fault != CLEAN]
    panels = []
    for model in dict.fromkeys(one.cell.model for one in cells):
        panel = Panel(title=model, x_name="runs with a fault (%)", y_name="loss, x clean", y_marks=(CLOSE,))
        for color, arm in enumerate(_arms(cells)):
            some = [one for one in cells if (one.cell.model, one.cell.arm) == (model, arm)]
            ratios = sorted(bounded_ratio(one, reference) for one in some)
            ranks = [100 * (rank + 0.5) / len(ratios) for rank in range(len(ratios))]
            panel.traces.append(Trace(name=arm, x=ranks, y=ratios, line=True, color=color))
        panels.append(panel)
    draw(panels, "Final loss after a fault, divided by that of the clean run", path)


def clean_rows(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Clean runs under the Guard, in which every action is a false one, refused ones included."""
    clean = [result for result in results if result.cell.fault == CLEAN and result.cell.arm == "guard"]
    return [
        {
            "model": model,
            "steps": steps,
            "runs": len(those),
            "actions": sum(sum(result.actions.values()) for result in those),
            "which": [f"seed {result.cell.seed}: {note}" for result in those for note in result.notes],
        }
        for model, steps in dict.fromkeys((result.cell.model, result.cell.steps) for result in clean)
        for those in [[result for result in clean if (result.cell.model, result.cell.steps) == (model, steps)]]
    ]


def killed_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Runs of the Guard that were killed, beside the same run left alone: are the weights the same, bit for bit?"""
    by_cell = {result.cell: result for result in results}
    rows = []
    for result in results:
        twin = by_cell.get(_left_alone(result.cell)) if result.cell.is_killed and result.cell.arm == "guard" else None
        if twin is not None:
            rows.append(
                {
                    "cell": result.cell.label,
                    "identical": result.checksum == twin.checksum,
                    "repeated": result.batches - twin.batches,
                    "actions": dict(twin.actions),
                }
            )
    return rows


def _left_alone(cell: Cell) -> Cell:
    fault = cell.fault if cell.killed else CLEAN
    return Cell(model=cell.model, fault=fault, arm=cell.arm, seed=cell.seed, steps=cell.steps)


def bars(results: Sequence[Result]) -> list[dict[str, Any]]:
    """What has to be reached with the Guard, and whether it was; nothing that no run can tell about."""
    reference, cells = references(results), in_table(results)
    arms = {arm: arm_row(cells, arm, reference) for arm in _arms(cells)}
    found: list[dict[str, Any]] = []
    ours = arms.pop("guard", None)
    if ours is not None and ours["cells"]:
        share = ours["recovered"]
        found.append(_bar("cells within 2 % of the clean run", share, f">= {ENOUGH}", share >= ENOUGH))
        others = {arm: row["mean"] for arm, row in arms.items() if row["mean"] is not None}
        if others:
            best = min(others, key=lambda arm: others[arm])
            expected = f"<= {others[best]:.4g} ({best}, the best of the others)"
            found.append(_bar("mean loss over the clean run's", ours["mean"], expected, ours["mean"] <= others[best]))
    clean = clean_rows(results)
    if clean:
        actions, steps = sum(row["actions"] for row in clean), sum(row["runs"] * row["steps"] for row in clean)
        found.append(_bar(f"actions in {steps:,} clean steps", actions, "0", actions == 0))
    killed = killed_rows(results)
    if killed:
        same = sum(row["identical"] for row in killed)
        found.append(_bar("killed runs that end bit-identically", same, f"all {len(killed)}", same == len(killed)))
    return found


def _bar(what: str, value: float, expected: str, reached: bool) -> dict[str, Any]:
    return {"what": what, "value": value, "expected": expected, "reached": reached}


NOTES_SHOWN = 4
"""Actions of a run that did not recover which are shown."""


def format_recovery(result: Mapping[str, Any]) -> str:
    """The result as text: Markdown tables."""
    parts = [
        f"{result['runs']} runs, {result['seeds']} seeds",
        _bars_table(result["bars"]),
        _arms_table(result["arms"]),
        _faults_table(result["rows"]),
        _clean_table(result["clean"]),
        _killed_table(result["killed"]),
        _not_recovered(result["not_recovered"]),
        _planted_table(result["rows"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _bars_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    cells = [(row["what"], f"{row['value']:.4g}", row["expected"], "yes" if row["reached"] else "no") for row in rows]
    head = ("with the Guard", "is", "has to be", "reached")
    return f"What has to be reached\n\n{markdown_table([head, *cells], left=(0, 2, 3))}"


def _arms_table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        (
            row["arm"],
            str(row["cells"]),
            f"{row['mean']:.4f}",
            _percent(row["recovered"]),
            str(row["diverged"]),
            f"{row['lost']:.1f}",
        )
        for row in rows
        if row["cells"]
    ]
    if not cells:
        return ""
    head = ("arm", "cells", "mean loss, x clean", "within 2 %", "diverged", "batches lost")
    note = "In the mean, a run that is worse than an untrained model, or broken, counts as an untrained one.\n"
    note += "Batches lost: drawn, but skipped, rolled back or gone with a process; the mean of all cells."
    return f"Arm beside arm, over all faults\n\n{markdown_table([head, *cells])}\n\n{note}"


def _faults_table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        (
            row["fault"],
            row["arm"],
            _ratio(row["median"]),
            _ratio(row["worst"]),
            _percent(row["recovered"]),
            f"{row['diverged']} of {row['cells']}",
            f"{row['batches']:.0f}",
            f"{row['lost']:.1f}",
            ", ".join(f"{count} {kind}" for kind, count in row["actions"].items()) or "-",
        )
        for row in rows
    ]
    if not cells:
        return ""
    head = ("fault", "arm", "median loss, x clean", "worst", "within 2 %", "diverged", "batches", "lost", "actions")
    note = f"""Loss of held-out data at the end over that of the clean run of the same model and seed.
Batches and lost: means over runs. Actions: sums over runs. A run ends when its arm has counted all steps of the
schedule, or when {100 * (1 + EXTRA_BATCHES):.0f} % of as many batches were drawn, in all processes together."""
    return f"Fault by fault\n\n{markdown_table([head, *cells], left=(0, 1, 8))}\n\n{note}"


def _clean_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    head = ("model", "steps", "runs", "actions", "which")
    cells = [
        (row["model"], str(row["steps"]), str(row["runs"]), str(row["actions"]), "; ".join(row["which"]) or "-")
        for row in rows
    ]
    return f"Clean runs under the Guard\n\n{markdown_table([head, *cells], left=(0, 4))}"


def _killed_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    head = ("killed run", "same weights as when left alone", "batches repeated", "actions")
    cells = [
        (
            row["cell"],
            "yes, bit for bit" if row["identical"] else "no",
            str(row["repeated"]),
            ", ".join(f"{count} {kind}" for kind, count in row["actions"].items()) or "-",
        )
        for row in rows
    ]
    return f"Killed and started again, with the Guard\n\n{markdown_table([head, *cells], left=(0, 1, 3))}"


def _not_recovered(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        shown, more = row["notes"][:NOTES_SHOWN], len(row["notes"]) - NOTES_SHOWN
        lines.append(f"- {row['cell']}: {_ratio(row['ratio'])}")
        lines += [f"  - {note}" for note in shown]
        lines += [f"  - and {more} more"] if more > 0 else []
    return "Not within 2 % with the Guard, and what it did\n\n" + "\n".join(lines) if lines else ""


def _planted_table(rows: Sequence[Mapping[str, Any]]) -> str:
    names: list[FaultName] = list(dict.fromkeys(row["fault"] for row in rows))
    if not names:
        return ""
    cells = [(name, KINDS[name].description) for name in names]
    return f"The faults\n\n{markdown_table([('fault', 'what happens'), *cells], left=(0, 1))}"


def _ratio(value: float) -> str:
    if not math.isfinite(value):
        return "broken"
    return f"{value:.4f}" if value < 10 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
