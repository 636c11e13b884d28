"""Settings are checked where they are written down, in words that help."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gradvitals.errors import ConfigError
from gradvitals.guard.policy import Clip, Response, RollBack, Skip


@pytest.mark.parametrize(
    ("response", "name", "value"),
    [
        (Clip, "mode", "maybe"),
        (Skip, "mode", True),
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
