"""Triton's interpreter without most of its work, which is done again and again, or for nothing.

At every call of a function on the "device" it goes through its whole language to put its own functions in place of
the compiler's, and at the end of every launch it puts them back; here they stay for as long as a test takes. Whether
numbers overflow it computes at every sum of integers, and drops the answer: only with `debug` would it be looked at.
And which type of numpy stands for one of Triton's it finds in a table that it makes anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from triton.runtime import interpreter


@contextmanager
def interpreted_faster() -> Iterator[None]:
    put_in_place, builder = interpreter._patch_lang, interpreter.interpreter_builder
    replaced, done = interpreter._LangPatchScope(), set[Callable[..., Any]]()

    def put_in_place_once(function: Callable[..., Any]) -> Any:
        if function not in done:
            done.add(function)
            replaced._changes += put_in_place(function)._changes
        return interpreter._LangPatchScope()  # with nothing to put back at the end of a launch

    look_up, looked_up = interpreter._get_np_dtype, dict[str, Any]()

    def look_up_once(kind: Any) -> Any:
        name = kind.scalar.name  # a block is of the type of its elements
        if name not in looked_up:
            looked_up[name] = look_up(kind)
        return looked_up[name]

    assert not builder.options.debug
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", put_in_place_once)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_get_np_dtype", look_up_once)
        yield
    replaced.restore()
