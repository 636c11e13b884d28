"""`python -m experiments.advice`: do runs that follow the advice end better?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.command_line import Command, Progress, json_option, print_result, progress_bar
from benchmarks.runs import append_line, read_lines
from experiments.advice.arms import (
    FIRST_SEED,
    SEEDS,
    best_of,
    course_of,
    every_start,
    loss_of,
    to_json,
    untried,
)
from experiments.advice.faults import FAULTS, bad_start
from experiments.advice.score import Line, draw_figure, format_summary, summarize
from experiments.advice.tasks import NEEDS_DATA, TASKS, Job, Settings
from experiments.parallel import Workers

ARMS = ("advice", "random", "finder")
QUICK_TASKS, QUICK_STARTS, QUICK_SCALE = ("mlp", "regression"), 4, 0.15


@click.command(cls=Command)
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Folder with cifar10/ and the text.")
@click.option("--tasks", "only", metavar="REGEX", help="Only tasks whose name it matches.")
@click.option("--starts", type=click.IntRange(1, len(FAULTS)), default=len(FAULTS), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default="runs/advice.jsonl", show_default=True)
@click.option("--report", type=click.Path(path_type=Path, exists=True), help="Print the tables of this file only.")
@click.option("--figure", type=click.Path(path_type=Path, dir_okay=False), help="Draw the result into this SVG file.")
@click.option("--time-limit", type=float, metavar="SECONDS", help="Stop then; the same command goes on later.")
@click.option("--quick", is_flag=True, help="Two small tasks, a few starts, short trainings; keeps nothing.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@json_option
def main(
    data: Path | None,
    only: str | None,
    starts: int,
    out: Path,
    report: Path | None,
    figure: Path | None,
    time_limit: float | None,
    quick: bool,
    workers: int,
    as_json: bool,
) -> None:
    """Train bad starts, do what the advice says by program, and train again, up to three times.

    Beside it, on the same starts with the same number of trainings: random search, and a learning-rate finder.
    """
    if report is not None:
        _print(read_lines(report, dict, COMMAND), figure, as_json)
        return
    tasks = [name for name in TASKS if re.search(only or "", name) and (data or name not in NEEDS_DATA)]
    scale = 1.0
    if quick:
        tasks, starts, scale = [name for name in tasks if name in QUICK_TASKS], min(starts, QUICK_STARTS), QUICK_SCALE
    with progress_bar() as progress, Workers(workers, time_limit) as pool:
        lines = Experiment(tasks, starts, data, scale, None if quick else out, pool, progress).run()
    _print(lines, figure, as_json)


def _print(lines: Sequence[Line], figure: Path | None, as_json: bool) -> None:
    summary = summarize(lines)
    if figure is not None:
        draw_figure(summary, figure)
    print_result(summary, as_json, format_summary)


COMMAND = "python -m experiments.advice"


class Experiment:
    """The sweeps, then every start under every arm; what the file has already is not done again."""

    def __init__(
        self,
        tasks: Sequence[str],
        starts: int,
        data: Path | None,
        scale: float,
        out: Path | None,
        pool: Workers,
        progress: Progress,
    ) -> None:
        self._tasks, self._starts, self._data, self._scale = tasks, starts, data, scale
        self._out, self._pool, self._progress = out, pool, progress
        self.lines: list[Line] = read_lines(out, dict, COMMAND) if out is not None else []

    def run(self) -> list[Line]:
        """Returns all lines; fewer where the time limit passed."""
        while trials := [self._job(task, one, 0) for task in self._tasks for one in untried(task, self._tried(task))]:
            self._train("sweep", trials)
            if self._pool.is_over:
                return self.lines
        best = {task: best_of(self._tried(task)) for task in self._tasks}
        known = {(one["task"], one["seed"]) for one in self.lines if one["kind"] == "reference"}
        seeds = [(task, seed) for task in self._tasks for seed in range(FIRST_SEED, FIRST_SEED + SEEDS)]
        self._train(
            "reference", [self._job(task, best[task], seed) for task, seed in seeds if (task, seed) not in known]
        )
        done = {(one["arm"], one["task"], one["place"]) for one in self.lines if one["kind"] == "course"}
        items = [
            (arm, self._job(task, bad_start(task, place, best[task])[1], seed), place, best[task])
            for arm in ARMS
            for place, seed in every_start(self._starts)
            for task in self._tasks
            if (arm, task, place) not in done
        ]
        for count, ((arm, job, place, _), course) in enumerate(self._pool.run(course_of, items), start=1):
            self._keep({"kind": "course", **to_json(course)})
            self._progress(count, len(items), f"{arm} {job.task} {place}")
        return self.lines

    def _job(self, task: str, settings: Settings, seed: int) -> Job:
        return Job(task=task, settings=settings, seed=seed, data=self._data, scale=self._scale)

    def _tried(self, task: str) -> list[tuple[Settings, float]]:
        swept = (one for one in self.lines if one["kind"] == "sweep" and one["task"] == task)
        return [(Settings(**one["settings"]), one["loss"]) for one in swept]

    def _train(self, kind: str, jobs: Sequence[Job]) -> None:
        for count, (job, loss) in enumerate(self._pool.run(loss_of, jobs), start=1):
            self._keep({"kind": kind, "task": job.task, "seed": job.seed, "settings": vars(job.settings), "loss": loss})
            self._progress(count, len(jobs), f"{kind} {job.task}")

    def _keep(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if self._out is not None:
            append_line(self._out, line)


if __name__ == "__main__":
    main(prog_name=COMMAND)
