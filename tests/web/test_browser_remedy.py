"""What the page shows without a click, in a real Chromium: the fix, how to have what is missing, how runs differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from web_runs import wait, wait_for_charts

import gradvitals as gv
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, TensorInfo

pytestmark = pytest.mark.browser

OpenPage = Callable[..., Any]
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


def write(path: Path, *findings: Finding, lr: float = 3.0) -> None:
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
    write(tmp_path / "run", SICK)
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
    write(tmp_path / "run", SICK)
    page = open_page(serve(tmp_path).url, width=390, height=844)
    page.locator(".remedy").wait_for()
    line = page.locator(".verdict-line")
    assert line.evaluate("line => line.scrollHeight - line.clientHeight") <= 1
    assert page.locator(".remedy").bounding_box()["y"] < 844
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_layers_show_their_type_and_zeros_have_a_heatmap(tmp_path: Path, serve: Any, open_page: OpenPage) -> None:
    write(tmp_path / "run")
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
    write(tmp_path / "before", SICK)
    write(tmp_path / "after", replace(SICK, id="loss_rising"), lr=0.01)
    page = open_page(serve(tmp_path).url)
    page.get_by_role("button", name="before").click()
    page.locator("li", has_text="after").locator("input").check()
    page.locator(".compared li").first.wait_for()
    shown = page.locator(".compared li").all_inner_texts()
    assert shown == list(gv.diff(tmp_path / "before", tmp_path / "after").sentences())
    assert "A is before, B is after." in page.locator(".compared").inner_text()
    page.locator("li", has_text="after").locator("input").uncheck()
    wait(page, "document.querySelector('.compared').hidden")
