"""The addresses of the page's data. Everything is read-only, and runs are requested by the id they were found under."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gradvitals.errors import ConfigError, GradvitalsError, RunFormatError, RunNotFoundError, expect
from gradvitals.metrics import METRICS
from gradvitals.report.diff import diff as compare
from gradvitals.report.listing import RunFile
from gradvitals.store.blocks import KINDS
from gradvitals.store.catalog import UnknownNameError
from gradvitals.store.reader import Run
from gradvitals.types import json_ready
from gradvitals.web import views
from gradvitals.web.run_index import RunIndex, Watcher, stamp
from gradvitals.web.views import HEATMAPS, MAX_BUCKETS, MAX_COLUMNS, MAX_METRICS, HeatmapRows

LOG = logging.getLogger(__name__)
BINARY = "application/octet-stream"
JSON = "application/json"
LIST_SECONDS = 0.4
"""Time limit for the list of runs. Runs that were not read by then are only named, and the page asks again."""


class Api:
    """Answers the requests of the page."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self.watcher = Watcher(index)
        self.cache = Cache()

    def routes(self) -> list[Route]:
        """Returns all addresses below ``/api``; each of ``/runs/{run_id}`` has a parser for its parameters."""
        of_run: dict[str, Callable[[Request], Asked]] = {
            "": lambda _: ("overview", views.overview),
            "/layout": lambda _: ("layout", lambda _, run: views.layout(run)),
            "/worst": lambda _: ("worst", lambda _, run: views.worst_tensors(run)),
            "/series": series,
            "/heatmap": heatmap,
            "/diff": self.diff,
        }
        one = [Route("/runs/{run_id:str}" + path, partial(self._respond, parse)) for path, parse in of_run.items()]
        return [Route("/runs", self.runs), *one, Route("/stream", self.stream)]

    def close(self) -> None:
        """Ends all streams."""
        self.watcher.stop()

    def runs(self, request: Request) -> Response:
        """Returns every run with its verdict."""
        files = self.index.files()
        entries: dict[str, bytes] = {}
        num_read, end = 0, time.monotonic() + LIST_SECONDS
        for file in sorted(files, key=lambda file: stamp(file.path)[1:2], reverse=True):  # the newest first
            if self.cache.get(*self._key(file, "entry")) is None:
                if num_read and time.monotonic() > end:
                    entries[file.id] = _encoded(views.unread_entry(file))
                    continue
                num_read += 1
            try:
                entries[file.id] = self._of_run(file, "entry", views.list_entry)
            except Exception as error:  # a damaged file must not hide the others
                entries[file.id] = _encoded(views.error_entry(file, self.index.without_paths(str(_as_ours(error)))))
        texts = {name: metric.text for name, metric in METRICS.items()}
        about = _encoded({"folder": views.short(self.index.title), "metrics": texts})
        body = about[:-1] + b',"runs":[' + b",".join(entries[file.id] for file in files) + b"]}"
        return Response(body, media_type=JSON)

    def diff(self, request: Request) -> Asked:
        """Asks how another run differs from this one, in words."""
        other = self.index.file(request.query_params.get("with", ""))

        def make(file: RunFile, run: Run) -> Any:
            with self.index.opened(other.id) as opened:
                return views.difference(compare(run, opened, replay=False), file, other)

        return f"diff {other.id} {stamp(other.path)}", make

    async def stream(self, request: Request) -> Response:
        """Streams changes as they happen."""
        if self.watcher.is_full:
            return _json({"error": "too many pages are connected; close one"}, 503)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self.watcher.events(), media_type="text/event-stream", headers=headers)

    def _of_run(self, file: RunFile, what: str, make: Make) -> bytes:
        """Returns something about a run, made again if the run was written to since."""
        key, now = self._key(file, what)
        kept = self.cache.get(key, now)
        if kept is not None:
            return kept
        with self.index.opened(file.id) as run:
            made = make(file, run)
        body = made if isinstance(made, bytes) else _encoded(made)
        self.cache.keep(key, now, body)
        return body

    def _key(self, file: RunFile, what: str) -> tuple[tuple[str, str], tuple[Any, ...]]:
        # A live run becomes a stopped one without being written to.
        return (file.id, what), (stamp(file.path), self.watcher.is_live(file.id))

    def _respond(self, parse: Callable[[Request], Asked], request: Request) -> Response:
        try:
            what, make = parse(request)
            body = self._of_run(self.index.file(request.path_params["run_id"]), what, make)
        except (RunNotFoundError, UnknownNameError) as error:
            return self._error(error, 404)
        except ConfigError as error:
            return self._error(error, 400)
        except Exception as error:
            return self._error(_as_ours(error), 422)
        return Response(body, media_type=BINARY if what.startswith(("series", "heatmap")) else JSON)

    def _error(self, error: GradvitalsError, status: int) -> Response:
        return _json({"error": views.short(self.index.without_paths(str(error)), views.TEXT)}, status)


Make = Callable[[RunFile, Run], Any]
Asked = tuple[str, Make]
"""A parsed request: a key for the cache, and the function that makes the response."""


def series(request: Request) -> Asked:
    """Asks for one or more metrics of one row, in buckets."""
    metrics = request.query_params.getlist("metric")
    expect(1 <= len(metrics) <= MAX_METRICS, "metric", metrics, f"1 to {MAX_METRICS} names")
    buckets = _whole(request, "buckets", MAX_BUCKETS) or 0
    expect(1 <= buckets <= MAX_BUCKETS, "buckets", buckets, f"a number from 1 to {MAX_BUCKETS}")
    asked: Any = {name: _whole(request, name) for name in ("since", "until")}
    asked |= {"kind": _one_of(request, "kind", KINDS, "values"), "row": _whole(request, "row") or 0}
    asked |= {"source": request.query_params.get("source") or None, "buckets": buckets}
    return f"series {metrics} {asked}", lambda _, run: views.series_bytes(run, metrics, **asked)


def heatmap(request: Request) -> Asked:
    """Asks for one number per row and bin of steps."""
    columns = _whole(request, "columns", MAX_COLUMNS) or 0
    expect(1 <= columns <= MAX_COLUMNS, "columns", columns, f"a number from 1 to {MAX_COLUMNS}")
    asked: Any = {name: _whole(request, name) for name in ("since", "until")} | {"columns": columns}
    asked |= {"heatmap": _one_of(request, "picture", tuple(HEATMAPS), "norm")}
    asked |= {"rows": _one_of(request, "rows", get_args(HeatmapRows), "layers")}
    return f"heatmap {asked}", lambda _, run: views.heatmap_bytes(run, **asked)


class Cache:
    """The latest responses, the least recently used dropped first. Safe to use from several threads."""

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[Hashable, bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable, stamp: Hashable) -> bytes | None:
        """Returns what was kept under `key` at the same `stamp`; None if there is nothing."""
        with self._lock:
            kept, value = self._entries.get(key, (None, None))
            if value is None or kept != stamp:
                return None
            self._entries.move_to_end(key)
            return value

    def keep(self, key: Hashable, stamp: Hashable, value: bytes) -> None:
        """Keeps a response."""
        with self._lock:
            self._bytes += len(value) - len(self._entries.pop(key, (None, b""))[1])
            self._entries[key] = (stamp, value)
            while self._bytes > self._max_bytes and len(self._entries) > 1:
                self._bytes -= len(self._entries.popitem(last=False)[1][1])


def _json(content: Any, status: int = 200) -> Response:
    return Response(_encoded(content), status_code=status, media_type=JSON)


def _encoded(content: Any) -> bytes:
    return json.dumps(json_ready(content), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _as_ours(error: Exception) -> GradvitalsError:
    """Returns the error to show: an unforeseen one means a file that is not a run."""
    if isinstance(error, GradvitalsError):
        return error
    LOG.debug("a run cannot be shown", exc_info=error)
    return RunFormatError(f"This run cannot be read: its content is not that of a run ({type(error).__name__}).")


def _one_of(request: Request, name: str, known: tuple[str, ...], default: str) -> str:
    given = request.query_params.get(name, default)
    expect(given in known, name, given[:80], f"one of {', '.join(known)}")
    return given


def _whole(request: Request, name: str, default: int | None = None) -> int | None:
    """Returns a whole number from the address, limited to the steps that a run can hold."""
    given = request.query_params.get(name)
    if given is None or given == "":
        return default
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    expect(math.isfinite(number), name, given[:80], "a whole number")
    return max(-(1 << 62), min(1 << 62, math.floor(number)))
