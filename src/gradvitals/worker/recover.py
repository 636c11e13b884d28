"""Recovers a run whose training process and worker were both killed: writes what is left in its journal."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradvitals.config import Config
from gradvitals.errors import RunError
from gradvitals.store.process import here, is_gone
from gradvitals.types import json_ready
from gradvitals.worker.channel import ThreadChannel
from gradvitals.worker.journal import Journal
from gradvitals.worker.record import CONTEXT, STEP, SUMS, Context, Decoder, unpack
from gradvitals.worker.worker import Setup, Worker

JOURNAL, REPLIES, NOTE, CONTEXT_FILE = "journal", "replies", "journal.json", "journal.context"
"""Files in a run's folder while it is being written."""


def leave_note(setup: Setup, folder: Path, worker: int) -> None:
    """Write what `recover` needs beside the journal."""
    note = {
        "config": json_ready(asdict(setup.config)),
        "meta": setup.meta,
        "facts": setup.facts,
        "run_id": setup.run_id,
        "folder": str(folder),
        "process": {"pid": os.getpid(), **here()},
        "worker": {"pid": worker, **here()},
    }
    (setup.path / NOTE).write_text(json.dumps(note))


def leave_context(context: bytes, folder: Path) -> None:
    """Write the newest context beside the journal, whose reader may have consumed it already."""
    part = folder / f"{CONTEXT_FILE}.part"
    part.write_bytes(context)
    part.replace(folder / CONTEXT_FILE)


def remove_files(path: Path, folder: Path) -> None:
    """Remove the journal and the files beside it."""
    for name in (JOURNAL, REPLIES, CONTEXT_FILE, f"{CONTEXT_FILE}.part"):
        (folder / name).unlink(missing_ok=True)
    for message in folder.glob("message-*"):
        message.unlink(missing_ok=True)
    (path / NOTE).unlink(missing_ok=True)
    if folder != path:
        with contextlib.suppress(OSError):
            folder.rmdir()


def recover(path: Path) -> bool:
    """Write the steps left in the journal of a run whose processes are gone; returns whether there were any.

    Raises:
        RunError: If gradvitals did not write these files.
    """
    note_path = path / NOTE
    try:
        note: dict[str, Any] = json.loads(note_path.read_text())
        folder, processes = Path(note["folder"]), (note["process"], note["worker"])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{note_path} is damaged ({error}); delete it to open the run without its last steps") from error
    if not all(map(is_gone, processes)):
        return False
    if not (folder / JOURNAL).exists():
        remove_files(path, folder)
        return False
    records = list(Journal.open(folder / JOURNAL).read())
    if records:
        settings: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in note["config"].items()}
        settings["quiet"] = True
        setup = Setup(
            path=path,
            config=Config(**settings),
            meta=note["meta"],
            facts=note["facts"],
            run_id=note["run_id"],
            resume=(path / "run.db").exists(),
            first_step=_first_step(records),
        )
        worker = Worker(setup, Journal.open(folder / JOURNAL), ThreadChannel())
        if (folder / CONTEXT_FILE).exists() and not any(kind == CONTEXT for kind, _ in records[:1]):
            worker.use_context(Context.from_bytes((folder / CONTEXT_FILE).read_bytes()))
        worker.abandon()
    remove_files(path, folder)
    return bool(records)


def _first_step(records: list[tuple[int, bytes]]) -> int:
    for kind, data in records:
        if kind == STEP:
            return Decoder().decode(data).step
        if kind == SUMS:
            return int(unpack(data)[0]["step"])
    return 0
