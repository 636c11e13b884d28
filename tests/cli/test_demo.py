from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import warm_python

from gradvitals.store.reader import open_run

COMMAND = ("-m", "gradvitals.cli", "demo")
FEW = ("--steps", "60")


def demo(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    return warm_python.run(*COMMAND, *args, encoding="utf-8", **options)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = demo("--out", tmp_path_factory.mktemp("demo") / "run", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_planted_fault_is_found_with_its_cause_and_its_fix(result: dict[str, Any]) -> None:
    verdict = result["verdict"]
    assert verdict["level"] == "unhealthy"
    assert verdict["worst"] == "stale_gradients"
    assert "zero_grad() is missing" in verdict["cause"]
    assert "zero_grad()" in verdict["fix"]


def test_with_the_fix_the_run_is_healthy_and_the_loss_far_lower(result: dict[str, Any]) -> None:
    assert result["fixed"]["verdict"]["level"] == "healthy"
    assert result["fixed"]["loss"] < 0.7 * result["loss"]
    assert result["fixed"]["path"] == f"{result['path']}-fixed"


def test_both_runs_have_layers_heads_and_gsnr(result: dict[str, Any]) -> None:
    for path in (result["path"], result["fixed"]["path"]):
        with open_run(path) as run:
            assert run.last_step == 199
            assert "microbatch" in run.sources("gsnr")
            assert len(run.heads) == 16
            assert run.dropped == 0


def test_printed_it_tells_the_story_in_order(tmp_path: Path) -> None:
    done = demo(*FEW, "--out", tmp_path / "run", env={**os.environ, "COLUMNS": "90"})
    assert done.returncode == 0, done.stderr
    parts = (
        "its loop never calls optimizer.zero_grad()",
        "60 of 60 steps  loss",
        "Gradients are not zeroed",
        "Likely cause",
        "Fix ",
        "The same training with zero_grad():",
        "Loss without zero_grad()",
        "Loss with zero_grad()",
        "The fix lowers the loss after 60 steps from",
        "gradvitals diff",
    )
    text = " ".join(done.stdout.split())
    at = [text.find(" ".join(part.split())) for part in parts]
    assert -1 not in at, parts[at.index(-1)]
    assert at == sorted(at)
    assert max(map(len, done.stdout.splitlines())) <= 90
    assert "\x1b" not in done.stdout


def test_without_a_fault_it_trains_once(tmp_path: Path) -> None:
    done = demo("--steps", 5, "--fault", "none", "--out", tmp_path / "run", "--json")
    data = json.loads(done.stdout)
    assert data["steps"] == 5
    assert "fixed" not in data
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_ctrl_c_ends_it_early_and_keeps_the_run(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [warm_python.executable(), *COMMAND, "--steps", "100000", "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        # What a shell runs in the background ignores the signal, and so would all it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (tmp_path / "run" / "run.db").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert "The run is in" in output
    with open_run(tmp_path / "run") as run:
        assert run.meta["finished_at"] is not None
