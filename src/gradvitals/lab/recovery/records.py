"""Finished runs, one line of JSON each, in a file that a cut command leaves usable."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from gradvitals.errors import GradvitalsError
from gradvitals.lab.recovery.cell import Cell, Result


def read_results(path: Path) -> dict[Cell, Result]:
    """What a file holds; nothing where it does not exist. A last line that was cut short is left out.

    Raises:
        GradvitalsError: when another line cannot be read.
    """
    lines = path.read_text("utf-8").split("\n") if path.exists() else [""]
    found = {}
    for number, line in enumerate(lines[:-1], start=1):
        try:
            result = Result.from_json(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise GradvitalsError(
                f"{path}, line {number}, is no finished run ({error}); expected what `gradvitals lab recovery` writes "
                "with --out: delete that line, or name another file"
            ) from None
        found[result.cell] = result
    return found


def begin_file(path: Path, results: Iterable[Result]) -> None:
    """Write what is known already, without what is left of a line that was cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("".join(map(_line, results)), "utf-8")
    fresh.replace(path)


def append_result(path: Path, result: Result) -> None:
    """Add one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(result))


def _line(result: Result) -> str:
    return json.dumps(result.to_json(), allow_nan=False) + "\n"
