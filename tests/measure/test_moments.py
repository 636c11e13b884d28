"""GSNR from the optimizer's own moments, against `functional.adam_gsnr` on the raw state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import Data, Rig, assert_no_errors, close, finished, mlp, regression

import gradvitals as gv

KINDS = ["Adam", "AdamW", "NAdam", "RAdam"]


def make(path: Path, kind: str = "AdamW", **options: Any) -> Rig:
    torch.manual_seed(0)
    model = mlp()
    settings = {name: options.pop(name) for name in ("betas", "amsgrad") if name in options}
    return Rig(path, model, getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **settings), sizes=(4,), **options)


def raw_gsnr(rig: Rig) -> list[float]:
    group = rig.optimizer.param_groups[0]
    values = []
    for parameter in group["params"]:
        state = rig.optimizer.state[parameter]
        beta1, beta2 = group["betas"]
        t = int(state["step"])
        values.append(gv.functional.adam_gsnr(state["exp_avg"], state["exp_avg_sq"], beta1=beta1, beta2=beta2, step=t))
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_against_the_raw_state(tmp_path: Path, kind: str) -> None:
    rig = make(tmp_path, kind).steps(12)
    rig.check()  # averages over readings
    assert not [f for f in rig.monitor.findings if "moments" in f.title]


@pytest.mark.parametrize("kind", ["AdamW", "NAdam"])
def test_a_single_reading_is_adam_gsnr_itself(tmp_path: Path, kind: str) -> None:
    rig = make(tmp_path, kind, detail_every=1).steps(2)  # at the first step there is no value to average with
    with finished(rig.monitor) as run:
        step, found = run.table("gsnr", source="adam")
        assert step == 1
        for value, expected in zip(found, raw_gsnr(rig), strict=True):
            close(value, expected, 1e-4, "gsnr", atol=1e-4)
        _, below = run.table("gsnr/below_one_fraction", source="adam")
        group = rig.optimizer.param_groups[0]
        for parameter, share in zip(group["params"], below, strict=True):
            state = rig.optimizer.state[parameter]
            expected = gv.functional.adam_gsnr_below_one(
                state["exp_avg"],
                state["exp_avg_sq"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                step=int(state["step"]),
            )
            assert share == pytest.approx(expected, abs=1e-6)
        _, medians = run.table("gsnr/median", source="adam")
        for parameter, median in zip(group["params"], medians, strict=True):
            state = rig.optimizer.state[parameter]
            m, v = state["exp_avg"].double().flatten(), state["exp_avg_sq"].double().flatten()
            of_each = gv.functional.adam_gsnr_from_sums(
                m[v > 0].square().numpy(),
                v[v > 0].numpy(),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                step=int(state["step"]),
            )
            # It is found in m²/v, which the GSNR grows with: the same, but halfway between two coordinates.
            of_each = np.sort(of_each)
            middle = len(of_each) // 2
            assert of_each[(len(of_each) - 1) // 2] - 1e-6 <= median <= of_each[middle] + 1e-6


@pytest.mark.parametrize("options", [{"betas": (0.5, 0.9)}, {"amsgrad": True}])
def test_settings_of_the_optimizer(tmp_path: Path, options: dict[str, Any]) -> None:
    make(tmp_path, **options).steps(6).check()


def test_groups_with_betas_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    groups = [
        {"params": list(model[0].parameters()), "betas": (0.8, 0.99)},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    Rig(tmp_path, model, torch.optim.AdamW(groups, lr=1e-2), sizes=(4,)).steps(6).check()


def test_without_averaging_there_is_nothing_to_say(tmp_path: Path) -> None:
    rig = make(tmp_path, betas=(0.0, 0.99)).steps(4)
    with finished(rig.monitor) as run:
        assert np.isnan(run.matrix("gsnr", source="adam")[1]).all()


def test_first_step_has_no_value(tmp_path: Path) -> None:
    rig = make(tmp_path).steps(2)
    with finished(rig.monitor) as run:
        steps, values = run.series("gsnr", source="adam")
        assert np.isnan(values[steps == 0]).all()
        assert np.isfinite(values[steps == 1]).all()


@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "Adagrad"])
def test_optimizer_without_moments_is_said_once(tmp_path: Path, kind: str) -> None:
    rig = make(tmp_path, kind).steps(3)
    rig.monitor.close()
    assert_no_errors(rig.monitor)
    told = [f for f in rig.monitor.findings if f.id == "source_unavailable" and kind in f.title]
    assert [f.severity for f in told] == ["info"]
    with gv.open_run(rig.monitor.run_path) as run:
        assert "adam" not in run.sources("gsnr")
        assert [f.id for f in run.findings].count("source_unavailable") >= 1


def test_state_loaded_in_the_middle(tmp_path: Path) -> None:
    """A loop that starts from a checkpoint of 30 steps: the step count comes from the state, not from us."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Data()
    for _ in range(30):
        regression(model, data.batch(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rig = Rig(tmp_path, model, fresh, sizes=(4,), data=data)
    rig.steps(2)
    fresh.load_state_dict(state)
    rig.steps(3).check()


def test_parameters_that_began_later_have_step_counts_of_their_own(tmp_path: Path) -> None:
    rig = make(tmp_path)
    rig.model[0].requires_grad_(False)
    rig.steps(4)
    rig.model[0].requires_grad_(True)
    rig.steps(4)
    rig.check()
    with gv.open_run(rig.monitor.run_path) as run:
        began = [name.startswith("0.") for name in run.names("tensors")]
        medians = run.matrix("gsnr/median", source="adam")[1]
        assert np.isnan(medians[3]).tolist() == began
        assert np.isfinite(medians[-1]).all()


def test_a_gsnr_below_zero_for_certain_is_not_reported(tmp_path: Path) -> None:
    """A gradient that turns at every step cancels in Adam's averages more than independent samples ever would."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    config = gv.Config(quiet=True, diagnose=False, tensor_every=5, overhead_budget=1)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=config):
        for step in range(200):
            optimizer.zero_grad()
            ((-1) ** step * model(torch.ones(4, 8)).sum()).backward()
            optimizer.step()
    with gv.open_run(tmp_path / "run") as run:
        for metric in ("gsnr", "gsnr_low", "gsnr_high"):
            _, values = run.series(metric, source="adam")
            assert np.isnan(values[-10:]).all(), metric
