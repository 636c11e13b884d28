"""A run file from a stranger: every command shows it or says what is wrong with it, in bounded memory and time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `hostile_runs`
from hostile_runs import CHANGES, write_hostile_runs

from gradvitals.errors import RunError, RunFormatError
from gradvitals.store import RunWriter, open_run

SHOWN = {"far steps", "farthest steps", "negative steps", "no numbers", "a view"}
"""What is odd, and yet can be shown."""
PARTLY = {"a large block", "billions of steps", "nested findings", "nested meta"}
"""What some commands never come to."""
WORDS = {
    "long findings": "41,944,471 finding bytes, and a run has up to 33,554,432",
    "many findings": "150,002 findings, and a run has up to 100,000",
    "nested findings": "lists and mappings; expected up to 2,097,152",
    "long meta": "meta bytes, and a run has up to",
    "nested meta": "lists and mappings; expected up to 2,097,152",
    "a million tensors": "layout bytes, and a run has up to",
    "a million layers": "names 1,048,576 layers; expected up to 262,144",
    "many names": "layout bytes, and a run has up to",
    "nested names": "lists and mappings; expected up to 2,097,152",
    "billions of steps": "expected 1099511627776 numbers",
    "a large block": "more data than a run can hold",
    "a trigger": "it has a trigger 'more', which no run has",
    "a view for a table": "table 'action' is missing or is not a plain table",
    "many groups": "30,006 groups, and a run has up to 20,000",
    "many segments": "30,001 segments, and a run has up to 20,000",
    "rows of an empty chunk": "claims 1048576 rows",
}
SECONDS = 60


@pytest.mark.skipif(sys.platform != "linux", reason="bounds the memory of a process as Linux has it")
def test_no_command_fills_the_memory_or_falls_over(tmp_path: Path) -> None:
    assert set(WORDS) | SHOWN == set(CHANGES)
    write_hostile_runs(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("hostile_commands.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == (len(CHANGES) + 1) * (8 + 5)
    assert [each for each in found if each[3] is not None] == []  # no error that a user would see as a traceback
    assert [each for each in found if each[5] > SECONDS] == []
    wrong = []
    for run, command, code, _, said, _ in found:
        fine = code == 200 if command.startswith("serve") else code in (0, 1)
        if command == "import":
            expected = not fine and "Error" in said
        elif run in SHOWN or run == "sound":
            expected = fine
        elif run in PARTLY and fine:
            expected = True
        else:
            # The page has lower limits of its own, and tells them in its own words.
            told = WORDS[run] in said or (command.startswith("serve") and "too large for the page" in said)
            expected = not fine and told
        if not expected:
            wrong.append((run, command, code, said))
    assert wrong == []


def test_a_trigger_never_acts_on_a_run_that_is_resumed(tmp_path: Path) -> None:
    folder = write_hostile_runs(tmp_path, ["a trigger"])["a trigger"]
    with pytest.raises(RunFormatError, match="trigger"):
        RunWriter(folder, meta={}, resume=True)
    with pytest.raises(RunError, match="trigger"):
        open_run(folder)
