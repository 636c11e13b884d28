"""What `gradvitals doctor` prints: the verdict in one line, findings worst first, what is fine, what was not judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gradvitals.diagnose import FAMILIES, RULES
from gradvitals.show.catalogue import Entry, Setting
from gradvitals.show.checkup import MISSING, MISSING_FROM, UNMEASURED, Checkup, Fine, NotJudged
from gradvitals.show.doubts import TOO_EARLY
from gradvitals.show.findings import BULLET, Hanging, about_actions, about_monitoring, in_full, verdict_line
from gradvitals.show.text import clean

NOT_HERE = {
    MISSING["clip/max_norm"]: "clipping by norm",
    MISSING["step/skipped"]: "a GradScaler",
    MISSING["step/left_out"]: "a Guard",
    MISSING["vrgd/mean"]: "VRGD",
    MISSING_FROM["ranks"]: "other workers",
    MISSING_FROM["heads"]: "attention heads",
}
"""By the reason why something was not judged: what a run does not have, and need not have."""


def render_checkup(checkup: Checkup, *, whole: bool = False) -> RenderableType:
    """A checkup, ready for `rich.console.Console.print`.

    Args:
        checkup: What there is to say.
        whole: Name each pattern that is fine or was not judged, instead of counting them, and tell everything of
            notes that nearly every run has.
    """
    return Group(*_sections(checkup, whole))


def render_rules(entries: Sequence[Entry]) -> RenderableType:
    """Every rule by its id, with its pattern in a line."""
    width = max((len(clean(entry.id)) for entry in entries), default=0) + 2
    return Group(*(Hanging(clean(entry.id).ljust(width), clean(entry.pattern), "bold") for entry in entries))


def render_rule(entry: Entry) -> RenderableType:
    """One rule in full."""
    return Group(*_rule_sections(entry))


def _sections(checkup: Checkup, whole: bool) -> Iterator[RenderableType]:
    yield verdict_line(checkup.verdict)
    yield Hanging("", Text(_origin(checkup), style="dim"))
    verdict = checkup.verdict
    for item in verdict.findings:
        yield from (Text(), in_full(item, live=verdict.live, whole=whole))
    if verdict.findings:
        yield from (Text(), Hanging("", Text("gradvitals doctor --explain RULE has every cause and cure.", "dim")))
    if checkup.gsnr_doubt:
        yield from (Text(), Hanging("Note: ", clean(checkup.gsnr_doubt), "yellow"))
    if len(checkup.restarts) > 1:  # a single one is in the verdict
        yield from (Text(), Text("Started again", style="bold"))
        for restart in checkup.restarts:
            yield Hanging(BULLET, clean(f"at step {restart.step:,}; before: {restart.why}"))
    if checkup.actions:
        yield from (Text(), *about_actions(checkup.actions))
    if checkup.fine or checkup.not_judged:
        yield from (Text(), *(_one_by_one(checkup) if whole else _counted(checkup)))
    if checkup.monitoring:
        yield from (Text(), *about_monitoring(checkup.monitoring))


def _counted(checkup: Checkup) -> Iterator[RenderableType]:
    """What is fine and what was not judged, in a line or two each."""
    if checkup.fine:
        until = "" if checkup.fine_until is None else f" up to step {checkup.fine_until:,}"
        yield Hanging(f"Fine{until}: ", clean(_fine_in_short(checkup.fine)), "bold")
    if checkup.not_judged:
        yield Hanging("Not judged: ", clean(_not_judged_in_short(checkup.not_judged)), "bold")
    yield Hanging("", Text("With --all, doctor names each of them.", style="dim"))


def _fine_in_short(fine: Sequence[Fine]) -> str:
    groups = Counter(RULES[item.id].family for item in fine)
    order = [*FAMILIES, "others"]
    about = ", ".join(f"{name} {groups[name]}" for name in order if groups[name])
    return f"{len(fine)} pattern{'' if len(fine) == 1 else 's'} looked for and not found ({about})"


def _not_judged_in_short(not_judged: Sequence[NotJudged]) -> str:
    early = [name for item in not_judged if item.reason.startswith(TOO_EARLY) for name in item.names]
    absent = [NOT_HERE[item.reason] for item in not_judged if item.reason in NOT_HERE]
    reasons = [item.reason for item in not_judged if not item.reason.startswith(TOO_EARLY)]
    reasons = [reason for reason in reasons if reason not in NOT_HERE]
    unmeasured = [reason.removesuffix(UNMEASURED) for reason in reasons if reason.endswith(UNMEASURED)]
    told = [f"{reason[0].upper()}{reason[1:]}." for reason in reasons if not reason.endswith(UNMEASURED)]
    told += [f"Not measured: {', '.join(unmeasured)}."] if unmeasured else []
    told += [f"Too early for: {'; '.join(early)}."] if early else []
    told += [f"Not in this run: {', '.join(absent)}."] if absent else []
    count = sum(len(item.ids) for item in not_judged)
    return " ".join((f"{count} pattern{'' if count == 1 else 's'}.", *told))


def _one_by_one(checkup: Checkup) -> Iterator[RenderableType]:
    if checkup.fine:
        yield Text(checkup.fine_title, style="bold")
        yield from (Hanging(BULLET, clean(item.text)) for item in checkup.fine)
    if checkup.not_judged:
        yield from (*([Text()] if checkup.fine else []), Text("What could not be judged", style="bold"))
        for missing in checkup.not_judged:
            yield Hanging(BULLET, clean(f"{missing.reason} ({', '.join(missing.names)})"))


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
    for title, texts in (("Likely causes", entry.causes), ("What to do", entry.fixes)):
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
