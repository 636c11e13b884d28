"""Detectors of other projects against their rules, worked out again from the whole series at every step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradvitals.diagnose import Diagnosis
from gradvitals.diagnose.presets import PRESETS, ZClip
from gradvitals.diagnose.rule import RULES, build_rules
from gradvitals.errors import ConfigError
from gradvitals.types import Layout, Reading, TensorInfo

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


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_flags_a_jump_it_is_made_for(name: str) -> None:
    series = noisy(300, spread=0.02)
    series[250:] = [50 * value for value in series[250:]]
    assert not any(flags(name, series, series, series)[:250]) or name in ("zclip", "levanter", "llmc")
    assert any(flags(name, series, series, series)[250:256])


# -- known answers ---------------------------------------------------------------------------------------------------


def test_zclip_clips_a_z_score_of_5_to_the_mean_plus_one_and_a_quarter_deviations() -> None:
    detector = ZClip(eps=0.0)
    for norm in [1.0, 3.0] * 12 + [2.0]:
        assert not detector.update(0.0, norm, 0.0)
    assert detector.mean == 2.0
    std = math.sqrt(detector.var)
    assert detector.clip_value(2.0 + 2.4 * std) is None
    assert detector.clip_value(2.0 + 5 * std) == pytest.approx(2.0 + 1.25 * std, rel=1e-12)


def test_zclip_leaves_its_variance_at_2a2_over_1_plus_a() -> None:
    rng = np.random.default_rng(1)
    detector = ZClip(z_thresh=math.inf)
    variances = []
    for norm in rng.normal(10.0, 1.0, 100_000):
        detector.update(0.0, float(norm), 0.0)
        variances.append(detector.var)
    assert np.mean(variances[1000:]) == pytest.approx(2 * 0.97**2 / 1.97, rel=0.02)


def test_a_value_in_its_own_window_cannot_score_over_the_root_of_63() -> None:
    detector = PRESETS["llmc"]()
    series = noisy(64, spread=0.01)
    for value in series:
        detector.update(value, value, 0.0)
    window = detector.loss_window  # type: ignore[attr-defined]
    assert window.z_score(1e9, 64, 3.0) == pytest.approx(math.sqrt(63), rel=1e-6)


def test_megatron_never_learns_a_new_level() -> None:
    losses = [11.0] * 100 + [1.0] * 1000 + [100.0, 110.0]
    assert flags("megatron", losses, [1.0] * len(losses), [0.0] * len(losses)) == [False] * 1101 + [True]


def test_foundry_needs_five_in_a_row() -> None:
    losses = [1.0] * 150 + [3.0] * 4 + [1.0] + [3.0] * 5
    found = flags("llmfoundry", losses, losses, losses)
    assert [t for t, flagged in enumerate(found) if flagged] == [159]


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


# -- as rules --------------------------------------------------------------------------------------------------------

LAYOUT = Layout(tensors=(TensorInfo(index=0, name="w", shape=(25, 4), dtype="float32", layer="w", depth=0),))


def readings(series: Series) -> list[Reading]:
    return [
        Reading(step=t, time=0.0, values={"loss": value, "grad/norm": value, "update/rms": value / 10})
        for t, value in enumerate(series)
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_is_off_unless_asked_for(name: str) -> None:
    rule = f"preset_{name}"
    assert rule in RULES
    assert rule not in {built.id for built in build_rules({})}
    for chosen in (True, {}):
        assert rule in {built.id for built in build_rules({rule: chosen})}
    assert rule not in {built.id for built in build_rules({rule: False})}
    with pytest.raises(ConfigError, match="no_such_field"):
        build_rules({rule: {"no_such_field": 1}})


@pytest.mark.parametrize("name", PRESETS)
def test_warns_as_a_rule_at_the_steps_it_flags(name: str) -> None:
    series = noisy(400)
    series[300:310] = [60 * value for value in series[300:310]]
    diagnosis = Diagnosis(rules=[PRESETS[name]()])
    diagnosis.describe(LAYOUT)
    opened = [finding for reading in readings(series) for finding in diagnosis.read([reading])]
    first = flags(name, series, series, series).index(True)
    assert (opened[0].first_step, opened[0].severity, opened[0].id) == (first, "warning", f"preset_{name}")
    assert f"flags step {first}" in opened[0].title
    assert "?" not in "".join((opened[0].title, *opened[0].causes, *opened[0].fixes))


def test_a_step_without_its_numbers_is_not_shown_to_it() -> None:
    diagnosis = Diagnosis(rules=[kind() for kind in PRESETS.values()])
    for t in range(200):
        assert diagnosis.read([Reading(step=t, time=0.0, values={})]) == []


@pytest.mark.parametrize("name", PRESETS)
def test_goes_on_where_it_was(name: str) -> None:
    series = noisy(400, seed=3, spread=0.3)
    series[250] = math.nan
    whole = flags(name, series, series, series)
    detector = PRESETS[name]()
    for t, value in enumerate(series):
        if t in (10, 130, 240, 255):
            saved = json.loads(json.dumps(detector.state_dict()))
            detector = PRESETS[name]()
            detector.load_state_dict(saved)
        assert detector.update(value, value, value) == whole[t]
