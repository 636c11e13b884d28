from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradvitals.report import format as text
from gradvitals.report.describe import summarize_actions
from gradvitals.report.format import ASCII_BLOCKS, BLOCKS, sparkline
from gradvitals.types import Action, Finding


def test_examples_hold() -> None:
    assert doctest.testmod(text).failed == 0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (-0.01234, "-0.0123"),
        (12345.6, "12,346"),
        (1e-9, "1.00e-09"),
        (math.inf, "Inf"),
        (234567.8, "234,568"),
        (7, "7"),
    ],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert text.number(value) == shown


@pytest.mark.parametrize("hostile", ["\x1b[2J", "a\rb", "a\nb", "\x07", "\u202eabc", "\x9b31m"])
def test_clean_leaves_nothing_that_moves_the_cursor(hostile: str) -> None:
    assert text.clean(hostile).isprintable()


@pytest.mark.parametrize(("seconds", "shown"), [(90_000, "1 d 1 h"), (math.nan, "-"), (59.96, "1 min 0 s")])
def test_durations(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_what_a_schedule_did_is_not_reported_as_the_guards() -> None:
    skip = Action(kind="skip", step=3, finding="nonfinite", taken=True)
    decay = Action(kind="decay", step=9, finding="decay_due", taken=True)
    assert summarize_actions([skip]).startswith("the Guard skipped 1 step")
    assert summarize_actions([skip, decay]).startswith("the Guard or a schedule skipped 1 step, decayed")


def test_cut_keeps_both_ends_and_never_exceeds_its_length() -> None:
    assert text.cut("blocks.0.attn.qkv.weight", 13) == "blocks…weight"
    assert text.cut("short", 5) == "short"
    for most in range(1, 12):
        assert len(text.cut("x" * 50, most)) == most


@pytest.mark.parametrize(
    ("title", "tensors", "shown"),
    [
        ("2.weight had no gradient", ("2.weight",), "2.weight had no gradient (x)"),
        ("2.weight and 1 more had no gradient", ("2.weight", "2.bias"), "2.weight and 1 more had no gradient (x)"),
        ("12.weight had no gradient", ("2.weight",), "12.weight had no gradient in 2.weight (x)"),
        ("2.weight.extra moved", ("2.weight",), "2.weight.extra moved in 2.weight (x)"),
        ("the norm rose", ("a", "b", "c", "d"), "the norm rose in a, b, c and 1 more (x)"),
    ],
)
def test_a_finding_does_not_name_its_tensors_twice(title: str, tensors: tuple[str, ...], shown: str) -> None:
    assert str(Finding(id="x", severity="info", title=title, tensors=tensors)) == f"[info] step 0: {shown}"


# -- sparklines ----------------------------------------------------------------------------------------------------


def test_heights_follow_the_values() -> None:
    assert sparkline(range(8), 8) == BLOCKS


def test_a_single_spike_survives_any_narrowing() -> None:
    values = np.ones(10_000)
    values[4_321] = 50.0
    for width in (1, 7, 40):
        assert sparkline(values, width).count("█") == 1


def test_robust_keeps_the_shape_beside_a_spike() -> None:
    values = np.linspace(4.0, 2.0, 100)
    values[60] = 1000.0
    assert set(sparkline(values, 50)) == {"▁", "█"}
    assert len(set(sparkline(values, 50, robust=True))) >= 6


def test_missing_values_leave_gaps_and_infinite_ones_stand_out() -> None:
    assert sparkline([1.0, math.nan, 2.0, math.inf], 4) == "▁ █!"


@given(st.lists(st.floats(width=32), max_size=200), st.integers(-1, 80), st.booleans())
def test_never_longer_than_asked(values: list[float], width: int, robust: bool) -> None:
    line = sparkline(values, width, robust=robust, blocks=ASCII_BLOCKS)
    assert len(line) == max(0, min(width, len(values)))
    assert set(line) <= set(ASCII_BLOCKS) | {" ", "!"}
