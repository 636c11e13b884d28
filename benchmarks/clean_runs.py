"""Are healthy runs left alone? Twelve workloads that are not smooth, each diagnosed, without and with a Guard."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.command_line import Command, json_option, print_result, progress_bar
from benchmarks.runs import run_all
from benchmarks.workloads import WORKLOADS, all_runs
from gradvitals.bench import markdown_table
from gradvitals.config import Config
from gradvitals.guard import Guard
from gradvitals.monitor import watch
from gradvitals.store.reader import open_run

STEPS = 3000
SEEDS = 5
MAX_ACTED = 0.02
"""Share of runs that may have an action."""
MAX_WORSE = 1.01
"""A guarded run may end with this many times the metric of the same run without a Guard."""

MAX_WARNED = 0.03
"""Share of runs that may have a finding of severity warning or above at any time, or a verdict that is not healthy."""

Job = tuple[str, int, int]
"""A workload, a seed and the number of steps."""


def make(job: Job) -> dict[str, Any]:
    """Train one workload without and with a Guard; the diagnosis is of the run without."""
    name, seed, steps = job
    config = Config(quiet=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bare = WORKLOADS[name](seed)
        with watch(bare.model, bare.optimizers, run=Path(folder) / "bare", config=config) as monitor:
            for i in range(steps):
                bare.step(i, monitor.observe)
        with open_run(Path(folder) / "bare") as run:
            level, warnings = run.verdict.level, [one for one in run.findings if one.severity != "info"]
        guarded = WORKLOADS[name](seed)
        monitor = watch(guarded.model, guarded.optimizers, run=Path(folder) / "run", config=config)
        guard = Guard(monitor, mode="act", scheduler=guarded.schedulers)
        for i in range(steps):
            guarded.step(i, monitor.observe)
        monitor.close()
        actions = guard.actions
    plain, ours = bare.metric(), guarded.metric()
    return {
        "workload": name,
        "seed": seed,
        "plain": plain,
        "guarded": ours,
        "actions": dict(Counter(one.kind if one.taken else f"{one.kind} withheld" for one in actions)),
        "acted": any(one.taken for one in actions),
        "lost": steps - guard.step,
        "notes": [str(one) for one in actions[:4]],
        "warned": sorted({one.id for one in warnings}),
        "healthy": level == "healthy",
        "broken": [one.title for one in monitor.findings if one.id in ("guard_error", "monitor_error", "store_error")],
    }


def ratio(run: Mapping[str, Any]) -> float:
    """The metric with the Guard over that without."""
    return run["guarded"] / run["plain"] if math.isfinite(run["guarded"]) else math.inf


def summarize(runs: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Everything that the tables show."""
    acted = sum(run["acted"] for run in runs)
    worse = sum(ratio(run) > MAX_WORSE for run in runs)
    warned, unwell = sum(bool(run["warned"]) for run in runs), sum(not run["healthy"] for run in runs)
    return {
        "steps": steps,
        "runs": len(runs),
        "acted": acted,
        "worse": worse,
        "bars": [
            {"what": "runs with a warning", "value": warned / len(runs), "reached": warned <= MAX_WARNED * len(runs)},
            {"what": "verdicts not healthy", "value": unwell / len(runs), "reached": unwell <= MAX_WARNED * len(runs)},
            {"what": "runs with an action", "value": acted / len(runs), "reached": acted <= MAX_ACTED * len(runs)},
            {"what": "runs over 1% worse than without a Guard", "value": worse / len(runs), "reached": worse == 0},
        ],
        "rows": [_row(name, [run for run in runs if run["workload"] == name]) for name in WORKLOADS],
        "broken": sorted({title for run in runs for title in run["broken"]}),
    }


def _row(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "workload": name,
        "acted": sum(run["acted"] for run in runs),
        "runs": len(runs),
        "lost": sum(run["lost"] for run in runs) / max(1, len(runs)),
        "warned": sum(bool(run["warned"]) for run in runs),
        "unwell": sum(not run["healthy"] for run in runs),
        "findings": dict(Counter(name for run in runs for name in run["warned"])),
        "worst": max(map(ratio, runs), default=math.nan),
        "actions": dict(sum((Counter(run["actions"]) for run in runs), Counter[str]())),
        "notes": [f"seed {run['seed']}: {note}" for run in runs for note in run["notes"]],
    }


def format_clean(result: Mapping[str, Any]) -> str:
    """The result as text."""
    bars = [(bar["what"], f"{bar['value']:.1%}", "yes" if bar["reached"] else "no") for bar in result["bars"]]
    cells = [
        (
            row["workload"],
            f"{row['acted']} of {row['runs']}",
            f"{row['lost']:.0f}",
            f"{row['worst']:.4f}",
            ", ".join(f"{count} {kind}" for kind, count in row["actions"].items()) or "-",
        )
        for row in result["rows"]
    ]
    diagnosed = [
        (
            row["workload"],
            f"{row['warned']} of {row['runs']}",
            f"{row['unwell']} of {row['runs']}",
            ", ".join(f"{name} ({count})" for name, count in row["findings"].items()) or "-",
        )
        for row in result["rows"]
    ]
    of_diagnosis = ("workload", "runs with a warning", "verdict not healthy", "findings")
    head = ("workload", "runs with an action", "steps lost per run", "worst metric, x unguarded", "actions")
    parts = [
        f"{result['runs']} runs of {result['steps']:,} steps",
        markdown_table([("bar", "value", "reached"), *bars], left=(0,)),
        markdown_table([of_diagnosis, *diagnosed], left=(0, 3)),
        markdown_table([head, *cells], left=(0, 4)),
        *(f"- {row['workload']}, {note}" for row in result["rows"] for note in row["notes"][:4]),
        *(f"An error: {title}" for title in result["broken"]),
    ]
    return "\n\n".join(parts)


@click.command(cls=Command)
@click.option("--seeds", type=click.IntRange(min=1), default=SEEDS, show_default=True, help="Runs of each workload.")
@click.option("--first-seed", type=click.IntRange(min=0), default=0, show_default=True, help="First seed.")
@click.option("--steps", type=click.IntRange(min=10), default=STEPS, show_default=True, help="Steps of each run.")
@click.option("--workload", "names", type=click.Choice(tuple(WORKLOADS)), multiple=True, help="Only this workload.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Processes to train in.")
@click.option("--quick", is_flag=True, help="One seed of 300 steps.")
@json_option
def main(
    seeds: int, first_seed: int, steps: int, names: tuple[str, ...], workers: int, quick: bool, as_json: bool
) -> None:
    """Train healthy but not smooth workloads with and without a Guard; count warnings and what the Guard does.

    \b
    Example:
      python -m benchmarks.clean_runs
      python -m benchmarks.clean_runs --workload rare_class --seeds 2
    """
    if quick:
        seeds, steps = 1, 300
    jobs = [(name, seed, steps) for name, seed in all_runs(seeds, first_seed) if not names or name in names]
    runs: list[dict[str, Any]] = []
    with progress_bar() as progress:
        for _, run in run_all(make, jobs, workers):
            runs.append(run)
            progress(len(runs), len(jobs), f"{run['workload']} {run['seed']}")
    runs.sort(key=lambda run: (run["workload"], run["seed"]))
    print_result(summarize(runs, steps), as_json, format_clean)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.clean_runs")
