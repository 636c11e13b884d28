"""A run in the terminal, finished or while it trains."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gradvitals.errors import RunFormatError
from gradvitals.report import live
from gradvitals.report.html import render_html
from gradvitals.report.live import Lines, frame, look, moments, wait_for
from gradvitals.report.report import Report
from gradvitals.report.summary import Summary, summarize
from gradvitals.report.terminal import render_report
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, TensorInfo, json_ready

WriteRun = Callable[..., Path]


def shown(content: object, **options: object) -> str:
    options = {"width": 100, "markup": False, "emoji": False, "highlight": False, **options}
    console = Console(file=io.StringIO(), **options)  # type: ignore[arg-type]
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def summary_of(path: Path) -> Summary:
    with open_run(path) as run:
        return summarize(run)


def report_of(path: Path, **options: object) -> str:
    with open_run(path) as run:
        return shown(render_report(Report(run)), **options)


def test_a_report_says_all_there_is(write_run: WriteRun) -> None:
    with open_run(write_run()) as run:
        text = shown(render_report(Report(run)))
    # Where the first line breaks depends on how long the folder's name is.
    assert re.search(r"finished, 40 steps, [\d.]+ s, 80 parameters in 4 tensors", " ".join(text.split()))
    for part in (
        "samples (95%: 50 to 90)",
        "GSNR from microbatch at batch size 32",
        "0.75 to 1.25",
        "Lowest GSNR",
        "Largest spike ratio, norm over its moving average, in the whole run",
        "step 30  head.weight",
        "NaN or Inf in the gradient",
        "step 25  blocks.0.attn.qkv.weight",
    ):
        assert part in text, part
    assert "dropped" not in text


BLOWN_UP = {
    "nan": (lambda step: math.nan if step >= 20 else 2.0, "the loss is NaN or infinite since step 20"),
    "far": (lambda step: 2.0 * 1.2**step, "the loss rose from "),
    "alike": (lambda step: 2.0, "all 4 values are alike"),
}


@pytest.mark.parametrize("kind", BLOWN_UP)
def test_there_is_no_ranking_of_a_gsnr_that_means_nothing(write_run: WriteRun, kind: str) -> None:
    loss, why = BLOWN_UP[kind]

    def readings(step: int) -> list[Reading]:
        tensors = {"gsnr": np.full(4, 0.25), "grad/norm": np.full(4, math.nan if loss(step) != loss(step) else 1.0)}
        values = {"loss": loss(step), "grad/norm": 1.0}
        return [
            Reading(step=step, time=0.0, values=values, tensors={"grad/norm": tensors.pop("grad/norm")}),
            Reading(step=step, time=0.0, source="adam", values={"gsnr": 0.25}, tensors=tensors),
        ]

    path = write_run(readings=readings, findings=())
    text = " ".join(report_of(path).split())
    assert f"Lowest GSNR, not ranked: {why}" in text
    assert ("Layers are not shown: " in text) == (kind == "nan")
    assert "95% interval" not in text
    assert summary_of(path).to_json()["lowest_gsnr"] == []
    if kind == "far":  # the loss of a policy may rise
        with RunWriter(path.with_name("policy"), meta=META) as writer:
            for step in range(40):
                writer.write(Reading(step=step, time=0.0, values={"loss": loss(step), "head/signed_weights": 1.0}))
        assert summary_of(path.with_name("policy")).blown_up == ""
    with open_run(path) as run:
        page = render_html(run)
    assert why in page
    assert ("Layers are not shown: " in page) == (kind == "nan")


def test_the_largest_spike_and_the_layers_it_hit(write_run: WriteRun) -> None:
    spike = summary_of(write_run()).largest_spike
    assert spike is not None
    assert (spike.step, spike.ratio, spike.norm) == (30, 20.0, 40.0)
    assert [layer.name for layer in spike.layers] == ["head", "blocks.0", "embed"]


def test_json_has_all_of_it_and_is_strict(write_run: WriteRun) -> None:
    with open_run(write_run()) as run:
        data = json.loads(json.dumps(json_ready(Report(run).summary_json()), allow_nan=False))
    assert data["noise_scale"] == {
        "measured": True, "value": 64.0, "low": 50.0, "high": 90.0, "source": "microbatch", "identifiable": True,
        "batch_known": True,
    }  # fmt: skip
    assert data["trends"]["grad/norm"]["max"] == 40.0
    assert len(data["layers"]) == 3
    assert data["findings"][0]["title"] == "the norm jumped"


def without_noise_scale(step: int) -> list[Reading]:
    values = {"loss": float("nan"), "grad/norm": float("inf"), "noise_scale": float("nan")}
    return [Reading(step=step, time=float(step), values=values)]


def test_unknown_numbers_are_marked(write_run: WriteRun) -> None:
    path = write_run(readings=without_noise_scale, layout=Layout())
    summary = summary_of(path)
    text = report_of(path)
    assert "not identifiable" in text
    loss = summary.trend("loss")
    assert loss is not None
    assert math.isnan(loss.latest)  # a loss that is not a number is shown as that, not as the last one that was
    assert "!!!" in text
    json.dumps(json_ready(summary.to_json()), allow_nan=False)


@pytest.mark.parametrize("layout", [None, Layout()])
def test_a_run_without_readings(write_run: WriteRun, layout: Layout | None) -> None:
    path = write_run(steps=0, layout=layout)
    text = report_of(path)
    assert "No readings yet." in text
    assert "the norm jumped" in text


HOSTILE = ("[bold red]x[/]", "[/nope]", "a\x1b[2Jb", "line\nbreak", ":smile:", "x" * 500, "\u202eright to left", "")


def hostile_layout() -> Layout:
    tensors = tuple(
        TensorInfo(index=i, name=name, shape=(2,), dtype="float32", layer=name, depth=i)
        for i, name in enumerate(HOSTILE)
    )
    return Layout(tensors=tensors, layers=HOSTILE)


def hostile_readings(step: int) -> list[Reading]:
    rows = np.arange(1.0, len(HOSTILE) + 1)
    columns = {name: rows for name in ("grad/norm", "grad/spike_ratio", "grad/nonfinite", "update/ratio")}
    gsnr = Reading(step=step, time=0.0, source="adam", tensors={"gsnr": rows}, layers={"gsnr": rows})
    return [Reading(step=step, time=0.0, values={"loss": 1.0}, tensors=columns), gsnr]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("color", [None, "truecolor"])
def test_names_are_text_whatever_they_hold(write_run: WriteRun, width: int, color: str | None) -> None:
    finding = Finding(id="x", severity="warning", title="[red]\x1b]0;owned\x07", tensors=HOSTILE)
    path = write_run(steps=3, layout=hostile_layout(), readings=hostile_readings, findings=(finding,))
    text = report_of(path, width=width, force_terminal=color is not None, color_system=color)
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text
    assert "\u202e" not in text
    if width == 200:
        assert "[bold red]x[/]" in text
        assert ":smile:" in text
        assert "line\\nbreak" in text


def test_ascii_terminals_get_ascii(write_run: WriteRun) -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"

    console = Console(file=Ascii(), width=80, markup=False, highlight=False)
    with open_run(write_run()) as run:
        console.print(render_report(Report(run)))
    assert isinstance(console.file, Ascii)
    assert console.file.getvalue().isascii()


def test_no_line_is_wider_than_the_screen(write_run: WriteRun) -> None:
    path = write_run()
    for width in (30, 60, 80, 120):
        assert max(map(len, report_of(path, width=width).splitlines())) <= width


def test_dropped_readings_are_reported(write_run: WriteRun) -> None:
    with open_run(write_run()) as run:
        report = Report(run)
        report.summary = replace(report.summary, dropped=1234)
        assert "1,234 readings were dropped" in shown(render_report(report))


def test_a_table_of_very_many_layers_leaves_out_the_middle() -> None:
    from types import SimpleNamespace

    from rich.console import Console

    from gradvitals.report.summary import LayerRow
    from gradvitals.report.terminal import MAX_LAYERS, layer_table

    nothing = float("nan")
    rows = [
        LayerRow(
            name=f"layer{at}", grad_norm=at, spike_ratio=1, gsnr=1, gsnr_low=nothing, gsnr_high=nothing, update_ratio=1
        )
        for at in range(MAX_LAYERS + 600)
    ]
    console = Console(width=100, color_system=None)
    for many, left_out in ((MAX_LAYERS, 0), (MAX_LAYERS + 600, 600)):
        with console.capture() as shown:
            about = {"layers_step": 5, "gsnr_origin": "", "shows_gsnr": True, "no_layers": ""}
            summary = SimpleNamespace(layers=rows[:many], **about)
            console.print(layer_table(summary))
        words = [line.split()[0] for line in shown.get().splitlines() if line.strip()]
        names = [word for word in words if word[5:].isdigit()]
        assert len(names) == MAX_LAYERS
        assert (names[0], names[-1]) == ("layer0", f"layer{many - 1}")
        assert (f"{left_out:,} more; gradvitals export has all" in shown.get()) == (left_out > 0)


# -- gradvitals watch ------------------------------------------------------------------------------------------------

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


def shown_watch(content: Any, width: int = 100, **options: Any) -> str:
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
    text = shown_watch(frame(look(writer.path)), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for part in ("4 ranks", "Unhealthy: ", "40 steps so far, ", "loss", "GSNR", "64", "explosion", "head", "0.01"):
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
    assert said[5:] == ["Needs attention: the norm rose (step 39, resolved 1 step ago).", "41 steps, 1 resolved"]


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
    assert "No readings yet." in shown_watch(frame(moment))


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
