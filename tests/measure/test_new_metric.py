"""A per-tensor metric that is a multi-tensor reduction takes its rows in the table and one function."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gradvitals as gv
from gradvitals import config
from gradvitals.collect import reductions
from gradvitals.metrics import METRIC_OF, METRICS, SUMS, Metric, Sum

CASES = {
    "torch.optim": torch.optim.AdamW,
    "gradvitals": gv.optim.AdamW,
}


@pytest.fixture
def mean_size(monkeypatch: pytest.MonkeyPatch) -> str:
    """The mean absolute value of the gradient."""
    metric = Metric("mean absolute value of the gradient", ("absolute",), lambda absolute, size: absolute / size)
    monkeypatch.setitem(SUMS, "absolute", Sum(due="full", is_scaled=True))
    monkeypatch.setitem(METRICS, "grad/mean_size", metric)
    monkeypatch.setitem(METRIC_OF, "absolute", "grad/mean_size")  # made of the table on import, as are the settings
    monkeypatch.setitem(reductions.REDUCTIONS, "absolute", lambda tensors: torch._foreach_norm(list(tensors), 1.0))
    monkeypatch.setattr(config, "TENSOR_METRICS", (*config.TENSOR_METRICS, "grad/mean_size"))
    return "grad/mean_size"


@pytest.mark.parametrize("kind", CASES)
def test_it_is_read_and_finished(tmp_path: Path, mean_size: str, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    optimizer = CASES[kind](model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected = []
    settings = gv.Config(tensor_every=1, metrics=(mean_size,), worker="thread", quiet=True)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=settings) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 5)).square().mean()).backward()
            expected.append([(p.grad / 1024.0).abs().flatten() for p in model.parameters()])
            scaler.step(optimizer)
            scaler.update()
    assert not [finding for finding in monitor.findings if finding.id == "monitor_error"]
    with gv.open_run(monitor.run_path) as run:
        np.testing.assert_allclose(run.matrix(mean_size)[1], [[g.mean() for g in some] for some in expected], rtol=1e-5)
        np.testing.assert_allclose(run.series(mean_size)[1], [torch.cat(some).mean() for some in expected], rtol=1e-5)
