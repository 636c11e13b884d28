"""The numbers that a finding is told with, and what the first line says of a loss that was never heard."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gradvitals.errors import ObserveError
from gradvitals.notices import observe_ignored
from gradvitals.show.checkup import examine
from gradvitals.show.findings import evidence
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Reading


def test_only_numbers_that_say_what_they_are_of_are_told() -> None:
    unknown = {"loss": math.nan, "ratio": 0.742, "lr": math.nan}
    assert list(evidence({"seen": unknown, "expected": {"loss": "a finite number"}})) == [
        "loss nan (expected a finite number)"
    ]
    seen = {"ratio": 0.3, "lr": "nan"}
    told = {"seen": seen, "expected": {"ratio": "under 0.1"}, "latest": {"step": 9, "ratio": 0.4, "lr": "nan"}}
    assert list(evidence(told)) == ["ratio 0.3 (expected under 0.1)", "at step 9: ratio 0.4"]
    assert list(evidence({"seen": {"share": 0.00103}, "expected": {"share": 0.0}})) == [
        "0.103 % of their numbers (expected none)"
    ]
    assert list(evidence({"seen": {"share": 1e-8}, "expected": {"share": "over 1e-06"}})) == [
        "share 1.00e-08 (expected over 1e-06)"
    ]


@pytest.mark.parametrize("heard", [False, True])
def test_a_loss_that_was_never_heard_is_in_the_first_line(tmp_path: Path, heard: bool) -> None:
    unheard = observe_ignored(ObserveError("observe got a str as loss; expected a tensor or a number"), 0)
    with RunWriter(tmp_path / "run", meta={"facts": {}}) as writer:
        for step in range(60):
            values = {"grad/norm": 1.0} | ({"loss": 1.0} if heard else {})
            writer.write(Reading(step=step, time=step, values=values))
        writer.write(unheard)
        writer.commit()
    with open_run(tmp_path / "run") as run:
        first = examine(run).verdict.line
    said = " No loss was heard: observe got a str as loss; expected a tensor or a number."
    assert first.endswith(said) == (not heard)
