"""`python -m benchmarks.real_bugs`: does the doctor find bugs that people really had, and name their cause?"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import click

from benchmarks.command_line import Command, json_option, print_result, progress_bar
from benchmarks.real_bugs.cases import CASES
from benchmarks.real_bugs.controls import CONTROLS
from benchmarks.real_bugs.judge import Outcome, is_right, outcome_of, to_json
from benchmarks.runs import run_all

QUICK = 8
"""Cases of a quick run."""
CLEARLY = 0.1
"""A fix must remove this share of the error, at least, by the median over seeds: else the case is dropped."""


@click.command(cls=Command)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each version.")
@click.option("--first-seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--cases", "only", metavar="REGEX", help="Only cases and controls whose name it matches.")
@click.option(
    "--half", type=click.Choice(("tune", "held", "blind")), help="Only this half of the cases, without controls."
)
@click.option("--quick", is_flag=True, help=f"The first {QUICK} cases with one seed.")
@click.option("--show", is_flag=True, help="Print what the doctor printed for each buggy run.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@json_option
def main(
    seeds: int,
    first_seed: int,
    only: str | None,
    half: str | None,
    quick: bool,
    show: bool,
    workers: int,
    as_json: bool,
) -> None:
    """Train the buggy and the fixed version of each case, and judge what `gradvitals doctor` says.

    The whole benchmark takes about ten minutes on two cores.
    """
    names = [n for n, c in CASES.items() if re.search(only or "", n) and half in (None, c.half)]
    controls = [name for name in CONTROLS if re.search(only or "", name) and half is None]
    if quick:
        names, controls, seeds = names[:QUICK], controls[:2], 1
    every = range(first_seed, first_seed + seeds)
    items: list[tuple[str, str, int, Any]] = []
    items += [(name, kind, seed, {}) for name in names for kind in ("buggy", "fixed") for seed in every]
    items += [(name, "control", seed, {}) for name in controls for seed in every]
    with progress_bar() as progress:
        outcomes = _run(items, workers, progress)
        fixes = [(one.name, "followed", one.seed, one.change) for one in outcomes if one.kind == "buggy" and one.change]
        outcomes += _run(fixes, workers, progress)
    if show:
        for one in outcomes:
            if one.text and (one.kind == "buggy" or one.level != "healthy"):
                click.echo(f"===== {one.name} ({one.kind}, seed {one.seed})\n{one.text}")
    print_result(summarize(outcomes), as_json, format_summary)


def _run(items: Sequence[Any], workers: int, progress: Any) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    for place, outcome in run_all(outcome_of, items, workers):
        found[place] = outcome
        progress(len(found), len(items), outcome.name)
    return [found[place] for place in range(len(items))]


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the scores of every case and of each half."""
    by_case: dict[str, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        by_case[outcome.name][outcome.kind].append(outcome)
    cases = [_score(name, kinds) for name, kinds in by_case.items() if name in CASES]
    controls = [
        {"name": name, "quiet": sum(one.level == "healthy" for one in kinds["control"]), "of": len(kinds["control"])}
        | {"alarms": sorted({one.finding for one in kinds["control"] if one.finding})}
        for name, kinds in by_case.items()
        if name in CONTROLS
    ]
    halves = {half: _total([one for one in cases if one["half"] == half]) for half in ("tune", "held", "blind")}
    lines = [o.lines for o in outcomes if o.kind in ("fixed", "control") and o.level == "healthy"]
    return {
        "cases": cases,
        "controls": controls,
        "halves": {**halves, "all": _total(cases)},
        "healthy_lines": statistics.median(lines) if lines else None,
        "outcomes": [to_json(one) for one in outcomes],
    }


def _score(name: str, kinds: dict[str, list[Outcome]]) -> dict[str, Any]:
    buggy, fixed, followed = kinds["buggy"], kinds["fixed"], kinds["followed"]
    bad, good = (statistics.median(one.error for one in some) for some in (buggy, fixed))
    first = [one for one in buggy if one.level != "healthy" or one.as_note]
    fixed_errors = {one.seed: one.error for one in fixed}
    buggy_errors = {one.seed: one.error for one in buggy}
    recovered = [
        max(0.0, min((buggy_errors[o.seed] - o.error) / gap, 1.0)) if math.isfinite(o.error) else 0.0
        for o in followed
        if o.applied and (gap := buggy_errors[o.seed] - fixed_errors[o.seed]) > 0
    ]
    return {
        "name": name,
        "half": CASES[name].half,
        "error": [bad, good],
        "kept": bad - good > CLEARLY * max(abs(bad), 1e-9) or not math.isfinite(bad),
        "runs": len(buggy),
        "detected": len(first),
        "as_note": sum(one.as_note for one in buggy),
        "first_right": sum(is_right(one) for one in first),
        "any_right": sum(is_right(one, any_of=True) for one in first),
        "false_alarms": sum(one.level != "healthy" for one in fixed),
        "lines": max((one.lines for one in buggy), default=0),
        "findings": sorted({one.finding for one in buggy if one.finding}),
        "fixed_findings": sorted({one.finding for one in fixed if one.finding}),
        "recovered": recovered,
    }


def _total(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    kept = [one for one in cases if one["kept"]]
    runs = sum(one["runs"] for one in kept)
    recovered = [share for one in kept for share in one["recovered"]]
    sums = {
        name: sum(one[name] for one in kept)
        for name in ("detected", "as_note", "first_right", "any_right", "false_alarms")
    }
    return {
        "cases": len(kept),
        "dropped": len(cases) - len(kept),
        "runs": runs,
        **sums,
        "lines_median": statistics.median(one["lines"] for one in kept) if kept else None,
        "lines_most": max((one["lines"] for one in kept), default=None),
        "followed": len(recovered),
        "recovered_median": statistics.median(recovered) if recovered else None,
    }


def _share(total: dict[str, Any], name: str) -> str:
    return f"{total[name]} of {total['runs']} ({total[name] / total['runs']:.0%})"


def format_summary(result: dict[str, Any]) -> str:
    """Returns the scores as text."""
    lines = [
        f"{'case':<42} {'half':<5} {'buggy':>7} {'fixed':>7} {'found':>6} {'first':>6} {'any':>5} {'alarms':>7}"
        "  first finding"
    ]
    for one in result["cases"]:
        bad, good = one["error"]
        note = "" if one["kept"] else "  (dropped: the fix is not clearly better)"
        alarms = f"  ALARM {', '.join(one['fixed_findings'])}" if one["fixed_findings"] else ""
        shares = f"  recovered {statistics.median(one['recovered']):.0%}" if one["recovered"] else ""
        lines.append(
            f"{one['name']:<42} {one['half']:<5} {bad:>7.3f} {good:>7.3f} {one['detected']:>4}/{one['runs']} "
            f"{one['first_right']:>4}/{one['runs']} {one['any_right']:>3}/{one['runs']} "
            f"{one['false_alarms']:>5}/{one['runs']}  {', '.join(one['findings'])}{shares}{alarms}{note}"
        )
    for one in result["controls"]:
        lines.append(f"control {one['name']:<40} quiet {one['quiet']}/{one['of']}  {', '.join(one['alarms'])}")
    lines.append("")
    for half, total in result["halves"].items():
        runs = total["runs"]
        if not runs:
            continue
        lines += [
            f"{half}: {total['cases']} cases ({total['dropped']} dropped), {runs} runs of each version",
            f"  detected            {_share(total, 'detected')}, {total['as_note']} of them as a note",
            f"  first cause right   {_share(total, 'first_right')}",
            f"  any cause right     {_share(total, 'any_right')}",
            f"  false alarms        {_share(total, 'false_alarms')}",
            f"  lines of doctor     {total['lines_median']:g} by the median, {total['lines_most']} at most",
        ]
        if total["recovered_median"] is not None:
            lines.append(f"  fix followed        {total['recovered_median']:.0%} of the gap ({total['followed']} runs)")
    quiet, of = (sum(one[name] for one in result["controls"]) for name in ("quiet", "of"))
    if of:
        lines.append(f"controls quiet        {quiet} of {of} ({quiet / of:.0%})")
    if result["healthy_lines"] is not None:
        lines.append(f"lines when healthy    {result['healthy_lines']:g} by the median")
    return "\n".join(lines)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.real_bugs")
