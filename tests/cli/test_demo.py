from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import warm_python

from gradvitals.store.reader import open_run

COMMAND = ("-m", "gradvitals.cli", "demo")


def demo(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    return warm_python.run(*COMMAND, *args, encoding="utf-8", **options)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    out = tmp_path_factory.mktemp("demo") / "run"
    done = demo("--steps", 30, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return out, json.loads(done.stdout)


def test_json_is_all_that_is_printed(faulty: tuple[Path, dict[str, object]]) -> None:
    out, data = faulty
    assert data["path"] == str(out)
    assert data["steps"] == 30
    assert data["interrupted"] is False
    assert data["report"]["last_step"] == 29  # type: ignore[index]


def test_the_planted_fault_is_plain_in_the_record(faulty: tuple[Path, dict[str, object]]) -> None:
    out, data = faulty
    with open_run(out) as run:
        steps, ratios = run.series("grad/spike_ratio")
    at = int(np.nanargmax(ratios))
    assert steps[at] == data["fault_step"]
    assert ratios[at] > 5
    assert data["report"]["largest_spike"]["step"] == data["fault_step"]  # type: ignore[index]
    assert data["report"]["largest_spike"]["layers"]  # type: ignore[index]


def test_the_record_has_gsnr_of_every_layer_and_head(faulty: tuple[Path, dict[str, object]]) -> None:
    with open_run(faulty[0]) as run:
        assert "microbatch" in run.sources("gsnr")
        assert any("blocks.3" in layer for layer in run.layers)
        assert len(run.heads) == 16
        _, loss = run.series("loss")
        _, sizes = run.batch_sizes("gsnr", source="microbatch")
        assert run.dropped == 0
    assert len(loss) == 30
    assert set(sizes) == {8.0}  # four micro-batches of eight: the samples are micro-batches


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    done = demo("--steps", 12, "--no-fault", cwd=tmp_path, env={**os.environ, "TERM": "dumb"})
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "step   12/12" in done.stdout
    assert "Kept in runs/demo. Next:" in done.stdout
    assert "planted" not in done.stdout
    assert (tmp_path / "runs" / "demo" / "run.db").exists()


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    command = [warm_python.executable(), *COMMAND, "--steps", "100000", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        # What a shell runs in the background ignores the signal, and so would all it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "stopped early" in out
    assert "Traceback" not in err
    with open_run(tmp_path / "run") as run:
        assert run.meta["finished_at"]


def test_steps_must_be_a_number() -> None:
    done = demo("--steps", "0")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
