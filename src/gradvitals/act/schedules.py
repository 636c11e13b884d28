"""GSNRScheduler: a learning rate that waits for a signal before it rises, and falls when the signal is gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from gradvitals.act.counted_gsnr import CountedGSNR, accepted
from gradvitals.act.inbox import Inbox, leads, record
from gradvitals.act.lr_factor import lr_factors, optimizer_of
from gradvitals.act.pacing import Decision, Pace, PaceSettings
from gradvitals.errors import ConfigError, RunError
from gradvitals.worker.worker import print_line
from gradvitals.monitor import Monitor
from gradvitals.types import Action, Source

STATE_VERSION = 1

MISSED_AFTER = 100
"""Steps without a GSNR to act on after which it is told, once."""


class GSNRScheduler:
    """Multiplies the learning rate that a schedule sets by a factor that follows the GSNR.

    **Warmup**: over `warmup_steps` steps the factor rises in a straight line to 1. While the interval of the GSNR
    includes 0, and is narrow enough to mean it, the rise is held, for `max_extension` steps in all at most.

    **Decay**: the factor is multiplied by `decay` when the GSNR has dropped. That is so when its upper end is `drop`
    times below the highest lower end since the warmup or the last decay, and the loss has stopped falling; or when
    it fell by `sudden_drop` at once, further than it may by itself as a run goes on. Never twice within `cooldown`.

    The factor is in `group["lr"]` only while the optimizer steps, so that a scheduler of any kind, or a loop that sets
    rates by hand, goes on beside it and is never told. Go on calling it yourself: this one does not.

    What is decided depends on the readings alone, not on when they arrive: every `look_every` steps the readings that
    are `lag` steps old are looked at, and waited for where they have not arrived.

    Args:
        monitor: Whose readings to follow.
        optimizer: The optimizer, or the torch scheduler that sets its rates.
        warmup_steps: Length of the warmup; 0 for none, and then none is extended.
        warmup_start: Share of the rate in the first step.
        warmup_in_schedule: The schedule has a warmup of `warmup_steps` itself, in a straight line from
            `warmup_start`. Then it is stretched, and there is no second one.
        max_extension: Steps that the warmup may be held for. None: four times `warmup_steps`.
        near_zero: Hold it only where the upper end of the interval, for the batch of one step, is below this as well.
            None: also where the interval is merely wide. In the first hundred steps it is, in healthy runs too.
        decay: Factor of one decay; 1 for none.
        drop: How far the GSNR must have fallen, by the intervals.
        sudden_drop: The same from one average to the next that shares no reading with it.
        plateau: Whether a drop that is not sudden needs a loss that has stopped falling. By itself a drop says
            little: a GSNR falls in nearly every healthy run.
        readings: Readings that an average must be over before it counts.
        in_a_row: Averages that must agree before a decay.
        cooldown: Steps from one decay to the next at least.
        min_factor: Decays end here.
        source: Follow this source of GSNR only. None: micro-batches or ranks, never Adam's moments or a window.
        look_every: Steps from one look to the next.
        lag: Steps from a reading to the look that counts it.

    Example:
        >>> import tempfile, torch, gradvitals as gv
        >>> from gradvitals.act.schedules import GSNRScheduler
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> monitor = gv.watch(model, optimizer, run=tempfile.mkdtemp() + "/paced")
        >>> pace = GSNRScheduler(monitor, optimizer, warmup_steps=4, warmup_start=0.2)
        >>> rates = []
        >>> for _ in range(6):
        ...     rates.append(round(pace.get_last_lr()[0], 3))
        ...     for _ in range(2):
        ...         (model(torch.randn(8, 4)).square().mean() / 2).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     pace.step()
        >>> rates
        [0.02, 0.04, 0.06, 0.08, 0.1, 0.1]
        >>> monitor.close()
    """

    def __init__(
        self,
        monitor: Monitor,
        optimizer: torch.optim.Optimizer | LRScheduler,
        *,
        warmup_steps: int = 0,
        warmup_start: float = 0.01,
        warmup_in_schedule: bool = False,
        max_extension: int | None = None,
        near_zero: float | None = 0.5,
        decay: float = 1 / 3,
        drop: float = 4.0,
        sudden_drop: float = 3.0,
        plateau: bool = True,
        readings: int = 5,
        in_a_row: int = 3,
        cooldown: int = 500,
        min_factor: float = 0.01,
        source: Source | None = None,
        look_every: int = 10,
        lag: int = 10,
    ) -> None:
        if look_every < 1 or lag < 0:
            raise ConfigError(f"look_every is {look_every}, lag is {lag}; expected 1 step or more, and 0 or more")
        settings = PaceSettings(
            warmup_steps=warmup_steps,
            warmup_start=warmup_start,
            warmup_in_schedule=warmup_in_schedule,
            max_extension=max_extension,
            near_zero=near_zero,
            decay=decay,
            drop=drop,
            sudden_drop=sudden_drop,
            plateau=plateau,
            readings=readings,
            in_a_row=in_a_row,
            cooldown=cooldown,
            min_factor=min_factor,
        )
        evidence = CountedGSNR(sources=accepted(source), window=monitor.config.gsnr_window)
        self.optimizer = optimizer_of(optimizer, "GSNRScheduler")
        self.actions: list[Action] = []
        """What was done so far, oldest first."""
        self._monitor = monitor
        self._look_every = look_every
        self._pace = Pace(settings)
        self._evidence = evidence
        self._said_missing = False
        self._inbox = Inbox(monitor, lag=lag)
        self._factors = lr_factors(self.optimizer)
        self._factors.set(self, self._pace.factor)

    def step(self) -> None:
        """Tell that the optimizer has made a step. Call it once after each, in any order with another scheduler."""
        decisions = self._pace.tick(self._monitor.step)
        if self._pace.made % self._look_every == 0:
            decisions += self._look()
        self._factors.set(self, self._pace.factor)
        self._tell(decisions)

    def _look(self) -> list[Decision]:
        now, decisions = self._monitor.step, []
        for readings in self._inbox.take():
            for reading in readings:
                if "loss" in reading.values:
                    self._pace.see_loss(reading.step, reading.values["loss"])
            average = self._evidence.take(readings)
            if average is not None:
                decisions += self._pace.take(average, self._evidence.source, now)
        if not self._evidence.source and self._pace.made >= MISSED_AFTER and not self._said_missing:
            self._said_missing = True
            print_line(f"GSNRScheduler: {self._evidence.missing()}. The learning rate stays as scheduled", self._quiet)
        return decisions

    def _tell(self, decisions: Sequence[Decision]) -> None:
        step = self._monitor.step
        new = [
            Action(kind=kind, step=step, finding=pattern, taken=True, before=before, after=after, reason=reason)
            for kind, pattern, reason, before, after in decisions
        ]
        for action in new:
            print_line(f"step {step}: {action.reason} ({action.kind})", self._quiet)
        self.actions += new
        record(self._monitor, new)

    @property
    def factor(self) -> float:
        """What this scheduler multiplies the rate of the next step by."""
        return self._pace.factor

    @property
    def status(self) -> str:
        """Where it stands, in words."""
        pace, settings = self._pace, self._pace.settings
        if not self._evidence.source and pace.made >= MISSED_AFTER:
            return self._evidence.missing()
        if not pace.warm:
            hold = f", held for {pace.held} steps so far" if pace.held else ""
            return f"warmup: {pace.ramp} of {settings.warmup_steps} steps{hold}"
        share = f"{pace.decayed:.3g} of " if pace.decayed < 1 else ""
        return f"at {share}the schedule's rate"

    def get_last_lr(self) -> list[float]:
        """The rate of every group as the next step will use it, with the factors of all who multiply it."""
        return [float(group["lr"]) * self._factors.product for group in self.optimizer.param_groups]

    def detach(self) -> None:
        """Multiply no more: the rate is the schedule's own from the next step on."""
        self._factors.drop(self)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs so that the same readings lead to the same decisions. Waits for readings."""
        return {
            "version": STATE_VERSION,
            "pace": self._pace.state_dict(),
            "evidence": self._evidence.state_dict(),
            "inbox": self._inbox.state_dict(),
            "actions": [action.to_json() for action in self.actions],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; load the Monitor's, the optimizer's and the other scheduler's as well."""
        if state.get("version") != STATE_VERSION:
            raise RunError(f"the state has version {state.get('version')!r}; this gradvitals reads {STATE_VERSION}")
        self._pace.load_state_dict(state["pace"])
        self._evidence.load_state_dict(state["evidence"])
        self._inbox.load_state_dict(state["inbox"])
        self.actions = [Action.from_json(action) for action in state["actions"]]
        self._factors.set(self, self._pace.factor)

    @property
    def _quiet(self) -> bool:
        return self._monitor.config.quiet or not leads(self._monitor)

    def __repr__(self) -> str:
        return f"GSNRScheduler(factor={self.factor:.4g}, {self.status!r})"
