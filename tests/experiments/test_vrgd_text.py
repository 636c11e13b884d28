"""A tiny transformer on a text of the tests' own: windows, learning, arms that meet the same data."""

from __future__ import annotations

import lzma
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from experiments.vrgd import text
from experiments.vrgd.__main__ import main
from experiments.vrgd.text import TRAIN_FILE, VALID_FILE, Text, read_text, train_text
from experiments.vrgd.trial import Trial
from gradvitals.demo import CharLMConfig, shakespeare
from gradvitals.errors import GradvitalsError

CPU = torch.device("cpu")
TRIAL = Trial(
    task="text", model="tiny", batch=16, optimizer="adamw", arm="base", lr=0.01, seed=3, epochs=30, weight_decay=0.01
)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = CharLMConfig(vocab_size=256, context=16, d_model=16, n_layer=1, n_head=2)
    monkeypatch.setitem(text.MODELS, "tiny", config)
    monkeypatch.setattr(text, "EVAL_WINDOWS", 128)
    monkeypatch.setattr(text, "CURVE_WINDOWS", 32)
    words = shakespeare().encode()
    (tmp_path / TRAIN_FILE).write_bytes(lzma.compress(words[:20_000], preset=0))
    (tmp_path / VALID_FILE).write_bytes(lzma.compress(words[20_000:30_000], preset=0))
    return tmp_path


def test_windows_are_cut_out_of_the_text_and_reach_its_end() -> None:
    content = bytes(range(20))
    windows = Text(content, CPU).windows(300, 4, torch.Generator().manual_seed(0))
    assert (windows.shape, windows.dtype) == ((300, 5), torch.long)
    assert all(bytes(window) in content for window in windows.tolist())
    assert set(windows[:, 0].tolist()) == set(range(16))


def test_a_tiny_model_learns(data: Path) -> None:
    found = train_text(TRIAL, data=data)
    curve = [found[f"score@{step}"] for step in (5, 10, 15, 20, 25, 30)]
    assert curve[0] < curve[2] < curve[-1]
    assert found["chance"] == pytest.approx(-math.log(256))
    assert found["chance"] + 1.5 < found["score"] < -1.5
    assert found["loss"] == -found["train_score"]
    assert found["steps"] == 30


@pytest.mark.parametrize(("name", "millions"), [("gpt-mini", 2), ("gpt-small", 5)])
def test_models_have_the_size_they_are_said_to_have(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = text.CharLM(text.MODELS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.1)


def test_missing_and_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(GradvitalsError, match=rf"{TRAIN_FILE} is not there.*--data"):
        read_text(tmp_path / TRAIN_FILE, CPU)
    (tmp_path / TRAIN_FILE).write_bytes(b"plain")
    with pytest.raises(GradvitalsError, match="xz"):
        read_text(tmp_path / TRAIN_FILE, CPU)
    (tmp_path / TRAIN_FILE).write_bytes(lzma.compress(b"short"))
    with pytest.raises(GradvitalsError, match="5 bytes"):
        read_text(tmp_path / TRAIN_FILE, CPU)


@pytest.mark.parametrize("wrong", [{"batch": 15}, {"model": "gpt-5"}])
def test_what_cannot_be_trained_is_said(wrong: dict[str, object], data: Path) -> None:
    with pytest.raises(GradvitalsError, match="expected"):
        train_text(replace(TRIAL, **wrong), data=data)


def test_the_command_sweeps_and_compares(data: Path) -> None:
    what = ["--model", "tiny", "--batch", "16", "--optimizer", "lamb", "--epochs", "3", "--device", "cpu"]
    how_far = ["--span", "1", "--reach", "0", "--refine", "0", "--seeds", "1"]
    done = CliRunner().invoke(main, ["text", "--data", str(data), *what, *how_far])
    assert done.exit_code == 0, done.output
    assert "text tiny, batch 16, lamb" in done.output
    assert "vr γ 0.1" in done.output
