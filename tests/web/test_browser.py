"""The page in a real Chromium."""

from __future__ import annotations

import math
import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from web_runs import HOSTILE, LONG, damaged_run, hostile_run, wait, wait_for_charts, writing

import gradvitals as gv
from benchmarks.synthetic_run import write_synthetic_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, TensorInfo

pytestmark = pytest.mark.browser

OpenPage = Callable[..., Any]
HEATMAP = ".heat-scroll canvas"


def ink_of(page: Any, selector: str) -> int:
    """How many pixels of a canvas are drawn on."""
    return int(
        page.locator(selector).first.evaluate(
            "canvas => { const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
            " let found = 0; for (let i = 3; i < data.length; i += 4) found += data[i] > 0; return found; }"
        )
    )


def test_the_page_shows_verdict_charts_findings_and_layers(served: Any, folder: Path, open_page: OpenPage) -> None:
    page = open_page(served.url)
    page.get_by_role("button", name="gpt").click()
    wait_for_charts(page)
    with gv.open_run(folder / "gpt") as run:
        headline = run.verdict.headline
    shown = page.locator(".verdict-line").inner_text().replace("▲", "").strip()
    assert shown.replace("Needs attention ", "Needs attention: ") == headline
    assert page.locator(".strips > .strip").count() == 5
    for number in range(4):
        assert ink_of(page, f".strips > .strip >> nth={number} >> canvas") > 1000
        assert re.search(r"now [\d.,e−]+, between", page.locator(".plot").nth(number).get_attribute("aria-label"))
    wait(page, "performance.getEntriesByName('layers').length")
    assert ink_of(page, HEATMAP) > 10_000
    page.locator(".mark.critical").click()
    drawer = page.locator("#drawer")
    assert drawer.locator("h2").inner_text() == "the gradient norm rose to 14× its usual size"
    for text in (
        "norm over its baseline 14 (healthy: under 5)",
        "a bad batch",
        "clip gradients",
        "blocks.0.norm1.bias",
    ):
        assert text in drawer.inner_text()
    page.locator(".act").first.click()
    assert "left out" not in drawer.inner_text()
    assert "the norm was 14 times its usual size" in drawer.inner_text()
    wait(page, "document.querySelectorAll('.worst table').length === 3")


def test_new_steps_findings_and_runs_come_by_themselves(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    page = open_page(serve(tmp_path).url)
    page.get_by_role("heading", name="No runs yet").wait_for()
    with writing(tmp_path / "first") as write:
        page.locator(".strips > .strip").first.wait_for()
        page.get_by_text("Nothing wrong yet").or_(page.get_by_text("Healthy")).first.wait_for()
        wait_for_charts(page)
        page.evaluate("addEventListener('drawn', event => { window.last = event.detail.last; })")
        write(25)
        wait(page, "window.last === 84")
        write.writer.write(Finding(id="vanishing", severity="critical", title="gradients vanish", first_step=80))  # type: ignore[attr-defined]
        write(5)
        page.get_by_role("button", name="gradients vanish", exact=False).first.wait_for()
        page.locator(".verdict.unhealthy").wait_for()
        assert page.title().startswith("■")
        write_synthetic_run(tmp_path / "second", steps=30, num_tensors=14)
        page.locator(".run-name", has_text="second").wait_for()


def test_a_cell_opens_the_tensor_that_stands_out_and_a_name_its_layer(
    served: Any, folder: Path, open_page: OpenPage
) -> None:
    page = open_page(served.url)
    page.get_by_role("button", name="gpt").click()
    wait_for_charts(page)
    canvas = page.locator(HEATMAP)
    canvas.scroll_into_view_if_needed()
    wait(page, "performance.getEntriesByName('layers').length")
    short = canvas.bounding_box()["height"]
    canvas.click(position={"x": 400, "y": 24})  # the second row, blocks.0
    page.locator("#drawer .strip canvas").first.wait_for()
    with gv.open_run(folder / "gpt") as run:
        members = [info.name for info in run.tensors if info.layer == "blocks.0"]
        _, norms = run.matrix("grad/norm")
        weights = {info.name: norms[:, i] for i, info in enumerate(run.tensors)}
    name = page.locator("#drawer-title").inner_text()
    assert name in members
    assert any(weights[name][i] == max(weights[each][i] for each in members) for i in range(len(norms)))
    assert page.locator("#drawer .strip").count() == 4
    assert canvas.bounding_box()["height"] == short + 12 * 16
    page.keyboard.press("Escape")
    assert page.locator("#drawer").is_hidden()
    canvas.click(position={"x": 40, "y": 24})
    wait(page, f"document.querySelector('{HEATMAP}').getBoundingClientRect().height === {short}")
    page.get_by_role("button", name="GSNR", exact=True).click()
    canvas.click(position={"x": 40, "y": 24})
    tall = short + (12 + 8) * 16  # its heads as well
    wait(page, f"document.querySelector('{HEATMAP}').getBoundingClientRect().height === {tall}")
    canvas.click(position={"x": 500, "y": 16 * 15 + 8})
    assert page.locator("#drawer-title").inner_text() == "blocks.0.attn/head1"


def test_a_zoom_fetches_finer_numbers_and_everything_comes_back(served: Any, open_page: OpenPage) -> None:
    page = open_page(served.url)
    page.get_by_role("button", name="sweep/wide").click()
    wait_for_charts(page)
    page.requested.clear()
    box = page.locator(".strip .u-over").first.bounding_box()
    with page.expect_request(lambda request: "metric=loss" in request.url and "until=" in request.url) as asked:
        page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 42, steps=4)
        page.mouse.up()
    since, until = (int(re.search(rf"{name}=(-?\d+)", asked.value.url)[1]) for name in ("since", "until"))
    assert abs(since - 0.2 * LONG) < 0.03 * LONG
    assert abs(until - 0.4 * LONG) < 0.03 * LONG
    everything = page.get_by_role("button", name="Show everything")
    everything.wait_for()
    page.wait_for_timeout(200)
    first = page.requested.index(asked.value.url)
    assert sum("series" in url and "until=" in url for url in page.requested[first:]) == 5  # every chart follows
    everything.click()
    everything.wait_for(state="hidden")


def test_runs_are_compared_by_step_and_by_time(served: Any, open_page: OpenPage) -> None:
    page = open_page(served.url)
    page.get_by_role("button", name="gpt").click()
    wait_for_charts(page)
    page.get_by_label("Compare sweep/wide").check()
    page.locator(".legend-run").nth(1).wait_for()
    assert page.locator(".legend-run").all_inner_texts() == ["gpt", "sweep/wide"]
    wait(page, "document.querySelectorAll('.more .other').length === 5")
    colours = page.evaluate(
        "[...document.querySelectorAll('.legend-run')].map(each => each.style.getPropertyValue('--c'))"
    )
    assert len(set(colours)) == 2
    page.get_by_role("button", name="Time", exact=True).click()
    assert "over time" in page.locator(".plot").first.get_attribute("aria-label")
    address = page.url
    again = open_page(address)
    again.locator(".legend-run").nth(1).wait_for()
    page.get_by_label("Compare sweep/wide").uncheck()
    wait(page, "document.querySelectorAll('.legend-run').length === 0")


def contrasts(page: Any) -> list[float]:
    """Of text on cards, by the formula of WCAG."""
    return page.evaluate(
        """() => {
      const style = getComputedStyle(document.documentElement);
      const light = (name) => {
        const value = parseInt(style.getPropertyValue(name).trim().slice(1), 16);
        const [r, g, b] = [value >> 16, (value >> 8) & 255, value & 255].map((part) => {
          const share = part / 255;
          return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const names = ["ink", "dim", "accent", "healthy", "attention", "unhealthy", "critical", "warning", "info"];
      return names.flatMap((name) => ["--card", "--bg"].map((ground) => {
        const [a, b] = [light(`--${name}`), light(ground)].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
      }));
    }"""
    )


def test_light_and_dark_follow_the_system_and_the_choice_stays(served: Any, open_page: OpenPage) -> None:
    page = open_page(served.url, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    wait_for_charts(page)
    dark = page.evaluate(ground)
    assert min(contrasts(page)) >= 4.5
    page.get_by_role("button", name="Light").click()
    light = page.evaluate(ground)
    assert light != dark
    assert min(contrasts(page)) >= 4.5
    page.reload()
    assert page.evaluate(ground) == light
    page.keyboard.press("t")
    assert page.evaluate(ground) == dark
    assert open_page(served.url, color_scheme="light").evaluate(ground) == light


def test_everything_is_reached_by_keyboard(served: Any, folder: Path, open_page: OpenPage) -> None:
    page = open_page(served.url)
    wait_for_charts(page)
    drawer = page.locator("#drawer")
    page.keyboard.press("?")
    assert "Keys" in drawer.inner_text()
    assert drawer.locator("kbd").all_inner_texts()[:3] == ["j / k", "f", "x"]
    assert drawer.locator("dl.keys dd").first.inner_text() == "next or previous run"
    assert "[object" not in drawer.inner_text()
    page.keyboard.press("Escape")
    assert drawer.is_hidden()
    shown = page.locator(".run[aria-current]")
    page.keyboard.press("j")
    wait(page, "document.querySelector('.run[aria-current]').textContent.includes('gpt')")
    page.keyboard.press("k")
    wait(page, "document.querySelector('.run[aria-current]').textContent.includes('sweep/wide')")
    assert "sweep/wide" in shown.inner_text()
    page.locator(".verdict.attention").wait_for()
    wait_for_charts(page)
    page.keyboard.press("f")
    assert drawer.locator("h2").inner_text() == "gradients are noisier than they are large"
    page.keyboard.press("f")
    assert drawer.locator("h2").inner_text() == "the gradient norm rose to 14× its usual size"
    page.keyboard.press("Escape")
    page.keyboard.press("+")
    page.get_by_role("button", name="Show everything").wait_for()
    page.keyboard.press("0")
    page.get_by_role("button", name="Show everything").wait_for(state="hidden")
    page.locator(".mark").first.focus()
    page.keyboard.press("Enter")
    assert drawer.is_visible()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.classList.contains('mark')")
    page.locator(HEATMAP).focus()
    wait(page, "performance.getEntriesByName('layers').length")
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    wait(page, "document.getElementById('said').textContent.startsWith('blocks.0, norm ')")
    page.keyboard.press("Enter")
    wait(page, "document.getElementById('drawer-title')?.textContent.startsWith('blocks.0.')")


def test_every_control_has_a_name(served: Any, open_page: OpenPage) -> None:
    page = open_page(served.url)
    wait_for_charts(page)
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, input, canvas[tabindex], [role=img], section')]"
        ".filter(each => !(each.getAttribute('aria-label') || each.textContent.trim() || each.title))"
        ".map(each => each.outerHTML.slice(0, 80))"
    )
    assert nameless == []
    assert page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(served: Any, open_page: OpenPage, width: int) -> None:
    page = open_page(served.url, width=width, height=844)
    wait(page, "performance.getEntriesByName('charts').length")
    page.locator(HEATMAP).scroll_into_view_if_needed()  # it loads when it comes into view
    wait_for_charts(page)
    wait(page, "performance.getEntriesByName('layers').length")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    if width == 390:
        runs = page.locator("#runs")
        assert runs.is_hidden()
        page.get_by_role("button", name="Runs").click()
        assert runs.is_visible()
        page.get_by_role("button", name="gpt").click()
        assert runs.is_hidden()
    page.locator(".worst button.tensor").first.click()
    page.locator("#drawer canvas").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_hostile_names_are_shown_as_text(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    hostile_run(tmp_path / "<b>run<img src=x onerror=window.hacked=1>")
    page = open_page(serve(tmp_path).url)
    wait(page, "performance.getEntriesByName('charts').length")
    page.locator(HEATMAP).scroll_into_view_if_needed()
    wait(page, "performance.getEntriesByName('layers').length")
    page.locator(".worst button.tensor").first.wait_for()
    page.locator(".mark").first.click()
    page.wait_for_timeout(100)
    assert HOSTILE in page.locator("#drawer").inner_text()
    page.locator("#drawer button.tensor").first.click()
    page.locator("#drawer canvas").first.wait_for()
    assert page.locator("#drawer-title").inner_text() == f"{HOSTILE}.weight"
    page.locator(".finding summary").first.click()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script, #drawer img, #drawer script, nav img, b:not(.heat-tip b)").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_a_lost_connection_is_shown_and_restored(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    with writing(tmp_path / "run") as write:
        page_server = serve(tmp_path)
        page = open_page(page_server.url, quiet=False)  # Chromium itself reports requests that fail
        wait_for_charts(page)
        page.get_by_text("Connected").wait_for()
        port = int(page_server.url.rstrip("/").rpartition(":")[2])
        page_server.stop()
        page.get_by_text("Connection lost").wait_for()
        assert page.locator("#link").inner_text() == "Connection lost, trying again"
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.locator("#link").inner_text() == "Connection lost"
        helps = page.locator("#help-button").bounding_box()
        assert helps["x"] + helps["width"] <= 390
        write(40)
        page_server.start(port)
        page.get_by_text("Connected").wait_for()
        page.locator(".facts dd", has_text="99").wait_for()


def test_a_run_that_cannot_be_read_says_why(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    damaged_run(tmp_path / "broken")
    page = open_page(serve(tmp_path).url, quiet=False)
    page.get_by_role("heading", name="Cannot show this run").wait_for()
    assert "is not a gradvitals run" in page.locator("main").inner_text()


def test_values_that_are_no_numbers_leave_a_gap_and_a_mark(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    with RunWriter(tmp_path / "run", meta={"facts": {}}) as writer:
        for step in range(100):
            bad = 50 <= step < 60
            values = {"loss": float("nan") if bad else 1.0, "grad/norm": float("inf") if bad else 2.0}
            writer.write(Reading(step=step, time=step, values=values))
        writer.commit()
    page = open_page(serve(tmp_path).url)
    wait(page, "performance.getEntriesByName('charts').length")
    broken = "[...document.querySelectorAll('.plot')].map(each => each.chart.lines[0]?.broken?.length ?? null)"
    wait(page, f"JSON.stringify({broken}) === '[10,10,null,null,null]'")
    page.locator(".strip.missing").nth(2).wait_for()  # GSNR, noise scale, learning rate
    page.get_by_text("This run has no readings of single tensors").first.wait_for()


# -- what is shown is of now ---------------------------------------------------------------------------------------

DRAWN = "performance.getEntriesByName('charts').length"
THINNED = 6000
"""Readings of a run that is drawn in buckets."""


def write_values(path: Path, steps: int, values: Callable[[int], dict[str, float]], seconds: float = 1.0) -> None:
    with RunWriter(path, meta={"facts": {}}) as writer:
        for step in range(steps):
            writer.write(Reading(step=step, time=seconds * step, values=values(step)))


def strip(page: Any, name: str) -> Any:
    return page.locator(f".strip[aria-label='{name}']")


def lines(page: Any, name: str, what: str) -> Any:
    """Something of each line of a chart."""
    return strip(page, name).locator(".plot").evaluate(f"plot => plot.chart.lines.map(line => {what})")


def test_the_current_value_is_the_last_reading_even_if_unknown(
    tmp_path: Path, serve: Callable[[Path], Any], open_page: OpenPage
) -> None:
    def unclear(step: int) -> dict[str, float]:
        told = 2.0 if step < 40 else math.nan
        return {"loss": 1.0, "gsnr": told, "gsnr_low": told / 2, "gsnr_high": told * 2, "noise_scale": told}

    def long(step: int) -> dict[str, float]:
        return {"loss": 7.0 if step == THINNED - 1 else math.nan if step in (1234, 4001) else 1.0}

    write_values(tmp_path / "a", 50, unclear)
    write_values(tmp_path / "b", THINNED, long)
    url = serve(tmp_path).url
    page = open_page(url)
    wait(page, DRAWN)
    if "b" in page.locator(".run[aria-current]").inner_text():
        page.keyboard.press("j")
    wait(page, "document.querySelector('.run[aria-current] .run-name').textContent === 'a'")
    wait(page, "document.querySelector(\".strip[aria-label='GSNR'] .value\").textContent === 'not identifiable'")
    wait(page, "document.querySelector(\".strip[aria-label='Noise scale'] .value\").textContent === 'not identifiable'")
    assert "now not identifiable" in strip(page, "GSNR").locator(".plot").get_attribute("aria-label")
    page.keyboard.press("k")
    wait(page, "document.querySelector(\".strip[aria-label='Loss'] .value\").textContent === '7'")
    [broken] = lines(page, "Loss", "Array.from(line.broken)")
    assert len(broken) == 2  # one tick for each bucket in which there was one, though their means are numbers
    for found, wanted in zip(broken, (1234, 4001), strict=True):
        assert wanted - THINNED / 2000 < found <= wanted


def test_beside_another_run_each_figure_is_of_its_own_run_and_no_peak_is_lost(
    tmp_path: Path, serve: Callable[[Path], Any], open_page: OpenPage
) -> None:
    def peak(at: int, height: float) -> Callable[[int], dict[str, float]]:
        return lambda step: {"loss": height if step == at else 1.0}

    write_values(tmp_path / "a", THINNED, peak(3001, 50.0), seconds=0.001)
    write_values(tmp_path / "b", THINNED, lambda step: {**peak(2000, 90.0)(step), "gsnr": 3.0}, seconds=0.1)
    page = open_page(serve(tmp_path).url)
    wait(page, DRAWN)
    if "b" in page.locator(".run[aria-current]").inner_text():
        page.keyboard.press("j")
    wait(page, "document.querySelector('.run[aria-current] .run-name').textContent === 'a'")
    page.get_by_label("Compare b").click()
    wait(page, "document.querySelectorAll('.legend-run').length === 2")
    wait(page, "document.querySelector(\".strip[aria-label='GSNR'] .other\")?.textContent === '3'")
    assert strip(page, "GSNR").locator(".value").inner_text() == "–"
    wait(page, "document.querySelector(\".strip[aria-label='Loss'] .plot\").chart.lines.length === 2")
    assert lines(page, "Loss", "Math.max(...line.high)") == [50, 90]


def layered(path: Path, layers: Sequence[str] = ("first",), seconds: float = 1.0, steps: int = 100) -> None:
    """Layers read at every step, tensors at 0 and 50; the second tensor stands out from 50 on."""
    names = [f"{layer}.{part}" for layer in layers for part in ("a", "b")]
    tensors = tuple(
        TensorInfo(index=at, name=name, shape=(2,), dtype="float32", layer=name[:-2], depth=0)
        for at, name in enumerate(names)
    )
    with RunWriter(path, meta={"facts": {}}) as writer:
        writer.write(Layout(tensors=tensors, layers=tuple(layers)))
        for step in range(steps):
            rows = {"gsnr": [1.0, 2.0 if step < 50 else 0.25] * len(layers)} if step % 50 == 0 else {}
            values = {"loss": 1.0}
            writer.write(
                Reading(
                    step=step, time=seconds * step, values=values, tensors=rows, layers={"gsnr": [1.0] * len(layers)}
                )
            )


def test_a_cell_of_the_map_is_looked_up_by_its_step_in_every_table(
    tmp_path: Path, serve: Callable[[Path], Any], open_page: OpenPage
) -> None:
    layered(tmp_path / "run")
    page = open_page(serve(tmp_path).url, height=1400)
    wait(page, DRAWN)
    canvas = page.locator(".heat-scroll canvas")
    canvas.scroll_into_view_if_needed()
    wait(page, "performance.getEntriesByName('layers').length")
    box = canvas.bounding_box()
    left, plot = 202, box["width"] - 202 - 12
    page.mouse.click(box["x"] + left + 0.7525 * plot, box["y"] + 8)  # step 74 of 0 to 99
    page.locator("#drawer h2").wait_for()
    assert page.locator("#drawer h2").inner_text() == "first.b"
    assert "the dashed line is step 74" in page.locator("#drawer").inner_text()
    page.keyboard.press("Escape")
    wait(page, "document.getElementById('drawer').hidden")
    page.mouse.move(0, 0)
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + left + 0.7525 * plot, box["y"] + 16 + 16 + 8)  # its second tensor
    wait(page, "!document.querySelector('.heat-tip').hidden")
    told = page.locator(".heat-tip > *").all_inner_texts()
    assert told == ["first.b", "GSNR 0.25", "steps 50 to 99"]


def test_on_the_axis_of_time_the_map_names_the_time_and_ends_with_its_run(
    tmp_path: Path, serve: Callable[[Path], Any], open_page: OpenPage
) -> None:
    layered(tmp_path / "a", seconds=0.1)
    layered(tmp_path / "b", seconds=1.0, steps=101)
    page = open_page(serve(tmp_path).url, height=1400)
    wait(page, DRAWN)
    if "b" in page.locator(".run[aria-current]").inner_text():
        wait(page, "performance.getEntriesByName('layers').length")
        page.evaluate("performance.clearMarks('layers')")  # of the run that is not asked about
        page.keyboard.press("j")
    page.get_by_label("Compare b").click()
    wait(page, "document.querySelector(\".strip[aria-label='Loss'] .plot\").chart.lines.length === 2")
    wait(page, "performance.getEntriesByName('layers').length")
    page.evaluate(
        "() => { window.written = []; const usual = CanvasRenderingContext2D.prototype.fillText;"
        " CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {"
        " if (this.canvas.closest('.heat')) window.written.push(text); return usual.call(this, text, ...rest); };"
        " const wiped = CanvasRenderingContext2D.prototype.clearRect;"  # only the last drawing counts
        " CanvasRenderingContext2D.prototype.clearRect = function (...area) {"
        " if (this.canvas.closest('.heat')) window.written = []; return wiped.call(this, ...area); }; }"
    )
    page.keyboard.press("x")
    wait(page, "window.written.includes('1 min 40 s')")
    assert not [text for text in page.evaluate("window.written") if text.startswith("step ")]
    box = page.locator(".heat-scroll canvas").bounding_box()
    page.mouse.move(box["x"] + 202 + 0.5 * (box["width"] - 214), box["y"] + 8)  # after 50 s the run had long ended
    assert page.locator(".heat-tip").is_hidden()


def test_a_request_that_is_never_answered_stops_nothing(
    tmp_path: Path, serve: Callable[[Path], Any], open_page: OpenPage
) -> None:
    with writing(tmp_path / "live") as write:
        page = open_page(serve(tmp_path).url)
        wait(page, DRAWN)
        page.evaluate(
            "() => { const usual = AbortSignal.timeout.bind(AbortSignal); AbortSignal.timeout = (limit) => {"
            " window.limit = limit; return usual(limit / 100); }; window.patient = () => AbortSignal.timeout = usual; }"
        )
        held: list[Any] = []
        page.route("**/series?*", lambda route: held.append(route))
        write(20)
        wait(page, "document.querySelector('.run-step').textContent.includes('79')")  # the list goes on without it
        assert held
        assert page.evaluate("window.limit") == 30_000
        page.unroute("**/series?*")
        page.evaluate("() => { window.patient(); }")
        write(20)
        wait(page, "document.querySelector(\".strip[aria-label='Loss'] .plot\").chart.lines[0].x.at(-1) === 99")


@pytest.mark.parametrize("asked_anew", [False, True])
def test_a_live_page_names_one_step_everywhere(
    tmp_path: Path, serve: Callable[[Path], Any], open_page: OpenPage, asked_anew: bool
) -> None:
    with writing(tmp_path / "live") as write:
        page = open_page(serve(tmp_path).url)
        wait(page, DRAWN)
        wait(page, "document.querySelector('.judged')?.textContent === 'Judged up to step 59'")
        # As soon as the list names a step, it is drawn and named everywhere else.
        page.evaluate(
            "() => new MutationObserver(() => {"
            " if (window.seen || !document.querySelector('.run-step').textContent.includes('79')) return;"
            " const loss = document.querySelector(\".strip[aria-label='Loss'] .plot\").chart.lines[0];"
            " window.seen = [loss.x.at(-1), document.querySelector('.facts').textContent]; })"
            ".observe(document.getElementById('runs'), { childList: true, characterData: true, subtree: true })"
        )
        # What is drawn comes late, and the list may be fetched before it, as it is from time to time.
        page.evaluate(
            "() => { const usual = window.fetch; window.fetch = async (...asked) => {"
            " if (String(asked[0]).includes('/series')) await new Promise((go) => setTimeout(go, 1000));"
            " return usual(...asked); }; }"
        )
        write(20)
        if asked_anew:
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        wait(page, "window.seen")
        drawn, facts = page.evaluate("window.seen")
        assert drawn == 79
        assert "Last step79" in facts
        wait(page, "document.querySelector('.judged')?.textContent === 'Judged up to step 79'")


def test_the_last_news_reach_the_map_and_the_worst_tensors_though_they_came_too_soon(
    tmp_path: Path, serve: Callable[[Path], Any], open_page: OpenPage
) -> None:
    with writing(tmp_path / "live") as write:
        page = open_page(serve(tmp_path).url, height=1600)
        wait(page, DRAWN)
        wait(page, "performance.getEntriesByName('layers').length")
        page.locator(".worst button").first.focus()  # as it is after its tensor was opened and closed
        page.evaluate("() => { const usual = setTimeout; window.setTimeout = (work, ms) => usual(work, ms / 20); }")

        def told(*, step: int) -> None:
            wait(page, f"document.querySelector('.run-step').textContent.includes('{step}')")

        write(20)
        told(step=79)
        page.requested.clear()
        write(50)  # within the time that the map and the lists leave between two looks
        told(step=129)
        end = time.monotonic() + 15
        while not all(any(part in url for url in page.requested) for part in ("/heatmap", "/worst")):
            assert time.monotonic() < end, page.requested
            page.wait_for_timeout(30)
        wait(page, "document.querySelector('.worst').textContent.includes('at 100')")
        assert page.evaluate("document.activeElement.closest('.worst') !== null")


# -- values of 0 and less, and the order of runs --------------------------------------------------------------------

GSNR = ".strip[aria-label=GSNR]"
NOISE = ".strip[aria-label='Noise scale']"


def write(path: Path, gsnr: Sequence[float], noise: float = float("nan")) -> None:
    with RunWriter(path, meta={"facts": {}}) as writer:
        for step, value in enumerate(gsnr):
            values = {"loss": 1.0, "grad/norm": 1.0, "gsnr": value, "noise_scale": noise}
            writer.write(Reading(step=step, time=step, values=values))
        writer.commit()


def shown(page: Any, selector: str) -> Any:
    """The chart once its values are drawn: its axes are there before the values have come."""
    page.locator(f"{selector} canvas").wait_for()
    wait(page, f'!!document.querySelector("{selector} .plot").chart.plot?.data[0].length')
    wait(page, "performance.getEntriesByName('charts').length")  # all have come, and share their axis
    return page.locator(f"{selector} .plot")


def place(plot: Any, value: float) -> float:
    """How far below the top of a chart a value is drawn, as a share of its height."""
    return float(
        plot.evaluate(
            "(host, value) => { const { plot } = host.chart;"
            " return plot.valToPos(value, 'y', true) / plot.bbox.height; }",
            value,
        )
    )


def drawn(plot: Any) -> list[float | None]:
    return list(plot.evaluate("host => Array.from(host.chart.plot.data[1])"))


def test_a_gsnr_below_zero_is_drawn_below_a_line_at_zero_and_counted(
    tmp_path: Path, serve: Any, open_page: OpenPage
) -> None:
    values = [1.0, 0.1, 0.01, 0.0, -0.02, -0.03, -0.02, -0.01]
    write(tmp_path / "fading", values)
    page = open_page(serve(tmp_path).url)
    plot = shown(page, GSNR)
    assert drawn(plot) == pytest.approx(values)
    places = [place(plot, value) for value in (1.0, 0.1, 0.01, 0.0, -0.01, -0.03)]
    assert places == sorted(places)
    assert places[0] > 0
    assert places[-1] < 1.1
    # Decades where there is signal, even steps where there is none: 0.1 is not squeezed onto 0.
    assert places[3] - places[1] > 0.2 * (places[3] - places[0])
    assert "0 or less: 5 of 8" in page.locator(f"{GSNR} .more").inner_text()
    assert plot.get_attribute("aria-label").endswith("between −0.03 and 1, 0 or less: 5 of 8")
    ticks = plot.evaluate("host => host.chart.plot.axes[1]._values")
    assert "0" in ticks
    assert any(text.startswith("−") for text in ticks)
    page.locator(GSNR).hover()
    page.locator(f"{GSNR} button", has_text="lin").click()
    even = [place(plot, value) for value in (1.0, 0.5, 0.0)]
    assert even[1] - even[0] == pytest.approx(even[2] - even[1])


def test_a_gsnr_above_zero_stays_on_a_logarithmic_axis(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    write(tmp_path / "fine", [10.0, 1.0, 0.1, 0.01], noise=3.0)
    page = open_page(serve(tmp_path).url)
    plot = shown(page, GSNR)
    places = [place(plot, value) for value in (10.0, 1.0, 0.1)]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1])
    assert "0 or less" not in page.locator(f"{GSNR} .more").inner_text()


@pytest.mark.parametrize("values", [[-0.4, -0.7, -0.5], [0.0, 0.0, 0.0]])
def test_nothing_but_negative_values_and_nothing_but_zero_can_be_seen(
    tmp_path: Path, serve: Any, open_page: OpenPage, values: list[float]
) -> None:
    write(tmp_path / "run", values)
    page = open_page(serve(tmp_path).url)
    plot = shown(page, GSNR)
    assert drawn(plot) == pytest.approx(values)
    places = [place(plot, value) for value in (0.0, *values)]
    assert all(0 <= each <= 1.1 for each in places), places
    assert "0 or less: 3 of 3" in page.locator(f"{GSNR} .more").inner_text()


def test_a_chart_that_was_never_identifiable_says_so(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    write(tmp_path / "noise", [-0.1, -0.2])
    page = open_page(serve(tmp_path).url)
    page.locator(f"{NOISE} .plot-state", has_text="Not identifiable at any step so far").wait_for()
    assert page.locator(f"{NOISE} .plot").get_attribute("aria-label") == "Noise scale: not identifiable at any step"


def test_runs_are_listed_newest_first_and_say_when(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    for name, started in (("b-old", 1_000_000), ("z-new", 3_000_000), ("c-middle", 2_000_000), ("a-middle", 2_000_000)):
        write(tmp_path / name, [1.0])
        with sqlite3.connect(tmp_path / name / "run.db") as opened:
            opened.execute("UPDATE segment SET started_at = ?", (started,))
        opened.close()
    page = open_page(serve(tmp_path).url, timezone_id="UTC")
    page.locator(".run-name", has_text="b-old").wait_for()
    wait(page, "!document.querySelector('.run-list').innerText.includes('loading')")
    names = page.locator(".run-list .run-name").all_inner_texts()
    assert names == ["z-new", "a-middle", "c-middle", "b-old"]
    assert page.locator(".runs-head").inner_text().split() == ["Runs", "newest", "first"]
    titles = [each.get_attribute("title") for each in page.locator(".run-list .run-step").all()]
    assert titles[0] == "Started 4 Feb 1970, 17:20"
    assert titles[-1] == "Started 12 Jan 1970, 13:46"


def test_after_a_click_into_the_map_plus_zooms_and_after_arrow_keys_it_opens_a_layer(
    served: Any, open_page: OpenPage
) -> None:
    page = open_page(served.url)
    page.get_by_role("button", name="gpt").click()
    wait_for_charts(page)
    canvas = page.locator(".heat-scroll canvas")
    canvas.scroll_into_view_if_needed()
    wait(page, "performance.getEntriesByName('layers').length")
    canvas.click(position={"x": 400, "y": 24})  # the second row, whose tensors then follow it
    page.locator("#drawer .strip canvas").first.wait_for()
    page.mouse.move(5, 5)
    page.keyboard.press("Escape")
    tall = canvas.bounding_box()["height"]
    page.keyboard.press("+")
    page.get_by_role("button", name="Show everything").wait_for()
    assert canvas.bounding_box()["height"] == tall
    for key in ("ArrowDown", "ArrowDown", "-"):  # the first only shows where one is
        page.keyboard.press(key)
    wait(page, f"document.querySelector('.heat-scroll canvas').getBoundingClientRect().height < {tall}")


# -- what the page shows without a click -----------------------------------------------------------------------------

SICK = Finding(
    id="explosion",
    severity="critical",
    title="the gradient norm rose to 41× its baseline, which is a rather long title " * 3,
    first_step=50,
    causes=("the learning rate of 3 is too high",),
    fixes=("lower the learning rate from 3 to 0.01",),
)
LAYOUT = Layout(
    tensors=(
        TensorInfo(index=0, name="0.weight", shape=(64, 128), dtype="float32", layer="0", depth=0, module="Linear"),
        TensorInfo(index=1, name="0.bias", shape=(64,), dtype="float32", layer="0", depth=0, module="Linear"),
        TensorInfo(index=2, name="b.1.x.weight", shape=(4, 4), dtype="float32", layer="b.1", depth=1, module="Linear"),
    ),
    layers=("0", "b.1"),
)


def write_remedy(path: Path, *findings: Finding, lr: float = 3.0) -> None:
    with RunWriter(path, meta={"facts": {}}) as writer:
        writer.write(LAYOUT)
        for step in range(100):
            values = {"loss": 1.0 + lr * step, "grad/norm": 2.0, "lr": lr}
            tensors = {"grad/norm": np.ones(3), "grad/zero_fraction": np.array([0.0, 0.5, 1.0])}
            writer.write(Reading(step=step, time=float(step), values=values, tensors=tensors))
        for finding in findings:
            writer.write(finding)
        writer.commit()


def test_the_fix_and_the_learning_rate_are_there_and_empty_charts_take_a_line(
    tmp_path: Path, serve: Any, open_page: OpenPage
) -> None:
    write_remedy(tmp_path / "run", SICK)
    page = open_page(serve(tmp_path).url)
    wait_for_charts(page)
    remedy = page.locator(".remedy").inner_text()
    assert "the learning rate of 3 is too high" in remedy
    assert "lower the learning rate from 3 to 0.01" in remedy
    assert "Gradient explosion" in page.locator(".chip").first.inner_text()  # its name: the title is too long
    assert page.locator(".run-list .run-step").first.inner_text().startswith("100 steps, ")
    shown = page.locator(".strip:not(.missing)")
    assert [shown.nth(i).get_attribute("aria-label") for i in range(shown.count())] == [
        "Loss", "Gradient norm", "Learning rate",
    ]  # fmt: skip
    missing = page.locator(".strip.missing")
    assert missing.count() == 2
    for place, how in enumerate(("gradient accumulation", "batch_size=")):
        assert how in missing.nth(place).inner_text()
        assert missing.nth(place).bounding_box()["height"] < 40


def test_on_a_phone_the_whole_verdict_is_readable(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    write_remedy(tmp_path / "run", SICK)
    page = open_page(serve(tmp_path).url, width=390, height=844)
    page.locator(".remedy").wait_for()
    line = page.locator(".verdict-line")
    assert line.evaluate("line => line.scrollHeight - line.clientHeight") <= 1
    assert page.locator(".remedy").bounding_box()["y"] < 844
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_layers_show_their_type_and_zeros_have_a_heatmap(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    write_remedy(tmp_path / "run")
    page = open_page(serve(tmp_path).url)
    wait(page, "performance.getEntriesByName('layers').length")
    layers = page.evaluate(
        "fetch('/api/runs').then(r => r.json()).then(d => fetch(`/api/runs/${d.runs[0].id}/layout`))"
        ".then(r => r.json())"
    )
    assert [(layer["name"], layer["kind"]) for layer in layers["layers"]] == [("0", "Linear(128→64)"), ("b.1", "")]
    page.get_by_role("button", name="zeros").click()
    wait(page, "document.querySelector('.heat-legend').textContent.includes('1')")
    assert page.get_by_role("button", name="zeros").get_attribute("aria-pressed") == "true"


def test_runs_side_by_side_are_compared_in_words(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    write_remedy(tmp_path / "before", SICK)
    write_remedy(tmp_path / "after", replace(SICK, id="loss_rising"), lr=0.01)
    page = open_page(serve(tmp_path).url)
    page.get_by_role("button", name="before").click()
    page.locator("li", has_text="after").locator("input").check()
    page.locator(".compared li").first.wait_for()
    shown = page.locator(".compared li").all_inner_texts()
    assert shown == list(gv.diff(tmp_path / "before", tmp_path / "after").sentences())
    assert "A is before, B is after." in page.locator(".compared").inner_text()
    page.locator("li", has_text="after").locator("input").uncheck()
    wait(page, "document.querySelector('.compared').hidden")


def test_each_run_side_by_side_has_a_lane_of_its_findings(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    write_remedy(tmp_path / "before", SICK)
    write_remedy(tmp_path / "after", replace(SICK, id="loss_rising", title="the loss rises"), lr=0.01)
    page = open_page(serve(tmp_path).url)
    page.get_by_role("button", name="before").click()
    wait_for_charts(page)
    lanes = page.locator(".lane")
    lanes.locator(".mark").first.wait_for()
    assert (lanes.count(), page.locator(".lane-run").count()) == (1, 0)
    page.locator("li", has_text="after").locator("input").check()
    wait(page, "document.querySelectorAll('.lane').length === 2")
    assert lanes.locator(".lane-run").all_inner_texts() == ["before", "after"]
    colors = "[...document.querySelectorAll('{}')].map(each => each.style.getPropertyValue('--c'))"
    assert page.evaluate(colors.format(".lane-run")) == page.evaluate(colors.format(".legend-run"))
    other = page.get_by_role("group", name="Findings and actions of after on the axis").locator(".mark")
    assert other.get_attribute("title") == "the loss rises"
    other.click()
    assert page.locator("#drawer-title").inner_text() == "after: the loss rises"
    assert page.locator(".mark.chosen").count() == 1
    assert "chosen" in other.get_attribute("class")
    page.locator("#drawer").get_by_role("button", name="Zoom to it").click()
    page.keyboard.press("Escape")
    page.locator("li", has_text="after").locator("input").uncheck()
    wait(page, "document.querySelectorAll('.lane').length === 1 && !document.querySelector('.lane-run')")


# -- the layers of runs side by side ---------------------------------------------------------------------------------

SAID = "document.getElementById('said').textContent"
LAYERS = ("first", "second")


def write_run(
    path: Path, steps: int, *, second: Callable[[int], float], layers: tuple[str, ...] = LAYERS, every: int = 1
) -> None:
    """A run of two layers with a weight and a bias each; `second` gives the norm of the second weight."""
    names = [(layer, part) for layer in layers for part in ("weight", "bias")]
    tensors = tuple(
        TensorInfo(index=i, name=f"{layer}.{part}", shape=(2,), dtype="float32", layer=layer, depth=i)
        for i, (layer, part) in enumerate(names)
    )
    with RunWriter(path, meta={"facts": {}}) as writer:
        writer.write(Layout(tensors=tensors, layers=layers))
        for step in range(steps):
            rows = [1.0, 0.0, second(step), 0.0][: len(names)]
            own = {"grad/norm": rows, "grad/nonfinite": [0.0] * len(rows)} if step % every == 0 else {}
            writer.write(Reading(step=step, time=float(step), values={"loss": 1.0, "grad/norm": 2.0}, tensors=own))


def open_both(page: Any) -> None:
    """Look at run a, with b beside it."""
    wait(page, "performance.getEntriesByName('charts').length")
    page.locator(".run:has(.run-name:text-is('a'))").click()
    wait(page, "document.querySelector('.run[aria-current] .run-name').textContent === 'a'")
    page.get_by_label("Compare b").check()
    page.get_by_label("Run in the heatmap").wait_for()


def choose(page: Any, text: str) -> None:
    page.evaluate("performance.clearMarks('layers')")
    page.get_by_label("Run in the heatmap").select_option(text)
    wait(page, "performance.getEntriesByName('layers').length")


def said(page: Any, *keys: str) -> str:
    """What the picture says of a cell, after keys; the first one shows where the reader stands."""
    page.locator(HEATMAP).focus()
    page.evaluate("document.getElementById('said').textContent = ''")
    for key in keys:
        page.keyboard.press(key)
    wait(page, f"{SAID} !== ''")
    return str(page.evaluate(SAID))


def test_the_ratio_shows_which_layer_differs_since_which_step(
    tmp_path: Path, serve: Callable[[Path], Any], open_page: OpenPage
) -> None:
    write_run(tmp_path / "a", 100, second=lambda step: 0.5)
    write_run(tmp_path / "b", 140, second=lambda step: 2.0 if 60 <= step < 80 else 0.5)
    page = open_page(serve(tmp_path).url)
    open_both(page)
    which = page.get_by_label("Run in the heatmap")
    assert which.locator("option").all_inner_texts() == ["a", "b", "b ÷ a"]
    assert which.evaluate("each => each.value === each.options[0].value")  # the run that is looked at
    choose(page, "b ÷ a")
    assert "smaller, ÷" in page.locator(".heat-legend").inner_text()
    assert said(page, "End", "End") == "first, norm × 1, 1 in b, 1 in a, step 99"  # a ends there
    assert said(page, "ArrowDown", "Home") == "second, norm × 1, 0.5 in b, 0.5 in a, step 0"
    for _ in range(12):
        page.keyboard.press("Shift+ArrowRight")
    assert said(page, "ArrowRight") == "second, norm × 4, 2 in b, 0.5 in a, step 61"
    page.keyboard.press("Enter")  # its tensor, of both runs
    page.locator("#drawer .strip canvas").first.wait_for()
    assert page.locator("#drawer-title").inner_text() == "second.weight"
    assert page.locator("#drawer .legend-run").all_inner_texts() == ["a", "b"]
    norm = "document.querySelector(\"#drawer .strip[aria-label='Gradient norm'] .plot\").chart.lines"
    wait(page, f"{norm}.length === 2")
    assert page.evaluate(f"{norm}.map(line => Math.max(...line.mean))") == [0.5, 2.0]


def test_the_heatmap_can_show_the_other_run_and_d_cycles_through_all(
    tmp_path: Path, serve: Callable[[Path], Any], open_page: OpenPage
) -> None:
    write_run(tmp_path / "a", 50, second=lambda step: 0.5)
    write_run(tmp_path / "b", 80, second=lambda step: 7.0, every=10)
    page = open_page(serve(tmp_path).url)
    open_both(page)
    which = page.get_by_label("Run in the heatmap")
    shown = "document.querySelector('.heat select').selectedOptions[0].textContent"
    page.keyboard.press("d")
    wait(page, f"{shown} === 'b'")
    wait(page, f"{SAID} === 'Layers: b'")
    wait(page, f"document.querySelector('{HEATMAP}').getAttribute('aria-label').startsWith('Layers by steps, b.')")
    choose(page, "b")
    assert said(page, "ArrowDown", "ArrowDown") == "second, norm 7, steps 70 to 79"
    page.keyboard.press("d")
    wait(page, f"{shown} === 'b ÷ a'")
    page.keyboard.press("d")
    wait(page, f"{shown} === 'a'")
    page.get_by_label("Compare b").uncheck()
    which.wait_for(state="hidden")


def test_runs_of_other_layers_steps_or_times_leave_out_what_only_one_has(
    tmp_path: Path, serve: Callable[[Path], Any], open_page: OpenPage
) -> None:
    write_run(tmp_path / "a", 60, second=lambda step: 0.5)
    write_run(tmp_path / "b", 600, second=lambda step: 0.0, layers=("first", "other"), every=20)
    page = open_page(serve(tmp_path).url)
    open_both(page)
    choose(page, "b ÷ a")
    assert said(page, "ArrowDown", "ArrowDown", "Home") == "second, not in b, steps 0 to 19"
    assert said(page, "ArrowUp", "End") == "first, norm × 1, 1 in b, 1 in a, steps 40 to 59"
    page.keyboard.press("x")  # by time it is the same here, a second a step
    page.wait_for_timeout(200)
    assert said(page, "End") == "first, norm × 1, 1 in b, 1 in a, steps 40 to 59"


def test_two_tables_are_compared_over_the_same_bins(served: Any, open_page: OpenPage) -> None:
    page = open_page(served.url)
    page.locator(".strips").wait_for()
    found = page.evaluate(
        """async () => {
      const { ratios } = await import("/static/js/heat_table.js");
      const table = (starts, end, ...rows) => ({
        rows: rows.length, columns: starts.length, starts: Float64Array.from(starts), end, last: end - 1,
        values: Float32Array.from(rows.flat()),
      });
      const same = (at) => at;
      const plain = (made) => [Array.from(made.starts), made.end, Array.from(made.values, String)];
      const fine = table([0, 10, 20, 30, 40], 50, [1, 2, 1, 4, 1], [3, 3, 3, 3, 3]);
      const coarse = table([0, 20], 40, [8, 2]);
      const late = table([25, 35, 45, 55], 65, [1, 2, Infinity, 4], [1, 0, NaN, 1]);
      const signs = table([0, 10], 20, [1, -1]);
      return [
        plain(ratios(fine, coarse, [0, -1], same, false)),
        plain(ratios(coarse, fine, [1], same, false)),
        plain(ratios(fine, late, [0, 1], same, false)),
        plain(ratios(signs, signs, [0], same, true)),
        plain(ratios(fine, table([70], 80, [1]), [0, 0], same, false)),
        plain(ratios(table([0], 10, [0]), table([0], 10, [5]), [0], same, false)),
      ];
    }"""
    )
    coarser, other_way, later, signs, apart, from_zero = found
    assert coarser == [[0, 20], 40, ["4", "0.5", "NaN", "NaN"]]  # 8 over the larger of 1 and 2; 2 over that of 1 and 4
    assert other_way == [[0, 20], 40, ["0.375", "1.5"]]
    assert later[:2] == [[20, 30, 40], 50]
    assert [float(value) for value in later[2]] == pytest.approx(
        [1, 0.5, float("inf"), 1 / 3, 1e-30, float("nan")], nan_ok=True
    )
    assert signs[2] == ["1", "-1"]
    assert apart == [[], 0, []]
    assert float(from_zero[2][0]) == pytest.approx(1e30)
