"""What the runs come to: which faults were found, by which finding, how soon, and what clean runs were told."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gradvitals.lab.distributed.cell import KILLED, Cell, Result
from gradvitals.lab.distributed.faults import KINDS

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
