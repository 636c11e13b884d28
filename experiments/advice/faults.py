"""Bad starts: the tuned settings of a task with one thing wrong, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from experiments.advice.tasks import TASKS, Settings, Task, changed

Fault = Callable[[Settings, Task, random.Random], dict[str, Any]]


def _power(draw: random.Random, low: float, high: float) -> float:
    """Returns a number between two, even in its logarithm."""
    value: float = low * (high / low) ** draw.random()
    return value


def _lr(low: float, high: float) -> Fault:
    return lambda good, task, draw: {"lr": good.lr * _power(draw, low, high)}


def _momentum(good: Settings, task: Task, draw: random.Random) -> dict[str, Any]:
    return {"momentum": draw.choice((0.0, 0.99)) if task.optimizer == "sgd" else draw.choice((0.0, 0.995))}


def _normalization(good: Settings, task: Task, draw: random.Random) -> dict[str, Any]:
    return {draw.choice(("inputs", "targets")): "raw"} if task.regression else {"normalization": False}


FAULTS: dict[str, tuple[Fault, ...]] = {
    "learning rate x 4 to 10": (_lr(4, 10),),
    "learning rate x 10 to 30": (_lr(10, 30),),
    "learning rate x 30 to 100": (_lr(30, 100),),
    "learning rate / 4 to 10": (_lr(1 / 10, 1 / 4),),
    "learning rate / 10 to 30": (_lr(1 / 30, 1 / 10),),
    "learning rate / 30 to 100": (_lr(1 / 100, 1 / 30),),
    "batch too large": (lambda good, task, draw: {"batch_size": good.batch_size * draw.choice((8, 16))},),
    "batch too small": (lambda good, task, draw: {"batch_size": max(2, good.batch_size // draw.choice((4, 8)))},),
    "clip far too low": (lambda good, task, draw: {"max_norm": _power(draw, 1e-4, 1e-2)},),
    "no warmup, high rate": (_lr(3, 10), lambda good, task, draw: {"warmup": 0}),
    "no decay, high rate": (_lr(2, 6), lambda good, task, draw: {"schedule": "constant"}),
    "weight decay": (lambda good, task, draw: {"weight_decay": _power(draw, 0.1, 1) / good.lr**0.5},),
    "large initial weights": (lambda good, task, draw: {"initialization": _power(draw, 4, 20)},),
    "small initial weights": (lambda good, task, draw: {"initialization": 1 / _power(draw, 20, 500)},),
    "momentum": (_momentum,),
    "no normalization": (_normalization,),
    "zero_grad missing": (lambda good, task, draw: {"zero_grad": "never"},),
    "zero_grad before step": (lambda good, task, draw: {"zero_grad": "before_step"},),
    "layers frozen": (lambda good, task, draw: {"requires_grad": False},),
    "softmax or sorted data": (
        lambda good, task, draw: {"shuffle": False} if task.regression else {"output": "softmax"},
    ),
}
"""Twenty starts per task. What a fault does apart from its numbers is the same in every task that has the setting."""


def bad_start(task: str, place: int, good: Settings) -> tuple[str, Settings]:
    """Returns the name of a fault, and the tuned settings with it."""
    name = list(FAULTS)[place]
    draw = random.Random(f"{task} {place}")
    values: dict[str, Any] = dict.fromkeys(TASKS[task].faults, "raw")
    for fault in FAULTS[name]:
        values |= fault(good, TASKS[task], draw)
    return name, changed(good, **values)
