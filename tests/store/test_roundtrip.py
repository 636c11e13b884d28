"""What was written is read back, also while it is being written."""

from __future__ import annotations

import itertools
import math
import re
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradvitals.errors import RunError, RunFormatError
from gradvitals.report.listing import find_runs
from gradvitals.store import RunWriter, UnknownNameError, free_run_path, min_max_buckets, open_run, opening, schema
from gradvitals.types import Action, Finding, Layout, Reading


def as_float32(number: float) -> float:
    return float(np.float32(number))


def test_a_reading_comes_back_whole(tmp_path, make_layout):
    reading = Reading(
        step=7,
        time=1.5e9 + 0.125,
        stage="unscaled",
        source="microbatch",
        batch_size=33_554_433.0,
        values={"noise_scale": math.nan, "gsnr": math.inf, "lr": 3e-4},
        tensors={"gsnr": np.array([1.0, math.nan, -math.inf])},
        layers={"gsnr": np.array([0.5, 0.25])},
        heads={"gsnr": np.array([9.0])},
    )
    with RunWriter(tmp_path / "run", meta={}) as writer:
        writer.write(make_layout("a", "b", "c", layers=("one", "two"), heads=("one/head0",)))
        writer.write(reading)
    with open_run(tmp_path / "run") as run:
        (back,) = run.readings()
        assert (back.step, back.time, back.stage, back.source) == (7, 1.5e9 + 0.125, "unscaled", "microbatch")
        assert back.batch_size == 33_554_433.0
        assert back.values["lr"] == as_float32(3e-4)
        assert back.values["gsnr"] == math.inf
        assert math.isnan(back.values["noise_scale"])
        for kind in ("tensors", "layers", "heads"):
            np.testing.assert_array_equal(getattr(back, kind)["gsnr"], getattr(reading, kind)["gsnr"])
        assert run.series("gsnr", layer="two")[1].tolist() == [0.25]
        assert run.series("gsnr", head="one/head0")[1].tolist() == [9.0]
        assert run.series("gsnr")[1].tolist() == [math.inf]
        assert run.batch_sizes("gsnr", head="one/head0")[1].tolist() == [33_554_433.0]
        assert run.times("gsnr", kind="layers")[1].tolist() == [1.5e9 + 0.125]
        assert run.stage("gsnr")[1].tolist() == ["unscaled"]


def test_a_reading_with_nothing_in_it_still_counts(tmp_path):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(Reading(step=3, time=0.0))
        writer.write(Reading(step=4, time=0.0, tensors={"grad/norm": np.zeros(0)}))
    with open_run(tmp_path) as run:
        assert [reading.step for reading in run.readings()] == [3, 4]
        assert run.last_step == 4
        assert next(run.readings()).batch_size is None


def test_arrays_of_unequal_length_are_kept_apart(tmp_path):
    tensors = {"a": np.arange(2.0), "b": np.arange(3.0)}
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(Reading(step=0, time=0.0, tensors=tensors))
    with open_run(tmp_path) as run:
        (back,) = run.readings()
        assert {metric: row.tolist() for metric, row in back.tensors.items()} == {"a": [0, 1], "b": [0, 1, 2]}
        assert run.series("b", tensor="#2")[1].tolist() == [2.0]
        np.testing.assert_array_equal(run.table("a")[1], [0.0, 1.0, math.nan])


def test_meta_says_who_when_and_how_much_was_lost(tmp_path):
    writer = RunWriter(tmp_path, meta={"extra": {"seed": 1}, "note": "ü", "odd": object, "pid": "mine"})
    writer.dropped = 5
    writer.commit()
    with open_run(tmp_path) as run:
        assert run.is_live
        assert run.meta["finished_at"] is None
        writer.close()
        meta = run.meta
        assert meta["run_id"] == writer.run_id
        assert meta["extra"] == {"seed": 1}
        assert meta["note"] == "ü"
        assert isinstance(meta["pid"], int)
        assert meta["started_at"] <= meta["heartbeat"] <= meta["finished_at"]
        assert {"hostname", "version"} <= set(meta)
        assert run.dropped == 5
        assert not run.is_live
        assert "finished" in repr(run)
    assert repr(run).startswith("<Run ")


def test_a_finding_written_again_is_updated(tmp_path):
    finding = Finding(id="spike", severity="warning", title="Spike", tensors=("a", "b"), first_step=3)
    ended = Finding(
        id="spike", severity="critical", title="Spike", tensors=("a", "b", "c"), first_step=3, last_step=9,
        evidence={"seen": 1.5}, causes=("a bad batch",), fixes=("clip",),
    )  # fmt: skip
    other = Finding(id="spike", severity="warning", title="Spike", tensors=("a",), first_step=4)
    action = Action(kind="lr", step=4, finding="spike", taken=True, before={"lr": 1}, after={"lr": 0.5}, reason="why")
    with RunWriter(tmp_path, meta={}) as writer:
        for record in (finding, other, ended, action, action):
            writer.write(record)
    with open_run(tmp_path) as run:
        assert run.findings == [ended, other]
        assert run.actions == [action, action]


@pytest.mark.parametrize(
    "name", ["it's", 'a "quoted"; DROP TABLE tail; --', "слой.重み.🔥", "x" * 10_000, "", "#1", "\ud800"]
)
def test_any_name_will_do(tmp_path, make_layout, name):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(make_layout("first", name))
        writer.write(Reading(step=0, time=0.0, tensors={"grad/norm": np.array([1.0, 2.0])}))
    with open_run(tmp_path) as run:
        assert run.tensors[1].name == name
        (info,) = (info for info in run.tensors if info.name == name)
        assert run.series("grad/norm", tensor=info)[1].tolist() == [2.0]
        assert run.series("grad/norm", tensor=name)[1].tolist() == [2.0]
        with pytest.raises(UnknownNameError):
            run.series("grad/norm", tensor=name + "?")


def test_a_layout_may_grow_and_even_change(tmp_path, make_layout):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(make_layout("a", "b", layers=("l0", "l2")))
        writer.write(Reading(step=0, time=0.0, tensors={"m": np.array([1.0, 2.0])}, layers={"m": np.array([5.0, 6.0])}))
        writer.write(make_layout("a", "b", "c", layers=("l0", "l1", "l2")))
        writer.write(Reading(step=1, time=0.0, tensors={"m": np.arange(3.0)}, layers={"m": np.array([7.0, 8.0, 9.0])}))
        writer.write(make_layout("a", "b", "c", layers=("l0", "l1", "l2")))
    with open_run(tmp_path) as run:
        assert run.layers == ("l0", "l1", "l2")
        assert run.series("m", layer="l2")[1].tolist() == [6.0, 9.0]
        assert run.series("m", tensor="c")[0].tolist() == [1]
        assert run.times("m", tensor="c")[0].tolist() == [1]
        np.testing.assert_array_equal(run.matrix("m", "layers")[1], [[5, math.nan, 6], [7, 8, 9]])
        np.testing.assert_array_equal(run.matrix("m")[1], [[1, 2, math.nan], [0, 1, 2]])
        assert run.table("m", step=0)[0] == 0


def test_a_source_that_ended_long_ago_gives_way_to_one_that_is_still_read(tmp_path):
    with RunWriter(tmp_path, meta={}) as writer:
        for step in range(1000):
            if step < 100:  # then the loop no longer accumulated
                writer.write(Reading(step=step, time=0.0, source="microbatch", values={"gsnr": 1.0}))
            if step % 50 == 0:  # rare, but still there
                writer.write(Reading(step=step, time=0.0, source="ranks", values={"gsnr": 2.0}))
            writer.write(Reading(step=step, time=0.0, source="adam", values={"gsnr": 3.0}))
        writer.commit()
        writer.compact()
    with open_run(tmp_path) as run:
        assert run.sources("gsnr") == ("ranks", "adam", "microbatch")
        assert run.series("gsnr")[1].tolist() == [2.0] * 20
        assert run.series("gsnr", source="microbatch")[1].tolist() == [1.0] * 100


def test_a_source_that_a_later_process_did_again_without_has_ended(tmp_path):
    with RunWriter(tmp_path, meta={}) as writer:
        for step in range(100):
            writer.write(Reading(step=step, time=0.0, source="microbatch", values={"gsnr": 1.0}))
    with RunWriter(tmp_path, meta={}, resume=True) as writer:
        for step in range(10, 100):
            writer.write(Reading(step=step, time=0.0, source="adam", values={"gsnr": 2.0}))
    with open_run(tmp_path) as run:
        assert run.sources("gsnr") == ("adam", "microbatch")


def test_the_most_trustworthy_source_is_taken_unless_one_is_named(tmp_path):
    with RunWriter(tmp_path, meta={}) as writer:
        for number, source in enumerate(("window", "adam", "microbatch")):
            writer.write(Reading(step=0, time=0.0, source=source, values={"gsnr": float(number)}))
        writer.write(Reading(step=0, time=0.0, values={"loss": 1.0}))
    with open_run(tmp_path) as run:
        assert run.sources("gsnr") == ("microbatch", "adam", "window")
        assert run.sources("loss") == ()
        assert run.series("gsnr")[1].tolist() == [2.0]
        assert run.series("gsnr", source="adam")[1].tolist() == [1.0]
        with pytest.raises(UnknownNameError, match="microbatch, adam, window"):
            run.series("gsnr", source="ranks")


def test_unknown_names_are_answered_with_near_ones(tmp_path, make_layout, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(make_layout("embed.weight", "head.weight", "head.bias"))
        writer.write(make_reading(0))
    with open_run(tmp_path) as run:
        with pytest.raises(KeyError, match=r"did you mean 'grad/norm'"):
            run.series("grad/nrm", tensor="head.weight")
        with pytest.raises(KeyError, match="got 18 as metric; expected the name of one"):
            run.stage(18)
        with pytest.raises(RunError, match=r"did you mean 'embed.weight'"):
            run.series("grad/norm", tensor="embed.wieght")
        with pytest.raises(RunError, match="only for values"):
            run.matrix("loss")
        with pytest.raises(RunError, match="one of values"):
            run.matrix("loss", kind="tensor")
        with pytest.raises(RunError, match="more than one"):
            run.series("grad/norm", tensor="a", head="b")
        with pytest.raises(RunError, match="step 5"):
            run.table("grad/norm", step=5)
        assert run.metrics() == ("grad/norm", "loss", "weight/norm")
        assert run.metrics("values") == ("loss",)


def test_an_empty_run_can_be_read(tmp_path):
    with RunWriter(tmp_path, meta={}) as writer:
        assert writer.run_id
    with open_run(tmp_path) as run:
        assert run.last_step is None
        assert run.layout == Layout()
        assert (run.metrics(), list(run.readings()), run.findings, run.actions) == ((), [], [], [])
        assert run.names("tensors") == ()
        with pytest.raises(UnknownNameError, match="it has none"):
            run.series("loss")


def test_a_run_is_listed_from_its_first_moment_to_after_its_last(tmp_path):
    seen: list[set[str]] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            files = find_runs(tmp_path)
            for file in files:
                open_run(file.path).close()
            seen.append({file.name for file in files})

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            for number in range(20):
                with RunWriter(tmp_path / str(number), meta={}) as writer:
                    assert str(number) in {file.name for file in find_runs(tmp_path)}
                    writer.write(Reading(step=1, time=0.0))
        finally:
            done.set()
        looking.result()
    assert all(before <= after for before, after in itertools.pairwise(seen))


def test_a_writer_that_fails_after_it_made_the_tables_can_be_opened_again(tmp_path, monkeypatch):
    def fail(*_):
        raise sqlite3.OperationalError("database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(opening, "set_journal", fail)
        with pytest.raises(sqlite3.OperationalError):
            RunWriter(tmp_path / "run", meta={}, run_id="ours")
    with pytest.raises(RunError, match="there is a run"):
        RunWriter(tmp_path / "run", meta={}, run_id="another")
    with RunWriter(tmp_path / "run", meta={}, run_id="ours") as writer:
        writer.write(Reading(step=1, time=0.0))
    with open_run(tmp_path / "run") as run:
        assert (run.last_step, len(run.segments)) == (1, 1)


def test_free_run_path_counts_up(tmp_path):
    path = tmp_path / "run"
    taken = []
    for _ in range(3):
        taken.append(free_run_path(path))
        RunWriter(taken[-1], meta={}).close()
    assert [each.name for each in taken] == ["run", "run-2", "run-3"]


def test_a_run_is_not_overwritten(tmp_path):
    RunWriter(tmp_path, meta={}).close()
    with pytest.raises(RunError, match="resume"):
        RunWriter(tmp_path, meta={})


def test_records_that_cannot_be_kept_are_refused_and_leave_nothing_behind(tmp_path):
    with RunWriter(tmp_path, meta={}) as writer:
        for bad in (
            Reading(step=1 << 70, time=0.0),
            Reading(step=0, time=0.0, values={"loss": "high"}),
            Reading(step=0, time=0.0, values={"loss": np.zeros(2)}),
            Reading(step=0, time=0.0, values={"ok": 1.0}, tensors={"grad/norm": np.zeros((1 << 20) + 1)}),
            "not a record",
        ):
            with pytest.raises(ValueError, match=r".+"):
                writer.write(bad)
    with open_run(tmp_path) as run:
        assert list(run.readings()) == []


def test_numbers_beyond_float32_are_infinite(tmp_path):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(Reading(step=0, time=0.0, values={"grad/norm": 1e200}))
    with open_run(tmp_path) as run:
        assert run.series("grad/norm")[1].tolist() == [math.inf]


def test_findings_and_actions_are_counted(tmp_path):
    with RunWriter(tmp_path, meta={}) as writer:
        for step in range(3):
            writer.write(Finding(id=f"f{step}", severity="info", title="t"))
        writer.write(Action(kind="skip", step=1, finding="f0", taken=True))
    with open_run(tmp_path) as run:
        assert run.num_records() == 4


# -- reading a run while it is written -------------------------------------------------------------------------------


def test_a_cursor_sees_every_step_once(tmp_path, make_reading):
    """Follow a run with `since` across many compactions: no gap, no repeat, never half a reading."""
    started, done = threading.Event(), threading.Event()

    def work():
        with RunWriter(tmp_path, meta={}) as writer:
            for step in range(3000):
                writer.write(make_reading(step))
                if step % 20 == 0:
                    writer.commit()
                    started.set()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(30)
    seen, rows, replayed, last = [], [], [], -1
    with open_run(tmp_path) as run:
        while not done.is_set() or len(seen) < 3000:
            if "grad/norm" in run.metrics():
                steps, values = run.series("grad/norm", tensor="#2", since=last)
                seen += steps.tolist()
                np.testing.assert_array_equal(values, steps + 0.5)
                rows += run.matrix("grad/norm", since=last, until=seen[-1])[0].tolist()
                readings = [reading for reading in run.readings(since=last) if reading.step <= seen[-1]]
                assert all(reading.values and len(reading.tensors) == 2 for reading in readings)
                replayed += [reading.step for reading in readings]
                last = seen[-1]
    thread.join()
    assert seen == rows == replayed == list(range(3000))


def test_readings_can_be_taken_slowly_while_the_tail_moves(tmp_path, make_reading):
    writer = RunWriter(tmp_path, meta={})
    for step in range(400):
        writer.write(make_reading(step))
    writer.commit()
    with open_run(tmp_path) as run:
        slow = run.readings()
        first = next(slow)
        for step in range(400, 1200):
            writer.write(make_reading(step))
            if step % 50 == 0:
                writer.commit()
        writer.compact()
        assert [first.step] + [reading.step for reading in slow] == list(range(400))
        assert run.last_step == 1199
    writer.close()


def test_several_threads_may_share_a_run(tmp_path, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        for step in range(600):
            writer.write(make_reading(step))
    results = []
    with open_run(tmp_path) as run:
        threads = [
            threading.Thread(target=lambda: results.append([run.series("loss")[1].sum() for _ in range(30)]))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 4
    assert {value for row in results for value in row} == {2.0 * sum(range(600))}


def test_closing_a_run_waits_for_the_thread_that_reads_it(tmp_path, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(make_reading(0))
    run = open_run(tmp_path)
    closed = threading.Event()

    def close():
        run.close()
        closed.set()

    with run._transaction():
        thread = threading.Thread(target=close)
        thread.start()
        time.sleep(0.05)
        assert not closed.is_set()
        assert run._db.execute("SELECT count(*) FROM segment").fetchone() == (1,)
    thread.join(10)
    assert closed.is_set()
    with pytest.raises(RunError, match=r"run\.db was closed"):
        run.series("loss")
    run.close()


# -- buckets ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(), max_size=60), st.integers(1, 20))
def test_no_peak_is_lost(values, buckets):
    steps = np.arange(len(values)) * 3
    found, low, high = min_max_buckets(steps, values, buckets)
    assert len(found) == len(low) == len(high) == min(buckets, len(values))
    assert np.all(np.diff(found) > 0)
    assert set(found.tolist()) <= set(steps.tolist())
    finite = [value for value in values if not np.isnan(value)]
    if finite:
        assert np.nanmin(low) == min(finite)
        assert np.nanmax(high) == max(finite)
    else:
        assert np.isnan(low).all()


def test_a_short_series_is_left_as_it_is():
    steps, low, high = min_max_buckets([1, 2], [3.0, float("nan")], 5)
    assert steps.tolist() == [1, 2]
    np.testing.assert_array_equal(low, [3.0, np.nan])
    np.testing.assert_array_equal(high, low)


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="buckets"):
        min_max_buckets([1], [1.0], 0)
    with pytest.raises(ValueError, match="shape"):
        min_max_buckets([1, 2], [1.0], 3)


# -- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, -1, 99])
def test_other_versions_are_refused(tmp_path, make_reading, version):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(make_reading(1))
    connection = sqlite3.connect(tmp_path / "run.db")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    match = "newer gradvitals that reads version 99" if version == 99 else "format version"
    with pytest.raises(RunFormatError, match=match):
        open_run(tmp_path)
    with pytest.raises(RunFormatError, match=match):
        RunWriter(tmp_path, meta={}, resume=True)


# -- the documentation says what is true -----------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "store.md").read_text()


def test_the_recipe_without_gradvitals_reads_a_run(tmp_path, monkeypatch, make_layout, make_reading):
    monkeypatch.chdir(tmp_path)
    with RunWriter("runs/gpt", meta={}) as writer:
        writer.write(make_layout("other", "blocks.0.attn.qkv.weight", "more"))
        for step in range(340):
            writer.write(make_reading(step))
            writer.commit()
        writer._db.execute("BEGIN")
        assert writer._db.execute("SELECT count(*) FROM chunk").fetchone()[0]
        assert writer._db.execute("SELECT count(*) FROM tail").fetchone()[0]
        writer._db.execute("COMMIT")
        recipe = PAGE.split("## Reading without gradvitals")[1].split("```python")[1].split("```")[0]
        found: dict = {}
        exec(recipe, found)
        found["db"].close()
    assert found["points"] == {step: step + 0.25 for step in range(340)}


def test_the_page_names_every_table_and_the_version():
    assert all(f"`{table}`" in PAGE for table in re.findall(r"CREATE TABLE (\w+)", schema.DDL))
    assert f"{schema.APPLICATION_ID:#x}".upper()[2:] in PAGE
    assert f"format, now {schema.SCHEMA_VERSION}." in PAGE
