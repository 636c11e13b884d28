"""A Guard goes when the run does: optimizers step alone again, and nothing is kept alive."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_runs import Run, adamw, bits, without

import gradvitals as gv

ACT = {"mode": "act", "skip": gv.guard.Skip(first_steps=10)}


def fused(net: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return adamw(net, fused=True)


@pytest.mark.parametrize("decide", ["host", "device"])
def test_after_close_the_optimizer_steps_alone(decide: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {**ACT, "decide": decide}, optimizers=fused).train(range(4))
    assert "step" in vars(run.optimizers[0])
    run.close()
    assert "step" not in vars(run.optimizers[0])
    assert not hasattr(run.optimizers[0], "found_inf")
    run.bad[5] = "nan"
    run.train(range(4, 6))
    assert not bool(torch.isfinite(run.net.head.weight).all())
    assert run.guard.actions == []
    assert run.guard.step == 4


def test_closing_twice_and_the_guard_before_the_monitor(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ACT).train(range(3))
    run.guard.close()
    run.guard.close()
    assert "step" not in vars(run.optimizers[0])
    run.train(range(3, 5)).close()
    assert run.monitor.step == 5
    assert run.guard.step == 3


def test_a_step_of_ones_own_is_given_back(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    original = run.optimizers[0].step

    def own(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    run.optimizers[0].step = own  # type: ignore[method-assign]
    run._guard = gv.Guard(run.monitor, mode="act")
    run.train(range(2)).close()
    assert run.optimizers[0].step is own


@pytest.mark.parametrize("closed", [False, True])
def test_an_optimizer_under_guard_can_be_copied_and_pickled(closed: bool, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ACT).train(range(3))
    if closed:
        run.close()
    for other in (copy.deepcopy(run.optimizers[0]), pickle.loads(pickle.dumps(run.optimizers[0]))):
        assert "step" not in vars(other)
        assert bits(other.state_dict()) == bits(run.optimizers[0].state_dict())
        parameter = other.param_groups[0]["params"][0]
        parameter.grad = torch.full_like(parameter, float("nan"))
        other.step()
        assert not bool(torch.isfinite(parameter).all()), "a copy is not guarded"
    run.close()


def test_an_optimizer_loads_a_checkpoint_under_guard(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ACT).train(range(3))
    saved = copy.deepcopy((run.net.state_dict(), run.optimizers[0].state_dict()))
    run.train(range(3, 6))
    run.net.load_state_dict(saved[0])
    run.optimizers[0].load_state_dict(saved[1])
    run.bad[7] = "nan"
    run.train(range(6, 9)).close()
    assert run.parameters() == Run().train([0, 1, 2, 6, 8]).parameters()


@pytest.mark.parametrize(("close", "folder"), [(False, True), (True, False)])
def test_nothing_keeps_the_model_alive(close: bool, folder: bool, tmp_path: Path) -> None:
    def use() -> tuple[weakref.ref[Any], ...]:
        guard = {**ACT, "decide": "device", **({"folder": tmp_path / "snapshots"} if folder else {})}
        run = Run(tmp_path / "run", guard, optimizers=fused, bad={2: "nan"}).train(range(12))
        if close:
            run.close()
        return tuple(map(weakref.ref, (run.net, run.optimizers[0], run.guard, run.monitor)))

    references = use()
    deadline = time.monotonic() + 20
    while any(reference() is not None for reference in references) and time.monotonic() < deadline:
        gc.collect()  # the last steps may still be on their way to the disk, and hold their Monitor
        time.sleep(0.05)
    assert [reference() for reference in references] == [None] * 4
    assert [action.step for action in gv.open_run(tmp_path / "run").actions] == [2]


def test_a_guard_that_nobody_holds_continues_guarding(tmp_path: Path) -> None:
    """`gv.Guard(monitor, mode="act")` is one line: nobody has to keep what it returns."""
    run = Run(tmp_path / "run", bad={3: "nan"})
    gv.Guard(run.monitor, mode="act")
    gc.collect()
    run.train(range(6))
    assert [action.kind for action in run.monitor.actions] == ["skip"]
    run.close()
    assert run.parameters() == Run().train(without(range(6), [3])).parameters()


def test_a_monitor_closed_by_an_error_ends_the_guard_too(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ACT).train(range(3))
    with pytest.raises(KeyError), run.monitor:
        raise KeyError("lost")
    assert "step" not in vars(run.optimizers[0])
    run.train(range(3, 5))


def test_a_second_run_of_the_same_optimizer(tmp_path: Path) -> None:
    first = Run(tmp_path / "first", ACT).train(range(4)).close()
    monitor = gv.watch(first.net, first.optimizers, run=tmp_path / "second", config=gv.Config(quiet=True))
    guard = gv.Guard(monitor, mode="act")
    first._monitor = monitor
    first.bad[5] = "nan"
    first.train(range(4, 8))
    monitor.close()
    assert [action.step for action in guard.actions] == [1]
    assert first.parameters() == Run().train(without(range(8), [5])).parameters()
