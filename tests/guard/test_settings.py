"""Settings are checked where they are written down, in words that help."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gradvitals.errors import ConfigError
from gradvitals.guard.policy import RESPONSES, Clip, Response, RollBack, Skip, response_from

ALL = list(RESPONSES.values())


@pytest.mark.parametrize("response", ALL)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "maybe"),
        ("mode", True),
    ],
)
def test_what_all_responses_have_is_checked(response: type[Response], name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} of {response.__name__} is .*; expected "):
        response(**{name: value})


@pytest.mark.parametrize(
    ("response", "name", "value"),
    [
        (Clip, "method", "median"),
        (Clip, "quantile", 1.0),
        (Clip, "quantile", math.nan),
        (Clip, "quantile", "0.9"),
        (Clip, "window", 19),
        (Clip, "window", 20.0),
        (Clip, "z_threshold", -1),
        (Clip, "tensor_ratio", math.nan),
        (Clip, "first_steps", 1),
        (Skip, "ratio", 1),
        (Skip, "ratio", math.inf),
        (Skip, "ratio", True),
        (Skip, "max_streak", 0),
        (Skip, "max_streak", 2.0),
        (Skip, "max_recent", 0),
        (Skip, "give_up", "soon"),
        (Skip, "first_steps", 0),
        (RollBack, "budget", -1),
        (RollBack, "lr_jump", 1),
        (RollBack, "moved", math.nan),
        (RollBack, "grown", "10"),
        (RollBack, "every", 0),
        (RollBack, "settle", -1),
        (RollBack, "keep", 0),
    ],
)
def test_what_each_response_has_is_checked(response: type[Response], name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} of {response.__name__} is .*; expected "):
        response(**{name: value})


@pytest.mark.parametrize("response", ALL)
def test_the_defaults_are_fine_and_leave_the_mode_to_the_guard(response: type[Response]) -> None:
    assert response().mode is None


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_given_by_its_settings_its_mode_or_not_at_all(name: str) -> None:
    kind = RESPONSES[name]
    assert response_from(name, None, "dry_run") == kind(mode="off" if name == "clip" else "dry_run")
    assert response_from(name, "off", "on") == kind(mode="off")
    assert response_from(name, kind(), "dry_run") == kind(mode="dry_run")
    own = kind(mode="on")
    assert response_from(name, own, "dry_run") is own


@pytest.mark.parametrize("given", [True, 3, {"mode": "on"}, [], Skip])
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"clip is .*; expected 'on', 'off', 'dry_run' or a gradvitals\.guard\.Clip"):
        response_from("clip", given, "on")


def test_settings_of_another_response_are_refused() -> None:
    with pytest.raises(ConfigError, match="skip is Clip"):
        response_from("skip", Clip(), "on")
