"""What ranks send is added up; what cannot be added up is not."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.distributed.cost import roster_of
from gradvitals.distributed.allreduce import Kind, StepPacker
from gradvitals.worker.aggregate import RowSums, StepSums, Table

PLAIN = Kind(full=False, detail=False)


def step_of(wire: StepPacker, nonfinite: list[float], *, counted: bool) -> StepSums:
    step = StepSums(
        step=3, time=0.0, full=False, table=Table(wire.topology.layout, wire.topology.slots), counted=counted
    )
    present = np.ones(len(nonfinite), dtype=bool)
    step.rows = {"nonfinite": RowSums(np.array(nonfinite), present), "norm": RowSums(np.ones(len(nonfinite)), present)}
    return step


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (([1.0, 0.0, 1.0], False), ([1.0, 0.0, 1.0], False), [1, 0, 1]),
        (([8.0, 0.0, 56.0], True), ([1.0, 0.0, 1.0], False), [1, 0, 1]),  # the other begins to count a step later
        (([8.0, 0.0, 56.0], True), ([8.0, 0.0, 56.0], True), [8, 0, 56]),
    ],
)
def test_elements_are_counted_once_all_ranks_count_them(
    first: tuple[list[float], bool], second: tuple[list[float], bool], expected: list[int]
) -> None:
    wire = StepPacker(roster_of(world=2, tensors=3, slots=0))
    steps = [step_of(wire, numbers, counted=counted) for numbers, counted in (first, second)]
    sent = sum(wire.pack(step, PLAIN) for step in steps)
    assert isinstance(sent, np.ndarray)
    whole = wire.unpack(sent, PLAIN, steps[0], steps[0].table)
    assert whole.known("nonfinite").tolist() == expected
