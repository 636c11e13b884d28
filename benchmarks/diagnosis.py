"""What judging a step costs: synthetic readings of a large model, shown to every rule, on the clock of one core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.command_line import Command, json_option, print_result
from benchmarks.synthetic_run import transformer_layout
from gradvitals.diagnose import Diagnosis, RunInfo
from gradvitals.types import Layout, Reading

WARM_UP_STEPS = 600
"""Steps before any is timed: every rule has seen enough to be at work."""


def time_diagnosis(num_tensors: int = 500, steps: int = 2000) -> dict[str, Any]:
    """Judge the steps of a healthy synthetic run and time each.

    Args:
        num_tensors: Parameters of the model.
        steps: Steps that are timed.

    Returns:
        Milliseconds of processor time: of a plain step (norms of every tensor), of one with all GSNR sources, and of
        the mean step at the default cadence; and the findings of warning or above, which should be none.
    """
    layout = transformer_layout(num_tensors)
    diagnosis = Diagnosis(info=RunInfo(optimizer="AdamW", betas=(0.9, 0.999)))
    diagnosis.describe(layout)
    plain: list[float] = []
    full: list[float] = []
    for number, readings in enumerate(_healthy_run(layout, WARM_UP_STEPS + steps)):
        started = time.thread_time()
        diagnosis.read(readings)
        spent = 1000 * (time.thread_time() - started)
        if number >= WARM_UP_STEPS:
            (full if len(readings) > 1 else plain).append(spent)
    return {
        "tensors": num_tensors,
        "rules": len(diagnosis.rules),
        "plain_ms_median": statistics.median(plain),
        "plain_ms_p99": float(np.quantile(plain, 0.99)),
        "full_ms_median": statistics.median(full),
        "mean_ms": statistics.fmean([*plain, *full]),
        "false_alarms": sum(finding.severity != "info" for finding in diagnosis.findings),
    }


def _healthy_run(layout: Layout, steps: int) -> Iterator[list[Reading]]:
    """A loss that falls, norms that fluctuate around a level that falls with it, GSNR with its interval."""
    random = np.random.default_rng(0)
    count = len(layout.tensors)
    scale = np.exp(random.normal(0, 0.5, count))
    for step in range(steps):
        loss = 2.0 + 8.0 / (1 + step / 100) + 0.02 * random.normal()
        norms = scale * (0.5 + 1 / (1 + step / 200)) * np.exp(0.1 * random.normal(size=count))
        changes = 1e-3 * np.exp(0.05 * random.normal(size=count))
        values = {
            "loss": loss,
            "lr": 1e-3,
            "grad/norm": float(np.sqrt(np.square(norms).sum())),
            "grad/nonfinite": 0.0,
            "update/rms": float(np.sqrt(np.square(changes).mean())),
            "update/cosine": 0.85 + 0.02 * float(random.normal()),
            "clip/max_norm": 1000.0,
        }
        tensors = {
            "grad/norm": norms,
            "grad/nonfinite": np.zeros(count),
            "grad/spike_ratio": norms / scale,
            "grad/norm_cv": np.full(count, 0.1),
            "update/rms": changes,
        }
        readings = [Reading(step=step, time=float(step), batch_size=512.0, values=values, tensors=tensors)]
        if step % 50 == 0:
            values |= {"weight/norm": 100.0, "update/norm": 0.1, "update/ratio": 1e-3}
            tensors |= {"weight/norm": 10 * scale, "update/norm": 0.01 * scale, "update/ratio": np.full(count, 1e-3)}
            readings += [_gsnr(layout, step, source, random) for source in ("microbatch", "adam")]
        yield readings


def _gsnr(layout: Layout, step: int, source: Any, random: np.random.Generator) -> Reading:
    def estimate(size: int) -> dict[str, NDArray[np.float64]]:
        value = 0.2 * np.exp(0.1 * random.normal(size=size))
        return {"gsnr": value, "gsnr_low": 0.7 * value, "gsnr_high": 1.4 * value}

    values = {"gsnr": 0.2, "gsnr_low": 0.15, "gsnr_high": 0.26}
    if source == "microbatch":
        values |= {"noise_scale": 320.0, "noise_scale_low": 246.0, "noise_scale_high": 427.0}
    return Reading(
        step=step,
        time=float(step),
        source=source,
        batch_size=64.0 if source == "microbatch" else 512.0,
        values=values,
        tensors=estimate(len(layout.tensors)),
        layers=estimate(len(layout.layers)),
    )


LABELS = {
    "plain_ms_median": "a plain step (norms of every tensor), median",
    "plain_ms_p99": "a plain step, 99th percentile",
    "full_ms_median": "a step with both GSNR sources, median",
    "mean_ms": "the mean step at the default cadence",
}


def format_diagnosis(result: dict[str, Any]) -> str:
    """The result as text."""
    head = f"{result['rules']} rules, {result['tensors']} tensors; {result['false_alarms']} false alarms"
    return "\n".join([head, *(f"  {label:<52} {result[name]:8.4g} ms" for name, label in LABELS.items())])


@click.command(cls=Command)
@click.option("--tensors", type=click.IntRange(min=1), default=500, show_default=True, help="Parameters of the model.")
@json_option
def main(tensors: int, as_json: bool) -> None:
    """Time the diagnosis of one step on one core, with synthetic readings of a healthy run.

    \b
    Example:
      python -m benchmarks.diagnosis
      python -m benchmarks.diagnosis --tensors 2000 --json
    """
    print_result(time_diagnosis(tensors), as_json, format_diagnosis)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.diagnosis")
