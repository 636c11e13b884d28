"""Keeping out of the way: an error of ours ends one part of the reading, and never reaches the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradvitals.errors import LoopError
from gradvitals.measure.clock import Clock


class Attempts:
    """Does parts of the reading by their name.

    Args:
        clock: Keeps account of what they cost.
        on_error: Called with the name of a part and its error; that part is not tried again.
        on_gpu: Whether what is read may be on a GPU.
    """

    def __init__(self, clock: Clock, on_error: Callable[[str, Exception], None], *, on_gpu: bool) -> None:
        self._clock = clock
        self._on_error = on_error
        self._on_gpu = on_gpu
        self._broken: set[str] = set()
        self._told: set[str] = set()
        self._ended = False

    def __call__(self, part: str, work: Callable[..., Any], *args: Any) -> None:
        """Do one part, unless it has failed before."""
        if self._ended or part in self._broken or (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            return  # what a CUDA graph captures is not ours to add to
        try:
            if not self._clock.keeps:
                work(*args)
                return
            with self._clock:
                work(*args)
        except Exception as error:
            self.fail(part, error)

    def end(self) -> None:
        """Do nothing any more."""
        self._ended = True

    def fail(self, part: str, error: Exception) -> None:
        """A part has met an error. One in what the loop has told concerns that call alone, and is told once."""
        if not isinstance(error, LoopError):
            self._broken.add(part)
        elif str(error) in self._told:
            return
        else:
            self._told.add(str(error))
        self._on_error(part, error)
