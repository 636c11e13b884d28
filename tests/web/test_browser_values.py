"""The page in a real Chromium: values of 0 and less, which a logarithm has no place for, and runs in order of age."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from web_runs import wait, wait_for_charts

from gradvitals.store.writer import RunWriter
from gradvitals.types import Reading

pytestmark = pytest.mark.browser

OpenPage = Callable[..., Any]
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
