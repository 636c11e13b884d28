"""The texts of findings: the one place that fills a rule's message with the numbers of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from gradvitals.format import number, percent
from gradvitals.types import Fix, Severity


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a rule saw at one step that shows its pattern."""

    severity: Severity
    seen: Mapping[str, Any]
    """The numbers that made the rule fire; the message is filled in with them."""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """The same numbers in a healthy run."""
    text: Mapping[str, Any] = field(default_factory=dict)
    """More to fill into the message, which is not evidence."""
    tensors: tuple[str, ...] = ()
    """Where it is, the worst first; empty for the whole model."""
    rank: int | None = None
    """The rank that has it, if one has; a finding keeps the rank it opened with."""
    since: int | None = None
    """The step that the pattern started at; None for this one."""
    causes: tuple[str, ...] = ()
    """Keys of the causes that the data supports, the likeliest first; the message's others follow."""
    fixes: tuple[str, ...] = ()
    """Keys of the fixes that suit them, the best first; likewise."""
    key: InitVar[str] = ""
    """The key of the one cause that the data supports, if its fix has the same."""
    title: str = ""
    """For rules without a message."""
    active: bool = True
    """Whether the pattern is present now. If not, this only adds to what is known about an open finding."""

    def __post_init__(self, key: str) -> None:
        if key:
            object.__setattr__(self, "causes", (key,))
            object.__setattr__(self, "fixes", (key,))


@dataclass(frozen=True, kw_only=True)
class Message:
    """The texts of one rule. Names in braces are filled in with the numbers that were seen.

    ``{first}`` is the first tensor, ``{where}`` the first tensor and how many others, ``{step}`` the step, and
    ``{expected_name}`` what the number of that name was expected to be. ``{unread}`` names the steps before it that
    were not read, and ``{safe}`` is the first of them: checkpoints from before it are good. ``{name:%}`` is a share as
    a percentage.
    """

    name: str
    """The pattern in two or three words."""
    pattern: str
    """When the rule fires, for the documentation."""
    title: str
    """What a finding reports."""
    causes: Mapping[str, str]
    """By key, the most common first."""
    fixes: Mapping[str, str]
    """By key, the first thing to try first."""
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By key of a fix: what a program can change, besides the numbers that the fix proposes (`PROPOSED`)."""
    snippets: Mapping[str, str] = field(default_factory=dict)
    """By key of a fix: lines to paste, filled in like every text."""
    only_if_chosen: tuple[str, ...] = ()
    """Keys of causes and fixes that are offered only if the rule chose them: the others may follow by themselves."""
    is_certain: bool = False
    """Whether the rule chooses by what it saw, so that no other cause or fix is offered."""
    passed: str = ""
    """What is reported if the check passed."""
    reference: str = ""
    """Where the pattern comes from."""


@dataclass(frozen=True)
class Texts:
    """The texts of one finding."""

    title: str
    causes: tuple[str, ...] = ()
    fixes: tuple[Fix, ...] = ()


PROPOSED = {
    "lr_proposed": "lr",
    "lr_lower": "lr",
    "lr_tenth": "lr",
    "lr_before": "lr",
    "max_norm": "max_norm",
    "decay_proposed": "weight_decay",
    "momentum_proposed": "momentum",
    "dropout_proposed": "dropout",
    "steps_proposed": "steps",
    "batch_proposed": "batch_size",
}
"""Numbers that a fix proposes, and the setting that each is for."""

RELATIVE = ("lr_proposed", "lr_lower", "lr_tenth")
"""Those that are relative to the learning rate of the step at which the pattern was seen."""

SNIPPETS = {
    "lr": 'for group in optimizer.param_groups:\n    group["lr"] = {}',
    "max_norm": "torch.nn.utils.clip_grad_norm_(model.parameters(), {})",
    "weight_decay": 'for group in optimizer.param_groups:\n    group["weight_decay"] = {}',
    "momentum": 'for group in optimizer.param_groups:\n    group["momentum"] = {}',
}

NAMED_NUMBER = re.compile(r" (?:to a (?:batch|norm) of|instead of|back from|of|from|to about|to) \{(\w+)\}")
"""A phrase that only names a number: left out if the number is unknown."""

RESTORE = re.compile(r"[Rr]estore a checkpoint from before step \{(\w+)\}(?:,? and |; )?")
"""A phrase that is left out at step 0, before which there is no checkpoint."""


def explain(message: Message | None, observation: Observation, step: int, unread: int = 0) -> Texts:
    """Fill a message with what was seen: likeliest causes and best fixes first."""
    if message is None:
        return Texts(observation.title or "a pattern without a description")
    blanks = _Blanks(observation.seen | observation.text)  # type: ignore[operator]
    blanks |= {f"expected_{name}": value for name, value in observation.expected.items()}
    blanks |= {"unread": unread_steps(unread).capitalize(), "safe": step - unread, "step": step}
    tensors = observation.tensors
    blanks |= {"first": tensors[0] if tensors else "the model", "where": where(tensors)}
    return Texts(
        title=message.title.format_map(blanks),
        causes=tuple(text for _, text in _filled(message, message.causes, observation.causes, blanks)),
        fixes=tuple(
            _fix(message, key, text, blanks) for key, text in _filled(message, message.fixes, observation.fixes, blanks)
        ),
    )


def _fix(message: Message, key: str, text: str, blanks: _Blanks) -> Fix:
    """Returns a fix with what a program can do of it."""
    change: dict[str, Any] = dict(message.changes.get(key, {}))
    lines = [message.snippets[key].format_map(blanks)] if key in message.snippets else []
    lines = [re.sub(r"(?<=\d),(?=\d{3}\b)", "", line) for line in lines]  # 1,250 would be a tuple
    for name in re.findall(r"\{(\w+)\}", message.fixes[key]):
        value = blanks.get(name)
        if (
            name in PROPOSED
            and isinstance(value, (int, float))
            and math.isfinite(value)
            and PROPOSED[name] not in change
        ):
            # A program sets the height of the schedule, a text names the rate of the moment.
            share = blanks["lr"].value / blanks.get("peak_lr", math.nan) if name in RELATIVE else 1.0
            whole = value / share if 0 < share < math.inf else value
            value, whole = (float(f"{one:.2g}") if isinstance(one, float) else one for one in (value, whole))
            change[PROPOSED[name]] = whole
            if key not in message.snippets and PROPOSED[name] in SNIPPETS:
                lines.append(SNIPPETS[PROPOSED[name]].format(f"{value:g}"))
    return Fix(text, change, "\n".join(lines))


def _filled(
    message: Message, texts: Mapping[str, str], chosen: tuple[str, ...], blanks: _Blanks
) -> Iterator[tuple[str, str]]:
    """The chosen texts with their keys, then the others if they claim nothing about this run.

    A rule that chose has looked: a text that it did not choose and that names numbers of this run may be false.
    """
    for key in dict.fromkeys((*chosen, *texts)):
        if key not in chosen and (key in message.only_if_chosen or (message.is_certain and chosen)):
            continue
        text = RESTORE.sub(lambda found: found[0] if blanks.get(found[1], 1) > 0 else "", texts[key])
        is_code = "(" in text.split(" ", 1)[0]
        text = text if is_code else text[:1].upper() + text[1:]
        known = NAMED_NUMBER.sub(lambda found: "" if blanks.is_unknown(found[1]) else found[0], text).format_map(blanks)
        blanks.used = set()
        text.format_map(blanks)
        numbers = blanks.used - {"first", "where", "step"}
        if text and (key in chosen or not (numbers if chosen else blanks.used - blanks.keys())):
            yield key, known


def where(tensors: tuple[str, ...]) -> str:
    """Returns the first tensor and how many others there are.

    >>> where(("0.weight", "0.bias", "2.weight"))
    '0.weight and 2 others'
    """
    if not tensors:
        return "the whole model"
    others = len(tensors) - 1
    return f"{tensors[0]} and {others} other{'s' if others > 1 else ''}" if others else tensors[0]


def unread_steps(unread: int) -> str:
    """Returns the steps before another that were not read, as the start of a sentence.

    >>> unread_steps(1), unread_steps(49)
    ('the step before it was', 'the 49 steps before it were')
    """
    return "the step before it was" if unread == 1 else f"the {unread:,} steps before it were"


class _Blank:
    """A value that formats itself: ``:%`` as a percentage."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __format__(self, spec: str) -> str:
        return percent(self.value) if spec == "%" and isinstance(self.value, float) else number(self.value)


class _Blanks(dict[str, Any]):
    """The values by name. A missing one becomes a question mark, not an error: texts must never break a run."""

    used: set[str] = set()  # noqa: RUF012  # replaced before it is read

    def is_unknown(self, name: str) -> bool:
        value = self.get(name)
        return isinstance(value, float) and math.isnan(value)

    def __getitem__(self, key: str) -> _Blank:
        self.used = self.used | {key}
        value = self.get(key, "?")
        return _Blank("unknown size" if key == "batch_size" and self.is_unknown(key) else value)
