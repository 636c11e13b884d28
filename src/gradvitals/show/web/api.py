"""The addresses of the page's data. Everything can only be read, and by the id of a run that was found."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast, get_args

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gradvitals.errors import ConfigError, GradvitalsError, RunFormatError, RunNotFoundError, expect
from gradvitals.show.web import overview as words
from gradvitals.show.web.heatmap import MAX_COLUMNS, PICTURES, Picture, Rows, heatmap_bytes
from gradvitals.show.web.judging import Judge
from gradvitals.show.web.limits import TEXT, may_pass, short
from gradvitals.show.web.memo import Memo
from gradvitals.show.web.series import MAX_BUCKETS, MAX_METRICS, series_bytes
from gradvitals.show.web.shelf import Place, Shelf, stamp
from gradvitals.show.web.stream import Watcher
from gradvitals.store.catalog import UnknownNameError
from gradvitals.store.frames import KINDS, Kind
from gradvitals.store.reader import Run
from gradvitals.types import json_ready

LOG = logging.getLogger(__name__)
BINARY = "application/octet-stream"
JSON = "application/json"
Work = Callable[[Place, Run], Any]

LIST_SECONDS = 0.4
"""How long the list of runs may take; runs that were not read by then are named, and the page asks again."""


class Api:
    """Answers what the page asks."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.judge = Judge(shelf)
        self.watcher = Watcher(shelf)
        self.memo = Memo()

    def routes(self) -> list[Route]:
        """All addresses below ``/api``."""
        one = "/runs/{run_id:str}"
        return [
            Route("/runs", self.runs),
            Route(one, self.overview),
            Route(f"{one}/layout", self.layout),
            Route(f"{one}/worst", self.worst),
            Route(f"{one}/series", self.series),
            Route(f"{one}/heatmap", self.heatmap),
            Route("/stream", self.stream),
        ]

    def close(self) -> None:
        """Let go of files and threads."""
        self.watcher.stop()
        self.judge.close()
        self.shelf.close()

    def runs(self, request: Request) -> Response:
        """Every run with its verdict."""
        folder = str(self.shelf.folder)
        places = self.shelf.places()

        def work(place: Place, run: Run) -> Any:
            return words.line_of_run(place, run, self.judge.judged(place.id, run, begin=False))

        lines: dict[str, bytes] = {}
        read, end = 0, time.monotonic() + LIST_SECONDS
        for place in sorted(places, key=lambda place: stamp(place.file)[1:2], reverse=True):  # what was written last
            if not self.memo.has(*self._key(place, "line")):
                if read and time.monotonic() > end:
                    lines[place.id] = _encoded(words.line_unread(place))
                    continue
                read += 1
            told = partial(words.line_of_trouble, place, folder=folder)
            try:
                lines[place.id] = self._about(place, "line", work, told)
            except Exception as error:  # one file that is not what it should be leaves the others to be seen
                lines[place.id] = _encoded(told(_told(error)))
        about = _encoded({"folder": short(self.shelf.folder.name), "metrics": words.metric_texts()})
        body = about[:-1] + b',"runs":[' + b",".join(lines[place.id] for place in places) + b"]}"
        return Response(body, media_type=JSON)

    def overview(self, request: Request) -> Response:
        """One run in words."""

        def work(place: Place, run: Run) -> Any:
            return words.overview(place, run, self.judge.judged(place.id, run))

        return self._json_about(request, "overview", work)

    def layout(self, request: Request) -> Response:
        """What rows stand for."""
        return self._json_about(request, "layout", lambda _, run: words.layout(run))

    def worst(self, request: Request) -> Response:
        """The tensors that stand out."""
        return self._json_about(request, "worst", lambda _, run: words.standouts(run))

    def series(self, request: Request) -> Response:
        """One or more metrics of one row, in buckets."""

        def answer() -> Response:
            metrics = request.query_params.getlist("metric")
            expect(1 <= len(metrics) <= MAX_METRICS, "metric", metrics, f"1 to {MAX_METRICS} names")
            kind = _one_of(request, "kind", KINDS, "values")
            asked = {
                "row": _whole(request, "row", 0),
                "since": _whole(request, "since", None),
                "until": _whole(request, "until", None),
            }
            buckets = _whole(request, "buckets", MAX_BUCKETS) or 0
            expect(1 <= buckets <= MAX_BUCKETS, "buckets", buckets, f"a number from 1 to {MAX_BUCKETS}")
            source = request.query_params.get("source") or None

            def work(_: Place, run: Run) -> bytes:
                return series_bytes(
                    run, metrics, kind=cast(Kind, kind), source=source, buckets=buckets, **cast(Any, asked)
                )

            place = self.shelf.place(request.path_params["run_id"])
            body = self._about(place, f"series {metrics} {kind} {source} {buckets} {asked}", work)
            return Response(body, media_type=BINARY)

        return self._answered(answer)

    def heatmap(self, request: Request) -> Response:
        """One number for each row and stretch of steps."""

        def answer() -> Response:
            picture = cast(Picture, _one_of(request, "picture", tuple(PICTURES), "norm"))
            rows = cast(Rows, _one_of(request, "rows", get_args(Rows), "layers"))
            since, until = _whole(request, "since", None), _whole(request, "until", None)
            columns = _whole(request, "columns", MAX_COLUMNS) or 0
            expect(1 <= columns <= MAX_COLUMNS, "columns", columns, f"a number from 1 to {MAX_COLUMNS}")

            def work(_: Place, run: Run) -> bytes:
                return heatmap_bytes(run, picture, rows, columns=columns, since=since, until=until)

            place = self.shelf.place(request.path_params["run_id"])
            body = self._about(place, f"heatmap {picture} {rows} {columns} {since} {until}", work)
            return Response(body, media_type=BINARY)

        return self._answered(answer)

    async def stream(self, request: Request) -> Response:
        """News, as they come."""
        if self.watcher.is_full:
            return _json({"error": "too many pages listen already; close one"}, 503)
        cursor = request.headers.get("last-event-id") or request.query_params.get("cursor")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self.watcher.events(cursor), media_type="text/event-stream", headers=headers)

    def _about(
        self, place: Place, what: str, work: Work, trouble: Callable[[GradvitalsError], Any] | None = None
    ) -> bytes:
        """Something about a run as it is sent, made again where the run was written to since, or is being judged.

        What is wrong with a file is kept as well where `trouble` puts it into words, or files that take long to refuse
        would leave no time for the others.
        """

        def make() -> bytes:
            try:
                with self.shelf.opened(place.id) as run:
                    made = work(place, run)
                return made if isinstance(made, bytes) else _encoded(made)
            except Exception as error:
                if trouble is None or may_pass(error):
                    raise
                return _encoded(trouble(_told(error)))

        return self.memo.get(*self._key(place, what), make)

    def _key(self, place: Place, what: str) -> tuple[tuple[str, str], tuple[Any, ...]]:
        # A live run becomes a stopped one without being written to.
        lives = self.watcher.is_live(place.id)
        return (place.id, what), (stamp(place.file), lives, self.judge.version(place.id))

    def _json_about(self, request: Request, what: str, work: Work) -> Response:
        def answer() -> Response:
            place = self.shelf.place(request.path_params["run_id"])
            return Response(self._about(place, what, work), media_type=JSON)

        return self._answered(answer)

    def _answered(self, answer: Callable[[], Response]) -> Response:
        try:
            return answer()
        except (RunNotFoundError, UnknownNameError) as error:
            return self._trouble(error, 404)
        except ConfigError as error:
            return self._trouble(error, 400)
        except Exception as error:
            return self._trouble(_told(error), 422)

    def _trouble(self, error: GradvitalsError, status: int) -> Response:
        text = str(error).replace(f"{self.shelf.folder}/", "").replace(str(self.shelf.folder), "the served folder")
        return _json({"error": short(text, TEXT)}, status)


def _json(content: Any, status: int = 200) -> Response:
    return Response(_encoded(content), status_code=status, media_type=JSON)


def _encoded(content: Any) -> bytes:
    return json.dumps(json_ready(content), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _told(error: Exception) -> GradvitalsError:
    """The error as it is shown: one that nobody foresaw means a file that is not what a run holds."""
    if isinstance(error, GradvitalsError):
        return error
    LOG.debug("a run cannot be shown", exc_info=error)
    return RunFormatError(f"This run cannot be read: its content is not that of a run ({type(error).__name__}).")


def _one_of(request: Request, name: str, known: tuple[str, ...], usual: str) -> str:
    given = request.query_params.get(name, usual)
    expect(given in known, name, given[:80], f"one of {', '.join(known)}")
    return given


def _whole(request: Request, name: str, usual: int | None) -> int | None:
    """A whole number from the address; a step beyond what a run can hold is as good as the last."""
    given = request.query_params.get(name)
    if given is None or given == "":
        return usual
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    expect(math.isfinite(number), name, given[:80], "a whole number")
    return max(-(1 << 62), min(1 << 62, math.floor(number)))
