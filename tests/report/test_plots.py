"""`run.plot` draws the numbers of the run on the axes it is given."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes

from gradvitals.errors import RunError
from gradvitals.report.notebook import PlotsMissingError
from gradvitals.store.reader import Run, open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Reading

WriteRun = Callable[..., Path]


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
