"""Errors of our own become one finding; what they concern stops, the rest and the training go on."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import Data, mlp, regression
from torch import nn

import gradvitals as gv
from gradvitals.collect import microbatch, moments, reductions, transfer, updates, window
from gradvitals.worker import aggregate as aggregation
from gradvitals.worker import worker as working

CONFIG = gv.Config(tensor_every=1, quiet=True, window_steps=20, window_tensors=("0.weight",))


def train(path: Path, *, steps: int = 6, config: gv.Config = CONFIG) -> tuple[gv.Monitor, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = gv.watch(model, optimizer, run=path, config=config, batch_size=8)
    data = Data()
    for _ in range(steps):
        for batch in data.batches((4, 4)):
            (regression(model, batch) / 2).backward()
        monitor.observe(1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    return monitor, [p.detach().clone() for p in model.parameters()]


def bomb(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted")


GRAD = {"grad/norm", "grad/max", "grad/zero_fraction", "grad/nonfinite", "grad/spike_ratio"}
WEIGHT = {"weight/norm", "update/norm", "update/ratio"}

PLANTS: dict[str, tuple[object, str, set[str], set[str]]] = {
    # where the error is planted, and the metrics and sources that must still be there after it
    "zero fraction": (
        reductions.REDUCTIONS,
        "nonzero",
        (GRAD - {"grad/zero_fraction"}) | WEIGHT,
        {"microbatch", "adam"},
    ),
    "window": (window.SlidingWindow, "push", GRAD | WEIGHT, {"microbatch", "adam"}),
    "moments": (moments.MomentSums, "add", GRAD | WEIGHT, {"microbatch"}),
    "update before": (updates.Changes, "before_step", GRAD, {"microbatch", "adam"}),
    "micro-batch hook": (microbatch.MicrobatchSums, "_incoming", GRAD | WEIGHT, {"adam"}),
    "micro-batch end": (microbatch.MicrobatchSums, "finish", GRAD | WEIGHT, {"adam"}),
    "interpreting micro-batches": (aggregation.Aggregator, "_from_parts", GRAD | WEIGHT, {"adam"}),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_an_error_ends_its_own_part_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, name, metrics, sources = PLANTS[plant]
    _, bare = train(tmp_path / "bare")
    (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, name, bomb)
    monitor, parameters = train(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(bare, parameters, strict=True))
    errors = [f for f in monitor.findings if f.id in ("monitor_error", "store_error")]
    assert [f.id for f in errors] == ["monitor_error"]
    assert "planted" in errors[0].title
    with gv.open_run(monitor.run_path) as run:
        assert [f.id for f in run.findings].count("monitor_error") == 1
        assert run.series("grad/norm")[0].tolist() == list(range(6))
        assert metrics <= set(run.metrics())
        for metric in metrics:
            assert run.series(metric)[0][-1] == 5, metric
        assert sources <= set(run.sources("gsnr"))
    assert capsys.readouterr().err == ""


def test_an_error_in_the_middle_leaves_what_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"count": 0}
    original = moments.MomentSums.add

    def later(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls["count"] += 1
        if calls["count"] == 4:
            raise RuntimeError("planted")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(moments.MomentSums, "add", later)
    monitor, _ = train(tmp_path / "run")
    assert calls["count"] == 4
    with gv.open_run(monitor.run_path) as run:
        assert run.series("gsnr", source="adam")[0].tolist() == [0, 1, 2]
        assert run.series("gsnr", source="microbatch")[0].tolist() == list(range(6))


def test_error_is_printed_unless_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(moments.MomentSums, "add", bomb)
    train(tmp_path / "run", config=gv.Config(tensor_every=1))
    assert capsys.readouterr().err.count("planted") == 1


# -- the disk -------------------------------------------------------------------------------------------------------


def _store_errors(monitor: gv.Monitor) -> list[gv.Finding]:
    return [f for f in monitor.findings if f.id == "store_error"]


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    _, bare = train(tmp_path / "bare")
    monitor, parameters = train(tmp_path / "file" / "run")
    assert all(torch.equal(a, b) for a, b in zip(bare, parameters, strict=True))
    assert len(_store_errors(monitor)) == 1
    assert not [f for f in monitor.findings if f.id == "monitor_error"]
    assert monitor.latest["grad/norm"] > 0


@pytest.mark.parametrize("method", ["commit", "write"])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(working.RunWriter, method, full)
    monitor, _ = train(tmp_path / "run")
    assert len(_store_errors(monitor)) == 1
    assert "full" in _store_errors(monitor)[0].title
    assert monitor.step == 6


def test_disk_that_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = working.RunWriter.commit, {"count": 0}

    def at_first_full(self: Any) -> None:
        calls["count"] += 1
        if calls["count"] == 1:
            raise sqlite3.OperationalError("database or disk is full")
        original(self)

    monkeypatch.setattr(working.RunWriter, "commit", at_first_full)
    monitor, _ = train(tmp_path / "run")
    with gv.open_run(monitor.run_path) as run:
        assert run.series("grad/norm")[0].tolist() == list(range(6))


def test_state_dict_does_not_wait_for_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(working.RunWriter, "commit", full)
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=CONFIG) as monitor:
        regression(model, Data().batch(4)).backward()
        optimizer.step()
        monitor.flush(1.0)  # by now the disk is known to be full
        started = time.monotonic()
        assert monitor.state_dict()["recorder"]["step"] == 1
        assert time.monotonic() - started < 5


# -- arguments ------------------------------------------------------------------------------------------------------


def _good() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


BAD: dict[str, tuple[Callable[[nn.Module, Any, Path], Any], type[Exception], str]] = {
    "model": (lambda m, o, p: gv.watch("model", o, run=p), TypeError, "torch.nn.Module"),
    "parameters as model": (lambda m, o, p: gv.watch(list(m.parameters()), o, run=p), TypeError, "torch.nn.Module"),
    "optimizer": (lambda m, o, p: gv.watch(m, "adam", run=p), TypeError, "torch.optim.Optimizer"),
    "swapped": (lambda m, o, p: gv.watch(o, m, run=p), TypeError, "optimizer first"),
    "list": (lambda m, o, p: gv.watch(m, [o, None], run=p), TypeError, "torch.optim.Optimizer"),
    "no optimizer": (lambda m, o, p: gv.watch(m, [], run=p), ValueError, "empty"),
    "batch size 0": (lambda m, o, p: gv.watch(m, o, run=p, batch_size=0), ValueError, "batch_size"),
    "batch size nan": (lambda m, o, p: gv.watch(m, o, run=p, batch_size=float("nan")), ValueError, "batch_size"),
    "batch size text": (lambda m, o, p: gv.watch(m, o, run=p, batch_size="8"), (TypeError, ValueError), "batch_size"),
    "config": (lambda m, o, p: gv.watch(m, o, run=p, config={"tensor_every": 1}), TypeError, "Config"),
    "empty config": (lambda m, o, p: gv.watch(m, o, run=p, config={}), TypeError, "Config"),
    "run": (lambda m, o, p: gv.watch(m, o, run=3), TypeError, "run|[Pp]ath"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments(tmp_path: Path, bad: str) -> None:
    call, kind, words = BAD[bad]
    model, optimizer = _good()
    with pytest.raises(kind, match=words):
        call(model, optimizer, tmp_path / "run").close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(p._backward_hooks for p in model.parameters())


# -- the folder -----------------------------------------------------------------------------------------------------


def test_name_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for _ in range(3):
        model, optimizer = _good()
        with gv.watch(model, optimizer, run=tmp_path / "gpt") as monitor:
            regression(model, Data().batch(4)).backward()
            optimizer.step()
        paths.append(monitor.run_path.name)
    assert paths == ["gpt", "gpt-2", "gpt-3"]
    assert "gpt-2" in capsys.readouterr().err


def test_no_step_leaves_no_folder(tmp_path: Path) -> None:
    model, optimizer = _good()
    with gv.watch(model, optimizer, run=tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = _good()
    with gv.watch(model, optimizer) as monitor:
        regression(model, Data().batch(4)).backward()
        optimizer.step()
    assert monitor.run_path.parent == Path("gradvitals_runs")
    with gv.open_run(monitor.run_path) as run:
        assert run.last_step == 0


def test_latest_and_repr(tmp_path: Path) -> None:
    monitor, _ = train(tmp_path / "run")
    assert {"loss", "lr", "grad/norm", "gsnr"} <= set(monitor.latest)
    assert monitor.latest["loss"] == 1.0
    assert "step=6" in repr(monitor)
    assert monitor.flush()


def test_repr_does_not_count_what_gradvitals_reports_about_itself(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # no moments, so no GSNR from them
    monitor = gv.watch(model, optimizer, run=tmp_path / "run")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    assert monitor.flush()
    assert "source_unavailable" in {finding.id for finding in monitor.findings}
    assert "findings=0" in repr(monitor)


def test_when_no_step_can_end_everything_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error where steps are sent off must not leave hooks that collect for ever.

    Hooks of an optimizer stay until the end: taken away while it calls them, they would end its step with an error.
    """
    monkeypatch.setattr(transfer.Transfer, "add", bomb)
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = gv.watch(model, optimizer, run=tmp_path / "run", config=CONFIG)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    for batch in Data().batches((4, 4, 4)):
        loss = regression(model, batch)
        loss.backward()
        monitor.observe(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert called == 3 * ["before", "after"]
    assert [finding.id for finding in monitor.findings] == ["monitor_error"]
    assert all(not p._backward_hooks for p in model.parameters())
    monitor.close()
    assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1


def test_observing_what_is_no_loss_is_told_once_and_later_losses_are_heard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = Data()
    with gv.watch(model, optimizer, run=tmp_path, config=gv.Config(tensor_every=1)) as monitor:
        for step in range(8):
            loss = regression(model, data.batch(4))
            loss.backward()
            monitor.observe("x" if step < 3 else loss.item(), batch_size="4" if step == 3 else 4)  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
    told = capsys.readouterr().err
    assert told.count("observe got a str as loss; expected a tensor or a number: pass the loss itself") == 1
    assert told.count("observe got a str as batch_size; expected the number of samples") == 1
    assert [finding.id for finding in monitor.findings if finding.severity != "info"] == ["observe_ignored"] * 2
    with gv.open_run(tmp_path) as run:
        assert run.series("loss")[0].tolist() == [4, 5, 6, 7]
        assert run.series("grad/norm")[0].tolist() == list(range(8))


def test_an_array_of_losses_is_told_and_left_aside(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with gv.watch(model, optimizer, run=tmp_path, config=CONFIG) as monitor:
        for given in (1.0, np.array([1.0, 2.0]), 3.0):
            regression(model, Data().batch(4)).backward()
            monitor.observe(given)  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
    [told] = [finding for finding in monitor.findings if finding.id == "observe_ignored"]
    assert "a ndarray as loss that is not one number" in told.title
    with gv.open_run(tmp_path) as run:
        assert run.series("loss")[0].tolist() == [0, 2]


@pytest.mark.parametrize("given", [None, 1, 0.5, True, np.float32(0.5), torch.tensor(0.5), torch.ones(3)])
def test_every_kind_of_number_is_a_loss(tmp_path: Path, given: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with gv.watch(model, optimizer, run=tmp_path, config=CONFIG) as monitor:
        regression(model, Data().batch(4)).backward()
        monitor.observe(given, batch_size=np.int64(4))
        optimizer.step()
    assert [finding.id for finding in monitor.findings if finding.severity != "info"] == []
    with gv.open_run(monitor.run_path) as run:
        assert run.series("grad/norm")[0].tolist() == [0]
