"""How readings are held against the truth, and for which scenarios."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from rank_results import Results
from rank_scenarios import SCENARIOS, Scenario
from rank_truth import Table

Tables = Sequence[Mapping[str, float]]


class Seen:
    """The readings of rank 0, as tables like those of the truth."""

    def __init__(self, results: Results, name: str) -> None:
        self.record = results.of(name)[0]
        self.names: dict[str, tuple[str, ...]] = self.record["names"]
        self.readings = self.record["readings"]

    def tables(
        self, metric: str, source: str | None = None, kinds: Sequence[str] = ("values", "tensors")
    ) -> list[Table]:
        steps: list[Table] = [{} for _ in range(1 + max(reading["step"] for reading in self.readings))]
        for reading in self.readings:
            if reading["source"] != source:
                continue
            table = steps[reading["step"]]
            for kind in kinds:
                if metric not in reading[kind]:
                    continue
                if kind == "values":
                    table[""] = reading[kind][metric]
                else:
                    table |= dict(zip(self.names[kind], reading[kind][metric].tolist(), strict=True))
        return steps


def hold(found: Tables, truth: Tables, close: Callable[[float, float], bool], what: str, *, whole: bool = True) -> None:
    """Every number of the truth is there and right; where it has none, none was made up."""
    assert len(found) == len(truth), f"{what}: {len(found)} steps, expected {len(truth)}"
    wrong = []
    for step, (got, wanted) in enumerate(zip(found, truth, strict=True)):
        for name in sorted({*got, *wanted}):
            if not whole and name == "":
                continue
            value, right = got.get(name, math.nan), wanted.get(name, math.nan)
            if not (math.isnan(value) if math.isnan(right) else close(value, right)):
                factor = value / right if right else math.nan
                wrong.append(f"step {step}, {name or 'model'}: {value}, expected {right} (x {factor:.6g})")
    assert not wrong, f"{what}: {len(wrong)} wrong, such as\n" + "\n".join(wrong[:12])


def relative(rtol: float) -> Callable[[float, float], bool]:
    return lambda value, right: abs(value - right) <= rtol * abs(right) + 1e-12


def absolute(atol: float) -> Callable[[float, float], bool]:
    return lambda value, right: abs(value - right) <= atol


def ratio(tolerance: float) -> Callable[[float, float], bool]:
    """A relative error e in each of two sums is one of about e (1 + r)^2 in signal over noise, or all of it."""

    def close(value: float, right: float) -> bool:
        return abs(value - right) <= tolerance * (1 + abs(right)) ** 2 or (value == math.inf and right > 1e5)

    return close


def names(where: Callable[[Scenario], bool] = lambda scenario: True) -> Any:
    return pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if where(scenario)])


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit; nan is nan."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, (float, np.ndarray)):
        return bool(np.array_equal(one, other, equal_nan=True))
    return bool(one == other)
