from __future__ import annotations

import doctest
import math

import pytest

from gradvitals.show import sparkline, text
from gradvitals.show.actions import summarise
from gradvitals.types import Action, Finding


@pytest.mark.parametrize("module", [text, sparkline])
def test_examples_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (1.0, "1"), (-0.01234, "-0.0123"), (12345.6, "12,346"), (1e-9, "1e-09"), (math.inf, "inf")],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert text.number(value) == shown


@pytest.mark.parametrize("hostile", ["\x1b[2J", "a\rb", "a\nb", "\x07", "\u202eabc", "\x9b31m"])
def test_clean_leaves_nothing_that_moves_the_cursor(hostile: str) -> None:
    assert text.clean(hostile).isprintable()


def test_clean_keeps_ordinary_names() -> None:
    assert text.clean("blocks.3.attn[0]/héad—5") == "blocks.3.attn[0]/héad—5"


@pytest.mark.parametrize(("seconds", "shown"), [(90_000, "1 d 1 h"), (math.nan, "-"), (59.96, "1 min 0 s")])
def test_durations(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_what_a_schedule_did_is_not_told_as_the_guards() -> None:
    skip = Action(kind="skip", step=3, finding="nonfinite", taken=True)
    decay = Action(kind="decay", step=9, finding="decay_due", taken=True)
    assert summarise([skip]).startswith("the Guard left 1 step out")
    assert summarise([skip, decay]).startswith("the Guard or a schedule left 1 step out, decayed")


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
