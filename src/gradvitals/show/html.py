"""HTML that is safe by the way it is put together: text is escaped unless it was made here."""

from __future__ import annotations

import html
from collections.abc import Iterable

from gradvitals.show.text import clean


class Html(str):
    """Markup made by `tag`; every other string is text."""

    __slots__ = ()


Part = str | Html | None
_VOID = frozenset({"br", "img", "meta", "link", "line", "circle", "rect", "path", "polyline", "col"})


def text(value: object) -> Html:
    r"""Any value as text: control characters shown as escapes, and nothing read as markup.

    >>> text("<b>\x1b")
    '&lt;b&gt;\\x1b'
    """
    return value if isinstance(value, Html) else Html(html.escape(clean(str(value)), quote=True))


def join(parts: Iterable[Part]) -> Html:
    """Parts one after the other; those that are None are left out."""
    return Html("".join(text(part) for part in parts if part is not None))


def tag(name: str, /, *parts: Part, **attributes: object) -> Html:
    """An element. A trailing underscore in an attribute's name is dropped, others become hyphens.

    Attributes that are None or False are left out.

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
    """A table that scrolls sideways where the window is narrow; columns from `numbers_from` on are set as numbers."""

    def cells(name: str, row: Iterable[Part]) -> Html:
        return join(tag(name, part, class_="n" if at >= numbers_from else None) for at, part in enumerate(row))

    head = tag("thead", tag("tr", cells("th", heads)))
    body = tag("tbody", *(tag("tr", cells("td", row)) for row in rows))
    return tag("div", tag("table", head, body), class_="wide")


def folded(summary: str, *parts: Part, opened: bool = False) -> Html:
    """Something to be unfolded by a click, without any script."""
    return tag("details", tag("summary", summary), *parts, open="open" if opened else None)


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
