"""Which column is the step, the loss, the gradient norm, the learning rate: guessed by name, or told."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gradvitals.importing.source import ImportSourceError

STEP, TIME = "step", "time"

KNOWN = ("loss", "lr", "grad/norm", "grad/max", "grad/nonfinite", "clip/max_norm", "step/skipped")
"""What can be imported: metrics that say something without single tensors, and without the samples behind them."""

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
"""What columns are called, the plainest first; all in small letters, with _ for everything else."""

NOT_OF_TRAINING = re.compile(r"(^|_)(val|valid|validation|eval|evaluation|test|dev)(_|$)")

SHOWN = 20
"""Columns that an error names."""


def choose(columns: Sequence[str], told: Mapping[str, str], *, has_steps: bool = False) -> dict[str, str]:
    """The column to read for each metric, and for the step and the time where there is one.

    Args:
        columns: All columns of the source.
        told: Metrics by the column that the user says they are in.
        has_steps: Whether rows know their step and time without a column: one called so is a value like others.

    Raises:
        ImportSourceError: If it is not clear which they are. Says what was found and how to say which is which.
    """
    chosen: dict[str, str] = {}
    for column, called in told.items():
        metric = _metric_called(called)
        if metric not in (*KNOWN, STEP, TIME):
            known = ", ".join((*NAMES, *(name for name in KNOWN if name not in NAMES)))
            raise ImportSourceError(f"--map {column}={metric}: there is no metric {metric!r}; expected one of {known}")
        if column not in columns:
            raise ImportSourceError(f"--map {column}={metric}: there is no column {column!r}; found {listed(columns)}")
        chosen[metric] = column
    taken = set(chosen.values())
    free = [column for column in columns if column not in taken]
    for column in free:  # what gradvitals wrote itself has its names
        own = column.removeprefix("metrics/").removeprefix("gradvitals/")
        if own in KNOWN and own not in chosen:
            chosen[own] = column
    for metric, names in NAMES.items():
        if metric not in chosen and not (has_steps and metric in (STEP, TIME)):
            found = _guess(metric, names, free)
            if found is not None:
                chosen[metric] = found
    if not chosen.keys() & {"loss", "grad/norm"}:
        raise ImportSourceError(
            f"no column is known to be the loss or the gradient norm; found {listed(columns)}. "
            "Say which is which: --map COLUMN=loss, --map COLUMN=grad/norm"
        )
    return chosen


def _metric_called(name: str) -> str:
    """The metric that a user means, by its own name or by one that columns have."""
    if name in (*KNOWN, *NAMES):
        return name
    return next((metric for metric, names in NAMES.items() if _small(name) in names), name)


def _guess(metric: str, names: Sequence[str], columns: Iterable[str]) -> str | None:
    by_name: dict[str, list[str]] = {}
    for column in columns:
        by_name.setdefault(_small(column), []).append(column)
    for name in names:
        if len(by_name.get(name, ())) > 1:
            raise _unclear(metric, by_name[name])
        if name in by_name:
            return by_name[name][0]
    if metric != "loss":
        return None
    like = [own for name, own in by_name.items() if "loss" in name.split("_") and not NOT_OF_TRAINING.search(name)]
    maybe = [column for columns_of_name in like for column in columns_of_name]
    if len(maybe) > 1:
        raise _unclear(metric, maybe)
    return maybe[0] if maybe else None


def _unclear(metric: str, columns: Sequence[str]) -> ImportSourceError:
    return ImportSourceError(
        f"several columns may be the {metric}: {listed(columns)}. Say which: --map {columns[0]}={metric}"
    )


def _small(column: str) -> str:
    """A name in small letters with _ for everything else; one at the start is kept, as wandb's own have it."""
    small = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column.strip()).lower()).rstrip("_")
    return small if column.startswith("_") else small.lstrip("_")


def listed(columns: Sequence[str]) -> str:
    """Some columns by name, and how many more there are."""
    more = f" and {len(columns) - SHOWN} more" if len(columns) > SHOWN else ""
    return ", ".join(repr(column[:100]) for column in columns[:SHOWN]) + more if columns else "none"
