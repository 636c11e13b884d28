"""Runs commands on run files in little memory, and prints what became of each as a line of JSON. A test starts it."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

from click.testing import CliRunner
from starlette.testclient import TestClient

import gradvitals.diagnose
import gradvitals.show.doctor
import gradvitals.show.export
import gradvitals.show.run_page
import gradvitals.show.watching  # noqa: F401  what is loaded now does not count
from gradvitals.cli import main
from gradvitals.show.web.app import make_app

ROOM = 512 << 20
"""Bytes that a command may take beyond what is there before it."""

COMMANDS = {
    "report": ["report"],
    "report --html": ["report", "--html", os.devnull],
    "doctor": ["doctor"],
    "doctor --again": ["doctor", "--again"],
    "doctor --all": ["doctor", "--all"],
    "watch": ["watch", "--once"],
    "export": ["export", "--csv", os.devnull],
    "import": ["import", "--run", os.devnull],
}


def used() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def tell(run: Path, name: str, code: int, raised: BaseException | None, output: str, seconds: float) -> None:
    trouble = None if raised is None or isinstance(raised, SystemExit) else repr(raised)[:300]
    last = output.strip().splitlines()[-1:] or [""]
    print(json.dumps([run.name, name, code, trouble, last[0][:400], round(seconds, 1)]), flush=True)


def on_the_command_line(run: Path) -> None:
    for name, (command, *options) in COMMANDS.items():
        began = time.monotonic()
        done = CliRunner().invoke(main, [command, str(run), *options])
        tell(run, name, done.exit_code, done.exception, done.output, time.monotonic() - began)


def on_the_page(folder: Path, runs: list[Path]) -> None:
    app = make_app(folder)
    client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    began = time.monotonic()
    lines = {"unread"}
    while "unread" in lines:
        listed = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
        lines = {run["state"] for run in listed.values()}
    for run in runs:
        about = f"/api/runs/{listed[run.name]['id']}"
        for path in ("", "/layout", "/worst", "/heatmap?picture=norm", "/series?metric=loss"):
            found = client.get(f"{about}{path}")
            error = found.json()["error"] if found.status_code != 200 else ""
            tell(run, f"serve {path}", found.status_code, None, error, time.monotonic() - began)
            began = time.monotonic()
    app.state.api.close()
    client.close()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = sorted(path.parent for path in folder.glob("*/run.db"))
    most = used() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for each in found:
        on_the_command_line(each)
    on_the_page(folder, found)
