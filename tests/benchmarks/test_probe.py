from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from benchmarks import probe
from benchmarks.probe import main
from gradvitals import bench


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe.SHAPES, "mlp", lambda device: bench.mlp(device, micro_batch_size=8, width=16))
    memory = {"signal 3": 2.0, "signal 12": 2.1, "kept 3": 4.0}
    monkeypatch.setattr(probe, "_memory", lambda *_: memory)


@pytest.mark.usefixtures("small")
def test_the_command_prints_the_bars() -> None:
    args = ["--device", "cpu", "--shape", "mlp", "--batches", "3", "--rounds", "1"]
    shown = CliRunner().invoke(main, args).stdout
    for words in ("streaming pass", "the post's two functions", "memory, 12 batches", "2.10 x", "at most 1.2 x"):
        assert words in shown
    [shape] = json.loads(CliRunner().invoke(main, [*args, "--json"]).stdout)["shapes"]
    assert shape["against_kept"]["median"] < 1e-3
    assert shape["against_loop"]["method"] == "vmap"
    assert shape["against_loop"]["difference"] < 1e-5


@pytest.mark.usefixtures("small")
def test_what_is_timed_leaves_no_gradient() -> None:
    passes = probe.FusedReducer("mlp", torch.device("cpu"), 3)
    for variant in probe.VARIANTS:
        getattr(passes, variant)()
        assert all(p.grad is None for p in passes.model.parameters()), variant
