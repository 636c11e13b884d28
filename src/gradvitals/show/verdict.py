"""The verdict on a run: healthy, worth watching or unhealthy, from what was found and from what is over by now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from gradvitals.diagnose import RULES
from gradvitals.diagnose.message import unread_steps
from gradvitals.notices import ABOUT_MONITORING
from gradvitals.show.notice_words import NOTICE_WORDS
from gradvitals.show.text import cut
from gradvitals.types import SEVERITIES, Finding, Severity

Level = Literal["healthy", "watch", "unhealthy"]

STOPPED = "training_stopped"
"""Id of the finding that says why a run came to its end before it was done."""

CLEAR_STEPS = 20
"""Steps without the pattern before anything counts as over and done with."""
CLEAR_SHARE = 0.1
"""Share of the run, at its end, that has to be clear of what was critical."""
EPISODES = 3
"""How often a pattern has to come before it is expected to come again."""
EARLY_STEPS = 50
"""Below so many steps that were read, that nothing was found says little."""

NAMED = 3
"""Notes that the line names; the others are counted."""

LEVELS: dict[Severity, Level] = {"info": "healthy", "warning": "watch", "critical": "unhealthy"}
SAID: dict[Level, str] = {"healthy": "Healthy", "watch": "Watch it", "unhealthy": "Unhealthy"}


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A finding, and how much it matters at the end of what was read."""

    finding: Finding
    weight: Severity
    """Its severity while it goes on; less once it is over."""
    clear: int | None
    """Steps since it was over; None while it goes on."""

    def to_json(self) -> dict[str, Any]:
        """The finding as plain JSON values, with `weight`, `open` and `clear_steps` beside them."""
        own = {"weight": self.weight, "open": self.clear is None, "clear_steps": self.clear}
        return {**self.finding.to_json(), **own}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a run is, in one word and in one line."""

    level: Level
    line: str
    steps: int
    """From the first that was read to the last."""
    read: int
    """Those of them that were read."""
    live: bool
    """Whether the run goes on."""
    num_open: int
    num_over: int
    findings: tuple[Weighed, ...]
    """What was found about the training, worst first."""

    @property
    def worst(self) -> Weighed | None:
        """What the verdict rests on; None where nothing was found."""
        return self.findings[0] if self.findings else None

    def reaches(self, severity: Severity) -> bool:
        """Whether anything found weighs this much by now, or more."""
        return self.worst is not None and _rank(self.worst.weight) >= _rank(severity)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain JSON values, without the findings."""
        worst = self.worst.finding.id if self.worst else None
        counts = {"steps": self.steps, "open": self.num_open, "over": self.num_over}
        return {"level": self.level, "line": self.line, **counts, "worst": worst, "live": self.live}


def judge(
    findings: Iterable[Finding], *, last_step: int, steps: int, read: int | None = None, live: bool = False
) -> Verdict:
    """The verdict on a run.

    Args:
        findings: All of them; those of gradvitals about itself are left aside.
        last_step: The last step that was read.
        steps: How many steps there were from the first that was read to the last.
        read: How many of them were read; None for all.
        live: Whether the run goes on.
    """
    read = steps if read is None else read
    weighed = weigh(findings, last_step=last_step, steps=steps)
    live = live and stop_of(weighed) is None
    level = LEVELS[weighed[0].weight] if weighed else "healthy"
    num_open = sum(item.clear is None for item in weighed)
    return Verdict(
        level=level,
        line=_line(level, weighed, steps=steps, read=read, live=live),
        steps=steps,
        read=read,
        live=live,
        num_open=num_open,
        num_over=len(weighed) - num_open,
        findings=weighed,
    )


def weigh(findings: Iterable[Finding], *, last_step: int, steps: int) -> tuple[Weighed, ...]:
    """Every finding about the training with its weight by now, the heaviest first.

    What goes on weighs as much as its severity. What is over weighs less:

    - a warning becomes info once it has been over for as long as it lasted, and for 20 steps;
    - what was critical becomes a warning at once, and info once that and a tenth of the run are clear of it;
    - what came three times or more stays a warning until the run has been clear of it for longer than ever between.
    """
    ours = [finding for finding in findings if finding.id not in ABOUT_MONITORING]
    by_id: dict[str, list[Finding]] = {}
    for finding in ours:
        by_id.setdefault(finding.id, []).append(finding)
    items = (_weighed(finding, by_id[finding.id], last_step, steps) for finding in ours)
    return tuple(sorted(items, key=_order))


def stop_of(weighed: Iterable[Weighed]) -> Weighed | None:
    """What has stopped the run before it was done; None where it goes on, has gone on since, or came to its end."""
    return next((item for item in weighed if item.finding.id == STOPPED and item.clear is None), None)


def is_ordinary(finding: Finding) -> bool:
    """Whether it is a note that nearly every healthy run has."""
    return finding.id in RULES and RULES[finding.id].ordinary and finding.severity == "info"


def about_itself(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """What gradvitals says about itself, in the order it was said."""
    return tuple(finding for finding in findings if finding.id in ABOUT_MONITORING)


def _weighed(finding: Finding, episodes: Sequence[Finding], last_step: int, steps: int) -> Weighed:
    if finding.last_step is None:
        return Weighed(finding=finding, weight=finding.severity, clear=None)
    clear = max(0, last_step - finding.last_step)
    # Of several ranks, those that do not wait for each other may have made some steps more.
    if finding.id == STOPPED and (clear == 0 or (finding.rank is not None and clear < CLEAR_STEPS)):
        return Weighed(finding=finding, weight=finding.severity, clear=None)
    lasted = finding.last_step - finding.first_step + 1
    share = CLEAR_SHARE * steps if finding.severity == "critical" else 0.0
    enough = max(lasted, CLEAR_STEPS, share)
    done = finding.severity == "info" or (clear >= enough and not _comes_again(finding, episodes, clear))
    return Weighed(finding=finding, weight="info" if done else "warning", clear=clear)


def _comes_again(finding: Finding, episodes: Sequence[Finding], clear: int) -> bool:
    """Whether this is the latest of several episodes, and the next one may just not be due yet."""
    starts = sorted(episode.first_step for episode in episodes if episode.severity != "info")
    if len(starts) < EPISODES or finding.first_step != starts[-1]:
        return False
    return clear <= max(later - earlier for earlier, later in pairwise(starts))


def _order(item: Weighed) -> tuple[int, bool, bool, int, bool, int]:
    finding = item.finding
    is_end = finding.id == STOPPED and item.clear is None
    # What follows from another finding comes after it, as far as both weigh the same.
    follows, over = finding.follows is not None, item.clear is not None
    return -_rank(item.weight), not is_end, follows, -_rank(finding.severity), over, finding.first_step


def _rank(severity: Severity) -> int:
    return SEVERITIES.index(severity)


def _line(level: Level, weighed: Sequence[Weighed], *, steps: int, read: int, live: bool) -> str:
    counted = f"{_plural(steps, 'step')}{f' ({read:,} read)' if read < steps else ''}{' so far' if live else ''}"
    stop = stop_of(weighed)
    others = [item for item in weighed if item is not stop]
    if stop is not None and stop.finding.severity != "info":
        before = f"{_counts(others)} before. {_worst(others[0], live=False)}" if others else "nothing else found."
        return f"{SAID[level]}: {_stopped(stop.finding)}. {counted}, {before}".rstrip()
    by_hand = "" if stop is None else f" It was stopped by hand at step {stop.finding.first_step:,}."
    if others:
        return f"{SAID[level]}: {counted}, {_counts(others)}. {_worst(others[0], live=live)}".rstrip() + by_hand
    if read < EARLY_STEPS:
        return f"Nothing wrong yet, but it is early: {counted}.{by_hand}"
    return f"Healthy: {counted}, nothing found.{by_hand}"


def _stopped(finding: Finding) -> str:
    error = str(finding.evidence.get("reason") or finding.title.removeprefix("training stopped with "))
    on_rank = f" on rank {finding.rank}" if finding.rank is not None else ""
    return f"stopped at step {finding.first_step:,}{on_rank} by {error.rstrip('.')}"


def _counts(weighed: Sequence[Weighed]) -> str:
    """How many go on, how many of these are notes, and how many are over."""
    still = [item.finding for item in weighed if item.clear is None]
    notes = [finding for finding in still if finding.severity == "info"]
    past = [item.finding for item in weighed if item.clear is not None]
    over = len(past)
    # The worst is told beside the counts; what is a note, or was one, is known by its name alone.
    untold = _named(past) if all(finding.severity == "info" for finding in past) else ""
    if not still:
        return f"{_plural(over, 'finding')}, {'now' if over == 1 else 'all'} over{untold}"
    parts = [f"{_plural(len(still) - len(notes), 'finding')} open"] if len(still) > len(notes) else []
    parts += [_plural(len(notes), "note") + _named(notes)] if notes else []
    parts += [f"{_plural(over, 'finding') if len(still) == len(notes) else over} over{untold}"] if over else []
    return ", ".join(parts)


def _named(findings: Sequence[Finding]) -> str:
    """What was found in two or three words each, in brackets: ``(noisy gradients, clipping never)``."""
    names = list(dict.fromkeys(as_words(cut(name_of(finding.id))) for finding in findings))
    rest = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    return f" ({', '.join(names[:NAMED] + rest)})"


def name_of(finding: str) -> str:
    """What a finding of this id is called; the id itself where it has no words."""
    if finding in NOTICE_WORDS:
        return NOTICE_WORDS[finding][0].name
    message = RULES[finding].message if finding in RULES else None
    return finding if message is None else message.name


def as_words(name: str) -> str:
    """A name within a sentence: small but for abbreviations such as GSNR."""
    return name if name[1:2].isupper() else name[:1].lower() + name[1:]


def _worst(item: Weighed, *, live: bool) -> str:
    finding = item.finding
    if finding.severity == "info":
        return ""  # a note is not what a run should be known by
    return f"Worst ({finding.severity}): {finding.title}; {when(item, live=live)}."


def when(item: Weighed, *, live: bool) -> str:
    """Since which step until when, and whether it goes on."""
    first, last = item.finding.first_step, item.finding.last_step
    if item.finding.id == STOPPED and item.clear is None:
        return f"at step {first:,}, where the run ended"
    if last is None:
        return f"since step {first:,}{_unread(item)}" + ("" if live else ", still open at the end")
    steps = f"step {first:,} only" if last <= first else f"steps {first:,} to {last:,}"
    return f"{steps}{_unread(item)}, over for {_plural(item.clear or 0, 'step')}"


def _unread(item: Weighed) -> str:
    """What may be earlier than it was seen."""
    unread = unread_before(item.finding)
    return f" ({unread_steps(unread)} not read)" if unread else ""


def unread_before(finding: Finding) -> int:
    """Steps just before a finding that were not read, as far as its evidence says."""
    unread = finding.evidence.get("unread")
    return unread if isinstance(unread, int) and 0 < unread <= finding.first_step else 0


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
