"""Train once, with or without a fault, and keep everything a monitor read, to diagnose it as often as needed."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch import nn

from benchmarks.faults.tasks import Recipe, Training, prepare
from benchmarks.faults.zoo import Fault
from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.monitor import Monitor, run_info, watch
from gradvitals.store import open_run
from gradvitals.types import FloatArray, Layout, Reading, TensorInfo

FORMAT = 1
Kind = Literal["values", "tensors", "layers", "heads"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One run of the zoo."""

    name: str
    """Of the fault, or of the healthy control."""
    fault: str | None
    """None for a healthy control."""
    task: str
    seed: int
    planted: int | None
    """The first step the fault had a hand in, 0 for from the start; None for a healthy control."""
    layout: Layout
    facts: Mapping[str, Any]
    """What the run is: optimizer, batch size and so on, in plain values."""
    steps: Sequence[Sequence[Reading]] = field(repr=False)
    """The readings of each optimizer step."""

    @property
    def label(self) -> str:
        """What tells it from all others of one zoo."""
        return f"{self.task}.{self.name}.{self.seed}"

    def series(self, metric: str) -> FloatArray:
        """One global metric at every step; nan where it was not read."""
        rows = (next((r.values[metric] for r in step if metric in r.values), np.nan) for step in self.steps)
        return np.fromiter(rows, dtype=np.float64, count=len(self.steps))


def by_step(readings: Iterable[Reading]) -> list[list[Reading]]:
    """Readings in the order they came, those of one step together."""
    steps: dict[int, list[Reading]] = {}
    for reading in readings:
        steps.setdefault(reading.step, []).append(reading)
    return list(steps.values())


def save_recording(recording: Recording, folder: Path) -> Path:
    """Keep a recording in a folder; one of the same run is replaced. Returns its file of words."""
    folder.mkdir(parents=True, exist_ok=True)
    readings = [reading for step in recording.steps for reading in step]
    arrays: dict[str, Any] = {}
    for kind in KINDS:
        metrics = dict.fromkeys(metric for reading in readings for metric in getattr(reading, kind))
        for metric in metrics:
            at = [i for i, reading in enumerate(readings) if metric in getattr(reading, kind)]
            arrays[f"{kind}:{metric}"] = np.array([getattr(readings[i], kind)[metric] for i in at], dtype=np.float64)
            arrays[f"at:{kind}:{metric}"] = np.array(at, dtype=np.int32)
    words = {
        "format": FORMAT,
        **{name: getattr(recording, name) for name in ("name", "fault", "task", "seed", "planted")},
        "facts": dict(recording.facts),
        "layout": {
            "tensors": [info.to_json() for info in recording.layout.tensors],
            "layers": recording.layout.layers,
            "heads": recording.layout.heads,
        },
        "readings": [[r.step, r.time, r.stage, r.source, r.batch_size] for r in readings],
    }
    path = folder / f"{recording.label}.json"
    np.savez_compressed(path.with_suffix(".npz"), **arrays)
    path.write_text(json.dumps(words), "utf-8")  # last: what has this file is whole
    return path


def load_recording(path: Path) -> Recording:
    """Read one recording by its file of words."""
    words = json.loads(path.read_text("utf-8"))
    if words.get("format") != FORMAT:
        raise GradvitalsError(f"{path} has format {words.get('format')!r}; expected {FORMAT}: record it again")
    parts: list[dict[str, dict[str, Any]]] = [{kind: {} for kind in KINDS} for _ in words["readings"]]
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
        for name in arrays.files:
            kind, metric = name.split(":", 1)
            if kind == "at":
                continue
            rows = arrays[name].tolist() if kind == "values" else arrays[name]
            for i, row in zip(arrays[f"at:{name}"], rows, strict=True):
                parts[i][kind][metric] = row
    readings = [
        Reading(step=step, time=time, stage=stage, source=source, batch_size=batch_size, **part)
        for (step, time, stage, source, batch_size), part in zip(words["readings"], parts, strict=True)
    ]
    layout = Layout(
        tensors=tuple(map(TensorInfo.from_json, words["layout"]["tensors"])),
        layers=tuple(words["layout"]["layers"]),
        heads=tuple(words["layout"]["heads"]),
    )
    whose = {name: words[name] for name in ("name", "fault", "task", "seed", "planted", "facts")}
    return Recording(**whose, layout=layout, steps=by_step(readings))


def load_recordings(folder: str | Path) -> list[Recording]:
    """All recordings in a folder, in the order of their names.

    Example:
        >>> load_recordings("zoo")  # doctest: +SKIP
        [Recording(name='bad_batch', fault='bad_batch', task='cnn', seed=0, planted=150, ...), ...]
    """
    return [load_recording(path) for path in recorded(folder)]


def recorded(folder: str | Path) -> list[Path]:
    """The recordings in a folder, by their files of words."""
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise GradvitalsError(
            f"{folder} holds no recordings; make some with: python -m benchmarks.faults --keep {folder}"
        )
    return paths


QUEUE_SIZE = 100_000
"""A whole run: nothing may be dropped."""


def record(name: str, recipe: Recipe, seed: int, fault: Fault | None = None, *, tensor_every: int = 1) -> Recording:
    """Train under a monitor.

    Args:
        name: Of the fault, or of the healthy control.
        recipe: How the healthy twin is trained.
        seed: Of weights, data and fault.
        fault: What to plant; None for a healthy run.
        tensor_every: The setting of the monitor.
    """
    active = fault or Fault(id="none", description="", kind="slow", tasks=(), finds=())
    planted = active.planted(seed)
    recipe = active.change(recipe)
    training = prepare(recipe, seed, build=active.build)
    active.attach(training, planted)
    readings: list[Reading] = []
    config = Config(
        tensor_every=tensor_every, diagnose=False, quiet=True, queue_size=QUEUE_SIZE, overhead_budget=1
    )  # no step is passed over, however long it takes
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "run"
        monitor = watch(
            training.model,
            training.optimizer,
            run=path,
            config=config,
            batch_size=recipe.batch_size,
            on_reading=readings.append,
        )
        with monitor, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what torch has to say about a run that is meant to go wrong
            for step in range(recipe.num_steps):
                _train_step(training, monitor, active, step, step - planted)
        broken = [finding for finding in monitor.findings if finding.id in ("monitor_error", "store_error")]
        if broken:
            raise GradvitalsError(f"the monitor failed in {recipe.task}.{name}.{seed}: {broken[0]}")
        with open_run(path) as run:
            layout = run.layout
    return Recording(
        name=name,
        fault=fault.id if fault else None,
        task=recipe.task,
        seed=seed,
        planted=planted if fault else None,
        layout=layout,
        facts=_facts(training),
        steps=by_step(readings),
    )


def _train_step(training: Training, monitor: Monitor, fault: Fault, step: int, age: int) -> None:
    recipe = training.recipe
    batches = training.batches()
    if age >= 0:
        batches = fault.batches(training, batches, age)
    training.set_lr(step, fault.lr_factor if age >= 0 else 1.0)
    for inputs, targets in batches:
        loss = training.loss(inputs, targets)
        if age >= 0:
            loss = fault.loss(loss)
        (loss * (recipe.loss_weight / len(batches))).backward()
        monitor.observe(loss, batch_size=len(inputs))
    if recipe.max_norm is not None:
        nn.utils.clip_grad_norm_(training.model.parameters(), recipe.max_norm)
    if age >= 0:
        fault.before_step(training, age)
    training.optimizer.step()
    if training.source.rival is not None:
        training.source.rival.take_turn(recipe.micro_batch_size)
    training.optimizer.zero_grad()


def _facts(training: Training) -> dict[str, Any]:
    """What a monitor that diagnoses would have known about the run."""
    autocast = "float16" if training.recipe.autocast else None
    return replace(run_info([training.optimizer]), autocast=autocast).to_json()
