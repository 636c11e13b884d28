from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gradvitals.cli import main
from gradvitals.types import Layout, Reading, TensorInfo

WriteRun = Callable[..., Path]


def gradvitals(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradvitals.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, encoding="utf-8")


def test_report_prints_and_needs_no_torch(write_run: WriteRun) -> None:
    code = "import sys\nsys.modules['torch'] = None\nfrom gradvitals.cli import main\nmain(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", write_run()],
        capture_output=True,
        text=True,
        timeout=60,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert "Layers at step 39" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_terminal_without_the_characters_gets_escapes(write_run: WriteRun) -> None:
    names = ("\u5c42.weight", "\ud800.weight")
    tensors = tuple(
        TensorInfo(index=i, name=name, shape=(2,), dtype="float32", layer=name, depth=i) for i, name in enumerate(names)
    )
    reading = Reading(step=0, time=0.0, values={"loss": 1.0}, tensors={"grad/norm": np.ones(2)})
    run = write_run(steps=1, layout=Layout(tensors=tensors, layers=names), readings=lambda step: [reading])
    for args in (["report", run], ["export", run, "--csv", "-"], ["report", run, "--json"]):
        command = [sys.executable, "-m", "gradvitals.cli", *map(str, args)]
        done = subprocess.run(command, capture_output=True, timeout=60, env={**os.environ, "PYTHONIOENCODING": "ascii"})
        assert done.returncode == 0, done.stderr
        assert b"weight" in done.stdout


def test_report_json(write_run: WriteRun) -> None:
    result = CliRunner().invoke(main, ["report", str(write_run()), "--json"])
    data = json.loads(result.output)
    assert data["last_step"] == 39
    assert data["state"] == "finished"


@pytest.mark.parametrize("command", [["report"], ["report", "--json"], ["export", "--csv", "-"]])
def test_no_run_there_is_one_line_and_exit_2(command: list[str], tmp_path: Path) -> None:
    done = gradvitals(command[0], tmp_path / "nowhere", *command[1:])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "nowhere" in done.stderr


def test_a_file_that_is_not_a_run(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    file.write_text("not a database at all, but long enough to be looked at" * 20)
    done = gradvitals("report", tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "not a gradvitals run" in done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["docter"], "There is no command 'docter'. Did you mean 'doctor'?"),
        (["zzz"], "There is no command 'zzz'. Commands: run, doctor"),
        (["report", "x", "--nope"], "No such option"),
        (["export", "x"], "one of --csv PATH and --parquet PATH"),
        (["export", "x", "--csv", "a", "--parquet", "b"], "one of --csv PATH and --parquet PATH"),
        (["export", "x", "--csv", "-", "--json"], "give --csv a file"),
        (["export", "x", "--csv", "-", "--kind", "nope"], "'nope' is not one of"),
        (["bench", "overhead", "--workload", "nope"], "'nope' is not one of"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # without runs
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_arguments_show_the_help() -> None:
    result = CliRunner().invoke(main, [])
    assert "gradvitals demo" in result.output


def test_export_to_the_screen_and_to_a_file_agree(write_run: WriteRun, tmp_path: Path) -> None:
    run = write_run()
    printed = gradvitals("export", run, "--csv", "-")
    written = gradvitals("export", run, "--csv", tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text("utf-8") == printed.stdout
    assert "400 rows" in written.stderr
    assert written.stdout == ""


def test_export_into_a_closed_pipe_ends_quietly(write_run: WriteRun) -> None:
    command = f"'{sys.executable}' -m gradvitals.cli export '{write_run(steps=2000)}' --csv - | head -n 2"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr == ""


def test_export_to_a_folder_that_does_not_exist(write_run: WriteRun) -> None:
    done = gradvitals("export", write_run(), "--csv", "/nonexistent/folder/a.csv")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_export_json_counts_rows(write_run: WriteRun, tmp_path: Path) -> None:
    args = ["export", str(write_run()), "--parquet", str(tmp_path / "a.parquet"), "--kind", "layer", "--json"]
    result = CliRunner().invoke(main, args)
    assert json.loads(result.output) == {"path": str(tmp_path / "a.parquet"), "rows": 120}


def test_parquet_without_pyarrow_says_what_to_install(
    write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def no_pyarrow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pyarrow)
    result = CliRunner().invoke(main, ["export", str(write_run()), "--parquet", str(tmp_path / "a.parquet")])
    assert result.exit_code == 2
    assert "pip install 'gradvitals[parquet]'" in result.stderr
    assert not (tmp_path / "a.parquet").exists()


def test_report_writes_a_page_and_needs_no_torch(write_run: WriteRun, tmp_path: Path) -> None:
    code = "import sys\nsys.modules['torch'] = None\nfrom gradvitals.cli import main\nmain(sys.argv[1:])"
    file = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", write_run(), "--html", file], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"Wrote {file}" in done.stdout
    assert file.read_text("utf-8").startswith("<!doctype html>")


def test_a_report_that_cannot_be_written_is_one_line(write_run: WriteRun, tmp_path: Path) -> None:
    done = gradvitals("report", write_run(), "--html", tmp_path / "no" / "such" / "x.html")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
