"""Detectors of other projects against their rules, worked out again from the whole series at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.faults.presets import PRESETS, ZClip

Series = Sequence[float]


def noisy(length: int, *, seed: int = 0, level: float = 1.0, spread: float = 0.1) -> list[float]:
    """Positive values with heavy upper tails, falling slowly."""
    rng = np.random.default_rng(seed)
    trend = level * np.exp(-np.arange(length) / length)
    return (trend * np.exp(spread * rng.standard_t(3, length))).tolist()


def flags(name: str, losses: Series, norms: Series, updates: Series) -> list[bool]:
    detector = PRESETS[name]()
    return [detector.update(*numbers) for numbers in zip(losses, norms, updates, strict=True)]


# -- the rules again, each from its statement and the whole past -----------------------------------------------------


def olmo(losses: Series, norms: Series, updates: Series) -> list[bool]:
    def over(series: Series, t: int) -> bool:
        past = series[max(0, t - 128) : t]
        return series[t] > fmean(past) + 6 * stdev(past)

    return [t + 1 >= 64 and (over(losses, t) or over(norms, t)) for t in range(len(losses))]


def zclip(losses: Series, norms: Series, updates: Series) -> list[bool]:
    found = [False] * min(25, len(norms))
    mean, var = fmean(norms[:25]), pstdev(norms[:25]) ** 2
    for norm in norms[25:]:
        z = (norm - mean) / (math.sqrt(var) + 1e-6)
        found.append(z > 2.5)
        effective = mean + 2.5**2 * math.sqrt(var) / z if z > 2.5 else norm
        mean = 0.97 * mean + 0.03 * effective
        var = 0.97 * var + 0.03 * (effective - mean) ** 2
    return found


def llmfoundry(losses: Series, norms: Series, updates: Series) -> list[bool]:
    outlier = [t >= 100 and losses[t] >= 2 * fmean(losses[t - 100 : t]) for t in range(len(losses))]
    cap = min(max(losses[:100]), 10)
    high = [t >= 200 and sum(loss > cap for loss in losses[t - 100 : t]) >= 50 for t in range(len(losses))]
    return [all(outlier[max(0, t - 4) : t + 1]) or high[t] for t in range(len(losses))]


def lightning(losses: Series, norms: Series, updates: Series) -> list[bool]:
    kept, found = [losses[0]], [False]
    for loss in losses[1:]:
        found.append(loss > kept[-1] and abs(loss - fmean(kept[-10:])) >= 2 * fmean(kept[-10:]))
        if not found[-1]:
            kept.append(loss)
    return found


def megatron(losses: Series, norms: Series, updates: Series) -> list[bool]:
    return [
        t >= 100 and any(series[t] >= 10 * max(series[:100]) for series in (losses, norms)) for t in range(len(losses))
    ]


def levanter(losses: Series, norms: Series, updates: Series) -> list[bool]:
    def over(t: int) -> bool:
        past = updates[max(0, t - 128) : t]
        return updates[t] > fmean(past) + 3 * max(pstdev(past), 1e-6)

    return [t >= 64 and over(t) for t in range(len(updates))]


def llmc(losses: Series, norms: Series, updates: Series) -> list[bool]:
    def of_one(series: Series) -> list[bool]:
        window, in_a_row, found = list(series[:64]), 0, [False] * min(64, len(series))
        for value in series[64:]:
            with_it = [*window[1:], value]
            score = (value - fmean(with_it)) / pstdev(with_it)
            found.append(score > 3)
            in_a_row = in_a_row + 1 if score > 3 else 0
            if in_a_row not in (1, 2):
                window = with_it
        return found

    return [a or b for a, b in zip(of_one(losses), of_one(norms), strict=True)]


STATED: dict[str, Callable[[Series, Series, Series], list[bool]]] = {
    "olmo": olmo,
    "zclip": zclip,
    "llmfoundry": llmfoundry,
    "lightning": lightning,
    "megatron": megatron,
    "levanter": levanter,
    "llmc": llmc,
}


@pytest.mark.parametrize("name", PRESETS)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), at=st.integers(0, 399), ratio=st.floats(1.5, 50), lasts=st.integers(1, 150))
def test_flags_what_its_rule_says(name: str, seed: int, at: int, ratio: float, lasts: int) -> None:
    losses, norms, updates = (noisy(400, seed=seed + i, level=level) for i, level in enumerate((4.0, 1.0, 0.01)))
    for series in (losses, norms, updates):
        series[at : at + lasts] = [ratio * value for value in series[at : at + lasts]]
    assert flags(name, losses, norms, updates) == STATED[name](losses, norms, updates)


# -- known answers ---------------------------------------------------------------------------------------------------


def test_zclip_clips_a_z_score_of_5_to_the_mean_plus_one_and_a_quarter_deviations() -> None:
    detector = ZClip(eps=0.0)
    for norm in [1.0, 3.0] * 12 + [2.0]:
        assert not detector.update(0.0, norm, 0.0)
    assert detector.mean == 2.0
    std = math.sqrt(detector.var)
    assert detector.clip_value(2.0 + 2.4 * std) is None
    assert detector.clip_value(2.0 + 5 * std) == pytest.approx(2.0 + 1.25 * std, rel=1e-12)


# -- NaN, as each original has it ------------------------------------------------------------------------------------


def after_a_nan(name: str, at: int = 200, spike: int = 250) -> tuple[bool, bool, bool]:
    """Whether a NaN is flagged, a quiet step soon after it, and a large spike later."""
    series = noisy(400, spread=0.01)
    series[at] = math.nan
    series[spike] = 1e3
    found = flags(name, series, series, series)
    return found[at], found[at + 20], found[spike]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("olmo", (True, True, True)),
        ("zclip", (False, False, False)),
        ("llmfoundry", (False, False, False)),
        ("lightning", (True, False, True)),
        ("megatron", (True, False, True)),
        ("levanter", (False, False, False)),
        ("llmc", (False, False, False)),
    ],
)
def test_nan_does_what_it_does_in_the_original(name: str, answer: tuple[bool, bool, bool]) -> None:
    assert after_a_nan(name) == answer


@pytest.mark.parametrize(("name", "sees_again"), [("olmo", 329), ("levanter", 329), ("zclip", None), ("llmc", None)])
def test_how_long_a_nan_blinds(name: str, sees_again: int | None) -> None:
    for spike in (328, 329):
        series = noisy(400, spread=0.01)
        series[200], series[spike] = math.nan, 1e3
        found = flags(name, series, series, series)
        quiet = found[spike + 1 : spike + 20]
        assert found[spike] == (name == "olmo" or (sees_again is not None and spike >= sees_again))
        assert not any(quiet) or name == "olmo"
