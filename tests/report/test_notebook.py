"""A run and a Monitor display themselves in a notebook, safely."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import torch

import gradvitals as gv
from gradvitals.report.notebook import display
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading

WriteRun = Callable[..., Path]
HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(1)>'


class Seen(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name == "src"]

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def write(path: Path, title: str, *, ranks: int = 2, steps: int = 60) -> Path:
    with RunWriter(path, meta={"facts": {}, "ranks": ranks}) as writer:
        writer.write(Layout())
        for step in range(steps):
            values = {"loss": np.nan if step > 50 else 2.0, "grad/norm": 1.25}
            writer.write(Reading(step=step, time=0.0, values=values))
        writer.write(Finding(id="x", severity="critical", title=title, first_step=51, fixes=("lower the rate",)))
    return path


def test_a_run_shows_verdict_curves_and_findings(tmp_path: Path) -> None:
    with open_run(write(tmp_path / "run", "the loss is NaN")) as run:
        seen = Seen(run._repr_html_())
    flat = " ".join(seen.text.split())
    for part in ("Unhealthy: 60 steps, 1 open finding.", "the loss is NaN", "lower the rate", "2 ranks", "1.25"):
        assert part in flat, part
    assert "NaN" in flat
    assert seen.tags.count("svg") == 2


def test_hostile_words_are_text(tmp_path: Path) -> None:
    bad, good = (
        Seen(display(write(tmp_path / name, title), ""))
        for name, title in (("a", HOSTILE * 300), ("b", "the norm rose"))
    )
    assert bad.tags == good.tags
    assert len(bad.text) < 3000


def test_a_run_without_diagnosis_is_not_called_healthy(write_run: WriteRun) -> None:
    with open_run(write_run()) as run:
        text = Seen(run._repr_html_()).text
    assert "without diagnosis" in text
    assert "Healthy" not in text


def test_there_is_always_something_to_show(tmp_path: Path) -> None:
    RunWriter(tmp_path / "empty", meta={}).close()
    assert "No readings yet." in display(tmp_path / "empty", "")
    assert display(tmp_path / "nowhere", "Monitor(<b>)") == "<pre>Monitor(&lt;b&gt;)</pre>"


def test_a_monitor_shows_the_run_it_writes(tmp_path: Path) -> None:

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        assert monitor._repr_html_() == f"<pre>{repr(monitor).replace(chr(39), '&#x27;')}</pre>"
        for _ in range(5):
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert monitor.flush()
        seen = Seen(monitor._repr_html_())
    assert "running" in seen.text
    assert "5 steps so far" in seen.text
    assert "svg" in seen.tags


def test_a_monitor_shows_the_run_as_of_now(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.ones(2, 2)).square().mean().backward()
            optimizer.step()
        assert "30 steps so far" in Seen(monitor._repr_html_()).text
