"""Draws the pictures of these pages and writes the gallery: `make pictures`. Needs Chromium, and takes some minutes."""

from __future__ import annotations

import html
import io
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import numpy as np
import torch
from playwright.sync_api import Page, sync_playwright
from rich.console import Console

import gradvitals as gv
from benchmarks.faults.record import _train_step
from benchmarks.faults.tasks import RECIPES, prepare
from benchmarks.faults.zoo import FAULTS
from benchmarks.real_bugs.cases import CASES
from benchmarks.real_bugs.controls import CONTROLS
from benchmarks.real_bugs.judge import watched
from benchmarks.real_bugs.loop import Knobs
from gradvitals.diagnose.rule import RULES
from gradvitals.report.report import Report
from gradvitals.report.terminal import Curves, render_doctor

HERE = Path(__file__).resolve().parent
COMMAND = [sys.executable, "-m", "gradvitals"]
WIDTH, HEIGHT, LEFT = 720, 92, 64
GALLERY = {
    "never_zeroed": ("Forgotten `zero_grad`", "The loop never calls `optimizer.zero_grad()`: gradients add up."),
    "lr_x30_always": ("Learning rate 30 times too high", "No warmup, and a learning rate that the model cannot take."),
    "lr_x0.001": ("Learning rate 1,000 times too low", "Three zeros too many, and the loss hardly moves."),
    "nan_in_layer": ("One NaN", "A single NaN in the gradient of one layer."),
    "bad_batch": ("One corrupted batch", "Inputs that were not normalized and random targets, at one step."),
    "shuffled_labels": ("Shuffled labels", "Inputs and targets do not belong together."),
    "frozen_left_out": ("A layer the optimizer does not have", "One layer is not in `optimizer.param_groups`."),
    "frozen_detached": ("A detached layer", "The forward pass detaches the weights of one layer."),
    "sigmoid_stack": ("Vanishing gradients", "A deep stack of sigmoids."),
    "exploding_rnn": ("Exploding gradients", "A recurrent network that multiplies its gradient, without clipping."),
    "fp16_unscaled": ("float16 without a loss scale", "Gradients are below the smallest float16 number."),
    "momentum_poisoned": ("Poisoned momentum", "The gradient is fine, but the optimizer's momentum is not."),
}
"""The twelve failures: ids of the fault zoo, each with its title and what was done."""
MORE = (
    "init_x100",
    "weight_decay",
    "batch_of_2",
    "same_micro_batches",
    "loss_x1e6",
    "dead_head",
    "huge_batch",
    "frozen_lr_0",
)
"""More faults of the zoo, for pictures of rules."""


def main() -> None:
    """Train, serve, and keep what the browser and the terminal show."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium was found on the path; install it, for example with: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name, chdir(name):  # runs are named as seen from here
        draw_page(Path(), chromium)
        draw_gallery(Path("zoo"))
        draw_other_rules()


def draw_page(folder: Path, chromium: str) -> None:
    """Draw the page, the report and the terminal from the runs of the demo."""
    runs = folder / "runs"
    demo = [*COMMAND, "demo", "--out", str(runs / "gpt")]
    subprocess.run(demo, check=True, stdout=subprocess.DEVNULL)
    with gv.open_run(runs / "gpt") as before, gv.open_run(runs / "gpt-fixed") as after:
        curves = [run.series("loss")[1] for run in (before, after)]
        keep_svg("demo", Curves(curves, ["Loss without zero_grad()", "Loss with zero_grad()"]), "gradvitals demo")
        keep_svg("doctor", render_doctor(Report(before)), "gradvitals doctor")
    report = folder / "report.html"
    subprocess.run(
        [*COMMAND, "report", str(runs / "gpt"), "--html", str(report)], check=True, stdout=subprocess.DEVNULL
    )
    with served(runs) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for picture, scheme, width in (
            ("page_finding", "light", 1280),
            ("page_dark", "dark", 1280),
            ("phone", "light", 390),
        ):
            page = browser.new_page(viewport={"width": width, "height": 860}, color_scheme=scheme)
            page.goto(address)
            page.wait_for_selector(".run-list .run", state="attached")
            if width < 900:
                page.locator("#runs-button").click()
            page.locator(".run-list .run").filter(has=page.get_by_text("gpt", exact=True)).click()
            page.wait_for_selector(".remedy")
            page.wait_for_timeout(2000)
            if picture == "page_finding":
                page.locator(".chip").first.click()
                page.wait_for_timeout(500)
            keep(page, picture)
        page = browser.new_page(viewport={"width": 1280, "height": 980})
        page.goto(report.resolve().as_uri())
        keep(page, "report")
        browser.close()


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """Serve the runs in a folder for the length of the block; yields the address."""
    server = subprocess.Popen([*COMMAND, "serve", str(runs), "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        yield found.group()
    finally:
        server.terminate()
        server.wait()


def keep(page: Page, name: str) -> None:
    """Keep what is on the screen as a file beside this one."""
    page.screenshot(path=HERE / f"{name}.png")
    print(HERE / f"{name}.png")


def keep_svg(name: str, content: object, title: str) -> None:
    """Keep what a terminal shows as a file beside this one."""
    screen = Console(record=True, width=86, file=io.StringIO(), force_terminal=True, highlight=False)
    screen.print(content)
    screen.save_svg(str(HERE / f"{name}.svg"), title=title)
    print(HERE / f"{name}.svg")


# -- the gallery, and a picture per rule -----------------------------------------------------------------------------


def draw_gallery(folder: Path) -> None:
    """Train every fault, draw each run once for the rule it shows, and write docs/gallery.md."""
    drawn = HERE / "rules"
    shutil.rmtree(drawn, ignore_errors=True)
    drawn.mkdir()
    parts = [
        "# Gallery of failures\n",
        "Twelve ways for a training run to go wrong, each planted in a small model, and what `gradvitals doctor` "
        "prints. `make pictures` trains them again and writes this page.\n",
    ]
    for fault in (*GALLERY, *MORE):
        train(fault, folder / fault)
        with gv.open_run(folder / fault) as run:
            ids = [item.finding.id for item in run.verdict.ranked if item.finding.severity != "info"]
            for rule in dict.fromkeys(ids):
                if not (drawn / f"{rule}.svg").exists():
                    (drawn / f"{rule}.svg").write_text(picture(run, rule), "utf-8")
            if fault in GALLERY:
                title, about = GALLERY[fault]
                (HERE / "gallery").mkdir(exist_ok=True)
                (HERE / "gallery" / f"{fault}.svg").write_text(picture(run, ids[0] if ids else None), "utf-8")
                parts += [f"## {title}\n", f"{about}\n", f"![Loss and gradient norm](pictures/gallery/{fault}.svg)\n"]
                parts += [f"```text\n{printed(run, fault)}```\n"]
        print(fault, ids)
    (HERE.parent / "gallery.md").write_text("\n".join(parts), "utf-8")


def draw_other_rules() -> None:
    """Draw rules that no fault of the zoo shows, from the real bugs, and from what is healthy but unlike most."""
    buggy = [(name, lambda case=case: case.train(True, Knobs())) for name, case in CASES.items()]
    for name, train_it in (*buggy, *CONTROLS.items()):
        torch.manual_seed(17)
        _, _, runs = watched(train_it)
        for run in runs:
            for rule in dict.fromkeys(finding.id for finding in run.findings if finding.follows is None):
                path = HERE / "rules" / f"{rule}.svg"
                if rule in RULES and not path.exists() and run.series("loss")[0].size:
                    path.write_text(picture(run, rule), "utf-8")
                    print(name, rule)
            run.close()


def train(name: str, path: Path) -> None:
    """Train one fault of the zoo, watched and diagnosed."""
    fault = FAULTS[name]
    recipe = fault.change(RECIPES[fault.tasks[0]])
    training = prepare(recipe, 0, build=fault.build)
    planted = fault.planted(0)
    fault.attach(training, planted)
    config = gv.Config(tensor_every=5, quiet=True, overhead_budget=1)
    monitor = gv.watch(training.model, training.optimizer, run=path, config=config, batch_size=recipe.batch_size)
    with monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(recipe.num_steps):
            _train_step(training, monitor, fault, step, step - planted)


def printed(run: gv.Run, name: str) -> str:
    """Returns what `gradvitals doctor` prints, with a short name of the run."""
    screen = Console(width=88, file=io.StringIO(), highlight=False, markup=False, emoji=False)
    screen.print(render_doctor(Report(run)))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().replace(str(run.path), f"runs/{name}")


def picture(run: gv.Run, rule: str | None) -> str:
    """Returns loss and gradient norm of a run as SVG, with the steps of a finding shaded."""
    last = max(1, run.last_step or 1)
    findings = [finding for finding in run.findings if finding.id == rule]
    rows = [(label, *run.series(metric)) for metric, label in (("loss", "loss"), ("grad/norm", "gradient norm"))]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {len(rows) * HEIGHT + 22}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    ]

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 12) * step / last

    for finding in findings[:6]:
        end = last if finding.last_step is None else finding.last_step
        width = max(2.0, x(end) - x(finding.first_step))
        parts.append(
            f'<rect x="{x(finding.first_step):.1f}" y="6" width="{width:.1f}" height="{len(rows) * HEIGHT - 8}" '
            f'fill="#b93c0a" opacity="0.14"/>'
        )
    for place, (label, steps, values) in enumerate(rows):
        parts += _curve(label, steps, values, x, place * HEIGHT)
    if findings:
        title = html.escape(findings[0].title[:88])
        parts.append(f'<text x="{LEFT}" y="18" fill="#b93c0a">{title}</text>')
    parts.append(f'<text x="{LEFT}" y="{len(rows) * HEIGHT + 16}" fill="#5c6875">step 0</text>')
    parts.append(
        f'<text x="{WIDTH - 12}" y="{len(rows) * HEIGHT + 16}" text-anchor="end" fill="#5c6875">step {last}</text>'
    )
    return "\n".join([*parts, "</svg>\n"])


def _curve(label: str, steps: np.ndarray, values: np.ndarray, x: object, top: float) -> Iterator[str]:
    known = values[np.isfinite(values)]
    log = known.size > 0 and known.min() > 0 and known.max() > 20 * known.min()
    shown = np.log(np.where(values > 0, values, np.nan)) if log else values
    finite = shown[np.isfinite(shown)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    scale = (HEIGHT - 34) / max(high - low, 1e-12)
    points = [
        f"{x(step):.1f},{top + HEIGHT - 8 - (value - low) * scale:.1f}"  # type: ignore[operator]
        for step, value in zip(steps.tolist(), shown.tolist(), strict=True)
        if np.isfinite(value)
    ]
    yield f'<polyline points="{" ".join(points)}" fill="none" stroke="#0b5f93" stroke-width="1.4"/>'
    yield f'<text x="4" y="{top + 30}" fill="#1a222b">{label.split()[-1]}</text>'
    for value, y in ((high, 44), (low, HEIGHT - 8)):
        number = float(np.exp(value)) if log else value
        yield f'<text x="4" y="{top + y}" fill="#5c6875">{number:.3g}</text>'


if __name__ == "__main__":
    main()
