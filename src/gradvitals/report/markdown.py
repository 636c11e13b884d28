"""Markdown: a verdict to paste into an issue or a chat, and the page per rule of the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from gradvitals.report.catalog import NOTICES, OTHERS, Entry, entries, name_of
from gradvitals.report.describe import evidence, summarize_actions, where
from gradvitals.report.format import clean, fix_snippet, number
from gradvitals.report.report import Report
from gradvitals.report.verdict import LABELS, RankedFinding, in_sentence, state_of

LIGHTS = {"healthy": "🟢", "attention": "🟡", "unhealthy": "🔴"}
MAX_FINDINGS = 10


def render_markdown(report: Report, *, verbose: bool = False) -> str:
    """Returns a report as Markdown: verdict, cause, fix, evidence, settings; `verbose` has every finding."""
    return "\n".join(_report(report, verbose)) + "\n"


def _report(report: Report, verbose: bool) -> Iterator[str]:
    verdict, meta = report.verdict, report.run.meta
    yield f"### {LIGHTS[verdict.level]} {LABELS[verdict.level]}: `{_inline(str(report.run.path))}`\n"
    yield f"{_text(verdict.headline)}\n"
    caused = verdict.consequences()
    serious = [item for item in verdict.ranked if item.weight != "info"]
    for item in verdict.ranked if verbose else [item for item in serious if item not in caused][:MAX_FINDINGS]:
        yield from _finding(item, live=verdict.live)
    names = dict.fromkeys(in_sentence(name_of(item.finding.id)) for item in caused if item in serious)
    if names and not verbose:
        yield f"Also caused by this: {', '.join(names)}.\n"
    if report.actions:
        yield f"{_text(summarize_actions(report.actions).splitlines()[0])}.\n"
    yield f"{report.checks.counted}.\n"
    facts: dict[str, Any] = meta.get("facts") or {}
    latest = {trend.metric: trend.latest for trend in report.summary.trends}
    rows = [
        ("steps", f"{verdict.steps:,} ({state_of(report.run)})"),
        *((metric, number(latest[metric])) for metric in ("loss", "grad/norm", "gsnr") if metric in latest),
        *((str(name), _inline(str(value))) for name, value in facts.items() if value not in (None, "", 1)),
        ("parameters", f"{report.summary.num_parameters:,} in {report.summary.num_tensors:,} tensors"),
        ("torch", _inline(str(meta.get("torch", "-")))),
        ("gradvitals", _inline(str(meta.get("version", "-")))),
    ]
    yield "<details><summary>The run</summary>\n"
    yield "| | |\n|---|---|"
    yield from (f"| {name} | {value} |" for name, value in rows)
    yield "\n</details>"


def _finding(item: RankedFinding, *, live: bool) -> Iterator[str]:
    finding = item.finding
    state = finding.severity if item.is_open else f"{finding.severity}, resolved"
    yield f"**{_text(finding.title)}** ({state}, `{_inline(finding.id)}`, {_text(item.when(live=live))})\n"
    place = [f"in {where(finding)}"] if finding.tensors and not finding.says_where else []
    for label, text in (
        ("Likely cause", finding.causes[0] if finding.causes else ""),
        ("Fix", finding.fixes[0] if finding.fixes else ""),
        ("Evidence", "; ".join([*evidence(finding.evidence), *place])),
    ):
        if text:
            yield f"- {label}: {_text(text)}"
    snippet = fix_snippet(finding.fixes[0]) if finding.fixes else ""
    if snippet:
        yield f"\n```python\n{snippet}\n```"
    yield ""


def _text(text: str) -> str:
    """Returns text that comes from outside as Markdown shows it, character by character."""
    cleaned = clean(text)
    for character in "\\`*_[]<>#|":
        cleaned = cleaned.replace(character, "\\" + character)
    return cleaned


def _inline(text: str) -> str:
    return clean(text).replace("`", "'").replace("|", "/")


# -- the documentation -----------------------------------------------------------------------------------------------


def rule_pages(pictures: Sequence[str] = ()) -> dict[str, str]:
    """Returns the page of every rule and notice, by id, and the list of all of them as ``index``.

    Args:
        pictures: Ids of rules that have a picture of a run that shows them.
    """
    own = [entry for entry in entries() if entry.family != OTHERS]
    pages = {entry.id: "\n".join(_page(entry, entry.id in pictures)) + "\n" for entry in (*own, *NOTICES.values())}
    return {"index": "\n".join(_index(own)) + "\n", **pages}


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


def _index(own: Sequence[Entry]) -> Iterator[str]:
    yield "# Every rule\n"
    yield "A page per rule: what it looks for, likely causes, fixes, how it is decided, and its settings.\n"
    families: list[tuple[str, Sequence[Any]]] = [
        (family, list(found)) for family, found in groupby(own, key=lambda entry: entry.family)
    ]
    for family, found in [*families, ("not found by a rule", list(NOTICES.values()))]:
        yield f"## {family.capitalize()}\n"
        yield from (f"- [`{entry.id}`]({entry.id}.md): {_escaped(entry.pattern)}" for entry in found)
        yield ""
    yield "```{toctree}\n:hidden:\n"
    yield from (entry.id for entry in (*own, *NOTICES.values()))
    yield "```"


def _escaped(text: str) -> str:
    return text.replace("*", "\\*").replace("<", "\\<").replace("_", "\\_") if "`" not in text else text
