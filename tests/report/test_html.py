"""The page of a run: everything is on it, in one file that fetches nothing and takes names for text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from gradvitals.report.html import render_html
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Action, Finding, Layout, Reading, TensorInfo

Write = Callable[..., Path]
NAMES = ("embed", "blocks.0", "blocks.1", "head")
HOSTILE = (
    '<script>alert("x")</script>',
    "'\"><img src=x onerror=alert(1)>",
    "L" * 10_000,
    "\x1b[31m</style>&amp;\u202e",
)
FINDING = Finding(
    id="explosion",
    severity="critical",
    title="the gradient norm rose to 41× its usual size",
    tensors=("blocks.0.weight",),
    first_step=30,
    found_step=32,
    evidence={"seen": {"ratio": 41.26, "lr": 0.003}, "expected": {"ratio": 2.0}},
    causes=("one bad batch: it came and went", "the learning rate"),
    fixes=("skip the batch of step 30", "lower the learning rate"),
)


def layout_of(names: tuple[str, ...]) -> Layout:
    tensors = tuple(
        TensorInfo(index=i, name=f"{name}.weight", shape=(8, 8), dtype="float32", layer=name, depth=i)
        for i, name in enumerate(names)
    )
    return Layout(tensors=tensors, layers=names)


def readings_of(step: int, rows: int, *, broken_from: int = 10**9) -> list[Reading]:
    broken, row = step >= broken_from, np.arange(1.0, rows + 1)
    values = {"loss": np.nan if broken else 4.0 / (1 + step), "lr": 1e-3, "grad/norm": 2.0}
    tensors = {
        "grad/norm": np.where(broken, np.nan, row),
        "grad/nonfinite": np.where(broken & (row == 2), 7.0, 0.0),
        "grad/spike_ratio": row,
        "weight/norm": 10.0 * row,
        "update/norm": 0.01 * row**2,
        "update/ratio": 0.001 * row,
    }
    ranks = {"ranks/norm": np.array([1.5, 2.5]), "ranks/norm_ratio": np.array([0.6, 1.6])}
    sampled = {"gsnr": 0.5, "gsnr_low": 0.4, "gsnr_high": 0.6}
    noise = {"noise_scale": 64.0, "noise_scale_low": 50.0, "noise_scale_high": 90.0}
    layers = {"gsnr": 1 / row, "gsnr_low": 0.5 / row, "gsnr_high": 2 / row}
    return [
        Reading(step=step, time=float(step), batch_size=32, values=values, tensors=tensors, ranks=ranks),
        Reading(
            step=step,
            time=float(step),
            source="microbatch",
            batch_size=8,
            values=sampled | noise,
            tensors={"gsnr": 1 / row},
            layers=layers,
        ),
    ]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(
        *records: Finding | Action, names: tuple[str, ...] = NAMES, steps: int = 60, broken_from: int = 10**9
    ) -> Path:
        path = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        with RunWriter(path, meta={"facts": {"optimizer": "AdamW"}, "ranks": 2, "version": "0.1.0"}) as writer:
            writer.write(layout_of(names))
            for step in range(steps):
                for reading in readings_of(step, len(names), broken_from=broken_from):
                    writer.write(reading)
            for record in records:
                writer.write(record)
        return path

    return write


def page_of(path: Path) -> str:
    with open_run(path) as run:
        return render_html(run)


class Elements(HTMLParser):
    """The elements of a page in order, its text, and every attribute that could fetch or run something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def test_everything_about_a_run_is_on_the_page(write: Write) -> None:
    action = Action(kind="hold_lr", step=31, finding="explosion", taken=True, reason="41 times its usual size")
    found = Elements(page_of(write(FINDING, action)))
    for part in (
        "Unhealthy the gradient norm rose to 41× its usual size",
        "Likely cause : one bad batch: it came and went",
        "60 steps, 1 open finding; ",
        "norm over its baseline 41.3, normally 2",
        "one bad batch: it came and went",
        "lower the learning rate",
        "The Guard held the learning rate 1 time.",
        "41 times its usual size",
        "from micro-batches of batches of 8",
        "dashed: your batch of 32",
        "Layers over steps",
        "Update over weight",
        "Lowest GSNR",
        "The 2 ranks",
        "Checks skipped",
        "AdamW",
        "4 tensors, 256 parameters",
    ):
        assert part in found.text, part
    assert found.tags.count("svg") >= 6  # loss, norm, GSNR, noise scale, learning rate, actions
    assert found.tags.count("img") == 6  # three heatmaps and their legends


def test_nothing_is_fetched_and_only_our_own_script_may_run(write: Write) -> None:
    page = page_of(write(FINDING))
    found = Elements(page)
    assert [load for load in found.loads if not load.startswith(("data:image/png;base64,", "#"))] == []
    assert not found.handlers
    assert "http://" not in page
    assert "https://" not in page
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert f"script-src &#x27;sha256-{digest}&#x27;" in policy[1]
    assert "default-src &#x27;none&#x27;" in policy[1]


def test_hostile_names_are_text_and_cut(write: Write) -> None:
    hostile = [name.join(("the norm of ", " rose")) for name in HOSTILE]
    records = [
        Finding(id=name, severity="warning", title=hostile[i], tensors=HOSTILE) for i, name in enumerate(HOSTILE)
    ]
    calm = [Finding(id=name, severity="warning", title="the norm rose", tensors=NAMES) for name in NAMES]
    bad, good = page_of(write(*records, names=HOSTILE)), page_of(write(*calm))
    assert Elements(bad).tags == Elements(good).tags  # whatever they are called, the page is made of the same elements
    assert not Elements(bad).handlers
    assert '<script>alert("x")</script>' in Elements(bad).text
    assert "L" * 400 not in bad
    assert "\x1b" not in bad
    assert "\u202e" not in bad


def test_a_run_that_broke_says_where(write: Write) -> None:
    page = page_of(write(broken_from=40))
    assert page.count("red: NaN or Inf, first at step 40") == 1  # the loss; the norm of this run is a number
    assert ">NaN</output>" in page
    assert "NaN or Inf in the gradient" in page
    assert "blocks.0.weight" in page


def test_a_large_run_stays_small(write: Write) -> None:
    names = tuple(f"transformer.layers.{i}.with.a.rather.long.name" for i in range(500))
    findings = [
        Finding(id=f"f{i}", severity="warning", title="x" * 5000, tensors=names, first_step=i, causes=("y" * 5000,) * 9)
        for i in range(250)
    ]
    actions = [Action(kind="clip", step=i, finding="f", taken=True, reason="z" * 5000) for i in range(500)]
    assert len(page_of(write(*findings, *actions, names=names, steps=40)).encode()) < 1.5e6


def test_a_run_without_readings_has_a_page(tmp_path: Path) -> None:
    RunWriter(tmp_path / "run", meta={}).close()
    assert "No readings yet." in page_of(tmp_path / "run")


def test_a_run_recorded_without_diagnosis_is_replayed(write_run: Write) -> None:
    page = page_of(write_run())
    assert "Recorded without diagnosis; replayed with the current rules." in page
    assert "Checks passed" in page
