"""Commands on runs: report, export, ls, watch, serve, advise, mcp, diff."""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
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
from gradvitals.cli import COMMANDS, main
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, TensorInfo

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


def test_a_run_is_found_by_its_name_in_either_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("gradvitals_runs/script"))
    write(Path("runs/loop"))
    for name, folder in (("script", "gradvitals_runs"), ("loop", "runs")):
        assert gradvitals("doctor", name).output.splitlines()[-1].startswith(f"{folder}/{name}: ")


def test_a_list_says_what_is_wrong_in_a_few_words(here: Path) -> None:
    write(here / "runs/a", SPIKE)
    assert "Unhealthy: gradient explosion" in gradvitals("ls", "runs").output
    [line] = json.loads(gradvitals("ls", "runs", "--json").output)["runs"]
    assert line["text"] == SPIKE.title


# -- report and export -----------------------------------------------------------------------------------------------

WriteRun = Callable[..., Path]


def in_a_process(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradvitals.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, encoding="utf-8")


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


@pytest.mark.parametrize("command", [["report", "--json"], ["export", "--csv", "-"], ["watch", "--once"]])
def test_no_run_there_is_one_line_and_exit_2(command: list[str], tmp_path: Path) -> None:
    done = in_a_process(command[0], tmp_path / "nowhere", *command[1:])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "nowhere" in done.stderr


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
    printed = in_a_process("export", run, "--csv", "-")
    written = in_a_process("export", run, "--csv", tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text("utf-8") == printed.stdout
    assert "400 rows" in written.stderr
    assert written.stdout == ""


def test_export_into_a_closed_pipe_ends_quietly(write_run: WriteRun) -> None:
    command = f"'{sys.executable}' -m gradvitals.cli export '{write_run(steps=2000)}' --csv - | head -n 2"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr == ""


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


@pytest.mark.parametrize("command", [["report", "--html"], ["export", "--csv"]])
def test_a_file_that_cannot_be_written_is_one_line(write_run: WriteRun, tmp_path: Path, command: list[str]) -> None:
    done = in_a_process(command[0], write_run(), command[1], tmp_path / "no" / "such" / "file")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


# -- watch -----------------------------------------------------------------------------------------------------------

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


# -- advise ----------------------------------------------------------------------------------------------------------

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
    assert set(told) == {"run", "steps", "live", "root", *TOPICS}
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
    assert short.startswith("First: gradients are not zeroed [stale_gradients]\n")
    assert "Learning rate, gradient clipping, batch size, warmup, learning-rate decay\n" in short
    assert full.count("show a bug (stale_gradients)") == 5


# -- mcp, used as an agent uses it -----------------------------------------------------------------------------------

mcp = pytest.importorskip("mcp")


@pytest.fixture
def folder(write_run: WriteRun) -> Path:
    return write_run().parent


def ask(folder: Path, *calls: tuple[str, dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Starts the server on a folder; returns its tools, and the answers to calls."""

    async def talk() -> tuple[list[Any], list[Any]]:
        server = mcp.StdioServerParameters(command=sys.executable, args=["-m", "gradvitals", "mcp", str(folder)])
        async with mcp.Client(server) as client:
            tools = (await client.list_tools()).tools
            return tools, [await client.call_tool(name, arguments) for name, arguments in calls]

    async def talk_in_time() -> Any:
        return await asyncio.wait_for(talk(), 60)

    with ThreadPoolExecutor(1) as thread:  # a browser of another test may keep a loop running in this one
        return thread.submit(asyncio.run, talk_in_time()).result()


def content(answer: Any) -> Any:
    assert not answer.is_error, answer.content[0].text
    return json.loads(answer.content[0].text)


def test_an_agent_finds_a_run_its_verdict_a_series_and_what_a_rule_means(folder: Path) -> None:
    tools, answers = ask(
        folder,
        ("list_runs", {}),
        ("verdict", {}),
        ("series", {"metric": "grad/norm", "points": 5}),
        ("explain", {"rule": "explosion"}),
        ("diff", {"a": "run", "b": "run"}),
        ("verdict", {"run": "../elsewhere"}),
    )
    assert {tool.name for tool in tools} == {"list_runs", "verdict", "series", "explain", "diff"}
    assert all(tool.annotations.read_only_hint for tool in tools)
    listed, verdict, series, rule, diff = map(content, answers[:5])
    assert [run["name"] for run in listed["runs"]] == ["run"]
    assert verdict["verdict"]["level"] == "attention"
    assert verdict["replayed"]
    assert series["steps"] == [0, 8, 16, 24, 32]
    assert max(series["high"]) == 40.0
    assert rule["causes"]
    assert diff["findings"] == {"gained": [], "lost": []}
    assert answers[5].is_error
    assert "there is no run '../elsewhere'; runs: run" in answers[5].content[0].text
