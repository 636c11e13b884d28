"""The words of the project as records: what was seen, what it means, what was done.

No torch here and nothing of ours: every layer, and every reader without torch, can import this file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]

Stage = Literal["raw", "unscaled", "clipped"]
"""Which gradients a reading saw: as backward left them, after undoing a loss scale, or after a clip."""

Source = Literal["microbatch", "ranks", "adam", "window"]
"""Source of the samples behind a GSNR. Values of different sources are never mixed."""

SOURCES: tuple[Source, ...] = ("microbatch", "ranks", "adam", "window")
"""All sources, the most trustworthy first: the order in which a reader picks one when not told."""

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")

LOSSES = ("", "cross_entropy", "nll", "bce", "bce_logits", "mse", "l1", "smooth_l1", "kl", "log")
"""Losses that are recognized; ``head/loss`` is the place in this list. ``log`` is a log-likelihood written by hand."""

ACTIVATIONS = ("", "softmax", "sigmoid", "relu", "tanh", "log_softmax", "log_sigmoid")
"""Functions that a model's output may go through; ``head/activation`` is the place in this list."""


def json_ready(value: Any) -> Any:
    """Turn arrays, tuples and non-finite numbers into what strict JSON can hold.

    JSON has no NaN, so non-finite numbers become the strings ``float()`` reads back.

    >>> json_ready({"a": (1, float("nan"))})
    {'a': [1, 'nan']}
    """
    if isinstance(value, np.ndarray):
        return [json_ready(item) for item in value.tolist()]
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, (np.integer, np.floating)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _is_whole(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "int": _is_whole,
    "int | None": lambda value: value is None or _is_whole(value),
    "str": _is_text,
    "str | None": lambda value: value is None or _is_text(value),
    "bool": _is_bool,
    "Severity": lambda value: isinstance(value, str) and value in SEVERITIES,
    "tuple[str, ...]": _is_texts,
    "tuple[int, ...]": lambda value: (
        isinstance(value, list | tuple) and len(value) <= MAX_DIMENSIONS and all(map(_is_whole, value))
    ),
    "Mapping[str, Any]": _is_mapping,
}
MAX_DIMENSIONS = 64
"""Dimensions of a tensor, of which torch has no more either."""


def _from_json(record: type[Any], data: Mapping[str, Any]) -> Any:
    """A record from JSON that may have been written by anybody: every field is of the type that it says.

    Raises:
        TypeError: If one is not, is missing, or is not known.
    """
    given = dict(data)
    for each in fields(record):
        if each.name not in given:
            continue
        value = given[each.name]
        if not _CHECKS[str(each.type)](value):
            raise TypeError(f"{each.name} of {record.__name__} is {str(value)[:80]!r}; expected {each.type}")
        if str(each.type).startswith("tuple"):
            given[each.name] = tuple(value)
    return record(**given)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One watched parameter: its place in every per-tensor array, and its place in the model."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: str
    """Name of the layer it belongs to, e.g. ``blocks.3``."""
    depth: int
    """Position of that layer from the input (0) to the output."""
    heads: int = 0
    """Attention heads this tensor was split into, 0 for none."""
    frozen: bool = False
    """Whether it is not trained: it requires no gradient, or backward does not reach it and no optimizer steps it."""
    module: str = ""
    """Class of the module that holds it, such as ``Linear``; empty if unknown."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {
            "index": self.index,
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "layer": self.layer,
            "depth": self.depth,
            "heads": self.heads,
            "frozen": self.frozen,
            "module": self.module,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorInfo:
        """The inverse of `to_json`; raises TypeError where a field is not what it should be."""
        return cast(TensorInfo, _from_json(cls, data))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The names of the rows of per-tensor, per-layer and per-head arrays."""

    tensors: tuple[TensorInfo, ...] = ()
    layers: tuple[str, ...] = ()
    """Layer names in depth order, from the input to the output."""
    heads: tuple[str, ...] = ()
    """Head names such as ``blocks.3.attn/head5``."""

    @cached_property
    def sizes(self) -> FloatArray:
        """Number of elements of each tensor."""
        return np.array([float(info.numel) for info in self.tensors])

    @cached_property
    def matrices(self) -> NDArray[np.bool_]:
        """Which tensors have two dimensions or more."""
        return np.array([len(info.shape) >= 2 for info in self.tensors], dtype=bool)

    def names(self, kind: Literal["tensors", "layers", "heads"]) -> tuple[str, ...]:
        """Row names of one kind of array."""
        if kind == "tensors":
            return tuple(info.name for info in self.tensors)
        return self.layers if kind == "layers" else self.heads


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The numbers of one step. A step with several GSNR sources gives one reading per source."""

    step: int
    time: float
    """Seconds since the epoch when the step was read."""
    stage: Stage = "raw"
    source: Source | None = None
    """Source of the samples; None for metrics that need none (norms, loss, weights)."""
    batch_size: float | None = None
    """Samples the values stand for; None where the loop did not tell."""
    values: Mapping[str, float] = field(default_factory=dict)
    tensors: Mapping[str, FloatArray] = field(default_factory=dict)
    layers: Mapping[str, FloatArray] = field(default_factory=dict)
    heads: Mapping[str, FloatArray] = field(default_factory=dict)
    ranks: Mapping[str, FloatArray] = field(default_factory=dict)
    """One number for each process of a distributed run."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values, non-finite numbers as strings."""
        data: dict[str, Any] = {
            "step": self.step,
            "time": self.time,
            "stage": self.stage,
            "source": self.source,
            "batch_size": self.batch_size,
        }
        for kind in ("values", "tensors", "layers", "heads", "ranks"):
            data[kind] = json_ready(getattr(self, kind))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Reading:
        """The inverse of `to_json`."""
        arrays = {
            kind: {key: np.array([float(x) for x in row]) for key, row in data.get(kind, {}).items()}
            for kind in ("tensors", "layers", "heads", "ranks")
        }
        values = {key: float(value) for key, value in data["values"].items()}
        return cls(**{**data, **arrays, "values": values})


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainReadings:
    """The readings of plain steps in a row, as columns. None of them has a source."""

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    batch_sizes: NDArray[np.float64]
    """NaN if the loop did not report it."""
    values: Mapping[str, NDArray[np.float64]]
    """One number per step."""
    present: Mapping[str, NDArray[np.bool_]]
    """Which steps have a value, by metric."""
    tensors: Mapping[str, FloatArray]
    """One number per step and tensor, for steps that have the metric of that name."""

    def __len__(self) -> int:
        return len(self.steps)

    def part(self, start: int, end: int) -> PlainReadings:
        """Returns the readings of some of the steps, without single tensors."""
        return replace(
            self,
            steps=self.steps[start:end],
            times=self.times[start:end],
            batch_sizes=self.batch_sizes[start:end],
            values={name: column[start:end] for name, column in self.values.items()},
            present={name: column[start:end] for name, column in self.present.items()},
            tensors={},
        )

    def reading(self, index: int) -> Reading:
        """Returns the reading of one step."""
        size = float(self.batch_sizes[index])
        return Reading(
            step=int(self.steps[index]),
            time=float(self.times[index]),
            batch_size=None if math.isnan(size) else size,
            values={name: float(column[index]) for name, column in self.values.items() if self.present[name][index]},
            tensors={name: column[index] for name, column in self.tensors.items() if self.present[name][index]},
        )


class Fix(str):
    """A fix for a finding: a sentence, and the same for a program.

    Args:
        text: The sentence.
        change: Settings to change, such as ``{"lr": 0.03}``; empty if a program cannot apply it.
        snippet: Lines to paste, with this run's numbers; empty if there are none.
    """

    change: Mapping[str, Any]
    snippet: str

    def __new__(cls, text: str, change: Mapping[str, Any] | None = None, snippet: str = "") -> Fix:
        """Make a fix; a string that carries the rest."""
        fix = super().__new__(cls, text)
        fix.change, fix.snippet = dict(change or {}), snippet
        return fix

    def __reduce__(self) -> tuple[Any, ...]:
        return Fix, (str(self), self.change, self.snippet)

    @property
    def text(self) -> str:
        """The sentence."""
        return str(self)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A pattern in the readings: what it is, where, since when, on what evidence."""

    id: str
    severity: Severity
    title: str
    tensors: tuple[str, ...] = ()
    first_step: int = 0
    last_step: int | None = None
    """None while the pattern goes on."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Observed values beside expected ones."""
    causes: tuple[str, ...] = ()
    """Likely causes, the likeliest first."""
    fixes: tuple[str, ...] = ()
    """Fixes, the first to try first: a `Fix` if a program can apply it."""
    rank: int | None = None
    found_step: int | None = None
    """The step that reported it, which may be later than the first step it concerns."""
    follows: str | None = None
    """The id of the finding that it is a consequence of; None if it stands for itself."""

    @property
    def says_where(self) -> bool:
        """Whether the title names the first of its tensors, so that they need not be named again beside it."""
        return bool(self.tensors) and bool(re.search(rf"(?<![\w.]){re.escape(self.tensors[0])}(?!\.?\w)", self.title))

    def __str__(self) -> str:
        named = () if self.says_where else self.tensors
        where = f" in {', '.join(named[:3])}" if named else ""
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        on_rank = f" on rank {self.rank}" if self.rank is not None and "rank" not in self.title else ""
        return f"[{self.severity}] step {self.first_step}: {self.title}{where}{more}{on_rank} ({self.id})"

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values; `changes` has what a program needs of each fix, if there is anything."""
        data = {name: json_ready(getattr(self, name)) for name in self.__dataclass_fields__}
        data["fixes"] = [str(fix) for fix in self.fixes]
        changes = [_change_of(fix) for fix in self.fixes]
        return {**data, "changes": changes} if any(changes) else data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """The inverse of `to_json`; raises TypeError if a field has the wrong type."""
        given = dict(_upgraded(data))
        changes = given.pop("changes", None)
        finding = cast(Finding, _from_json(cls, given))
        if not isinstance(changes, list) or len(changes) != len(finding.fixes):
            return finding
        known = [one if isinstance(one, Mapping) else {} for one in changes]
        fixes = (
            Fix(text, one.get("change"), str(one.get("snippet", "")))
            for text, one in zip(finding.fixes, known, strict=True)
        )
        return replace(finding, fixes=tuple(fixes))


def _change_of(fix: str) -> dict[str, Any]:
    if not isinstance(fix, Fix) or not (fix.change or fix.snippet):
        return {}
    return {"change": json_ready(fix.change), "snippet": fix.snippet}


def _upgraded(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a finding of an older run in today's fields: fixes were `cures`, and `follows` was evidence."""
    if "cures" not in data:
        return data
    upgraded = {"fixes" if name == "cures" else name: value for name, value in data.items()}
    evidence = data.get("evidence")
    if isinstance(evidence, Mapping) and isinstance(evidence.get("follows"), str):
        upgraded["follows"] = evidence["follows"]
        upgraded["evidence"] = {name: value for name, value in evidence.items() if name != "follows"}
    return upgraded


@dataclass(frozen=True, kw_only=True)
class Action:
    """A change to the run that was made, or would have been (`taken` is False in a dry run)."""

    kind: str
    step: int
    finding: str
    taken: bool
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    cost: Mapping[str, Any] = field(default_factory=dict)
    """Its cost: seconds of the training thread, steps of training lost."""

    def __str__(self) -> str:
        refused = "would " if self.reason.startswith("dry run") else "no "
        done = ("" if self.taken else refused) + self.kind.replace("_", " ")
        back = (
            f" to step {self.after['step']}" if self.taken and self.kind == "roll_back" and "step" in self.after else ""
        )
        steps = self.cost.get("steps", 0)
        lost = f" ({steps} step{'s' if steps != 1 else ''} lost)" if steps else ""
        return f"step {self.step}: {done}{back}{lost}; {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {name: json_ready(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Action:
        """The inverse of `to_json`; raises TypeError where a field is not what it should be."""
        return cast(Action, _from_json(cls, data))
