"""Curves, layers and heatmaps hold the numbers they should, however long the run."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gradvitals.report.charts import palette, png, scale_of, shades
from gradvitals.report.series import ByLayer, Heatmap, Span, read_curves, read_heatmap, span_of, table_of
from gradvitals.report.summary import layer_rows
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Layout, Reading, TensorInfo

WriteRun = Callable[..., Path]


def test_spikes_and_nan_survive_thinning(write_run: WriteRun) -> None:
    def reading(step: int) -> list[Reading]:
        loss = np.nan if 4000 <= step < 4100 else 50.0 if step == 1234 else 2.0
        return [Reading(step=step, time=0.0, values={"loss": loss, "grad/norm": np.inf if step == 7 else 1.0})]

    with open_run(write_run(steps=5000, readings=reading)) as run:
        span = span_of(run)
        assert span == Span(0, 4999)
        loss, norm = read_curves(run, span)
    assert len(loss.steps) <= 600
    assert np.nanmax(loss.high) == 50.0
    assert np.nanmax(loss.middle) == 2.0
    [(first, last)] = loss.nonfinite
    assert (first, last) == (4000, 4099)
    assert norm.nonfinite == ((7.0, 7.0),)
    assert loss.steps_per_point == pytest.approx(5000 / 600, abs=1)


def test_gsnr_has_its_interval_and_gaps_if_it_is_unknown(write_run: WriteRun) -> None:
    def reading(step: int) -> list[Reading]:
        gsnr = np.nan if step < 10 else 0.5
        values = {"gsnr": gsnr, "gsnr_low": gsnr - 0.1, "gsnr_high": gsnr + 0.1}
        return [Reading(step=step, time=0.0, source="adam", batch_size=16, values=values)]

    with open_run(write_run(steps=50, readings=reading)) as run:
        [curve] = read_curves(run, Span(0, 49))
    assert (curve.source, curve.batch_size, curve.is_interval, curve.nonfinite) == ("adam", 16.0, True, ())
    assert np.isnan(curve.middle[:10]).all()
    assert curve.low[10:] == pytest.approx(0.4)
    assert curve.high[10:] == pytest.approx(0.6)


def test_a_layers_norm_gsnr_and_update_are_those_of_its_tensors(write_run: WriteRun) -> None:
    with open_run(write_run()) as run:
        span = Span(0, 39)
        norm, gsnr, update = (read_heatmap(run, name, "layers", span) for name in ("grad/norm", "gsnr", "update/ratio"))
    assert norm is not None
    assert gsnr is not None
    assert update is not None
    assert norm.names == ("embed", "blocks.0", "head")
    assert norm.values.shape == (3, 40)
    assert norm.values[:, 0] == pytest.approx([1, np.hypot(2, 3), 4])
    assert norm.values[1, 30] == pytest.approx(20 * np.hypot(2, 3))  # the spike
    assert np.argwhere(norm.nonfinite).tolist() == [[1, 25]]
    assert gsnr.values[:, 5] == pytest.approx([2, 1, 2 / 3])
    assert update.values[1, 9] == pytest.approx(np.hypot(0.04, 0.09) / np.hypot(20, 30))


def test_a_reading_stands_until_the_next_and_not_beyond_the_last(write_run: WriteRun) -> None:
    def reading(step: int) -> list[Reading]:
        tensors = {"grad/norm": np.full(4, 1.0 + step)} if step % 10 == 0 and step < 60 else {}
        return [Reading(step=step, time=0.0, values={"grad/norm": 1.0}, tensors=tensors)]

    with open_run(write_run(steps=100, readings=reading)) as run:
        found = read_heatmap(run, "grad/norm", "tensors", Span(0, 99))
    assert found is not None
    assert found.values[0, :60] == pytest.approx(1 + np.arange(60) // 10 * 10)
    assert np.isnan(found.values[0, 60:]).all()


def test_a_long_run_keeps_the_largest_norm_of_every_bin(write_run: WriteRun) -> None:
    def reading(step: int) -> list[Reading]:
        norm = np.array([1.0, 1.0, 1.0, 9.0 if step == 777 else 1.0])
        return [Reading(step=step, time=0.0, values={"grad/norm": 1.0}, tensors={"grad/norm": norm})]

    with open_run(write_run(steps=2000, readings=reading)) as run:
        found = read_heatmap(run, "grad/norm", "tensors", Span(0, 1999))
    assert found is not None
    assert found.values.shape == (4, 480)
    assert np.argwhere(found.values > 5).tolist() == [[3, 777 * 480 // 2000]]


def test_colors_are_logarithmic_and_mark_missing_and_nonfinite_cells() -> None:
    values = np.array([[1.0, 10.0, 100.0], [0.0, np.nan, 10.0]])
    nonfinite = np.array([[False, False, False], [False, False, True]])
    found = Heatmap(metric="x", note="", names=("a", "b"), values=values, nonfinite=nonfinite)
    places = shades(found, (1.0, 100.0))
    assert places.tolist() == [[1, 128, 254], [1, 0, 255]]
    bright = palette()[1:255, :3] @ np.array([0.2126, 0.7152, 0.0722])
    assert (bright[5:] > bright[:-5]).all()  # told apart without seeing colors
    assert scale_of(np.full((2, 2), np.nan)) is None


def test_an_image_with_a_palette_is_a_png_of_indices() -> None:
    places = np.array([[0, 1, 2], [253, 254, 255]], dtype=np.uint8)
    data = png(places, palette())
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        chunks[kind] = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + chunks[kind])
        at += 12 + size
    assert struct.unpack(">IIBB", chunks[b"IHDR"][:10]) == (3, 2, 8, 3)
    assert (len(chunks[b"PLTE"]), len(chunks[b"tRNS"])) == (768, 256)
    assert zlib.decompress(chunks[b"IDAT"]) == b"\0" + bytes([0, 1, 2]) + b"\0" + bytes([253, 254, 255])


# -- layers ----------------------------------------------------------------------------------------------------------

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
