from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from runs_to_advise import lognormal, write_run

from gradvitals.advise import CONFIDENCES, TOPICS
from gradvitals.advise.batch import NAMES as BATCH
from gradvitals.advise.clip import NAMES as CLIP
from gradvitals.advise.decay import NAMES as DECAY
from gradvitals.advise.layers import NAMES as LAYERS
from gradvitals.advise.learning_rate import NAMES as LEARNING_RATE
from gradvitals.advise.warmup import NAMES as WARMUP
from gradvitals.cli import main
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Reading

FIELDS = dict(zip(TOPICS, (LEARNING_RATE, CLIP, BATCH, WARMUP, DECAY, LAYERS), strict=True))
SHORT = {"steps": 10}
FULL = {"steps": 800, "norm": lognormal(1.0, 0.1), "gsnr": lambda step: 0.2, "max_norm": 1.0}
BARE = {"norm": None, "loss": None, "lr": None}


def advise(*args: object, width: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(main, ["advise", *map(str, args)])


@pytest.mark.parametrize("made", [SHORT, FULL, BARE], ids=["short", "full", "bare"])
def test_every_field_is_there_whatever_the_run_has(tmp_path: Path, made: dict[str, object]) -> None:
    result = advise(write_run(tmp_path, **made), "--json")  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert set(told) == {"run", "steps", "live", *TOPICS}
    for topic, names in FIELDS.items():
        piece = told[topic]
        assert piece["topic"] == topic
        assert piece["confidence"] in CONFIDENCES
        assert set(piece["values"]) == set(names)
        assert piece["can_tell"] == (not piece["answer"].startswith("Cannot tell, because"))
        assert piece["figures"] or not piece["can_tell"]


def test_ten_steps_give_no_advice(tmp_path: Path) -> None:
    result = advise(write_run(tmp_path, gsnr=lambda step: 0.2, every=50, **SHORT))  # type: ignore[arg-type]
    assert result.exit_code == 0
    assert "Advice on 0 of 6 settings, from 10 steps." in result.output
    assert result.output.count("Cannot tell, because") == 6


@pytest.mark.parametrize("width", [80, 100])
def test_the_text_has_each_setting_and_fits(tmp_path: Path, width: int) -> None:
    run = write_run(tmp_path, **FULL)  # type: ignore[arg-type]
    short, result = advise(run, width=width), advise(run, "-v", width=width)
    titles = ("Gradient clipping", "Batch size", "Warmup", "Learning-rate decay", "Layers")
    places = [result.output.index(f"\n{title}\n") for title in titles]
    assert places == sorted(places)
    assert result.output.count("\n  Confidence  ") == result.output.count("\n  Evidence  ") == 5
    assert short.output.count("\n  Confidence  ") == 5
    assert "Evidence" not in short.output
    assert max(map(len, result.output.splitlines())) <= width


def test_a_run_without_readings_cannot_be_looked_at(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", meta={}):
        pass
    result = advise(tmp_path / "run")
    assert result.exit_code == 2
    assert "no readings yet" in result.output


def test_a_run_that_is_being_written_is_advised_on_so_far(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", meta={"facts": {}})
    for step in range(300):
        writer.write(Reading(step=step, time=float(step), values={"grad/norm": 1.0, "lr": 1e-3}))
    writer.commit()
    try:
        result = advise(tmp_path / "run")
    finally:
        writer.close()
    assert result.exit_code == 0
    assert "300 steps so far" in result.output


def test_settings_with_the_same_answer_are_named_together(tmp_path: Path) -> None:
    bug = Finding(id="stale_gradients", severity="critical", title="gradients are not zeroed", first_step=1)
    run = write_run(tmp_path, **FULL, findings=[bug])  # type: ignore[arg-type]
    short, full = advise(run).output, advise(run, "-v").output
    assert short.count("gradients are not zeroed") == 1
    assert "Learning rate, batch size, warmup, learning-rate decay\n" in short
    assert full.count("gradients are not zeroed") > 1
