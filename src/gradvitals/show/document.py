"""A page as one file: no network, styles and pictures inside, and nothing that a name in it could make run."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from gradvitals.show.html import Html, Part, tag


def document(title: str, *parts: Part, styles: tuple[str, ...] = ("page.css",), script: str | None = None) -> str:
    """The whole document around the parts of its main element.

    Args:
        title: of the window.
        parts: what the page holds.
        styles: files of this package.
        script: a file of this package to run, which the page must also be whole without.

    Returns:
        HTML that opens from a file, in light and dark, on a phone and on paper.
    """
    code = _text(script) if script else ""
    # Only what was written here may run, and nothing may be fetched, whatever a name on the page says.
    allowed = f"; script-src 'sha256-{_digest(code)}'" if code else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:{allowed}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html("".join(map(_text, styles)))),
    )
    body = tag("body", tag("main", *parts), tag("script", Html(code)) if code else None)
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _text(name: str) -> str:
    return files("gradvitals.show").joinpath(name).read_text("utf-8")


def _digest(code: str) -> str:
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
