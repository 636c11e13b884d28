"""What `gradvitals doctor` has to say about a run: the verdict, findings, what is fine, what was not judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradvitals.advise.record import steps_spanned
from gradvitals.diagnose import RULES, Rule
from gradvitals.errors import RunError
from gradvitals.show.adam_memory import doubt_of_adam
from gradvitals.show.again import OnStep, diagnose_again, recorded_settings, was_diagnosed
from gradvitals.show.below_zero import about_findings
from gradvitals.show.doubts import JUDGED_BY_NOISE, TOO_EARLY, doubts_of, layers_untold
from gradvitals.show.ending import Restart, State, about_restarts, is_cut_off, restarts, run_cut_off, state_of
from gradvitals.show.verdict import Verdict, about_itself, judge, name_of, stop_of, unread_before
from gradvitals.store.frames import KINDS
from gradvitals.store.reader import Run
from gradvitals.types import SOURCES, Action, Finding

MISSING = {
    "loss": "no loss was observed: call monitor.observe(loss) after backward",
    "lr": "no learning rate was read",
    "gsnr": "no GSNR was measured: it needs two or more backward passes a step, or an Adam-like optimizer",
    "noise_scale": "no noise scale: it needs two or more backward passes a step, and watch(..., batch_size=...)",
    "clip/max_norm": "the loop does not clip gradients by norm",
    "step/skipped": "the loop has no GradScaler",
    "step/left_out": "no Guard left a step out",
    "vrgd/mean": "the optimizer is none of the VRGD family",
}
"""Why a metric may not be there, and what to do about it."""

NO_LOSS = (
    "No loss was observed, so nothing about it was judged: in a loop of one's own, call observe(loss), after backward, "
    "on what gv.watch() returns."
)
NO_LOSS_IMPORTED = "No loss was imported, so nothing about it was judged: --map COLUMN=loss says which column it is."

NOT_FINITE = ("nonfinite", "loss_nonfinite")
"""Findings after which, while they go on, other rules have nothing to look at."""
NONE_FINITE = "no step was finite"

NEVER_A_GSNR = "GSNR could not be told from these readings"
"""What is said where it was read and was never a number."""

UNMEASURED = " was not measured"
"""How one ends where there is no more to say about a metric."""

NO_RANKS = "no workers to compare: it takes several processes"

HEADS_UNREAD = "no GSNR of single attention heads was measured: it needs two or more backward passes a step"
ONLY_EXAMPLES = (
    "only norm layers' single examples tell it, which no rule goes by: it needs two or more backward passes a step"
)
NO_PASSES = "no noise scale: it needs two or more backward passes a step, or several workers"

RANKS_LACK = {
    "ranks/norm_dispersion": "the ranks' own gradients could not be told apart here, or Config.audit_every is None",
    "ranks/checksum_mismatch": "there are no copies to compare: each shard of the weights is on one rank alone",
    "ranks/out_of_step": "the ranks have not been compared yet, or Config.audit_every is None",
}
"""Why a comparison may be missing where there are several ranks."""

MISSING_FROM = {
    "microbatch": "no micro-batches: it needs gradient accumulation, two or more backward passes a step",
    "ranks": NO_RANKS,
    "adam": "the optimizer keeps no averages of the kind Adam keeps",
    "window": "no embedding or output head was followed",
    "heads": "no attention heads were found: Config.heads sets them",
    "tensors": "nothing was read of single tensors",
}
"""The same for a source of samples, or a kind of row, that a rule needs a metric of."""


@dataclass(frozen=True, kw_only=True)
class Fine:
    """A pattern that was looked for and not found."""

    id: str
    text: str


@dataclass(frozen=True, kw_only=True)
class NotJudged:
    """Patterns that could not be looked for, and why."""

    reason: str
    ids: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The patterns in words."""
        return tuple(name_of(rule) for rule in self.ids)


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """Everything `gradvitals doctor` has to say."""

    run: str
    replayed: str
    """Why the run was judged again by the rules of today; empty where the findings are those kept with it."""
    verdict: Verdict
    fine: tuple[Fine, ...]
    fine_until: int | None
    """The last step before NaN or Inf came to stay, up to which it is fine; None where it is to the end."""
    not_judged: tuple[NotJudged, ...]
    gsnr_doubt: str
    """Why the GSNR is not to be taken as it stands, at the end or in a finding; empty where it is, or is not read."""
    monitoring: tuple[Finding, ...]
    """What gradvitals says about itself."""
    actions: tuple[Action, ...]
    """What a Guard or a schedule did, or would have done."""
    state: State
    """Whether the run goes on, was closed, or ended without being closed."""
    restarts: tuple[Restart, ...]
    """Each time another process went on with it."""

    @property
    def fine_title(self) -> str:
        """What stands over the list of what is fine."""
        if self.fine_until is not None:
            return f"What is fine up to step {self.fine_until:,}, before NaN or Inf"
        return "What is fine" if self.verdict.level == "healthy" else "What is fine otherwise"

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values but for NaN, which the printer deals with."""
        return {
            "run": self.run,
            "replayed": bool(self.replayed),
            "state": self.state,
            "restarts": [restart.to_json() for restart in self.restarts],
            "verdict": self.verdict.to_json(),
            "findings": [item.to_json() for item in self.verdict.findings],
            "fine": [{"id": item.id, "text": item.text} for item in self.fine],
            "fine_until": self.fine_until,
            "not_judged": [{"reason": item.reason, "ids": list(item.ids)} for item in self.not_judged],
            "gsnr_doubt": self.gsnr_doubt,
            "monitoring": [finding.to_json() for finding in self.monitoring],
            "actions": [action.to_json() for action in self.actions],
        }


def examine(run: Run, *, again: bool = False, on_step: OnStep | None = None) -> Checkup:
    """Judge a run, by the findings kept with it or, where there were none to keep, by its readings.

    Args:
        run: The run.
        again: Judge the readings by the rules of today, whatever was found when they were recorded.
        on_step: Called for each step that is judged again.

    Raises:
        RunError: If the run has no readings, so that there is nothing to judge.
    """
    kept = run.findings()
    replayed, found, failed = _found(run, kept, again=again, on_step=on_step)
    verdict = judge_run(run, found)
    until = _finite_until(verdict)
    fine, not_judged = _looked_for(_Record(run, verdict.read, until), verdict, recorded_settings(run.meta), failed)
    return Checkup(
        run=str(run.path),
        replayed=replayed,
        verdict=verdict,
        fine=fine,
        fine_until=until,
        not_judged=not_judged,
        gsnr_doubt=doubt_of_adam(run) or about_findings(verdict.findings),
        monitoring=about_itself(kept),
        actions=tuple(run.actions()),
        state=state_of(run),
        restarts=restarts(run),
    )


def verdict_on(run: Run) -> Verdict:
    """The verdict that `examine` comes to, without what is fine beside it, which takes longer in a long run."""
    return judge_run(run, _found(run, run.findings())[1])


def _found(
    run: Run, kept: Sequence[Finding], *, again: bool = False, on_step: OnStep | None = None
) -> tuple[str, Sequence[Finding], set[str]]:
    """Why a run was judged again, if it was; what was found; and the rules that ended in an error."""
    if run.last_step is None:
        raise RunError(f"{run.path} has no readings yet; there is nothing to judge")
    unseen = "" if was_diagnosed(run.meta) else "it was recorded without diagnosis"
    replayed = "as asked" if again else "it was imported" if "imported" in run.meta else unseen
    if not replayed:
        return "", kept, {str(finding.evidence.get("about")) for finding in kept if finding.id == "monitor_error"}
    result = diagnose_again(run, on_step)
    told = [finding for finding in kept if finding.id not in RULES]  # which no reading shows: how it ended
    return replayed, (*told, *result.findings), set(result.failed)


def judge_run(run: Run, findings: Iterable[Finding]) -> Verdict:
    """The verdict on a run as far as it has come, and on how its processes ended."""
    findings = tuple(findings)
    last_step = run.last_step
    if last_step is None:
        return judge(findings, last_step=0, steps=0, live=run.is_live)
    values = run.metrics("values")
    counted = _read_every_step(run)
    steps = read = last_step + 1
    if counted is not None:
        numbers = run.times(counted)[0]
        made = numbers if len(numbers) and numbers[-1] == last_step else np.append(numbers, last_step)
        steps, read = steps_spanned(run, made), len(numbers)
    verdict = judge(findings, last_step=last_step, steps=steps, read=read, live=run.is_live)
    if is_cut_off(run) and stop_of(verdict.findings) is None:  # else it is known why
        verdict = judge((*findings, run_cut_off(run, last_step)), last_step=last_step, steps=steps, read=read)
    more = [again] if (again := about_restarts(restarts(run))) else []
    unheard = next((finding for finding in findings if finding.id == "observe_ignored"), None)
    if unheard is not None and "loss" not in values:  # what judges the loss, most of all, cannot say anything
        more.append(f"No loss was heard: {unheard.title}.")
    elif "loss" not in values:
        more.append(NO_LOSS_IMPORTED if "imported" in run.meta else NO_LOSS)
    return replace(verdict, line=" ".join((verdict.line, *more)))


def _finite_until(verdict: Verdict) -> int | None:
    """The last step before loss or gradients stopped being finite for good; None where they did not."""
    lost = [item.finding for item in verdict.findings if item.finding.id in NOT_FINITE and item.clear is None]
    known = (finding.first_step - 1 - unread_before(finding) for finding in lost if finding.severity == "critical")
    return min(known, default=None)


def _read_every_step(run: Run) -> str | None:
    """A metric that every step has; None where there is none."""
    values = run.metrics("values")
    return next((metric for metric in ("grad/norm", "loss") if metric in values), None)


def _steps_until(run: Run, steps: int, until: int) -> int:
    """How many steps were recorded up to one: a run need not begin with step 0."""
    counted = _read_every_step(run)
    return steps if counted is None else int(np.count_nonzero(run.times(counted)[0] <= until))


def num_ranks(meta: Mapping[str, Any]) -> int:
    """Processes that the run was recorded with."""
    count = meta.get("ranks", 1)
    return count if isinstance(count, int) and count > 0 else 1


def knows_batch(run: Run) -> bool:
    """Whether the loop told how many samples a step has."""
    counted = _read_every_step(run)
    return counted is not None and bool(np.isfinite(run.batch_sizes(counted)[1]).any())


class _Record:
    """What a run has of each metric, looked up once."""

    def __init__(self, run: Run, steps: int, until: int | None) -> None:
        self.steps = steps if until is None else _steps_until(run, steps, until)
        """Those that were read."""
        self.until = until
        self._run = run
        self._several_ranks = num_ranks(run.meta) > 1
        self._doubts: dict[str, str] | None = None
        self.is_game = "step/in_turn" in run.metrics("values")
        self._lacks: dict[str, str] = {}

    def lacks(self, metric: str) -> str:
        """Why a rule that needs this metric cannot judge; empty where it can."""
        if metric not in self._lacks:
            self._lacks[metric] = self._look(metric)
        return self._lacks[metric]

    def doubts(self, rule: str) -> str:
        """Why the silence of a rule proves nothing, where its metrics are there; empty where it does."""
        if rule not in JUDGED_BY_NOISE:
            return ""
        if self._doubts is None:
            self._doubts = doubts_of(self._run)
        return self._doubts.get(rule, "")

    def beside(self, rule: str) -> str:
        """What of single layers does not go with what is fine of the model; empty where all does."""
        return layers_untold(self._run) if rule == "estimator_unreliable" else ""

    def _look(self, needed: str) -> str:
        """A rule needs a metric, or a metric of one source or kind of row: ``microbatch:gsnr``, ``heads:gsnr``."""
        *of, metric = needed.split(":")
        kinds = [kind for kind in KINDS if kind in of]
        # GSNR and noise scale count where the whole model has them; of single tensors alone they judge little.
        kind = kinds[0] if kinds else "values" if metric in ("gsnr", "noise_scale") else None
        sources = [source for source in self._run.sources(metric, kind) if source != "examples"]
        if not sources and self._run.sources(metric, kind):
            return ONLY_EXAMPLES
        if "ranks" in sources:  # samples at one set of weights, as micro-batches are
            of = ["ranks" if part == "microbatch" and part not in sources else part for part in of]
        if metric not in self._run.metrics(kind):
            if self._several_ranks and metric in RANKS_LACK:
                return RANKS_LACK[metric]
            if kind == "heads" and self._run.layout.heads:
                return HEADS_UNREAD
            if metric == "noise_scale" and knows_batch(self._run):
                return NO_PASSES
            reasons = (MISSING_FROM.get(part, "") for part in (*of, metric.partition("/")[0]))
            return next(filter(None, reasons), MISSING.get(metric, f"{metric}{UNMEASURED}"))
        lacking = next((part for part in of if part in SOURCES and part not in sources), None)
        if lacking is not None:
            return MISSING_FROM.get(lacking, f"{metric} has no source {lacking}")
        if metric == "gsnr" and kind == "values" and not self._any_gsnr([x for x in sources if x in of] or sources):
            return NEVER_A_GSNR
        return ""

    def _any_gsnr(self, sources: Sequence[str | None]) -> bool:
        return any(np.isfinite(self._run.series("gsnr", source=name)[1]).any() for name in sources or (None,))


def _looked_for(
    record: _Record, verdict: Verdict, settings: Mapping[str, Any], failed: set[str]
) -> tuple[tuple[Fine, ...], tuple[NotJudged, ...]]:
    found = {item.finding.id for item in verdict.findings}
    belied = {name for finding in found if finding in RULES for name in RULES[finding].masks}
    fine: list[Fine] = []
    reasons: dict[str, list[str]] = {}
    for name, rule in RULES.items():
        if name in found or not (rule.default or settings.get(name, False) is not False):
            continue
        reason = _why_not(name, rule, record, settings, failed)
        if reason:
            reasons.setdefault(reason, []).append(name)
        elif name not in belied:
            text = rule.message.passed if rule.message else ""
            fine.append(Fine(id=name, text=(text or f"no sign of: {name_of(name)}") + record.beside(name)))
    return tuple(fine), tuple(NotJudged(reason=reason, ids=tuple(ids)) for reason, ids in reasons.items())


def _why_not(name: str, rule: type[Rule], record: _Record, settings: Mapping[str, Any], failed: set[str]) -> str:
    if settings.get(name) is False:
        return "turned off in Config.rules"
    if failed & {name, "diagnosis"}:
        return "ended in an error of its own"
    if rule.expects_fall and record.is_game:
        return "the model is trained in turn with another, as in a GAN, not to bring one loss down"
    lacking = next(filter(None, map(record.lacks, rule.needs)), "")
    least = max(rule.min_steps, rule.judges_after)
    if not lacking and record.until is not None and record.steps <= 0:
        return NONE_FINITE
    if not lacking and record.steps <= least:
        before = "" if record.until is None else " before NaN or Inf"
        return f"{TOO_EARLY}: it needs more than {least:,} steps{before}"
    return lacking or record.doubts(name)
