"""Whatever is wrong with the arguments is said when the Guard is built, and nothing is changed then."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_runs import Run, train_step

import gradvitals as gv
from gradvitals.errors import ConfigError, GradvitalsError
from gradvitals.guard.policy import Clip, Response, RollBack, Skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "on"}, "mode is 'on'; expected 'observe' or 'act'"),
        ({"mode": None}, "mode is None; expected 'observe' or 'act'"),
        ({"decide": "gpu"}, "decide is 'gpu'; expected 'auto', 'host' or 'device'"),
        ({"skip": "maybe"}, "mode of Skip is 'maybe'; expected one of 'on', 'off', 'dry_run'"),
        ({"clip": 1.0}, "clip is 1.0; expected 'on', 'off', 'dry_run' or a gradvitals.guard.Clip"),
        ({"skip": gv.guard.RollBack()}, "skip is RollBack"),
        ({"rollback": True}, "rollback is True; expected"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        gv.Guard(**settings)


def test_a_monitor_is_what_watch_returns() -> None:
    with pytest.raises(TypeError, match=r"Guard got a Linear as monitor; expected what gradvitals\.watch returns"):
        gv.Guard(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_the_device_decides_only_for_optimizers_that_support_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    original = run.optimizers[0].step
    with pytest.raises(
        ConfigError, match="decide is 'device' with AdamW; expected torch's own optimizers, with fused=True"
    ):
        gv.Guard(run.monitor, decide="device")
    assert run.optimizers[0].step == original
    assert "step" not in vars(run.optimizers[0])
    run.close()


def test_a_guard_guards_one_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"mode": "act"})
    other = Run(tmp_path / "other")
    with pytest.raises(GradvitalsError, match="this Guard guards a run already; make another one for another run"):
        run.guard.attach(other.monitor)
    with pytest.raises(GradvitalsError, match="this Guard guards a run already"):
        run.guard.attach(run.monitor)
    run.close()
    other.close()


def test_an_optimizer_has_one_guard(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"mode": "act"})
    with pytest.raises(GradvitalsError, match="this optimizer has a Guard already"):
        gv.Guard(run.monitor, mode="act")
    run.close()


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    run = Run(tmp_path / "run")
    with pytest.raises((ConfigError, GradvitalsError, OSError), match="file"):
        gv.Guard(run.monitor, mode="act", folder=tmp_path / "file")
    assert "step" not in vars(run.optimizers[0])
    run.train(range(2)).close()


@pytest.mark.parametrize("rollback", ["on", "off"])
@pytest.mark.parametrize("settings", [{"scheduler": "cosine"}, {"scheduler": [3]}, {"scaler": 3}])
def test_schedulers_and_scalers_that_are_none(settings: dict[str, Any], rollback: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises((TypeError, ValueError, GradvitalsError), match="expected"):
        gv.Guard(run.monitor, mode="act", rollback=rollback, **settings)  # type: ignore[arg-type]
    run.close()


@pytest.mark.parametrize("data", [3, (1, 2), (len,), object()])
def test_a_data_position_that_is_none(data: Any, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises((TypeError, ValueError, GradvitalsError), match="expected"):
        gv.Guard(run.monitor, mode="act", data=data, folder=tmp_path / "snapshots")
    run.close()


def test_a_guard_that_is_given_to_watch(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = gv.Guard(mode="act")
    assert (guard.step, guard.actions) == (0, [])
    with gv.watch(net, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True), guard=guard) as monitor:
        for value in (1.0, float("nan"), 1.0):
            train_step(monitor, optimizer, net(torch.full((4, 2), value)).square().mean())
    assert (guard.step, [(action.kind, action.step) for action in guard.actions]) == (2, [("skip", 1)])


def test_watch_with_a_guard_that_cannot_leaves_nothing_behind(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ConfigError):
        gv.watch(net, optimizer, run=tmp_path / "run", guard=gv.Guard(decide="device"))
    assert "step" not in vars(optimizer)


def test_what_snapshots_cannot_restore_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "run", config=gv.Config(diagnose=False))
    guard = gv.Guard(run.monitor, mode="act", folder=tmp_path / "snapshots")
    run.train(range(3)).close()
    assert capsys.readouterr().err.count("gradvitals: snapshots cannot restore") == 1
    assert guard.actions == []


WRONG: dict[type[Response], dict[str, list[Any]]] = {
    Clip: {
        "mode": ["maybe"], "method": ["median"], "quantile": [1.0, math.nan, "0.9"], "window": [19, 20.0],
        "z_threshold": [-1], "tensor_ratio": [math.nan], "first_steps": [1],
    },
    Skip: {
        "mode": [True], "ratio": [1, math.inf, True], "max_streak": [0, 2.0], "max_recent": [0], "give_up": ["soon"],
        "first_steps": [0],
    },
    RollBack: {
        "budget": [-1], "lr_jump": [1], "moved": [math.nan], "grown": ["10"], "every": [0], "settle": [-1], "keep": [0],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("response", "name", "value"),
    [(kind, name, value) for kind, wrong in WRONG.items() for name, values in wrong.items() for value in values],
)
def test_what_each_response_has_is_checked(response: type[Response], name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} of {response.__name__} is .*; expected "):
        response(**{name: value})
