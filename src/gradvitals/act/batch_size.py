"""BatchSizeScheduler: a batch that grows with the noise scale, through more micro-batches a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from gradvitals.act.counted_gsnr import CountedGSNR
from gradvitals.act.inbox import Inbox, leads, record
from gradvitals.act.lr_factor import lr_factors, optimizer_of
from gradvitals.diagnose.history import Average, same_size
from gradvitals.errors import RunError, expect
from gradvitals.judge import say
from gradvitals.monitor import Monitor
from gradvitals.types import Action

STATE_VERSION = 1

Rule = Literal["sqrt", "linear"]
POWERS: dict[Rule, float] = {"sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What the noise scale says about the batch, in words and figures."""

    batch_size: int
    """The batch to take, which may be the present one."""
    current: int
    reason: str
    step: int = 0
    """The step of the reading that it rests on."""
    noise_scale: float = math.nan
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        verb = "keep" if self.batch_size == self.current else "take"
        return f"{verb} a batch of {self.batch_size}: {self.reason}"


@dataclass
class Growth:
    """The batch as a function of a sequence of GSNR averages: no torch, no clock, no thread."""

    batch_size: int
    least: int
    most: int
    factor: float = 2.0
    """How far over the batch the lower end of the noise scale must be, and for shrinking, under it the upper end."""
    readings: int = 5
    in_a_row: int = 3
    cooldown: int = 200
    shrink: bool = False
    made: int = field(default=0, init=False)
    """Steps of training made."""
    changed_at: int = field(default=-1, init=False)
    over_for: int = field(default=0, init=False)
    under_for: int = field(default=0, init=False)

    def take(self, average: Average) -> Proposal:
        """What a new average says."""
        size = self.batch_size
        if math.isnan(average.step_size) or math.isnan(average.batch_size):
            return self._keep(average, "the loop does not tell its samples; it has to, observe(loss, batch_size=...)")
        if not same_size(average.step_size, size):
            told = f"the loop tells {average.step_size:g} samples a step so far, and this schedule is at {size}"
            more = (
                "waiting for readings at that size" if self.changed_at >= 0 else "give it the samples of a whole step"
            )
            return self._keep(average, f"{told}; {more}")
        if average.count < self.readings:
            return self._keep(average, f"only {average.count} readings so far, {self.readings} are needed")
        if average.low <= 0:
            return self._keep(average, "the noise scale is not identifiable: the signal cannot be told from 0")
        low, high = average.batch_size / average.high, average.batch_size / average.low
        self.over_for = self.over_for + 1 if low > self.factor * size else 0
        self.under_for = self.under_for + 1 if high * self.factor < size else 0
        interval = f"the noise scale is {average.batch_size / average.value:.4g} [{low:.4g}, {high:.4g}]"
        target = size
        if self.over_for:
            target, run = min(2 * size, self.most), self.over_for
            told = f"{interval}, over {self.factor:g} × {size} by its lower end"
        elif self.under_for and self.shrink:
            target, run = max(size // 2, self.least), self.under_for
            told = f"{interval}, under {size} / {self.factor:g} by its upper end"
        if target == size:
            at_end = ", and the batch is at its limit" if self.over_for or (self.under_for and self.shrink) else ""
            return self._keep(average, f"{interval} for a batch of {size}{at_end}", identifiable=True)
        if run < self.in_a_row:
            return self._keep(average, f"{told}, {run} of {self.in_a_row} times", identifiable=True)
        if self.changed_at >= 0 and self.made - self.changed_at < self.cooldown:
            return self._keep(average, f"{told}, but the last change was less than {self.cooldown} steps ago", True)
        return self._proposal(average, target, told, identifiable=True)

    def apply(self, proposal: Proposal) -> None:
        """The batch was changed as proposed."""
        self.batch_size, self.changed_at, self.over_for, self.under_for = proposal.batch_size, self.made, 0, 0

    def _keep(self, average: Average, reason: str, identifiable: bool = False) -> Proposal:
        if not identifiable:
            self.over_for = self.under_for = 0
        return self._proposal(average, self.batch_size, reason, identifiable=identifiable)

    def _proposal(self, average: Average, target: int, reason: str, *, identifiable: bool) -> Proposal:
        figures = {}
        if identifiable:
            ends = {"noise_scale": average.value, "low": average.high, "high": average.low}
            figures = {name: average.batch_size / end for name, end in ends.items()}
        return Proposal(batch_size=target, current=self.batch_size, reason=reason, step=average.step, **figures)


class BatchSizeScheduler:
    """Doubles the batch when the noise scale has outgrown it.

    The rule: when the lower end of the noise scale's interval has been over `factor` times the batch for `in_a_row`
    averages, the batch doubles. Not within `cooldown` steps of the last change, and not over `max_batch_size`. Readings
    from before a change are other quantities: they do not count after it.

    With ``apply=False`` it only proposes (`proposal`, and an `Action` that was not taken). With ``apply=True``
    `accumulation_steps` grows, and a loop that makes so many micro-batches a step has the larger batch. The loop has to
    tell its samples, ``monitor.observe(loss, batch_size=...)``, as a size told once to `watch` would be wrong after the
    first change.

    Args:
        monitor: Whose readings to follow. The noise scale comes from micro-batches, so a step needs two or more.
        batch_size: Samples of one optimizer step, at the start.
        accumulation_steps: Micro-batches they are made of, at the start.
        max_batch_size: Largest batch. None: eight times `batch_size`.
        apply: Whether to change `accumulation_steps`, or only to propose.
        optimizer: The optimizer, or its torch scheduler. Decides about `lr_rule`; needed for `scale_lr`.
        scale_lr: Multiply the learning rate by `lr_multiplier` as well, beside any other schedule.
        lr_rule: How the rate goes with the batch: "sqrt" or "linear". None: linear for SGD, else sqrt.
        factor: How far over the batch the noise scale must be.
        readings: Readings that an average must be over before it counts.
        in_a_row: Averages that must agree.
        cooldown: Steps from one change to the next at least.
        shrink: Halve the batch where the upper end of the noise scale is `factor` times below it.
        min_batch_size: Smallest batch that `shrink` leads to. None: `batch_size`.
        look_every: Steps from one look at the readings to the next.
        lag: Steps from a reading to the look that counts it.
    """

    def __init__(
        self,
        monitor: Monitor,
        *,
        batch_size: int,
        accumulation_steps: int,
        max_batch_size: int | None = None,
        apply: bool = False,
        optimizer: torch.optim.Optimizer | LRScheduler | None = None,
        scale_lr: bool = False,
        lr_rule: Rule | None = None,
        factor: float = 2.0,
        readings: int = 5,
        in_a_row: int = 3,
        cooldown: int = 200,
        shrink: bool = False,
        min_batch_size: int | None = None,
        look_every: int = 10,
        lag: int = 10,
    ) -> None:
        most = 8 * batch_size if max_batch_size is None else max_batch_size
        least = batch_size if min_batch_size is None else min_batch_size
        _check(batch_size, accumulation_steps, least, most, factor, look_every, lag)
        expect(readings >= 2 and in_a_row >= 1, "readings, in_a_row", (readings, in_a_row), "2 or more, 1 or more")
        expect(cooldown >= 0, "cooldown", cooldown, "a number of steps, 0 or more")
        expect(lr_rule in (None, *POWERS), "lr_rule", lr_rule, "'sqrt', 'linear' or None")
        expect(not scale_lr or optimizer is not None, "scale_lr", scale_lr, "an optimizer as well, to scale its rate")
        self._optimizer = None if optimizer is None else optimizer_of(optimizer, "BatchSizeScheduler")
        self.lr_rule: Rule = lr_rule or ("linear" if isinstance(self._optimizer, torch.optim.SGD) else "sqrt")
        self.actions: list[Action] = []
        """What was done or proposed so far, oldest first."""
        self._monitor = monitor
        self._first_size = batch_size
        self._micro_batch = batch_size // accumulation_steps
        self._apply = apply
        self._look_every = look_every
        self._evidence = CountedGSNR(window=monitor.config.gsnr_window)
        self._growth = Growth(
            batch_size,
            least,
            most,
            factor=factor,
            readings=readings,
            in_a_row=in_a_row,
            cooldown=cooldown,
            shrink=shrink,
        )
        self._proposal: Proposal | None = None
        self._proposed = batch_size
        self._inbox = Inbox(monitor, lag=lag)
        self._scales = self._optimizer if scale_lr else None

    # -- for the loop -------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Samples of one optimizer step, as it is now."""
        return self._growth.batch_size

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of the next step. Ask once at its beginning."""
        return self._growth.batch_size // self._micro_batch

    @property
    def lr_multiplier(self) -> float:
        """What the learning rate goes with the batch by; in force only with `scale_lr`."""
        return float((self._growth.batch_size / self._first_size) ** POWERS[self.lr_rule])

    @property
    def proposal(self) -> Proposal:
        """What the newest reading says about the batch, and why."""
        if self._proposal is not None:
            return self._proposal
        return Proposal(batch_size=self.batch_size, current=self.batch_size, reason=self._evidence.missing())

    def step(self) -> None:
        """Tell that the optimizer has made a step. Call it once after each."""
        self._growth.made += 1
        if self._growth.made % self._look_every:
            return
        for readings in self._inbox.take():
            average = self._evidence.take(readings)
            if average is not None:
                self._act(self._growth.take(average))

    def _act(self, proposal: Proposal) -> None:
        self._proposal = proposal
        if proposal.batch_size in (proposal.current, self._proposed):
            self._proposed = proposal.batch_size  # a proposal is told once, and again after it was withdrawn
            return
        before = self._figures()
        if self._apply:
            self._growth.apply(proposal)
            self._scale()
        share = proposal.batch_size / self._first_size
        after: dict[str, Any] = {"batch_size": proposal.batch_size}
        after |= {"accumulation_steps": proposal.batch_size // self._micro_batch}
        after |= {"lr_multiplier": share ** POWERS[self.lr_rule], "noise_scale": proposal.noise_scale}
        after |= {"noise_scale_low": proposal.low, "noise_scale_high": proposal.high}
        self._proposed = proposal.batch_size
        action = Action(
            kind="batch_size",
            step=self._monitor.step,
            finding="batch_too_small" if proposal.batch_size > proposal.current else "batch_too_large",
            taken=self._apply,
            before=before,
            after=after,
            reason=str(proposal),
        )
        self.actions.append(action)
        quiet = self._monitor.config.quiet or not leads(self._monitor)
        say(f"step {action.step}: {action.reason} ({'done' if self._apply else 'proposed'})", quiet)
        record(self._monitor, [action])

    def _figures(self) -> dict[str, Any]:
        multiplier = {"lr_multiplier": self.lr_multiplier}
        return {"batch_size": self.batch_size, "accumulation_steps": self.accumulation_steps} | multiplier

    def _scale(self) -> None:
        if self._scales is not None:
            lr_factors(self._scales).set(self, self.lr_multiplier)

    # -- resuming -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs so that the same readings lead to the same batches. Waits for readings."""
        growth = {f.name: getattr(self._growth, f.name) for f in fields(Growth) if not f.init}
        return {
            "version": STATE_VERSION,
            "growth": {**growth, "batch_size": self._growth.batch_size},
            "first_size": self._first_size,
            "micro_batch": self._micro_batch,
            "proposal": None if self._proposal is None else asdict(self._proposal),
            "proposed": self._proposed,
            "evidence": self._evidence.state_dict(),
            "inbox": self._inbox.state_dict(),
            "actions": [action.to_json() for action in self.actions],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        if state.get("version") != STATE_VERSION:
            raise RunError(f"the state has version {state.get('version')!r}; this gradvitals reads {STATE_VERSION}")
        saved, mine = (state["first_size"], state["micro_batch"]), (self._first_size, self._micro_batch)
        if saved != mine:
            raise RunError(
                f"the state began with a batch of {saved[0]} in micro-batches of {saved[1]}, this schedule with "
                f"{mine[0]} in {mine[1]}; build it with the same figures"
            )
        for name, value in state["growth"].items():
            setattr(self._growth, name, value)
        self._proposal = None if state["proposal"] is None else Proposal(**state["proposal"])
        self._proposed = state["proposed"]
        self._evidence.load_state_dict(state["evidence"])
        self._inbox.load_state_dict(state["inbox"])
        self.actions = [Action.from_json(action) for action in state["actions"]]
        self._scale()

    def __repr__(self) -> str:
        return f"BatchSizeScheduler(batch_size={self.batch_size}, accumulation_steps={self.accumulation_steps})"


def _check(size: int, parts: int, least: int, most: int, factor: float, look_every: int, lag: int) -> None:
    expect(size >= 1, "batch_size", size, "the samples of one optimizer step, 1 or more")
    expect(parts >= 1 and size % parts == 0, "accumulation_steps", parts, f"a divisor of the batch size, {size}")
    expect(most >= size, "max_batch_size", most, f"{size}, the batch size, or more")
    expect(least <= size, "min_batch_size", least, f"{size}, the batch size, or less")
    micro = size // parts
    expect(least >= 1 and least % micro == 0, "min_batch_size", least, f"a multiple of the micro-batch, {micro}")
    expect(most % micro == 0, "max_batch_size", most, f"a multiple of the micro-batch, {micro}")
    expect(factor > 1, "factor", factor, "more than 1")
    expect(look_every >= 1 and lag >= 0, "look_every, lag", (look_every, lag), "1 step or more, and 0 or more")
