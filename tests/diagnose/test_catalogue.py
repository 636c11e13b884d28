"""Every rule is described, and the page about findings says what the rules say."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from docs.rule_pages import rule_pages
from gradvitals.cli import main
from gradvitals.diagnose import FAMILIES, RULES, Diagnosis, Observation, Rule, Step
from gradvitals.diagnose.message import explain
from gradvitals.metrics import METRICS
from gradvitals.report import catalog
from gradvitals.types import SOURCES, Reading

PAGE = (Path(__file__).parents[2] / "docs" / "findings.md").read_text("utf-8")
OURS = sorted(name for name, rule in RULES.items() if rule.__module__.startswith("gradvitals."))


def doctor(*args: str) -> str:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(main, ["doctor", *args])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", OURS)
def test_every_rule_has_all_its_texts(name: str) -> None:
    message = RULES[name].message
    assert message is not None
    for part in (message.name, message.pattern, message.title, message.passed):
        assert part.strip(), message
    assert message.causes
    assert message.fixes
    texts = (message.title, *message.causes.values(), *message.fixes.values())
    assert set(message.only_if_chosen) <= {*message.causes, *message.fixes}
    assert not [text for text in texts if text != text.strip() or "!" in text or text.endswith(".")]


@pytest.mark.parametrize("name", OURS)
def test_every_rule_says_what_it_needs_and_how_severe_it_is(name: str) -> None:
    entry = catalog.entry(name)
    assert entry.severities
    for metric in entry.needs:
        *of, plain = metric.split(":")
        assert plain in METRICS or plain.startswith("ranks/")  # what compares workers is yet to be measured
        assert set(of) <= {*SOURCES, "tensors", "layers", "heads"}


@pytest.mark.parametrize("name", [name for name in OURS if RULES[name].default])
def test_every_setting_says_what_it_is(name: str) -> None:
    assert [setting.name for setting in catalog.entry(name).settings if not setting.text] == []


@pytest.mark.parametrize("name", OURS)
def test_every_rule_has_a_family(name: str) -> None:
    assert RULES[name].family in FAMILIES


@pytest.mark.parametrize("name", OURS)
def test_every_rule_has_a_page_with_its_settings_and_no_blanks(name: str) -> None:
    page = rule_pages()[name]
    assert page.startswith(f"# `{name}`: ")
    assert all(f"| `{f.name}` | `{f.default!r}` |" in page for f in fields(RULES[name]) if f.init)  # type: ignore[arg-type]
    for text in (*catalog.entry(name).causes, *catalog.entry(name).fixes):
        assert re.search(r"[{}‹›]", text) is None, text


def test_the_list_of_rules_links_to_every_page() -> None:
    pages = rule_pages()
    assert set(re.findall(r"\]\((\w+)\.md\)", pages["index"])) == set(pages) - {"index"}


def test_the_example_of_the_page_is_a_rule() -> None:
    example = re.search(r"## A rule of your own.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    assert len(example[1].splitlines()) <= 16
    before = set(RULES)
    exec(compile(example[1], "findings.md", "exec", dont_inherit=True), {"__name__": "mine"})
    [name] = set(RULES) - before
    try:
        diagnosis = Diagnosis()
        diagnosis.read([Reading(step=0, time=0.0, values={"loss": 1e9})])
        assert name in [finding.id for finding in diagnosis.findings]
        assert catalog.entry(name).family == catalog.OTHERS
        assert name not in rule_pages()
        assert name in doctor("--rules")
    finally:
        del RULES[name]


@dataclass
class Base(Rule):
    """Has a setting of its own."""

    shared: int = 3
    """From the base."""

    def check(self, step: Step) -> Observation | None:
        return None


@dataclass
class Described(Base):
    """A rule for this test."""

    id = "described"
    needs = ("loss", "microbatch:gsnr")
    min_steps = 1200
    closes_after = 1

    limit: float = 10.0
    """How much is too much,
    over two lines."""
    bare: bool = False
    kinds: list[int] = field(default_factory=lambda: [1, 2])
    """A list."""
    memory: float = field(default=0.0, init=False)
    """Not a setting."""

    def check(self, step: Step) -> Observation | None:
        severity = "critical" if step.number else "info"
        return Observation(severity=severity, seen={})  # type: ignore[arg-type]


def test_an_entry_is_read_off_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "described", Described)
    entry = catalog.entry("described")
    assert [(s.name, s.default, s.text) for s in entry.settings] == [
        ("shared", 3, "From the base."),
        ("limit", 10.0, "How much is too much, over two lines."),
        ("bare", False, ""),
        ("kinds", [1, 2], "A list."),
    ]
    assert entry.severities == ("info", "critical")
    assert entry.conditions == (
        "Severity: info or critical. Needs `loss` and `gsnr` of microbatch. Silent for the first 1,200 steps. "
        "Resolves after 1 clean step."
    )
    assert entry.pattern == "A rule for this test."


def test_explain_prints_one_rule_in_full() -> None:
    text = doctor("--explain", "loss_nonfinite")
    words = RULES["loss_nonfinite"].message
    assert text.startswith(f"{words.name}  [loss_nonfinite]\n")
    assert all(part in text for part in ("Likely causes", "Fixes", "Severity: critical"))
    assert re.search(r"\{\w+\}", text) is None
    data = json.loads(doctor("--explain", "loss_nonfinite", "--json"))
    assert (data["id"], data["name"]) == ("loss_nonfinite", words.name)
    assert len(data["causes"]) == len(words.causes)


def test_rules_lists_every_one_with_its_pattern() -> None:
    text = doctor("--rules")
    assert all(re.search(rf"^{name}  +\S", text, re.MULTILINE) for name in OURS)
    listed = json.loads(doctor("--rules", "--json"))["rules"]
    assert sorted(rule["id"] for rule in listed if rule["family"] != catalog.OTHERS) == OURS


def test_a_rule_that_there_is_not() -> None:
    result = CliRunner().invoke(main, ["doctor", "--explain", "nope"])
    assert result.exit_code == 2
    assert "--rules" in result.stderr


def test_a_batch_whose_size_nobody_told_is_said_to_be_unknown() -> None:
    sign = Observation(severity="info", seen={"batch_size": math.nan, "gsnr": 0.1, "below_one": 0.5})
    title = explain(RULES["noisy_gradients"].message, sign, 3).title
    assert "at a batch of unknown size" in title
