"""What `gradvitals doctor` prints: the verdict in one line, findings worst first, what is fine, what was not judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gradvitals.show.catalogue import Entry, Setting
from gradvitals.show.checkup import Checkup
from gradvitals.show.findings import BULLET, Hanging, about_actions, about_monitoring, in_full, verdict_line
from gradvitals.show.text import clean


def render_checkup(checkup: Checkup) -> RenderableType:
    """A checkup, ready for `rich.console.Console.print`."""
    return Group(*_sections(checkup))


def render_rules(entries: Sequence[Entry]) -> RenderableType:
    """Every rule by its id, with its pattern in a line."""
    width = max((len(clean(entry.id)) for entry in entries), default=0) + 2
    return Group(*(Hanging(clean(entry.id).ljust(width), clean(entry.pattern), "bold") for entry in entries))


def render_rule(entry: Entry) -> RenderableType:
    """One rule in full."""
    return Group(*_rule_sections(entry))


def _sections(checkup: Checkup) -> Iterator[RenderableType]:
    yield verdict_line(checkup.verdict)
    yield Hanging("", Text(_origin(checkup), style="dim"))
    verdict = checkup.verdict
    for item in verdict.findings:
        yield from (Text(), in_full(item, live=verdict.live))
    if verdict.findings:
        yield from (Text(), Hanging("", Text("gradvitals doctor --explain RULE has every cause and cure.", "dim")))
    if len(checkup.restarts) > 1:  # a single one is in the verdict
        yield from (Text(), Text("Started again", style="bold"))
        for restart in checkup.restarts:
            yield Hanging(BULLET, clean(f"at step {restart.step:,}; before: {restart.why}"))
    if checkup.actions:
        yield from (Text(), *about_actions(checkup.actions))
    if checkup.fine:
        yield from (
            Text(),
            Text("What is fine" if verdict.level == "healthy" else "What is fine otherwise", style="bold"),
        )
        yield from (Hanging(BULLET, clean(item.text)) for item in checkup.fine)
    if checkup.not_judged:
        yield from (Text(), Text("What could not be judged", style="bold"))
        for missing in checkup.not_judged:
            yield Hanging(BULLET, clean(f"{missing.reason} ({', '.join(missing.names)})"))
    if checkup.monitoring:
        yield from (Text(), *about_monitoring(checkup.monitoring))


def _origin(checkup: Checkup) -> str:
    run = clean(checkup.run)
    if not checkup.replayed:
        return f"{run}, as it was judged while it ran"
    return (
        f"{run}, judged by the rules of today ({checkup.replayed}). Single tensors are kept more rarely than a live "
        "run sees them: some findings come later, or not at all."
    )


def _rule_sections(entry: Entry) -> Iterator[RenderableType]:
    yield Text.assemble((clean(entry.words.name), "bold"), (f"  [{clean(entry.id)}]", "dim"))
    yield Hanging("", clean(entry.pattern))
    yield Hanging("", entry.decided.replace("`", ""))
    for title, texts in (("Likely causes", entry.causes), ("What to do", entry.cures)):
        if texts:
            yield from (Text(), Text(title, style="bold"))
            yield from (Hanging(f"  {i}. ", clean(text)) for i, text in enumerate(texts, 1))
    if entry.settings:
        yield from (Text(), Text("Settings, and what they are unless set", style="bold"))
        yield from _settings(entry.settings)
        first = entry.settings[0]
        change = f'Config(rules={{"{entry.id}": {{"{first.name}": {first.default!r}}}}})'
        yield from (Text(), Hanging("", f"To change: {change}"))
    if entry.words.reference:
        yield from (Text(), Hanging("", f"Reference: {clean(entry.words.reference)}"))


def _settings(settings: Sequence[Setting]) -> Iterator[RenderableType]:
    heads = [f"  {setting.name} = {setting.default!r}" for setting in settings]
    width = max(map(len, heads)) + 2
    for head, setting in zip(heads, settings, strict=True):
        yield Hanging(head.ljust(width), clean(setting.text))
