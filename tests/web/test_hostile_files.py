"""One file that is not what a run holds, or claims more than it has: it is named in the list, and the others go on."""

from __future__ import annotations

import json
import sqlite3
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from web_runs import run_id

from benchmarks.synthetic_run import write_synthetic_run
from gradvitals.errors import RunError
from gradvitals.show.curves import Span
from gradvitals.show.heatmap import read_heatmap
from gradvitals.show.web import limits, overview
from gradvitals.show.web.heatmap import HEADER
from gradvitals.store import RunWriter, open_run
from gradvitals.store.reader import Run
from gradvitals.types import Action, Finding, Layout, Reading, TensorInfo

ClientOf = Callable[..., TestClient]
FINDING = Finding(id="x", severity="info", title="t").to_json()
ACTION = Action(kind="x", step=0, finding="x", taken=True).to_json()


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A sound run, and one that a stranger may change."""
    for name in ("good", "evil"):
        write_synthetic_run(tmp_path / name, steps=5, num_tensors=14)
    return tmp_path


def change(folder: Path, statement: str, *values: Any) -> None:
    db = sqlite3.connect(folder / "evil" / "run.db")
    db.execute(statement, values)
    db.commit()
    db.close()


def expect_only_evil_to_be_unreadable(folder: Path, client: TestClient) -> str:
    """What the list says of it."""
    lines = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert lines["good"]["state"] == "finished"
    assert lines["evil"]["state"] == "error"
    assert client.get(f"/api/runs/{lines['good']['id']}").status_code == 200
    assert client.get(f"/api/runs/{lines['evil']['id']}").status_code == 422
    watcher = client.app.state.api.watcher  # type: ignore[attr-defined]
    watcher._look_now()
    assert {state.news["last_step"] for state in watcher._states.values()} >= {4}
    return str(lines["evil"]["line"])


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("UPDATE segment SET finished_at = NULL, heartbeat = ?", "abc"),
        ("UPDATE segment SET finished_at = NULL, heartbeat = ?", b"\0"),
        ("UPDATE segment SET finished_at = NULL, heartbeat = ?", 1e300),
        ("UPDATE segment SET finished_at = ?", "soon"),
        ("UPDATE segment SET started_at = ?", "x"),
        ("INSERT INTO finding VALUES (NULL, 'k', 1, 0, ?)", json.dumps({**FINDING, "id": []})),
        ("INSERT INTO finding VALUES (NULL, 'k', 1, 0, ?)", json.dumps({**FINDING, "severity": "zzz"})),
        ("INSERT INTO finding VALUES (NULL, 'k', 1, 0, ?)", json.dumps({**FINDING, "first_step": None})),
        ("INSERT INTO finding VALUES (NULL, 'k', 1, 0, ?)", json.dumps({**FINDING, "tensors": "abc"})),
        ("INSERT INTO finding VALUES (NULL, 'k', 1, 0, ?)", json.dumps({**FINDING, "evidence": [1]})),
        ("INSERT INTO finding VALUES (NULL, 'k', 1, 0, ?)", json.dumps({**FINDING, "last_step": 2**70})),
        ("INSERT INTO action VALUES (NULL, 1, 0, ?)", json.dumps({**ACTION, "cost": "much"})),
        ("INSERT INTO action VALUES (NULL, 1, 0, ?)", json.dumps({**ACTION, "taken": "yes"})),
        ("UPDATE layout SET details = ?", json.dumps([{"index": 0, "name": 7}])),
    ],
)
def test_a_malformed_file_does_not_take_the_page_down(
    both: Path, client_of: ClientOf, statement: str, value: Any
) -> None:
    change(both, statement, value)
    client = client_of(both)
    found = client.get(f"/api/runs/{run_id(client, 'evil')}")
    assert found.status_code == 422
    assert "damaged" in found.json()["error"]
    assert client.get(f"/api/runs/{run_id(client, 'good')}").status_code == 200
    client.app.state.api.watcher._look_now()  # type: ignore[attr-defined]


def test_what_nobody_foresaw_in_one_run_is_told_of_that_run_alone(
    both: Path, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = overview.line_of_run

    def fails(place: Any, *rest: Any) -> dict[str, Any]:
        return told(place, *rest) if place.name == "good" else {"line": "\ud800"}  # which no answer can hold

    monkeypatch.setattr(overview, "line_of_run", fails)
    lines = {run["name"]: run for run in client_of(both).get("/api/runs").json()["runs"]}
    assert lines["good"]["state"] == "finished"
    assert lines["evil"]["state"] == "error"
    assert "cannot be read" in lines["evil"]["line"]


def test_files_that_take_long_to_refuse_leave_time_for_the_others(
    both: Path, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("evil2", "evil3"):
        (both / name).mkdir()
        (both / name / "run.db").write_bytes((both / "evil" / "run.db").read_bytes())
    for name in ("evil", "evil2", "evil3"):
        db = sqlite3.connect(both / name / "run.db")
        db.execute("DROP TABLE action")
        db.commit()
        db.close()
    monkeypatch.setattr("gradvitals.show.web.api.LIST_SECONDS", -1.0)  # time for one at a time
    client = client_of(both)
    listed = [{run["name"]: run["state"] for run in client.get("/api/runs").json()["runs"]} for _ in range(4)]
    assert [sum(state == "unread" for state in states.values()) for states in listed] == [3, 2, 1, 0]
    assert listed[-1] == {"good": "finished", "evil": "error", "evil2": "error", "evil3": "error"}
    watcher = client.app.state.api.watcher  # type: ignore[attr-defined]
    watcher._look_now()
    asked: list[str] = []
    taken = watcher._take_in
    monkeypatch.setattr(watcher, "_take_in", lambda place, *rest: asked.append(place.name) or taken(place, *rest))
    monkeypatch.setattr("gradvitals.show.web.stream.SLOW_SECONDS", 0.0)
    watcher._look_now()
    assert asked == ["good"]  # the others have not changed since


def test_news_of_the_others_come_beside_a_run_that_raises_anything(
    both: Path, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Run.census
    monkeypatch.setattr(Run, "census", lambda run: 1 / 0 if run.path.name == "evil" else taken(run))
    line = expect_only_evil_to_be_unreadable(both, client_of(both))
    assert "ZeroDivisionError" in line


def caused(error: BaseException, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "trouble",
    [
        caused(RunError("could not be read"), sqlite3.OperationalError("database is locked")),
        sqlite3.OperationalError("unable to open database file"),
        OSError(24, "Too many open files"),
        MemoryError(),
    ],
    ids=["locked", "sqlite", "files", "memory"],
)
def test_what_may_pass_is_tried_again_though_the_file_does_not_change(
    both: Path, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch, trouble: BaseException
) -> None:
    taken = Run.census

    def census(run: Run) -> dict[str, int]:
        if run.path.name == "evil":
            raise trouble
        return taken(run)

    client = client_of(both)
    watcher = client.app.state.api.watcher  # type: ignore[attr-defined]
    monkeypatch.setattr("gradvitals.show.web.stream.SLOW_SECONDS", 0.0)

    def seen() -> tuple[str, int | None]:
        [line] = [line for line in client.get("/api/runs").json()["runs"] if line["name"] == "evil"]
        watcher._look_now()
        return line["state"], watcher._states[line["id"]].news["last_step"]

    with monkeypatch.context() as for_now:
        for_now.setattr(Run, "census", census)
        assert seen() == ("error", None)
    assert seen() == ("finished", 4)


@pytest.mark.parametrize(
    ("limit", "statement", "value"),
    [
        ("finding_bytes", "INSERT INTO finding VALUES (NULL, 'k', 1, 0, ?)", "\0" + "x" * (10 << 20)),
        ("segment_bytes", "INSERT INTO segment VALUES (NULL, 0, 1, 1, 1, 1, ?, 1, 0)", "h" * (5 << 20)),
        ("segment_bytes", "UPDATE segment SET dropped = ?", "\0" + "9" * (5 << 20)),
        ("group_bytes", "UPDATE frame_group SET source = ? WHERE id = 1", "s" * (17 << 20)),
        ("meta_bytes", "INSERT INTO meta VALUES (?, '1')", "\0" + "k" * (5 << 20)),
        (
            "readings",
            "INSERT INTO chunk VALUES (NULL, 1, 1, 1, 1, 1, x'', x'', ?, x'')",
            bytes(60 << 20),
        ),
        (
            "readings",
            "INSERT INTO chunk VALUES (NULL, 1, 1, 1, 1, 1, x'', ?, x'', x'')",
            "text",
        ),
    ],
)
def test_nothing_that_is_fetched_is_left_out_of_the_count(
    both: Path, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch, limit: str, statement: str, value: Any
) -> None:
    monkeypatch.setattr(limits, "MAX_READINGS", 1_000_000)
    change(both, statement, value)
    line = expect_only_evil_to_be_unreadable(both, client_of(both))
    assert limit.replace("_", " ") in line
    assert "too large for the page" in line


def test_a_run_of_too_many_processes_is_refused(
    both: Path, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_SEGMENTS", 3)
    for _ in range(3):
        change(both, "INSERT INTO segment VALUES (NULL, 0, 1, 1, 1, 1, '', 1, 0)")
    assert "4 segments" in expect_only_evil_to_be_unreadable(both, client_of(both))


@pytest.mark.parametrize("kind", ["tensors", "layers", "heads", "ranks"])
def test_a_small_file_that_claims_a_million_rows_is_refused(both: Path, client_of: ClientOf, kind: str) -> None:
    change(
        both,
        "INSERT INTO frame_group SELECT NULL, id, layout, ?, 'adam', 'raw', '[\"gsnr\"]', ? FROM segment",
        kind,
        1 << 20,
    )
    assert "claims 1048576 rows" in expect_only_evil_to_be_unreadable(both, client_of(both))


def test_many_layers_with_few_tensors_take_no_room_in_a_picture(tmp_path: Path, client_of: ClientOf) -> None:
    many = 50_000
    layers = tuple(f"l{at}" for at in range(many))
    tensors = tuple(
        TensorInfo(index=at, name=f"{layers[-1 - at]}.w", shape=(2,), dtype="f", layer=layers[-1 - at], depth=0)
        for at in range(2)
    )
    heads = tuple(f"{layers[at]}.attn/head0" for at in range(many))
    with RunWriter(tmp_path / "wide", meta={}) as writer:
        writer.write(Layout(tensors=tensors, layers=layers, heads=heads))
        for step in range(400):
            writer.write(Reading(step=step, time=0.0, tensors={"grad/norm": [1.0, 2.0 + step]}))
    client = client_of(tmp_path)
    run = run_id(client, "wide")
    found = client.get(f"/api/runs/{run}/layout").json()["layers"]  # was one comparison for each layer and head
    assert [layer["heads"] for layer in (found[0], found[-1])] == [[0], [many - 1]]
    tracemalloc.start()
    try:
        body = client.get(f"/api/runs/{run}/heatmap?picture=norm").content
        _, peak = tracemalloc.get_traced_memory()
        with open_run(tmp_path / "wide") as opened:
            whole = read_heatmap(opened, "grad/norm", "layers", Span(0, 399), most_rows=160)
        _, more = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    rows, columns = HEADER.unpack_from(body)[:2]
    cells = np.frombuffer(body, "<f4", offset=HEADER.size + 8 * columns).reshape(rows, columns)
    assert cells[-2, -1] == 401.0
    assert np.isnan(cells[0]).all()
    assert whole is not None
    assert whole.values.shape == (160, 400)
    assert whole.values[-1, -1] == 401.0
    assert max(peak, more) < 140 << 20  # all steps of all layers would take 160 MB, several times over
