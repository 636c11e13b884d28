"""The page of a run in a real Chromium, from a file, with every way to the network closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradvitals.report.html import render_html
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, TensorInfo

pytestmark = pytest.mark.browser
Opened = Callable[..., tuple[Any, list[str]]]
LAYERS = ("embed", '<img src=x onerror="window.hacked=1">', "L" * 10_000, "head")
FINDING = Finding(
    id="explosion", severity="critical", title="the norm <b>rose</b>", tensors=LAYERS, first_step=150, causes=("a",)
)


def readings(step: int) -> list[Reading]:
    row = np.arange(1.0, len(LAYERS) + 1)
    values = {"loss": np.nan if step > 190 else 4.0 / (1 + step), "grad/norm": 20.0 if step == 150 else 2.0, "lr": 1e-3}
    norms = {"grad/norm": row * (20 if step == 150 else 1)}
    gsnr = {"gsnr": 0.5, "gsnr_low": 0.4, "gsnr_high": 0.6}
    return [
        Reading(step=step, time=0.0, values=values, tensors=norms),
        Reading(step=step, time=0.0, source="adam", values=gsnr, layers={"gsnr": row}),
    ]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    tensors = tuple(
        TensorInfo(index=i, name=name, shape=(2,), dtype="float32", layer=name, depth=i)
        for i, name in enumerate(LAYERS)
    )
    layout = Layout(tensors=tensors, layers=LAYERS)
    with RunWriter(folder / "run", meta={"facts": {}}) as writer:
        writer.write(layout)
        for step in range(200):
            for reading in readings(step):
                writer.write(reading)
        writer.write(FINDING)
    file = folder / "report.html"
    with open_run(folder / "run") as run:
        file.write_text(render_html(run), "utf-8")
    return file


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    """One page for all: opening a file anew takes a fraction of what starting a page does."""
    page = browser.new_page()
    yield page
    page.context.close()


@pytest.fixture
def opened(tab: Any, file: Path) -> Iterator[Opened]:
    """The page, and everything that went wrong on it or wanted out."""
    wrong: list[str] = []
    listeners: dict[str, Callable[[Any], None]] = {
        "console": lambda message: wrong.append(message.text),
        "pageerror": lambda error: wrong.append(str(error)),
        "request": lambda request: wrong.append(request.url) if request.url.startswith("http") else None,
    }
    for event, hear in listeners.items():
        tab.on(event, hear)

    def open_(width: int = 1280, color_scheme: str = "light") -> tuple[Any, list[str]]:
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme=color_scheme)
        tab.mouse.move(0, 0)
        tab.goto(file.as_uri())
        return tab, wrong

    yield open_
    for event, hear in listeners.items():
        tab.remove_listener(event, hear)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_opens_from_a_file_at_any_width(opened: Opened, width: int, scheme: str) -> None:
    page, wrong = opened(width, scheme)
    assert wrong == []
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out
    assert page.evaluate("window.hacked") is None
    assert page.locator("h1").inner_text() == "run"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert dark is (scheme == "dark")
    sizes = page.eval_on_selector_all(".plot svg, img.heat", "all => all.map(one => one.getBoundingClientRect().width)")
    assert len(sizes) >= 5
    assert min(sizes) > 200


def test_all_curves_share_one_axis_and_a_flag_leads_to_its_finding(opened: Opened) -> None:
    page, wrong = opened()
    boxes = page.eval_on_selector_all(
        ".plot svg, img.heat",
        "all => all.map(one => [one.getBoundingClientRect().x, one.getBoundingClientRect().width])",
    )
    assert {(round(x), round(width)) for x, width in boxes} == {tuple(map(round, boxes[0]))}
    flag = page.locator(".flags .flag.critical")
    place = flag.evaluate("one => one.getBoundingClientRect().x + one.getBoundingClientRect().width / 2")
    assert place == pytest.approx(boxes[0][0] + boxes[0][1] * 150 / 199, abs=2)
    flag.click()
    assert page.evaluate("document.querySelector(':target').innerText").count("the norm <b>rose</b>") == 1
    assert wrong == []


def test_the_pointer_reads_curves_and_cells(opened: Opened) -> None:
    page, wrong = opened()
    norm = page.locator(".lane.curve", has_text="Gradient norm")
    plot = norm.locator("svg")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 150 / 199, box["y"] + 20)
    assert norm.locator(".now").inner_text() == "20 at 150"
    page.mouse.move(5, 5)
    assert norm.locator(".now").inner_text() == "2"
    heat = page.locator(".heatmap", has_text="Gradient norm")
    image = heat.locator("img.heat")
    image.scroll_into_view_if_needed()
    box = image.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 50.5 / 200, box["y"] + box["height"] * 3.5 / 4)
    words = heat.locator(".at").inner_text()
    assert words.startswith("head, step 50: ")
    assert float(words.rsplit(" ", 1)[1]) == pytest.approx(4.0, rel=0.03)
    assert wrong == []


def test_without_script_it_is_whole(browser: Any, file: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator(".banner").is_visible()
    assert page.locator(".lane.curve").count() == 4
    assert page.locator("img.heat").count() == 2
    assert "NaN" in page.locator(".lane.curve", has_text="Loss").inner_text()
    context.close()
