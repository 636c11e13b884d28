"""A step that is skipped changes nothing, bit for bit: as if the batch had never been there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_kinds import ACT, BAD, DEVICE, HOST, LATE, ON_DEVICE, QUICK, SCHEDULERS, STEPS, never_had_them
from guarded_runs import Makes, Net, Run, adamw, batch, bits, train_step, without
from torch import Tensor, nn
from torch.optim import lr_scheduler

import gradvitals as gv


@pytest.mark.parametrize(
    ("decide", "name"), [*(("host", name) for name in HOST), *(("device", name) for name in DEVICE)]
)
def test_it_is_as_if_the_batch_had_never_been_there(decide: str, name: str, tmp_path: Path) -> None:
    guard, make = {**ACT, "decide": decide}, (HOST if decide == "host" else DEVICE)[name]
    settings: dict[str, Any] = {"optimizers": make, "parts": 8 if name == "vr_adamw" else 1}
    bad = {step * settings["parts"]: kind for step, kind in BAD.items()}
    guarded = Run(tmp_path / "run", guard, bad=bad, **settings).train(range(STEPS)).close()
    assert sorted(set(guarded.kinds())) == [("skip", step) for step in BAD]
    assert guarded.guard.step == STEPS - len(BAD)
    assert guarded.all_bits() == never_had_them(BAD, **settings).all_bits()


def test_the_device_decides_at_every_step_but_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    decide = gv.guard.actions.DeviceCheck.skips
    monkeypatch.setattr(
        gv.guard.actions.DeviceCheck, "skips", lambda self, *args: asked.append(1) or decide(self, *args)
    )
    Run(tmp_path / "run", ON_DEVICE, optimizers=DEVICE["adamw"]).train(range(10)).close()
    assert len(asked) >= 9


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=6)


@pytest.mark.parametrize(
    ("guard", "make"),
    [
        pytest.param(ACT, HOST["adamw"], id="adamw"),
        pytest.param(ACT, HOST["fused"], id="fused"),
        pytest.param(ACT, HOST["two"], id="two"),
        pytest.param(ON_DEVICE, DEVICE["adamw"], id="adamw on the device"),
        pytest.param(ON_DEVICE, DEVICE["momentum"], id="momentum on the device"),
    ],
)
def test_a_scaler_does_not_count_it(guard: dict[str, Any], make: Makes, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizers": make}
    guarded = Run(tmp_path / "run", guard, bad=LATE, scaler=scaler(), **settings).train(range(STEPS)).close()
    assert sorted(set(guarded.kinds())) == [("skip", step) for step in LATE]
    assert guarded.all_bits() == never_had_them(LATE, scaler=scaler(), **settings).all_bits()


@pytest.mark.parametrize(
    ("make", "decide"),
    [
        pytest.param(adamw, "host", id="unfused"),
        pytest.param(DEVICE["adamw"], "host", id="fused"),
        pytest.param(DEVICE["adamw"], "device", id="device"),
    ],
)
def test_what_the_scaler_leaves_out_is_its_own_affair(make: Makes, decide: str, tmp_path: Path) -> None:
    bad = {5: "nan", 12: "nan"}
    alone = Run(bad=bad, scaler=scaler(), optimizers=make).train(range(STEPS))
    guard = {**ACT, "decide": decide}
    guarded = Run(tmp_path / "run", guard, bad=bad, scaler=scaler(), optimizers=make).train(range(STEPS)).close()
    assert guarded.parameters() == alone.parameters()
    assert bits(guarded.optimizers[0].state_dict()) == bits(alone.optimizers[0].state_dict())
    assert guarded.scaler is not None
    assert alone.scaler is not None
    assert guarded.scaler.state_dict() == alone.scaler.state_dict()
    assert guarded.kinds() == []
    assert guarded.guard.step == STEPS - len(bad)


def test_norms_of_single_tensors_are_free_of_the_scale(tmp_path: Path) -> None:
    guard = {"clip": gv.guard.Clip(mode="on", method="tensor"), "skip": "off", "rollback": "off"}
    scaled, plain = (
        Run(tmp_path / name, guard, bad={25: "huge"}, scaler=one).train(range(30)).close()
        for name, one in (("scaled", scaler()), ("plain", None))
    )
    assert scaled.kinds() == plain.kinds() != []
    for one, other in zip(scaled.guard.actions, plain.guard.actions, strict=True):
        assert one.before["norm"] == pytest.approx(other.before["norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "make", "bad"),
    [
        *((name, "adamw", BAD) for name in SCHEDULERS),
        ("one_cycle", "tensor_lr", BAD),  # a rate that is a tensor is put back
        ("cosine", "adamw", {STEPS - 1: "nan"}),  # the last step of all
    ],
)
def test_a_scheduler_of_every_step_does_not_count_it(name: str, make: str, bad: dict[int, str], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"schedulers": lambda optimizers: [SCHEDULERS[name](optimizers[0])]}
    settings["optimizers"] = HOST[make]
    guarded = Run(tmp_path / "run", ACT, bad=bad, **settings).train(range(STEPS)).close()
    assert guarded.guard.step == STEPS - len(bad)
    assert guarded.all_bits() == never_had_them(bad, **settings).all_bits()


@pytest.mark.parametrize("name", ["one_cycle", "cosine"])
def test_what_the_device_skipped_is_uncounted_when_it_is_known(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "optimizers": DEVICE["adamw"],
        "schedulers": lambda optimizers: [SCHEDULERS[name](optimizers[0])],
    }
    guarded = Run(tmp_path / "run", ON_DEVICE, bad=BAD, **settings).train(range(STEPS + 12)).close()
    assert guarded.schedulers[0].last_epoch == guarded.guard.step == STEPS + 12 - len(BAD)


def test_a_scheduler_that_has_ticked_before_the_guard_was_built_is_held_at_the_first_step_too(tmp_path: Path) -> None:
    def begun(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
        scheduler = lr_scheduler.CosineAnnealingLR(optimizers[0], 40)
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 7})
        return [scheduler]

    bad = {0: "nan"}
    guarded = Run(tmp_path / "run", ACT, bad=bad, schedulers=begun).train(range(6)).close()
    assert guarded.all_bits() == Run(schedulers=begun).train(range(1, 6)).all_bits()


@pytest.mark.parametrize("bad_step", [3, 5, 12])
def test_a_scheduler_that_ticks_once_an_epoch_counts_all_epochs(bad_step: int, tmp_path: Path) -> None:
    def at_the_end_of_an_epoch(run: Run, count: int, loss: Tensor) -> None:
        if count % 6 == 5:
            run.schedulers[0].step()

    settings: dict[str, Any] = {"schedulers": lambda optimizers: [lr_scheduler.StepLR(optimizers[0], 1, 0.5)]}
    settings["tick"] = at_the_end_of_an_epoch
    guarded = Run(tmp_path / "run", ACT, bad={bad_step: "nan"}, **settings).train(range(STEPS)).close()
    assert guarded.kinds() == [("skip", bad_step)]
    assert guarded.schedulers[0].last_epoch == STEPS // 6
    assert guarded.optimizers[0].param_groups[0]["lr"] == 0.01 * 0.5 ** (STEPS // 6)


def test_each_scheduler_is_held_on_its_own(tmp_path: Path) -> None:
    def one_often_and_one_seldom(run: Run, count: int, loss: Tensor) -> None:
        often, seldom = run.schedulers
        often.step()
        if count % 4 == 3:
            seldom.step()

    settings: dict[str, Any] = {
        "optimizers": HOST["two"],
        "schedulers": lambda optimizers: [
            lr_scheduler.ExponentialLR(optimizers[0], 0.9),
            lr_scheduler.StepLR(optimizers[1], 1, 0.5),
        ],
        "tick": one_often_and_one_seldom,
    }
    guarded = Run(tmp_path / "run", ACT, bad={5: "nan"}, **settings).train(range(12)).close()
    assert [scheduler.last_epoch for scheduler in guarded.schedulers] == [11, 3]


def test_a_scheduler_made_after_the_guard_neither_warns_nor_hides_it(tmp_path: Path) -> None:
    guarded = Run(tmp_path / "run", ACT, bad={0: "nan", 4: "nan"})
    guarded.schedulers = [lr_scheduler.ConstantLR(guarded.optimizers[0], 1.0)]
    guarded.train(range(8)).close()  # warnings are errors here
    assert guarded.kinds() == [("skip", 0), ("skip", 4)]
    assert guarded.parameters() == Run().train([1, 2, 3, 5, 6, 7]).parameters()


@pytest.mark.parametrize("guard", [ACT, ON_DEVICE], ids=["host", "device"])
def test_with_micro_batches_the_whole_step_is_skipped(guard: dict[str, Any], tmp_path: Path) -> None:
    bad = {7: "nan", 77: "huge"}  # the second part of step 2, the third of step 25
    settings: dict[str, Any] = {"optimizers": DEVICE["adamw"], "parts": 3}
    guarded = Run(tmp_path / "run", guard, bad=bad, **settings).train(range(30)).close()
    assert guarded.kinds() == [("skip", 2), ("skip", 25)]
    assert guarded.all_bits() == Run(**settings).train(without(range(30), [2, 25])).all_bits()


@pytest.mark.parametrize("guard", [ACT, ON_DEVICE], ids=["host", "device"])
def test_a_gradient_that_the_loop_clips_is_no_spike(guard: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizers": DEVICE["adamw"], "clip": 0.5}
    guarded = Run(tmp_path / "run", guard, bad=BAD, **settings).train(range(STEPS)).close()
    nan = [step for step, kind in BAD.items() if kind == "nan"]
    assert guarded.kinds() == [("skip", step) for step in nan]


class Game(nn.Module):
    """Two players, each with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        self.second = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def play(game: Game, moves: list[tuple[str, int, str]], where: Path | None, **guard: Any) -> tuple[Any, Any]:
    """Each move is one player's step with one batch."""
    optimizers = {
        "first": torch.optim.Adam(game.first.parameters(), lr=0.01),
        "second": torch.optim.SGD(game.second.parameters(), lr=0.01, momentum=0.9),
    }
    schedulers = {name: lr_scheduler.ExponentialLR(optimizer, 0.95) for name, optimizer in optimizers.items()}
    monitor, guarding = None, None
    if where is not None:
        monitor = gv.watch(game, list(optimizers.values()), run=where, config=gv.Config(quiet=True))
        guarding = gv.Guard(monitor, mode="act", scheduler=list(schedulers.values()), **guard)
    for player, index, kind in moves:
        inputs, targets = batch(index, kind)
        optimizers[player].zero_grad()
        loss = (getattr(game, player)(inputs) - targets).square().mean()
        loss.backward()
        if monitor is not None:
            monitor.observe(loss)
        optimizers[player].step()
        schedulers[player].step()
    if monitor is not None:
        monitor.close()
    rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in optimizers.items()}
    state = {name: optimizer.state_dict()["state"] for name, optimizer in optimizers.items()}
    return guarding, bits({"net": game.state_dict(), "rates": rates, "state": state})


IN_TURN, TWO_TO_ONE = ["first", "second"], ["first", "first", "second"]


@pytest.mark.parametrize(
    ("pattern", "player"), [(IN_TURN, "first"), (IN_TURN, "second"), (TWO_TO_ONE, "first"), (TWO_TO_ONE, "second")]
)
def test_players_that_step_in_turn_are_guarded_one_by_one(pattern: list[str], player: str, tmp_path: Path) -> None:
    order = pattern * 6
    bad = [index for index, one in enumerate(order) if one == player][2]
    with_it = [(one, index, "nan" if index == bad else "") for index, one in enumerate(order)]
    without_it = [move for move in with_it if not move[2]]
    guard, got = play(Game(), with_it, tmp_path / "run")
    assert [action.kind for action in guard.actions] == ["skip"]
    _, expected = play(Game(), without_it, None)
    assert got == expected


def test_optimizers_that_take_a_closure_pass_unguarded(tmp_path: Path) -> None:
    def fit(guarded: bool) -> Any:
        net = nn.Linear(6, 1)
        torch.manual_seed(3)
        nn.init.normal_(net.weight)
        nn.init.zeros_(net.bias)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
        monitor = gv.watch(net, optimizer, run=tmp_path / f"{guarded}", config=gv.Config(quiet=True))
        if guarded:
            gv.Guard(monitor, mode="act")
        for index in range(6):
            inputs, targets = batch(index)

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = (net(inputs) - targets).square().mean()
                loss.backward()
                return loss

            assert float(optimizer.step(closure).detach()) > 0  # type: ignore[no-untyped-call]
        assert monitor.step == 6
        told = {"guard_error"} if guarded else set()  # once, that it does not see these steps
        assert {finding.id for finding in monitor.findings} - {"source_unavailable"} == told
        monitor.close()
        return bits(net.state_dict())

    assert fit(True) == fit(False)


def test_a_closure_of_none_is_no_closure(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ACT, bad={1: "nan"})
    before = None
    for index in range(2):
        run.backward(index)
        before = run.parameters() if index == 1 else before
        run.optimizers[0].step(None)
    assert run.parameters() == before
    run.close()


def test_it_works_around_and_inside_what_others_put_around_step(tmp_path: Path) -> None:
    calls: list[str] = []

    def wrap(optimizer: torch.optim.Optimizer, name: str) -> None:
        inner = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return inner(*args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]

    run = Run(tmp_path / "run", bad={1: "nan"})
    wrap(run.optimizers[0], "inside")
    run._guard = gv.Guard(run.monitor, mode="act")
    wrap(run.optimizers[0], "around")
    run.train(range(3))
    assert calls == ["around", "inside", "around", "around", "inside"]
    run.close()
    assert run.parameters() == Run().train([0, 2]).parameters()
    calls.clear()
    run.optimizers[0].step()
    assert calls == ["around", "inside"]


class Sometimes(Net):
    """Has a part that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 1)
        self.use = False

    def forward(self, inputs: Tensor) -> Tensor:
        result = super().forward(inputs)
        return result + self.extra(inputs) if self.use else result


def test_a_parameter_whose_first_step_is_skipped_on_the_device_has_no_momentum_yet(tmp_path: Path) -> None:
    def train(run: Run, indices: list[int]) -> Run:
        for index in indices:
            assert isinstance(run.net, Sometimes)
            run.net.use = index >= 5
            run.step(index)
        return run

    make = DEVICE["adamw"]
    guarded = train(Run(tmp_path / "run", ON_DEVICE, net=Sometimes(), optimizers=make, bad={5: "nan"}), [*range(9)])
    guarded.close()
    assert guarded.parameters() == train(Run(net=Sometimes(), optimizers=make), [0, 1, 2, 3, 4, 6, 7, 8]).parameters()


class Reassigns(Net):
    """Replaces its buffer rather than changing it."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.seen + 1
        result: Tensor = self.head(self.body(inputs))
        return result


def test_a_buffer_that_is_replaced_is_put_back_too(tmp_path: Path) -> None:
    guarded = Run(tmp_path / "run", ACT, net=Reassigns(), bad={3: "nan"}).train(range(6)).close()
    assert int(guarded.net.seen) == 5


class Rarely(Net):
    """Changes a buffer now and then, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.rare: Tensor
        self.register_buffer("rare", torch.zeros(()))
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.calls == 3:
            self.rare += inputs.sum()
        self.calls += 1
        return super().forward(inputs)


def test_a_buffer_that_first_changes_in_a_step_that_is_skipped_is_put_back(tmp_path: Path) -> None:
    guarded = Run(tmp_path / "run", ACT, net=Rarely(), bad={3: "nan"}).train(range(6)).close()
    assert float(guarded.net.rare) == 0.0


def test_random_numbers_are_not_touched(tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain = Run(bad=BAD).train(range(STEPS))
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    Run(tmp_path / "run", ACT, bad=BAD, net=Net()).train(range(STEPS)).close()
    assert plain.count == STEPS
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("decide", ["host", "device"])
def test_two_optimizers_that_are_skipped_are_one_step(decide: str, tmp_path: Path) -> None:
    def two(net: nn.Module) -> list[torch.optim.Optimizer]:
        assert isinstance(net, Net)
        return [
            torch.optim.Adam(net.body.parameters(), fused=True),
            torch.optim.Adam(net.head.parameters(), fused=True),
        ]

    guarded = Run(tmp_path / "run", {**ACT, "decide": decide}, optimizers=two, bad={5: "nan"}).train(range(12)).close()
    assert guarded.guard.step == 11
    assert guarded.parameters() == Run(optimizers=two).train(without(range(12), [5])).parameters()


def left_out_by(run: Run, indices: range) -> list[int]:
    """The steps that did not change the weights."""
    found = []
    for index in indices:
        before = run.parameters()
        run.step(index)
        if run.parameters() == before:
            found.append(index)
    return found


@pytest.mark.parametrize(("decide", "expected"), [("host", [30, 32]), ("device", [30, 32, 34, 36])])
def test_recurring_spikes_are_made_once_the_host_knows(decide: str, expected: list[int], tmp_path: Path) -> None:
    bad = {index: "huge" for index in (30, 32, 34, 36, 46, 48)}
    higher = {"rollback": "off", "clip": "off"}
    guard = {**ACT, **higher, "skip": gv.guard.Skip(first_steps=10, max_recent=2), "decide": decide}
    run = Run(tmp_path / "run", guard, optimizers=DEVICE["adamw"], bad=bad)
    assert left_out_by(run, range(60)) == expected
    run.close()


@pytest.mark.parametrize("decide", ["host", "device"])
def test_every_step_that_was_skipped_is_in_the_record(decide: str, tmp_path: Path) -> None:
    """Every second step is bad: too many of them for a cure by leaving them out."""
    bad = {index: "huge" for index in range(30, 60, 2)}
    guard = {"mode": "act", "skip": QUICK, "rollback": "off", "decide": decide}
    run = Run(tmp_path / "run", guard, optimizers=DEVICE["adamw"], bad=bad)
    found = left_out_by(run, range(65))
    run.close()
    assert [action.step for action in run.guard.actions if action.kind == "skip" and action.taken] == found
    assert run.guard.step == 65 - len(found)


def test_a_loss_too_large_for_single_precision_is_skipped_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    guard = gv.Guard(mode="act", skip=gv.guard.Skip(first_steps=5))
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True), guard=guard) as monitor:
        for step in range(30):
            inputs = torch.randn(8, 4).double() * (1e25 if step == 20 else 1.0)
            train_step(monitor, optimizer, model(inputs).square().mean())
    assert [(action.kind, action.step) for action in monitor.actions] == [("skip", 20)]
    assert model.weight.abs().max() < 10


def test_nobody_is_reported_to_leave_out_what_was_skipped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    guard = gv.Guard(mode="act", skip=gv.guard.Skip(first_steps=20))
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True), guard=guard) as monitor:
        for step in range(80):
            inputs = torch.randn(64, 4) * (1e3 if step == 50 else 1.0)
            train_step(monitor, optimizer, (model(inputs) - 1).square().mean())
    assert [(action.kind, action.step) for action in monitor.actions] == [("skip", 50)]
    fixes = {finding.id: finding.fixes[0] for finding in monitor.findings if finding.severity != "info"}
    assert fixes.keys() == {"loss_spike"}
    assert all("its step was skipped and training continues" in cure for cure in fixes.values())
