"""`benchmarks.endings`: one run of some endings, and the table."""

from __future__ import annotations

import json

from click.testing import CliRunner

from benchmarks.endings import Ending, command, format_table, summarize


def test_runs_that_end_badly_keep_every_step() -> None:
    args = ["--how", "killed with its worker", "--how", "raises", "--others", "1", "--json"]
    found = CliRunner().invoke(command, args)
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)
    assert [row["how"] for row in rows] == ["killed with its worker", "raises"]
    for row in rows:
        assert row["steps"] > 0
        assert (row["whole"], row["missing"], row["workers_left"], row["files_left"]) == (1, 0, 0, 0)


def test_the_table_adds_up_what_was_lost() -> None:
    good = Ending("raises", opened=True, made=500, missing=0, worker_gone=True, files=[], seconds=1.0)
    bad = Ending("raises", opened=False, made=700, missing=700, worker_gone=False, files=["journal"], seconds=2.5)
    row = format_table(summarize([good, bad])).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "raises", "2", "1", "1,200", "700", "1", "1", "2.5 s",
    ]  # fmt: skip
