"""Verdict and findings for the terminal: in full for `gradvitals doctor`, in short for reports."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from gradvitals.format import number
from gradvitals.show.actions import latest, summarise
from gradvitals.show.text import clean, cut
from gradvitals.show.verdict import Level, Verdict, Weighed, as_words, is_ordinary, name_of, when
from gradvitals.types import Action, Finding, Severity

STYLES: dict[Severity, str] = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
LEVEL_STYLES: dict[Level, str] = {"healthy": "bold green", "watch": "bold yellow", "unhealthy": "bold red"}
LABEL = 8
"""Columns for the label of each part of a finding."""
NAMED = 4
"""Tensors that are named; the others are counted."""
SHORT_NAMED = 2
LIKELIEST = 3
"""Causes and cures that are told of a finding; of a note, and of what is over and done with, one of each."""
LONGEST = 60
"""Characters of one value of the evidence."""
TITLE = 320
"""Characters of a title: it may hold names, and these may have any length."""
BULLET = "  - "
SELF_EXPLAINING = ("loss", "norm", "ratio", "lr", "gsnr", "noise_scale", "batch_size", "weight_decay")
"""Numbers of the evidence that are shown beside those with an expectation."""
RELATIVE = ("ratio",)
"""Those of them that say nothing without an expectation: of what."""
OF_LOSSES = "spread of observed losses over their mean"
OF_NORMS = "spread of the norm's logarithm"
"""What a swing is of. A loop may observe a loss that it has smoothed, which swings less than its batches do."""
MADE_NAN = ("loss", "norm")
"""Those that training itself may make NaN."""


@dataclass(frozen=True)
class Hanging:
    """A paragraph behind a label or a bullet; its further lines line up with the first."""

    head: str
    text: str | Text
    style: str = ""
    """Of the head."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Wrap at the width at hand, without blanks at the ends of lines."""
        text = self.text if isinstance(self.text, Text) else Text(self.text)
        lines = text.wrap(console, max(1, options.max_width - len(self.head)))
        for i, line in enumerate(lines):
            head = (" " * len(self.head), "") if i else (self.head, self.style)
            whole = Text.assemble(head, line)
            whole.rstrip()
            yield whole


def verdict_line(verdict: Verdict) -> RenderableType:
    """The verdict, its first words in colour."""
    head, colon, rest = clean(verdict.line).partition(":")
    return Hanging("", Text.assemble((head + colon, LEVEL_STYLES[verdict.level]), rest))


def in_full(item: Weighed, *, live: bool, whole: bool = False) -> RenderableType:
    """Everything about a finding: where, when, on what evidence, why probably and what to do.

    Args:
        item: The finding.
        live: Whether the run goes on.
        whole: Tell everything of an ordinary note too, which otherwise takes one line.
    """
    finding = item.finding
    if is_ordinary(finding) and not whole:
        return _in_a_line(item)
    found = finding.found_step
    later = f"; found at step {found:,}" if found is not None and found > finding.first_step else ""
    most = LIKELIEST if item.weight != "info" else 1
    parts: list[tuple[str, Sequence[str]]] = [
        ("where", [where(finding)] if finding.tensors else []),
        ("when", [when(item, live=live) + later]),
        ("seen", list(evidence(finding.evidence))),
        ("why", finding.causes[:most]),
        ("to do", finding.fixes[:most]),
    ]
    lines = [line for label, texts in parts for line in _labelled(label, texts)]
    return Group(_heading(item), *lines)


def in_short(item: Weighed, *, live: bool) -> RenderableType:
    """A finding in a few lines: what, where and when, and the first thing to do."""
    finding = item.finding
    if is_ordinary(finding):
        return _in_a_line(item)
    place = f"in {where(finding, SHORT_NAMED)}; " if finding.tensors and not finding.says_where else ""
    lines = [f"{place}{when(item, live=live)}", *(f"to do: {cure}" for cure in finding.fixes[:1])]
    return Group(_heading(item), *(Hanging("  ", clean(line)) for line in lines))


def about_actions(actions: Sequence[Action]) -> Iterator[RenderableType]:
    """What a Guard or a schedule did, in short; nothing where there was neither."""
    if actions:
        first, *others = summarise(actions).splitlines()
        yield Text(clean(first[0].upper() + first[1:]), style="bold")
        yield from (Hanging(BULLET, clean(line.strip())) for line in (*others, *latest(actions)))


def about_monitoring(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """What gradvitals says about itself, a line or two each."""
    if findings:
        yield Text("About the monitoring", style="bold")
    for finding in findings:
        todo = f"; to do: {finding.fixes[0]}" if finding.fixes else ""
        yield Hanging(BULLET, clean(f"{finding.title} (step {finding.first_step:,}){todo}"))


def where(finding: Finding, most: int = NAMED) -> str:
    """The tensors by name, and how many more there are; which rank where there are several."""
    names = [cut(name) for name in finding.tensors[: most if len(finding.tensors) > most + 1 else most + 1]]
    rest = len(finding.tensors) - len(names)
    text = ", ".join(names) + (f" and {rest:,} more" if rest else "")
    return text if finding.rank is None else f"{text} (rank {finding.rank})"


def evidence(content: Mapping[str, Any]) -> Iterator[str]:
    """The numbers that were seen, each beside what was expected."""
    found, expected = content.get("seen"), content.get("expected")
    if not isinstance(found, Mapping):
        return
    seen: Mapping[str, Any] = found
    usual: Mapping[str, Any] = expected if isinstance(expected, Mapping) else {}
    called = {"swing": OF_NORMS, "loss_swing": OF_LOSSES} if "loss_swing" in seen else {"swing": OF_LOSSES}
    beside = [_beside(called.get(name, name), seen[name], usual[name]) for name in seen if name in usual]
    yield from beside
    others = _known({name: value for name, value in seen.items() if name not in usual and name not in RELATIVE})
    if others:
        yield ("with " if beside else "") + others
    latest = content.get("latest")
    if isinstance(latest, Mapping):
        told = {name for name in latest if name in usual or name not in RELATIVE}
        news = _known({name: latest[name] for name in latest if name in told and latest[name] != seen.get(name)})
        if news:
            yield f"at step {latest.get('step')}: {news}"


def _known(seen: Mapping[str, Any]) -> str:
    """Numbers whose names say what they are; the others are for the title and the cures."""
    named = [name for name in SELF_EXPLAINING if name in seen and _is_told(name, seen[name])]
    return ", ".join(_named(name, seen[name]) for name in named)


def _is_told(name: str, value: Any) -> bool:
    """Whether there is a number to tell: NaN is one where training makes it, elsewhere nobody knew it."""
    is_unknown = value == "nan" or (isinstance(value, float) and math.isnan(value))
    return _is_number(value) and (name in MADE_NAN or not is_unknown)


def _beside(name: str, value: Any, expected: Any) -> str:
    if name == "share" and expected == 0 and isinstance(value, (int, float)) and math.isfinite(value):
        return f"{number(100.0 * value)} % of their numbers (expected none)"
    return f"{_named(name, value)} (expected {_value(expected)})"


def _named(name: str, value: Any) -> str:
    return f"{name.replace('_', ' ')} {_value(value)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        text = ", ".join(number(part) for part in value)
    elif isinstance(value, Mapping):
        text = ", ".join(f"{key} {number(part)}" for key, part in value.items())
    else:
        text = number(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _heading(item: Weighed) -> RenderableType:
    return _headed(item, clean(cut(item.finding.title, TITLE)), "bold")


def _in_a_line(item: Weighed) -> RenderableType:
    return _headed(item, f"{as_words(name_of(item.finding.id))}, as in nearly every healthy run")


def _headed(item: Weighed, text: str, style: str = "") -> RenderableType:
    """A text about a finding between its severity and its id."""
    finding = item.finding
    severity = f"{finding.severity}, over" if item.clear is not None else finding.severity
    whole = Text.assemble((text, style), (f" [{clean(cut(finding.id))}]", "dim"))
    return Hanging(f"{severity}: ", whole, STYLES[finding.severity] if item.clear is None else "dim")


def _labelled(label: str, texts: Sequence[str]) -> Iterator[Hanging]:
    several = label in ("why", "to do") and len(texts) > 1
    for i, text in enumerate(texts):
        head = f"  {'' if i else label}".ljust(LABEL)
        yield Hanging(f"{head}{i + 1}. " if several else head, clean(text), "bold")
