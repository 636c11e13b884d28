"""What a TrainingState accepts, and what it says it cannot restore."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradvitals.guard.snapshot import SnapshotManager
from gradvitals.guard.training_state import TrainingState


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(2, 2)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def test_without_data_it_says_so() -> None:
    net, optimizer = parts()
    (sentence,) = TrainingState(net, optimizer).cannot_restore
    assert sentence.startswith("the data position: pass data=")
    assert TrainingState(net, optimizer, data=(lambda: 1, print)).cannot_restore == []


def test_parameters_without_values_are_refused() -> None:
    net = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="parameter weight is on the meta device"):
        TrainingState(net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_names_do_not_depend_on_torch_compile_and_cover_what_only_an_optimizer_knows() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    plain = TrainingState(net, torch.optim.SGD(net.parameters())).parts()
    net[0] = torch.compile(net[0], backend="eager")
    alone = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*net.parameters(), alone])
    training_state = TrainingState(torch.compile(net, backend="eager"), optimizer)
    assert set(plain["parameter groups"][0]) < set(training_state.parts()["parameter groups"][0])
    snapshots = SnapshotManager(training_state, every=1, settle=0)
    snapshots.take(1)
    snapshots.complete()
    snapshots.settle(1)
    with torch.no_grad():
        alone.zero_()
    snapshots.restore()
    assert alone.tolist() == [1, 1, 1]


def test_an_optimizer_that_keeps_more_than_its_state_is_named() -> None:
    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"secret": 1}

    net, _ = parts()
    sentences = TrainingState(net, Odd(net.parameters(), lr=0.1)).cannot_restore
    assert "what Odd keeps outside its state and groups: secret" in sentences
