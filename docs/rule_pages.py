"""The page of every rule, written when the documentation is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from gradvitals.notices import NOTICES
from gradvitals.report.catalog import OTHERS, Entry, entries, entry
from gradvitals.report.format import in_sentence


def rule_pages(pictures: Sequence[str] = ()) -> dict[str, str]:
    """Returns the page of every rule and notice, by id, and the list of all of them as ``index``.

    Args:
        pictures: Ids of rules that have a picture of a run that shows them.
    """
    own = [rule for rule in entries() if rule.family != OTHERS]
    notices = [entry(name) for name in NOTICES]
    pages = {one.id: "\n".join(_page(one, one.id in pictures)) + "\n" for one in (*own, *notices)}
    return {"index": "\n".join(_index(own, notices)) + "\n", **pages}


def _page(entry: Entry, has_picture: bool) -> Iterator[str]:
    yield f"# `{entry.id}`: {in_sentence(entry.name)}\n"
    yield f"{entry.pattern}\n"
    if has_picture:
        yield f"![A run that shows {entry.id}](../pictures/rules/{entry.id}.svg)\n"
    for title, texts in (("Likely causes", entry.causes), ("How to fix it", entry.fixes)):
        if texts:
            yield f"## {title}\n"
            yield from (f"{place}. {_escaped(text)}" for place, text in enumerate(texts, 1))
            yield ""
    yield "## How it is decided\n"
    yield f"{entry.conditions}\n"
    if entry.passed:
        yield f"If the check passes, `gradvitals doctor --all` lists: *{_escaped(entry.passed)}*.\n"
    if entry.reference:
        yield f"Reference: {_escaped(entry.reference)}\n"
    if entry.settings:
        yield "## Settings\n"
        yield f"Change one with `gv.Config(rules={{{entry.id!r}: {{{entry.settings[0].name!r}: ...}}}})`.\n"
        yield "| setting | default | |\n|---|---|---|"
        for setting in entry.settings:
            text = " ".join(setting.text.split()).replace("|", "\\|")
            yield f"| `{setting.name}` | `{setting.default!r}` | {text} |"
        yield ""
    yield f"The same in a terminal: `gradvitals doctor --explain {entry.id}`."


def _index(own: Sequence[Entry], notices: Sequence[Entry]) -> Iterator[str]:
    yield "# Every rule\n"
    yield "A page per rule: what it looks for, likely causes, fixes, how it is decided, and its settings.\n"
    families: list[tuple[str, Sequence[Entry]]] = [
        (family, list(found)) for family, found in groupby(own, key=lambda rule: rule.family)
    ]
    for family, found in [*families, ("not found by a rule", notices)]:
        yield f"## {family.capitalize()}\n"
        yield from (f"- [`{one.id}`]({one.id}.md): {_escaped(one.pattern)}" for one in found)
        yield ""
    yield "```{toctree}\n:hidden:\n"
    yield from (one.id for one in (*own, *notices))
    yield "```"


def _escaped(text: str) -> str:
    return text.replace("*", "\\*").replace("<", "\\<").replace("_", "\\_") if "`" not in text else text
