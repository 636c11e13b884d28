"""What many tests start in place of Python does what Python does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_python

ENDS = """
import atexit, sys, threading, time
class Last:
    def __del__(self):
        print("globals go last")
last = Last()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("threads are waited for"))).start()
print("the end of", *sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["-c", ENDS, "a", "b c"], 0),
        (["-u", "-c", "import os; print(os.getcwd(), os.environ['MINE'], input())"], 0),
        (["-c", "import sys; print(sys.argv, __name__, sys.path[0]); sys.exit(3)", "x"], 3),
        (["-c", "raise SystemExit('enough')"], 1),
        (["-c", "def fail():\n    raise ValueError('no')\nfail()"], 1),
        (["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], -9),
        (["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"], -15),
        (["script.py", "--flag"], 0),
        (["-m", "package.module", "--flag"], 0),
    ],
)
def test_it_ends_and_says_what_python_does(arguments: list[str], status: int, tmp_path: Path) -> None:
    told = "import sys; print(__name__, __file__, __spec__ and __spec__.name, sys.argv, sys.path[0])"
    (tmp_path / "script.py").write_text(told)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(told)
    usual, warm = (
        subprocess.run(
            [program, *arguments],
            cwd=tmp_path,
            env={**os.environ, "MINE": "and yours"},
            input="a line\n",
            capture_output=True,
            text=True,
        )
        for program in (sys.executable, warm_python.executable())
    )
    assert usual.returncode == status
    assert (warm.returncode, warm.stdout, warm.stderr) == (usual.returncode, usual.stdout, usual.stderr)


def test_it_has_torch_when_it_begins() -> None:
    done = warm_python.run("-c", "import sys; print('torch' in sys.modules)")
    assert done.stdout == "True\n", done.stderr


def test_what_is_killed_is_gone(tmp_path: Path) -> None:
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen([warm_python.executable(), "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = Path("/proc") / process.stdout.readline().strip()
        assert started.exists()
        process.kill()
    deadline = time.monotonic() + 20
    while started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
