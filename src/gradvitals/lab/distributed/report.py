"""The results in words: fault by fault, the clean runs, and what ranks told each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradvitals.lab.distributed.faults import KINDS
from gradvitals.lab.markdown import markdown_table


def format_distributed(result: Mapping[str, Any]) -> str:
    """The result as text: Markdown tables."""
    parts = [_faults(result["faults"], result["ranks"]), _clean(result["clean"]), _cost(result["cost"])]
    return "\n\n".join(part for part in parts if part)


def _faults(rows: Sequence[Mapping[str, Any]], ranks: int) -> str:
    if not rows:
        return ""
    head = ("fault", "wrap", "found", "finding", "rank named", "steps until found", "afterwards")
    cells = [
        (
            row["fault"],
            row["wrap"],
            "yes" if row["found"] else "NO",
            row["finding"] or "-",
            f"yes, {row['rank']}" if row["rank_named"] else "NO",
            str(row["steps_until_found"]) if row["found"] else "-",
            row["after"] or "-",
        )
        for row in rows
    ]
    found = sum(row["found"] for row in rows)
    named = sum(row["rank_named"] for row in rows)
    lines = [
        f"Faults planted on one of {ranks} ranks: {found} of {len(rows)} found, the rank named in {named}",
        "",
        markdown_table([head, *cells], left=(0, 1, 2, 3, 4, 6)),
        "",
        *(f"- {row['fault']}: {KINDS[row['fault']].description}" for row in _once(rows)),
        "",
        "What was said:",
        "",
        *(f"- {row['fault']}, {row['wrap']}: {_said(row)}" for row in rows),
    ]
    return "\n".join(lines)


def _once(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list({row["fault"]: row for row in rows}.values())


def _said(row: Mapping[str, Any]) -> str:
    said = f"{row['severity']}: {row['title']}" if row["found"] else "nothing of it"
    where = f" in {', '.join(row['tensors'][:2])}" if row["tensors"] else ""
    also = f" (also {', '.join(row['other_findings'])})" if row["other_findings"] else ""
    return f"{said}{where}{also}"


def _clean(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    head = ("clean run", "wrap", "steps", "alarms about ranks", "other alarms", "notes")
    cells = [
        (
            row["run"],
            row["wrap"],
            f"{row['steps']:,}",
            ", ".join(row["about_ranks"]) or "0",
            ", ".join(row["others"]) or "0",
            ", ".join(row["notes"]) or "-",
        )
        for row in rows
    ]
    total = sum(row["steps"] for row in rows)
    alarms = sum(len(row["about_ranks"]) for row in rows)
    others = sum(len(row["others"]) for row in rows)
    said = f"{total:,} clean steps: {alarms} alarms about ranks, {others} others (warning or more)"
    return f"{said}\n\n{markdown_table([head, *cells], left=(0, 1, 5))}"


def _cost(cost: Mapping[str, Any]) -> str:
    return (
        f"Between ranks, in the mean of {cost['steps']:,} steps: {cost['collectives_per_step']:.2f} collectives and "
        f"{cost['bytes_per_step']:,.0f} bytes a step of a rank, off the training thread. What that costs in time: "
        "gradvitals bench ranks"
    )
