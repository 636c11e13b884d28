"""What ranks send is added up; what cannot be added up is not."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.distributed.cost import topology_of
from gradvitals.distributed.allreduce import Kind, StepPacker
from gradvitals.worker.record import Context
from gradvitals.worker.sums import RowSums, StepSums, Table

PLAIN = Kind(full=False, detail=False)


def step_of(packer: StepPacker, nonfinite: list[float], *, counted: bool) -> StepSums:
    topology = packer.topology
    table = Table(Context(layout=topology.layout, slots=topology.slots))
    step = StepSums(step=3, time=0.0, full=False, table=table, counted=counted)
    present = np.ones(len(nonfinite), dtype=bool)
    step.rows = {"nonfinite": RowSums(np.array(nonfinite), present), "norm": RowSums(np.ones(len(nonfinite)), present)}
    return step


def test_what_ranks_know_of_the_whole_step_is_averaged() -> None:
    packer = StepPacker(topology_of(world=2, tensors=3, slots=0))
    steps = [step_of(packer, [0.0, 0.0, 0.0], counted=True) for _ in range(2)]
    steps[0].values, steps[1].values = {"val/loss": 1.0, "clip/scale": 1024.0}, {"val/loss": 3.0}
    steps[0].given_up = steps[1].given_up = 2
    steps[1].lost_loss = 7.0
    sent = sum(packer.pack(step, PLAIN) for step in steps)
    assert isinstance(sent, np.ndarray)
    whole = packer.unpack(sent, PLAIN, steps[0], steps[0].table)
    assert whole.values == {"val/loss": 2.0, "clip/scale": 1024.0}
    assert (whole.given_up, whole.lost_loss, whole.lost_norm) == (2, 7.0, None)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (([1.0, 0.0, 1.0], False), ([1.0, 0.0, 1.0], False), [1, 0, 1]),
        (([8.0, 0.0, 56.0], True), ([1.0, 0.0, 1.0], False), [1, 0, 1]),  # the other starts to count a step later
        (([8.0, 0.0, 56.0], True), ([8.0, 0.0, 56.0], True), [8, 0, 56]),
    ],
)
def test_elements_are_counted_once_all_ranks_count_them(
    first: tuple[list[float], bool], second: tuple[list[float], bool], expected: list[int]
) -> None:
    packer = StepPacker(topology_of(world=2, tensors=3, slots=0))
    steps = [step_of(packer, numbers, counted=counted) for numbers, counted in (first, second)]
    sent = sum(packer.pack(step, PLAIN) for step in steps)
    assert isinstance(sent, np.ndarray)
    whole = packer.unpack(sent, PLAIN, steps[0], steps[0].table)
    assert whole.known("nonfinite").tolist() == expected
