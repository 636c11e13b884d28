"""The noise scale that a run shows, against a known one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gradvitals import functional
from gradvitals.worker.averages import NoiseScaleHistory

PARTS, SAMPLES = 4, 8
"""Micro-batches per step, and samples in each."""


def readings(scale: float, dimensions: int, runs: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Signal and noise of every step of some runs; the mean gradient has length 1, the noise the trace `scale`."""
    rng = np.random.default_rng(7)
    noise = rng.normal(size=(runs, steps, PARTS, dimensions)) * np.sqrt(scale / dimensions / SAMPLES)
    parts = (1 / np.sqrt(dimensions) + noise) / PARTS
    squares, whole = np.square(parts).sum((2, 3)), np.square(parts.sum(2)).sum(2)
    return functional.signal_and_noise_of_sums(PARTS * squares, whole, 1.0, 1 / SAMPLES, 1 / (PARTS * SAMPLES))


@pytest.mark.parametrize("dimensions", [20, 200])
@pytest.mark.parametrize("scale", [50.0, 421.0, 2021.0])
def test_what_is_shown_is_not_selected(scale: float, dimensions: int) -> None:
    """A value that was shown whenever its interval was bounded had a median of 148 for 421, and 157 for 2021."""
    signal, noise = readings(scale, dimensions, runs=50, steps=500)
    shown, bounds = [], []
    for run in range(len(signal)):
        history = NoiseScaleHistory()
        for step in range(signal.shape[1]):
            history.push(signal[run, step], noise[run, step], step)
            if step % 5 == 4:
                found = history.estimate(step)
                value, low, high = (found[f"noise_scale{end}"] for end in ("", "_low", "_high"))
                bounds += [] if np.isnan(low) else [low <= scale]
                shown += [] if np.isnan(value) else [(value, low, high)]
    values, lows, highs = np.array(shown).T
    assert np.mean(bounds) > 0.9
    assert np.mean((lows <= scale) & (scale <= highs)) >= 0.9
    assert np.median(lows) < scale < np.median(highs)
    if dimensions == 200 or scale < 1000:  # else a run this long cannot tell, and hardly shows any
        assert np.median(values) == pytest.approx(scale, rel=0.2)


def test_a_resumed_history_goes_on() -> None:
    signal, noise = readings(50.0, 20, runs=1, steps=80)
    whole, halved = NoiseScaleHistory(), NoiseScaleHistory()
    for step in range(80):
        if step == 40:
            resumed = NoiseScaleHistory()
            resumed.load_state_dict(json.loads(json.dumps(halved.state_dict())))
            halved = resumed
        for history in (whole, halved):
            history.push(signal[0, step], noise[0, step], step)
            history.estimate(step)
    assert halved.estimate(79) == whole.estimate(79)
    assert whole.estimate(79)["noise_scale"] == pytest.approx(50.0, rel=0.5)


def test_a_long_run_keeps_few_readings_and_the_same_answer() -> None:
    signal, noise = readings(50.0, 20, runs=1, steps=9000)
    history = NoiseScaleHistory()
    for step in range(9000):
        history.push(signal[0, step], noise[0, step], step)
        if step % 100 == 99:
            found = history.estimate(step)
    assert len(history.state_dict()["entries"]) <= NoiseScaleHistory.MOST
    expected = noise[0, 4500:].mean() / signal[0, 4500:].mean()
    assert found["noise_scale"] == pytest.approx(expected, rel=0.02)
