"""How quick the live page is in a real browser, and what memory its server takes."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.request import urlopen

import click

from benchmarks.command_line import Command, echo_line, json_option, print_result
from benchmarks.synthetic_run import readings, transformer_layout, write_synthetic_run
from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.store.writer import Record, RunWriter
from gradvitals.worker.worker import COMMIT_SECONDS

LOADS = 7
DRAWS = 9
NEW_STEPS = 30
BARS = {"first_picture_s": 1.0, "million_points_ms": 200.0, "new_step_s": 1.0, "memory_mb": 300.0}

MILLION = """async () => {
  const { Chart } = await import("/static/js/chart.js");
  const { SharedAxis } = await import("/static/js/axis.js");
  const host = document.createElement("div");
  host.style.setProperty("width", "1200px");
  document.body.prepend(host);
  const size = 1000000;
  const x = new Float64Array(size);
  const mean = new Float32Array(size);
  for (let i = 0, at = 2; i < size; i++) { at += (Math.random() - 0.5) * 0.01; x[i] = i; mean[i] = Math.abs(at) + 0.1; }
  const axis = new SharedAxis();
  axis.full = [0, size];
  const chart = new Chart(host, { axis, height: 400, sync: "bench" });
  chart.visible = true;
  const frames = () => new Promise((done) => requestAnimationFrame(() => { const channel = new MessageChannel();
    channel.port1.onmessage = done; channel.port2.postMessage(0); }));
  chart.setLines([{ x: x.slice(0, 2), mean: mean.slice(0, 2), colour: "#0072b2", dash: 0 }]);
  await frames();
  const start = performance.now();
  chart.setLines([{ x, mean, colour: "#0072b2", dash: 0 }]);
  await frames();
  const took = performance.now() - start;
  chart.destroy();
  host.remove();
  return took;
}"""


def run_page(
    *, steps: int = 100_000, tensors: int = 500, runs: int = 50, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure the page with synthetic runs in a temporary folder and a real Chromium.

    Args:
        steps: Length of the long run.
        tensors: Its parameters; single tensors are read as often as `Config` has it by default.
        runs: Runs that one server is asked for, one after the other.
        progress: Called with a line now and then.

    Raises:
        GradvitalsError: If there is no Chromium, or no playwright to drive it.
    """
    with _chromium() as browser, tempfile.TemporaryDirectory(prefix="gradvitals-") as name:
        folder = Path(name)
        progress(f"writing a run of {steps:,} steps x {tensors} tensors")
        write_synthetic_run(folder / "one" / "long", steps=steps, num_tensors=tensors)
        result: dict[str, Any] = {"steps": steps, "tensors": tensors, "runs": runs, "browser": browser.version}
        result["run_mb"] = (folder / "one" / "long" / "run.db").stat().st_size / 1e6
        progress("opening the page")
        with _server(folder / "one") as (url, _):
            result |= _first_picture(browser, url)
            progress("drawing a million points")
            result |= _million_points(browser, url)
        progress("writing steps and waiting for them on the screen")
        result |= _new_steps(browser, folder / "live")
        progress(f"asking one server for {runs} runs")
        result |= _memory(folder, runs)
    return result


def format_page(result: dict[str, Any]) -> str:
    """The result as a table."""
    rows = [
        ("first picture: four charts drawn", "first_picture_s", "s"),
        ("the same, before the server has read anything", "first_picture_cold_s", "s"),
        ("layers drawn as well", "layers_s", "s"),
        ("a million points drawn", "million_points_ms", "ms"),
        ("zoom: finer numbers on the screen", "zoom_ms", "ms"),
        ("new step on the screen after it was read, median", "new_step_s", "s"),
        ("the same, slowest", "new_step_worst_s", "s"),
        (f"memory of the server with {result['runs']} such runs looked at", "memory_mb", "MB"),
        ("the same, highest on the way", "memory_peak_mb", "MB"),
    ]
    lines = [
        f"a run of {result['steps']:,} steps x {result['tensors']} tensors, {result['run_mb']:.0f} MB; "
        f"Chromium {result['browser'].partition('.')[0]}"
    ]
    for label, name, unit in rows:
        bar = f"  (aim: {BARS[name]:g} {unit})" if name in BARS else ""
        lines.append(f"  {label:<58} {result[name]:8.3g} {unit}{bar}")
    return "\n".join(lines)


def _first_picture(browser: Any, url: str) -> dict[str, float]:
    """From the beginning of the navigation until charts, and layers, have been drawn, by the browser's own clock."""
    charts, layers, zooms = [], [], []
    first = browser.new_page()  # the browser of a reader runs already
    first.goto(f"{url}static/favicon.svg")
    first.close()
    for _ in range(LOADS):
        page = browser.new_page(viewport={"width": 1280, "height": 1400})
        page.goto(url)
        _until(page, "performance.getEntriesByName('layers').length && performance.getEntriesByName('charts').length")
        charts.append(page.evaluate("performance.getEntriesByName('charts')[0].startTime") / 1e3)
        layers.append(page.evaluate("performance.getEntriesByName('layers')[0].startTime") / 1e3)
        zooms.append(_zoom(page))
        page.close()
    return {
        "first_picture_s": statistics.median(charts[1:]),
        "first_picture_cold_s": charts[0],
        "layers_s": statistics.median(layers[1:]),
        "zoom_ms": statistics.median(zooms),
    }


def _zoom(page: Any) -> float:
    box = page.locator(".strip .u-over").first.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 30)
    page.evaluate("performance.clearMarks('finer'); window.zoomed = performance.now()")
    page.mouse.up()
    _until(page, "performance.getEntriesByName('finer').length")
    return float(page.evaluate("performance.getEntriesByName('finer')[0].startTime - window.zoomed"))


def _million_points(browser: Any, url: str) -> dict[str, float]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(url)
    _until(page, "performance.getEntriesByName('charts').length")
    took = [page.evaluate(MILLION) for _ in range(DRAWS)]
    page.close()
    return {"million_points_ms": statistics.median(took[1:])}


def _new_steps(browser: Any, folder: Path) -> dict[str, float]:
    """From the moment a reading is made until the frame that shows it, with a writer that commits as a worker does."""
    layout = transformer_layout(62)
    writer = _LiveWriter(folder / "run")
    writer.put(layout)
    made = readings(layout, 100_000, Config(), 0, time.time())
    step, waits = -1, []
    for _ in range(200):
        reading = next(made)
        writer.put(reading)
        step = reading.step
    with _server(folder) as (url, _):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        _until(page, "performance.getEntriesByName('charts').length")
        page.evaluate(
            "window.shown = {};"
            "addEventListener('drawn', (event) => { window.shown[event.detail.last] ??= Date.now(); })"
        )
        for number in range(NEW_STEPS):
            time.sleep(0.4 + 0.37 * (number % 5) / 5)  # not in step with the writer's commits
            sent = time.time()
            while (reading := next(made)).step == step:
                writer.put(reading)
            writer.put(reading)
            step = reading.step
            _until(page, f"window.shown[{step}]")
            waits.append(float(page.evaluate(f"window.shown[{step}]")) / 1e3 - sent)
        page.close()
    writer.close()
    return {"new_step_s": statistics.median(waits), "new_step_worst_s": max(waits)}


class _LiveWriter:
    """Writes a run from a thread, with a commit as often as a worker makes one."""

    def __init__(self, path: Path) -> None:
        self._queue: SimpleQueue[Record | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(path,), daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Have a record written with the next commit."""
        self._queue.put(record)

    def close(self) -> None:
        """Finish the run."""
        self._queue.put(None)
        self._thread.join(30)
        if self._thread.is_alive():
            raise GradvitalsError("the writer did not finish in 30 s")

    def _run(self, path: Path) -> None:
        with RunWriter(path, meta={"facts": {}}) as writer:
            is_open, committed = True, time.monotonic()
            while is_open:
                try:
                    record = self._queue.get(timeout=max(0.0, committed + COMMIT_SECONDS - time.monotonic()))
                except Empty:
                    writer.commit()
                    committed = time.monotonic()
                    continue
                if record is None:
                    is_open = False
                else:
                    writer.write(record)
            writer.commit()


def _memory(folder: Path, runs: int) -> dict[str, float]:
    """What the server holds after it was asked for everything about many runs, as a reader who opens them all would."""
    served = folder / "many"
    for number in range(runs):
        (served / f"run{number:02d}").mkdir(parents=True)
        os.link(folder / "one" / "long" / "run.db", served / f"run{number:02d}" / "run.db")
    with _server(served) as (url, process):
        with urlopen(f"{url}api/runs") as answer:
            found = json.load(answer)["runs"]
        asked = ["", "/layout", "/worst", "/heatmap?picture=norm&columns=600", "/heatmap?picture=gsnr&columns=600"]
        asked += [
            "/series?metric=loss&buckets=2000",
            "/series?metric=gsnr&metric=gsnr_low&metric=gsnr_high&buckets=2000",
        ]
        for run in found:
            for path in asked:
                with urlopen(f"{url}api/runs/{run['id']}{path}") as answer:
                    answer.read()
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text("utf-8").splitlines()
        )
    now, peak = (int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return {"memory_mb": now, "memory_peak_mb": peak}


@contextmanager
def _chromium() -> Iterator[Any]:
    executable = os.environ.get("GRADVITALS_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        raise GradvitalsError("this benchmark needs a Chromium; install one, or name it in GRADVITALS_CHROMIUM")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise GradvitalsError("this benchmark drives a browser with playwright; pip install playwright") from None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def _server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "gradvitals.cli", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().partition(" ")[0]
            if not url:
                raise GradvitalsError("gradvitals serve did not start; what it said is above")
            with urlopen(f"{url}static/favicon.svg", timeout=60) as answer:  # it is up, and has read no run yet
                answer.read()
            yield url, process
        finally:
            process.terminate()


def _until(page: Any, expression: str) -> None:
    """Playwright's own way of waiting evaluates text in the page, which the page forbids."""
    end = time.monotonic() + 60
    while not page.evaluate(expression):
        if time.monotonic() > end:
            raise GradvitalsError(f"the page did not get there in a minute: {expression}")
        time.sleep(0.005)


@click.command(cls=Command)
@click.option("--steps", type=click.IntRange(min=1000), default=100_000, show_default=True, help="Length of the run.")
@click.option("--tensors", type=click.IntRange(min=14), default=500, show_default=True, help="Parameters of the model.")
@click.option(
    "--runs", type=click.IntRange(min=1), default=50, show_default=True, help="Runs to request of one server."
)
@json_option
def main(steps: int, tensors: int, runs: int, as_json: bool) -> None:
    """Time the page of `gradvitals serve` with synthetic runs: first picture, a million points, new steps, memory.

    Needs a Chromium, and playwright to drive it. Takes about two minutes.

    \b
    Example:
      python -m benchmarks.page
      python -m benchmarks.page --steps 10000 --json
    """
    print_result(run_page(steps=steps, tensors=tensors, runs=runs, progress=echo_line), as_json, format_page)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.page")
