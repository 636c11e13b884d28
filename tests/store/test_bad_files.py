"""What is not a run, or not a sound one, is answered with an error that says so; nothing a stranger sends runs."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from contextlib import suppress

import numpy as np
import pytest

from gradvitals.errors import RunError, RunFormatError, RunNotFoundError
from gradvitals.store import RunWriter, open_run
from gradvitals.types import Action, Finding, Layout, TensorInfo


@pytest.fixture
def run_db(tmp_path, make_layout, make_reading):
    """A finished run with blocks, a tail, a finding and an action."""
    folder = tmp_path / "run"
    with RunWriter(folder, meta={}) as writer:
        writer.write(make_layout("a", "b", "c"))
        for step in range(400):
            writer.write(make_reading(step))
        writer.commit()
        writer.compact()
        for step in range(400, 410):
            writer.write(make_reading(step))
        writer.write(Finding(id="x", severity="info", title="x"))
        writer.write(Action(kind="x", step=0, finding="x", taken=False))
    return folder / "run.db"


def change(file, sql, *values):
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute(sql, values)
    connection.close()


def read_everything(file):
    with open_run(file) as run:
        repr(run)
        parts = [run.meta, run.layout, run.last_step, run.findings, run.actions, list(run.readings())]
        parts += [
            run.series("loss"),
            run.series("grad/norm", tensor="b"),
            run.matrix("grad/norm"),
            run.table("grad/norm"),
        ]
        return [*parts, run.batch_sizes("loss"), run.stage("loss"), run.metrics(), run.sources("loss")]


def test_nothing_there(tmp_path):
    with pytest.raises(RunNotFoundError, match="no such folder"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(RunNotFoundError, match=r"no run\.db"):
        open_run(tmp_path)


def test_a_folder_of_runs_names_them(tmp_path):
    for number in range(10):
        RunWriter(tmp_path / f"run{number}", meta={}).close()
    with pytest.raises(RunNotFoundError, match=r"run0, run1, .* and 2 more"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"step,loss\n1,2\n", "not a SQLite file"),
        (b"x" * 100_000, "not a SQLite file"),
        (b"SQLite format 3\x00", "not a"),
        (bytes(4096), "not a"),
    ],
)
def test_not_a_database(tmp_path, content, message):
    file = tmp_path / "run.db"
    file.write_bytes(content)
    for path in (tmp_path, file):
        with pytest.raises(RunFormatError, match=message):
            open_run(path)


def test_a_foreign_database(tmp_path):
    file = tmp_path / "photos.db"
    change(file, "CREATE TABLE photo (id)")
    with pytest.raises(RunFormatError, match="not a gradvitals run"):
        open_run(file)


def test_the_writer_leaves_foreign_files_alone(tmp_path):
    file = tmp_path / "run.db"
    change(file, "CREATE TABLE photo (id)")
    before = file.read_bytes()
    with pytest.raises(RunFormatError, match="not a gradvitals run"):
        RunWriter(tmp_path, meta={}, resume=True)
    assert file.read_bytes() == before


def test_a_file_that_was_cut_short(run_db):
    content = run_db.read_bytes()
    for size in (50, 100, 1000, 4096, 8192, len(content) // 2, len(content) - 4096):
        run_db.write_bytes(content[:size])
        with pytest.raises(RunFormatError):
            read_everything(run_db)


def test_random_damage_never_gives_another_error(run_db):
    rng = np.random.default_rng(0)
    content = run_db.read_bytes()
    for _ in range(40):
        damaged = bytearray(content)
        start = int(rng.integers(0, len(content) - 600))
        damaged[start : start + 600] = rng.bytes(600)
        run_db.write_bytes(damaged)
        with suppress(RunError):
            read_everything(run_db)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE chunk SET num_frames = 1000000000000",
        "UPDATE chunk SET num_frames = -3",
        "UPDATE chunk SET num_frames = 'many'",
        "UPDATE chunk SET num_frames = 100, steps = zeroblob(800), readings = zeroblob(800)",
        "UPDATE chunk SET steps = zeroblob(8)",
        "UPDATE chunk SET readings = 'text'",
        "UPDATE frame_group SET num_rows = 1000000",
        "UPDATE frame_group SET num_rows = 99999999999",
        "UPDATE frame_group SET num_rows = -1",
        'UPDATE frame_group SET columns = \'["loss", "grad/norm", "x"]\'',
        "UPDATE frame_group SET columns = '{'",
        "UPDATE frame_group SET columns = '[1]'",
        "UPDATE frame_group SET segment = 77",
        "UPDATE layout SET details = '[{}]'",
        "UPDATE layout SET tensors = '7'",
        "UPDATE block SET data = x'00'",
        "UPDATE block SET data = 'text'",
        "DELETE FROM block",
        "DELETE FROM segment",
        "UPDATE tail SET data = x'00'",
        "UPDATE tail SET step = 'soon'",
        "UPDATE meta SET value = 'nan!'",
        "UPDATE segment SET dropped = 'all'",
        "UPDATE finding SET content = '[]'",
        "UPDATE finding SET content = '{}'",
        "UPDATE action SET content = 'text'",
    ],
)
def test_content_that_does_not_fit_is_refused(run_db, sql):
    change(run_db, sql)
    with pytest.raises(RunFormatError):
        read_everything(run_db)


def test_deeply_nested_json_is_refused(run_db):
    change(run_db, "UPDATE layout SET tensors = ?", "[" * 100_000)
    with pytest.raises(RunFormatError):
        read_everything(run_db)


def test_a_huge_value_is_not_loaded(run_db):
    change(run_db, "UPDATE layout SET tensors = zeroblob(?)", 70 << 20)
    with pytest.raises(RunFormatError, match="more data"):
        read_everything(run_db)


def test_a_matrix_larger_than_memory_is_refused(tmp_path, monkeypatch, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        for step in range(100):
            writer.write(make_reading(step))
    monkeypatch.setattr("gradvitals.store.reader.MAX_MATRIX", 200)
    with open_run(tmp_path) as run:
        with pytest.raises(RunError, match="since and until"):
            run.matrix("grad/norm")
        assert run.matrix("grad/norm", since=50)[1].shape == (49, 3)


def test_unknown_fields_of_a_finding_are_left_out(run_db):
    content = Finding(id="x", severity="info", title="x").to_json() | {"confidence": 1}
    change(run_db, "UPDATE finding SET content = ?", json.dumps(content))
    with open_run(run_db) as run:
        assert run.findings[0].id == "x"


def mount(*arguments):
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False).returncode == 0


@pytest.fixture
def read_only_copy(tmp_path):
    """Make a folder readable only, in a way that binds root too."""
    mounted = []

    def make(folder):
        if not mount("--bind", folder, folder):
            pytest.skip("needs the right to mount")
        mounted.append(folder)
        if not mount("-o", "remount,ro,bind", folder):
            pytest.skip("needs the right to remount")
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


def test_a_finished_run_in_a_read_only_folder(run_db, read_only_copy):
    before = sorted(os.listdir(run_db.parent))  # noqa: PTH208
    assert before == ["run.db"]
    read_only_copy(run_db.parent)
    assert read_everything(run_db)[2] == 409
    assert sorted(os.listdir(run_db.parent)) == before  # noqa: PTH208


def test_a_killed_run_in_a_read_only_folder(tmp_path, make_reading, read_only_copy):
    folder = tmp_path / "killed"
    source = tmp_path / "source"
    writer = RunWriter(source, meta={})
    writer.write(make_reading(0))
    writer.commit()
    writer._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    writer.write(make_reading(1))
    writer.commit()
    folder.mkdir()
    for name in ("run.db", "run.db-wal"):
        (folder / name).write_bytes((source / name).read_bytes())
    writer.close()
    read_only_copy(folder)
    with pytest.warns(UserWarning, match="last moments"):
        run = open_run(folder)
    assert run.last_step == 0
    run.close()


def test_reading_a_finished_run_leaves_no_files(run_db):
    read_everything(run_db)
    assert [file.name for file in run_db.parent.iterdir()] == ["run.db"]


def test_paths_with_odd_characters(tmp_path):
    folder = tmp_path / "50% done? #1 & 'all' ü"
    with RunWriter(folder, meta={}) as writer:
        info = TensorInfo(index=0, name="a", shape=(), dtype="float32", layer="", depth=0)
        writer.write(Layout(tensors=(info,)))
    with open_run(folder) as run:
        assert run.tensors == (info,)
        assert run.path == folder
