"""Triton's interpreter without most of its work, which is to look for the same names again.

At every call of a function on the "device" it goes through its whole language to put its own functions in place of
the compiler's, although the first call within a launch has done so for all that follow until the launch ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from triton.runtime import interpreter


def look_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[Callable[..., Any]] = set()

    def replace_once(function: Callable[..., Any]) -> Any:
        if function in done:
            return None  # what a call gets back, it drops; a launch, which comes first, needs it to end with
        done.add(function)
        return replace(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            done.clear()

    monkeypatch.setattr(interpreter, "_patch_lang", replace_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
