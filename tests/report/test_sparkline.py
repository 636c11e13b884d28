from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradvitals.show.sparkline import ASCII, BLOCKS, sparkline


def test_heights_follow_the_values() -> None:
    assert sparkline(range(8), 8) == BLOCKS


def test_a_single_spike_survives_any_narrowing() -> None:
    values = np.ones(10_000)
    values[4_321] = 50.0
    for width in (1, 7, 40):
        assert sparkline(values, width).count("█") == 1


def test_a_dip_survives_too() -> None:
    values = np.ones(1_000)
    values[500] = 0.0
    assert sparkline(values, 20).count("▁") == 1


def test_robust_keeps_the_shape_beside_a_spike() -> None:
    values = np.linspace(4.0, 2.0, 100)
    values[60] = 1000.0
    assert set(sparkline(values, 50)) == {"▁", "█"}
    assert len(set(sparkline(values, 50, robust=True))) >= 6


def test_missing_values_leave_gaps_and_infinite_ones_stand_out() -> None:
    assert sparkline([1.0, math.nan, 2.0, math.inf], 4) == "▁ █!"


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, math.inf], [3.0], [2.0, 2.0, 2.0]])
def test_degenerate_series(values: list[float]) -> None:
    assert len(sparkline(values, 10)) == len(values)


def test_constant_series_is_flat() -> None:
    assert len(set(sparkline([2.0] * 5, 5))) == 1


@given(st.lists(st.floats(width=32), max_size=200), st.integers(-1, 80), st.booleans())
def test_never_longer_than_asked(values: list[float], width: int, robust: bool) -> None:
    line = sparkline(values, width, robust=robust, blocks=ASCII)
    assert len(line) == max(0, min(width, len(values)))
    assert set(line) <= set(ASCII) | {" ", "!"}
