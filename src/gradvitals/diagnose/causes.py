"""Which finding is a consequence of which: of several that one mistake makes, only the root has a fix of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradvitals.diagnose.rule import RULES
from gradvitals.types import Finding


def link_to_roots(findings: list[Finding], changed: Sequence[Finding], last_seen: Mapping[str, int]) -> list[Finding]:
    """Make findings that are consequences of another point to it, in place.

    Args:
        findings: All of a run.
        changed: Those that opened, changed or closed at this step.
        last_seen: The last step that showed each open finding, by rule id.

    Returns:
        What has changed, including findings that now point to a root.
    """
    present: dict[str, list[Finding]] = {}
    for finding in findings:
        present.setdefault(finding.id, []).append(finding)
    news = {id(finding) for finding in changed}
    reported: list[Finding] = []
    for place, finding in enumerate(findings):
        rule = RULES.get(finding.id)
        roots = (root for name in (rule.follows if rule else ()) for root in present.get(name, ()))
        root = next((root for root in roots if _is_consequence(finding, root, last_seen)), None)
        if root is not None:
            findings[place] = _linked(finding, root)
        if id(finding) in news or findings[place] != finding:
            reported.append(findings[place])
    return reported


def _is_consequence(finding: Finding, root: Finding, last_seen: Mapping[str, int]) -> bool:
    found = finding.first_step if finding.found_step is None else finding.found_step
    ended = last_seen.get(root.id) if root.last_step is None else root.last_step
    in_time = found >= root.first_step and (ended is None or finding.first_step <= ended)
    return in_time and (not RULES[finding.id].follows_if_later or finding.first_step > root.first_step)


def _linked(finding: Finding, root: Finding) -> Finding:
    own = finding.causes if finding.follows is None else finding.causes[1:]
    fix = f": {root.fixes[0]}" if root.fixes else ""
    return replace(
        finding,
        follows=root.id,
        causes=(f"Consequence of {root.id}: {root.title.partition(':')[0]}", *own),
        fixes=(f"Fix {root.id} first{fix}",),
    )
