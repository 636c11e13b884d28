"""Recovers what a worker left in its journal: when the run is next opened, or at once if training continues."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gradvitals.config import Config
from gradvitals.errors import RunError
from gradvitals.store import next_step
from gradvitals.store.opening import here, is_gone
from gradvitals.store.schema import FILE_NAME
from gradvitals.types import json_ready
from gradvitals.worker.channel import Channel, ThreadChannel
from gradvitals.worker.journal import Journal
from gradvitals.worker.record import CONTEXT, PLAIN, STEP, SUMS, Context, Decoder, decode_plain, unpack
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
    has_records = Journal.open(folder / JOURNAL).has_records
    if has_records:
        settings: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in note["config"].items()}
        settings["quiet"] = True
        setup = Setup(
            path=path,
            config=Config(**settings),
            meta=note["meta"],
            facts=note["facts"],
            run_id=note["run_id"],
        )
        successor(setup, folder / JOURNAL, ThreadChannel()).abandon()
    remove_files(path, folder)
    return has_records


def successor(setup: Setup, journal: Path, channel: Channel) -> Worker:
    """Returns a worker that continues with what a worker that is gone left unread in the journal."""
    records = list(Journal.open(journal).read())
    first = next((step for record in records if (step := _step_of(*record)) is not None), None)
    setup = replace(
        setup,
        resume=(setup.path / FILE_NAME).exists(),
        first_step=next_step(setup.path / FILE_NAME) if first is None else first,
        state={},
    )
    worker = Worker(setup, Journal.open(journal), channel)
    context = journal.parent / CONTEXT_FILE
    if context.exists() and records and records[0][0] != CONTEXT:
        worker.use_context(Context.from_bytes(context.read_bytes()))
    return worker


def _step_of(kind: int, data: bytes) -> int | None:
    """Returns the first step of a record, None for one without steps."""
    with contextlib.suppress(RunError):
        if kind == PLAIN:
            return int(decode_plain(data, {}).steps["step"][0])
        if kind == STEP:
            return Decoder().decode(data).step
        if kind == SUMS:
            return int(unpack(data)[0]["step"])
    return None
