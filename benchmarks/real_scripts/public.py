"""Public training scripts, unmodified: bare and under `gradvitals run` in turn, timed by their own log lines.

The folder of a script is copied, its data is written as its own preparation would, and it runs there with a small
configuration on its command line. Pairs of runs alternate in order. The first steps of every run are skipped: that is
where kernels are chosen and models are compiled. A run of a few hundred steps is a young one, which is read in full
more often.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

import gradvitals
from benchmarks.command_line import (
    Command,
    device_option,
    json_option,
    pick_device,
    print_result,
    progress_bar,
)
from gradvitals.bench import machine_name, markdown_table, median_interval, percent
from gradvitals.errors import GradvitalsError
from gradvitals.store import open_run

SKIPPED_STEPS = 10
"""At the start of every run."""


@dataclass(frozen=True)
class Script:
    """A script that this benchmark knows how to run."""

    folder: str
    """Its folder inside that of all scripts."""
    program: str
    arguments: Mapping[str, Mapping[str, Sequence[str]]]
    """By device, configurations by name."""
    steps_argument: str
    """Sets the number of steps."""
    log_line: re.Pattern[str]
    """A line of its log, with the groups ``step``, ``loss`` and ``ms``."""
    prepare: Callable[[Path, str], None]
    """Writes its data, given its folder and a text."""


@dataclass(frozen=True)
class ScriptRun:
    """What one run printed."""

    losses: dict[int, str]
    ms: list[float]
    """Milliseconds of every step that is not skipped."""
    recorded_steps: int | None = None
    """Steps in the run that was recorded; None for a bare one."""


def prepare_characters(folder: Path, text: str) -> None:
    """Write a text as nanoGPT's preparation of character data does: 90 % to train, the rest to validate."""
    characters = sorted(set(text))
    number_of = {character: number for number, character in enumerate(characters)}
    data, split = folder / "data" / "shakespeare_char", int(len(text) * 0.9)
    data.mkdir(parents=True, exist_ok=True)
    for name, part in (("train.bin", text[:split]), ("val.bin", text[split:])):
        np.array([number_of[character] for character in part], dtype=np.uint16).tofile(data / name)
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": number_of}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))


CHARACTERS = ("config/train_shakespeare_char.py", "--eval_interval=100000", "--eval_iters=1", "--log_interval=1")
SMALL = ("--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0")
GPT_124M = ("--n_layer=12", "--n_head=12", "--n_embd=768", "--block_size=1024", "--batch_size=12", "--dropout=0.0")

SCRIPTS = {
    "nanoGPT": Script(
        folder="nanoGPT",
        program="train.py",
        arguments={
            "cpu": {"0.8M": (*CHARACTERS, "--device=cpu", "--dtype=float32", "--compile=False", *SMALL)},
            "cuda": {
                "10.7M, compiled": CHARACTERS,
                "124M, compiled": (*CHARACTERS, *GPT_124M, "--gradient_accumulation_steps=2"),
            },
        },
        steps_argument="--max_iters={}",
        log_line=re.compile(r"^iter (?P<step>\d+): loss (?P<loss>\S+), time (?P<ms>[\d.]+)ms", re.MULTILINE),
        prepare=prepare_characters,
    )
}


def run_scripts(
    scripts: Path,
    text: Path,
    *,
    device: str = "auto",
    steps: int = 300,
    pairs: int = 6,
    only: str | None = None,
    progress: Callable[[int, int, str], object] | None = None,
) -> dict[str, Any]:
    """Run the known scripts of a folder bare and watched.

    Args:
        scripts: The folder; each script is in a folder of its own.
        text: What they train on.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU if there is one.
        steps: Steps per run.
        pairs: Bare and watched runs of each configuration.
        only: Run only configurations whose name starts with this.
        progress: Called with the number of finished runs, of all runs, and the name of the last one.

    Returns:
        Plain values, ready for JSON.
    """
    place = pick_device(device)
    known = {name: script for name, script in SCRIPTS.items() if (scripts / script.folder / script.program).exists()}
    if not known:
        raise GradvitalsError(f"{scripts} has none of the scripts {', '.join(SCRIPTS)}; expected a folder of each")
    if not text.exists():
        raise GradvitalsError(f"{text} does not exist; expected a text to train on")
    jobs = [(name, script, *one) for name, script in known.items() for one in script.arguments[place].items()]
    jobs = [job for job in jobs if job[2].startswith(only or "")]
    if not jobs:
        raise GradvitalsError(f"no configuration for {place} starts with {only!r}")
    total, results = 2 * pairs * len(jobs), []
    for number, (name, script, label, arguments) in enumerate(jobs):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary) / script.folder
            shutil.copytree(scripts / script.folder, folder)
            script.prepare(folder, text.read_text(encoding="utf-8"))
            runs: dict[bool, list[ScriptRun]] = {False: [], True: []}
            for pair in range(pairs):
                for watched in (False, True) if pair % 2 == 0 else (True, False):
                    run = Path(temporary) / "runs" / str(pair) if watched else None
                    runs[watched].append(run_script(script, folder, arguments, steps, run))
                    if progress is not None:
                        done = 2 * pairs * number + sum(map(len, runs.values()))
                        progress(done, total, f"{name} {label}, {'watched' if watched else 'bare'}")
        results.append({"script": name, "configuration": label, **compare(runs[False], runs[True])})
    return {
        "device": place,
        "machine": machine_name(torch.device(place)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": steps,
        "pairs": pairs,
        "scripts": results,
    }


def run_script(script: Script, folder: Path, arguments: Sequence[str], steps: int, run: Path | None) -> ScriptRun:
    """Run a script once, in its folder; under `gradvitals run` if there is a folder to keep the run in."""
    launch = ["-m", "gradvitals", "run", "--quiet", "--run", str(run)] if run is not None else []
    paths = [str(Path(gradvitals.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    finished = subprocess.run(
        [sys.executable, *launch, script.program, *arguments, script.steps_argument.format(steps - 1)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = list(script.log_line.finditer(finished.stdout))
    if finished.returncode or len(lines) <= SKIPPED_STEPS:
        last = (finished.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise GradvitalsError(f"{script.program} ended with {finished.returncode} after {len(lines)} lines: {last}")
    recorded = None
    if run is not None:
        recorded = 0
        if run.exists():
            with open_run(run) as opened:
                recorded = len(opened.series("loss")[0])
    return ScriptRun(
        losses={int(line["step"]): line["loss"] for line in lines},
        ms=[float(line["ms"]) for line in lines[SKIPPED_STEPS:]],
        recorded_steps=recorded,
    )


def compare(bare: Sequence[ScriptRun], watched: Sequence[ScriptRun]) -> dict[str, Any]:
    """The steps of pairs of runs beside each other."""
    medians = [statistics.median(w.ms) / statistics.median(b.ms) for b, w in zip(bare, watched, strict=True)]
    means = [statistics.fmean(w.ms) / statistics.fmean(b.ms) for b, w in zip(bare, watched, strict=True)]
    return {
        "recorded_steps": min(one.recorded_steps or 0 for one in watched),
        "identical_losses": all(one.losses == bare[0].losses for one in (*bare, *watched)),
        "identical_bare_losses": all(one.losses == bare[0].losses for one in bare),
        "bare_ms": statistics.median(statistics.median(one.ms) for one in bare),
        "watched_ms": statistics.median(statistics.median(one.ms) for one in watched),
        "ratio": statistics.median(medians),
        "ratio_interval": median_interval(medians),
        "mean_ratio": statistics.median(means),
        "mean_ratio_interval": median_interval(means),
        "ratios": medians,
        "mean_ratios": means,
    }


def format_scripts(result: Mapping[str, Any]) -> str:
    """The result as text."""
    threads = f", {result['threads']} threads" if result["device"] == "cpu" else ""
    rows = [
        ("script", "steps recorded", "same losses", "bare ms", "watched ms", "median step", "95 %", "mean step", "95 %")
    ]
    for found in result["scripts"]:
        recorded = f"{found['recorded_steps']} of {result['steps']}" if found["recorded_steps"] else "not watched"
        rows.append(
            (
                f"{found['script']} {found['configuration']}",
                recorded,
                _same_losses(found),
                f"{found['bare_ms']:.2f}",
                f"{found['watched_ms']:.2f}",
                percent(found["ratio"]),
                _span(found["ratio_interval"]),
                percent(found["mean_ratio"]),
                _span(found["mean_ratio_interval"]),
            )
        )
    return (
        f"{result['machine']}{threads}, torch {result['torch']}, {result['date']}\n"
        f"{result['pairs']} pairs of runs of {result['steps']} steps, the first {SKIPPED_STEPS} of each skipped\n\n"
        f"{markdown_table(rows)}"
    )


def _same_losses(found: Mapping[str, Any]) -> str:
    if found["identical_losses"]:
        return "yes"
    return "NO" if found["identical_bare_losses"] else "not bare either"


def _span(ends: Sequence[float] | None) -> str:
    return "too few pairs" if ends is None else f"[{percent(ends[0])}, {percent(ends[1])}]"


@click.command(cls=Command)
@click.option(
    "--scripts",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder that holds the folders of scripts, such as nanoGPT.",
)
@click.option(
    "--text", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The text that they train on."
)
@device_option
@click.option("--steps", type=click.IntRange(min=20), default=300, show_default=True, help="Steps per run.")
@click.option("--pairs", type=click.IntRange(min=1), default=6, show_default=True, help="Bare and watched runs each.")
@click.option("--only", help="Run only configurations whose name starts with this, such as 124M.")
@json_option
def main(scripts: Path, text: Path, device: str, steps: int, pairs: int, only: str | None, as_json: bool) -> None:
    """Time unmodified public training scripts, bare and under `gradvitals run`.

    \b
    Example:
      python -m benchmarks.real_scripts.public --scripts ../real --text tinyshakespeare.txt
    """
    with progress_bar() as progress:
        result = run_scripts(scripts, text, device=device, steps=steps, pairs=pairs, only=only, progress=progress)
    print_result(result, as_json, format_scripts)


if __name__ == "__main__":
    main()
