"""The catalog of findings, built from the rules and their texts: for the terminal, JSON and the docs' page per rule."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any

from gradvitals.diagnose import FAMILIES, RULES, Rule
from gradvitals.diagnose.rule import NEVER
from gradvitals.errors import GradvitalsError
from gradvitals.notices import NOTICES
from gradvitals.types import SEVERITIES, Severity

PLACEHOLDER = re.compile(r"\{(\w+)[^{}]*\}")
OTHERS = "others"
"""Family of rules that users registered."""
NOTICE = "Notices"
"""Family of findings that no rule makes."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One threshold of a rule."""

    name: str
    default: Any
    text: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Everything there is to know about one kind of finding."""

    id: str
    family: str
    name: str
    pattern: str
    """When it fires."""
    causes: tuple[str, ...] = ()
    """Likely causes, the commonest first."""
    fixes: tuple[str, ...] = ()
    """Fixes, the first to try first."""
    severities: tuple[Severity, ...] = ()
    """Those that the rule's source names."""
    passed: str = ""
    """The statement that holds if the check passed."""
    reference: str = ""
    needs: tuple[str, ...] = ()
    min_steps: int = 0
    closes_after: int = 0
    settings: tuple[Setting, ...] = ()
    default: bool = True
    """Whether the rule is on by default."""

    @property
    def conditions(self) -> str:
        """Severity, the data it needs, and from when on it looks, in a few sentences."""
        severity = f"Severity: {_listed(self.severities, 'or')}. " if self.severities else ""
        if self.family == NOTICE:
            return f"{severity}Not found by a rule: gradvitals reports it when it happens."
        start = f" Silent for the first {self.min_steps:,} steps." if self.min_steps else ""
        end = f" Resolves after {self.closes_after:,} clean step{'' if self.closes_after == 1 else 's'}."
        end = end if self.closes_after < NEVER else " Stays open until the run ends."
        parts = (needed.split(":") for needed in self.needs)
        needs = _listed((f"`{metric}`" + "".join(f" of {part}" for part in of) for *of, metric in parts), "and")
        return f"{severity}Needs {needs}.{start}{end}"

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as plain JSON values."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**own, "settings": {s.name: {"default": s.default, "text": s.text} for s in self.settings}}


def entries() -> list[Entry]:
    """Returns every registered rule, family by family."""
    order = [*FAMILIES, OTHERS]
    return sorted((entry(name) for name in RULES), key=lambda found: order.index(found.family))


def entry(name: str) -> Entry:
    """Returns the entry of a rule or notice.

    Raises:
        GradvitalsError: If there is no such id.
    """
    if name in NOTICES:
        notice = NOTICES[name]
        texts = {part: getattr(notice, part) for part in ("name", "severities", "pattern", "causes", "fixes")}
        return Entry(id=name, family=NOTICE, **texts)
    if name not in RULES:
        known = [*RULES, *NOTICES]
        asked = name.lower().replace(" ", "_").replace("-", "_")
        close = [other for other in known if asked in other] or get_close_matches(asked, known)
        meant = f"; did you mean {' or '.join(close[:3])}?" if close else ""
        raise GradvitalsError(
            f"there is no rule {name!r}{meant}; `gradvitals doctor --rules` lists all rules; other findings: "
            f"{', '.join(NOTICES)}"
        )
    rule = RULES[name]
    words = rule.message
    return Entry(
        id=name,
        family=rule.family,
        name=words.name if words else name,
        pattern=without_numbers(words.pattern if words else inspect.getdoc(rule) or ""),
        causes=tuple(map(without_numbers, words.causes.values())) if words else (),
        fixes=tuple(without_numbers(fix) for fix in words.fixes.values()) if words else (),
        severities=_severities(rule),
        passed=words.passed if words else "",
        reference=words.reference if words else "",
        needs=rule.needs,
        min_steps=rule.min_steps,
        closes_after=rule.closes_after,
        settings=_settings(rule),
        default=rule.default,
    )


def name_of(finding_id: str) -> str:
    """Returns the name of a kind of finding; the id itself if it has none."""
    if finding_id in NOTICES:
        return NOTICES[finding_id].name
    message = RULES[finding_id].message if finding_id in RULES else None
    return finding_id if message is None else message.name


def passed_text(rule: str) -> str:
    """Returns what holds if the check of a rule passed."""
    message = RULES[rule].message
    return (message.passed if message else "") or f"no sign of: {name_of(rule)}"


NAMED = {
    "first": "the tensor", "where": "the tensors", "layer": "that layer", "who": "one rank", "what": "values",
    "unread": "The steps before it were", "known_loss": "", "before": "", "instead": "",
    "activation": "bounded activation", "given": "something else", "noise": "the noise scale", "dtype": "adjacent",
    "twin": "M",
}  # fmt: skip
"""Placeholders in texts, each with the words that stand for it if there is no run."""
LOSS_FUNCTION = re.compile(r"\{loss\}(?= (?:applies|expects))|(?<=before )\{loss\}")
ASIDE = re.compile(r" \((?!\{)[^()]*\{\w+[^{}]*\}[^()]*\)")
SETTINGS = r"\{(?:lr|max_norm|limit|clips_at|weight_decay|decay_|momentum|dropout|peak_lr)\w*\}"
CHANGE = re.compile(
    r"\b([Tt]he (?:learning rate|weight decay|limit)(?: back)?|momentum|dropout)"
    rf"(?: (?:of|from|to about|to) {SETTINGS})+"
)
"""Phrases that only name numbers of a run."""


def without_numbers(text: str) -> str:
    """Returns a text of a rule about no run in particular: settings without their values, and N for other numbers.

    >>> without_numbers("Lower the learning rate from {lr} to about {lr_proposed}")
    'Lower the learning rate'
    >>> without_numbers("Restore a checkpoint from before step {safe}; reset {first}")
    'Restore a checkpoint from before step N; reset the tensor'
    """
    text = LOSS_FUNCTION.sub("the loss", CHANGE.sub(r"\1", ASIDE.sub("", text)))
    text = PLACEHOLDER.sub(lambda match: NAMED.get(match[1], "N%" if match[0].endswith(":%}") else "N"), text)
    is_code = text.startswith(("optimizer.", "requires_grad", "zero_grad", "nll_loss"))
    return text if is_code else text[:1].upper() + text[1:]


def _listed(words: Iterable[str], last: str) -> str:
    *head, tail = words
    return f"{', '.join(head)} {last} {tail}" if head else tail


# -- read from the source of a rule ------------------------------------------------------------------------------


def _settings(rule: type[Rule]) -> tuple[Setting, ...]:
    texts: dict[str, str] = {}
    for above, below in (pair for base in reversed(rule.__mro__) for pair in pairwise(_body(base))):
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value  # the string under a field, which Python keeps in the source alone
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[above.target.id] = " ".join(value.value.split())
    chosen = (f for f in fields(rule) if f.init)  # type: ignore[arg-type]
    found = []
    for f in chosen:
        default = getattr(rule, f.name, None) if f.default_factory is MISSING else f.default_factory()
        found.append(Setting(name=f.name, default=default, text=texts.get(f.name, "")))
    return tuple(found)


def _severities(rule: type[Rule]) -> tuple[Severity, ...]:
    named: set[object] = set()
    for base in rule.__mro__:
        if issubclass(base, Rule) and base is not Rule:
            body = _body(base)  # type: ignore[arg-type]  # a class has a hash, whatever its instances have
            named |= {node.value for part in body for node in ast.walk(part) if isinstance(node, ast.Constant)}
    return tuple(severity for severity in SEVERITIES if severity in named)


@cache
def _body(cls: type) -> list[ast.stmt]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # defined at a prompt, or built in
        return []
    found = tree.body[0]
    return found.body if isinstance(found, ast.ClassDef) else []
