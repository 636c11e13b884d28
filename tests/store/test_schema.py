"""Versions: an older file is brought up to date, a newer one says what it needs."""

from __future__ import annotations

import sqlite3

import pytest

from gradvitals.errors import RunFormatError
from gradvitals.store import RunWriter, open_run, schema


@pytest.fixture
def old_run(tmp_path, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(make_reading(1))
    return tmp_path


@pytest.fixture
def next_version(monkeypatch):
    """Pretend that this gradvitals is one format further on."""

    def migration(connection):
        connection.execute("ALTER TABLE action ADD COLUMN undone INTEGER")
        connection.execute("UPDATE meta SET value = '\"migrated\"' WHERE key = 'version'")

    last = "step INTEGER NOT NULL, content TEXT NOT NULL)"
    assert last in schema.DDL
    monkeypatch.setattr(schema, "DDL", schema.DDL.replace(last, last[:-1] + ", undone INTEGER)"))
    monkeypatch.setattr(schema, "SCHEMA_VERSION", schema.SCHEMA_VERSION + 1)
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, migration])


def version_of(folder):
    connection = sqlite3.connect(folder / "run.db")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    connection.close()
    return version


def test_there_is_a_migration_from_every_version():
    assert len(schema.MIGRATIONS) == schema.SCHEMA_VERSION - 1


def test_a_reader_upgrades_a_copy_and_leaves_the_file_alone(old_run, next_version):
    before = (old_run / "run.db").read_bytes()
    with open_run(old_run) as run:
        assert run.meta["version"] == "migrated"
        assert run.last_step == 1
    assert (old_run / "run.db").read_bytes() == before


def test_a_writer_upgrades_the_file(old_run, next_version, make_reading):
    with RunWriter(old_run, meta={}, resume=True, first_step=2) as writer:
        writer.write(make_reading(2))
    assert version_of(old_run) == schema.SCHEMA_VERSION
    with open_run(old_run) as run:
        assert run.series("loss")[0].tolist() == [1, 2]


def test_a_migration_that_fails_changes_nothing(old_run, next_version, monkeypatch):
    def half_way(connection):
        connection.execute("DELETE FROM tail")
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(schema, "MIGRATIONS", [half_way])
    with pytest.raises(sqlite3.OperationalError):
        RunWriter(old_run, meta={}, resume=True)
    with pytest.raises(RunFormatError, match="up to date"):
        open_run(old_run)
    connection = sqlite3.connect(old_run / "run.db")
    assert connection.execute("SELECT count(*) FROM tail").fetchone() == (2,)
    connection.close()


@pytest.mark.parametrize("version", [0, -1, 99])
def test_other_versions_are_refused(old_run, version):
    connection = sqlite3.connect(old_run / "run.db")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    match = "newer gradvitals that reads version 99" if version == 99 else "format version"
    with pytest.raises(RunFormatError, match=match):
        open_run(old_run)
    with pytest.raises(RunFormatError, match=match):
        RunWriter(old_run, meta={}, resume=True)
