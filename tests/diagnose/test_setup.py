"""Rules about data, model and loss, on real models: what an inspected batch shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradvitals as gv
from gradvitals.config import Config

Loss = Callable[[Tensor, Tensor], Tensor]


def verdict_of(path: Path, model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> gv.Verdict:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = Config(worker="thread", quiet=True)
    with gv.watch(model, optimizer, run=path, config=config) as monitor:
        for _ in range(16):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    with gv.open_run(monitor.run_path) as run:
        return run.verdict


def net(outputs: int, *last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs), *last)


X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
LABELS = (X[:, 0] > 0).long()
NUMBERS = X[:, :1] - X[:, 1:2]


@pytest.mark.parametrize(
    ("model", "loss_fn", "x", "y", "finding", "said"),
    [
        (net(2, nn.Softmax(1)), functional.cross_entropy, X, LABELS, "loss_mismatch", "softmax"),
        (net(1, nn.Softmax(1)), functional.mse_loss, X, NUMBERS, "loss_mismatch", "single output"),
        (net(1, nn.Sigmoid()), functional.mse_loss, X, 5 * NUMBERS, "loss_mismatch", "cannot reach"),
        (net(1), lambda p, y: (p - y[:, 0]).square().mean(), X, NUMBERS, "loss_mismatch", "broadcast"),
        (net(2), functional.cross_entropy, 100 * X, LABELS, "unscaled_data", "not standardized"),
        (
            net(2),
            functional.cross_entropy,
            X / torch.tensor([1.0, 1, 1, 0]),
            LABELS,
            "bad_inputs",
            "standard deviation",
        ),
        (
            nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)),
            functional.cross_entropy,
            X,
            LABELS,
            "no_nonlinearity",
            "linear",
        ),
        (net(2, nn.Dropout(0.9)), functional.cross_entropy, X, LABELS, "layer_modes", "Dropout"),
    ],
)
def test_the_verdict_leads_with_what_is_wrong_with_the_setup(
    tmp_path: Path, model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, finding: str, said: str
) -> None:
    verdict = verdict_of(tmp_path / "run", model, loss_fn, x, y)
    assert verdict.worst is not None
    assert verdict.worst.finding.id == finding
    assert said in (verdict.cause or "")
    assert verdict.fix is not None
    assert verdict.fix.text


@pytest.mark.parametrize(
    ("model", "loss_fn", "y"),
    [
        (net(2), functional.cross_entropy, LABELS),
        (net(2, nn.LogSoftmax(1)), functional.nll_loss, LABELS),
        (net(1, nn.Sigmoid()), functional.binary_cross_entropy, LABELS.float()[:, None]),
        (net(1), functional.mse_loss, NUMBERS),
    ],
)
def test_a_setup_that_fits_is_healthy(tmp_path: Path, model: nn.Module, loss_fn: Loss, y: Tensor) -> None:
    assert verdict_of(tmp_path / "run", model, loss_fn, X, y).level == "healthy"


def test_dead_units_stay_a_finding_until_they_are_seen_alive(tmp_path: Path) -> None:
    """Activations are read at few steps; between them, and when the run ends, what was found still holds."""
    model = net(2)
    with torch.no_grad():
        model[0].bias.fill_(-50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=Config(worker="thread", quiet=True)) as monitor:
        for step in range(410):
            if step == 220:
                with torch.no_grad():
                    model[0].bias.zero_()
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(X), LABELS)
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
            if step == 199:
                before = monitor.verdict
    with gv.open_run(monitor.run_path) as run:
        (found,) = (finding for finding in run.findings if finding.id == "dead_units")
    assert before.worst is not None
    assert before.worst.finding.id == "dead_units"
    assert found.last_step is not None
