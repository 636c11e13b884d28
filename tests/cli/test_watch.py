"""`gradvitals watch` as a command: in a pipe, in a terminal, waiting, and left with Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradvitals.cli import main

WriteRun = Callable[..., Path]
COMMAND = [sys.executable, "-m", "gradvitals.cli", "watch"]


def test_a_finished_run_is_shown_once_and_left(write_run: WriteRun) -> None:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(main, ["watch", str(write_run())])
    assert result.exit_code == 0
    assert result.output.startswith("step 39")
    assert "run: finished" in result.output


def test_once_and_json(write_run: WriteRun) -> None:
    run = str(write_run())
    once = CliRunner(env={"COLUMNS": "100"}).invoke(main, ["watch", run, "--once"])
    assert once.exit_code == 0
    assert "Layers at step 39" in once.output
    assert "Recorded without diagnosis" in once.output
    [line] = CliRunner().invoke(main, ["watch", run, "--json"]).output.splitlines()
    data = json.loads(line)
    assert (data["state"], data["last_step"], data["verdict"]) == ("finished", 39, None)


def test_once_without_a_run_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["watch", str(tmp_path / "nowhere"), "--once"])
    assert result.exit_code == 2


def test_it_waits_and_ctrl_c_leaves_with_130(tmp_path: Path) -> None:
    with subprocess.Popen([*COMMAND, str(tmp_path / "later")], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "Waiting for a run in" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert "Traceback" not in process.stderr.read()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a pseudo-terminal")
def test_in_a_terminal_the_last_frame_stays_and_the_screen_is_given_back(write_run: WriteRun) -> None:
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "90", "LINES": "20"}
    with subprocess.Popen([*COMMAND, str(write_run())], stdout=follower, env=environment) as process:
        os.close(follower)
        seen = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
            if not part:
                break
            seen += part
        assert process.wait(timeout=30) == 0
    os.close(leader)
    text = seen.decode()
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    drawn, left = text.split("\x1b[?1049l")
    assert "more lines in a taller window" in drawn
    assert "Largest update/weight" in left
