"""What kind of file or folder a source is."""

from __future__ import annotations

import os
from pathlib import Path

from gradvitals.importing.event_files import event_source
from gradvitals.importing.source import MAX_BYTES, ImportSourceError, Source
from gradvitals.importing.tables import csv_source, json_source, jsonl_source
from gradvitals.importing.wandb_files import MAGIC, wandb_source

EXPECTED = (
    "TensorBoard event files or their folder, a W&B run folder or .wandb file, a .csv, .tsv, .jsonl or .json, "
    "or a folder with a trainer_state.json"
)
MAX_ENTRIES = 20_000
"""Files and folders that are looked at in a source."""


def find_source(path: Path) -> Source:
    """The source at a path.

    Raises:
        ImportSourceError: If there is none, more than one, or one that is too large.
    """
    if not path.exists():
        raise ImportSourceError(f"there is nothing at {path}; expected {EXPECTED}")
    files = _files(path) if path.is_dir() else [path]
    events = [file for file in files if "tfevents" in file.name]
    if events:
        return event_source(path, _checked(_one_run(path, events)))
    wandb = [file for file in files if file.suffix == ".wandb"]
    if wandb:
        return wandb_source(_checked([_only(path, wandb)])[0])
    states = [file for file in files if file.name == "trainer_state.json"]
    if states:  # the newest checkpoint has the whole history
        return json_source(max(states, key=lambda file: (file.parent == path, file.stat().st_mtime)))
    tables = [file for file in files if file.suffix.lower() in (".csv", ".tsv", ".jsonl", ".ndjson", ".json")]
    return _table(_checked([_only(path, tables if path.is_dir() else files)])[0])


def _table(file: Path) -> Source:
    with file.open("rb") as opened:
        head = opened.read(4096)
    if head.startswith(MAGIC):
        return wandb_source(file)
    suffix = file.suffix.lower()
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if suffix == ".json" and not _looks_like_lines(head):
        return json_source(file)
    if suffix in (".jsonl", ".ndjson", ".json") or first == b"{":
        return jsonl_source(file)
    if b"\0" in head or (suffix not in (".csv", ".tsv", ".txt") and b"," not in head and b"\t" not in head):
        raise ImportSourceError(f"{file} is of no known kind; expected {EXPECTED}")
    return csv_source(file)


def _looks_like_lines(head: bytes) -> bool:
    """Whether a .json has an object on its first line and another on its second."""
    lines = head.split(b"\n")
    return len(lines) > 2 and lines[0].rstrip().endswith(b"}") and lines[1].lstrip().startswith(b"{")


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders.sort()
        found += [Path(parent) / name for name in sorted(names)]
        if len(found) > MAX_ENTRIES:
            raise ImportSourceError(f"{folder} holds over {MAX_ENTRIES:,} files; name the folder of one run")
    return found


def _one_run(path: Path, events: list[Path]) -> list[Path]:
    """The event files of one folder: those of several folders are several runs."""
    folders = sorted({file.parent for file in events})
    if path in folders:
        return [file for file in events if file.parent == path]
    if len(folders) > 1:
        names = ", ".join(str(folder) for folder in folders[:10])
        raise ImportSourceError(f"{path} holds {len(folders)} runs; name one of them: {names}")
    return events


def _only(path: Path, files: list[Path]) -> Path:
    if not files:
        raise ImportSourceError(f"{path} holds nothing that can be imported; expected {EXPECTED}")
    if len(files) > 1:
        names = ", ".join(str(file) for file in files[:10])
        raise ImportSourceError(f"{path} holds {len(files)} files that could be meant; name one of them: {names}")
    return files[0]


def _checked(files: list[Path]) -> list[Path]:
    size = sum(file.stat().st_size for file in files)
    if size > MAX_BYTES:
        raise ImportSourceError(f"{files[0]} has {size / 2**30:.1f} GB; expected {MAX_BYTES >> 30} GB or less")
    return files
