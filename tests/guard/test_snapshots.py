"""Back to a snapshot and on again is what happened the first time, bit for bit, whatever a run is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guarded_kinds import HOST, SCHEDULERS
from guarded_runs import adamw
from snapshot_runs import Run, bits, seed_all, snapshots_of, take_healthy
from torch import nn

import gradvitals.optim as gvo
from gradvitals.guard import RollBack
from gradvitals.guard.snapshot import Restored, SnapshotManager
from gradvitals.guard.training_state import TrainingState

OPTIMIZERS = {name: make for name, make in HOST.items() if name != "two"} | {
    "nadam": lambda net: [torch.optim.NAdam(net.parameters())],
    "adafactor": lambda net: [torch.optim.Adafactor(net.parameters())],
    "vr_lamb": lambda net: [gvo.VRLAMB(net.parameters(), lr=0.01)],
    "two": lambda net: [
        torch.optim.SGD(net[0].parameters(), lr=0.05, momentum=0.9),
        torch.optim.AdamW([{"params": net[3].parameters(), "lr": 0.1}, {"params": net[4].parameters()}]),
    ],
}


def back_and_on_again(run: Any) -> None:
    """Train 4, snapshot, 5 more; back, and the same 5: the same in all bits, twice."""
    seed_all(1)
    run.train(4, snapshots=True)
    position = run.data.state_dict()
    seed_all(2)  # a rollback leaves random numbers and data alone, so the test puts them back
    run.train(5)
    first = run.all_bits()
    run.snapshots.settle(run.step)
    for _ in range(2):
        assert run.snapshots.restore() is not None
        run.data.load_state_dict(position)
        seed_all(2)
        run.train(5)
        assert run.all_bits() == first


@pytest.mark.parametrize("optimizers", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_same_again_with_any_optimizer(optimizers: Any) -> None:
    back_and_on_again(Run(optimizers, parts=6))


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_the_same_again_with_any_scheduler(make: Any) -> None:
    for optimizers in (OPTIMIZERS["two"], adamw):
        back_and_on_again(Run(optimizers, lambda all: [make(one) for one in all]))


@pytest.mark.filterwarnings("ignore:Detected call of")  # the first steps of a scaler are skipped
def test_the_same_again_with_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    run = Run(adamw, lambda all: [SCHEDULERS["cosine"](one) for one in all], scaler=scaler)
    back_and_on_again(run)
    run.snapshots.restore()
    run.snapshots.take(99)
    run.snapshots.complete()
    scale, tracker = scaler.get_scale(), scaler._get_growth_tracker()
    scaler.update(4.0)
    scaler._growth_tracker.fill_(7)
    run.snapshots.settle(99)
    run.snapshots.restore()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (scale, tracker)


def test_everything_goes_back_in_place() -> None:
    run = Run(adamw, every=3)
    run.train(3, snapshots=True)
    optimizer, weight = run.optimizers[0], run.net[0].weight
    state, moment, buffer = optimizer.state[weight], optimizer.state[weight]["exp_avg"], run.net[1].running_mean
    view, places = weight.view(-1), [tensor.data_ptr() for tensor in (weight, moment, buffer)]
    before = [bits(tensor) for tensor in (weight, moment, buffer)]
    run.train(2)
    run.snapshots.settle(3)
    assert run.snapshots.restore() == kept_at(3)
    assert optimizer.state[weight] is state
    assert state["exp_avg"] is moment
    assert run.net[1].running_mean is buffer
    assert [tensor.data_ptr() for tensor in (weight, moment, buffer)] == places
    assert [bits(tensor) for tensor in (weight, moment, buffer)] == before
    assert bits(view) == before[0]


def kept_at(step: int) -> Any:
    return Restored(step, {"step": step})


def test_state_and_settings_made_since_are_gone() -> None:
    run = Run(lambda net: [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)])
    optimizer = run.optimizers[0]
    run.snapshots.take(1, {})
    run.snapshots.settle(1)
    run.train(2)
    optimizer.param_groups[0]["initial_lr"] = 1.0
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.state["of nobody"] = {"a": 1}
    assert len(optimizer.state) == len(list(run.net.parameters())) + 1
    run.snapshots.restore()
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert "initial_lr" not in optimizer.param_groups[0]


def test_state_that_was_thrown_away_since_is_back() -> None:
    run = Run(adamw)
    run.train(4, snapshots=True)
    run.snapshots.complete()
    run.snapshots.settle(4)
    before = run.all_bits()
    run.optimizers[0].state.clear()
    run.snapshots.restore()
    assert run.all_bits() == before


def test_nested_state_and_state_of_no_parameter() -> None:
    net = nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(net.parameters(), history_size=3, max_iter=4)
    data = torch.randn(10, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (net(data) - data.roll(1)).square().mean()
        loss.backward()
        return loss

    snapshots = SnapshotManager(TrainingState(net, optimizer), RollBack(mode="on", every=1, settle=0))
    optimizer.step(closure)
    optimizer.state["shared"] = (torch.ones(2), [3, "x"])
    take_healthy(snapshots, 1)
    optimizer.step(closure)
    first = bits(net.weight)
    optimizer.state["shared"][0].zero_()
    snapshots.restore()
    assert optimizer.state["shared"][1] == [3, "x"]
    assert optimizer.state["shared"][0].tolist() == [1, 1]
    optimizer.step(closure)
    assert bits(net.weight) == first


def test_payloads_of_nan_and_odd_memory_are_copied_verbatim() -> None:
    net = nn.Module()
    odd = torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800001, 0x1], dtype=torch.int32).view(torch.float32)
    net.weight = nn.Parameter(odd.clone())
    net.strided = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    net.register_buffer("expanded", torch.arange(3.0).unsqueeze(1).expand(3, 5))
    net.register_buffer("empty", torch.empty(0, 3), persistent=False)
    net.register_buffer("flag", torch.tensor(True))
    net.register_buffer("sliced", torch.arange(12).view(3, 4)[:, ::2])
    tensors = [*net.parameters(), *net.buffers()]
    before = [bits(tensor) for tensor in tensors]
    snapshots = snapshots_of(net)
    snapshots.take(1)
    snapshots.complete()
    with torch.no_grad():
        net.weight.zero_()
        net.strided.zero_()
        net.expanded[:, 0].zero_()
        net.flag.fill_(False)
        net.sliced.zero_()
    snapshots.settle(1)
    snapshots.restore()
    assert [bits(tensor) for tensor in tensors] == before
    assert bits(net.weight) == bits(odd)


def test_extra_state_of_modules() -> None:
    class Counting(nn.Linear):
        count = 3

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    net = nn.Sequential(Counting(2, 2))
    snapshots = snapshots_of(net)
    snapshots.take(1)
    net[0].count = 9
    snapshots.settle(1)
    snapshots.restore()
    assert net[0].count == 3


# -- which snapshot ---------------------------------------------------------------------------------------------


def test_only_healthy_ones_are_gone_back_to_and_bad_ones_never_replace_them() -> None:
    run = Run(adamw, every=4, settle=6, keep=1)
    assert run.snapshots.restore() is None
    run.train(8, snapshots=True)  # at 4 and 8, both pending
    assert run.snapshots.restore() is None
    assert run.snapshots.newest() is None
    run.train(4, snapshots=True)
    run.snapshots.settle(17)
    assert run.snapshots.newest() is None
    run.snapshots.settle(18)
    assert run.snapshots.newest().step == 12
    run.train(5, snapshots=True)
    run.snapshots.spoil()
    assert run.snapshots.newest().step == 12
    assert run.snapshots.restore() == kept_at(12)
    assert not run.snapshots.due(15)
    assert run.snapshots.due(16)


# -- errors -----------------------------------------------------------------------------------------------------


def test_a_model_that_has_changed_is_left_alone() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    snapshots = snapshots_of(net)
    take_healthy(snapshots, 1)
    net.append(nn.Linear(2, 2))
    before = bits(net[0].weight)
    with torch.no_grad():
        net[0].weight.add_(1)
    after = bits(net[0].weight)
    assert snapshots.restore() is None
    (problem,) = snapshots.problems
    assert "the snapshot of step 1 does not fit" in problem
    assert "parameter/1.weight" in problem
    assert before != bits(net[0].weight) == after


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
    snapshots = SnapshotManager(training_state, RollBack(mode="on", every=1, settle=0))
    take_healthy(snapshots, 1)
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
