"""HTML that is safe by construction: text is escaped unless it was made here, and a page is one self-contained file."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable
from importlib.resources import files

from gradvitals.report.format import clean


class Html(str):
    """Markup made by `tag`; every other string is text."""

    __slots__ = ()


Part = str | Html | None
_VOID = frozenset({"br", "img", "meta", "link", "line", "circle", "rect", "path", "polyline", "col"})


def text(value: object) -> Html:
    r"""Returns any value as text: control characters become escapes, and nothing is read as markup.

    >>> text("<b>\x1b")
    '&lt;b&gt;\\x1b'
    """
    return value if isinstance(value, Html) else Html(html.escape(clean(str(value)), quote=True))


def join(parts: Iterable[Part]) -> Html:
    """Returns parts one after the other, without those that are None."""
    return Html("".join(text(part) for part in parts if part is not None))


def tag(name: str, /, *parts: Part, **attributes: object) -> Html:
    """Returns an element. A trailing underscore in the name of an attribute is dropped, others become hyphens.

    Attributes that are None or False are skipped.

    >>> tag("p", "a < b", class_="note", data_x=1)
    '<p class="note" data-x="1">a &lt; b</p>'
    >>> tag("line", x1=0.5)
    '<line x1="0.5"/>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_short(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(parts)}</{name}>")


def table(heads: Iterable[Part], rows: Iterable[Iterable[Part]], *, numbers_from: int = 1) -> Html:
    """Returns a table that scrolls sideways in a narrow window; columns from `numbers_from` on are set as numbers."""

    def cells(name: str, row: Iterable[Part]) -> Html:
        return join(tag(name, part, class_="n" if at >= numbers_from else None) for at, part in enumerate(row))

    head = tag("thead", tag("tr", cells("th", heads)))
    body = tag("tbody", *(tag("tr", cells("td", row)) for row in rows))
    return tag("div", tag("table", head, body), class_="wide")


def folded(summary: str, *parts: Part, opened: bool = False) -> Html:
    """Returns something to unfold by a click, without any script."""
    return tag("details", tag("summary", summary), *parts, open="open" if opened else None)


def document(title: str, *parts: Part, styles: tuple[str, ...] = ("page.css",), script: str | None = None) -> str:
    """Returns a whole document that opens from a file, in light and dark, on a phone and on paper.

    Args:
        title: Of the window.
        parts: What its main element holds.
        styles: Files of this package.
        script: A file of this package to run; the page must be complete without it.
    """
    code = _resource(script) if script else ""
    # Only our own script may run, and nothing may be fetched, whatever a name on the page says.
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    allowed = f"; script-src 'sha256-{digest}'" if code else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:{allowed}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html("".join(map(_resource, styles)))),
    )
    body = tag("body", tag("main", *parts), tag("script", Html(code)) if code else None)
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _resource(name: str) -> str:
    return files("gradvitals.report").joinpath(name).read_text("utf-8")


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
