"""Whether a snapshot fits a run. Asked before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradvitals.act.snap_tree import TENSOR, dense, is_sharded, marks
from gradvitals.act.subject import Subject
from gradvitals.errors import GradvitalsError

SHOWN = 5

Sizes = Mapping[str, tuple[torch.Size, torch.dtype]]


class SnapshotError(GradvitalsError):
    """A snapshot cannot be kept, read, or put back."""


def sizes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes by name, as snapshots have them: whole where sharded, each element once."""
    return {
        name: ((tensor if is_sharded(tensor) else dense(tensor)).shape, tensor.dtype)
        for name, tensor in tensors.items()
    }


def check_fit(subject: Subject, plain: Mapping[str, Any], sizes: Sizes, where: str) -> None:
    """Raise if the snapshot does not fit the subject, saying what differs by its names.

    Args:
        subject: What it would be put back into.
        plain: The snapshot's plain values.
        sizes: Shapes and dtypes of its tensors, whole ones where they are sharded.
        where: Names the snapshot in the error.
    """
    problems = [*_kind_problems(plain["kinds"], subject.kinds())]
    live = {f"parameter/{name}": tensor for name, tensor in subject.parameters().items()}
    live |= {f"buffer/{name}": tensor for name, tensor in subject.buffers().items()}
    problems += _tensor_problems(sizes_of(live), sizes)
    lost = [mark[TENSOR] for mark in marks([plain["state"], plain["groups"]]) if mark[TENSOR] not in sizes]
    if lost:
        problems.append(f"it is incomplete: {_some(lost)} are not in it")
    if problems:
        raise SnapshotError(
            f"{where} does not fit this run:\n  "
            + "\n  ".join(problems)
            + "\nNothing was changed. Build model, optimizers, schedulers, scaler and data as they were when it was "
            "taken, or use another folder."
        )


def _kind_problems(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[str]:
    for name in ("optimizers", "schedulers"):
        if saved[name] != live[name]:
            yield f"{name}: the snapshot has {_list(saved[name])}, this run has {_list(live[name])}"
    if saved["optimizers"] == live["optimizers"]:
        for index, (before, now) in enumerate(zip(saved["members"], live["members"], strict=True)):
            if before != now:
                yield f"parameter groups of optimizer {index}: {_group_difference(before, now)}"
    if saved["scaler"] != live["scaler"]:
        yield f"scaler: the snapshot has {saved['scaler']}, this run has {live['scaler']}"
    if saved["position"] and not live["position"]:
        yield "data: the snapshot has a data position, this run was given no data="
    if live["position"] and not saved["position"]:
        yield "data: the snapshot has no data position to go on from, and this run was given data="


def _group_difference(before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> str:
    if [len(group) for group in before] != [len(group) for group in now]:
        counts = (", ".join(str(len(group)) for group in groups) for groups in (before, now))
        return "the snapshot has groups of {} parameters, this run of {}".format(*counts)
    moved = [f"{a} (here {b})" for x, y in zip(before, now, strict=True) for a, b in zip(x, y, strict=True) if a != b]
    return f"in another order or under other names: {_some(moved)}"


def _tensor_problems(live: Sizes, saved: Sizes) -> Iterator[str]:
    kept = {name: size for name, size in saved.items() if name.startswith(("parameter/", "buffer/"))}
    missing, unknown = [name for name in live if name not in kept], [name for name in kept if name not in live]
    if missing:
        yield f"not in the snapshot: {_some(missing)}"
    if unknown:
        yield f"in the snapshot but not in this run: {_some(unknown)}"
    for name in [name for name in live if name in kept and tuple(live[name]) != tuple(kept[name])][:SHOWN]:
        yield f"{name}: {_text(kept[name])} in the snapshot, {_text(live[name])} in this run"


def _text(size: tuple[torch.Size, torch.dtype]) -> str:
    return f"{tuple(size[0])} {str(size[1]).removeprefix('torch.')}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
