"""What a newcomer waits for and reads: times of `--help` and `doctor`, lines of `doctor`, words of the README."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.command_line import Command, json_option, print_result
from benchmarks.synthetic_run import readings, transformer_layout
from gradvitals.config import Config
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding

ROOT = Path(__file__).parents[1]
FAULT = Finding(
    id="lr_too_high", severity="critical", first_step=50_000,
    title="The learning rate of 0.3 is too high: within 20 steps the loss rose from 2.1 to 3.8e+04",
    evidence={"seen": {"loss": 3.8e4, "ratio": 0.41}, "expected": {"loss": "under 2.1", "ratio": "about 0.001"}},
    causes=("One step changed the weights by 41% of their norm and destroyed the initialization",),
    fixes=("Start again and lower the learning rate from 0.3 to about 0.003",),
)  # fmt: skip
CAUSED = tuple(
    replace(FAULT, id=name, title=name, severity="warning", follows="lr_too_high")
    for name in ("explosion", "loss_rising", "oscillation")
)


def measure(steps: int, num_tensors: int, repeats: int) -> dict[str, Any]:
    """Returns the numbers of this file's first line, times in seconds as medians."""
    found: dict[str, Any] = {"steps": steps, "num_tensors": num_tensors, "repeats": repeats}
    found["readme_words"] = len((ROOT / "README.md").read_text("utf-8").split())
    with tempfile.TemporaryDirectory(prefix="gradvitals-") as name:
        for run, findings in (("healthy", ()), ("one_fault", (FAULT, *CAUSED))):
            write(Path(name) / run, steps, num_tensors, findings)
            output = gradvitals("doctor", str(Path(name) / run))[1]
            found[f"doctor_lines_{run}"] = len(output.splitlines())
        for command, args in (("help", ["--help"]), ("doctor", ["doctor", f"{name}/one_fault"])):
            found[f"{command}_seconds"] = statistics.median(gradvitals(*args)[0] for _ in range(repeats))
    return found


def write(path: Path, steps: int, num_tensors: int, findings: tuple[Finding, ...]) -> None:
    """Write a run as a monitor would with its defaults."""
    layout = transformer_layout(num_tensors)
    with RunWriter(path, meta={"facts": {}, "config": {}}) as writer:
        writer.write(layout)
        for number, reading in enumerate(readings(layout, steps, Config(), 0, time.time() - steps / 4)):
            writer.write(reading)
            if number % 1000 == 999:
                writer.commit()
        for finding in findings:
            writer.write(finding)
        writer.commit()


def gradvitals(*args: str) -> tuple[float, str]:
    """Returns how long a command takes, started from the shell, and what it prints to a terminal of 80 columns."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "gradvitals", *args]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}, check=False)
    return time.perf_counter() - start, done.stdout


def as_table(found: dict[str, Any]) -> str:
    """Returns the result as a Markdown table, each number beside its bar."""
    rows = (
        ("gradvitals --help", f"{found['help_seconds']:.2f} s", "0.2 s"),
        ("gradvitals doctor", f"{found['doctor_seconds']:.2f} s", "0.5 s"),
        ("lines of doctor, healthy run", found["doctor_lines_healthy"], "3"),
        ("lines of doctor, one fault and three consequences", found["doctor_lines_one_fault"], "20"),
        ("words of the README", found["readme_words"], "600"),
    )
    head = f"{found['steps']:,} steps × {found['num_tensors']} tensors; medians of {found['repeats']}.\n\n"
    return head + "| | measured | at most |\n|---|---:|---:|\n" + "\n".join(f"| {a} | {b} | {c} |" for a, b, c in rows)


@click.command(cls=Command)
@click.option("--steps", default=100_000, show_default=True, help="Length of the run that doctor judges.")
@click.option("--tensors", default=150, show_default=True, help="Its tensors.")
@click.option("--repeats", default=5, show_default=True, help="How often each command is started.")
@json_option
def main(steps: int, tensors: int, repeats: int, as_json: bool) -> None:
    """Measure what a newcomer waits for and reads."""
    print_result(measure(steps, tensors, repeats), as_json, as_table)


if __name__ == "__main__":
    main()
