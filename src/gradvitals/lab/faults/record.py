"""Train once, with or without a fault, and keep everything a monitor read."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.judge import facts_of
from gradvitals.lab.faults.fault import Fault
from gradvitals.lab.faults.recording import Recording, by_step
from gradvitals.lab.faults.tasks import Recipe, Training, prepare
from gradvitals.monitor import Monitor
from gradvitals.store import open_run
from gradvitals.types import Reading
from gradvitals.monitor import watch

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
    return replace(facts_of([training.optimizer]), autocast=autocast).to_json()
