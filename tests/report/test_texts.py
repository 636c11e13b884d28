"""Numbers, evidence, findings and notices in words."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import gradvitals
from gradvitals.cli import main
from gradvitals.diagnose import RULES, Observation
from gradvitals.diagnose.message import explain
from gradvitals.errors import ObserveError
from gradvitals.notices import NOTICES, observe_ignored
from gradvitals.report import format as text
from gradvitals.report.catalog import entry
from gradvitals.report.format import ASCII_BLOCKS, BLOCKS, evidence, sparkline, summarize_actions
from gradvitals.report.html import render_html
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Action, Finding, Reading, Severity


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


# -- findings --------------------------------------------------------------------------------------------------------


def test_only_numbers_with_a_meaning_are_shown() -> None:
    unknown = {"loss": math.nan, "ratio": 0.742, "lr": math.nan}
    assert list(evidence({"seen": unknown, "expected": {"loss": "a finite number"}})) == [
        "loss NaN (healthy: a finite number)"
    ]
    seen = {"ratio": 0.3, "lr": "nan"}
    told = {"seen": seen, "expected": {"ratio": "under 0.1"}, "latest": {"step": 9, "ratio": 0.4, "lr": "nan"}}
    assert list(evidence(told)) == ["ratio 0.3 (healthy: under 0.1)", "at step 9: ratio 0.4"]
    assert list(evidence({"seen": {"share": 0.00103}, "expected": {"share": 0.0}})) == [
        "0.103% of their numbers, normally none"
    ]
    assert list(evidence({"seen": {"share": 1e-8}, "expected": {"share": "over 1e-06"}})) == [
        "share 1.00e-08 (healthy: over 1e-06)"
    ]
    near = {"seen": {"ratio": 0.0104, "loss": 0.01066}, "expected": {"ratio": "under 0.0107", "loss": "under 0.0107"}}
    assert list(evidence(near)) == ["loss 0.0107"]  # what is healthy is not compared


def test_a_swing_says_what_it_is_of() -> None:
    tiny = {"seen": {"swing": 0.0502}, "expected": {"swing": 0.05}}
    assert list(evidence(tiny)) == ["spread of recorded losses over their mean 0.0502, normally 0.05"]
    assert "the recorded loss; if the loop smooths it" in RULES["batch_too_small"].message.causes["tiny"]
    both = {"swing": 0.971, "loss_swing": 0.156}
    limits = {"swing": "under 0.8", "loss_swing": "under 0.12"}
    assert list(evidence({"seen": both, "expected": limits})) == [
        "spread of the norm's logarithm 0.971 (healthy: under 0.8)",
        "spread of recorded losses over their mean 0.156 (healthy: under 0.12)",
    ]
    # What is healthy is no evidence.
    assert len(list(evidence({"seen": both | {"swing": 0.171}, "expected": limits}))) == 1


@pytest.mark.parametrize("observed", [False, True])
def test_a_missing_loss_is_in_the_headline(tmp_path: Path, observed: bool) -> None:
    unobserved = observe_ignored(ObserveError("observe got a str as loss; expected a tensor or a number"), 0)
    with RunWriter(tmp_path / "run", meta={"facts": {}}) as writer:
        for step in range(60):
            values = {"grad/norm": 1.0} | ({"loss": 1.0} if observed else {})
            writer.write(Reading(step=step, time=step, values=values))
        writer.write(unobserved)
        writer.commit()
    with open_run(tmp_path / "run") as run:
        first = run.verdict.headline
    said = " No loss was recorded: observe got a str as loss; expected a tensor or a number."
    assert first.endswith(said) == (not observed)


def noisy(path: Path, severity: Severity = "info") -> Path:
    seen = {"median": 0.0321, "batch_size": 16_384.0, "share": "93 % of coordinates"}
    told = explain(RULES["noisy_gradients"].message, Observation(severity=severity, seen=seen), 100)
    found = Finding(
        id="noisy_gradients", severity=severity, first_step=50, evidence={"seen": seen}, **dataclasses.asdict(told)
    )
    with RunWriter(path, meta={"facts": {}}) as writer:
        for step in range(60):
            writer.write(Reading(step=step, time=step, values={"grad/norm": 1.0, "loss": 1.0}))
        writer.write(found)
    return path


def lines(*args: str) -> list[str]:
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, args).stdout.splitlines()


def test_a_routine_note_takes_one_line(tmp_path: Path) -> None:
    run = str(noisy(tmp_path / "run"))
    line = "info: noisy gradients, as in nearly every healthy run [noisy_gradients]"
    doctor, report = lines("doctor", "-v", run), lines("report", run)
    assert doctor[doctor.index(line) - 1 : doctor.index(line) + 2] == ["", line, ""]
    assert report[report.index(line) + 1].startswith("`gradvitals doctor -v` has")
    whole = lines("doctor", run, "--all")
    assert line not in whole
    title = RULES["noisy_gradients"].message.title.split(":")[0]
    assert any(line.startswith(f"info: {title}") for line in whole)
    assert any(line.startswith("  Fix           No action needed while the loss falls") for line in whole)
    with open_run(run) as opened:
        assert '<details open="open"><summary><span class="flag"' not in render_html(opened)


def test_a_number_that_was_not_read_later_is_no_news() -> None:
    content = {"seen": {"norm": 28.5}, "expected": {}, "latest": {"step": 321, "norm": "nan", "steps": 300}}
    assert list(evidence(content, "stale_gradients")) == ["gradient norm 28.5"]
    assert list(evidence(content, "nonfinite")) == ["gradient norm 28.5", "at step 321: gradient norm NaN"]


def test_a_ratio_is_called_by_what_it_is_of() -> None:
    content = {"seen": {"ratio": 0.3}, "expected": {"ratio": "under 0.1"}, "latest": {"step": 9, "ratio": 0.4}}
    assert list(evidence(content, "update_ratio")) == [
        "update over weight norm 0.3 (healthy: under 0.1)",
        "at step 9: update over weight norm 0.4",
    ]


# -- notices ---------------------------------------------------------------------------------------------------------


def ids_in_the_source() -> dict[str, set[str]]:
    """Every id that a notice is made with, and the severities beside it."""
    found: dict[str, set[str]] = {}
    texts = (file.read_text("utf-8") for file in Path(gradvitals.__file__).parent.rglob("*.py"))
    for source in texts:
        for node in ast.walk(ast.parse(source)) if "made(" in source else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "made":
                name = ast.literal_eval(node.args[0])
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                severity = given.get("severity", ast.Constant(None))
                found.setdefault(name, set())
                if isinstance(severity, ast.Constant):
                    found[name].add(severity.value or NOTICES[name].severities[0])
    return found


IDS = ids_in_the_source()


@pytest.mark.parametrize("name", sorted(IDS))
def test_every_notice_is_explained_with_its_severities(name: str) -> None:
    found = entry(name)
    assert IDS[name] <= set(found.severities)
    assert found.causes
    assert found.fixes
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["doctor", "--explain", name])
    assert result.exit_code == 0
    for part in (found.name, f"[{name}]", "Likely causes", "Fixes", "Severity: "):
        assert part in result.output


def test_no_words_are_left_without_a_notice() -> None:
    assert set(NOTICES) == set(IDS)


def test_json_and_unknown_ids() -> None:
    assert '"id": "ranks_lost"' in CliRunner().invoke(main, ["doctor", "--explain", "ranks_lost", "--json"]).output
    unknown = CliRunner().invoke(main, ["doctor", "--explain", "nothing"])
    assert unknown.exit_code == 2
