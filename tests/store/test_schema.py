"""Versions: a file of another format says what it needs."""

from __future__ import annotations

import sqlite3

import pytest

from gradvitals.errors import RunFormatError
from gradvitals.store import RunWriter, open_run


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
