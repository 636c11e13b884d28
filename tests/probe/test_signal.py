from __future__ import annotations

import math
from typing import Any

import probed
import pytest
import torch
from torch import nn

from gradvitals.probe.gradients import Stream, judge, signal_record


def record_of(samples: dict[str, torch.Tensor], lr: float | None = None, batch_size: int = 4) -> dict[str, Any]:
    """What gradients `[T, ...]` of some tensors show."""
    rows = list(samples.values())
    stream = Stream([row[0] for row in rows], len(rows[0]))
    for one in zip(*rows, strict=True):
        stream.add(one)
    return signal_record(list(samples), stream, batch_size, lr)


def normal(*shape: int, scale: float = 1.0, mean: float = 0.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean) * scale


def test_thresholds_of_the_learning_rate_by_hand() -> None:
    # With lr 0.01 a norm below 1e-8 vanishes and one above 100 explodes.
    samples = {
        "small": torch.full((3, 1), 0.9e-8),
        "fine": torch.full((3, 1), 1.1e-8),
        "large": torch.full((3, 1), 99.0),
        "huge": torch.tensor([[1.0], [101.0], [1.0]]),
    }
    limits = record_of(samples, lr=0.01)["thresholds"]
    assert limits["vanishing"] == pytest.approx(1e-8)
    assert limits["exploding"] == pytest.approx(100.0)
    assert limits["vanishing_names"] == ["small"]
    assert limits["exploding_names"] == ["huge"]
    without = record_of(samples)
    assert without["thresholds"]["vanishing_names"] == []
    assert without["tensors"][0]["vanishing"] is None


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_relative_thresholds_know_no_scale(scale: float) -> None:
    samples = {f"usual.{i}": normal(5, 20, seed=i, scale=scale) for i in range(5)}
    samples |= {"faint": normal(5, 20, scale=1e-6 * scale), "loud": normal(5, 20, scale=1e6 * scale)}
    found = record_of({name: row.double() for name, row in samples.items()})
    assert found["thresholds"]["vanishing_relative_names"] == ["faint"]
    assert found["thresholds"]["exploding_relative_names"] == ["loud"]
    verdicts = {row["name"]: row["verdict"] for row in found["tensors"]}
    assert verdicts["faint"] == "vanishing"
    assert verdicts["loud"] == "exploding"
    assert verdicts["usual.0"] == "noise"


def test_verdicts_of_signal_and_noise() -> None:
    found = record_of(
        {"signal": normal(10, 500, mean=3.0), "noise": normal(10, 500, seed=1), "zero": torch.zeros(10, 3)}
    )
    signal, noise, zero = found["tensors"]
    assert (signal["verdict"], noise["verdict"], zero["verdict"]) == ("signal", "noise", "none")
    assert signal["gsnr"] == pytest.approx(9.0, rel=0.15)
    assert signal["gsnr_low"] < 9.0 < signal["gsnr_high"]
    assert noise["gsnr_low"] <= 0 < noise["gsnr_high"]
    assert found["total"]["noise_scale"] == pytest.approx(4 / found["total"]["gsnr"])
    assert found["total"]["norm"] == pytest.approx(math.hypot(signal["norm"], noise["norm"]))


def test_coefficient_of_variation_by_hand() -> None:
    found = record_of({"w": torch.tensor([[1.0], [2.0], [3.0]])})
    assert found["tensors"][0]["cv"] == pytest.approx(0.5)
    assert found["tensors"][0]["norms"] == [1.0, 2.0, 3.0]


def test_words_for_what_few_batches_cannot_tell() -> None:
    base = {
        "nonfinite": 0,
        "vanishing": False,
        "exploding": False,
        "norm_mean": 1.0,
        "relative": 1.0,
        "gsnr_low": math.nan,
        "gsnr_high": math.nan,
    }
    assert judge({**base, "gsnr": math.nan}, 8)[0] == "unclear"
    assert judge({**base, "gsnr": math.inf}, 8) == ("signal", "every batch has the same gradient")
    told = {**base, "gsnr": 0.5, "gsnr_low": 0.2}
    assert judge({**told, "gsnr_high": 0.9}, 8)[0] == "weak"
    assert "2 times as strong" in judge({**told, "gsnr_high": 0.9}, 8)[1]
    assert judge({**told, "gsnr_high": 1.5}, 8)[0] == "unclear"


def test_a_deep_sigmoid_network_vanishes() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(14) for layer in (nn.Linear(8, 8), nn.Sigmoid())]
    model = nn.Sequential(*layers, nn.Linear(8, 2))
    x = torch.randn(40, 8)
    batches = list(zip(x.split(8), (x[:, 0] > 0).long().split(8), strict=True))
    found = probed.ask(model, batches, n_batches=5, questions="signal")
    assert "0.weight" in found.signal["thresholds"]["vanishing_relative_names"]
    assert any(item["severity"] == "warning" and "vanish" in item["title"] for item in found.verdict)


def test_a_bias_before_batch_norm_is_no_alarm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    batches = [(torch.randn(16, 4), torch.randn(16, 1)) for _ in range(5)]
    found = probed.ask(model, batches, nn.MSELoss(), 5, questions="signal")
    assert found.signal["thresholds"]["vanishing_relative_names"] == ["0.bias"]
    [told] = [item for item in found.verdict if "vanish" in item["title"]]
    assert told["severity"] == "info"
    assert "batch norm" in told["advice"]


def test_nan_gradients_are_critical() -> None:
    model = nn.Linear(2, 1)
    batches = [torch.ones(4, 2), torch.full((4, 2), math.nan), torch.randn(4, 2), torch.randn(4, 2)]
    found = probed.ask(model, batches, lambda output: output.square().mean(), questions="signal")
    assert found.verdict[0]["severity"] == "critical"
    assert found.signal["tensors"][0]["nonfinite"] == 1
    assert math.isfinite(found.signal["total"]["gsnr"])
    assert math.isfinite(found.about["loss"])
