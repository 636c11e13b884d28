"""The catalogue of rules, made from the rules and their words: for the terminal, for JSON and for docs/findings.md."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any

from gradvitals.diagnose import FAMILIES, RULES, Message, Rule
from gradvitals.diagnose.rule import OTHERS
from gradvitals.errors import GradvitalsError
from gradvitals.show.notice_words import NOTICE_WORDS
from gradvitals.types import SEVERITIES, Severity

WIDTH = 120
BLANK = re.compile(r"\{(\w+)[^{}]*\}")
BLANKS = {"first": "tensor", "where": "tensors", "step": "step"}
NOTICES = "Notices"
"""The family of findings that no rule makes."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One threshold of a rule."""

    name: str
    default: Any
    text: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One rule, described."""

    id: str
    family: str
    words: Message
    needs: tuple[str, ...]
    min_steps: int
    closes_after: int
    severities: tuple[Severity, ...]
    """Those it can give a finding, as far as its source tells."""
    settings: tuple[Setting, ...]
    default: bool
    """Whether it judges without being asked to."""

    @property
    def pattern(self) -> str:
        """When it fires."""
        return _without_blanks(self.words.pattern)

    @property
    def causes(self) -> tuple[str, ...]:
        """Likely causes, the commonest first."""
        return tuple(map(_without_blanks, self.words.causes.values()))

    @property
    def fixes(self) -> tuple[str, ...]:
        """What to do, the first thing to try first."""
        return tuple(map(_without_blanks, self.words.fixes.values()))

    @property
    def decided(self) -> str:
        """How severe, on what data and from when on, in a few sentences."""
        severity = f"Severity: {_listed(self.severities, 'or')}. " if self.severities else ""
        if self.family == NOTICES:
            return f"{severity}Not judged by a rule: gradvitals says it when it happens."
        start = f" Silent for the first {self.min_steps:,} steps." if self.min_steps else ""
        over = f" Over after {self.closes_after:,} step{'' if self.closes_after == 1 else 's'} without a sign."
        return f"{severity}Needs {_listed(map(_metric, self.needs), 'and')}.{start}{over}"

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {
            "id": self.id,
            "name": self.words.name,
            "family": self.family,
            "pattern": self.pattern,
            "default": self.default,
            "severities": list(self.severities),
            "needs": list(self.needs),
            "min_steps": self.min_steps,
            "closes_after": self.closes_after,
            "settings": {s.name: {"default": s.default, "text": s.text} for s in self.settings},
            "causes": list(self.causes),
            "fixes": list(self.fixes),
            "fine": self.words.passed,
            "reference": self.words.reference,
        }


def entries() -> list[Entry]:
    """Every registered rule, family by family."""
    order = [*FAMILIES, OTHERS]
    return sorted((entry(name) for name in RULES), key=lambda found: order.index(found.family))


def entry(name: str) -> Entry:
    """What there is to say about a finding of this id: by a rule, or about the run and the monitoring itself.

    Raises:
        GradvitalsError: If there is none of this id.
    """
    if name in NOTICE_WORDS:
        return _notice(name)
    if name not in RULES:
        known = [*RULES, *NOTICE_WORDS]
        asked = name.lower().replace(" ", "_").replace("-", "_")
        close = [other for other in known if asked in other] or get_close_matches(asked, known)
        meant = f"; did you mean {' or '.join(close[:3])}?" if close else ""
        raise GradvitalsError(
            f"there is no rule {name!r}{meant}; `gradvitals doctor --rules` lists them; beside these: "
            f"{', '.join(NOTICE_WORDS)}"
        )
    rule = RULES[name]
    words = rule.message or Message(name=name, pattern=inspect.getdoc(rule) or "", title="", causes={}, fixes={})
    return Entry(
        id=name,
        family=rule.family,
        words=words,
        needs=rule.needs,
        min_steps=rule.min_steps,
        closes_after=rule.closes_after,
        severities=_severities(rule),
        settings=_settings(rule),
        default=rule.default,
    )


def _notice(name: str) -> Entry:
    words, severities = NOTICE_WORDS[name]
    return Entry(
        id=name,
        family=NOTICES,
        words=words,
        needs=(),
        min_steps=0,
        closes_after=0,
        severities=severities,
        settings=(),
        default=True,
    )


def markdown() -> str:
    """The catalogue as docs/findings.md has it: the rules of gradvitals itself, with all there is to say of each."""
    parts: list[str] = []
    family = ""
    for item in entries():
        if item.family == OTHERS:
            continue
        if item.family != family:
            family = item.family
            parts.append(f"### {family.capitalize()}\n")
        parts += _entry_lines(item)
    return "\n".join(parts)


def _entry_lines(item: Entry) -> Iterator[str]:
    yield f"#### `{item.id}`: {item.words.name}\n"
    yield _wrapped(item.pattern)
    yield _wrapped(item.decided)
    if item.settings:
        yield "| setting | default | |\n|---|---|---|"
        for setting in item.settings:
            yield f"| `{setting.name}` | `{setting.default!r}` | {_cell(setting.text)} |"
        yield ""
    yield "Likely causes:\n"
    yield from _list(item.causes)
    yield "What to do:\n"
    yield from _list(item.fixes)
    if item.words.reference:
        yield _wrapped(f"Reference: {item.words.reference}")


def _list(texts: Iterable[str]) -> Iterator[str]:
    for i, text in enumerate(texts, 1):
        head = f"{i}. "
        yield textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), **_FILL)
    yield ""


_FILL: Any = {"break_long_words": False, "break_on_hyphens": False}


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, **_FILL) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _without_blanks(text: str) -> str:
    """Names in braces, which a run fills in, as names in angle brackets."""

    def named(match: re.Match[str]) -> str:
        name = match[1]
        return f"‹{BLANKS.get(name, name.replace('_', ' '))}›"

    return BLANK.sub(named, text)


def _metric(needed: str) -> str:
    *of, metric = needed.split(":")
    return f"`{metric}`" + "".join(f" of {part}" for part in of)


def _listed(words: Iterable[str], last: str) -> str:
    *head, tail = words
    return f"{', '.join(head)} {last} {tail}" if head else tail


# -- what the source of a rule tells -----------------------------------------------------------------------------


def _settings(rule: type[Rule]) -> tuple[Setting, ...]:
    texts: dict[str, str] = {}
    for base in reversed(rule.__mro__):
        texts |= _field_texts(base)
    chosen = (f for f in fields(rule) if f.init)  # type: ignore[arg-type]
    return tuple(Setting(name=f.name, default=_default(f), text=texts.get(f.name, "")) for f in chosen)


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


def _field_texts(cls: type) -> dict[str, str]:
    """The string under each field of a class, which Python keeps in the source alone."""
    body = _body(cls)
    texts: dict[str, str] = {}
    for above, below in pairwise(body):
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[above.target.id] = " ".join(value.value.split())
    return texts


def _severities(rule: type[Rule]) -> tuple[Severity, ...]:
    """The severities that a rule's source names."""
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
    except (OSError, TypeError, SyntaxError):  # made at a prompt, or built in
        return []
    found = tree.body[0]
    return found.body if isinstance(found, ast.ClassDef) else []
