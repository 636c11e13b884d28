"""How a rank waits for others: a little at a time, and what is done at the last moment counts."""

from __future__ import annotations

from typing import Any

import pytest

from gradvitals.distributed.allreduce import RankReducer


class Work:
    """A collective that is not done in time, and then is, or has failed."""

    def __init__(self, *, completes: bool, fails: bool = False) -> None:
        self._completes, self._fails = completes, fails

    def wait(self, timeout: Any = None) -> None:
        if timeout is not None:
            raise RuntimeError("timed out")
        if self._fails:
            raise RuntimeError("connection closed by peer")

    def is_completed(self) -> bool:
        return self._completes


def waiting() -> RankReducer:
    exchange = RankReducer.__new__(RankReducer)
    exchange.ended = False
    return exchange


def test_what_is_done_just_after_the_time_was_up_is_done() -> None:
    assert waiting()._is_done(Work(completes=True))


def test_what_is_not_done_is_waited_for_again() -> None:
    assert not waiting()._is_done(Work(completes=False))


def test_what_has_failed_says_why() -> None:
    with pytest.raises(RuntimeError, match="closed by peer"):
        waiting()._is_done(Work(completes=True, fails=True))
