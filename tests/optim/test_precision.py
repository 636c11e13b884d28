"""Numerics: no cancellation, no absolute epsilon, half precision, accumulators of half precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from feeding import SHAPES, accumulate, build, factors_of_one_step, gradients, parameters, starting_weights, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transcription import cells_of, moments, paper_factors, stacked, wiener_factors

import gradvitals as gv

N = 400


def held_as(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The nearest numbers that a dtype holds."""
    return torch.tensor(values, dtype=dtype).double().numpy()


def exact_factors(parts: list[np.ndarray], gamma: float = 0.1, *, wiener: str | None = None) -> np.ndarray:
    stack = stacked(parts, parts[0].shape)
    if wiener:
        return wiener_factors([stack], [gamma], wiener)[0]
    return paper_factors([stack], [gamma], cells_of([stack.shape[1:]], "tensor"))[0]


@pytest.mark.parametrize("noise", [1e-1, 1.0, 1e2])
@pytest.mark.parametrize("k", [8, 32])
def test_float32_does_not_cancel(k: int, noise: float) -> None:
    """Gradients of 1e4 with deviations of 0.1: mean(g^2) - mean(g)^2 would be rounding alone."""
    rng = np.random.default_rng(0)
    spread = noise * rng.uniform(0.5, 4.0, N)
    parts = [held_as(1e4 + spread * rng.standard_normal(N), torch.float32) for _ in range(k)]
    expected = exact_factors(parts)
    assert (expected < 0.9).mean() > 0.3  # the case is not trivial
    got = factors_of_one_step([[part] for part in parts], dtype=torch.float32)[0]
    np.testing.assert_allclose(got, expected, rtol=0.03 if noise < 1 else 3e-3)
    # The naive form in float32 fails.
    stack = torch.tensor(np.stack(parts), dtype=torch.float32)
    naive = (stack.square().mean(0) - stack.mean(0).square()).double().numpy()
    if noise < 1:
        assert np.median(np.abs(naive / moments(np.stack(parts))[1] - 1)) > 0.5


@settings(max_examples=30, deadline=None)
@given(exponent=st.integers(-40, 40), k=st.sampled_from([6, 8, 13]), seed=st.integers(0, 1000))
@pytest.mark.parametrize("scale", ["paper", "wiener"])
def test_units_do_not_matter(scale: str, exponent: int, k: int, seed: int) -> None:
    """Gradients times a power of two, from 1e-12 to 1e12, give the same factors bit for bit."""
    parts = gradients(1, k, [(3, 4)], seed=seed)[0]
    resized = [[c * 2.0**exponent for c in part] for part in parts]
    one, other = (factors_of_one_step(p, dtype=torch.float32, scale=scale)[0] for p in (parts, resized))
    np.testing.assert_array_equal(one, other)


@settings(max_examples=25, deadline=None)
@given(
    k=st.integers(6, 64),
    seed=st.integers(0, 10_000),
    signal=st.floats(0, 50),
    gamma=st.floats(0, 1),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_factors_for_any_parts(k: int, seed: int, signal: float, gamma: float, dtype: torch.dtype) -> None:
    parts = gradients(1, k, [(5, 3)], seed=seed, signal=signal)[0]
    got = factors_of_one_step(parts, dtype=dtype, gamma=gamma)[0]
    expected = exact_factors([part[0] for part in parts], gamma)
    rtol = 1e-9 if dtype == torch.float64 else 2e-4
    # A mean that nearly vanishes is only as accurate as its terms.
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol)
    assert got.min() >= gamma * (1 - 1e-6)
    assert got.max() <= 1 + 1e-6


@pytest.mark.parametrize("scale", ["paper", "wiener"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_half_precision(dtype: torch.dtype, scale: str) -> None:
    """``.grad`` itself is summed in half precision, with an error of eps in each of the eight terms."""
    parts = [[held_as(part[0], dtype)] for part in gradients(1, 8, [(20, 20)])[0]]
    expected = exact_factors([part[0] for part in parts], wiener="hierarchical" if scale == "wiener" else None)
    params = [nn.Parameter(torch.zeros(20, 20, dtype=dtype))]
    optimizer = gv.optim.VRSGD(params, lr=1.0, scale=scale)
    accumulate(params, parts)
    grad = params[0].grad.double()
    optimizer.step()
    assert params[0].dtype == params[0].grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    error = np.abs(params[0].grad.double().numpy() - expected * grad.numpy())
    # Of factor times gradient, so that an element whose mean is rounding alone does not count.
    assert error.max() < 6 * eps * np.abs(grad.numpy()).max()
    assert np.median(error) < eps * np.abs(grad.numpy()).max()


@pytest.mark.parametrize("k", [8, 32, 64])
def test_bfloat16_separates_strong_signal_from_rounding(k: int) -> None:
    """Deviations of 7 % are far above bfloat16's 0.4 %: half the elements have r = 200, the others 1."""
    rng = np.random.default_rng(0)
    size = np.where(np.arange(N) < N // 2, np.sqrt(200.0), 1.0)
    parts = [[held_as(size + rng.standard_normal(N), torch.bfloat16)] for _ in range(k)]
    expected = exact_factors([part[0] for part in parts])
    assert expected[N // 2 :].mean() < 0.12
    got = factors_of_one_step(parts, dtype=torch.bfloat16)[0]
    np.testing.assert_allclose(got[N // 2 :].mean(), expected[N // 2 :].mean(), rtol=0.05)
    np.testing.assert_allclose(got[: N // 2].mean(), expected[: N // 2].mean(), rtol=0.05)


@pytest.mark.parametrize("k", [8, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulators_of_bfloat16(dtype: torch.dtype, k: int) -> None:
    """Half the memory, for an error of a few per cent in the variance: the sum rounds by 1/256 at each part."""
    parts = [[held_as(part[0], dtype)] for part in gradients(1, k, [(20, 20)])[0]]
    precise, rough = (factors_of_one_step(parts, dtype=dtype, moments_dtype=kind)[0] for kind in (None, torch.bfloat16))
    assert not np.array_equal(precise, rough)
    inside = (precise > 0.12) & (precise < 0.95)
    error = np.abs(rough / precise - 1)[inside]
    assert inside.mean() > 0.2
    assert np.median(error) < 0.03
    assert error.max() < 0.15


def test_moments_dtype_for_one_group() -> None:
    params = parameters(starting_weights(), torch.float32)
    parts = gradients(1)[0]
    optimizer = gv.optim.VRSGD(
        [{"params": params[:1], "moments_dtype": torch.bfloat16}, {"params": params[1:]}], lr=1.0
    )
    accumulate(params, parts)
    grads = [p.grad.clone() for p in params]
    optimizer.step()
    plain = factors_of_one_step(parts, dtype=torch.float32)
    for number in range(len(SHAPES)):
        got = (params[number].grad / grads[number]).double().numpy()
        assert np.allclose(got, plain[number], rtol=1e-5) == (number > 0)
        assert np.allclose(got, plain[number], rtol=0.1)


@pytest.mark.parametrize("scale", ["paper", "wiener"])
@pytest.mark.parametrize(
    ("before", "after", "rtol"),
    [
        (torch.float32, torch.float64, 1e-10),
        (torch.float64, torch.float32, 1e-3),
        (torch.bfloat16, torch.float64, 1e-10),
        (torch.bfloat16, torch.float32, 1e-3),
    ],
    ids=str,
)
@pytest.mark.parametrize("only_one", [False, True])
def test_model_changes_dtype(before: torch.dtype, after: torch.dtype, rtol: float, only_one: bool, scale: str) -> None:
    """Deviations have the precision of the parameter's current dtype."""
    model = nn.ParameterList(parameters(starting_weights(), before))
    optimizer = build("sgd", model.parameters(), lr=0.1, scale=scale)
    steps = gradients(4)
    train(optimizer, list(model), steps[:2])
    if only_one:
        model[0].data = model[0].data.to(after)
    else:
        model.to(after)
    for parts in steps[2:]:
        # Deviations of 1e-5: nothing is left of them in less than float64, or float32 where they are larger.
        size = 1e-5 if after == torch.float64 else 1e-1
        parts = [[np.asarray(held_as(1 + size * c, after)) for c in part] for part in parts]
        accumulate(list(model), parts)
        grads = [p.grad.clone() for p in model]
        assert grads[0].dtype == after
        optimizer.step()
        for number in range(1 if only_one else len(SHAPES)):
            expected = exact_factors(
                [part[number] for part in parts], wiener="hierarchical" if scale == "wiener" else None
            )
            got = (model[number].grad / grads[number]).double().numpy()
            np.testing.assert_allclose(got, expected, rtol=rtol, err_msg=f"factors of tensor {number}")
        optimizer.zero_grad()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_parameters_of_several_dtypes(dtypes: tuple[torch.dtype, ...]) -> None:
    """Each has the factors that it has alone: bfloat16's rounding does not apply to float32, nor vice versa."""
    shapes = [(30,), (30,)]
    parts = gradients(1, 7, shapes)[0]
    for part in parts:
        for number, dtype in enumerate(dtypes):
            part[number] = held_as(1 + part[number] / 16, dtype)  # a sixteenth is well above bfloat16's rounding
            part[number][:3] = held_as(np.array([0.1, 0.3, -1e4 / 3]), dtype)
    params = [nn.Parameter(torch.zeros(30, dtype=dtype)) for dtype in dtypes]
    optimizer = gv.optim.VRSGD(params, lr=1.0)
    for part in parts:
        terms = [(p * torch.tensor(c, dtype=p.dtype)).sum() for p, c in zip(params, part, strict=True)]
        (sum(terms) / 7).backward()
    grads = [p.grad.clone() for p in params]
    optimizer.step()
    for number, (p, grad, dtype) in enumerate(zip(params, grads, dtypes, strict=True)):
        got = (p.grad / grad).double().numpy()
        alone = factors_of_one_step([[part[number]] for part in parts], dtype=dtype)[0]
        assert (got[:3] == 1).all()
        np.testing.assert_allclose(got, alone, rtol=1e-5 if dtype == torch.float32 else 1e-2)


def test_huge_tensor_keeps_its_mean() -> None:
    """A mean over two million r must not be a float32 sum that stops growing."""
    n = 2_000_000
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(n))
    optimizer = gv.optim.VRSGD([p], lr=1.0)
    parts = [torch.randn(n, generator=generator) for _ in range(6)]
    for part in parts:
        ((p * part).sum() / 6).backward()
    grad = p.grad.clone()
    optimizer.step()
    stack = torch.stack(parts).double()
    ratio = stack.mean(0).square() / stack.var(0, correction=0)
    expected = (ratio / ratio.mean()).clamp(0.1, 1)
    got = (p.grad / grad).double()
    assert math.isclose(got.mean(), expected.mean(), rel_tol=1e-5)


@pytest.mark.parametrize("k", [8, 24, 64, 128])
def test_many_equal_parts_have_no_noise(k: int) -> None:
    """Errors of one sign add up over many sums; they must not turn constant elements into noise."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(400))
    constant = torch.randn(200, generator=generator)
    optimizer = gv.optim.VRSGD([weight], lr=1.0)
    heard: list[torch.Tensor] = []
    optimizer.register_factors_hook(lambda parameters, factors, gamma: heard.append(factors[0].clone()))
    for _ in range(k):
        part = torch.cat([constant, torch.randn(200, generator=generator)])
        ((weight * part).sum() / k).backward()
    optimizer.step()
    assert (heard[0][:200] == 1).all()
    assert 0.4 < heard[0][200:].mean() < 0.6
