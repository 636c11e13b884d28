"""Which run a command means: the one that is named, the one likely meant, or the newest; and `gradvitals ls`."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradvitals.cli import COMMANDS, main
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Reading

SPIKE = Finding(id="explosion", severity="critical", title="the norm rose to 41× its baseline", first_step=50)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, *findings: Finding, age: float = 0.0, loss: float = 1.0) -> None:
    with RunWriter(path, meta={"facts": {}}) as writer:
        for step in range(100):
            values = {"loss": loss, "grad/norm": 1.0 + 0.01 * (step % 7)}
            writer.write(Reading(step=step, time=float(step), values=values))
        for finding in findings:
            writer.write(finding)
        writer.commit()
    file = path / "run.db"
    at = file.stat().st_mtime - age
    os.utime(file, (at, at))


def gradvitals(*args: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(main, list(args))


def test_without_a_name_the_newest_run_is_taken(here: Path) -> None:
    write(Path("runs/old"), SPIKE, age=100)
    write(Path("runs/new"))
    assert gradvitals("doctor").exit_code == 0
    write(Path("runs/newest"), SPIKE)
    assert gradvitals("doctor").exit_code == 1
    for command in ("report", "advise"):
        assert json.loads(gradvitals(command, "--json").output)["run"] == "runs/newest"
    assert "runs/newest" in gradvitals("watch", "--once").output
    assert gradvitals("export", "--csv", "-").output.count("\n") == 101


def test_the_newest_run_of_either_folder_is_taken(here: Path) -> None:
    write(Path("gradvitals_runs/script"), age=100)
    write(Path("runs/loop"), SPIKE)
    assert gradvitals("doctor").output.splitlines()[-1].startswith("runs/loop: ")
    os.utime("runs/loop/run.db", (1, 1))
    assert gradvitals("doctor").output.splitlines()[-1].startswith("gradvitals_runs/script: ")


def test_a_name_in_runs_is_enough(here: Path) -> None:
    write(Path("runs/gpt"), SPIKE)
    assert gradvitals("doctor", "gpt").output.splitlines()[-1].startswith("runs/gpt: ")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gtp", "did you mean runs/gpt?"),
        ("runs/gtp", "did you mean runs/gpt?"),
        ("runs/other", "runs in runs: gpt"),
        ("runs", "runs is not a run, but has runs in it: gpt"),
    ],
)
def test_a_run_that_is_not_there_brings_up_those_that_are(here: Path, name: str, says: str) -> None:
    write(Path("runs/gpt"))
    result = gradvitals("doctor", name)
    assert result.exit_code == 2
    assert says in result.stderr


def test_no_runs_at_all(here: Path) -> None:
    result = gradvitals("doctor")
    assert result.exit_code == 2
    assert "there are no runs in gradvitals_runs; record one with `gradvitals run train.py`" in result.stderr
    assert "There are no runs in gradvitals_runs." in gradvitals("ls").output


def test_ls_has_a_line_for_each_run_the_newest_first(here: Path) -> None:
    write(Path("runs/old"), SPIKE, age=7300, loss=2.5)
    write(Path("runs/deep/new"))
    lines = gradvitals("ls").output.splitlines()
    assert lines[1].split() == ["●", "runs/deep/new", "100", "1", "0", "s", "Healthy"]
    assert lines[2].split()[:7] == ["●", "runs/old", "100", "2.5", "2", "h", "Unhealthy:"]
    assert max(map(len, lines)) <= 100
    data = json.loads(gradvitals("ls", "-n", "1", "--json").output)
    assert data["num_runs"] == 2
    assert [(run["name"], run["level"], run["steps"]) for run in data["runs"]] == [("deep/new", "healthy", 100)]
    assert "and 1 more" in gradvitals("ls", "-n", "1").output


def test_ls_keeps_the_end_of_a_long_name_which_tells_runs_apart(here: Path) -> None:
    write(Path("gradvitals_runs/an-experiment-with-a-very-long-name/2026-11-19_05-31-22"))
    assert "  …/2026-11-19_05-31-22 " in gradvitals("ls").output


def test_files_of_other_tools_are_not_runs(here: Path) -> None:
    write(Path("runs/ours"), age=100)
    Path("runs/theirs").mkdir()
    with sqlite3.connect("runs/theirs/run.db") as db:
        db.execute("CREATE TABLE x (y)")
    Path("runs/events").mkdir()
    Path("runs/events/run.db").write_bytes(b"not even SQLite")
    assert [run["name"] for run in json.loads(gradvitals("ls", "--json").output)["runs"]] == ["ours"]
    assert gradvitals("doctor").output.splitlines()[-1].startswith("runs/ours: ")
    assert "runs in runs: ours" in gradvitals("doctor", "runs/x").stderr


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("bench", "overhead")])
def test_the_help_fits_80_columns(command: tuple[str, ...]) -> None:
    lines = CliRunner(env={"COLUMNS": "80"}).invoke(main, [*command, "--help"]).output.splitlines()
    assert lines
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith("...") and "Usage" not in line]


def test_runs_of_other_tools_stay_apart(here: Path) -> None:
    write(Path("runs/first"))
    assert "runs/first" in gradvitals("ls").output  # where examples keep theirs
    write(Path("gradvitals_runs/ours"))
    Path("runs/CartPole__dqn__1").mkdir()
    Path("runs/CartPole__dqn__1/events.out.tfevents.1").write_bytes(b"x")
    assert [run["name"] for run in json.loads(gradvitals("ls", "--json").output)["runs"]] == ["ours", "first"]
    assert gradvitals("doctor").output.splitlines()[-1].startswith("gradvitals_runs/ours: ")


def test_a_list_says_what_is_wrong_in_a_few_words(here: Path) -> None:
    write(here / "runs/a", SPIKE)
    assert "Unhealthy: gradient explosion" in gradvitals("ls", "runs").output
    [line] = json.loads(gradvitals("ls", "runs", "--json").output)["runs"]
    assert line["text"] == SPIKE.title
