"""Finished trials, one line of JSON each, in a file that a cut run leaves usable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from gradvitals.errors import GradvitalsError
from gradvitals.lab.vrgd.trial import Result, Trial
from gradvitals.types import json_ready

Phase = Literal["sweep", "fresh"]
"""Whether a trial was made to choose the learning rate, or to measure at the chosen one with a seed of its own."""
Settings = Mapping[str, float | str]
"""What else the result depends on: warm-up, precision, ... Trials with other settings are other trials."""
Key = tuple[Trial, tuple[tuple[str, float | str], ...]]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished trial."""

    trial: Trial
    phase: Phase
    result: Result
    elapsed: float
    """Seconds that a worker was busy with it: data, compilation and evaluation included."""
    settings: Settings = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """What must be equal for a trial not to be run again."""
        return key_of(self.trial, self.settings)

    @property
    def score(self) -> float:
        """Nan if the trial diverged."""
        return self.result["score"]


def key_of(trial: Trial, settings: Settings) -> Key:
    """See `Record.key`."""
    return trial, tuple(sorted(settings.items()))


def read_records(path: Path) -> list[Record]:
    """All records of a file, none where it does not exist. A last line that was cut short is left out.

    Raises:
        GradvitalsError: when another line cannot be read.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break was cut
        try:
            records.append(_from_json(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise GradvitalsError(
                f"{path}, line {number}, is no finished trial ({error}); expected what `gradvitals lab vrgd` writes "
                "with --out: delete that line, or name another file"
            ) from None
    return records


def append_record(path: Path, record: Record) -> None:
    """Add one line. What is left of a line that was cut short is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(json_ready(asdict(record)), allow_nan=False) + "\n"
    with path.open("ab+") as file:
        _drop_torn_line(file)
        file.write(line.encode())


def _drop_torn_line(file: BinaryIO) -> None:
    end = file.seek(0, 2)
    if not end:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0, 2)


def _from_json(line: dict[str, Any]) -> Record:
    return Record(
        trial=Trial(**line["trial"]),
        phase=line["phase"],
        result={name: float(value) for name, value in line["result"].items()},  # 'nan' is a string in strict JSON
        elapsed=float(line["elapsed"]),
        settings=line["settings"],
    )
