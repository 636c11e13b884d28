"""The page in a real Chromium: what it shows as of now is of now, of the run it names, and at the step it names."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from web_runs import wait, writing

from gradvitals.store.writer import RunWriter
from gradvitals.types import Layout, Reading, TensorInfo

pytestmark = pytest.mark.browser

OpenPage = Callable[..., Any]
DRAWN = "performance.getEntriesByName('charts').length"
LONG = 6000
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
        return {"loss": 7.0 if step == LONG - 1 else math.nan if step in (1234, 4001) else 1.0}

    write_values(tmp_path / "a", 50, unclear)
    write_values(tmp_path / "b", LONG, long)
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
        assert wanted - LONG / 2000 < found <= wanted


def test_beside_another_run_each_figure_is_of_its_own_run_and_no_peak_is_lost(
    tmp_path: Path, serve: Callable[[Path], Any], open_page: OpenPage
) -> None:
    def peak(at: int, height: float) -> Callable[[int], dict[str, float]]:
        return lambda step: {"loss": height if step == at else 1.0}

    write_values(tmp_path / "a", LONG, peak(3001, 50.0), seconds=0.001)
    write_values(tmp_path / "b", LONG, lambda step: {**peak(2000, 90.0)(step), "gsnr": 3.0}, seconds=0.1)
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
