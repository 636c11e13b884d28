from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gradvitals.report.report import Report
from gradvitals.report.summary import Summary, summarize
from gradvitals.report.terminal import render_report
from gradvitals.store.reader import open_run
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


def test_layers_are_in_depth_order_with_norms_of_their_tensors_together(write_run: WriteRun) -> None:
    summary = summary_of(write_run())
    assert [row.name for row in summary.layers] == ["embed", "blocks.0", "head"]
    block = summary.layers[1]  # tensors 2 and 3 of 4: norms 2 and 3, weights 20 and 30, updates 0.04 and 0.09
    assert block.grad_norm == pytest.approx(np.hypot(2, 3))
    assert block.update_ratio == pytest.approx(np.hypot(0.04, 0.09) / np.hypot(20, 30))
    assert (block.gsnr, block.gsnr_low, block.gsnr_high) == pytest.approx((1.0, 0.75, 1.25))


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
            summary = SimpleNamespace(layers=rows[:many], layers_step=5, gsnr_source=None, gsnr_batch_size=None)
            console.print(layer_table(summary))
        words = [line.split()[0] for line in shown.get().splitlines() if line.strip()]
        names = [word for word in words if word[5:].isdigit()]
        assert len(names) == MAX_LAYERS
        assert (names[0], names[-1]) == ("layer0", f"layer{many - 1}")
        assert (f"{left_out:,} more; gradvitals export has all" in shown.get()) == (left_out > 0)
