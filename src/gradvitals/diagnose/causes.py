"""Which finding is a consequence of which: of several that one mistake makes, only the root has a fix of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradvitals.diagnose.rule import RULES
from gradvitals.types import SEVERITIES, Finding, Fix


def link_to_roots(findings: list[Finding], changed: Sequence[Finding], last_seen: Mapping[str, int]) -> list[Finding]:
    """Make findings that are consequences of another point to it, in place.

    A symptom follows from what is wrong with the setup, if anything is, and else from what its rule names. A root
    that is open becomes as serious as the symptoms that confirm it.

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
    setup = [finding for name, some in present.items() if name in RULES and RULES[name].is_setup for finding in some]
    setup.sort(key=lambda finding: -SEVERITIES.index(finding.severity))
    before = list(findings)
    for place, finding in enumerate(findings):
        rule = RULES.get(finding.id)
        if rule is None:
            continue
        named = [root for name in rule.follows for root in present.get(name, ())]
        roots = [*(setup if rule.is_symptom else ()), *named]
        root = next((root for root in roots if _is_consequence(finding, root, last_seen)), None)
        if root is not None:
            findings[place] = _linked(finding, root)
            if root.last_step is None and SEVERITIES.index(finding.severity) > SEVERITIES.index(root.severity):
                confirmed = findings.index(root)
                findings[confirmed] = replace(root, severity=finding.severity)
                some = setup if root in setup else present[root.id]
                some[some.index(root)] = findings[confirmed]
    news = {id(finding) for finding in changed}
    return [now for then, now in zip(before, findings, strict=True) if id(then) in news or now != then]


def _is_consequence(finding: Finding, root: Finding, last_seen: Mapping[str, int]) -> bool:
    found = finding.first_step if finding.found_step is None else finding.found_step
    ended = last_seen.get(root.id) if root.last_step is None else root.last_step
    if RULES[root.id].is_setup:
        return root.last_step is None
    in_time = found >= root.first_step and (ended is None or finding.first_step <= ended)
    explained = not RULES[finding.id].follows_if_later or finding.id in RULES[root.id].masks
    return in_time and (explained or finding.first_step > root.first_step)


def _linked(finding: Finding, root: Finding) -> Finding:
    own = finding.causes if finding.follows is None else finding.causes[1:]
    first = root.fixes[0] if root.fixes else Fix("")
    text = f"Fix {root.id} first" + (f": {first}" if first else "")
    change, snippet = (first.change, first.snippet) if isinstance(first, Fix) else ({}, "")
    return replace(
        finding,
        follows=root.id,
        causes=(f"Consequence of {root.id}: {root.title.partition(':')[0]}", *own),
        fixes=(Fix(text, change, snippet),),
    )
