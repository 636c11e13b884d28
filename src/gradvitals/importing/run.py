"""Import: make a run folder from a history that another program kept."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradvitals.diagnose import Diagnosis
from gradvitals.format import listed
from gradvitals.importing.sources import ImportSourceError, Notes, Source, find_source, number, whole
from gradvitals.places import RUNS_FOLDER
from gradvitals.store import RunWriter, free_run_path
from gradvitals.types import Finding, Reading

STEP, TIME = "step", "time"

KNOWN = ("loss", "lr", "grad/norm", "grad/max", "grad/nonfinite", "clip/max_norm", "step/skipped")
"""Metrics that can be imported: those that need neither single tensors nor the number of samples."""

NAMES: dict[str, tuple[str, ...]] = {
    STEP: (
        *("gradvitals_step", "global_step", "train_global_step", "trainer_global_step", "step", "steps", "train_step"),
        *("iteration", "iterations", "iter", "iter_num", "it", "update", "updates", "num_updates", "_step"),
    ),
    TIME: ("_timestamp", "timestamp", "wall_time", "time"),
    "loss": (
        *("loss", "train_loss", "training_loss", "loss_train", "loss_training", "train_loss_step", "loss_step"),
        *("train_batch_loss", "batch_loss", "train_loss_batch", "lm_loss", "train_lm_loss"),
    ),
    "grad/norm": (
        *("grad_norm", "gradient_norm", "gradnorm", "gnorm", "train_grad_norm", "train_gradient_norm", "train_gnorm"),
        *("total_grad_norm", "global_grad_norm", "grad_norm_total", "total_norm", "global_norm", "grads_norm"),
        *("optim_grad_norm", "optim_total_grad_norm", "grad_2_0_norm_total", "l2_norm_grad_global"),
    ),
    "lr": (
        *("lr", "learning_rate", "train_lr", "train_learning_rate", "optim_lr", "optim_learning_rate"),
        *("learn_rate", "learningrate", "learnrate", "lrate", "train_learn_rate", "current_lr", "cur_lr", "last_lr"),
        *("lr_0", "lr_group0", "lr_pg1", "optim_learning_rate_group0", "lr_adamw", "lr_adam", "lr_sgd"),
    ),
}
"""Names of columns, most likely first, in lower case with _ for everything else."""

NOT_OF_TRAINING = re.compile(r"(^|_)(val|valid|validation|eval|evaluation|test|dev)(_|$)")

SHOWN = 20
"""The most columns to list in an error."""


def choose(columns: Sequence[str], named: Mapping[str, str], *, has_steps: bool = False) -> dict[str, str]:
    """Returns the column to read for each metric, and for the step and the time if there is one.

    Args:
        columns: All columns of the source.
        named: The user's choice: metrics by column.
        has_steps: Whether rows have a step and a time besides their columns.

    Raises:
        ImportSourceError: If the columns are ambiguous. The message lists them and how to choose.
    """
    chosen: dict[str, str] = {}
    for column, called in named.items():
        metric = _metric_called(called)
        if metric not in (*KNOWN, STEP, TIME):
            known = ", ".join((*NAMES, *(name for name in KNOWN if name not in NAMES)))
            raise ImportSourceError(f"--map {column}={metric}: there is no metric {metric!r}; expected one of {known}")
        if column not in columns:
            raise ImportSourceError(f"--map {column}={metric}: there is no column {column!r}; found {_named(columns)}")
        chosen[metric] = column
    taken = set(chosen.values())
    free = [column for column in columns if column not in taken]
    for column in free:  # a history that gradvitals wrote
        own = column.removeprefix("metrics/").removeprefix("gradvitals/")
        if own in KNOWN:
            chosen.setdefault(own, column)
    for metric in NAMES:
        if metric not in chosen and not (has_steps and metric in (STEP, TIME)):
            found = _guess(metric, free)
            chosen |= {metric: found} if found is not None else {}
    if not chosen.keys() & {"loss", "grad/norm"}:
        raise ImportSourceError(
            f"no column is known to be the loss or the gradient norm; found {_named(columns)}. "
            "Say which is which: --map COLUMN=loss, --map COLUMN=grad/norm"
        )
    return chosen


def _metric_called(name: str) -> str:
    """Returns the metric for its own name or for a usual name of its column."""
    if name in (*KNOWN, *NAMES):
        return name
    return next((metric for metric, names in NAMES.items() if _small(name) in names), name)


def _guess(metric: str, columns: Sequence[str]) -> str | None:
    small = {column: _small(column) for column in columns}
    called = next((name for name in NAMES[metric] if name in small.values()), None)
    maybe = [column for column in columns if small[column] == called]
    if metric == "loss" and called is None:
        like = [column for column in columns if "loss" in small[column].split("_")]
        maybe = [column for column in like if not NOT_OF_TRAINING.search(small[column])]
    if len(maybe) > 1:
        raise ImportSourceError(
            f"several columns may be the {metric}: {_named(maybe)}. Say which: --map {maybe[0]}={metric}"
        )
    return maybe[0] if maybe else None


def _small(column: str) -> str:
    """Returns a name in lower case with _ for everything else. A leading _ stays: wandb uses it."""
    small = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column.strip()).lower()).rstrip("_")
    return small if column.startswith("_") else small.lstrip("_")


def _named(columns: Sequence[str]) -> str:
    return listed((repr(column[:100]) for column in columns), SHOWN) or "none"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The result of an import."""

    run: Path
    """The folder of the new run."""
    source: Path
    kind: str
    columns: Mapping[str, str]
    """The column that each metric, the step and the time were read from."""
    steps: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    """Remarks on the source, such as damaged rows or repeated steps."""

    def to_json(self) -> dict[str, Any]:
        """Returns the record as plain JSON values."""
        own = {**vars(self), "run": str(self.run), "source": str(self.source)}
        return {**own, "findings": [finding.to_json() for finding in self.findings]}


def import_run(
    source: str | Path, run: str | Path | None = None, *, columns: Mapping[str, str] | None = None
) -> Imported:
    """Make a run folder from a history of loss, gradient norm or learning rate.

    Args:
        source: Event files of TensorBoard, a run of W&B, a CSV, JSONL or JSON file; or the folder of one.
        run: Folder to make; None takes ``gradvitals_runs/`` and the source's name.
        columns: Metrics by the name of their column, if they cannot be guessed: ``{"train_nll": "loss"}``.

    Raises:
        ImportSourceError: If the source cannot be read, or its columns are ambiguous.
        RunError: If there is a run in that folder already.
    """
    path = Path(source)
    found = find_source(path)
    notes = Notes()
    named = list(dict.fromkeys(column for row in found.rows(Notes()) for column in row.cells))
    if not named:
        raise ImportSourceError(f"{found.path} has no row that can be read as {found.kind}")
    chosen = choose(named, columns or {}, has_steps=found.kind == "tensorboard")
    if "loss" not in chosen:
        left = _named([column for column in named if column not in chosen.values()])
        notes.others.append(
            f"no column is known to be the loss, so it is not judged; left out: {left}. "
            "If it is one of these, say which: --map COLUMN=loss"
        )
    readings = _readings(found, chosen, notes)
    if not readings:
        raise ImportSourceError(f"{found.path} has no row with a number for {', '.join(_metrics(chosen).values())}")
    where = Path(run) if run is not None else free_run_path(Path(RUNS_FOLDER) / _name(path))
    words = tuple(notes.words())
    origin = {"from": str(found.path), "kind": found.kind, "columns": chosen, "notes": list(words)}
    diagnosis = Diagnosis()
    with RunWriter(where, meta={"imported": origin, "facts": diagnosis.info.to_json()}) as writer:
        for reading in readings:
            writer.write(reading)
            diagnosis.read([reading])
        diagnosis.finish()
        for finding in diagnosis.findings:
            writer.write(finding)
        writer.commit()
    return Imported(
        run=where,
        source=found.path,
        kind=found.kind,
        columns=chosen,
        steps=len(readings),
        findings=tuple(diagnosis.findings),
        notes=words,
    )


def _readings(source: Source, chosen: Mapping[str, str], notes: Notes) -> list[Reading]:
    """Returns one reading per step, in order. If a step is repeated, its last values count."""
    metrics = _metrics(chosen)
    values: dict[int, dict[str, float]] = {}
    times: dict[int, float] = {}
    again = unplaced = 0
    written = source.path.stat().st_mtime
    for index, row in enumerate(source.rows(notes)):
        cells = {metric: number(row.cells.get(column)) for metric, column in metrics.items()}
        known = {metric: value for metric, value in cells.items() if value is not None}
        if not known:
            continue
        counted = index if row.step is None else row.step
        step = whole(row.cells.get(chosen[STEP])) if STEP in chosen else counted
        if step is None:
            unplaced += 1
            continue
        of_step = values.setdefault(step, {})
        again += bool(of_step.keys() & known.keys())
        of_step |= known
        time = row.time if row.time is not None else number(row.cells.get(chosen.get(TIME, "")))
        times.setdefault(step, time if time is not None and math.isfinite(time) else written)
    if STEP not in chosen and source.kind != "tensorboard":
        notes.others.append("there is no column for the step; rows were counted")
    if again:
        notes.others.append(f"{again:,} rows were about a step that had come before; the last one counts")
    if unplaced:
        notes.others.append(f"{unplaced:,} rows have no step and are left out")
    return [Reading(step=step, time=times[step], values=values[step]) for step in sorted(values)]


def _metrics(chosen: Mapping[str, str]) -> dict[str, str]:
    return {metric: column for metric, column in chosen.items() if metric not in (STEP, TIME)}


def _name(path: Path) -> str:
    resolved = path.resolve()
    return f"{resolved.stem if resolved.is_file() else resolved.name}-imported"
