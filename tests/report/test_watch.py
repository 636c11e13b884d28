"""`gradvitals watch` reads only what is new, and suits any screen."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gradvitals.errors import RunFormatError
from gradvitals.report import live
from gradvitals.report.live import Frame, Lines, look, moments, wait_for
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, TensorInfo

META = {"facts": {}, "ranks": 4}
LAYOUT = Layout(
    tensors=(TensorInfo(index=0, name="head.weight", shape=(4,), dtype="float32", layer="head", depth=0),),
    layers=("head",),
)
SPIKE = Finding(id="explosion", severity="critical", title="the norm of L rose".replace("L", "L" * 5000), first_step=3)


def write_steps(writer: RunWriter, steps: range, loss: float = 2.0) -> None:
    for step in steps:
        values = {"loss": loss, "grad/norm": 1.5, "lr": 1e-3}
        norms = {"grad/norm": np.ones(1), "update/ratio": np.full(1, 0.01)}
        writer.write(Reading(step=step, time=0.0, values=values, tensors=norms))
        values = {"gsnr": 0.5, "noise_scale": 64.0, "noise_scale_low": 50.0, "noise_scale_high": 90.0}
        writer.write(Reading(step=step, time=0.0, source="microbatch", values=values, layers={"gsnr": np.ones(1)}))
    writer.commit()


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    writer = RunWriter(tmp_path / "run", meta=META)
    writer.write(LAYOUT)
    write_steps(writer, range(40))
    return writer


def shown(content: Any, width: int = 100, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False, **options)
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_look_has_the_latest_layers(writer: RunWriter) -> None:
    assert look(writer.path).summary.layers_step == 39
    write_steps(writer, range(40, 42))
    assert look(writer.path).summary.layers_step == 41


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_frame_fits_the_screen_and_shows_what_there_is(writer: RunWriter, width: int) -> None:
    writer.write(SPIKE)
    writer.commit()
    text = shown(Frame(look(writer.path)), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for part in ("4 ranks", "Unhealthy: 40 steps so far", "loss", "GSNR", "64", "explosion", "head", "0.01"):
        assert part in flat, part
    assert len(text) < 8000  # a name may have any length


def test_lines_come_when_there_is_news(writer: RunWriter) -> None:
    console = Console(file=io.StringIO(), width=200, markup=False, highlight=False)
    lines = Lines(console)
    lines.show(look(writer.path))
    lines.show(look(writer.path))
    writer.write(Finding(id="explosion", severity="warning", title="the norm rose", first_step=39))
    write_steps(writer, range(40, 41))
    lines.show(look(writer.path))
    writer.write(Finding(id="explosion", severity="warning", title="the norm rose", first_step=39, last_step=39))
    writer.close()
    lines.show(look(writer.path))
    assert isinstance(console.file, io.StringIO)
    said = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert [line.split("  ")[0] for line in said[:2]] == ["step 39", "step 40"]
    assert said[2:4] == [
        "[warning] step 39: the norm rose (explosion)",
        "resolved: [warning] step 39: the norm rose (explosion)",
    ]
    assert said[4].endswith("run: finished")
    assert said[5].startswith("Needs attention: 41 steps, 1 resolved")


def test_json_is_one_strict_line(writer: RunWriter) -> None:
    data = json.loads(json.dumps(look(writer.path).to_json(), allow_nan=False))
    assert (data["last_step"], data["values"]["loss"], data["verdict"]["level"]) == (39, 2.0, "healthy")


def test_it_waits_for_a_run_and_reports_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            RunWriter(tmp_path / "run", meta=META).close()

    monkeypatch.setattr(live.time, "sleep", nap)
    wait_for(tmp_path / "run", said.append)
    moment = look(tmp_path / "run")
    assert (moment.summary.last_step, moment.ended, len(naps), len(said)) == (None, True, 3, 1)
    assert "No readings yet." in shown(Frame(moment))


def test_a_file_that_is_no_run_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_text("no database at all" * 100)
    with pytest.raises(RunFormatError):
        wait_for(tmp_path, print)


def test_a_look_that_takes_long_is_followed_by_a_longer_pause(
    writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Callable[[], float] = iter([0.0, 3.0, 20.0, 20.0]).__next__
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if sum(naps) >= 12.0:
            writer.close()

    monkeypatch.setattr(live.time, "monotonic", clock)
    monkeypatch.setattr(live.time, "sleep", nap)
    assert len(list(moments(writer.path, 1.0))) == 2
    assert sum(naps) == 12.0


def test_the_end_of_a_run_does_not_wait_for_the_next_line(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        writer.close()

    monkeypatch.setattr(live.time, "sleep", nap)
    assert [moment.ended for moment in moments(writer.path, 10.0)] == [False, True]
    assert naps == [1.0]


def test_lines_of_a_finished_run_skip_resolved_findings_and_an_unknown_noise_scale(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", meta=META) as writer:
        writer.write(LAYOUT)
        for step in range(40):
            writer.write(Reading(step=step, time=0.0, values={"loss": 2.0, "grad/norm": 1.5}))
        for first in range(10, 30):
            finding = Finding(id="loss_spike", severity="warning", title="old", first_step=first, last_step=first)
            writer.write(finding)
        writer.write(Finding(id="explosion", severity="critical", title="the norm rose", first_step=30))
    console = Console(file=io.StringIO(), width=200)
    Lines(console).show(look(tmp_path / "run"))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("loss_spike") == 0
    assert "the norm rose (explosion)" in text
    assert "1 open finding, 20 resolved" in text
    assert "noise scale" not in text
