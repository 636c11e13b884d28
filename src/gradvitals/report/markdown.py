"""A report as Markdown, to paste into an issue or a chat."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gradvitals.report.catalog import name_of
from gradvitals.report.describe import evidence, summarize_actions, where
from gradvitals.report.format import clean, fix_snippet, number
from gradvitals.report.report import Report
from gradvitals.report.verdict import LABELS, RankedFinding, in_sentence, state_of

LIGHTS = {"healthy": "🟢", "attention": "🟡", "unhealthy": "🔴"}
MAX_FINDINGS = 10
OUTER_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")


def render_markdown(report: Report, *, verbose: bool = False) -> str:
    """Returns a report as Markdown: verdict, cause, fix, evidence, settings; `verbose` has every finding."""
    return "\n".join(_report(report, verbose)) + "\n"


def _report(report: Report, verbose: bool) -> Iterator[str]:
    verdict, meta = report.verdict, report.run.meta
    yield f"### {LIGHTS[verdict.level]} {LABELS[verdict.level]}: `{_inline(str(report.run.path))}`\n"
    yield f"{_text(verdict.counts if verdict.level != 'healthy' else verdict.headline)}\n"
    caused = verdict.consequences()
    serious = [item for item in verdict.ranked if item.weight != "info"]
    for item in verdict.ranked if verbose else [item for item in serious if item not in caused][:MAX_FINDINGS]:
        yield from _finding(item, live=verdict.live)
    names = dict.fromkeys(in_sentence(name_of(item.finding.id)) for item in caused)
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
        ("Evidence", "; ".join([*evidence(finding.evidence, finding.id), *place])),
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
    for character in "\\`*[]<>#|":
        cleaned = cleaned.replace(character, "\\" + character)
    return OUTER_UNDERSCORE.sub(r"\\_", cleaned)  # one within a word, as in zero_grad, is no markup


def _inline(text: str) -> str:
    return clean(text).replace("`", "'").replace("|", "/")
