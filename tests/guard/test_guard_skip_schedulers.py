"""Schedulers do not count a step that was skipped, whatever they are and whenever they tick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_kinds import ACT, BAD, DEVICE, HOST, ON_DEVICE, SCHEDULERS, STEPS, never_had_them
from guarded_runs import Run
from torch import Tensor
from torch.optim import lr_scheduler


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_ticks_at_every_step_does_not_count_it(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"schedulers": lambda optimizers: [SCHEDULERS[name](optimizers[0])]}
    guarded = Run(tmp_path / "run", ACT, bad=BAD, **settings).train(range(STEPS)).close()
    assert guarded.guard.step == STEPS - len(BAD)
    assert guarded.all_bits() == never_had_them(BAD, **settings).all_bits()


@pytest.mark.parametrize("name", ["one_cycle", "cosine"])
def test_what_the_device_skipped_is_uncounted_when_it_is_known(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "optimizers": DEVICE["adamw"],
        "schedulers": lambda optimizers: [SCHEDULERS[name](optimizers[0])],
    }
    guarded = Run(tmp_path / "run", ON_DEVICE, bad=BAD, **settings).train(range(STEPS + 12)).close()
    assert guarded.schedulers[0].last_epoch == guarded.guard.step == STEPS + 12 - len(BAD)


def test_the_last_step_of_all_may_be_one_that_is_skipped(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"schedulers": lambda optimizers: [SCHEDULERS["cosine"](optimizers[0])]}
    bad = {STEPS - 1: "nan"}
    guarded = Run(tmp_path / "run", ACT, bad=bad, **settings).train(range(STEPS)).close()
    assert guarded.all_bits() == never_had_them(bad, **settings).all_bits()


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


def test_a_rate_that_is_a_tensor_is_put_back(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "optimizers": HOST["tensor_lr"],
        "schedulers": lambda optimizers: [SCHEDULERS["one_cycle"](optimizers[0])],
    }
    guarded = Run(tmp_path / "run", ACT, bad=BAD, **settings).train(range(STEPS)).close()
    assert guarded.all_bits() == never_had_them(BAD, **settings).all_bits()


def test_a_scheduler_made_after_the_guard_neither_warns_nor_hides_it(tmp_path: Path) -> None:
    guarded = Run(tmp_path / "run", ACT, bad={0: "nan", 4: "nan"})
    guarded.schedulers = [lr_scheduler.ConstantLR(guarded.optimizers[0], 1.0)]
    guarded.train(range(8)).close()  # warnings are errors here
    assert guarded.kinds() == [("skip", 0), ("skip", 4)]
    assert guarded.parameters() == Run().train([1, 2, 3, 5, 6, 7]).parameters()
