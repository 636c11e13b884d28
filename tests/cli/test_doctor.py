from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gradvitals import notices
from gradvitals.cli import main
from gradvitals.diagnose import RULES, Observation, Rule, Step
from gradvitals.report.format import evidence
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, Source, TensorInfo

NAMES = tuple(f"blocks.{i}.attn.qkv.weight" for i in range(9))
LAYOUT = Layout(
    tensors=tuple(
        TensorInfo(index=i, name=name, shape=(4, 4), dtype="float32", layer=f"blocks.{i}", depth=i)
        for i, name in enumerate(NAMES)
    ),
    layers=tuple(f"blocks.{i}" for i in range(9)),
)
SPIKE = Finding(
    id="explosion",
    severity="critical",
    title="the gradient norm rose to 41× its usual size",
    tensors=NAMES,
    first_step=300,
    found_step=302,
    evidence={"seen": {"ratio": 41.26, "lr": 0.003, "what": "the norm"}, "expected": {"ratio": 2.0}},
    causes=("one bad batch: it came and went", "the learning rate", "the start", "a cause nobody thinks of"),
    fixes=("skip the batch of step 300", "lower the learning rate from 0.003 to 0.001"),
)
OVER = Finding(**{**SPIKE.__dict__, "last_step": 300})
Write = Callable[..., Path]


def calm(step: int, *, loss: bool = True) -> Reading:
    norm = 1.0 + 0.05 * np.sin(step)
    values = {"grad/norm": norm, "grad/nonfinite": 0.0, "lr": 1e-3}
    if loss:
        values["loss"] = 1.0 + 3.0 / (1 + 0.02 * step) + 0.01 * np.cos(step)
    norms = np.full(len(NAMES), norm / 3)
    return Reading(step=step, time=float(step), values=values, tensors={"grad/norm": norms})


def broken(step: int) -> Reading:
    reading = calm(step)
    return reading if step < 350 else Reading(step=step, time=float(step), values={**reading.values, "loss": np.nan})


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(
        *findings: Finding,
        steps: int = 400,
        reading: Callable[[int], Reading] = calm,
        meta: Mapping[str, Any] | None = None,
        layout: Layout = LAYOUT,
    ) -> Path:
        with RunWriter(tmp_path / "run", meta={"facts": {}} if meta is None else meta) as writer:
            writer.write(layout)
            for step in range(steps):
                writer.write(reading(step))
            for finding in findings:
                writer.write(finding)
            writer.commit()
        return tmp_path / "run"

    return write


def doctor(*args: object, width: int = 100) -> Result:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(main, ["doctor", *map(str, args)])


def in_order(text: str, parts: Iterable[str]) -> bool:
    at = [text.find(part) for part in parts]
    return -1 not in at and at == sorted(at)


def test_a_healthy_run_takes_two_lines(write: Write) -> None:
    run = write()
    result, whole = doctor(run, width=300), doctor(run, "--all", width=1000).output
    data = json.loads(doctor(run, "--json").output)
    skipped = sum(len(item["ids"]) for item in data["skipped"])
    assert result.exit_code == 0
    assert result.output == (
        "Healthy: 400 steps, no findings.\n"
        f"{run}: {len(data['passed'])} checks passed, {skipped} skipped (-v for more)\n"
    )
    assert in_order(whole, ["Checks passed (", "- the loss was finite at every step", "Checks skipped ("])
    assert all(f"  - {item['text']}\n" in whole for item in data["passed"])
    assert all(item["reason"] in whole for item in data["skipped"])


def test_one_fault_fits_on_one_screen(write: Write) -> None:
    follows = [
        Finding(id=name, severity="warning", title=name, first_step=step, follows="explosion")
        for name, step in (("oscillation", 310), ("oscillation", 320), ("loss_rising", 310))
    ]
    other = Finding(id="clip_saturated", severity="warning", title="every step is clipped", first_step=5)
    result = doctor(write(SPIKE, *follows, other), width=140)
    assert result.exit_code == 1
    parts = (
        "Unhealthy: the gradient norm rose to 41× its usual size (since step 300).",
        "Likely cause  one bad batch: it came and went",
        "Fix           skip the batch of step 300",
        "Evidence      norm over its baseline 41.3, normally 2; learning rate 0.003; in blocks.0.attn.qkv.weight, ",
        "Also caused by this: ",
        "warning: every step is clipped [clip_saturated]; since step 5, ongoing when the run ended",
        ": 400 steps, 5 open findings; ",
        " checks passed, ",
    )
    assert in_order(result.output, parts)
    assert "×2" in result.output
    assert "2. " not in result.output
    assert result.output.count("\n") <= 20


def test_verbose_shows_place_time_evidence_causes_and_fixes(write: Write) -> None:
    result = doctor(write(SPIKE), "-v")
    assert result.exit_code == 1
    parts = (
        "Unhealthy: the gradient norm rose to 41× its usual size (since step 300).",
        "400 steps, ",
        "critical: the gradient norm rose to 41× its usual size [explosion]",
        "Where         blocks.0.attn.qkv.weight, ",
        "and 5 more",
        "When          since step 300, ongoing when the run ended; found at step 302",
        "Evidence      norm over its baseline 41.3, normally 2",
        "learning rate 0.003\n",
        "Likely cause  1. one bad batch: it came and went",
        "2. the learning rate",
        "Fix           1. skip the batch of step 300",
        "2. lower the learning rate from 0.003 to 0.001",
        "--explain",
        " checks passed, ",
    )
    assert in_order(result.output, parts)
    assert "nobody thinks of" not in result.output


def test_a_resolved_finding_is_shorter(write: Write) -> None:
    run = write(OVER)
    result = doctor(run, "-v")
    assert result.exit_code == 0
    assert result.output.startswith("Healthy: 400 steps, 1 resolved.")
    assert "critical, resolved: the gradient norm rose" in result.output
    assert "When          step 300, resolved 99 steps ago" in result.output
    assert "lower the learning rate" not in result.output
    assert doctor(run, width=300).output.count("\n") == 2


@pytest.mark.parametrize(
    ("finding", "fail_on", "code"),
    [
        (SPIKE, "critical", 1),
        (OVER, "warning", 0),
        (OVER, "info", 1),
        (Finding(id="explosion", severity="warning", title="x", first_step=1), "critical", 0),
        (Finding(id="clip_idle", severity="info", title="x", first_step=1), "warning", 0),
        (notices.source_unavailable("adam", "no averages", 0), "info", 0),
    ],
)
def test_the_exit_status_compares_the_weight(write: Write, finding: Finding, fail_on: str, code: int) -> None:
    run = write(finding)
    assert doctor(run, "--fail-on", fail_on).exit_code == code
    as_json = doctor(run, "--fail-on", fail_on, "--json")
    assert as_json.exit_code == code
    assert json.loads(as_json.output)["failed"] is bool(code)


def test_json_holds_everything(write: Write) -> None:
    unavailable = notices.source_unavailable("adam", "no averages", 0)
    data = json.loads(doctor(write(SPIKE, unavailable), "--json").output)
    assert data["verdict"]["level"] == "unhealthy"
    assert data["verdict"]["worst"] == "explosion"
    assert data["replayed"] is False
    [finding] = data["findings"]
    assert (finding["open"], finding["weight"], len(finding["tensors"])) == (True, "critical", 9)
    assert len(finding["causes"]) == 4
    assert "loss_nonfinite" in [item["id"] for item in data["passed"]]
    assert [item["id"] for item in data["monitoring"]] == ["source_unavailable"]
    judged = {item["id"] for item in data["passed"]} | {name for item in data["skipped"] for name in item["ids"]}
    assert judged == {name for name, rule in RULES.items() if rule.default} - {"explosion"}


@dataclass
class Slow(Rule):
    """Looks from step 50 on."""

    id = "slow"
    needs = ("loss",)
    min_steps = 50

    def check(self, step: Step) -> Observation | None:
        return None


@pytest.mark.parametrize(("steps", "enough"), [(50, False), (51, True)])
def test_a_check_passes_only_once_its_rule_has_seen_enough(
    write: Write, monkeypatch: pytest.MonkeyPatch, steps: int, enough: bool
) -> None:
    monkeypatch.setitem(RULES, "slow", Slow)
    data = json.loads(doctor(write(steps=steps), "--json").output)
    assert ("slow" in [item["id"] for item in data["passed"]]) is enough
    too_early = [item["ids"] for item in data["skipped"] if item["reason"].endswith("more than 50 steps")]
    assert any("slow" in ids for ids in too_early) is not enough


def test_the_check_of_a_rule_that_is_off_or_broken_is_skipped(write: Write) -> None:
    error = notices.monitor_error("explosion", ValueError("oops"), 3)
    meta = {"facts": {}, "config": {"rules": {"loss_nonfinite": False}}}
    data = json.loads(doctor(write(error, meta=meta), "--json").output)
    reasons = {name: item["reason"] for item in data["skipped"] for name in item["ids"]}
    assert "turned off" in reasons["loss_nonfinite"]
    assert "error" in reasons["explosion"]


@dataclass
class Broken(Slow):
    """Has an error."""

    id = "broken"
    min_steps = 0

    def check(self, step: Step) -> Observation | None:
        raise ValueError("oops")


def test_the_check_of_a_rule_that_breaks_in_a_replay_is_skipped(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "broken", Broken)
    data = json.loads(doctor(write(steps=5), "--again", "--json").output)
    assert any("broken" in item["ids"] for item in data["skipped"] if "raised an error" in item["reason"])


@dataclass
class Needy(Slow):
    """Needs what a test says."""

    id = "needy"
    min_steps = 0


@pytest.mark.parametrize(
    ("needs", "source", "value", "reason"),
    [
        ("microbatch:gsnr", None, 1.0, "two or more backward passes per step"),
        ("microbatch:gsnr", "adam", 1.0, "two or more backward passes per step"),
        ("microbatch:gsnr", "microbatch", np.nan, "do not determine a GSNR"),
        ("microbatch:gsnr", "microbatch", 1.0, ""),
        ("gsnr", "adam", 1.0, ""),
        ("gsnr", "adam", np.nan, "do not determine a GSNR"),
        ("gsnr", "window", None, "no GSNR"),  # it has single tensors only
        ("tensors:gsnr", "window", None, ""),
        ("heads:gsnr", "microbatch", 1.0, "no attention heads"),
        ("ranks/norm_dispersion", "microbatch", 1.0, "only one rank"),
        ("noise_scale", "microbatch", 1.0, "watch(..., batch_size=...)"),
        ("update/ratio", "microbatch", 1.0, "update/ratio was not measured"),
    ],
)
def test_a_check_passes_only_with_the_source_its_rule_needs(
    write: Write, monkeypatch: pytest.MonkeyPatch, needs: str, source: Source, value: float | None, reason: str
) -> None:
    monkeypatch.setitem(RULES, "needy", Needy)
    monkeypatch.setattr(Needy, "needs", (needs,))
    content: dict[str, Any] = {"tensors": {"gsnr": np.ones(len(NAMES))}}
    if value is not None:
        content["values"] = {"gsnr": value}
    data = json.loads(
        doctor(write(reading=lambda s: Reading(step=s, time=s, source=source, **content)), "--json").output
    )
    reasons = [item["reason"] for item in data["skipped"] if "needy" in item["ids"]]
    assert ("needy" in [item["id"] for item in data["passed"]]) is not bool(reason)
    assert bool(reasons) is bool(reason)
    assert all(reason in said for said in reasons)


def test_again_replays_the_stored_readings(write: Write) -> None:
    run = write(SPIKE, reading=broken)
    kept, again = (json.loads(doctor(run, *args, "--json").output) for args in ((), ("--again",)))
    assert [finding["id"] for finding in kept["findings"]] == ["explosion"]
    assert "loss_nonfinite" in [finding["id"] for finding in again["findings"]]
    assert again["replayed"] is True
    [finding] = [finding for finding in again["findings"] if finding["id"] == "loss_nonfinite"]
    assert (finding["first_step"], finding["open"]) == (350, True)
    assert "A run stores fewer tensor readings" in doctor(run, "--again", "-v", width=300).output


@pytest.mark.parametrize("meta", [{}, {"facts": {}, "config": {"diagnose": False}}])
def test_a_run_recorded_without_diagnosis_is_replayed(write: Write, meta: dict[str, Any]) -> None:
    run = write(reading=broken, meta=meta)
    result = doctor(run, width=300)
    assert result.exit_code == 1
    assert "recorded without diagnosis" in result.output
    assert "loss_nonfinite" in doctor(run, "-v").output


def test_again_keeps_to_the_settings_of_the_run_as_far_as_they_are_known(write: Write) -> None:
    rules = {"loss_nonfinite": False, "no_such_rule": {"x": 1}, "explosion": {"no_such_setting": 1}}
    data = json.loads(doctor(write(reading=broken, meta={"config": {"rules": rules}}), "--json").output)
    assert "loss_nonfinite" not in [finding["id"] for finding in data["findings"]]


def test_a_replay_keeps_what_no_reading_shows(write: Write) -> None:
    crash = notices.training_stopped(RuntimeError("boom"), 399)
    result = doctor(write(crash, SPIKE), "--again")
    assert result.exit_code == 1
    assert result.output.startswith("Unhealthy: stopped at step 399 by RuntimeError: boom.")
    assert "[explosion]" not in result.output  # the readings do not show it


def test_no_run_or_no_readings_is_one_line_and_exit_2(write: Write, tmp_path: Path) -> None:
    for path, says in ((tmp_path / "nowhere", "nowhere"), (write(steps=0), "no readings yet")):
        result = doctor(path)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert says in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [("x", "--rules"), ("--rules", "--explain", "x"), ("--rules", "--format", "markdown")],
)
def test_one_thing_at_a_time(args: tuple[str, ...]) -> None:
    result = doctor(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


HOSTILE = ("[bold red]x[/]", "a\x1b[2Jb", "line\nbreak", "\u202eright to left", "y" * 200)


@pytest.mark.parametrize("width", [30, 80, 120])
def test_lines_fit_names_are_text_and_nothing_trails(write: Write, width: int) -> None:
    hostile = Finding(
        id="x\x1b]0;owned\x07",
        severity="warning",
        title="[red]\x1b[2J a title that is long enough to need a second line where the screen is narrow",
        tensors=HOSTILE,
        first_step=3,
        evidence={"seen": {"a\x1b[2J": "b\x1b[2J"}, "expected": {"a\x1b[2J": "c"}},
        causes=("why\x1b[2J " * 20,),
        fixes=("do\x1b[2J " * 20,),
    )
    run = write(hostile, SPIKE)
    for options in ((), ("-v",)):
        output = doctor(run, *options, width=width).output
        assert "\x1b" not in output
        assert "\u202e" not in output
        assert all(len(line) <= width and line == line.rstrip() for line in output.splitlines())


def test_no_color_in_a_pipe_and_no_torch() -> None:
    code = "import sys\nsys.modules['torch'] = None\nfrom gradvitals.cli import main\nmain(sys.argv[1:])"
    for args in (["--rules"], ["--explain", "loss_nonfinite"]):
        command = [sys.executable, "-c", code, "doctor", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, encoding="utf-8")
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        assert "loss" in done.stdout


def test_the_report_shows_the_verdict_and_the_first_fix(write: Write) -> None:
    run = write(OVER, notices.source_unavailable("adam", "no averages", 0))
    output = CliRunner(env={"COLUMNS": "100"}).invoke(main, ["report", str(run)]).output
    parts = (
        "Healthy: 400 steps, 1 resolved.",
        "critical, resolved: the gradient norm rose to 41× its usual size [explosion]",
        "in blocks.0.attn.qkv.weight, blocks.1.attn.qkv.weight and 7 more; step 300, resolved 99 steps ago",
        "Fix: skip the batch of step 300",
        "Monitoring",
    )
    assert in_order(output, parts)
    data = json.loads(CliRunner().invoke(main, ["report", str(run), "--json"]).output)
    assert data["verdict"]["level"] == "healthy"
    assert [finding["id"] for finding in data["findings"]] == ["explosion"]
    assert [finding["id"] for finding in data["monitoring"]] == ["source_unavailable"]


def test_a_number_that_has_not_changed_is_shown_once() -> None:
    seen = {"loss": 3.2, "batch_size": 16.0}
    assert list(evidence({"seen": seen, "latest": {"step": 90, **seen}})) == ["loss 3.2, batch size 16"]
    latest = {"step": 90, "loss": 2.9, "batch_size": 16.0}
    assert list(evidence({"seen": seen, "latest": latest})) == ["loss 3.2, batch size 16", "at step 90: loss 2.9"]


@pytest.mark.parametrize(("asked", "meant"), [("plateau", "loss_plateau"), ("Loss-plateau", "loss_plateau")])
def test_a_rule_of_nearly_this_name_is_suggested(asked: str, meant: str) -> None:
    result = CliRunner().invoke(main, ["doctor", "--explain", asked])
    assert result.exit_code != 0
    assert f"did you mean {meant}" in str(result.exception) + result.output


STOPPED = notices.training_stopped(RuntimeError("boom"), 399)


@pytest.mark.parametrize("findings", [(), (SPIKE, OVER, STOPPED, notices.source_unavailable("adam", "none", 0))])
def test_json_follows_the_published_schema(write: Write, findings: tuple[Finding, ...]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parents[2] / "docs" / "doctor.schema.json").read_text("utf-8"))
    data = json.loads(doctor(write(*findings), "--json").output)
    jsonschema.validate(data, schema)
    assert set(data) == set(schema["required"])


def test_evidence_in_json_has_observations_only(write: Write) -> None:
    seen = {"ratio": 41.0, "lr": 0.3, "lr_proposed": 0.1, "max_norm": 1.6}
    finding = Finding(id="explosion", severity="critical", title="x", first_step=1, evidence={"seen": seen})
    data = json.loads(doctor(write(finding), "--json").output)
    assert data["findings"][0]["evidence"] == {"seen": {"ratio": 41.0, "lr": 0.3}}


def test_markdown_has_the_verdict_the_cause_the_fix_and_the_evidence(write: Write) -> None:
    text = doctor(write(SPIKE), "--format", "markdown").output
    parts = (
        "### 🔴 Unhealthy: `",
        "**the gradient norm rose to 41× its usual size** (critical, `explosion`, since step 300",
        "- Likely cause: one bad batch: it came and went",
        "- Fix: skip the batch of step 300",
        "- Evidence: norm over its baseline 41.3, normally 2",
        "checks passed, ",
        "| steps | 400 (finished) |",
    )
    assert in_order(text, parts)
    assert text.count("the gradient norm rose") == 1
    assert "\n400 steps, 1 open finding; " in text


@pytest.mark.parametrize(
    ("title", "shown"),
    [
        ("zero_grad is missing in _loop_", r"**zero_grad is missing in \_loop\_**"),
        ("<img src=x> [a](b) `c` | *d*", r"**\<img src=x\> \[a\](b) \`c\` \| \*d\***"),
    ],
)
def test_markdown_shows_names_from_outside_as_they_are(write: Write, title: str, shown: str) -> None:
    found = Finding(id="x", severity="critical", title=title, first_step=1)
    assert shown in doctor(write(found), "--format", "markdown").output


def test_markdown_of_a_run_without_findings_says_that_it_is_healthy(write: Write) -> None:
    result = doctor(write(), "--format", "markdown")
    assert result.exit_code == 0
    assert "Healthy" in result.output


def test_a_consequence_is_shown_without_the_causes_and_lines_of_its_root(write: Write) -> None:
    follows = Finding(
        id="oscillation",
        severity="warning",
        title="it swings",
        first_step=310,
        follows="explosion",
        causes=("Consequence of explosion: the norm rose", "an old guess"),
        fixes=("Fix explosion first: skip the batch of step 300",),
    )
    text = doctor(write(SPIKE, follows), "-v", width=200).output
    assert "  Fix           Fix explosion first\n" in text
    assert "an old guess" not in text


@pytest.mark.parametrize("rule", ["lr_too_high", "explosion", "loss_mismatch", "nonfinite"])
def test_an_explanation_has_no_blanks(rule: str) -> None:
    text = CliRunner().invoke(main, ["doctor", "--explain", rule]).output
    assert "…" not in text
    assert "{" not in text
    assert "?" not in text
