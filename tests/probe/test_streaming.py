from __future__ import annotations

import math

import probed
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.probe import check_gradient_snr_perlayer, check_gradient_snr_perparam
from gradvitals.functional import gsnr, gsnr_elementwise
from gradvitals.functional.streamed import Sums, gsnr_streamed
from gradvitals.probe.gradients import Stream


def streamed(samples: list[torch.Tensor]) -> Stream:
    """A stream of [T, ...] for each parameter."""
    stream = Stream([sample[0] for sample in samples], len(samples[0]))
    for row in zip(*samples, strict=True):
        stream.add(row)
    return stream


def normal(*shape: int, mean: float = 0.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + mean).to(dtype)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 12),
    st.integers(1, 9),
    st.sampled_from([1e-12, 1.0, 1e9]),
    st.floats(-5, 5),
    st.integers(0, 1000),
    st.integers(1, 13),
)
def test_mean_and_spread_are_those_of_all_gradients_kept(
    count: int, size: int, scale: float, mean: float, seed: int, chunk: int
) -> None:
    samples = normal(count, size, mean=mean, seed=seed) * scale
    stream = Stream([samples[0], samples[0, :1]], count)
    for rows in samples.split(chunk):
        stream.extend([rows, rows[:, :1] * 2])
    dense = samples.double()
    torch.testing.assert_close(stream.mean[0].double(), dense.mean(0), rtol=1e-4, atol=1e-6 * scale)
    expected = (dense - dense.mean(0)).square().sum(0)
    torch.testing.assert_close(stream.m2[0].double(), expected, rtol=1e-3, atol=1e-10 * scale**2)
    assert stream.count == count


def test_gsnr_and_its_interval_are_those_of_all_gradients_kept() -> None:
    samples = [normal(10, 7, 5, mean=0.3), normal(10, 4, mean=2.0, seed=1)]
    stream = streamed(samples)
    whole = torch.cat([sample.flatten(1) for sample in samples], dim=1)
    for found, expected in zip(stream.gsnr([[0], [1], [0, 1]]), map(gsnr, [*samples, whole]), strict=True):
        assert [found.value, found.low, found.high] == pytest.approx(
            [expected.value, expected.low, expected.high], rel=1e-4
        )
        assert found.num_samples == 10


def test_with_some_coordinates_the_interval_is_as_wide_or_wider() -> None:
    samples = normal(8, 40_000, mean=0.5)
    stream = streamed([samples])
    [found] = stream.gsnr([[0]])
    expected = gsnr(samples)
    assert found.value == pytest.approx(expected.value, rel=1e-5)
    assert found.low <= expected.low * 1.01
    assert found.high >= expected.high * 0.99
    assert found.low < 0.25 < found.high


def test_intervals_of_pure_noise_hold_zero() -> None:
    held = [streamed([normal(10, 3000, seed=seed)]).gsnr([[0]])[0].low <= 0 for seed in range(20)]
    assert sum(held) >= 16


def test_known_answers() -> None:
    stream = streamed([torch.tensor([[1.0], [2.0], [3.0], [4.0]])])
    assert stream.gsnr([[0]])[0].value == pytest.approx(3.5)
    assert stream.norm_of_mean([0]) == 2.5
    assert stream.noise([0]) == pytest.approx(5 / 3)
    assert stream.per_coordinate(0)["median"] == pytest.approx(1.0)
    assert stream.per_coordinate(0)["plug_in_median"] == pytest.approx(6.25 / (5 / 3))


def test_coordinates_debiased_one_by_one() -> None:
    samples = normal(12, 301, mean=0.7)
    expected = gsnr_elementwise(samples)
    found = streamed([samples]).per_coordinate(0)
    assert found["median"] == pytest.approx(float(expected.median()), rel=1e-3)
    assert found["mean"] == pytest.approx(float(expected.mean()), rel=1e-3)
    assert found["below_one"] == pytest.approx(float((expected < 1).double().mean()))


def test_the_posts_numbers_are_those_of_its_functions() -> None:
    model, loader, loss = probed.mlp(), probed.classes(), nn.CrossEntropyLoss()
    kept = check_gradient_snr_perparam(model, loader, lambda batch: loss(model(batch[0]), batch[1]), 6)
    means = check_gradient_snr_perlayer(model, loader, lambda batch: loss(model(batch[0]), batch[1]), 6)
    found = probed.ask(model, loader, loss, 6, questions="signal")
    assert [row["name"] for row in found.signal["tensors"]] == list(kept) == list(means)
    for row in found.signal["tensors"]:
        expected = kept[row["name"]]
        assert row["plug_in_median"] == pytest.approx(expected["median"], rel=1e-4)
        assert row["plug_in_mean"] == pytest.approx(expected["mean"], rel=1e-4) == means[row["name"]]
        assert row["plug_in_below_one"] == pytest.approx(expected["below_one"])


def test_a_gradient_that_is_not_finite_is_left_out_and_counted() -> None:
    good = normal(5, 4, mean=1.0)
    stream = Stream([good[0], good[0]], 6)
    stream.add([good[0], torch.tensor([1.0, math.nan, 1.0, 1.0])])
    for row in good:
        stream.add([row, row])
    assert stream.nonfinite == [0, 1]
    assert stream.count == 5
    torch.testing.assert_close(stream.mean[1], good.mean(0))


def test_nothing_to_stream() -> None:
    assert gsnr_streamed([]) == []
    [found] = gsnr_streamed([Sums(1.0, 0.0, 1, torch.zeros(1, 1))])
    assert math.isnan(found.value)
    stream = Stream([torch.zeros(3)], 1)
    stream.add([torch.ones(3)])
    assert math.isnan(stream.gsnr([[0]])[0].value)
    assert math.isnan(stream.noise([0]))
    assert math.isnan(stream.per_coordinate(0)["median"])


def test_noise_that_the_kept_coordinates_miss_makes_the_interval_wide() -> None:
    # Pure noise in one direction of a few coordinates that are not kept, beside a whisper in all others.
    told = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        stream = Stream([torch.zeros(200_000)], 10)
        loud = torch.zeros(200_000)
        loud[torch.randperm(200_000, generator=generator)[:20]] = 1.0
        for _ in range(10):
            whisper = 1e-4 * torch.randn(200_000, generator=generator)
            stream.add([whisper + loud * torch.randn(1, generator=generator)])
        [found] = stream.gsnr([[0]])
        told += found.low > 0
    assert told <= 5
