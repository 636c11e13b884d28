"""The words of a finding: the one place where what a rule saw becomes what every surface says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradvitals.diagnose.rule import Sign


@dataclass(frozen=True, kw_only=True)
class Words:
    """What there is to say about one pattern. Names in braces are filled in with the numbers that were seen.

    ``{first}`` is the first tensor named, ``{where}`` says how many there are, ``{step}`` is the step, and
    ``{expected_name}`` is what the number of that name was expected to be. ``{unread}`` says which steps
    before it were not read, and ``{safe}`` is the first of them: what is from before it is known to be good.
    """

    name: str
    """The pattern in two or three words."""
    pattern: str
    """When it fires, for the documentation."""
    title: str
    """What is said of a run that has it."""
    causes: Mapping[str, str]
    """By key, the commonest first, each with why."""
    cures: Mapping[str, str]
    """By key, the first thing to try first. The first one names the numbers of this run."""
    fine: str = ""
    """What is said of a run that was looked at and does not have it."""
    reference: str = ""
    """Where the pattern comes from."""


@dataclass(frozen=True)
class Explained:
    """The words for one run."""

    title: str
    causes: tuple[str, ...] = ()
    cures: tuple[str, ...] = field(default=())


NAMED_NUMBER = re.compile(r" (?:to a (?:batch|norm) of|instead of|back from|of|from|to about|to) \{(\w+)\}")
"""A phrase that only tells a number."""


def explain(words: Words | None, sign: Sign, step: int, unread: int = 0) -> Explained:
    """Fill in the words with what was seen, likeliest causes and best cures first."""
    if words is None:
        return Explained(sign.title or "a pattern without a description")
    blanks = _Blanks({name: number(value) for name, value in sign.seen.items()})
    blanks |= {f"expected_{name}": number(value) for name, value in sign.expected.items()}
    blanks |= {"unread": before_it(unread), "safe": number(step - unread)}
    blanks |= {"step": str(step), "first": sign.tensors[0] if sign.tensors else "the model"}
    blanks["where"] = where(sign.tensors)
    blanks.asked = set()
    return Explained(
        title=words.title.format_map(blanks),
        causes=tuple(_filled_in(words.causes, sign.causes, blanks)),
        cures=tuple(_filled_in(words.cures, sign.cures, blanks)),
    )


def _filled_in(texts: Mapping[str, str], chosen: tuple[str, ...], blanks: _Blanks) -> Iterator[str]:
    """Those that were chosen, then the others as far as they claim nothing that may not be so.

    Where a rule has chosen, it has looked: what else names numbers of this run it did not find to be true.
    """
    for key in dict.fromkeys((*chosen, *texts)):
        known = _without_unknown(texts[key], blanks).format_map(blanks)
        blanks.asked = set()
        texts[key].format_map(blanks)  # for what it asks
        numbers = blanks.asked - {"first", "where", "step"}
        if key in chosen or not (numbers if chosen else blanks.asked - blanks.keys()):
            yield known


def _without_unknown(text: str, blanks: Mapping[str, str]) -> str:
    """A text without the phrases that name a number of this run which nobody knows.

    >>> _without_unknown("lower the learning rate from {lr} to {half}", {"lr": "nan", "half": "nan"})
    'lower the learning rate'
    """
    return NAMED_NUMBER.sub(lambda found: "" if blanks.get(found[1]) == "nan" else found[0], text)


def where(tensors: tuple[str, ...]) -> str:
    """Where something is: the first tensor, and how many more."""
    if not tensors:
        return "the whole model"
    return tensors[0] if len(tensors) == 1 else f"{tensors[0]} and {len(tensors) - 1} more"


def before_it(unread: int) -> str:
    """Which steps before another were not read, to go on with "not read".

    >>> before_it(1), before_it(49)
    ('the step before it was', 'the 49 steps before it were')
    """
    return "the step before it was" if unread == 1 else f"the {unread:,} steps before it were"


def number(value: Any) -> str:
    """A number as people write it: three significant digits, no needless zeros.

    >>> [number(value) for value in (0.000123, 41.26, 12345.6, 3, True)]
    ['1.23e-04', '41.3', '12,346', '3', 'True']
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class _Blanks(dict[str, str]):
    """A number that was not seen leaves a question mark, not an error: words must never break a run."""

    asked: set[str]
    """Those that were filled in since this was last emptied."""

    def __getitem__(self, key: str) -> str:
        self.asked.add(key)
        value = super().get(key, "?")
        return "unknown size" if key == "batch_size" and value == "nan" else value
