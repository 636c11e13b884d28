"""Real scripts run bare and watched. Here a tiny script stands in for them, which logs as nanoGPT does."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.real_scripts import public as real_scripts
from benchmarks.real_scripts.__main__ import main
from benchmarks.real_scripts.gate import CASES, HERE, Case, Ended, format_gate, judge, passes
from benchmarks.real_scripts.public import ScriptRun, compare, prepare_characters

TRAIN = """
import os, sys, time, torch
assert os.path.exists("data/shakespeare_char/train.bin") and "--device=cpu" in sys.argv
steps = int(sys.argv[-1].removeprefix("--max_iters="))
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(steps + 1):
    started = time.time()
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"iter {step}: loss {loss.item():.4f}, time {1000 * (time.time() - started) + 1:.2f}ms, mfu -100.00%")
"""


def test_a_script_is_run_bare_and_watched(tmp_path: Path) -> None:
    script, text = tmp_path / "scripts" / "nanoGPT" / "train.py", tmp_path / "text.txt"
    script.parent.mkdir(parents=True)
    script.write_text(TRAIN)
    text.write_text("to be or not to be")
    arguments = ["--scripts", str(script.parents[1]), "--text", str(text), "--device", "cpu", "--pairs", "1"]
    found = CliRunner().invoke(real_scripts.main, [*arguments, "--steps", "20", "--json"])
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    (one,) = result["scripts"]
    assert (one["script"], one["recorded_steps"], one["identical_losses"]) == ("nanoGPT", 20, True)
    assert one["bare_ms"] > 0
    assert "| nanoGPT 0.8M |       20 of 20 |         yes |" in real_scripts.format_scripts(result)
    assert list(script.parent.iterdir()) == [script]  # it ran in a copy


def test_pairs_are_compared_by_their_median_and_mean_steps() -> None:
    bare = [ScriptRun({0: "1.0"}, [1.0, 1.0, 4.0]), ScriptRun({0: "1.0"}, [2.0, 2.0, 2.0])]
    watched = [ScriptRun({0: "1.0"}, [1.1, 1.1, 3.8], 3), ScriptRun({0: "1.0"}, [2.6, 2.6, 2.6], 3)]
    found = compare(bare, watched)
    assert found["ratios"] == pytest.approx([1.1, 1.3])
    assert found["ratio"] == pytest.approx(1.2)
    assert found["mean_ratios"] == pytest.approx([1.0, 1.3])
    assert found["identical_losses"]
    assert not compare(bare, [watched[0], ScriptRun({0: "1.1"}, [2.0], 3)])["identical_losses"]


def test_text_is_prepared_as_character_data(tmp_path: Path) -> None:
    text = "abcabcabca"
    prepare_characters(tmp_path, text)
    folder = tmp_path / "data" / "shakespeare_char"
    parts = [np.fromfile(folder / name, dtype=np.uint16).tolist() for name in ("train.bin", "val.bin")]
    assert parts == [[0, 1, 2, 0, 1, 2, 0, 1, 2], [0]]
    meta = pickle.loads((folder / "meta.pkl").read_bytes())
    assert meta == {"vocab_size": 3, "itos": {0: "a", 1: "b", 2: "c"}, "stoi": {"a": 0, "b": 1, "c": 2}}


def test_a_folder_without_known_scripts_is_an_error(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x")
    found = CliRunner().invoke(real_scripts.main, ["--scripts", str(tmp_path), "--text", str(text), "--device", "cpu"])
    assert found.exit_code == 2
    assert "nanoGPT" in found.output


def test_every_script_is_declared_and_every_declared_script_is_there() -> None:
    assert {path.stem for path in HERE.glob("*.py")} - {"clock"} == {case.name for case in CASES} - {"nanoGPT"}
    assert all("gradvitals" not in path.read_text() for path in HERE.glob("*.py"))


@pytest.mark.slow
def test_the_quick_gate_holds() -> None:
    done = CliRunner().invoke(main, ["--quick", "--json"])
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert set(rows) == {"timm_like", "composer_like", "word_language_model", "thirty_steps", "accumulation"}
    for row in rows.values():
        assert (row["watched"], row["identical"], row["loss"], row["verdict"]) == ("yes", True, True, True), row
        assert row["batch"] is not False, row
    assert "So far: loss 19" in rows["thirty_steps"]["headline"]


def test_a_script_that_is_not_watched_needs_the_declared_reason() -> None:
    bare = Ended("a", [1.0] * 3, [0.0, 1.0, 2.0], [0.0, 0.5, 1.0])
    case = Case("hogwild", reason="in processes that it started")
    silent = judge(case, [bare], [bare], [])
    told = judge(case, [bare], [Ended("a", [], [0.0, 1.1], [0.0, 0.5], ["training in processes that it started"])], [])
    other = judge(case, [bare], [Ended("b", [], [0.0, 1.0], [0.0, 0.5], ["in processes that it started"])], [])
    assert [(row.watched_ok, row.identical) for row in (silent, told, other)] == [
        (False, True),
        (True, True),
        (True, False),
    ]
    assert (told.bare_ms, told.ratio) == (pytest.approx(1000), pytest.approx(1.1))
    results = [{"rows": [vars(row)]} for row in (silent, told, other)]
    assert [passes(result) for result in results] == [False, True, False]
    everything = {
        "machine": "one",
        "torch": "2",
        "date": "now",
        "pairs": 1,
        "longer": 1,
        "packages": {},
        "left_out": {},
    }
    assert "1 of 1 watched, or not watched with a precise reason" in format_gate({**everything, **results[1]})
