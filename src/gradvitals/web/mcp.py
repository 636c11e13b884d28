"""Runs for a coding agent: a read-only server of the Model Context Protocol, over stdio."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from gradvitals.errors import GradvitalsError, MissingExtraError, RunNotFoundError
from gradvitals.report import catalog
from gradvitals.report.diff import diff as compare
from gradvitals.report.listing import find_runs, list_runs
from gradvitals.report.report import Report
from gradvitals.store.reader import Run, min_max_buckets, open_run
from gradvitals.types import json_ready

INSTRUCTIONS = (
    "Training runs that gradvitals recorded. Call list_runs, then verdict: it has the level (healthy, attention or "
    "unhealthy), the likely cause and the fix of the worst finding. Apply the fix, train again, and compare both runs "
    "with diff. Nothing here changes a run."
)
MAX_POINTS = 500


class Runs:
    """The tools, for the runs in one folder. A run is named as `list_runs` names it; None means the newest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _open(self, name: str | None) -> Run:
        files = find_runs(self._folder)
        if not files:
            raise RunNotFoundError(f"there are no runs in {self._folder}; record one with `gradvitals run train.py`")
        if name is None:
            return open_run(max(files, key=lambda file: file.modified).path)
        found = next((file for file in files if name in (file.name, str(self._folder / file.name))), None)
        if found is None:
            raise RunNotFoundError(f"there is no run {name!r}; runs: {', '.join(file.name for file in files)}")
        return open_run(found.path)

    def list_runs(self, limit: int = 20) -> dict[str, Any]:
        """List the recorded runs, the newest first: level, steps, last loss, age in seconds, and what is wrong."""
        files = sorted(find_runs(self._folder), key=lambda file: -file.modified)
        lines = list_runs(files[:limit], self._folder)
        return {"num_runs": len(files), "runs": [line.to_json() for line in lines]}

    def verdict(self, run: str | None = None) -> dict[str, Any]:
        """Judge a run (the newest if none is named): level, cause, fix, every finding with its evidence, checks."""
        with self._open(run) as opened:
            return Report(opened).to_json()

    def series(
        self,
        metric: str,
        run: str | None = None,
        tensor: str | None = None,
        layer: str | None = None,
        since: int | None = None,
        points: int = 100,
    ) -> dict[str, Any]:
        """Read one metric over steps, such as loss, lr, grad/norm or gsnr, of the whole run or of a tensor or layer.

        A long series is cut into at most `points` buckets, each with its first step and its lowest and highest value.
        """
        with self._open(run) as opened:
            steps, values = opened.series(metric, tensor=tensor, layer=layer, since=since)
            starts, low, high = min_max_buckets(steps, values, max(1, min(points, MAX_POINTS)))
            return {"run": str(opened.path), "metric": metric, "steps": starts, "low": low, "high": high}

    def explain(self, rule: str) -> dict[str, Any]:
        """Explain one kind of finding by its id: the pattern, likely causes, fixes, and its settings."""
        return catalog.entry(rule).to_json()

    def diff(self, a: str, b: str) -> dict[str, Any]:
        """Compare run A with run B: where they diverge for good, and the settings and findings that differ."""
        with self._open(a) as first, self._open(b) as second:
            return compare(first, second).to_json()


def build_server(folder: Path) -> Any:
    """Returns the server, an `mcp.server.MCPServer`.

    Raises:
        MissingExtraError: If the SDK is not installed.
    """
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.types import ToolAnnotations
    except ImportError as error:
        raise MissingExtraError("`gradvitals mcp` needs: pip install 'gradvitals[mcp]'") from error
    from gradvitals import __version__

    server = MCPServer("gradvitals", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    runs = Runs(folder)

    def answering(tool: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Makes the answer plain JSON values, or has the agent read what was wrong with its request."""

        @wraps(tool)
        def answer(*args: Any, **options: Any) -> dict[str, Any]:
            try:
                ready: dict[str, Any] = json_ready(tool(*args, **options))
                return ready
            except GradvitalsError as error:
                raise ToolError(str(error)) from None

        return answer

    for tool in (runs.list_runs, runs.verdict, runs.series, runs.explain, runs.diff):
        server.tool(annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))(answering(tool))
    return server
