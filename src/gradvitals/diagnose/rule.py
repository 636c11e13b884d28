"""What a rule is, and where rules are registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.step import Step
from gradvitals.errors import ConfigError

FAMILIES = (
    "setup",
    "training loop",
    "loss",
    "gradients",
    "updates",
    "signal",
    "batch",
    "scale",
    "schedule",
    "clipping",
    "precision",
    "ranks",
    "presets",
)
"""The families of gradvitals' own rules, in the order of the documentation."""

OTHERS = "others"
"""The family of rules that are not gradvitals' own."""


NEVER = 10**9
"""Clean steps after which a finding resolves that does not resolve by itself."""


class Rule:
    """One pattern and everything about it.

    Subclasses are dataclasses. Settings are fields; what a rule remembers is fields with ``init=False``; everything
    else about it is a class attribute.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class LossOver(Rule):
        ...     id = "loss_over"
        ...     limit: float = 10.0
        ...
        ...     def check(self, step):
        ...         loss = step.value("loss")
        ...         if loss > self.limit:
        ...             return Observation(severity="warning", seen={"loss": loss}, title="The loss is too high")
    """

    id: ClassVar[str]
    family: ClassVar[str] = OTHERS
    message: ClassVar[Message | None] = None
    """Its texts. A rule without a message gives its observations a title."""

    needs: ClassVar[tuple[str, ...]] = ("grad/norm",)
    """Metrics that it cannot check without."""
    needs_known: ClassVar[Literal["", "gsnr", "noise_scale"]] = ""
    """The estimate that must be known well before its silence counts as passed."""
    reads: ClassVar[Literal["values", "tensors", "full"]] = "values"
    """Which steps it checks: all, those with values of single tensors, or those of a full reading."""
    every: ClassVar[int] = 1
    """It checks only steps that are a multiple of this. Of calm steps, only every 50th is checked at all."""
    min_steps: ClassVar[int] = 0
    """Steps at the start of a run that it does not check."""
    judges_after: ClassVar[int] = 20
    """Steps of a run after which its silence counts as passed."""
    closes_after: ClassVar[int] = 50
    """Steps without an observation after which its finding is resolved."""
    holds: ClassVar[bool] = False
    """Whether its finding stays as it is until what it needs is read again: damage that only rare readings show."""
    renews: ClassVar[bool] = False
    """Whether the texts and the evidence of an ongoing finding are those of the latest observation, not of the one that
    it opened with."""
    expects_fall: ClassVar[bool] = False
    """Whether it assumes that training lowers one loss. It does not check a model that alternates with another one, nor
    reinforcement learning, whose losses mean nothing by their level."""
    default: ClassVar[bool] = True
    """Whether every Diagnosis has it, or only one whose settings name it."""

    follows: ClassVar[tuple[str, ...]] = ()
    """Ids of findings that it is a consequence of, if found while they last: the deepest root first."""
    follows_if_later: ClassVar[bool] = False
    """Whether it must also have started after the root: a layer that never had a gradient has another reason."""
    is_setup: ClassVar[bool] = False
    """Whether it is about the data, the model or the loss, as they were from the start: symptoms follow from it."""
    is_symptom: ClassVar[bool] = False
    """Whether it is a consequence of any such finding. A note on the setup becomes as serious as its symptoms."""
    masks: ClassVar[tuple[str, ...]] = ()
    """Rules that are not reported as passed beside this finding: "no loss stood out" is not true of a loss that rose
    a thousandfold, even if its own rule did not fire."""
    taints_steps: ClassVar[bool] = False
    """Whether the steps of a warning show gradients that advice must not be based on."""
    measures_lr: ClassVar[bool] = False
    """Whether the learning rate it proposes is measured, and may be further off than a factor of 10."""
    advises: ClassVar[bool] = False
    """Whether the verdict on a healthy run leads with its note, because it asks for something."""
    ordinary: ClassVar[bool] = False
    """Whether nearly every healthy run has this note, which asks for nothing."""

    def learn(self, step: Step) -> None:
        """Take in a step, before `check`, and also at steps that `every` leaves out."""

    def check(self, step: Step) -> Observation | None:
        """Returns what this step shows of the pattern; None if it shows nothing, or only the whole run shows it."""
        return None

    def conclude(self, step: Step) -> Observation | None:
        """Returns what the whole run shows, given its last step; called once, when the run is closed."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns what it remembers, as plain values."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self) if not f.init}  # type: ignore[arg-type]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what it remembered. Ignores unknown names."""
        for f in fields(self):  # type: ignore[arg-type]
            if not f.init and f.name in state:
                setattr(self, f.name, restored(state[f.name], getattr(self, f.name)))


R = TypeVar("R", bound=type[Rule])

RULES: dict[str, type[Rule]] = {}
"""Every rule by its id. A Diagnosis has one of each that is on by default or named in its settings."""


def register(rule: R) -> R:
    """Add a rule to every later Diagnosis, if it is on by default. Put it above ``@dataclass``."""
    if "__dataclass_fields__" not in vars(rule):
        raise ConfigError(f"{rule.__name__} is not a dataclass; put @dataclass under @register")
    known = RULES.get(rule.id)
    if known is not None and known.__qualname__ != rule.__qualname__:
        raise ConfigError(f"there is a rule {rule.id!r} already; give {rule.__name__} another id")
    RULES[rule.id] = rule
    return rule


def setting_names(rule: type[Rule]) -> list[str]:
    """Returns the names of a rule's settings."""
    return [f.name for f in fields(rule) if f.init]  # type: ignore[arg-type]


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise a ConfigError that suggests what was meant if a rule or a setting does not exist, or has a wrong value."""
    for name, chosen in settings.items():
        if name not in RULES:
            close = _suggestion(name, RULES)
            raise ConfigError(f"there is no rule {name!r}{close}; `gradvitals doctor --rules` lists all rules")
        if isinstance(chosen, bool):
            continue
        known = setting_names(RULES[name])
        listed = f"True, False, or a mapping with any of {', '.join(known)}" if known else "True or False"
        if not isinstance(chosen, Mapping):
            raise ConfigError(f"the settings of rule {name!r} are {chosen!r}; expected {listed}")
        for key, value in chosen.items():
            if key not in known:
                close = _suggestion(str(key), known)
                raise ConfigError(f"rule {name!r} has no setting {key!r}{close}; expected {listed}")
            default = getattr(RULES[name], key, None)
            if isinstance(default, (int, float)) and not isinstance(value, (int, float)):
                raise ConfigError(f"{key} of rule {name!r} is {value!r}; expected a number such as {default!r}")


def _suggestion(given: str, known: Any) -> str:
    close = get_close_matches(given, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def build_rules(settings: Mapping[str, Any]) -> list[Rule]:
    """Returns one of each registered rule, family by family: findings of one step are reported in this order.

    Args:
        settings: By rule id: False turns it off, True turns on one that is off by default, a mapping turns it on and
            sets its fields, e.g. ``{"explosion": {"ratio": 3}}``.
    """
    check_settings(settings)
    order = {family: place for place, family in enumerate((*FAMILIES, OTHERS))}
    names = sorted(RULES, key=lambda name: order.get(RULES[name].family, len(order)))
    chosen = {name: settings.get(name, RULES[name].default) for name in names}
    return [RULES[name](**({} if how is True else how)) for name, how in chosen.items() if how is not False]


def plain(value: Any) -> Any:
    """Returns state as numbers, strings, lists and dicts, which any checkpoint can hold."""
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
    """The inverse of `plain`, given a value of the type that was saved."""
    if isinstance(like, np.ndarray):
        return np.array(saved, dtype=like.dtype)
    if is_dataclass(like) and not isinstance(like, type):
        parts = {f.name: restored(saved[f.name], getattr(like, f.name)) for f in fields(like) if f.name in saved}
        return type(like)(**parts)
    return tuple(saved) if isinstance(like, tuple) else saved
