"""The batch that follows the noise scale: the same tokens in every arm, and the command."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from experiments.batch_schedule import __main__ as command
from experiments.batch_schedule import training
from experiments.batch_schedule.__main__ import format_summary, summarize
from experiments.batch_schedule.training import Trial, train
from gradvitals.demo import CharLMConfig

TRIAL = Trial(model="nano", arm="fixed", batch=8, lr=4e-3, seed=0, sequences=512)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CharLMConfig(vocab_size=256, context=8, d_model=8, n_layer=1, n_head=1)
    monkeypatch.setitem(training.MODELS, "nano", config)
    monkeypatch.setitem(training.MODELS, "gpt-tiny", config)
    monkeypatch.setattr(training, "EVAL_WINDOWS", 64)


def test_a_fixed_batch_makes_as_many_steps_as_its_tokens_allow() -> None:
    found = train(TRIAL)
    assert (found["steps"], found["growth"]) == (64, [])
    assert found["loss"] < math.log(256)


def test_a_batch_that_cannot_grow_trains_as_a_fixed_one() -> None:
    fixed = train(TRIAL)
    follow = train(replace(TRIAL, arm="follow1e9"))
    assert (follow["steps"], follow["loss"]) == (fixed["steps"], pytest.approx(fixed["loss"], rel=1e-6))


def test_arms_are_paired_by_seed() -> None:
    common = {"model": "m", "sequences": 1, "lr": 0.1, "seconds": 1.0, "parameters": 5, "growth": []}
    lines = [
        {**common, "arm": arm, "batch": 8, "seed": 100 + seed, "loss": loss + 0.01 * seed, "steps": steps}
        for arm, loss, steps in (("fixed", 1.0, 100), ("follow2", 0.99, 60), ("follow8", 1.2, 90))
        for seed in range(3)
    ]
    rows = {row["arm"]: row for row in summarize(lines)["arms"]}
    assert rows["follow2"]["apart"] == pytest.approx(-0.01)
    assert (rows["follow2"]["fewer"], rows["follow2"]["reached"]) == (pytest.approx(0.4), True)
    assert not rows["follow8"]["reached"]
    assert "follow8" in format_summary(summarize(lines))


def test_the_command_trains_every_arm_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ["--model", "nano", "--sequences", "64", "--batch", "8", "--seeds", "1", "--out", str(tmp_path / "a.jsonl")]
    first = CliRunner().invoke(command.main, [*out, "--device", "cpu"])
    assert first.exit_code == 0, first.output
    assert "follow8" in first.stdout
    monkeypatch.setattr(command, "train", None)
    again = CliRunner().invoke(command.main, [*out, "--device", "cpu"])
    assert (again.exit_code, again.stdout) == (0, first.stdout)


def test_the_quick_path_keeps_nothing_and_compares_all_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command.main, ["--quick"])
    assert done.exit_code == 0, done.output
    assert all(f"| {arm} " in done.stdout for arm in ("fixed", "fixed, twice", "follow2", "follow8"))
    assert not list(tmp_path.iterdir())
