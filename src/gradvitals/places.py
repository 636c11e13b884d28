"""The folders in which runs are kept and searched by default, and how paths are shown."""

from __future__ import annotations

from pathlib import Path

RUNS_FOLDER = "gradvitals_runs"
"""Below the working directory. Other tools, such as TensorBoard, keep theirs in `runs`."""


def run_folders() -> list[Path]:
    """Returns both folders that may hold runs, `gradvitals_runs` and `runs`; one that does not exist yet comes last."""
    return sorted((Path(RUNS_FOLDER), Path("runs")), key=lambda path: not path.exists())


def searched_folders() -> list[Path]:
    """Returns where the newest run is looked for: `gradvitals_runs`, and `runs` if a loop keeps its runs there."""
    return [path for path in run_folders() if path.exists()] or [Path(RUNS_FOLDER)]


def default_folder() -> Path:
    """Returns the folder that commands look in: `gradvitals_runs`, or `runs` if only that is there."""
    ours, common = Path(RUNS_FOLDER), Path("runs")
    return common if common.exists() and not ours.exists() else ours


def relative(path: Path) -> str:
    """Returns a path as seen from the working directory, if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
