"""The report on a run: one model of verdict, checks, caveats and summary, which every renderer reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from gradvitals.diagnose import RULES
from gradvitals.report.catalog import name_of, passed_text
from gradvitals.report.caveats import NOISE_RULES, adam_memory, layers_without_signal, negative_gsnr_in, silent_rules
from gradvitals.report.format import plural
from gradvitals.report.replay import Diagnosed, OnStep, diagnose_run, recorded_settings, was_diagnosed
from gradvitals.report.state import metric_of_every_step, num_ranks, restarts, state_of
from gradvitals.report.summary import Summary, step_batch, summarize
from gradvitals.report.verdict import Verdict, judge_run, self_reports
from gradvitals.store.blocks import KINDS
from gradvitals.store.reader import Run
from gradvitals.types import SOURCES, Action, Finding

MISSING = {
    "loss": "no loss: call monitor.observe(loss) after backward",
    "lr": "no learning rate",
    "gsnr": "no GSNR, which needs two or more backward passes per step, or an Adam-like optimizer",
    "noise_scale": "no noise scale, which needs two or more backward passes per step, and watch(..., batch_size=...)",
    "clip/max_norm": "the loop does not clip gradients by norm",
    "step/skipped": "the loop has no GradScaler",
    "step/left_out": "no Guard skipped a step",
    "vrgd/mean": "the optimizer is not in the VRGD family",
}
"""Why a metric may be missing, and what to do about it."""
MISSING_FROM = {
    "microbatch": "no micro-batches, which need gradient accumulation (two or more backward passes per step)",
    "ranks": "only one rank",
    "adam": "the optimizer keeps no Adam-like moments",
    "window": "no embedding or output head to follow",
    "heads": "no attention heads found; set them with Config.heads",
    "tensors": "no readings of single tensors",
}
"""The same for a source of samples, or a kind of row, that a rule needs a metric of."""
MISSING_RANKS = {
    "ranks/norm_dispersion": "the gradients of single ranks are not available, or Config.audit_every is None",
    "ranks/checksum_mismatch": "no copies to compare: each shard of the weights is on one rank only",
    "ranks/out_of_step": "ranks have not been compared yet, or Config.audit_every is None",
}
"""Why a comparison may be missing in a run of several ranks."""
HEADS_UNREAD = "no GSNR of attention heads, which needs two or more backward passes per step"
NO_PASSES = "no noise scale, which needs two or more backward passes per step, or several ranks"
NEVER_A_GSNR = "these readings do not determine a GSNR"

PROPOSALS = {
    "lr_proposed", "lr_lower", "lr_tenth", "max_norm", "proposed", "batch_proposed", "warmup", "needed", "enough",
    "scale",
}  # fmt: skip
"""Numbers that a rule computes for its fixes, next to what it observed."""

NONFINITE = ("nonfinite", "loss_nonfinite")
"""While one of these is open, other rules have nothing to look at."""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """The result of every rule, besides the findings."""

    passed: Mapping[str, str]
    """Statements that hold, by the id of the rule that checked and found nothing."""
    skipped: Mapping[str, Sequence[str]]
    """Ids of the rules that could not look, by the reason."""
    until: int | None
    """The last step before NaN or Inf came to stay, up to which checks passed; None if that is the end."""

    @property
    def num_skipped(self) -> int:
        """Number of checks that were skipped."""
        return sum(map(len, self.skipped.values()))

    @property
    def skipped_lines(self) -> list[str]:
        """Each reason with the names of the rules that it kept from looking."""
        return [f"{reason} ({', '.join(map(name_of, ids))})" for reason, ids in self.skipped.items()]

    @property
    def counted(self) -> str:
        """The numbers of checks that passed and were skipped, in words."""
        until = "" if self.until is None or not self.passed else f" up to step {self.until:,}"
        return f"{plural(len(self.passed), 'check')} passed{until}, {self.num_skipped} skipped"

    @property
    def passed_title(self) -> str:
        """The heading of the list of passed checks."""
        if self.until is not None:
            return f"Checks passed up to step {self.until:,}, before NaN or Inf"
        return "Checks passed"


class Report:
    """Everything there is to report about a run. Each part is computed when it is first used.

    Args:
        run: The run, which has to stay open meanwhile.
        again: Replay the readings with the current rules, whatever was found when they were recorded.
        on_step: Called for each step that is replayed.
    """

    def __init__(self, run: Run, *, again: bool = False, on_step: OnStep | None = None) -> None:
        self.run = run
        self.again = again
        self._on_step = on_step

    @cached_property
    def diagnosed(self) -> Diagnosed:
        """The findings, recorded or replayed. Raises RunError if the run has no readings."""
        return diagnose_run(self.run, again=self.again, on_step=self._on_step)

    @cached_property
    def _judged(self) -> Verdict:
        return judge_run(self.run, self.diagnosed.findings)

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict, with the checks that passed and those that were skipped."""
        skipped = tuple(name for ids in self.checks.skipped.values() for name in ids)
        return replace(self._judged, checks_passed=tuple(self.checks.passed), checks_skipped=skipped)

    @cached_property
    def checks(self) -> Checks:
        """The checks that passed and those that were skipped."""
        return _checks(self.run, self._judged, self.diagnosed.failed)

    @cached_property
    def caveat(self) -> str:
        """Why the GSNR in a finding, or at the end, must not be taken at face value; empty if it can be."""
        return adam_memory(self.run) or negative_gsnr_in(self._judged.ranked)

    @cached_property
    def summary(self) -> Summary:
        """The numbers of the run."""
        return summarize(self.run)

    @cached_property
    def monitoring(self) -> tuple[Finding, ...]:
        """Findings about gradvitals itself."""
        return self_reports(self.run.findings)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """Actions that a Guard or a schedule took or proposed."""
        return tuple(self.run.actions)

    @cached_property
    def recorded_verdict(self) -> Verdict:
        """The verdict by the findings recorded with the run, without a replay and without checks."""
        return judge_run(self.run, self.run.findings)

    def to_json(self) -> dict[str, Any]:
        """Returns what `gradvitals doctor --json` prints: plain values except for NaN, which the printer handles."""
        return {
            "run": str(self.run.path),
            "replayed": bool(self.diagnosed.replayed),
            "state": state_of(self.run),
            "restarts": [asdict(restart) for restart in restarts(self.run)],
            "passed": [{"id": name, "text": text} for name, text in self.checks.passed.items()],
            "passed_until": self.checks.until,
            "skipped": [{"reason": reason, "ids": ids} for reason, ids in self.checks.skipped.items()],
            "gsnr_caveat": self.caveat,
            **self._findings_json(self.verdict),
        }

    def summary_json(self) -> dict[str, Any]:
        """Returns what `gradvitals report --json` prints: the numbers, and the findings as they were recorded."""
        own = {**self.summary.to_json(), "diagnosed": was_diagnosed(self.run.meta)}
        return {**own, **self._findings_json(self.recorded_verdict)}

    def _findings_json(self, verdict: Verdict) -> dict[str, Any]:
        findings = [item.to_json() for item in verdict.ranked]
        for finding in findings:  # what was observed, without the proposals that fixes are filled with
            finding["evidence"] = {
                name: {key: part for key, part in value.items() if key not in PROPOSALS}
                if isinstance(value, Mapping)
                else value
                for name, value in finding["evidence"].items()
            }
        return {
            "verdict": verdict.to_json(),
            "findings": findings,
            "monitoring": [finding.to_json() for finding in self.monitoring],
            "actions": [action.to_json() for action in self.actions],
        }


def _checks(run: Run, verdict: Verdict, failed: frozenset[str]) -> Checks:
    settings, steps = recorded_settings(run.meta), verdict.read
    losses = len(run.times("loss")[0]) if "loss" in run.metrics("values") else 0
    lost = [item for item in verdict.ranked if item.finding.id in NONFINITE and item.is_open]
    ends = (item.finding.first_step - 1 - item.unread_before for item in lost if item.finding.severity == "critical")
    until = min(ends, default=None)
    counted = metric_of_every_step(run)
    if until is not None and counted is not None:  # a run need not start with step 0
        steps = losses = int(np.count_nonzero(run.times(counted)[0] <= until))
    before = "" if until is None else " before NaN or Inf"
    found = {finding.id for finding in verdict.findings}
    contradicted = {name for finding in found if finding in RULES for name in RULES[finding].masks}
    why_missing = cache(partial(_why_missing, run))
    silent = cache(partial(silent_rules, run))
    passed: dict[str, str] = {}
    skipped: dict[str, list[str]] = {}
    for name, rule in RULES.items():
        if name in found or not (rule.default or settings.get(name, False) is not False):
            continue
        least = max(rule.min_steps, rule.judges_after)
        if settings.get(name) is False:
            reason = "turned off in Config.rules"
        elif failed & {name, "diagnosis"}:
            reason = "the rule raised an error"
        elif rule.expects_fall and "step/in_turn" in run.metrics("values"):
            reason = "the model alternates with another one, as in a GAN, so its loss does not have to fall"
        elif lacking := next(filter(None, map(why_missing, rule.needs)), ""):
            reason = lacking
        elif until is not None and steps <= 0:
            reason = "no step was finite"
        elif (losses if set(rule.needs) <= {"loss"} else steps) <= least:
            what = "steps" if steps >= losses else "steps whose gradients were read"
            reason = f"too early: needs more than {least:,} {what}{before}"
        else:
            reason = silent().get(name, "") if name in NOISE_RULES else ""
        if reason:
            skipped.setdefault(reason, []).append(name)
        elif name not in contradicted:
            more = layers_without_signal(run) if name == "estimator_unreliable" else ""
            passed[name] = passed_text(name) + more
    return Checks(passed=passed, skipped=skipped, until=until)


def _why_missing(run: Run, needed: str) -> str:
    """Returns why a rule that needs this metric cannot look; empty if it can.

    A rule needs a metric, or a metric of one source or kind of row: ``microbatch:gsnr``, ``heads:gsnr``.
    """
    *of, metric = needed.split(":")
    kinds = [kind for kind in KINDS if kind in of]
    # GSNR and noise scale count if the whole model has them; those of single tensors decide little.
    kind = kinds[0] if kinds else "values" if metric in ("gsnr", "noise_scale") else None
    recorded = run.sources(metric, kind)
    sources = [source for source in recorded if source in SOURCES]
    retired = bool(recorded) and not sources  # measured by an older version; no rule uses it
    if "ranks" in sources:  # samples at one set of weights, as micro-batches are
        of = ["ranks" if part == "microbatch" and part not in sources else part for part in of]
    if retired or metric not in run.metrics(kind):
        if num_ranks(run.meta) > 1 and metric in MISSING_RANKS:
            return MISSING_RANKS[metric]
        if kind == "heads" and run.layout.heads:
            return HEADS_UNREAD
        if metric == "noise_scale" and step_batch(run) is not None:
            return NO_PASSES
        reasons = (MISSING_FROM.get(part, "") for part in (*of, metric.partition("/")[0]))
        return next(filter(None, reasons), MISSING.get(metric, f"{metric} was not measured"))
    missing = next((part for part in of if part in SOURCES and part not in sources), None)
    if missing is not None:
        return MISSING_FROM.get(missing, f"{metric} has no source {missing}")
    if metric == "gsnr" and kind == "values":
        asked: Sequence[str | None] = [source for source in sources if source in of] or sources or [None]
        if not any(np.isfinite(run.series("gsnr", source=source)[1]).any() for source in asked):
            return NEVER_A_GSNR
    return ""
