"""What a program is asked to set: the height of a schedule, and within what one run supports."""

from __future__ import annotations

import pytest

from gradvitals.diagnose.message import Message, Observation, explain
from gradvitals.diagnose.rule import RULES

MESSAGE = Message(
    name="n", pattern="p", title="t", causes={}, fixes={"low": "Lower it from {lr} to {lr_proposed}"}, passed="p"
)


def change(seen: dict[str, float], peak: float) -> dict[str, float]:
    observation = Observation(severity="warning", seen=seen, text={"peak_lr": peak}, fixes=("low",))
    return dict(explain(MESSAGE, observation, 9).fixes[0].change)


def test_a_change_is_of_the_schedule_and_not_of_the_moment() -> None:
    assert change({"lr": 1e-3, "lr_proposed": 3e-4}, 1e-2) == {"lr": pytest.approx(3e-3)}
    assert change({"lr": 1e-2, "lr_proposed": 3e-3}, 1e-2) == {"lr": pytest.approx(3e-3)}


def test_the_first_rate_of_a_warmup_is_no_change() -> None:
    for name in ("warmup_needed", "near_zero_initial_gsnr"):
        message = RULES[name].message
        assert message is not None
        assert "lr_proposed" not in message.fixes["warmup"]
