"""What a rule is, what it says when it sees its pattern, and where rules are registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from gradvitals.diagnose.step import Step
from gradvitals.errors import ConfigError
from gradvitals.types import Severity

if TYPE_CHECKING:
    from gradvitals.diagnose.explain import Words


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A rule sees its pattern at this step, and on what grounds."""

    severity: Severity
    seen: Mapping[str, Any]
    """The numbers that made it fire; the words of the finding are filled in with them."""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """What they would be in a healthy run, under the same names."""
    tensors: tuple[str, ...] = ()
    """Where it is, the worst first; none for the whole model."""
    rank: int | None = None
    """Which rank of a distributed run has it, where one has; a finding keeps the one it opened with."""
    since: int | None = None
    """The step the pattern began at; None for this one."""
    causes: tuple[str, ...] = ()
    """Keys of the causes that the data speaks for, the likeliest first; the others follow as the words have them."""
    cures: tuple[str, ...] = ()
    """Keys of the cures that suit them, the best first; likewise."""
    title: str = ""
    """For rules without words in `gradvitals.diagnose.words`."""
    active: bool = True
    """Whether the pattern is there now. Where it is not, the sign only tells more about an open finding."""


class Rule:
    """One pattern. Subclasses are dataclasses: settings are fields, what it remembers is fields with ``init=False``.

    Example:
        >>> @dataclass
        ... class LossOver(Rule):
        ...     id = "loss_over"
        ...     limit: float = 10.0
        ...
        ...     def look(self, step):
        ...         loss = step.value("loss")
        ...         if loss > self.limit:
        ...             seen, expected = {"loss": loss}, {"loss": self.limit}
        ...             return Sign(severity="warning", seen=seen, expected=expected, title="the loss is too high")
    """

    id: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ("grad/norm",)
    """Metrics without which it cannot judge."""
    words: ClassVar[Words | None] = None
    """What is said about it; the rules of gradvitals have theirs in `gradvitals.diagnose.words`."""
    judges_after: ClassVar[int] = 20
    """Steps of a run before its silence means that all is well."""
    min_steps: ClassVar[int] = 0
    """Steps at the start of a run that it is not shown."""
    every_step: ClassVar[bool] = True
    """Whether it looks at what every step has. If not, it is only shown steps that were read in full."""
    closes_after: ClassVar[int] = 50
    """Steps without a sign after which its finding is closed."""
    expects_fall: ClassVar[bool] = False
    """Whether it takes for granted that training brings one loss down: it does not look at one side of a game."""
    default: ClassVar[bool] = True
    """Whether every Diagnosis has it, or only one whose settings name it."""

    def look(self, step: Step) -> Sign | None:
        """What this step shows of the pattern; None where there is nothing to say."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain values."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self) if not f.init}  # type: ignore[arg-type]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what it remembered. Unknown names are left aside."""
        for f in fields(self):  # type: ignore[arg-type]
            if not f.init and f.name in state:
                setattr(self, f.name, restored(state[f.name], getattr(self, f.name)))


R = TypeVar("R", bound=type[Rule])

RULES: dict[str, type[Rule]] = {}
"""Every rule by its id. A Diagnosis takes one of each that is on by default or named in its settings."""


def register(rule: R) -> R:
    """Have a rule in every Diagnosis from now on, or at hand if it is off by default. For use above ``@dataclass``."""
    if "__dataclass_fields__" not in vars(rule):
        raise ConfigError(f"{rule.__name__} is not a dataclass; put @dataclass under @register")
    known = RULES.get(rule.id)
    if known is not None and known.__qualname__ != rule.__qualname__:
        raise ConfigError(f"there is a rule {rule.id!r} already; give {rule.__name__} another id")
    RULES[rule.id] = rule
    return rule


def build_rules(settings: Mapping[str, Any]) -> list[Rule]:
    """One of each registered rule.

    Args:
        settings: By rule id: False leaves it out, True takes one that is off by default, a mapping takes it and sets
            its fields, e.g. ``{"explosion": {"ratio": 3}}``.
    """
    for name, chosen in settings.items():
        if name not in RULES:
            raise ConfigError(f"there is no rule {name!r}; expected one of {', '.join(sorted(RULES))}")
        known = {f.name for f in fields(RULES[name]) if f.init}  # type: ignore[arg-type]
        if not isinstance(chosen, bool) and not (isinstance(chosen, Mapping) and known >= set(chosen)):
            expected = f"True, False, or a mapping with any of {', '.join(sorted(known)) or 'no settings at all'}"
            raise ConfigError(f"the settings of rule {name!r} are {chosen!r}; expected {expected}")
        for f in fields(RULES[name]):  # type: ignore[arg-type]
            value = chosen.get(f.name, f.default) if isinstance(chosen, Mapping) else f.default
            if isinstance(f.default, (int, float)) and not isinstance(value, (int, float)):
                raise ConfigError(f"{f.name} of rule {name!r} is {value!r}; expected a number such as {f.default!r}")
    built = []
    for name, rule in RULES.items():
        chosen = settings.get(name, rule.default)
        if chosen is not False:
            built.append(rule(**({} if chosen is True else chosen)))
    return built


def plain(value: Any) -> Any:
    """State as numbers, strings, lists and dicts, which any checkpoint can hold."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def restored(saved: Any, like: Any) -> Any:
    """The inverse of `plain`, given a value of the kind that was saved."""
    if isinstance(like, np.ndarray):
        return np.array(saved, dtype=like.dtype)
    if is_dataclass(like) and not isinstance(like, type):
        parts = {f.name: restored(saved[f.name], getattr(like, f.name)) for f in fields(like) if f.name in saved}
        return type(like)(**parts)
    return tuple(saved) if isinstance(like, tuple) else saved
