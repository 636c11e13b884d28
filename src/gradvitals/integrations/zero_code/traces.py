"""Tracebacks as they would be without gradvitals: an error of the script is the script's alone."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

PROGRAM = str(Path(__file__).with_name("program.py"))
OURS = str(Path(__file__).parents[1])
CLIPPING = str(Path(__file__).parents[2] / "measure" / "torch_hooks.py")


def leave_out_ours() -> None:
    """Have the traceback of the error that is about to end the program shown without our frames."""
    theirs = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _clean(error, set())
        theirs(kind, error, error.__traceback__)

    sys.excepthook = show


def _clean(error: BaseException | None, seen: set[int]) -> None:
    """Clean an error and those it came from."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = without_ours(error.__traceback__)
    for other in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        if isinstance(other, BaseException):
            _clean(other, seen)


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from where the script begins, without the frames that listen on its way."""
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    launches = [i for i, frame in enumerate(frames) if _file(frame) == PROGRAM]
    cleaned: TracebackType | None = None
    for frame in reversed(frames[launches[-1] + 1 if launches else 0 :]):
        if not _is_ours(_file(frame)):
            cleaned = TracebackType(cleaned, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return cleaned


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _is_ours(file: str) -> bool:
    # Python hides its own import machinery, but not around a frame of ours.
    return file.startswith((OURS, "<frozen importlib")) or file == CLIPPING
