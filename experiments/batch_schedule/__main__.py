"""`python -m experiments.batch_schedule`: does a batch that follows the noise scale save optimizer steps?"""

from __future__ import annotations

import math
import statistics
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
from experiments.batch_schedule.training import Trial, train
from experiments.parallel import Workers
from gradvitals.bench import markdown_table

COMMAND = "python -m experiments.batch_schedule"
LR_STEP = 2.0
FOLLOW = ("follow2", "follow8")
"""The schedule as it is, and one that waits until the noise scale is eight times the batch."""
FIRST_SEED = 100
BAR = 0.3
SMALLEST = 8
"""Smallest batch of the sweep, in sequences."""
Line = Mapping[str, Any]


@click.command(cls=Command)
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Folder with the books.")
@click.option("--model", default="gpt-22m", show_default=True)
@click.option("--sequences", type=int, default=40_960, show_default=True, help="Length of a training, in sequences.")
@click.option("--batch", type=int, default=32, show_default=True, help="Where the sweep of the batch begins.")
@click.option("--lr", type=float, default=1e-3, show_default=True, help="Where the sweep of the rate begins.")
@click.option("--seeds", type=int, default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default="runs/batch_schedule.jsonl", show_default=True)
@click.option("--report", type=click.Path(path_type=Path, exists=True), help="Print the tables of this file only.")
@click.option("--figure", type=click.Path(path_type=Path, dir_okay=False), help="Draw the result into this SVG file.")
@click.option("--time-limit", type=float, metavar="SECONDS", help="Stop then; the same command goes on later.")
@click.option("--quick", is_flag=True, help="A tiny model on the demo's text; keeps nothing.")
@click.option("--compile/--no-compile", "compiled", default=None, help="Compile the blocks; the default on a GPU.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Trainings at once.")
@device_option
@json_option
def main(
    data: Path | None,
    model: str,
    sequences: int,
    batch: int,
    lr: float,
    seeds: int,
    out: Path,
    report: Path | None,
    figure: Path | None,
    time_limit: float | None,
    quick: bool,
    compiled: bool | None,
    workers: int,
    device: str,
    as_json: bool,
) -> None:
    """Tune a fixed batch for a fixed number of tokens, then let the batch grow from there with the noise scale."""
    if report is not None:
        _print(read_lines(report, dict, COMMAND), figure, as_json)
        return
    device = pick_device("cpu" if quick and device == "auto" else device)
    if quick:
        model, sequences, batch, lr, seeds, data = "gpt-tiny", 512, 8, 8e-3, 2, None
    start = Trial(
        model=model,
        arm="fixed",
        batch=batch,
        lr=lr,
        seed=0,
        sequences=sequences,
        data=data,
        device=device,
        compiled=device == "cuda" if compiled is None else compiled,
    )
    with progress_bar() as progress, Workers(workers, time_limit) as pool:
        lines = run(start, seeds, None if quick else out, pool, progress)
    _print(lines, figure, as_json)


def _print(lines: Sequence[Line], figure: Path | None, as_json: bool) -> None:
    summary = summarize(lines)
    if figure is not None:
        draw_figure(summary, figure)
    print_result(summary, as_json, format_summary)


def run(start: Trial, seeds: int, out: Path | None, pool: Workers, progress: Progress) -> list[Line]:
    """Returns all lines; fewer where the time limit passed. What the file has already is not trained again."""
    lines: list[Line] = read_lines(out, dict, COMMAND) if out is not None else []

    def train_all(trials: Sequence[Trial]) -> bool:
        known = {_key(line) for line in lines}
        missing = [trial for trial in trials if _key(_plain(trial)) not in known]
        for count, (trial, result) in enumerate(pool.run(train, missing), start=1):
            line = {**_plain(trial), **result}
            lines.append(line)
            if out is not None:
                append_line(out, line)
            progress(count, len(missing), f"{trial.arm} {trial.batch} {trial.lr:.2g}: {result['loss']:.4f}")
        return not pool.is_over

    def at(point: grid.Point) -> Trial:
        size = int(start.batch * 2.0 ** point[1])
        return replace(start, lr=start.lr * LR_STEP ** point[0], batch=size)

    def tried() -> dict[grid.Point, float]:
        return {place: line["loss"] for line in lines if (place := _place(line, start)) is not None}

    while points := grid.untried(tried(), 2, lambda point: start.batch * 2.0 ** point[1] >= SMALLEST):
        if not train_all([at(point) for point in points]):
            return lines
    best = at(grid.best_point(tried()))
    double = at(grid.best_point({point: loss for point, loss in tried().items() if at(point).batch == 2 * best.batch}))
    arms = [best, *(replace(best, arm=arm) for arm in FOLLOW), double]
    train_all([replace(arm, seed=FIRST_SEED + seed) for seed in range(seeds) for arm in arms])
    return lines


def _plain(trial: Trial) -> dict[str, Any]:
    values = asdict(trial)
    return {name: values[name] for name in ("model", "arm", "batch", "lr", "seed", "sequences")}


def _key(line: Line) -> tuple[Any, ...]:
    names = ("model", "arm", "batch", "seed", "sequences")
    return (*(line[name] for name in names), f"{line['lr']:.3g}")


def _place(line: Line, start: Trial) -> grid.Point | None:
    """Returns where a trial of the sweep is in its grid."""
    if (line["arm"], line["seed"], line["model"], line["sequences"]) != ("fixed", 0, start.model, start.sequences):
        return None
    return round(math.log(line["lr"] / start.lr, LR_STEP)), round(math.log2(line["batch"] / start.batch))


# -- the tables ------------------------------------------------------------------------------------------------------


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and its standard error; NaN where one value has none.

    >>> mean_and_error([1.0, 2.0, 3.0])
    (2.0, 0.5773502691896258)
    """
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def summarize(lines: Sequence[Line]) -> dict[str, Any]:
    """Returns the sweep, and each arm beside the best fixed batch, paired by seed."""
    sweep = sorted((one for one in lines if one["seed"] < FIRST_SEED), key=lambda one: (one["batch"], one["lr"]))
    fresh = [one for one in lines if one["seed"] >= FIRST_SEED]
    smallest = min((one["batch"] for one in fresh), default=0)
    arms: dict[str, dict[int, Line]] = {}
    for one in fresh:
        name = one["arm"] if one["arm"] != "fixed" or one["batch"] == smallest else "fixed, twice"
        arms.setdefault(name, {})[one["seed"]] = one
    base, rows = arms.get("fixed", {}), []
    for name, some in arms.items():
        both = sorted(some.keys() & base.keys())
        loss, error = mean_and_error([some[seed]["loss"] for seed in some])
        apart, apart_error = mean_and_error([some[seed]["loss"] - base[seed]["loss"] for seed in both])
        steps = statistics.fmean(one["steps"] for one in some.values())
        of_base = statistics.fmean(one["steps"] for one in base.values()) if base else math.nan
        rows.append(
            {"arm": name, "batch": next(iter(some.values()))["batch"], "lr": next(iter(some.values()))["lr"]}
            | {"seeds": len(some), "loss": loss, "error": error, "apart": apart, "apart_error": apart_error}
            | {"steps": steps, "fewer": 1 - steps / of_base}
            | {"growth": [some[seed]["growth"] for seed in sorted(some)]}
            | {"points": [(some[seed]["steps"], some[seed]["loss"]) for seed in sorted(some)]}
            | {"reached": name != "fixed" and apart <= apart_error and 1 - steps / of_base >= BAR}
        )
    return {"sweep": sweep, "arms": rows, "parameters": next((one["parameters"] for one in lines), None)}


def draw_figure(summary: Mapping[str, Any], path: Path) -> None:
    """Draw the held-out loss against the optimizer steps: of every seed of the arms, and of the sweep."""
    arms = Panel(title="arms, three seeds", x_name="optimizer steps", y_name="held-out loss (nats per byte)")
    for color, one in enumerate(summary["arms"]):
        steps, losses = ([point[axis] for point in one["points"]] for axis in (0, 1))
        arms.traces.append(Trace(name=f"{one['arm']} {one['batch']}", x=steps, y=losses, color=color))
    sweep = Panel(title="sweep of fixed batches", x_name="learning rate", y_name=arms.y_name, x_log=True)
    for color, batch in enumerate(sorted({one["batch"] for one in summary["sweep"]})):
        some = [one for one in summary["sweep"] if one["batch"] == batch]
        rates, losses = [one["lr"] for one in some], [one["loss"] for one in some]
        sweep.traces.append(Trace(name=f"batch {batch}", x=rates, y=losses, line=True, color=color))
    draw([arms, sweep], "Batches that follow the noise scale, and fixed ones", path)


def format_summary(summary: Mapping[str, Any]) -> str:
    """Returns the tables as text."""
    parts = [
        f"{len(summary['sweep'])} sweep trials, {summary['parameters'] or 0:,} parameters; loss in nats per byte",
        "The arms, with seeds that chose nothing; difference to the best fixed batch, paired by seed",
        markdown_table(
            [
                ["arm", "batch", "learning rate", "seeds", "held-out loss", "difference", "steps", "fewer", "reached"],
                *(
                    [
                        one["arm"],
                        str(one["batch"]),
                        f"{one['lr']:.2g}",
                        str(one["seeds"]),
                        f"{one['loss']:.4f} ± {one['error']:.4f}",
                        f"{one['apart']:+.4f} ± {one['apart_error']:.4f}",
                        f"{one['steps']:.0f}",
                        f"{100 * one['fewer']:.0f} %",
                        "yes" if one["reached"] else "no",
                    ]
                    for one in summary["arms"]
                ),
            ]
        ),
        "Where the batch grew, by seed: step and batch",
        *(
            f"{one['arm']}: "
            + "; ".join(", ".join(f"{at['step']}: {at['batch_size']:.0f}" for at in seed) for seed in one["growth"])
            for one in summary["arms"]
            if any(one["growth"])
        ),
        "The sweep",
        markdown_table(
            [
                ["batch", "learning rate", "held-out loss", "steps", "seconds"],
                *(
                    [
                        str(one["batch"]),
                        f"{one['lr']:.2g}",
                        f"{one['loss']:.4f}",
                        str(one["steps"]),
                        f"{one['seconds']:.0f}",
                    ]
                    for one in summary["sweep"]
                ),
            ]
        ),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main(prog_name=COMMAND)
