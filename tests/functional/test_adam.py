"""GSNR from Adam's moments: the table of expected values, the floor of the proxy, and edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradvitals.functional import adam_gsnr, adam_gsnr_below_one, adam_gsnr_from_sums


def adam_state(r, beta1, beta2, steps, size, seed=0):
    rng = np.random.default_rng(seed)
    m, v = np.zeros(size), np.zeros(size)
    for _ in range(steps):
        g = math.sqrt(r) + rng.standard_normal(size)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
    return torch.from_numpy(m), torch.from_numpy(v)


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.95), (0.95, 0.95), (0.8, 0.99)])
@pytest.mark.parametrize("r", [0.0, 0.1, 1.0])
def test_debiased_value_and_proxy_have_their_closed_forms(r, beta1, beta2):
    steps = int(5 / (1 - beta2))
    m, v = adam_state(r, beta1, beta2, steps, 20_000)
    betas = {"beta1": beta1, "beta2": beta2, "step": steps}
    c1 = (1 - beta1) / (1 + beta1)
    assert adam_gsnr(m, v, **betas) == pytest.approx(r, rel=0.03, abs=0.003)
    assert adam_gsnr(m, v, **betas, debias=False) == pytest.approx((r + c1) / (1 - c1), rel=0.03)


@pytest.mark.parametrize(("beta1", "floor"), [(0.9, 0.0556), (0.95, 0.0263), (0.8, 0.125)])
def test_pure_noise_has_the_floor_of_the_proxy(beta1, floor):
    m, v = adam_state(0.0, beta1, 0.99, 600, 20_000)
    assert adam_gsnr(m, v, beta1=beta1, beta2=0.99, step=600, debias=False) == pytest.approx(floor, rel=0.03)
    assert adam_gsnr(m, v, beta1=beta1, beta2=0.99, step=600) == pytest.approx(0, abs=0.003)


@pytest.mark.parametrize("step", [2, 3, 5, 20])
def test_debiasing_holds_from_the_second_step(step):
    m, v = adam_state(0.5, 0.9, 0.999, step, 200_000)
    assert adam_gsnr(m, v, beta1=0.9, beta2=0.999, step=step) == pytest.approx(0.5, rel=0.04)


def test_sums_are_the_same_and_go_elementwise():
    m, v = adam_state(0.3, 0.9, 0.99, 50, 1000)
    sums = m.square().sum().item(), v.sum().item()
    one = adam_gsnr(m, v, beta1=0.9, beta2=0.99, step=50)
    assert float(adam_gsnr_from_sums(*sums, beta1=0.9, beta2=0.99, step=50)) == pytest.approx(one, rel=1e-12)
    many = adam_gsnr_from_sums(
        [sums[0], sums[0], 0.0, 4.0, math.nan],
        [sums[1], sums[1], 0.0, 1.0, 1.0],
        beta1=0.9,
        beta2=0.99,
        step=np.array([50, 1, 50, 5000, 50]),
    )
    np.testing.assert_allclose(many, [one, math.nan, math.nan, math.inf, math.nan], rtol=1e-12)


def test_real_optimizer_state_in_any_precision():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(4000))
    optimizer = torch.optim.Adam([weight], lr=0.0, betas=(0.9, 0.99))
    for _ in range(300):
        weight.grad = 0.5 + torch.randn(4000)
        optimizer.step()
    state = optimizer.state[weight]
    settings = {"beta1": 0.9, "beta2": 0.99, "step": int(state["step"])}
    value = adam_gsnr(state["exp_avg"], state["exp_avg_sq"], **settings)
    assert value == pytest.approx(0.25, rel=0.05)
    assert adam_gsnr(state["exp_avg"].bfloat16(), state["exp_avg_sq"].bfloat16(), **settings) == pytest.approx(
        value, rel=0.05
    )
    tiny = adam_gsnr(state["exp_avg"] * 1e-15, state["exp_avg_sq"] * 1e-30, **settings)
    assert tiny == pytest.approx(value, rel=1e-4)


def test_share_below_one():
    for r, expected in ((0.0, 1.0), (100.0, 0.0)):
        m, v = adam_state(r, 0.9, 0.99, 400, 4000)
        assert adam_gsnr_below_one(m, v, beta1=0.9, beta2=0.99, step=400) == pytest.approx(expected, abs=0.01)


def test_share_below_one_is_the_division_it_replaces():
    m, v = adam_state(1.0, 0.9, 0.9, 400, 4000)
    c1, step = 0.1 / 1.9, 400
    m_hat, v_hat = m / (1 - 0.9**step), v / (1 - 0.9**step)
    share = ((m_hat**2 - c1 * v_hat) / (v_hat - m_hat**2) < 1).double().mean().item()
    assert 0.2 < share < 0.8
    assert adam_gsnr_below_one(m, v, beta1=0.9, beta2=0.9, step=step) == pytest.approx(share, abs=1e-9)


def test_dead_coordinates_are_not_counted():
    m, v = torch.tensor([0.1, 0.9, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert adam_gsnr_below_one(m, v, beta1=0.9, beta2=0.999, step=10**6) == 0.5
    assert math.isnan(adam_gsnr_below_one(m[2:], v[2:], beta1=0.9, beta2=0.999, step=10))
    assert math.isnan(adam_gsnr_below_one(m, v, beta1=0.9, beta2=0.999, step=1))
    assert math.isnan(adam_gsnr_below_one(m[:0], v[:0], beta1=0.9, beta2=0.999, step=5))


def test_edges():
    one = torch.ones(3)
    assert math.isnan(adam_gsnr(one, one, beta1=0.9, beta2=0.99, step=1))
    assert math.isnan(adam_gsnr(0 * one, 0 * one, beta1=0.9, beta2=0.99, step=9))
    assert math.isnan(adam_gsnr(one, 2 * one, beta1=0.0, beta2=0.99, step=9))
    assert adam_gsnr(3 * one, one, beta1=0.9, beta2=0.99, step=10**5) == math.inf
    with pytest.raises(ValueError, match="shape"):
        adam_gsnr(one, torch.ones(2), beta1=0.9, beta2=0.99, step=9)
    with pytest.raises(ValueError, match="beta1"):
        adam_gsnr(one, one, beta1=1.0, beta2=0.99, step=9)
