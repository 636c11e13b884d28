"""VRAdamW in two passes, and the paper's rule in place, against torch's operations."""

from __future__ import annotations

import copy
import warnings
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradvitals as gv
from gradvitals import kernels
from gradvitals.kernels import vrgd
from gradvitals.kernels.tables import Addresses, Chunks

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

SHAPES = ((40, 16), (4, 3, 3, 3), (7,), (), (24,))
NUM_PARTS = 6


def some(device: torch.device, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
    tensors[0][:3] = 0  # dead
    tensors[4][5] = 2.0  # the same in every part
    return [t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in tensors]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0, "gamma": 0.3}]


class Run:
    """Parameters and their optimizer, with the same gradients for every optimizer."""

    def __init__(self, device: torch.device, make=gv.optim.VRAdamW, dtype=torch.float32, **settings: Any) -> None:
        self.parameters = [nn.Parameter(value) for value in some(device, 0, dtype)]
        self.optimizer = make(groups(self.parameters), lr=1e-2, **settings)

    def step(self, number: int, parts: int = NUM_PARTS, without: int | None = None) -> list[torch.Tensor]:
        """One step; returns the gradients as they were before it, and leaves them as they are after it."""
        self.optimizer.zero_grad()
        first = self.parameters[0]
        for part in range(parts):
            given = some(first.device, 100 * number + part + 1, first.dtype)
            pairs = [(p, c) for i, (p, c) in enumerate(zip(self.parameters, given, strict=True)) if i != without]
            sum((p * c).sum() / parts for p, c in pairs).backward()
        before = [p.grad.clone() if p.grad is not None else None for p in self.parameters]
        self.optimizer.step()
        return before

    @property
    def values(self) -> list[torch.Tensor]:
        """Weights, moments and averages."""
        kept = [p.detach() for p in self.parameters]
        for parameter in self.parameters:
            state = self.optimizer.state.get(parameter, {})
            names = ("exp_avg", "exp_avg_sq", "factor_avg", "momentum_buffer")
            kept += [state[name] for name in names if state.get(name) is not None]
        return kept


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch):
    """Calls a function while there are no kernels."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "on_device", lambda tensor: False)
            return function()

    return call


def trained(device: torch.device, steps: int = 4, **settings: Any) -> Run:
    run = Run(device, **settings)
    for number in range(steps):
        run.step(number)
    return run


CASES = [{}, {"beta3": 0.0}, {"maximize": True}, {"gamma": 1.0}, {"moments_dtype": torch.bfloat16}]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_steps_match_torch(settings: dict, device: torch.device, by_torch) -> None:
    found = trained(device, **settings)
    assert found.optimizer.reports_vitals
    expected = by_torch(lambda: trained(device, **settings))
    assert not expected.optimizer.reports_vitals
    # An element whose accumulator is rounded to 16 bits may fall to the other side of what rounding amounts to.
    loose = {"rtol": 0.1, "atol": 2e-2} if "moments_dtype" in settings else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(found.values, expected.values, **loose)
    steps = {found.optimizer.state[p].get("factor_step") for p in found.parameters}
    assert steps == {None if settings.get("beta3") == 0 else 4}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: torch.device, by_torch) -> None:
    found = trained(device, dtype=dtype, eps=1e-4)
    assert found.optimizer.reports_vitals
    expected = by_torch(lambda: trained(device, eps=1e-4))  # in float32: torch's second moment is 0 in float16
    for one, other in zip(found.parameters, expected.parameters, strict=True):
        distance = (one.float() - other).abs()
        assert float((distance < 5e-2).float().mean()) > 0.95  # the interpreter cuts bfloat16 off


def test_gradients_stay_unchanged(device: torch.device) -> None:
    run = Run(device)
    before = run.step(0)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(run.parameters, before, strict=True))


def test_hooks_for_factors_and_vitals_change_no_bit(device: torch.device, by_torch) -> None:
    told: dict[str, list] = {"vitals": []}

    def heard(name: str) -> Run:
        run = Run(device)
        told[name] = []
        place = {id(p): number for number, p in enumerate(run.parameters)}

        def hear(parameters, factors, gamma) -> None:
            told[name].extend((place[id(p)], f.clone(), gamma) for p, f in zip(parameters, factors, strict=True))

        run.optimizer.register_factors_hook(hear)
        if name == "kernels":
            run.optimizer.register_vitals_hook(told["vitals"].append)
        for number in range(3):
            run.step(number)
        return run

    ours = heard("kernels")
    assert all(torch.equal(a, b) for a, b in zip(ours.values, trained(device, steps=3).values, strict=True))
    by_torch(lambda: heard("torch"))
    for step in range(3):
        found, expected = (
            sorted(told[name][step * len(SHAPES) : (step + 1) * len(SHAPES)], key=itemgetter(0))
            for name in ("kernels", "torch")
        )
        for one, other in zip(found, expected, strict=True):
            assert one[2] == other[2]
            torch.testing.assert_close(one[1], other[1].float(), rtol=1e-4, atol=1e-5)
            assert float(one[1].min()) >= one[2]
    assert found[4][1][5] == 1  # the same in every part: no noise
    norms = {
        id(p): float(n) for v in told["vitals"][-3:] for p, n in zip(v.parameters, v.numbers["square"], strict=True)
    }
    for parameter in ours.parameters:
        assert norms[id(parameter)] == pytest.approx(float(parameter.grad.norm()), rel=1e-5)


def test_gradients_missing_in_some_steps(device: torch.device, by_torch) -> None:
    """Their averages have their own weights."""

    def run() -> Run:
        made = Run(device)
        for number in range(5):
            made.step(number, without=number if number < 3 else None)
        return made

    found, expected = run(), by_torch(run)
    torch.testing.assert_close(found.values, expected.values, rtol=2e-5, atol=2e-6)
    steps = [found.optimizer.state[p]["factor_step"] for p in found.parameters]
    assert steps == [4, 4, 4, 5, 5]


def test_states_load_both_ways(device: torch.device, by_torch) -> None:
    def halves(first, second) -> Run:
        run = first(lambda: trained(device, steps=2))
        other = Run(device)
        with torch.no_grad():
            for mine, yours in zip(other.parameters, run.parameters, strict=True):
                mine.copy_(yours)
        other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        second(lambda: [other.step(number) for number in (2, 3)])
        return other

    def at_once(function):
        return function()

    expected = trained(device, steps=4)
    for pair in ((by_torch, at_once), (at_once, by_torch), (at_once, at_once)):
        torch.testing.assert_close(halves(*pair).values, expected.values, rtol=2e-5, atol=2e-6)


def test_steps_with_few_parts_or_other_rules(device: torch.device, by_torch) -> None:
    """One part is not scaled; clipping and another rule do not use the kernels. All in one training."""

    def run() -> Run:
        made = Run(device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few parts
            made.step(0)
            made.step(1, parts=1)
            made.step(2, parts=2)
        made.optimizer.max_norm = 0.5
        made.step(3)
        made.optimizer.max_norm = None
        made.optimizer.param_groups[0]["scale"] = "wiener"
        made.step(4)
        made.optimizer.param_groups[0]["scale"] = "paper"
        made.optimizer.param_groups[1]["beta3"] = 0.0
        made.step(5)
        return made

    torch.testing.assert_close(run().values, by_torch(run).values, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("make", [gv.optim.VRLAMB, gv.optim.VRAdam, lambda p, lr: gv.optim.VRSGD(p, lr, momentum=0.9)])
def test_other_optimizers_scale_in_place_by_kernels(make, device: torch.device, by_torch, monkeypatch) -> None:
    calls = []
    original = vrgd.scale
    monkeypatch.setattr(vrgd, "scale", lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs)))
    found = trained(device, make=make)
    assert calls
    torch.testing.assert_close(found.values, by_torch(lambda: trained(device, make=make)).values, rtol=2e-5, atol=2e-6)


def test_sums_over_many_chunks_match_float64(device: torch.device) -> None:
    sizes = (3 * vrgd.SPAN + 5, 16, vrgd.SPAN)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(size, generator=generator).to(device) for size in sizes]
    noises = [torch.randn(size, generator=generator).to(device) for size in sizes]  # half of them are none
    cut = Chunks(sizes, device, vrgd.SPAN)
    tables = [Addresses().table(tensors) for tensors in (grads, noises)]
    found = vrgd.sum_ratios(cut, *tables, dtype=torch.float32, noise_dtype=torch.float32, aligned=True).cpu()
    for column, (grad, noise) in enumerate(zip(grads, noises, strict=True)):
        ratio = (grad.double().square() / noise.double())[noise > 0]
        assert found[1, column] == len(ratio)
        torch.testing.assert_close(found[0, column], ratio.sum().cpu(), rtol=1e-5, atol=0)


class Given(nn.Module):
    """A model whose gradients are its inputs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(value) for value in some(device, 0))

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return sum((w * part).sum() for w, part in zip(self.weights, parts, strict=True))


def test_watching_changes_no_bit(device: torch.device, tmp_path: Path) -> None:
    """With a Monitor's hooks, autograd adds at the steps that it measures, and only there."""
    kept = []
    for run in (None, tmp_path / "run"):
        model = Given(device)
        optimizer = gv.optim.VRAdamW(model.parameters(), lr=1e-2)
        config = gv.Config(tensor_every=3, quiet=True)
        monitor = gv.watch(model, optimizer, run=run, config=config) if run is not None else None
        for step in range(5):
            for part in range(NUM_PARTS):
                model(some(device, 100 * step + part + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            monitor.close()
            assert not [finding for finding in monitor.findings if finding.id == "monitor_error"]
            with gv.open_run(monitor.run_path) as readings:
                assert readings.matrix("vrgd/mean")[1].shape[1] == len(SHAPES)
        kept.append([w.detach() for w in model.weights])
    assert all(torch.equal(one, other) for one, other in zip(*kept, strict=True))
