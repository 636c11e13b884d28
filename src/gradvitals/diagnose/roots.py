"""Which finding follows from which: of several that one mistake makes, only the root has a cure of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradvitals.types import Finding

FROM_THE_RATE = (
    "loss_rising",
    "loss_spike",
    "loss_plateau",
    "explosion",
    "oscillation",
    "unstable_norm",
    "update_ratio",
    "update_spike",
    "warmup_needed",
    "high_effort_low_progress",
    "noisy_gradients",
    "clip_saturated",
    "decay_due",
    "dead_tensor",
    "vanishing",
)
"""What steps that are too long make, whatever has made them so."""

FOLLOWS: dict[str, tuple[str, ...]] = {
    "stale_gradients": ("lr_too_high", "batch_too_large", "batch_too_small", *FROM_THE_RATE),
    "lr_too_high": FROM_THE_RATE,
    "loss_nonfinite": ("nonfinite",),
    "nonfinite": ("loss_nonfinite",),
}
"""By root, the deepest first: what follows from it, where it is found while the root goes on."""

POINTS = "this follows from "

BEGAN_LATER = ("dead_tensor", "vanishing", "loss_nonfinite")
"""These follow only where they began after the root: a layer that never had a gradient has another reason, and a loss
is computed before its gradient."""


def traced(findings: list[Finding], changed: Sequence[Finding], last_seen: Mapping[str, int]) -> list[Finding]:
    """Have findings that follow from another point to it, in place.

    Args:
        findings: All of a run.
        changed: Those of this step that opened, changed or closed.
        last_seen: Of rules whose findings are open, the last step that showed them.

    Returns:
        What has changed, with those that now point elsewhere.
    """
    roots = [root for name in FOLLOWS for root in findings if root.id == name]
    if not roots:
        return list(changed)
    news = {id(finding) for finding in changed}
    told: list[Finding] = []
    for place, finding in enumerate(findings):
        root = next((root for root in roots if _follows(finding, root, last_seen)), None)
        findings[place] = finding if root is None else _pointed(finding, root)
        if id(finding) in news or findings[place] != finding:
            told.append(findings[place])
    return told


def root_of(finding: Finding) -> str:
    """The id of what a finding follows from; empty where it stands for itself."""
    return str(finding.evidence.get("follows", ""))


def _follows(finding: Finding, root: Finding, last_seen: Mapping[str, int]) -> bool:
    if finding.id not in FOLLOWS[root.id]:
        return False
    found = finding.first_step if finding.found_step is None else finding.found_step
    ended = last_seen.get(root.id) if root.last_step is None else root.last_step
    in_time = found >= root.first_step and (ended is None or finding.first_step <= ended)
    return in_time and (finding.id not in BEGAN_LATER or finding.first_step > root.first_step)


def _pointed(finding: Finding, root: Finding) -> Finding:
    cure = root.cures[0] if root.cures else "look at it first"
    own = [cause for cause in finding.causes if not cause.startswith(POINTS)]
    return replace(
        finding,
        evidence={**finding.evidence, "follows": root.id},
        causes=(f"{POINTS}{root.id}: {root.title.partition(':')[0]}", *own),
        cures=(f"as for {root.id}: {cure}",),
    )
