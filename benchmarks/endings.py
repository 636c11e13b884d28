"""How runs end: training is killed, interrupted or refused its disk, and the run is opened and counted afterwards."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn

import gradvitals as gv
from benchmarks.command_line import Command, json_option, print_result, progress_bar
from gradvitals.bench import markdown_table
from gradvitals.errors import GradvitalsError
from gradvitals.worker.recover import NOTE

WAIT_SECONDS = 20.0
"""How long a worker may take to write what is left and to end."""

LONGEST_SECONDS = 120.0


@dataclass
class Ending:
    """What was found after one training process had ended."""

    how: str
    opened: bool
    """Whether the run opens and its steps are whole: numbered from 0, none twice, each with a loss and a norm."""
    made: int
    """Steps that training made."""
    missing: int
    """Those of them that the run does not have."""
    worker_gone: bool
    files: list[str]
    """What is left in the run's folder besides the run."""
    seconds: float
    """From the end of training, or the signal that asked for it, to the end of its process."""


# -- the training process --------------------------------------------------------------------------------------------


def train(run: str, counter: str, how: str = "") -> None:
    """Train a small model as fast as it goes and count its steps in a file that outlives the process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = np.memmap(counter, dtype=np.int64, mode="r+", shape=(2,))  # steps, and when it begins to end
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    config = gv.Config(worker="process", quiet=True, overhead_budget=1)
    with gv.watch(model, optimizer, run=run, config=config) as monitor:
        while True:
            loss = (model(torch.randn(16, 8)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.observe(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            made[0] += 1
            if not how or made[0] < 500 or not (Path(run) / "run.db").exists():  # the worker has not written yet
                continue
            made[1] = time.monotonic_ns()
            ENDINGS_INSIDE[how](run)
            if how != "worker killed":
                return
            how = "returns"  # training goes on, and ends at the next step


def _signal_worker(run: str, number: signal.Signals) -> None:
    os.kill(json.loads((Path(run) / NOTE).read_text())["worker"]["pid"], number)


def _raise(run: str) -> None:
    raise RuntimeError("as planned")


ENDINGS_INSIDE: dict[str, Callable[[str], Any]] = {
    "returns": lambda run: None,
    "raises": _raise,
    "os._exit": lambda run: os._exit(3),
    "worker killed": lambda run: _signal_worker(run, signal.SIGKILL),
    "worker hangs": lambda run: _signal_worker(run, signal.SIGSTOP),
}
"""Endings that come about at a step of the training process."""

INTERRUPTS = {"Ctrl-C": 1, "Ctrl-C, three times": 3}


# -- one run -----------------------------------------------------------------------------------------------------------


def end(how: str, folder: Path, rng: random.Random) -> Ending:
    """Start a training process, let it end in one way, and look at what is left."""
    run, counter = folder / "run", folder / "steps"
    counter.write_bytes(bytes(16))
    killed = how in ("killed", "killed with its worker")
    if killed:  # forked: two hundred imports of torch would take longer than everything else
        process: Any = multiprocessing.get_context("fork").Process(target=train, args=(str(run), str(counter)))
        process.start()
    else:
        inside = how if how in ENDINGS_INSIDE else ""
        code = f"from benchmarks.endings import train; train({str(run)!r}, {str(counter)!r}, {inside!r})"
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    worker, asked = _wait_for_steps(run, counter, process), 0.0
    if killed:
        time.sleep(rng.uniform(0.0, 1.0))
        if how != "killed":
            os.kill(worker, signal.SIGKILL)
        os.kill(process.pid, signal.SIGKILL)
    elif how in INTERRUPTS:
        time.sleep(rng.uniform(0.2, 1.0))
        asked = time.monotonic()
        for _ in range(INTERRUPTS[how]):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
    process.join(LONGEST_SECONDS) if killed else process.wait(LONGEST_SECONDS)
    ended = time.monotonic()
    if how == "worker hangs":
        os.kill(worker, signal.SIGCONT)
    gone = _wait_until(lambda: not _is_running(worker), WAIT_SECONDS)
    made, began = np.fromfile(counter, dtype=np.int64).tolist()
    seconds = ended - (asked or began / 1e9)
    whole, kept = _count(run)
    files = sorted(path.name for path in run.iterdir() if not path.name.startswith("run.db"))
    return Ending(how, whole, made, max(0, made - kept), gone, files, seconds)


def _wait_for_steps(run: Path, counter: Path, process: Any) -> int:
    """Wait for the first step and the worker; returns the worker's process."""

    def ready() -> bool:
        return (run / NOTE).exists() and int(np.fromfile(counter, dtype=np.int64)[0]) > 0

    if not _wait_until(ready, LONGEST_SECONDS):
        raise GradvitalsError(f"training did not start: exit status {getattr(process, 'returncode', None)}")
    return int(json.loads((run / NOTE).read_text())["worker"]["pid"])


def _count(run: Path) -> tuple[bool, int]:
    """Open a run; returns whether it is whole, and how many steps it has."""
    try:
        with gv.open_run(run) as opened:
            steps, losses = opened.series("loss")
            norm_steps, norms = opened.series("grad/norm")
    except GradvitalsError:
        return False, 0
    whole = np.array_equal(steps, np.arange(len(steps))) and np.array_equal(norm_steps, steps)
    return bool(whole and np.isfinite(losses).all() and np.isfinite(norms).all()), len(steps)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


# -- all of them -------------------------------------------------------------------------------------------------------

HOW = ("killed", "killed with its worker", *ENDINGS_INSIDE, *INTERRUPTS)


def summarize(endings: list[Ending]) -> list[dict[str, Any]]:
    """Returns a row for every way to end."""
    rows = []
    for how in dict.fromkeys(one.how for one in endings):
        some = [one for one in endings if one.how == how]
        rows.append(
            {
                "how": how,
                "runs": len(some),
                "whole": sum(one.opened for one in some),
                "steps": sum(one.made for one in some),
                "missing": sum(one.missing for one in some),
                "workers_left": sum(not one.worker_gone for one in some),
                "files_left": sum(bool(one.files) for one in some),
                "longest_seconds": max(one.seconds for one in some) if "killed" not in how else None,
            }
        )
    return rows


def format_table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    head = ("training", "runs", "open and whole", "steps made", "missing", "workers left", "files left", "longest exit")
    body = [
        (
            *(f"{row[key]:,}" if key != "how" else row[key] for key in list(row)[:-1]),
            "-" if row["longest_seconds"] is None else f"{row['longest_seconds']:.1f} s",
        )
        for row in rows
    ]
    return markdown_table([head, *body])


@click.command(cls=Command)
@click.option("--kills", default=200, show_default=True, type=click.IntRange(1), help="Runs that are killed.")
@click.option("--others", default=5, show_default=True, type=click.IntRange(1), help="Runs of every other ending.")
@click.option("--how", multiple=True, type=click.Choice(HOW), help="Only this ending; may be given several times.")
@json_option
def command(kills: int, others: int, how: tuple[str, ...], as_json: bool) -> None:
    """End training processes in every way and count what their runs have kept.

    \b
    Example:
      python -m benchmarks.endings
      python -m benchmarks.endings --how killed --kills 20
    """
    torch.set_num_threads(1)  # before a fork: OpenMP does not survive one
    plan = [one for one in how or HOW for _ in range(kills if one == "killed" else others)]
    endings = []
    with progress_bar() as report:
        for number, one in enumerate(plan):
            with tempfile.TemporaryDirectory(prefix="gradvitals-") as folder:
                endings.append(end(one, Path(folder), random.Random(number)))
            report(number + 1, len(plan), one)
    print_result(summarize(endings), as_json, format_table)


if __name__ == "__main__":
    command()
