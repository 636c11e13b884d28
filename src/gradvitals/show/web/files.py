"""The files of the page, held in memory: a few hundred kilobytes, answered without touching the disk or a thread."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class File:
    """One file, as it is and packed."""

    content: bytes
    packed: bytes
    type: str
    tag: str


class Files:
    """Answers requests for the files of a folder, as they were when the server started."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): _load(path) for path in sorted(folder.rglob("*")) if path.is_file()
        }

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return self._answer(request, "index.html")

    async def file(self, request: Request) -> Response:
        """A file by its name, which is looked up and never becomes a path."""
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            return PlainTextResponse("There is no such file.\n", status_code=404)
        headers = {"etag": file.tag, "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.packed, headers={**headers, "content-encoding": "gzip"}, media_type=file.type)
        return Response(file.content, headers=headers, media_type=file.type)


def _load(path: Path) -> File:
    content = path.read_bytes()
    kind = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "text/plain"
    tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    return File(content, gzip.compress(content, 9, mtime=0), kind, tag)
