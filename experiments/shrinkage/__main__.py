"""`python -m experiments.shrinkage`: do steps scaled by the gradient's signal beat a tuned baseline?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.command_line import (
    Command,
    Progress,
    device_option,
    json_option,
    pick_device,
    print_result,
    progress_bar,
)
from benchmarks.figures import Panel, Trace, draw
from benchmarks.runs import append_line, read_lines
from experiments import grid
from experiments.batch_schedule.__main__ import mean_and_error
from experiments.parallel import Workers
from experiments.shrinkage.training import ARMS, Trial, train
from gradvitals.bench import markdown_table

COMMAND = "python -m experiments.shrinkage"
LR_STEP = 2.0
TIMES = (1, 4, 16)
"""Batches, as multiples of the critical one."""
FIRST_SEED = 100
STARTS = {
    "text": Trial(task="text", arm="base", batch=32, lr=1e-3, seed=0, samples=32_768),
    "images": Trial(task="images", arm="base", batch=128, lr=0.14, seed=0, samples=200_000),
}
"""Where the critical batch is measured; sweeps begin at this rate, times the root of the batch."""
LARGEST = {"text": 128, "images": 512}
"""Largest batch that counts as the critical one: 16 times as much has to fit into the time there is."""
MIN_STEPS = 200
"""Fewest steps of a training: large batches get more samples, since a few steps say nothing."""
Line = Mapping[str, Any]


@click.command(cls=Command)
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Folder with the books and cifar10/.")
@click.option("--task", "tasks", type=click.Choice(list(STARTS)), multiple=True, help="Only this task; repeatable.")
@click.option("--seeds", type=int, default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default="runs/shrinkage.jsonl", show_default=True)
@click.option("--report", type=click.Path(path_type=Path, exists=True), help="Print the tables of this file only.")
@click.option("--figure", type=click.Path(path_type=Path, dir_okay=False), help="Draw the result into this SVG file.")
@click.option("--time-limit", type=float, metavar="SECONDS", help="Stop then; the same command goes on later.")
@click.option("--quick", is_flag=True, help="Tiny models on drawn data; keeps nothing.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Trainings at once.")
@click.option("--graphs/--no-graphs", default=True, help="On a GPU, replay the passes of a step as one CUDA graph.")
@device_option
@json_option
def main(
    data: Path | None,
    tasks: tuple[str, ...],
    seeds: int,
    out: Path,
    report: Path | None,
    figure: Path | None,
    time_limit: float | None,
    quick: bool,
    workers: int,
    graphs: bool,
    device: str,
    as_json: bool,
) -> None:
    """Measure the critical batch of two tasks, then sweep every arm at 1, 4 and 16 times that, and add fresh seeds."""
    if report is not None:
        _print(read_lines(report, dict, COMMAND), figure, as_json)
        return
    device = pick_device("cpu" if quick and device == "auto" else device)
    starts = [replace(start, data=data, device=device, graphs=graphs) for start in STARTS.values()]
    starts = [start for start in starts if not tasks or start.task in tasks]
    if quick:
        seeds = 2
        starts = [replace(start, data=None, samples=256, batch=8, small=True) for start in starts]
    with progress_bar() as progress, Workers(workers, time_limit) as pool:
        lines = run(starts, seeds, None if quick else out, pool, progress)
    _print(lines, figure, as_json)


def _print(lines: Sequence[Line], figure: Path | None, as_json: bool) -> None:
    summary = summarize(lines)
    if figure is not None:
        draw_figure(summary, figure)
    print_result(summary, as_json, format_summary)


def run(starts: Sequence[Trial], seeds: int, out: Path | None, pool: Workers, progress: Progress) -> list[Line]:
    """Returns all lines; fewer where the time limit passed. What the file has already is not trained again."""
    lines: list[Line] = read_lines(out, dict, COMMAND) if out is not None else []

    def train_all(phase: str, trials: Sequence[Trial]) -> bool:
        known = {_key(line) for line in lines}
        missing = [trial for trial in trials if _key({"phase": phase, **_plain(trial)}) not in known]
        for count, (trial, result) in enumerate(pool.run(train, missing), start=1):
            line = {"phase": phase, **_plain(trial), **result}
            lines.append(line)
            if out is not None:
                append_line(out, line)
            progress(count, len(missing), f"{trial.task} {trial.arm} {trial.batch}: {result['score']:.4g}")
        return not pool.is_over

    if not train_all("critical", starts):
        return lines
    groups = []
    for start in starts:
        scale = next(one["noise_scale"] for one in lines if one["phase"] == "critical" and one["task"] == start.task)
        size = critical_batch(scale, LARGEST[start.task])
        for times in TIMES:
            lr = start.lr * math.sqrt(times * size / start.batch)
            samples = start.samples if start.small else max(start.samples, MIN_STEPS * times * size)
            groups += [replace(start, arm=arm, batch=times * size, lr=lr, samples=samples) for arm in ARMS]

    def tried(group: Trial) -> dict[grid.Point, float]:
        return {
            (round(math.log(one["lr"] / group.lr, LR_STEP)),): one["score"]
            for one in lines
            if one["phase"] == "sweep" and _group(one) == _group(_plain(group))
        }

    def at(group: Trial, point: grid.Point) -> Trial:
        return replace(group, lr=group.lr * LR_STEP ** point[0])

    while todo := [at(group, point) for group in groups for point in grid.untried(tried(group), 1)]:
        if not train_all("sweep", todo):
            return lines
    best = [at(group, grid.best_point(tried(group))) for group in groups]
    train_all("fresh", [replace(one, seed=FIRST_SEED + seed) for seed in range(seeds) for one in best])
    return lines


def critical_batch(noise_scale: float, largest: int) -> int:
    """Returns the power of two nearest to the noise scale, from 4 to the largest.

    >>> critical_batch(90.0, 512), critical_batch(5000.0, 512), critical_batch(float("nan"), 512)
    (64, 512, 512)
    """
    return min(largest, 2 ** max(2, round(math.log2(noise_scale)))) if math.isfinite(noise_scale) else largest


NAMES = ("task", "arm", "batch", "lr", "seed", "samples")


def _plain(trial: Trial) -> dict[str, Any]:
    values = asdict(trial)
    return {name: values[name] for name in NAMES}


def _key(line: Line) -> tuple[Any, ...]:
    return (line["phase"], *(line[name] for name in NAMES if name != "lr"), f"{line['lr']:.4g}")


def _group(line: Line) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("task", "arm", "batch", "samples"))


# -- the tables ------------------------------------------------------------------------------------------------------


def summarize(lines: Sequence[Line]) -> dict[str, Any]:
    """Returns every arm beside the base at the same batch, paired by seed; positive differences are better."""
    cells: dict[tuple[str, int, str], dict[int, Line]] = {}
    for one in lines:
        if one["phase"] == "fresh":
            cells.setdefault((one["task"], one["batch"], one["arm"]), {})[one["seed"]] = one
    rows = []
    for (task, batch, arm), some in sorted(cells.items(), key=lambda item: (item[0][:2], ARMS.index(item[0][2]))):
        base = cells.get((task, batch, "base"), {})
        mean, error = mean_and_error([one["score"] for one in some.values()])
        both = sorted(some.keys() & base.keys())
        gain, gain_error = mean_and_error([base[seed]["score"] - some[seed]["score"] for seed in both])
        rows.append(
            {"task": task, "batch": batch, "arm": arm, "lr": next(iter(some.values()))["lr"], "seeds": len(some)}
            | {"steps": next(iter(some.values()))["steps"], "score": mean, "error": error}
            | {"gain": gain, "gain_error": gain_error}
            | {"wins": arm != "base" and gain > 2 * gain_error}
        )
    critical = {one["task"]: one["noise_scale"] for one in lines if one["phase"] == "critical"}
    sizes = {task: sorted({row["batch"] for row in rows if row["task"] == task}) for task in critical}
    wins = {(row["arm"], sizes[row["task"]].index(row["batch"]), row["task"]) for row in rows if row["wins"]}
    won = [
        f"{arm} at {times} x"
        for arm in ARMS
        for place, times in enumerate(TIMES)
        if critical and all((arm, place, task) in wins for task in critical)
    ]
    trials = sum(one["phase"] == "sweep" for one in lines)
    return {"critical": critical, "rows": rows, "won": won, "sweep": trials}


def draw_figure(summary: Mapping[str, Any], path: Path) -> None:
    """Draw what each arm gains over the base, in % of its score, with two standard errors to each side."""
    panels = []
    for task in summary["critical"]:
        panel = Panel(title=task, x_name="batch", y_name="gain over base (%)", x_log=True, y_marks=(0.0,))
        base = {one["batch"]: one["score"] for one in summary["rows"] if (one["task"], one["arm"]) == (task, "base")}
        for color, arm in enumerate(ARMS[1:]):
            some = [one for one in summary["rows"] if (one["task"], one["arm"]) == (task, arm)]
            for place, one in enumerate(some):
                ends = [one["gain"] + side * 2 * one["gain_error"] for side in (-1, 0, 1)]
                x = one["batch"] * 1.15 ** (color - 1)  # beside each other
                y = [100 * end / base[one["batch"]] for end in ends]
                panel.traces.append(Trace(name="" if place else arm, x=[x] * 3, y=y, line=True, color=color))
                panel.traces.append(Trace(name="", x=[x], y=[y[1]], color=color))
        panels.append(panel)
    draw(panels, "What shrinkage by signal gains over a tuned baseline", path)


def format_summary(summary: Mapping[str, Any]) -> str:
    """Returns the tables as text."""
    scales = ", ".join(f"{task} {scale:.0f} samples" for task, scale in summary["critical"].items())
    rows = [
        [
            *map(str, (one["task"], one["batch"], one["steps"], one["arm"], round(one["lr"], 6), one["seeds"])),
            f"{one['score']:.4g} ± {one['error']:.2g}",
            f"{one['gain']:+.4f} ± {one['gain_error']:.4f}",
            "yes" if one["wins"] else "no",
        ]
        for one in summary["rows"]
    ]
    heads = ["task", "batch", "steps", "arm", "learning rate", "seeds", "score", "gain over base", "over 2 errors"]
    return "\n\n".join(
        [
            f"Noise scale: {scales}; {summary['sweep']} trials of sweeps",
            "Score: held-out loss in nats per byte (text), test error in % (images); lower is better",
            markdown_table([heads, *rows], left=(0, 3)),
            f"Over two standard errors better on both tasks: {', '.join(summary['won']) or 'none'}",
        ]
    )


if __name__ == "__main__":
    main(prog_name=COMMAND)
