"""Blocks and tail together always tell the same story as a plain dict."""

from __future__ import annotations

import sqlite3
import tempfile
from collections import defaultdict
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradvitals.store import RunWriter, blocks, open_run, writer
from gradvitals.types import Layout, Reading, TensorInfo

NAMES = ("a", "b", "c")
LAYOUT = Layout(
    tensors=tuple(
        TensorInfo(index=i, name=name, shape=(), dtype="float32", layer="l", depth=0) for i, name in enumerate(NAMES)
    )
)

floats = st.floats(width=32)
columns = st.dictionaries(st.sampled_from(["m", "n"]), st.lists(floats, min_size=3, max_size=3), max_size=2)
events = st.tuples(
    st.integers(0, 12),
    st.sampled_from([None, "microbatch"]),
    st.sampled_from(["raw", "clipped"]),
    st.sampled_from([None, 8.0, 0.5]),
    st.dictionaries(st.sampled_from(["loss", "lr"]), floats, max_size=2),
    columns,
    st.sampled_from(["", "commit", "compact", "reopen"]),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(events, max_size=40))
def test_series_equal_a_dict(sequence):
    """Any order of steps, sources, stages, columns, commits; of two readings of a step the later one counts."""
    series: dict[tuple, dict[int, tuple]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder, patch.object(writer, "block_frames", lambda *_: 4):
        with patch.object(writer, "MIN_COMPACT", 1):
            out = RunWriter(folder, meta={})
            out.write(LAYOUT)
            for number, (step, source, stage, batch, values, tensors, then) in enumerate(sequence):
                arrays = {metric: np.array(row) for metric, row in tensors.items()}
                where = {"source": source, "stage": stage, "batch_size": batch}
                out.write(Reading(step=step, time=number, values=values, tensors=arrays, **where))
                for metric, value in values.items():
                    series[metric, source, None][step] = value, number, batch, stage
                for metric, row in tensors.items():
                    for name, value in zip(NAMES, row, strict=True):
                        series[metric, source, name][step] = value, number, batch, stage
                if then:
                    out.commit()
                    getattr(out, then)()
            out.close()
        with open_run(folder) as run:
            for (metric, source, name), expected in series.items():
                if source is None and (metric, None, name) not in series:
                    continue
                where = {"tensor": name, "source": source}
                steps, found = run.series(metric, **where)
                assert steps.tolist() == sorted(expected)
                rows = [expected[step] for step in sorted(expected)]
                np.testing.assert_array_equal(found, [row[0] for row in rows])
                assert run.times(metric, **where)[1].tolist() == [row[1] for row in rows]
                np.testing.assert_array_equal(
                    run.batch_sizes(metric, **where)[1], [np.nan if row[2] is None else row[2] for row in rows]
                )
                assert run.stage(metric, **where)[1].tolist() == [row[3] for row in rows]
                since = run.series(metric, since=5, **where)
                np.testing.assert_array_equal(since[0], steps[steps > 5])
                np.testing.assert_array_equal(since[1], found[steps > 5])
            back = list(run.readings())
            assert sorted(reading.time for reading in back) == list(range(len(sequence)))
            assert [reading.step for reading in back] == sorted(event[0] for event in sequence)
            for reading in back:
                step, source, stage, batch, values, tensors, _ = sequence[int(reading.time)]
                assert (reading.step, reading.source, reading.stage, reading.batch_size) == (step, source, stage, batch)
                np.testing.assert_equal(dict(reading.values), values)
                np.testing.assert_equal({k: v.tolist() for k, v in reading.tensors.items()}, tensors)


@pytest.mark.parametrize("steps", [1, 255, 256, 257, 700])
def test_block_borders(tmp_path, make_layout, make_reading, steps):
    with RunWriter(tmp_path, meta={}) as out:
        out.write(make_layout(*NAMES))
        for step in range(steps):
            out.write(make_reading(step))
            if step % 100 == 0:
                out.commit()
    with open_run(tmp_path) as run:
        found, values = run.series("grad/norm", tensor="c")
        assert found.tolist() == list(range(steps))
        np.testing.assert_array_equal(values, np.arange(steps) + 0.5)
        found, rows = run.matrix("grad/norm")
        np.testing.assert_array_equal(rows, np.arange(steps)[:, None] + 0.25 * np.arange(3))
        assert run.table("grad/norm", step=steps // 2)[1].tolist() == [steps // 2 + 0.25 * row for row in range(3)]


def test_full_blocks_leave_the_tail(tmp_path, make_reading):
    size = blocks.block_frames(2, 3)
    with RunWriter(tmp_path, meta={}) as out:
        for step in range(size + 5):
            out.write(make_reading(step, values={}))
        out.commit()
        connection = sqlite3.connect(tmp_path / "run.db")
        assert connection.execute("SELECT count(*) FROM tail").fetchone() == (5,)
        assert connection.execute("SELECT count(*) FROM block").fetchone() == (3,)
        connection.close()


@pytest.mark.parametrize("num_columns", [*range(1, 12), 20, 30])
def test_blocks_fill_their_pages(tmp_path, num_columns):
    """Whatever the number of metrics, each further block takes less than 4.4 bytes a value."""
    size = blocks.block_frames(num_columns, 200)
    assert 192 <= size <= 320
    reading = Reading(step=0, time=0.0, tensors={f"m{i}": np.ones(200) for i in range(num_columns)})
    with RunWriter(tmp_path, meta={}) as out:
        pages = []
        for _ in range(4):
            for _ in range(size):
                out.write(reading)
            out.commit()
            pages.append(out._db.execute("PRAGMA page_count").fetchone()[0])
    assert (pages[3] - pages[0]) * blocks.PAGE_SIZE / (3 * size * 200 * num_columns) < 4.4


def test_blocks_of_a_very_wide_model_stay_small():
    assert blocks.block_frames(10, 100_000) == 16
    assert blocks.block_frames(1, 40_000) * 40_000 * 4 <= blocks.MAX_CHUNK_BYTES
