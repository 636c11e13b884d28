"""The layers of runs side by side, in a real Chromium: one run or the other, and where the two differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from web_runs import wait

from gradvitals.store.writer import RunWriter
from gradvitals.types import Layout, Reading, TensorInfo

pytestmark = pytest.mark.browser

OpenPage = Callable[..., Any]
HEATMAP = ".heat-scroll canvas"
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
