"""What was found and done, for the page of a run: verdict, findings in words, actions, what is fine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradvitals.show.actions import summarise
from gradvitals.show.checkup import Checkup
from gradvitals.show.findings import TITLE, evidence, where
from gradvitals.show.html import Html, Part, folded, join, table, tag
from gradvitals.show.text import cut
from gradvitals.show.timeline import Mark
from gradvitals.show.verdict import SAID, Verdict, Weighed, is_ordinary, when
from gradvitals.types import Action

IN_FULL = 40
"""Findings that are shown with everything; of further ones there is a line each."""
IN_A_LINE = 200
ACTIONS = 100
LEVEL_CLASS = {"healthy": "fine", "watch": "warning", "unhealthy": "critical"}
LABELS = {"critical": "Critical", "warning": "Warning", "info": "Note"}


def verdict_banner(verdict: Verdict) -> Html:
    """The verdict, its first words large."""
    head, colon, rest = cut(verdict.line, TITLE).partition(":")
    if not colon:
        head, rest = SAID[verdict.level], verdict.line
    return tag("div", tag("strong", head), tag("p", rest.strip()), class_=f"banner {LEVEL_CLASS[verdict.level]}")


def marks_of(verdict: Verdict) -> list[Mark]:
    """The findings that stand on the time axis, numbered as in the list."""
    return [
        Mark(
            str(at),
            item.finding.first_step,
            item.finding.last_step,
            item.finding.severity,
            item.finding.title,
            f"#f{at}",
        )
        for at, item in enumerate(verdict.findings[:IN_FULL], 1)
    ]


def findings_section(verdict: Verdict) -> Html:
    """Every finding with its words, the worst first; those that are over, or in nearly every run, can be unfolded."""
    if not verdict.findings:
        return tag("p", "Nothing was found.", class_="dim")
    shown = [_finding(item, at, live=verdict.live) for at, item in enumerate(verdict.findings[:IN_FULL], 1)]
    others = verdict.findings[IN_FULL : IN_FULL + IN_A_LINE]
    lines = [tag("li", f"{cut(item.finding.title, 200)} ({when(item, live=verdict.live)})") for item in others]
    rest = len(verdict.findings) - IN_FULL - len(others)
    more = f", {rest:,} of them not listed; gradvitals doctor --json has all" if rest > 0 else ""
    fold = folded(f"{len(others) + max(rest, 0):,} more findings{more}", tag("ul", *lines)) if others else None
    return join([tag("ol", *shown, class_="verdict"), fold])


def _finding(item: Weighed, at: int, *, live: bool) -> Html:
    finding = item.finding
    over = item.clear is not None
    head: list[Part] = [
        tag("span", str(at), class_="flag", aria_hidden="true"),
        tag("span", LABELS.get(finding.severity, finding.severity) + (", over" if over else ""), class_="tag"),
        tag("b", cut(finding.title, TITLE)),
        tag("code", cut(finding.id, 60)),
    ]
    found = finding.found_step
    later = f"; found at step {found:,}" if found is not None and found > finding.first_step else ""
    facts = [("When", when(item, live=live) + later)]
    if finding.tensors:
        facts.append(("Where", where(finding)))
    seen = list(evidence(finding.evidence))
    if seen:
        facts.append(("Seen", "; ".join(cut(text, 200) for text in seen)))
    details = join(
        [
            tag("dl", *(join([tag("dt", name), tag("dd", cut(text, TITLE))]) for name, text in facts), class_="about"),
            tag(
                "div", _numbered("Likely causes", finding.causes), _numbered("What to do", finding.fixes), class_="two"
            ),
        ]
    )
    severity = finding.severity if finding.severity in LABELS else "info"
    body = tag("details", tag("summary", *head), details, open=None if over or is_ordinary(finding) else "open")
    return tag("li", body, class_=f"{severity} {'over' if over else 'open'}", id=f"f{at}")


def _numbered(title: str, texts: Sequence[str]) -> Html | None:
    if not texts:
        return None
    return tag("div", tag("h4", title), tag("ol", *(tag("li", cut(text, TITLE)) for text in texts[:8])))


def actions_section(actions: Sequence[Action]) -> Html:
    """What a Guard or a schedule did, in sum and one by one."""
    first, *others = summarise(actions).splitlines()
    heads = ["What", "Step", "Why", "For"]
    rows = (
        [
            cut(action.kind.replace("_", " "), 60),
            f"{action.step:,}",
            tag("span", _reason(action), class_="left"),
            cut(action.finding, 60),
        ]
        for action in actions[-ACTIONS:]
    )
    title = "The last ones, one by one" if len(actions) > ACTIONS else "One by one"
    return join(
        [
            tag("p", f"{first[0].upper()}{first[1:]}.".replace("..", ".")),
            tag("ul", *(tag("li", cut(line.strip(), TITLE)) for line in others)) if others else None,
            folded(f"{title} ({min(len(actions), ACTIONS)})", table(heads, rows), opened=len(actions) <= 8),
        ]
    )


def _reason(action: Action) -> str:
    return cut(("" if action.taken else "not taken: ") + action.reason, 300)


def other_section(checkup: Checkup) -> Iterator[Html]:
    """What is fine, what could not be judged, and what gradvitals says about itself."""
    if checkup.fine:
        items = [tag("li", item.text) for item in checkup.fine]
        yield folded(f"{checkup.fine_title} ({len(items)})", tag("ul", *items, class_="columns"))
    if checkup.not_judged:
        items = [
            tag("li", f"{cut(item.reason, 200)} ({cut(', '.join(item.names), TITLE)})") for item in checkup.not_judged
        ]
        yield folded(f"What could not be judged, and why ({len(items)})", tag("ul", *items))
    if checkup.monitoring:
        told = checkup.monitoring[:IN_A_LINE]
        items = [tag("li", f"{cut(finding.title, TITLE)} (step {finding.first_step:,})") for finding in told]
        yield folded(f"About the monitoring ({len(items)})", tag("ul", *items), opened=True)
