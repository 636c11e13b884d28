"""Numbers of layers are made of those of their tensors in one way, whatever order these come in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gradvitals.report.series import ByLayer, table_of
from gradvitals.report.summary import layer_rows
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Layout, Reading, TensorInfo

LAYERS = ("in", "empty", "middle", "out")
MEMBERS = ("middle", "in", "middle", "elsewhere", "out")
"""The layer of each tensor: not in order, one that the run does not name, and none in ``empty``."""

WriteTensors = Callable[..., Path]


@pytest.fixture
def write_tensors(tmp_path: Path) -> WriteTensors:
    def write(**metrics: list[float]) -> Path:
        tensors = tuple(
            TensorInfo(index=i, name=f"t{i}", shape=(2,), dtype="float32", layer=layer, depth=0)
            for i, layer in enumerate(MEMBERS)
        )
        named = {name.replace("_", "/", 1): np.array(values) for name, values in metrics.items()}
        with RunWriter(tmp_path / "run", meta={}) as writer:
            writer.write(Layout(tensors=tensors, layers=LAYERS))
            for step in (3, 5):
                writer.write(Reading(step=step, time=0.0, values={"loss": 1.0}, tensors=named))
        return tmp_path / "run"

    return write


def test_tensors_become_layers(write_tensors: WriteTensors) -> None:
    with open_run(write_tensors(grad_norm=[3, 1, 4, 100, 2])) as run:
        by = ByLayer(run)
    values = np.array([[3.0, 1, 4, 100, 2], [np.nan, np.nan, 4, 0, np.inf]])
    assert by.layers.tolist() == [0, 2, 3]
    np.testing.assert_allclose(by.norms(values), [[1, 5, 2], [np.nan, 4, np.inf]])
    np.testing.assert_array_equal(by.reduced(values, np.fmax), [[1, 4, 2], [np.nan, 4, np.inf]])
    np.testing.assert_array_equal(by.reduced(values, np.fmin), [[1, 3, 2], [np.nan, 4, np.inf]])
    np.testing.assert_array_equal(by.all_layers(by.reduced(values[0], np.fmax)), [1, np.nan, 4, 2])


@pytest.mark.parametrize("size", [2e-38, 2e37])
def test_squares_of_the_smallest_and_largest_norms_are_held(write_tensors: WriteTensors, size: float) -> None:
    with open_run(write_tensors(grad_norm=[3 * size, 0, 4 * size, 0, 0])) as run:
        table = table_of(run, "grad/norm", "layers")
        assert table is not None
        [(_, found)] = table.read(run, table.steps(run))
    np.testing.assert_allclose(found[0], [0, 5 * size, 0], rtol=1e-6)


def test_a_run_without_tensors_has_no_layers(tmp_path: Path) -> None:
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(Layout(tensors=(), layers=LAYERS))
        writer.write(Reading(step=0, time=0.0, values={"loss": 1.0}))
    with open_run(tmp_path) as run:
        by = ByLayer(run)
        assert table_of(run, "grad/norm", "layers") is None
    assert by.norms(np.zeros((2, 0))).shape == (2, 0)
    assert np.isnan(by.all_layers(np.zeros(0))).all()


def test_the_table_of_a_metric_reads_what_it_needs(write_tensors: WriteTensors) -> None:
    folder = write_tensors(
        grad_norm=[3, 1, 4, 100, 2],
        grad_nonfinite=[0, 0, 0, 0, 7],
        update_norm=[3, 1, 4, 1, 1],
        weight_norm=[6, 4, 8, 1, 0],
    )
    with open_run(folder) as run:
        found = {}
        for metric in ("grad/norm", "update/ratio"):
            table = table_of(run, metric, "layers")
            assert table is not None
            assert table.rows.tolist() == [0, 2, 3]
            parts = list(table.read(run, table.steps(run), at_a_time=1))
            assert [steps.tolist() for steps, _ in parts] == [[3], [5]]
            found[metric] = parts[1][1][0]
        assert table_of(run, "gsnr", "layers") is None
        assert table_of(run, "weight/norm", "layers") is None  # the largest of its tensors would not be a layer's
        step, rows = layer_rows(run, None)
    np.testing.assert_allclose(found["grad/norm"], [1, 5, np.inf])
    np.testing.assert_allclose(found["update/ratio"], [1 / 4, 1 / 2, np.inf])
    assert step == 5
    assert [row.name for row in rows] == list(LAYERS)
    np.testing.assert_allclose([row.grad_norm for row in rows], [1, np.nan, 5, 2])
    np.testing.assert_allclose([row.update_ratio for row in rows], [1 / 4, np.nan, 1 / 2, np.inf])
