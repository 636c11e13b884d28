"""A run in a notebook: a card, and plots."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes

import gradvitals as gv
from gradvitals.errors import RunError
from gradvitals.report.notebook import PlotsMissingError, display
from gradvitals.store.reader import Run, open_run
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
    for part in (
        "Unhealthy: the loss is NaN (since step 51).",
        "60 steps, 1 open finding",
        "lower the rate",
        "2 ranks",
        "1.25",
    ):
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


# -- plots -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_a_screen() -> Iterator[None]:
    matplotlib.use("Agg")
    yield
    pyplot.close("all")


@pytest.fixture
def run(write_run: WriteRun) -> Iterator[Run]:
    with open_run(write_run()) as opened:
        yield opened


def test_a_series_with_its_interval_and_marks(run: Run) -> None:
    axes = run.plot("gsnr", tensor="head.weight", color="green")
    assert isinstance(axes, Axes)
    line, mark = axes.get_lines()
    steps, values = run.series("gsnr", tensor="head.weight")
    assert np.array_equal(line.get_xdata(), steps)
    assert np.array_equal(line.get_ydata(), values)
    assert line.get_color() == "green"
    [band] = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.9 / 4, 1.1 / 4))
    assert list(mark.get_xdata()) == [30, 30]  # the critical finding; the note has none
    assert axes.get_ylabel() == "gsnr (microbatch)"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["head.weight"]


def test_several_tensors_on_axes_of_ones_own(run: Run) -> None:
    _, mine = pyplot.subplots()
    axes = run.plot("grad/norm", tensor=["head.weight", "embed.weight"], ax=mine, marks=False)
    assert axes is mine
    assert [line.get_ydata()[0] for line in axes.get_lines()] == [4.0, 1.0]
    assert not axes.collections


def test_all_layers_as_a_map(run: Run) -> None:
    axes = run.plot("grad/norm", kind="layers")
    [image] = axes.get_images()
    values = np.asarray(image.get_array())
    assert values.shape == (3, 40)
    assert values[1, 30] == pytest.approx(20 * np.hypot(2, 3))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["embed", "blocks.0", "head"]
    assert axes.get_ylim() == (2.5, -0.5)  # the input is at the top


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "layers", "tensor": "head.weight"}, "more than one was given"),
        ({"tensor": "head.weight", "layer": "head"}, "more than one was given"),
        ({"tensor": "heda.weight"}, "did you mean 'head.weight'"),
        ({"kind": "ranks"}, "no 'grad/norm' to plot for ranks"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_an_error(run: Run, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        run.plot("grad/norm", **options)


def test_without_matplotlib_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(PlotsMissingError, match=r"pip install 'gradvitals\[plots\]'"):
        run.plot("loss")


def curve(path: Path, values: list[float]) -> Run:
    with RunWriter(path, meta={}) as writer:
        for step, value in enumerate(values):
            writer.write(Reading(step=step, time=0.0, values={"loss": value}))
    return open_run(path)


def test_a_value_far_off_does_not_hide_the_others(tmp_path: Path) -> None:
    with curve(tmp_path / "run", [2.0] * 20 + [1e5]) as run:
        assert run.plot("loss").get_yscale() == "log"
        _, mine = pyplot.subplots()
        assert run.plot("loss", ax=mine).get_yscale() == "linear"  # whoever brings axes has set them up
    with curve(tmp_path / "other", [2.0] * 20 + [10.0]) as run:
        assert run.plot("loss").get_yscale() == "linear"


def test_a_metric_without_values_says_so(tmp_path: Path) -> None:
    with curve(tmp_path / "run", [float("nan")] * 5) as run:
        assert [text.get_text() for text in run.plot("loss").texts] == ["no values of loss"]
    with curve(tmp_path / "other", [1.0] * 5) as run:
        assert not run.plot("loss").texts
