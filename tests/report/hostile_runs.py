"""Run files as a stranger might write them: each takes a sound run and changes one thing in it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gradvitals.lab.made_up_run import write_made_up_run
from gradvitals.types import Finding

MB = 1 << 20
FINDING = Finding(id="x", severity="info", title="t").to_json()

Change = Callable[[sqlite3.Connection], None]


def write_hostile_runs(folder: Path, names: list[str] | None = None) -> dict[str, Path]:
    """One folder for each change."""
    sound = folder / "sound"
    write_made_up_run(sound, steps=60, num_tensors=14)
    content = (sound / "run.db").read_bytes()
    made = {}
    for name in names or list(CHANGES):
        made[name] = folder / name
        made[name].mkdir()
        file = made[name] / "run.db"
        file.write_bytes(content)
        db = sqlite3.connect(file)
        db.execute("PRAGMA synchronous = OFF")
        CHANGES[name](db)
        db.commit()
        db.close()
    return made


def _finding(db: sqlite3.Connection, key: str, **changed: object) -> None:
    text = json.dumps({**FINDING, **changed})
    db.execute("INSERT INTO finding VALUES (NULL, ?, 1, 0, ?)", (key, text))


def _long_findings(db: sqlite3.Connection) -> None:
    for key in ("a", "b"):
        _finding(db, key, title=key * (20 * MB))


def _many_findings(db: sqlite3.Connection) -> None:
    text = json.dumps({key: FINDING[key] for key in ("id", "severity", "title")})
    rows = ((str(number), text) for number in range(150_000))
    db.executemany("INSERT INTO finding VALUES (NULL, ?, 1, 0, ?)", rows)


def _nested_findings(db: sqlite3.Connection) -> None:
    """Empty lists take three bytes in the file and sixty in memory."""
    text = json.dumps({**FINDING, "evidence": {"seen": 0}}).replace("0}", f"[{'[],' * (3 * MB)}[]]" + "}", 1)
    db.execute("INSERT INTO finding VALUES (NULL, 'k', 1, 0, ?)", (text,))


def _long_meta(db: sqlite3.Connection) -> None:
    for key in ("facts", "more"):
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps({"x": "m" * (20 * MB)})))


def _nested_meta(db: sqlite3.Connection) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES ('facts', ?)", ("[" + "[]," * (5 * MB // 2) + "[]]",))


def _million_tensors(db: sqlite3.Connection) -> None:
    names = json.dumps(["t"] * (1 << 20))
    detail = {"index": 0, "name": "t", "shape": [], "dtype": "f", "layer": "t", "depth": 0}
    details = "[" + ",".join([json.dumps(detail, separators=(",", ":"))] * 700_000) + "]"
    db.execute("UPDATE layout SET tensors = ?, layers = ?, heads = ?, details = ?", (names, names, names, details))


def _million_layers(db: sqlite3.Connection) -> None:
    """Few tensors, and so many layers that a table of them for every step would take gigabytes."""
    db.execute("UPDATE layout SET layers = ?", (json.dumps([f"{row:x}" for row in range(1 << 20)]),))


def _many_names(db: sqlite3.Connection) -> None:
    db.execute("UPDATE layout SET layers = ?, heads = ?", ("[" + '"",' * (6 * MB) + '""]',) * 2)


def _nested_names(db: sqlite3.Connection) -> None:
    db.execute("UPDATE layout SET layers = ?", ("[" + "[]," * (5 * MB) + "[]]",))


def _billions_of_steps(db: sqlite3.Connection) -> None:
    db.execute("UPDATE chunk SET num_frames = 1 << 40")


def _far_steps(db: sqlite3.Connection) -> None:
    """A few readings that say they are of steps far apart."""
    db.execute("UPDATE tail SET step = step * (1 << 53)")
    db.execute("UPDATE tail SET step = -(1 << 62) + 1 WHERE step = 0")
    for number, steps in db.execute("SELECT id, steps FROM chunk").fetchall():
        far = np.frombuffer(steps, "<i8") * (1 << 53)
        query = "UPDATE chunk SET steps = ?, first_step = ?, last_step = ? WHERE id = ?"
        db.execute(query, (far.tobytes(), int(far.min()), int(far.max()), number))


def _farthest_steps(db: sqlite3.Connection) -> None:
    """From the first to the last number of 64 bits: their distance has none."""
    _far_steps(db)
    db.execute("UPDATE tail SET step = (1 << 63) + 1 WHERE id = (SELECT min(id) FROM tail)")
    db.execute("UPDATE tail SET step = 9223372036854775806 WHERE id = (SELECT max(id) FROM tail)")


def _negative_steps(db: sqlite3.Connection) -> None:
    db.execute("UPDATE tail SET step = step - 1000")
    db.execute("UPDATE finding SET content = json_set(content, '$.first_step', -7, '$.last_step', -9)")


def _no_numbers(db: sqlite3.Connection) -> None:
    """NaN and both infinities, in every value, time and batch size."""
    for number, data in db.execute("SELECT id, data FROM tail").fetchall():
        values = np.frombuffer(data, "<f4").copy()
        for first, value in enumerate((np.nan, np.inf, -np.inf)):
            values[(first + number) % 3 :: 3] = value
        moment = (float("inf"), float("-inf"), None)[number % 3]
        db.execute(
            "UPDATE tail SET data = ?, time = ?, batch_size = ? WHERE id = ?",
            (values.tobytes(), moment, moment, number),
        )


def _large_block(db: sqlite3.Connection) -> None:
    db.execute("UPDATE tail SET data = zeroblob(?) WHERE id = (SELECT min(id) FROM tail)", (200 * MB,))


def _trigger(db: sqlite3.Connection) -> None:
    db.execute(
        "CREATE TRIGGER more AFTER UPDATE ON segment "
        "BEGIN INSERT INTO finding SELECT NULL, id, 1, 0, '{}' FROM tail; END"
    )


def _view(db: sqlite3.Connection) -> None:
    db.execute(
        "CREATE VIEW readings AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
    )


def _view_for_a_table(db: sqlite3.Connection) -> None:
    db.execute("DROP TABLE action")
    db.execute(
        "CREATE VIEW action AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
        "SELECT i AS id, 1 AS segment, i AS step, '{}' AS content FROM n"
    )


def _many_groups(db: sqlite3.Connection) -> None:
    db.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30000) "
        "INSERT INTO frame_group SELECT NULL, 1, 1, 'values', 's' || i, 'raw', '[\"loss\"]', 1 FROM n"
    )


def _many_segments(db: sqlite3.Connection) -> None:
    db.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30000) "
        "INSERT INTO segment SELECT NULL, i, 1, 1, 1, 1, 'h', 1, 0 FROM n"
    )


def _rows_of_an_empty_chunk(db: sqlite3.Connection) -> None:
    db.execute(
        "INSERT INTO frame_group SELECT NULL, id, layout, 'tensors', 'adam', 'raw', '[\"gsnr\"]', ? FROM segment",
        (1 << 20,),
    )


CHANGES: dict[str, Change] = {
    "long findings": _long_findings,
    "many findings": _many_findings,
    "nested findings": _nested_findings,
    "long meta": _long_meta,
    "nested meta": _nested_meta,
    "a million tensors": _million_tensors,
    "a million layers": _million_layers,
    "many names": _many_names,
    "nested names": _nested_names,
    "billions of steps": _billions_of_steps,
    "far steps": _far_steps,
    "farthest steps": _farthest_steps,
    "negative steps": _negative_steps,
    "no numbers": _no_numbers,
    "a large block": _large_block,
    "a trigger": _trigger,
    "a view": _view,
    "a view for a table": _view_for_a_table,
    "many groups": _many_groups,
    "many segments": _many_segments,
    "rows of an empty chunk": _rows_of_an_empty_chunk,
}
