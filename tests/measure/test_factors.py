"""What a variance-reduced optimizer multiplies gradients by, as a run keeps it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import gradvitals as gv
from gradvitals.cli import main
from gradvitals.functional import vrgd_scale

NUM_PARTS = 8


class Lines(nn.Module):
    """A model whose gradient is whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(6, 5))
        self.narrow = nn.Parameter(torch.zeros(7))

    def forward(self, parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (self.wide * parts[0]).sum() + (self.narrow * parts[1]).sum()


def train(run: Path, optimizer_of, config: gv.Config, num_steps: int = 3):
    """Returns the monitor and, for each step, the factors of each tensor by the paper's formula."""
    model = Lines()
    optimizer = optimizer_of(model)
    generator = torch.Generator().manual_seed(0)
    expected = []
    with gv.watch(model, optimizer, run=run, config=config) as monitor:
        for _ in range(num_steps):
            parts = [torch.randn(NUM_PARTS, *p.shape, generator=generator) + 0.3 for p in model.parameters()]
            for wide, narrow in zip(*parts, strict=True):
                model((wide, narrow)).backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append([vrgd_scale(part.mean(0), part.square().mean(0)) for part in parts])
    return monitor, expected


CASES = {
    "VRSGD": lambda model: gv.optim.VRSGD(model.parameters(), lr=0.1),
    "VRAdamW": lambda model: gv.optim.VRAdamW(model.parameters(), lr=0.1),
    "wrapper": lambda model: gv.optim.VRGD(torch.optim.RMSprop(model.parameters(), lr=0.1)),
    "one by one": lambda model: gv.optim.VRSGD(model.parameters(), lr=0.1, foreach=False),
}


@pytest.mark.parametrize("name", CASES)
def test_factors_are_kept_for_every_tensor(name: str, tmp_path: Path) -> None:
    config = gv.Config(tensor_every=1, quiet=True)
    monitor, expected = train(tmp_path / "run", CASES[name], config)
    assert not [finding for finding in monitor.findings if finding.id == "monitor_error"]
    measures = {
        "vrgd/mean": lambda factor: factor.mean(),
        "vrgd/at_gamma": lambda factor: (factor <= 0.1).float().mean(),
        "vrgd/at_one": lambda factor: (factor == 1).float().mean(),
    }
    with gv.open_run(monitor.run_path) as run:
        for metric, measure in measures.items():
            steps, values = run.matrix(metric)
            assert steps.tolist() == [0, 1, 2]
            wanted = [[float(measure(factor)) for factor in factors] for factors in expected]
            np.testing.assert_allclose(values, wanted, rtol=1e-5)
            whole = [float(measure(torch.cat([factor.flatten() for factor in factors]))) for factors in expected]
            np.testing.assert_allclose(run.series(metric)[1], whole, rtol=1e-5)


def test_a_report_shows_them(tmp_path: Path) -> None:
    monitor, _ = train(tmp_path / "run", CASES["VRSGD"], gv.Config(tensor_every=1, quiet=True))
    shown = CliRunner().invoke(main, ["report", str(monitor.run_path)]).output
    with gv.open_run(monitor.run_path) as run:
        latest = run.series("vrgd/mean")[1][-1]
    (line,) = (line for line in shown.splitlines() if line.startswith("VRGD factor"))
    assert float(line.split()[2]) == pytest.approx(latest, rel=0.01)


def test_other_optimizers_have_no_factors(tmp_path: Path) -> None:
    monitor, _ = train(tmp_path / "run", lambda model: torch.optim.SGD(model.parameters(), lr=0.1), gv.Config())
    with gv.open_run(monitor.run_path) as run:
        assert not [metric for metric in run.metrics() if metric.startswith("vrgd")]


@pytest.mark.parametrize("name", CASES)
def test_watching_does_not_change_training(name: str, tmp_path: Path) -> None:
    weights = []
    for watched in (True, False):
        model = Lines()
        optimizer = CASES[name](model)
        generator = torch.Generator().manual_seed(0)
        monitor = (
            gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=1)) if watched else None
        )
        for _ in range(3):
            for _ in range(NUM_PARTS):
                model(tuple(torch.randn(p.shape, generator=generator) for p in model.parameters())).backward()
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            monitor.close()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_hook_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    heard = []

    def listened(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = gv.optim.VRSGD(model.parameters(), lr=0.1)
        optimizer.register_factors_hook(lambda parameters, factors, gamma: heard.append(gamma))
        return optimizer

    train(tmp_path / "run", listened, gv.Config(tensor_every=1, quiet=True), 3)
    assert heard == [0.1] * 3


def test_scaled_moments_are_no_source_of_gsnr(tmp_path: Path) -> None:
    """Adam's averages of gradients that were scaled element by element say nothing about the gradient."""
    for name, sources in (("VRAdamW", ["microbatch"]), ("AdamW", ["adam", "microbatch"])):
        module = gv.optim if name == "VRAdamW" else torch.optim
        make = getattr(module, name)
        config = gv.Config(tensor_every=1, quiet=True)
        monitor, _ = train(tmp_path / name, lambda model, make=make: make(model.parameters(), lr=0.1), config, 6)
        with gv.open_run(monitor.run_path) as run:
            assert sorted(run.sources("gsnr")) == sources
