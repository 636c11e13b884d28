"""The results in words: what had to be reached, arm beside arm, and fault by fault."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradvitals.lab.markdown import markdown_table
from gradvitals.lab.recovery.cell import EXTRA_BATCHES, FaultName
from gradvitals.lab.recovery.faults import KINDS

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
