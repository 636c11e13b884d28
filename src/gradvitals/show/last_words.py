"""What is said when training is over: how each of its models did, and where to read more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from gradvitals.show.checkup import verdict_on
from gradvitals.show.text import clean
from gradvitals.store.reader import open_run


def verdicts(runs: Mapping[Path, str]) -> Iterator[str]:
    """The lines to say about runs, which come with the names of their models."""
    for path, model in runs.items():
        with open_run(path) as run:
            line = verdict_on(run).line
        yield f"{clean(model)} ({shown(path)}): {line}" if len(runs) > 1 else line
    for path in runs:
        yield f"see: gradvitals doctor {shown(path)}"


def shown(path: Path) -> str:
    """A path as short as it can be from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
