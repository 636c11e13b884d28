"""The verdict on a run: how serious its findings are by now, and one line that sums it up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradvitals.diagnose import RULES
from gradvitals.diagnose.message import unread_steps
from gradvitals.format import number
from gradvitals.notices import ABOUT_MONITORING
from gradvitals.places import relative
from gradvitals.report.catalog import name_of
from gradvitals.report.format import clean, cut, evidence, in_sentence, plural, where
from gradvitals.report.replay import diagnose_run
from gradvitals.report.state import (
    ENDS,
    STOPPED,
    WHY_STOPPED,
    describe_restarts,
    interruption,
    metric_of_every_step,
    restarts,
    state_of,
    steps_spanned,
)
from gradvitals.store.reader import Run, open_run
from gradvitals.types import SEVERITIES, Finding, Fix, Severity

Level = Literal["healthy", "attention", "unhealthy"]

LEVELS: dict[Severity, Level] = {"info": "healthy", "warning": "attention", "critical": "unhealthy"}
LABELS: dict[Level, str] = {"healthy": "Healthy", "attention": "Needs attention", "unhealthy": "Unhealthy"}

ONGOING = ", ongoing when the run ended"

CLEAR_STEPS = 20
"""Steps without the pattern before a finding stops counting."""
CLEAR_SHARE = 0.1
"""Share of the run that has to be clear of a finding that was critical."""
EPISODES = 3
"""A pattern that came this often is expected to come again."""
EARLY_STEPS = 50
"""With fewer steps read than this, no findings mean little."""
NAMED_NOTES = 3

NO_LOSS = "No loss was recorded, so loss checks were skipped: call monitor.observe(loss) after backward."
NO_LOSS_IMPORTED = "No loss was imported, so loss checks were skipped: name its column with --map COLUMN=loss."


@dataclass(frozen=True, kw_only=True)
class RankedFinding:
    """A finding, and how much it matters at the end of the readings."""

    finding: Finding
    weight: Severity
    """Its severity while it is open; less once it is resolved."""
    clear_steps: int | None
    """Steps since it was resolved; None while it is open."""

    @property
    def is_open(self) -> bool:
        """Whether the pattern was still there at the last step."""
        return self.clear_steps is None

    @property
    def is_routine(self) -> bool:
        """Whether it is a note that nearly every healthy run has."""
        rule = RULES.get(self.finding.id)
        return rule is not None and rule.ordinary and self.finding.severity == "info"

    @property
    def label(self) -> str:
        """Its severity, and that it is resolved if it is."""
        return self.finding.severity + ("" if self.is_open else ", resolved")

    @property
    def place(self) -> str:
        """Where it is, unless it has no tensors or its title says where."""
        return f"in {where(self.finding)}" if self.finding.tensors and not self.finding.says_where else ""

    @property
    def evidence(self) -> list[str]:
        """The numbers that were observed, each beside what was expected."""
        return list(evidence(self.finding.evidence, self.finding.id))

    @property
    def fixes(self) -> tuple[str, ...]:
        """What to do. A consequence is fixed by fixing its root."""
        root = self.finding.follows
        return (f"Fix {root} first",) if root else self.finding.fixes

    def parts(self, *, live: bool, limit: int | None = None) -> dict[str, Sequence[str]]:
        """Returns all there is to tell by its label, with at most `limit` causes and fixes."""
        finding = self.finding
        return {
            "Where": [where(finding)] if finding.tensors else [],
            "When": [self.when(live=live, found=True)],
            "Evidence": self.evidence,
            "Likely cause": finding.causes[: 1 if finding.follows else limit],
            "Fix": self.fixes[:limit],
        }

    @property
    def unread_before(self) -> int:
        """Steps right before the finding that were not read, so that it may have started earlier."""
        unread = self.finding.evidence.get("unread")
        return unread if isinstance(unread, int) and 0 < unread <= self.finding.first_step else 0

    def when(self, *, live: bool, found: bool = False) -> str:
        """Returns the steps of the finding, whether it is resolved, and on demand the step that found it."""
        first, last, found_step = self.finding.first_step, self.finding.last_step, self.finding.found_step
        unread = f" ({unread_steps(self.unread_before)} not read)" if self.unread_before else ""
        later = f"; found at step {found_step:,}" if found and found_step is not None and found_step > first else ""
        if self.finding.id in ENDS and self.is_open:
            return f"at step {first:,}, where the run ended{later}"
        if last is None:
            return f"since step {first:,}{unread}{'' if live or self.finding.id in WHY_STOPPED else ONGOING}{later}"
        steps = f"step {first:,}" if last <= first else f"steps {first:,} to {last:,}"
        resolved = f"resolved {plural(self.clear_steps, 'step')} ago" if self.clear_steps else "just resolved"
        return f"{steps}{unread}, {resolved}{later}"

    def to_json(self) -> dict[str, Any]:
        """Returns the finding as plain JSON values, with `weight`, `open` and `clear_steps` beside them."""
        own = {"weight": self.weight, "open": self.is_open, "clear_steps": self.clear_steps}
        return {**self.finding.to_json(), **own}


@dataclass(frozen=True, kw_only=True, repr=False)
class Verdict:
    """How a run is, in one word and in one line. Prints itself, and displays itself in a notebook.

    Example:
        >>> run = gv.open_run("runs/gpt")  # doctest: +SKIP
        >>> run.verdict.level, run.verdict.fix  # doctest: +SKIP
        ('unhealthy', 'lower the learning rate from 10 to about 0.03')
    """

    level: Level
    headline: str
    """The level, what is wrong and since when, in a line; if nothing is, how many steps and findings there are."""
    counts: str
    """How many steps and findings there are."""
    remarks: str = ""
    """How the headline ends: restarts, and what was not recorded."""
    ranked: tuple[RankedFinding, ...]
    """The findings about the training with their weights, worst first."""
    steps: int
    """Steps from the first that was read to the last."""
    read: int
    """How many of these were read."""
    live: bool
    """Whether the run is still being written."""
    checks_passed: tuple[str, ...] = ()
    """Ids of the rules that looked and found nothing. Only a full report fills them in."""
    checks_skipped: tuple[str, ...] = ()
    """Ids of the rules that could not look."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found about the training, worst first."""
        return tuple(item.finding for item in self.ranked)

    @property
    def worst(self) -> RankedFinding | None:
        """The finding that decides the level; None if there is none."""
        return self.ranked[0] if self.ranked else None

    @property
    def subject(self) -> RankedFinding | None:
        """The finding that the headline is about: the worst, or a healthy run's note that asks for something."""
        return self.worst if self.level != "healthy" else _advice(self.ranked)

    @property
    def cause(self) -> str | None:
        """The likely cause of what the headline names; None if there is nothing to do."""
        return next(iter(self.subject.finding.causes), None) if self.subject else None

    @property
    def fix(self) -> Fix | None:
        """The first thing to do about it; None if there is nothing to do."""
        fix = next(iter(self.subject.finding.fixes), None) if self.subject else None
        return fix if fix is None or isinstance(fix, Fix) else Fix(fix)

    @property
    def remedy(self) -> dict[str, str]:
        """The likely cause and the fix, by their labels; empty if there is nothing to do."""
        return {label: text for label, text in (("Likely cause", self.cause), ("Fix", self.fix)) if text}

    @property
    def also(self) -> str:
        """The names of the findings that the worst one caused, with how often; empty if there are none."""
        names = Counter(in_sentence(name_of(item.finding.id)) for item in self.consequences())
        return ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in names.items())

    @property
    def uncounted(self) -> str:
        """The counts, unless the headline has them: they come after the cause and the fix."""
        return "" if self.counts in self.headline else self.counts

    @property
    def counted(self) -> str:
        """The counts, unless the headline has them, and how many checks passed and were skipped, if any was made."""
        passed, skipped = len(self.checks_passed), len(self.checks_skipped)
        checks = f"{plural(passed, 'check')} passed, {skipped} skipped" if passed or skipped else ""
        return "; ".join(filter(None, (self.uncounted, checks)))

    @property
    def num_open(self) -> int:
        """How many findings are open."""
        return sum(item.is_open for item in self.ranked)

    def consequences(self) -> tuple[RankedFinding, ...]:
        """Returns the findings that the worst one caused, directly or through others."""
        causes = {item.finding.id: item.finding.follows for item in self.ranked}
        root = self.ranked[0].finding.id if self.ranked else ""

        def is_caused(item: RankedFinding) -> bool:
            cause, seen = item.finding.follows, {item.finding.id}
            while cause is not None and cause != root and cause not in seen:
                seen.add(cause)
                cause = causes.get(cause)
            return cause == root

        return tuple(filter(is_caused, self.ranked[1:]))

    def reaches(self, severity: Severity) -> bool:
        """Returns whether any finding weighs this much by now, or more."""
        return self.worst is not None and _rank(self.worst.weight) >= _rank(severity)

    def to_json(self) -> dict[str, Any]:
        """Returns the verdict as plain JSON values, without the findings."""
        fix = self.fix
        return {
            "level": self.level,
            "headline": self.headline,
            "counts": self.counts,
            "cause": self.cause,
            "fix": None if fix is None else fix.text,
            "change": None if fix is None else dict(fix.change),
            "snippet": None if fix is None else fix.snippet,
            "steps": self.steps,
            "open": self.num_open,
            "resolved": len(self.ranked) - self.num_open,
            "worst": self.worst.finding.id if self.worst else None,
            "live": self.live,
        }

    def __str__(self) -> str:
        remedy = (f"{label}: {text}" for label, text in self.remedy.items())
        return "\n".join(map(clean, filter(None, (self.headline, *remedy, self.counted))))

    def __repr__(self) -> str:
        return f"<Verdict {clean(self.headline)}>"

    def _repr_html_(self) -> str:
        from gradvitals.report.notebook import verdict_html

        return verdict_html(self)


# -- from findings to a verdict ------------------------------------------------------------------------------------


def judge(
    findings: Iterable[Finding], *, last_step: int, steps: int, read: int | None = None, live: bool = False
) -> Verdict:
    """Returns the verdict on a run of so many steps, of which some were read (None: all)."""
    read = steps if read is None else read
    ranked = rank(findings, last_step=last_step, steps=steps)
    live = live and stop_of(ranked) is None
    level = LEVELS[ranked[0].weight] if ranked else "healthy"
    counts = _counts(ranked, steps=steps, read=read, live=live)
    headline = _headline(level, ranked, counts, read=read, live=live)
    return Verdict(level=level, headline=headline, counts=counts, ranked=ranked, steps=steps, read=read, live=live)


def rank(findings: Iterable[Finding], *, last_step: int, steps: int) -> tuple[RankedFinding, ...]:
    """Returns every finding about the training with its weight by now, the heaviest first.

    An open finding weighs as much as its severity. A resolved one weighs less:

    - a warning becomes info once it has been resolved for as long as it lasted, and for 20 steps;
    - a critical one becomes a warning at once, and info once that and a tenth of the run are clear of it;
    - one that came three times or more stays a warning until the run has been clear for longer than ever between.

    A root weighs as much as what it caused, so that the root comes first.
    """
    by_id: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.id not in ABOUT_MONITORING:
            by_id.setdefault(finding.id, []).append(finding)
    ranked = [_ranked(finding, episodes, last_step, steps) for episodes in by_id.values() for finding in episodes]
    caused: dict[str | None, Severity] = {}
    for item in ranked:
        root = item.finding.follows
        caused[root] = max(caused.get(root, "info"), item.weight, key=_rank)
    for at, item in enumerate(ranked):
        if item.is_open or item.weight != "info":
            ranked[at] = replace(item, weight=max(item.weight, caused.get(item.finding.id, "info"), key=_rank))
    return tuple(sorted(ranked, key=_order))


def stop_of(ranked: Iterable[RankedFinding]) -> RankedFinding | None:
    """Returns what stopped the run early; None if it continues, continued since, or finished."""
    return next((item for item in ranked if item.finding.id == STOPPED and item.is_open), None)


def self_reports(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns what gradvitals reports about itself, in order; how often it reads, as it was last."""
    own = [finding for finding in findings if finding.id in ABOUT_MONITORING]
    last = next((finding for finding in reversed(own) if finding.id == "readings_thinned"), None)
    return tuple(finding for finding in own if finding.id != "readings_thinned" or finding is last)


def _ranked(finding: Finding, episodes: Sequence[Finding], last_step: int, steps: int) -> RankedFinding:
    if finding.last_step is None:
        return RankedFinding(finding=finding, weight=finding.severity, clear_steps=None)
    clear = max(0, last_step - finding.last_step)
    # Ranks that do not wait for each other may have made a few more steps.
    if finding.id == STOPPED and (clear == 0 or (finding.rank is not None and clear < CLEAR_STEPS)):
        return RankedFinding(finding=finding, weight=finding.severity, clear_steps=None)
    lasted = finding.last_step - finding.first_step + 1
    share = CLEAR_SHARE * steps if finding.severity == "critical" else 0.0
    starts = sorted(episode.first_step for episode in episodes if episode.severity != "info")
    # The latest of several episodes: the next one may just not be due yet.
    recurring = len(starts) >= EPISODES and finding.first_step == starts[-1]
    due = recurring and clear <= max(later - earlier for earlier, later in pairwise(starts))
    done = finding.severity == "info" or (clear >= max(lasted, CLEAR_STEPS, share) and not due)
    return RankedFinding(finding=finding, weight="info" if done else "warning", clear_steps=clear)


def _order(item: RankedFinding) -> tuple[int, bool, bool, int, bool, int, bool]:
    """Sorts by weight, then what stopped the run, causes before consequences, severity, open ones, and age.

    Of what came at the same time, symptoms come last.
    """
    finding, is_over = item.finding, not item.is_open
    stopped = finding.id == STOPPED and item.is_open
    by_cause = finding.follows is not None
    is_symptom = finding.id in RULES and RULES[finding.id].is_symptom
    return -_rank(item.weight), not stopped, by_cause, -_rank(finding.severity), is_over, finding.first_step, is_symptom


def _rank(severity: Severity) -> int:
    return SEVERITIES.index(severity)


def _headline(level: Level, ranked: Sequence[RankedFinding], counts: str, *, read: int, live: bool) -> str:
    stop = stop_of(ranked)
    worst = next((item for item in ranked if item is not stop), None)
    told = "" if worst is None or "info" == worst.weight == worst.finding.severity else _in_words(worst, live=live)
    if stop is not None and stop.finding.severity != "info":
        reason = stop.finding.evidence.get("reason")  # older runs have it in the title alone
        error = str(reason or stop.finding.title.removeprefix("training stopped with ")).rstrip(".")
        on_rank = f" on rank {stop.finding.rank}" if stop.finding.rank is not None else ""
        before = f" Before that: {told}" if told else ""
        return f"{LABELS[level]}: stopped at step {stop.finding.first_step:,}{on_rank} by {error}.{before}"
    by_hand = "" if stop is None else f" Stopped manually at step {stop.finding.first_step:,}."
    if worst is None and read < EARLY_STEPS:
        return f"Nothing wrong yet, but it is early: {counts}.{by_hand}"
    advice = _advice(ranked)
    if level == "healthy" and advice is not None:
        return f"Healthy, but {in_sentence(advice.finding.title)}.{by_hand}"
    if level == "healthy":
        return f"Healthy: {counts}.{f' Earlier: {told}' if told else ''}{by_hand}"
    return f"{LABELS[level]}: {told}{by_hand}"


def _advice(ranked: Sequence[RankedFinding]) -> RankedFinding | None:
    """Returns the open note that asks for something; None if there is none."""
    notes = (item for item in ranked if item.is_open and item.finding.id in RULES)
    return next((item for item in notes if RULES[item.finding.id].advises), None)


def _in_words(item: RankedFinding, *, live: bool) -> str:
    """Returns the title of a finding, and since when it has been there if the title does not say it."""
    title, when = item.finding.title, item.when(live=live).removesuffix(ONGOING)
    has_step = re.search(rf"\bstep {item.finding.first_step:,}(?![\d,.]*\d)", title)
    return f"{title}." if item.is_open and not item.unread_before and has_step else f"{title} ({when})."


def _counts(ranked: Sequence[RankedFinding], *, steps: int, read: int, live: bool) -> str:
    """Returns how many steps were made, how many findings are open, how many of these are notes, and resolved ones.

    Notes are named: ``200 steps, 2 notes (noisy gradients, clipping never triggers)``.
    """
    stop = stop_of(ranked)
    others = [item for item in ranked if item is not stop]
    notes = [item for item in others if item.is_open and item.finding.severity == "info"]
    resolved = [item for item in others if not item.is_open]
    serious = len(others) - len(notes) - len(resolved)
    unread = f" (gradients read at {read:,})" if read < steps else ""
    parts = [f"{plural(steps, 'step')}{unread}{' so far' if live else ''}"]
    parts += [plural(serious, "open finding")] if serious else []
    for listed, counted in ((notes, plural(len(notes), "note")), (resolved, f"{len(resolved)} resolved")):
        names = list(dict.fromkeys(in_sentence(cut(name_of(item.finding.id))) for item in listed))
        rest = [f"{len(names) - NAMED_NOTES} more"] if len(names) > NAMED_NOTES else []
        named = all(item.finding.severity == "info" for item in listed)
        parts += [counted + (f" ({', '.join(names[:NAMED_NOTES] + rest)})" if named else "")] if listed else []
    crashed = stop is not None and stop.finding.severity != "info"
    if others:
        return ", ".join(parts) + (" before" if crashed else "")
    early = read < EARLY_STEPS and not crashed
    return ", ".join([*parts, *([] if early else ["no other findings" if crashed else "no findings"])])


# -- the verdict on a run ------------------------------------------------------------------------------------------


def judge_run(run: Run, findings: Iterable[Finding]) -> Verdict:
    """Returns the verdict on a run so far, including how its processes ended."""
    findings = tuple(findings)
    last_step = run.last_step
    if last_step is None:
        return judge(findings, last_step=0, steps=0, live=run.is_live)
    counted = metric_of_every_step(run)
    steps = read = last_step + 1
    if counted is not None:
        numbers = run.times(counted)[0]
        made = numbers if len(numbers) and numbers[-1] == last_step else np.append(numbers, last_step)
        steps, read = steps_spanned(run, made), len(numbers)
    verdict = judge(findings, last_step=last_step, steps=steps, read=read, live=run.is_live)
    if state_of(run) == "stopped" and stop_of(verdict.ranked) is None:  # otherwise a finding explains it
        verdict = judge((*findings, interruption(run, last_step)), last_step=last_step, steps=steps, read=read)
    more, known = [describe_restarts(restarts(run))], run.metrics("values")
    if read < EARLY_STEPS and not verdict.ranked and not run.is_live:
        seen = []
        for metric, name in (("loss", "loss"), ("grad/norm", "gradient norm")):
            if metric in known and len(values := run.series(metric)[1]) > 1:
                seen.append(f"{name} {number(float(values[0]))} to {number(float(values[-1]))}")
        more.append(f"So far: {', '.join(seen)}." if seen else "")
    if "loss" not in known:
        ignored = next((finding for finding in findings if finding.id == "observe_ignored"), None)
        no_loss = NO_LOSS_IMPORTED if "imported" in run.meta else NO_LOSS
        more.append(no_loss if ignored is None else f"No loss was recorded: {ignored.title}.")
    remarks = " ".join(filter(None, more))
    return replace(verdict, headline=f"{verdict.headline} {remarks}".rstrip(), remarks=remarks)


def closing_lines(runs: Mapping[Path, str]) -> Iterator[str]:
    """Yields what to print when training is over: the verdict on each run, and where to read more."""
    details = []
    for path, model in runs.items():
        with open_run(path) as run:
            verdict = judge_run(run, diagnose_run(run).findings)
        yield f"{clean(model)} ({relative(path)}): {verdict.headline}" if len(runs) > 1 else verdict.headline
        yield from (f"{label.lower()}: {clean(text)}" for label, text in verdict.remedy.items())
        counted = f"{clean(verdict.counted)}; " if verdict.counted else ""
        details.append(f"{counted}details: gradvitals doctor {relative(path)}")
    yield from details
