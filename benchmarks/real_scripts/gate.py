"""Small scripts in the manner of each framework's quick-start, bare and under `gradvitals run` in turn.

The scripts are in `scripts/` and know nothing of gradvitals. Each prints its losses, the time of every step and a
checksum of its final weights. What gradvitals should find in each is declared here, before it runs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradvitals
from benchmarks.real_scripts.public import SCRIPTS as PUBLIC
from gradvitals.bench import machine_name, markdown_table
from gradvitals.errors import GradvitalsError
from gradvitals.store import Run, open_run

HERE = Path(__file__).parent / "scripts"
SETTLED, YOUNG = 20, 500
"""Steps at the start of every run whose times do not count: those of a young run neither, if there are as many more."""
SHORT_MS = 2.0
"""Steps shorter than this have no bar for their time."""
MOST_RATIO = 1.03
NANOGPT_STEPS = 120


@dataclass(frozen=True)
class Case:
    """A script, and what gradvitals should find in it."""

    name: str
    bug: tuple[str, ...] = ()
    """The findings any of which names its planted bug; empty for a healthy script."""
    samples: float | None = None
    """Samples per step; None where the inputs of the model do not show them."""
    reason: str | None = None
    """Part of the line that says why it is not watched; None if it is to be watched."""
    torchrun: bool = False
    needs: str | None = None
    """The package that it needs besides torch."""
    quick: bool = False
    """Whether it is one of the handful that CI runs."""


CASES = (
    Case("lightning_module", samples=128, needs="lightning"),
    Case("hf_trainer", samples=16, needs="transformers"),
    Case("accelerate_loop", samples=128, needs="accelerate"),
    Case("ignite_engine", bug=("nonfinite", "loss_nonfinite", "bad_inputs"), samples=64, needs="pytorch-ignite"),
    Case("skorch_net", bug=("lr_too_high", "loss_rising", "explosion", "update_ratio"), samples=64, needs="skorch"),
    Case("fastai_like", samples=64),
    Case("keras_fit", needs="keras"),
    Case("composer_like", bug=("stale_gradients",), samples=128, quick=True),
    Case("torchtune_like", bug=("dead_tensor", "unchanged_weights"), samples=16),
    Case("timm_like", samples=32, quick=True),
    Case("dqn", samples=128),
    Case("ppo"),
    Case("reinforce"),
    Case("actor_critic"),
    Case("gcn"),
    Case("vae", samples=128),
    Case("dcgan"),
    Case("forward_forward"),
    Case("lbfgs_closure"),
    Case("word_language_model", quick=True),
    Case("tensors_by_hand"),
    Case("super_resolution", bug=("lr_too_high", "dead_units", "loss_nonfinite", "loss_rising"), samples=16),
    Case("hogwild", reason="in processes that it started"),
    Case("trl_like", samples=32),
    Case("muon", samples=256),
    Case("ddp_torchrun", samples=128, torchrun=True),
    Case("mp_spawn", reason="in processes that it started"),
    Case("lightning_ddp", reason="the script itself started 2 ranks", needs="lightning"),
    Case("thirty_steps", samples=128, quick=True),
    Case("accumulation", samples=128, quick=True),
    Case("amp_bf16", samples=128),
    Case("nanoGPT", samples=12),
)


@dataclass(frozen=True)
class Ended:
    """What one run printed."""

    checksum: str
    losses: list[float]
    wall: list[float]
    """When each step ended, in seconds."""
    cpu: list[float]
    """The CPU time of the process by then."""
    lines: list[str] = field(default_factory=list)
    """What gradvitals printed."""

    def step_ms(self) -> float:
        """The median step."""
        steps = np.diff(_settled(self.wall))
        return 1000 * float(np.median(steps)) if len(steps) else float("nan")

    def mean_ms(self) -> float:
        """The mean step."""
        steps = np.diff(_settled(self.wall))
        return 1000 * float(np.mean(steps)) if len(steps) else float("nan")

    def cpu_ms(self) -> float:
        """CPU time of a mean step."""
        steps = _settled(self.cpu)
        return 1000 * (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else float("nan")


def _settled(times: Sequence[float]) -> Sequence[float]:
    skipped = next((count for count in (YOUNG, SETTLED) if len(times) > 2 * count), 0)
    return times[skipped:]


def command(case: Case, run: Path | None) -> list[str]:
    """The command line that runs a script of this folder; watched if there is a folder to keep the run in."""
    ours = ["-m", "gradvitals", "run", "--out", str(run)] if run is not None else []
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2"] if case.torchrun else []
    return [sys.executable, *launcher, *ours, str(HERE / f"{case.name}.py")]


def run_once(case: Case, folder: Path, run: Path | None, longer: int = 1) -> Ended:
    """Run a script once; so many times as long as usual, if its length can be chosen.

    Raises:
        GradvitalsError: If it fails, or prints no result.
    """
    finished = _execute(command(case, run), folder, LONGER=str(longer))
    printed = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    if finished.returncode or not printed:
        raise GradvitalsError(f"{case.name} ended with {finished.returncode}: {_last_line(finished.stderr)}")
    result = json.loads(printed[-1].removeprefix("RESULT "))
    return Ended(**result, lines=_ours(finished.stderr))


def _execute(arguments: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(gradvitals.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed no error"])[-1]


def _ours(text: str) -> list[str]:
    return [line.removeprefix("gradvitals: ") for line in text.splitlines() if line.startswith("gradvitals: ")]


def nanogpt(scripts: Path, text: Path) -> Callable[[Case, Path, Path | None], Ended]:
    """Returns what runs nanoGPT as `run_once` runs the others. Its log has the losses and the time of each step."""
    script = PUBLIC["nanoGPT"]

    def run_it(case: Case, folder: Path, run: Path | None) -> Ended:
        place = folder / script.folder
        if not place.exists():
            shutil.copytree(scripts / script.folder, place)
            script.prepare(place, text.read_text(encoding="utf-8"))
        arguments = [*script.arguments["cpu"]["0.8M"], f"--eval_interval={NANOGPT_STEPS}"]
        ours = ["-m", "gradvitals", "run", "--out", str(run)] if run is not None else []
        steps = script.steps_argument.format(NANOGPT_STEPS)
        finished = _execute([sys.executable, *ours, script.program, *arguments, steps], place)
        lines = list(script.log_line.finditer(finished.stdout))
        saved = place / "out-shakespeare-char" / "ckpt.pt"
        if finished.returncode or not saved.exists():
            raise GradvitalsError(f"nanoGPT ended with {finished.returncode}: {_last_line(finished.stderr)}")
        digest = hashlib.sha256()
        for weight in torch.load(saved, weights_only=True)["model"].values():
            digest.update(weight.numpy().tobytes())
        saved.unlink()
        wall = np.cumsum([float(line["ms"]) / 1000 for line in lines]).tolist()
        losses = [float(line["loss"]) for line in lines]
        return Ended(digest.hexdigest()[:16], losses, wall, [], _ours(finished.stderr))

    return run_it


@dataclass(frozen=True)
class Row:
    """What was found in one script."""

    name: str
    watched: str
    """``yes``, or the line that says why not."""
    watched_ok: bool
    identical: bool
    loss: bool | None
    batch: bool | None
    verdict: bool | None
    headline: str
    bare_ms: float
    ratio: float
    mean_ratio: float
    cpu_ratio: float
    expected: str


def judge(case: Case, bare: Sequence[Ended], watched: Sequence[Ended], runs: Sequence[Path]) -> Row:
    """Compare the runs of one script, bare and watched; `runs` are the folders that the first watched run left."""
    first = watched[0]
    opened = [open_run(path) for path in runs]
    try:
        verdicts = [run.verdict for run in opened]
        why = next((line for line in first.lines if case.reason is not None and case.reason in line), None)
        watched_as = "yes" if opened else (why or " | ".join(first.lines) or "nothing was printed")
        loss = batch = verdict = None
        if opened:
            loss = _has_losses(opened, first.losses)
            sizes = [size[~np.isnan(size)] for run in opened for size in run.batch_sizes("grad/norm")[1:]]
            known = {float(np.median(size)) for size in sizes if len(size)}
            batch = None if case.samples is None else case.samples in known
            worst = [one.worst.finding.id for one in verdicts if one.worst is not None and one.level != "healthy"]
            verdict = any(one in case.bug for one in worst) if case.bug else not worst
        return Row(
            name=case.name,
            watched=watched_as,
            watched_ok=bool(opened) or why is not None,
            identical=len({one.checksum for one in (*bare, *watched)}) == 1,
            loss=loss,
            batch=batch,
            verdict=verdict,
            headline=" || ".join(one.headline for one in verdicts),
            bare_ms=statistics.median(one.step_ms() for one in bare),
            ratio=statistics.median(w.step_ms() / b.step_ms() for b, w in zip(bare, watched, strict=True)),
            mean_ratio=statistics.median(w.mean_ms() / b.mean_ms() for b, w in zip(bare, watched, strict=True)),
            cpu_ratio=statistics.median(w.cpu_ms() / b.cpu_ms() for b, w in zip(bare, watched, strict=True)),
            expected=case.bug[0] if case.bug else "healthy",
        )
    finally:
        for run in opened:
            run.close()


def _has_losses(runs: Sequence[Run], printed: Sequence[float]) -> bool:
    """Whether one of the runs, or all of them one after the other, has the losses that the script printed.

    The first step of a script without a torch optimizer shows what it trains, and is not recorded.
    """
    each = [run.series("loss")[1] for run in runs]
    for recorded in (*each, np.concatenate(each)):
        last = printed[-len(recorded) :] if 0 < len(printed) - len(recorded) <= 1 else printed
        if len(recorded) == len(last) and np.allclose(recorded, last, rtol=2e-3, atol=2e-3, equal_nan=True):
            return True
    return False


def run_gate(
    cases: Sequence[Case],
    *,
    pairs: int = 3,
    longer: int = 1,
    scripts: Path | None = None,
    text: Path | None = None,
    progress: Callable[[int, int, str], object] | None = None,
) -> dict[str, Any]:
    """Run scripts bare and watched, in turn.

    Args:
        cases: The scripts.
        pairs: Bare and watched runs of each.
        longer: How many times as long as usual the scripts train, but for nanoGPT.
        scripts: Folder that holds the folder of nanoGPT; without it nanoGPT is left out.
        text: What nanoGPT trains on.
        progress: Called with the number of finished runs, of all runs, and the name of the last one.

    Returns:
        Plain values, ready for JSON.
    """
    left_out = {}
    chosen = []
    for case in cases:
        if case.name == "nanoGPT" and (scripts is None or text is None):
            left_out[case.name] = "needs --scripts and --text"
        elif case.needs is not None and _version(case.needs) is None:
            left_out[case.name] = f"{case.needs} is not installed; see benchmarks/real_scripts/constraints.txt"
        else:
            chosen.append(case)
    rows, total, done = [], 2 * pairs * len(chosen), 0
    for case in chosen:
        start = (
            nanogpt(scripts, text) if case.name == "nanoGPT" and scripts and text else partial(run_once, longer=longer)
        )
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            folder, kept = Path(temporary), Path(temporary) / "runs"
            ended: dict[bool, list[Ended]] = {False: [], True: []}
            for pair in range(pairs):
                for is_watched in (False, True) if pair % 2 == 0 else (True, False):
                    run = kept / str(pair) / "run" if is_watched else None
                    ended[is_watched].append(start(case, folder, run))
                    done += 1
                    if progress is not None:
                        progress(done, total, f"{case.name}, {'watched' if is_watched else 'bare'}")
            runs = sorted(path.parent for path in (kept / "0").glob("*/run.db"))
            rows.append(judge(case, ended[False], ended[True], runs))
    return {
        "machine": machine_name(torch.device("cpu")),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "pairs": pairs,
        "longer": longer,
        "packages": {case.needs: _version(case.needs) for case in chosen if case.needs is not None},
        "left_out": left_out,
        "rows": [vars(row) for row in rows],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def passes(result: Mapping[str, Any]) -> bool:
    """Whether all scripts are watched or say why not and end with the same weights, and few verdicts are wrong."""
    rows = result["rows"]
    wrong = sum(row["verdict"] is False for row in rows)
    return all(row["watched_ok"] and row["identical"] for row in rows) and wrong <= 2


def format_gate(result: Mapping[str, Any]) -> str:
    """The result as text."""
    table = [("script", "watched", "identical", "loss", "batch", "expected", "verdict", "ms", "time", "mean", "CPU")]
    for row in result["rows"]:
        marks = [_mark(row[name]) for name in ("identical", "loss", "batch")]
        table.append(
            (
                row["name"],
                "yes" if row["watched"] == "yes" else "says why" if row["watched_ok"] else "NO",
                *marks,
                row["expected"],
                _mark(row["verdict"]),
                _number(row["bare_ms"], 2),
                *(_number(row[name], 3) for name in ("ratio", "mean_ratio", "cpu_ratio")),
            )
        )
    rows = result["rows"]
    longer = [row for row in rows if row["bare_ms"] >= SHORT_MS and row["ratio"] == row["ratio"]]
    slow = [row["name"] for row in longer if row["ratio"] > MOST_RATIO]
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
    lines = [
        f"{result['machine']}, 1 thread, torch {result['torch']}, {result['date']}",
        f"{result['pairs']} pairs of runs, {result['longer']} times as long as usual",
        f"the first {SETTLED} steps do not count, nor the first {YOUNG} of runs of over {2 * YOUNG}",
        "time and mean: the median and the mean step, watched over bare; CPU: CPU time per step",
        *([packages] if packages else []),
        "",
        markdown_table(table),
        "",
        _count(rows, "watched_ok", "watched, or not watched with a precise reason"),
        _count(rows, "identical", "end with identical weights"),
        _count(rows, "loss", "have the loss of every step"),
        _count(rows, "batch", "have the right batch size"),
        _count(rows, "verdict", "have the right verdict"),
        f"{len(longer) - len(slow)} of {len(longer)} with steps of {SHORT_MS:g} ms or more: time ratio of "
        f"{MOST_RATIO} or less{'; over it: ' + ', '.join(slow) if slow else ''}",
        "",
        "What gradvitals printed for those it did not watch:",
        *(f"- {row['name']}: {row['watched']}" for row in rows if row["watched"] != "yes"),
        "",
        "Verdicts:",
        *(f"- {row['name']}: {row['headline']}" for row in rows if row["headline"]),
        *(f"- left out: {name}: {why}" for name, why in result["left_out"].items()),
    ]
    return "\n".join(lines)


def _mark(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if value == value else "-"


def _count(rows: Sequence[Mapping[str, Any]], name: str, what: str) -> str:
    values = [row[name] for row in rows if row[name] is not None]
    return f"{sum(map(bool, values))} of {len(values)} {what}"
