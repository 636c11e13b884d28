"""Config: every setting of a Monitor in one frozen record, checked where it is built."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gradvitals.errors import ConfigError, expect
from gradvitals.metrics import TENSOR_METRICS
from gradvitals.types import SOURCES


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a Monitor. The defaults are meant to be left alone.

    Args:
        tensor_every: Steps from one full reading, which includes single tensors, to the next. Before the first of these
            a young run is read at steps 0, 1, 2, 4, 8 and so on. Loss and learning rate are recorded at every step.
        detail_every: Steps between readings of the costly metrics (`gradvitals.metrics.DETAIL_METRICS`). None:
            4 × `tensor_every`, or 1 if that is 1.
        metrics: Per-tensor metrics to measure; fewer cost less. See `gradvitals.metrics.TENSOR_METRICS`.
        sources: GSNR sources to use if the run offers them: ``"microbatch"``, ``"ranks"``, ``"adam"``, ``"window"``.
        overhead_budget: The largest share of the training thread's time that readings may take, such as 0.05. If they
            take more, full readings become rarer, and a norm that the loop does not compute itself is not read at
            every step. None: 0.5%, after the first 0.05 seconds of readings. 1: no limit.
        include: Regular expression. Only parameters whose name contains a match are watched.
        exclude: Regular expression. Parameters whose name contains a match are not watched.
        heads: Attention heads. None finds them, 0 turns them off, a number or ``{module name: number}`` sets them.
        micro_batch_weights: How micro-batches of unequal size enter the sum: by their ``"size"``, or ``"equal"`` if
            the loop divides each loss by the number of micro-batches. None finds out from their norms.
        norm_window: Readings in the moving average and the variation of a norm.
        gsnr_window: Readings that a live GSNR and its interval are averaged over. The noise scale takes the
            latter half of the run.
        window_steps: Steps in the sliding window of the ``"window"`` source.
        window_tensors: Parameters that the ``"window"`` source follows. None: the embedding and the output head, if the
            optimizer is not Adam-like.
        queue_size: Readings that may wait for the disk before further ones are dropped and counted.
        diagnose: Whether rules judge the readings, in the worker.
        rules: Settings of rules by their id. False turns one off, True turns one on, a mapping sets it:
            ``{"explosion": {"ratio": 3}}``.
        audit_every: Steps from one comparison of all ranks to the next; None for none. A young run is compared at steps
            0, 1, 2, 4 and so on, then every 50.
        rank_timeout: Seconds to wait for the other ranks when watching starts.
        pipeline_stage: This rank's stage of a pipeline whose stages use the same names. Its tensors are then named
            ``stage2.…``.
        worker: Where readings are diagnosed and written: in a ``"process"`` of its own, or in a ``"thread"``. None: a
            process, but a thread in notebooks and if no process can be started.
        quiet: Print nothing: no findings, no verdict.
        extra: Anything to keep with the run: hyperparameters, a commit, notes. Must be JSON.

    Example:
        >>> Config(tensor_every=1).tensor_every
        1
        >>> Config(tensor_every=0)
        Traceback (most recent call last):
        ...
        gradvitals.errors.ConfigError: tensor_every is 0; expected a whole number of steps, 1 or more
    """

    tensor_every: int = 50
    detail_every: int | None = None
    metrics: tuple[str, ...] = TENSOR_METRICS
    sources: tuple[str, ...] = SOURCES
    overhead_budget: float | None = None
    include: str | None = None
    exclude: str | None = None
    heads: int | Mapping[str, int] | None = None
    micro_batch_weights: Literal["size", "equal"] | None = None
    norm_window: int = 100
    gsnr_window: int = 20
    window_steps: int = 100
    window_tensors: tuple[str, ...] | None = None
    queue_size: int = 1024
    diagnose: bool = True
    rules: Mapping[str, Any] = field(default_factory=dict)
    audit_every: int | None = 100
    rank_timeout: float = 120.0
    pipeline_stage: int | None = None
    worker: Literal["process", "thread"] | None = None
    quiet: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least, expected in (
            ("tensor_every", 1, "a whole number of steps, 1 or more"),
            ("norm_window", 2, "2 readings or more"),
            ("gsnr_window", 2, "2 readings or more"),
            ("window_steps", 20, "20 steps or more"),
            ("queue_size", 1, "1 or more"),
        ):
            expect(_is_whole(getattr(self, name), least), name, getattr(self, name), expected)
        detail = self.detail_every
        expect(
            detail is None or (_is_whole(detail, 1) and detail % self.tensor_every == 0),
            "detail_every",
            detail,
            f"a multiple of tensor_every, which is {self.tensor_every}, or None",
        )
        audit = self.audit_every
        expect(
            audit is None or _is_whole(audit, 1), "audit_every", audit, "a whole number of steps, 1 or more, or None"
        )
        expect(_is_number(self.rank_timeout, 0.0), "rank_timeout", self.rank_timeout, "a number of seconds above 0")
        budget = self.overhead_budget
        expect(
            budget is None or (_is_number(budget, 0.0) and budget <= 1),
            "overhead_budget",
            budget,
            "a share between 0 and 1, e.g. 0.01, or None",
        )
        for name, choices in (
            ("micro_batch_weights", ("size", "equal", None)),
            ("worker", ("process", "thread", None)),
        ):
            expect(getattr(self, name) in choices, name, getattr(self, name), f"one of {', '.join(map(repr, choices))}")
        for name in ("diagnose", "quiet"):
            expect(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        for name, known in (("metrics", TENSOR_METRICS), ("sources", SOURCES)):
            chosen = getattr(self, name)
            expect(isinstance(chosen, (tuple, list, set, frozenset)), name, chosen, "a tuple of names")
            unknown = sorted(set(chosen) - set(known))
            expect(not unknown, name, unknown, f"names out of {', '.join(known)}")
        for name in ("include", "exclude"):
            pattern = getattr(self, name)
            try:
                re.compile(pattern or "")
            except (re.error, TypeError) as error:
                raise ConfigError(f"{name} is {pattern!r}; expected a regular expression ({error})") from None
        for name in ("rules", "extra"):
            expect(isinstance(getattr(self, name), Mapping), name, getattr(self, name), "a dict")
        if self.rules:
            from gradvitals.diagnose import check_settings

            check_settings(self.rules)

    @property
    def detail_factor(self) -> int:
        """Every how many-th per-tensor reading takes the costly metrics too."""
        if self.detail_every is not None:
            return self.detail_every // self.tensor_every
        return 1 if self.tensor_every == 1 else 4

    def worker_kind(self) -> Literal["process", "thread"]:
        """Returns where the worker should run: in a process or a thread."""
        chosen = self.worker or os.environ.get("GRADVITALS_WORKER")
        if chosen in ("process", "thread"):
            return "thread" if chosen == "thread" else "process"
        return "thread" if "ipykernel" in sys.modules else "process"

    def watches(self, name: str) -> bool:
        """Whether a parameter of this name is to be watched."""
        if self.include is not None and not re.search(self.include, name):
            return False
        return self.exclude is None or not re.search(self.exclude, name)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object, above: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > above
