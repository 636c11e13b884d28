"""The page in a real Chromium: what a reader sees, clicks and types, and that no request leaves the machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from web_runs import HOSTILE, LONG, damaged_run, hostile_run, wait, wait_for_charts, writing

import gradvitals as gv
from benchmarks.synthetic_run import write_synthetic_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Reading

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
