"""Config: every setting of a Monitor in one frozen record, checked where it is built."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gradvitals.errors import ConfigError, expect
from gradvitals.types import SOURCES

TENSOR_METRICS: tuple[str, ...] = (
    "grad/norm",
    "grad/max",
    "grad/zero_fraction",
    "grad/nonfinite",
    "gsnr",
    "gsnr/below_one_fraction",
    "gsnr/median",
    "weight/norm",
    "update/norm",
    "radial_gsnr",
    "vrgd/mean",
)
"""What a per-tensor reading can measure; whatever follows from these is derived at no cost."""

DETAIL_METRICS: tuple[str, ...] = (
    "grad/max",
    "grad/zero_fraction",
    "gsnr/below_one_fraction",
    "gsnr/median",
    "radial_gsnr",
)
"""Those of them that cost most and change least."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a Monitor. The defaults are meant to be left alone.

    Example:
        >>> Config(tensor_every=1).tensor_every
        1
        >>> Config(tensor_every=0)
        Traceback (most recent call last):
        ...
        gradvitals.errors.ConfigError: tensor_every is 0; expected a whole number of steps, 1 or more
    """

    tensor_every: int = 50
    """Steps from one per-tensor reading to the next. Global values are read at every step, within `overhead_budget`.

    Before the first of these, a young run is read at steps 0, 1, 2, 4, 8 and so on.
    """

    detail_every: int | None = None
    """Steps between readings of the costly metrics (`DETAIL_METRICS`). None: 4 × `tensor_every`, or 1 with it."""

    metrics: tuple[str, ...] = TENSOR_METRICS
    """Which per-tensor metrics to take. Fewer cost less; see `TENSOR_METRICS`."""

    sources: tuple[str, ...] = SOURCES
    """GSNR sources to use where the run offers them: micro-batches, ranks, Adam's moments, a window of steps."""

    overhead_budget: float | None = None
    """Largest share of the step's time that monitoring may take on the training thread, e.g. 0.01.

    Over it, single tensors are read more rarely than `tensor_every` says, and a norm that the loop does not compute
    itself is not read at every step. None: 2% on a CPU; no limit elsewhere. 1: no limit.
    """

    include: str | None = None
    """Regular expression; only parameters whose name it matches somewhere are watched."""

    exclude: str | None = None
    """Regular expression; parameters whose name it matches somewhere are not watched."""

    heads: int | Mapping[str, int] | None = None
    """Attention heads: None finds them, 0 turns them off, a number or {module name: number} sets them."""

    micro_batch_weights: Literal["size", "equal"] = "size"
    """How micro-batches of unequal size enter the sum: by their size, or each loss divided by their number."""

    norm_window: int = 100
    """Readings in the moving average and the variation of a norm."""

    gsnr_window: int = 20
    """Readings that a live GSNR or noise scale, and its interval, are averaged over."""

    window_steps: int = 100
    """Steps in the sliding window of the `window` source."""

    window_tensors: tuple[str, ...] | None = None
    """Parameters the `window` source follows; None follows the embedding and the output head if there is no Adam."""

    queue_size: int = 1024
    """Readings that may wait for the disk before further ones are dropped and counted."""

    diagnose: bool = True
    """Judge the readings by the rules of `gradvitals.diagnose`, off the training thread."""

    rules: Mapping[str, Any] = field(default_factory=dict)
    """Settings of rules by their id: False turns one off, a mapping sets it, e.g. ``{"explosion": {"ratio": 3}}``."""

    audit_every: int | None = 100
    """Steps from one comparison of all ranks to the next, in a run of several processes; None for none.

    A young run is compared at steps 0, 1, 2, 4 and so on, then every 50.
    """

    rank_timeout: float = 120.0
    """Seconds to wait for the other ranks when watching begins."""

    pipeline_stage: int | None = None
    """Of a pipeline whose stages use the same names: this rank's stage. Its tensors are named ``stage2.…`` then."""

    worker: Literal["process", "thread"] | None = None
    """Where readings are diagnosed and written: a process of its own, or a thread of this one.

    None: a process, but a thread in notebooks, and if no process can be started.
    """

    quiet: bool = False
    """Do not print findings to stderr when they open and close."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Anything to keep with the run: hyper-parameters, a commit, notes. Must be JSON."""

    def __post_init__(self) -> None:
        expect(self.tensor_every >= 1, "tensor_every", self.tensor_every, "a whole number of steps, 1 or more")
        detail = self.detail_every
        expect(
            detail is None or (detail >= 1 and detail % self.tensor_every == 0),
            "detail_every",
            detail,
            f"a multiple of tensor_every, which is {self.tensor_every}, or None",
        )
        for name in ("norm_window", "gsnr_window"):
            expect(getattr(self, name) >= 2, name, getattr(self, name), "2 readings or more")
        expect(self.window_steps >= 20, "window_steps", self.window_steps, "20 steps or more")
        audit = self.audit_every
        expect(audit is None or audit >= 1, "audit_every", audit, "a whole number of steps, 1 or more, or None")
        expect(self.rank_timeout > 0, "rank_timeout", self.rank_timeout, "a number of seconds above 0")
        expect(self.queue_size >= 1, "queue_size", self.queue_size, "1 or more")
        expect(
            self.micro_batch_weights in ("size", "equal"),
            "micro_batch_weights",
            self.micro_batch_weights,
            "'size' or 'equal'",
        )
        expect(self.worker in (None, "process", "thread"), "worker", self.worker, "'process', 'thread' or None")
        budget = self.overhead_budget
        expect(
            budget is None or 0 < budget <= 1, "overhead_budget", budget, "a share between 0 and 1, e.g. 0.01, or None"
        )
        for name, known in (("metrics", TENSOR_METRICS), ("sources", SOURCES)):
            unknown = sorted(set(getattr(self, name)) - set(known))
            expect(not unknown, name, unknown, f"names out of {', '.join(known)}")
        for name in ("include", "exclude"):
            pattern = getattr(self, name)
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ConfigError(f"{name} is {pattern!r}; expected a regular expression ({error})") from None

    @property
    def detail_factor(self) -> int:
        """Every how many-th per-tensor reading takes the costly metrics too."""
        if self.detail_every is not None:
            return self.detail_every // self.tensor_every
        return 1 if self.tensor_every == 1 else 4

    def worker_kind(self) -> Literal["process", "thread"]:
        """Where the worker runs if nothing stands in the way."""
        chosen = self.worker or os.environ.get("GRADVITALS_WORKER")
        if chosen in ("process", "thread"):
            return "thread" if chosen == "thread" else "process"
        return "thread" if "ipykernel" in sys.modules else "process"

    def watches(self, name: str) -> bool:
        """Whether a parameter of this name is to be watched."""
        if self.include is not None and not re.search(self.include, name):
            return False
        return self.exclude is None or not re.search(self.exclude, name)
