"""A report as Markdown, to paste into an issue or a chat."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gradvitals.report.format import clean, fix_snippet, number, summarize_actions
from gradvitals.report.report import Report
from gradvitals.report.state import state_of
from gradvitals.report.verdict import LABELS, RankedFinding

LIGHTS = {"healthy": "🟢", "attention": "🟡", "unhealthy": "🔴"}
LABELED = ("Likely cause", "Fix", "Evidence")
MAX_FINDINGS = 10
OUTER_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")


def render_markdown(report: Report, *, verbose: bool = False) -> str:
    """Returns a report as Markdown: verdict, cause, fix, evidence, settings; `verbose` has every finding."""
    return "\n".join(_report(report, verbose)) + "\n"


def _report(report: Report, verbose: bool) -> Iterator[str]:
    verdict, meta = report.verdict, report.run.meta
    yield f"### {LIGHTS[verdict.level]} {LABELS[verdict.level]}: `{_inline(str(report.run.path))}`\n"
    if told := verdict.headline if verdict.level == "healthy" else verdict.remarks:
        yield f"{_text(told)}\n"
    caused = verdict.consequences()
    serious = [item for item in verdict.ranked if item.weight != "info"]
    shown = [item for item in serious if item not in caused][:MAX_FINDINGS] or filter(None, [verdict.subject])
    for item in verdict.ranked if verbose else shown:
        yield from _finding(item, live=verdict.live)
    if verdict.also and not verbose:
        yield f"Also caused by this: {verdict.also}.\n"
    if report.actions:
        yield f"{_text(summarize_actions(report.actions).splitlines()[0])}.\n"
    yield f"{_text('; '.join(filter(None, (verdict.uncounted, report.checks.counted))))}.\n"
    latest = report.summary.latest
    rows = {
        "steps": f"{verdict.steps:,} ({state_of(report.run)})",
        **{metric: number(latest[metric]) for metric in ("loss", "grad/norm", "gsnr") if metric in latest},
        **{name: value for name, value in (meta.get("facts") or {}).items() if value not in (None, "", 1)},
        "parameters": f"{report.summary.num_parameters:,} in {report.summary.num_tensors:,} tensors",
        "torch": meta.get("torch", "-"),
        "gradvitals": meta.get("version", "-"),
    }
    yield "<details><summary>The run</summary>\n"
    yield "| | |\n|---|---|"
    yield from (f"| {name} | {_inline(str(value))} |" for name, value in rows.items())
    yield "\n</details>"


def _finding(item: RankedFinding, *, live: bool) -> Iterator[str]:
    finding, parts = item.finding, item.parts(live=live, limit=1)
    parts["Evidence"] = ["; ".join(filter(None, [*item.evidence, item.place]))]
    yield f"**{_text(finding.title)}** ({item.label}, `{_inline(finding.id)}`, {_text(item.when(live=live))})\n"
    yield from (f"- {label}: {_text(text)}" for label in LABELED for text in parts[label] if text)
    if snippet := fix_snippet(next(iter(parts["Fix"]), None)):
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
