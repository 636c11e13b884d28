"""Which faults were found, by which finding and how soon, what clean runs were told, and all of it as text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.distributed.faults import KILLED, KINDS, Cell, Result
from gradvitals.bench import markdown_table

ABOUT_RANKS = ("high_dispersion", "low_dispersion", "replica_mismatch", "rng_mismatch", "ranks_lost")


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """All of it as plain values."""
    return {
        "ranks": results[0].cell.ranks if results else 0,
        "faults": [fault_row(result) for result in results if not result.cell.is_clean],
        "clean": [clean_row(result) for result in results if result.cell.is_clean],
        "cost": cost(results),
    }


def fault_row(result: Result) -> dict[str, Any]:
    """Whether a planted fault was found, and as what."""
    cell, kind = result.cell, KINDS[result.cell.fault]
    telling = [finding for finding in result.findings if finding["id"] in kind.found_by and _after(finding, cell)]
    telling.sort(key=_found_step)
    first = telling[0] if telling else None
    others = sorted({f["id"] for f in result.findings if f["id"] not in kind.found_by and f["severity"] != "info"})
    row: dict[str, Any] = {
        "fault": cell.fault,
        "wrap": cell.wrap,
        "rank": cell.odd_rank,
        "step": cell.fault_step,
        "found": first is not None,
        "finding": first["id"] if first is not None else None,
        "title": first["title"] if first is not None else None,
        "severity": first["severity"] if first is not None else None,
        "rank_named": any(_names(finding, result) for finding in telling),
        "steps_until_found": _found_step(first) - cell.fault_step if first is not None else None,
        "tensors": list(first["tensors"]) if first is not None else [],
        "other_findings": others,
        "after": after(result),
    }
    return row


def after(result: Result) -> str:
    """In what state the fault has left the run, where that is the point of it."""
    cell = result.cell
    if cell.fault == KILLED:
        survivors = [rank for rank in result.ranks if rank.rank == 0]
        return f"run readable, {result.steps_kept} steps kept" if survivors else "no rank 0"
    if cell.is_guarded:
        left_out = {rank.left_out for rank in result.ranks}
        steps = ", ".join(map(str, next(iter(left_out)))) or "no step"
        alike = f"all ranks left out step {steps}" if len(left_out) == 1 else f"ranks differ: {sorted(left_out)}"
        if cell.wrap != "ddp":
            return alike
        equal = len({rank.digest for rank in result.ranks}) == 1
        return f"{alike}; weights {'equal' if equal else 'NOT equal'} at the end"
    return ""


def clean_row(result: Result) -> dict[str, Any]:
    """What was said of a run in which nothing happened."""
    alarms = [finding for finding in result.findings if finding["severity"] != "info"]
    return {
        "run": result.cell.fault,
        "wrap": result.cell.wrap,
        "steps": result.cell.steps,
        "about_ranks": [finding["id"] for finding in alarms if finding["id"] in ABOUT_RANKS],
        "others": [finding["id"] for finding in alarms if finding["id"] not in ABOUT_RANKS],
        "notes": sorted({finding["id"] for finding in result.findings if finding["severity"] == "info"}),
    }


def cost(results: Sequence[Result]) -> dict[str, Any]:
    """What ranks told each other, in the mean over the steps of all runs."""
    told = [(rank.collectives, rank.bytes_sent, rank.steps) for result in results for rank in result.ranks[:1]]
    steps = sum(count for _, _, count in told)
    return {
        "steps": steps,
        "collectives_per_step": sum(number for number, _, _ in told) / max(1, steps),
        "bytes_per_step": sum(number for _, number, _ in told) / max(1, steps),
        "ms_per_step": 1000 * statistics.median(rank.seconds for result in results for rank in result.ranks),
    }


def _after(finding: Mapping[str, Any], cell: Cell) -> bool:
    return _found_step(finding) >= cell.fault_step


def _found_step(finding: Mapping[str, Any]) -> int:
    found = finding["found_step"]
    return int(finding["first_step"] if found is None else found)


def _names(finding: Mapping[str, Any], result: Result) -> bool:
    """Whether a finding names the rank. Two that read the same are named together: it cannot be told whose they are."""
    cell = result.cell
    if cell.fault in ("shard", "shard_dropout"):
        return sorted(finding["evidence"].get("seen", {}).get("ranks", ())) == [cell.twin, cell.odd_rank]
    return bool(finding["rank"] == cell.odd_rank)


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
        "python -m benchmarks.distributed cost"
    )
