"""gv.optim.AdamW by kernels against torch.optim.AdamW, and its vitals against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gradvitals as gv
from gradvitals import kernels
from gradvitals.kernels import adam

# The interpreter computes with numpy, which warns about results that are valid on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def weights(device: torch.device, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for shape in ((40, 16), (4, 3, 3, 3), (7,))]
    values[1] = values[1].to(memory_format=torch.channels_last)
    return [nn.Parameter(value.to(device, dtype)) for value in values]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))


def groups(parameters: list[nn.Parameter]) -> list[dict]:
    return [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0, "lr": 3e-3}]


def train(kind, device: torch.device, steps: int = 5, clip: float | None = None, dtype=torch.float32, **settings):
    parameters = weights(device, dtype)
    optimizer = kind(groups(parameters), lr=1e-2, weight_decay=0.1, **settings)
    for step in range(steps):
        give_gradients(parameters, step)
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return parameters, optimizer


def assert_equal(found, expected, **tolerance) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), **({"rtol": 2e-6, "atol": 1e-6} | tolerance))


@pytest.mark.parametrize("settings", [{}, {"maximize": True}, {"betas": (0.0, 0.9)}, {"eps": 1e-3}])
def test_steps_match_torch(settings: dict, device: torch.device) -> None:
    found, optimizer = train(gv.optim.AdamW, device, **settings)
    assert optimizer.reports_vitals
    assert_equal(found, train(torch.optim.AdamW, device, **settings)[0])


def test_many_steps_match_torch(device: torch.device) -> None:
    results = []
    steps = 1000 if device.type == "cuda" else 60  # the interpreter takes a thousand times as long
    for kind in (gv.optim.AdamW, torch.optim.AdamW):
        parameter = nn.Parameter(torch.linspace(-1, 1, 24, device=device))
        optimizer = kind([parameter], lr=1e-2)
        noise = torch.Generator().manual_seed(0)
        for _ in range(steps):
            parameter.grad = parameter.detach() ** 3 + torch.randn(24, generator=noise).to(device)
            optimizer.step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_max_norm_matches_clip_grad_norm(max_norm: float, device: torch.device) -> None:
    found, optimizer = train(gv.optim.AdamW, device, max_norm=max_norm)
    assert_equal(found, train(torch.optim.AdamW, device, clip=max_norm)[0])
    grads = [parameter.grad for parameter in found]
    torch.testing.assert_close(optimizer.total_norm, nn.utils.get_total_norm(grads))  # .grad is as it was


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan"), "1"])
def test_invalid_max_norm_raises(max_norm: object) -> None:
    with pytest.raises(ValueError, match=r"max_norm is .*; expected a norm above 0"):
        gv.optim.AdamW([nn.Parameter(torch.ones(2))], max_norm=max_norm)


def test_learning_rate_on_the_device(device: torch.device) -> None:
    kept = []
    for lr in (1e-2, torch.tensor(1e-2, device=device)):
        parameters = weights(device)
        optimizer = gv.optim.AdamW(parameters, lr=lr)
        for step in range(3):
            give_gradients(parameters, step)
            optimizer.step()
        kept.append(parameters)
    assert optimizer.reports_vitals
    assert_equal(*kept)


def test_state_dicts_load_both_ways(device: torch.device) -> None:
    for first, second in ((gv.optim.AdamW, torch.optim.AdamW), (torch.optim.AdamW, gv.optim.AdamW)):
        parameters, optimizer = train(first, device, steps=3)
        other = second(groups(parameters), lr=1e-2, weight_decay=0.1)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(3, 5):
            give_gradients(parameters, step)
            other.step()
        assert_equal(parameters, train(torch.optim.AdamW, device, steps=5)[0])


def test_parameter_without_gradient_keeps_its_step(device: torch.device) -> None:
    results = []
    for kind in (gv.optim.AdamW, torch.optim.AdamW):
        parameters, optimizer = train(kind, device, steps=2)
        for step in range(2, 5):
            give_gradients(parameters, step)
            parameters[step - 2].grad = None
            optimizer.step()
        results.append(parameters)
        assert [int(optimizer.state[p]["step"]) for p in parameters] == [4, 4, 4]
    assert_equal(*results)


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_grad_scale_is_removed_and_found_inf_skips(found: float, device: torch.device) -> None:
    parameters, optimizer = train(gv.optim.AdamW, device, steps=2, max_norm=1.0)
    expected, other = train(torch.optim.AdamW, device, steps=2, clip=1.0)
    give_gradients(parameters, 2)
    give_gradients(expected, 2)
    for parameter in parameters:
        parameter.grad.mul_(1024)
    if found:
        parameters[0].grad[0, 0] = torch.inf
    optimizer.grad_scale, optimizer.found_inf = (torch.tensor(value, device=device) for value in (1024.0, found))
    optimizer.step()
    assert optimizer.reports_vitals
    if not found:
        plain = [parameter.grad.clone() for parameter in expected]
        nn.utils.clip_grad_norm_(expected, 1.0)
        other.step()
        assert_equal([parameter.grad for parameter in parameters], plain)  # unscaled in memory, as torch's fused does
    assert_equal(parameters, expected)
    assert int(optimizer.state[parameters[0]]["step"]) == (2 if found else 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    found, optimizer = train(gv.optim.AdamW, device, steps=3, dtype=dtype)
    assert optimizer.reports_vitals
    expected = train(torch.optim.AdamW, device, steps=3)[0]  # in float32: torch's own eps is 0 in float16
    assert_equal([weight.float() for weight in found], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("by_kernels", [True, False])
def test_stochastic_rounding_keeps_small_updates(by_kernels: bool, device: torch.device) -> None:
    """Steps of 1/64 of the distance to the next number: rounding to nearest would lose them all."""
    kept = []
    for stochastic in (True, False):
        parameter = nn.Parameter(torch.ones(4096, device=device, dtype=torch.bfloat16))
        settings = {"foreach": None if by_kernels else False, "stochastic_rounding": stochastic}
        optimizer = gv.optim.AdamW([parameter], lr=2**-14, weight_decay=0.0, **settings)
        for _ in range(8):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert optimizer.reports_vitals == by_kernels
        kept.append(parameter.detach().float())
    if not by_kernels or device.type == "cuda":  # the interpreter truncates instead of rounding to nearest
        assert torch.equal(kept[1], torch.ones_like(kept[1]))
    assert (1 - kept[0]).mean().item() == pytest.approx(8 * 2**-14, rel=0.35)
    assert set(kept[0].unique().tolist()) <= {1 - n * 2**-8 for n in range(4)}


def test_vitals_match_float64(device: torch.device) -> None:
    parameters = weights(device)
    optimizer = gv.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, max_norm=3.0)
    told: list = []
    optimizer.register_vitals_hook(told.append, slices={parameters[0]: 4})
    for step in range(3):
        give_gradients(parameters, step)
        before = [p.detach().double() for p in parameters]
        momentum = [
            optimizer.state[p]["exp_avg"].double() if step else torch.zeros_like(p).double() for p in parameters
        ]
        optimizer.step()
    (vitals,) = told[2:]
    after = [p.detach().double() for p in parameters]
    grads = [p.grad.double() for p in parameters]
    first = [optimizer.state[p]["exp_avg"].double() for p in parameters]
    second = [optimizer.state[p]["exp_avg_sq"].double() for p in parameters]
    below = [
        round(gv.functional.adam_gsnr_below_one(m, v, beta1=0.9, beta2=0.999, step=3) * m.numel())
        for m, v in zip(first, second, strict=True)
    ]
    expected = {
        "square": [g.norm() for g in grads],
        "largest": [g.abs().max() for g in grads],
        "nonzero": [g.numel() for g in grads],
        "nonfinite": [0, 0, 0],
        "along_weight": [(g * w).sum() for g, w in zip(grads, before, strict=True)],
        "along_momentum": [(g * m).sum() for g, m in zip(grads, momentum, strict=True)],
        "momentum_before": [m.square().sum() for m in momentum],
        "weight_before": [w.norm() for w in before],
        "weight": [w.norm() for w in after],
        "update": [(a - b).square().sum() for a, b in zip(after, before, strict=True)],
        "first": [m.norm() for m in first],
        "second": [v.sum() for v in second],
        "alive": [v.numel() for v in second],
        "below_one": below,
        "step": [3, 3, 3],
    }
    assert vitals.numbers.keys() == expected.keys()
    for name, values in expected.items():
        wanted = torch.tensor([float(value) for value in values], dtype=torch.float64)
        torch.testing.assert_close(
            vitals.numbers[name].cpu(), wanted, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m
        )
    norms = parameters[0].grad.reshape(4, -1).norm(dim=1)
    torch.testing.assert_close(vitals.slices[parameters[0]].float(), norms)
    assert vitals.max_norm == 3.0


def test_vitals_hooks_change_no_bit(device: torch.device) -> None:
    plain, _ = train(gv.optim.AdamW, device, max_norm=1.0)
    parameters = weights(device)
    optimizer = gv.optim.AdamW(groups(parameters), lr=1e-2, weight_decay=0.1, max_norm=1.0)
    optimizer.register_vitals_hook(lambda vitals: None)
    for step in range(5):
        give_gradients(parameters, step)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain, parameters, strict=True))


@pytest.mark.parametrize("settings", [{"amsgrad": True}, {"foreach": True}, {"foreach": False}])
def test_torch_steps_if_kernels_cannot(settings: dict, device: torch.device) -> None:
    found, optimizer = train(gv.optim.AdamW, device, max_norm=1.0, **settings)
    assert not optimizer.reports_vitals
    assert_equal(found, train(torch.optim.AdamW, device, clip=1.0, **settings)[0])


@pytest.mark.parametrize("part", ["prepare", "update"])
def test_failed_kernels_fall_back_to_torchs_step(
    part: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(adam, part, fail)
    with pytest.warns(UserWarning, match="no compiler"):
        found, optimizer = train(gv.optim.AdamW, device)
    kernels._State.broken.clear()
    assert not optimizer.reports_vitals
    assert_equal(found, train(torch.optim.AdamW, device)[0])


def test_torch_compile_does_not_compile_the_step(device: torch.device) -> None:
    parameters, optimizer = train(gv.optim.AdamW, device, steps=2, max_norm=1.0)
    give_gradients(parameters, 2)
    torch.compile(optimizer.step, backend="eager")()
    assert optimizer.reports_vitals
    assert_equal(parameters, train(torch.optim.AdamW, device, steps=3, clip=1.0)[0])
