"""Guard: checks every step before the optimizer makes it, and responds to trouble as its policy says."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from gradvitals import notices
from gradvitals.collect.recorder import StepInputs
from gradvitals.errors import ConfigError, GradvitalsError, RunError
from gradvitals.guard.actions import (
    LAG,
    BufferBackup,
    DeviceResult,
    LRCut,
    LRCuts,
    SkippedTicks,
    StepNumbers,
    StepWrapper,
    is_guarded,
    reset_momentum,
    smallest,
    step_numbers,
    supports_found_inf,
)
from gradvitals.guard.monitor_link import MonitorLink
from gradvitals.guard.policy import (
    FINDING_OF,
    LARGEST_NORM,
    RESPONSES,
    ActionBudget,
    Clip,
    CutLR,
    Decision,
    EscalationPolicy,
    Evidence,
    Mode,
    ResetMomentum,
    Response,
    RollBack,
    Skip,
    classify,
    response_from,
)
from gradvitals.guard.snapshot import SnapshotManager, resolve
from gradvitals.guard.training_state import TrainingState
from gradvitals.monitor import Monitor
from gradvitals.report.describe import GUARD_KINDS, summarize_actions
from gradvitals.schedules import lr_factors
from gradvitals.store.reader import open_run
from gradvitals.types import Action, Finding

STATE_VERSION = 2

FINDINGS_EVERY = 10
"""Steps between two looks at the findings. A look sees the steps before the last look, so that what is seen does not
depend on how fast they are diagnosed."""

FINDINGS_TIMEOUT = 5.0
"""Seconds to wait for a diagnosis that is further behind than that."""

QUIET_STEPS = 50
"""Steps without clipping, or without a skip, after which the next one is printed again."""

SCALER_SKIPS = 20
"""Steps in a row that a GradScaler skips before that is trouble: it also skips some to find its scale."""


class Guard:
    """Keeps a run alive: clips, skips steps, resets momentum, cuts the learning rate, rolls back.

    Everything it does, would do in a dry run, or is not allowed to do, is an `Action` in the run's record.

    Args:
        monitor: The Monitor of the run; None if the Guard is passed to `gradvitals.watch`.
        mode: The mode of responses that are not given: ``observe`` makes each a dry run, ``act`` turns each on.
        clip: Clipping: ``on``, ``off``, ``dry_run`` or settings, a `Clip`; None to follow `mode`.
        skip: Skipping a step; a `Skip`.
        reset: Resetting momentum; a `ResetMomentum`.
        lr: Cutting the learning rate for a while; a `CutLR`.
        rollback: Restoring the last healthy snapshot; a `RollBack`.
        scheduler: The learning rate scheduler, or several. Those that tick at every step do not count a skipped one,
            and are rolled back with the rest.
        scaler: The GradScaler, if there is one.
        data: The position in the data: an object with `state_dict` and `load_state_dict`, such as a stateful loader or
            sampler, or a pair of functions that get and set it. For `resume`.
        folder: Folder for snapshots on disk, for `resume`; None keeps them in memory alone.
        decide: ``auto`` decides on the device if all optimizers support it (torch's fused ones, on a GPU), and else on
            the host, which on a GPU waits for the device at every step. ``host`` and ``device`` force it.

    Example:
        >>> import tempfile, torch, gradvitals as gv
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> monitor = gv.watch(model, optimizer, run=tempfile.mkdtemp() + "/run", config=gv.Config(quiet=True))
        >>> guard = gv.Guard(monitor, mode="act")
        >>> for batch in (1.0, float("nan"), 1.0):
        ...     loss = model(torch.full((8, 4), batch)).square().mean()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     monitor.observe(loss)
        ...     optimizer.step()
        >>> guard.step, [(action.kind, action.step) for action in guard.actions]
        (2, [('skip', 1)])
        >>> monitor.close()
    """

    def __init__(
        self,
        monitor: Monitor | None = None,
        *,
        mode: Literal["observe", "act"] = "observe",
        clip: Mode | Clip | None = None,
        skip: Mode | Skip | None = None,
        reset: Mode | ResetMomentum | None = None,
        lr: Mode | CutLR | None = None,
        rollback: Mode | RollBack | None = None,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        data: Any = None,
        folder: str | Path | None = None,
        decide: Literal["auto", "host", "device"] = "auto",
    ) -> None:
        if mode not in ("observe", "act"):
            raise ConfigError(f"mode is {mode!r}; expected 'observe' or 'act'")
        if decide not in ("auto", "host", "device"):
            raise ConfigError(f"decide is {decide!r}; expected 'auto', 'host' or 'device'")
        given = {"clip": clip, "skip": skip, "reset": reset, "lr": lr, "rollback": rollback}
        default: Mode = "on" if mode == "act" else "dry_run"
        self.responses: dict[str, Response] = {name: response_from(name, given[name], default) for name in RESPONSES}
        """The settings in force, in the order of escalation."""
        self._schedulers = list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler] if scheduler else []
        self._scaler, self._data, self._decide = scaler, data, decide
        self._folder = Path(folder) if folder is not None else None
        self._loop: GuardLoop | None = None
        self._active = False
        self._closed = self._reported_closure = False
        self._earlier: list[Action] = []
        if monitor is not None:
            self.attach(monitor)

    # -- start and end ----------------------------------------------------------------------------------------------

    def attach(self, monitor: Monitor) -> None:
        """Guard the run of this Monitor. `gradvitals.watch` calls it for a Guard that it is given."""
        link = MonitorLink(monitor)
        if self._loop is not None:
            raise GradvitalsError("this Guard guards a run already; make another one for another run")
        if any(map(is_guarded, link.optimizers)):
            raise GradvitalsError("this optimizer has a Guard already; close its Monitor first")
        on_device = self._decides_on_device(link)
        link.ranks.require_same(repr(list(self.responses.values())))
        state = TrainingState(
            link.model, link.optimizers, schedulers=self._schedulers, scaler=self._scaler, data=self._data
        )
        rollback, snapshots = self.responses["rollback"], None
        assert isinstance(rollback, RollBack)
        if rollback.mode == "on" or self._folder is not None:
            snapshots = SnapshotManager(
                state,
                every=rollback.every,
                settle=rollback.settle,
                keep=rollback.keep,
                folder=self._folder,
                on_problem=self._note_problem,
                group=link.ranks.group,
                stage=link.ranks.stage,
            )
            if self._folder is not None and state.cannot_restore:
                link.print("snapshots cannot restore " + "; ".join(state.cannot_restore))
        self._loop = GuardLoop(
            link,
            self.responses,
            snapshots,
            SkippedTicks(self._schedulers, self._scaler),
            on_device=on_device,
            to_disk=self._folder is not None,
        )
        self._active = True
        for wrapper in self._loop.wrappers:
            wrapper.wrap(self._before, self._after, self._failed, self._step_with_closure)
        link.on_scaler_skip(self._scaler_skipped)
        link.on_close(self.close)

    def _note_problem(self, text: str) -> None:
        if self._loop is not None:
            self._loop.link.report(notices.snapshot_error(text, self._loop.link.step))

    def _decides_on_device(self, link: MonitorLink) -> bool:
        supported = all(map(supports_found_inf, link.optimizers))
        if self._decide == "device" and not supported:
            names = ", ".join(sorted({type(one).__name__ for one in link.optimizers}))
            raise ConfigError(f"decide is 'device' with {names}; expected torch's own optimizers, with fused=True")
        on_gpu = all(parameter.is_cuda for parameter in link.parameters)
        return self._decide == "device" or (self._decide == "auto" and supported and on_gpu)

    def close(self) -> None:
        """Stop guarding: optimizers step alone again, snapshots are on disk, and a summary is printed."""
        if self._loop is None or self._closed:
            return
        self._closed = True
        loop = self._loop
        if self._active:
            self._attempt(loop.read_last_results, None)
        self._active = False
        loop.link.on_scaler_skip(None)
        loop.buffers.close()
        for wrapper in loop.wrappers:
            wrapper.unwrap()
            loop.lr_cuts.release(wrapper.optimizer)
        if loop.snapshots is not None:
            loop.snapshots.close()
        if self.actions:
            loop.link.print(self.summary())

    # -- at every step ----------------------------------------------------------------------------------------------

    def _before(self, wrapper: StepWrapper) -> bool:
        if not self._active:
            return True
        loop = self._the_loop
        if loop.snapshots is not None and loop.snapshots.found and not loop.started:
            text = f"{self._folder} holds snapshots of an earlier run, which guard.resume() would continue"
            loop.link.print(f"{text}; this run's own replace them as they become healthy")
        return bool(self._attempt(lambda: loop.before(wrapper), True))

    def _after(self, wrapper: StepWrapper, made: bool) -> None:
        if self._active:
            self._attempt(lambda: self._the_loop.after(wrapper, made), None)

    def _failed(self, wrapper: StepWrapper) -> None:
        if self._active:
            self._attempt(lambda: self._the_loop.failed(wrapper), None)

    def _scaler_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._active:
            self._attempt(self._the_loop.scaler_skipped, None)

    def _step_with_closure(self) -> None:
        if self._active and not self._reported_closure:
            self._reported_closure = True
            self._the_loop.link.report(notices.guard_absent(self._the_loop.link.step))

    def _attempt(self, work: Callable[[], Any], otherwise: Any) -> Any:
        """Do the Guard's part of a step. An error in it ends the guarding, not the training.

        With several ranks it ends the training too: the others would wait for this one's numbers forever.
        """
        try:
            return work()
        except Exception as error:
            self._active = False
            loop = self._the_loop
            if loop.link.ranks.several:
                raise
            for wrapper in loop.wrappers:
                loop.lr_cuts.release(wrapper.optimizer)
            loop.link.report(notices.guard_error(error, loop.link.step))
            return otherwise

    # -- for the user -----------------------------------------------------------------------------------------------

    @property
    def _the_loop(self) -> GuardLoop:
        if self._loop is None:
            raise GradvitalsError("this Guard has no run yet; give it to gradvitals.watch, or a Monitor to it")
        return self._loop

    @property
    def step(self) -> int:
        """Steps of training that count: without skipped ones, and reset by a rollback.

        If the device decides, some of the last steps may still turn out to be skipped.
        """
        return self._loop.step if self._loop is not None else 0

    @property
    def snapshots(self) -> int:
        """How many snapshots were taken so far."""
        return self._loop.num_snapshots if self._loop is not None else 0

    @property
    def actions(self) -> list[Action]:
        """What was done so far, would have been in a dry run, or was refused; after `resume`, also from before it."""
        done = self._loop.link.actions if self._loop is not None else ()
        return [*self._earlier, *(action for action in done if action.kind in GUARD_KINDS)]

    def summary(self) -> str:
        """What the Guard did, in a few lines."""
        return summarize_actions(self.actions)

    def resume(self) -> int:
        """Continue from the newest snapshot in `folder`, if there is one. Call it before the first step.

        Restores model, optimizers, schedulers, scaler, random generators, data position, the Monitor and the Guard. If
        the number of ranks has changed, sharded tensors are re-sharded, but random generators and the data position
        stay as they are.

        Returns:
            The number of steps that were done by then; 0 if there is no snapshot.
        """
        loop = self._the_loop
        if self._folder is None or loop.snapshots is None:
            raise GradvitalsError("there is no folder to resume from; give the Guard one, such as folder='snapshots'")
        restored = loop.snapshots.resume()
        if restored is None:
            return 0
        loop.link.load_state(restored.extra["monitor"])
        loop.load_state_dict(restored.extra["guard"])
        loop.started = True
        loop.link.print(f"the Guard continues from step {loop.step}, from {self._folder}")
        if restored.changed:
            loop.link.print(restored.changed)
        with contextlib.suppress(RunError), open_run(loop.link.run_path) as run:
            before = [action for action in run.actions if action.step < loop.link.step]
            self._earlier = [action for action in before if action.kind in GUARD_KINDS]
        return loop.step

    def state_dict(self) -> dict[str, Any]:
        """What the Guard has learned and may still do, for a checkpoint of your own."""
        return {"version": STATE_VERSION, **resolve(self._the_loop.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        if state.get("version") != STATE_VERSION:
            raise GradvitalsError(f"the state has version {state.get('version')!r}; this Guard reads {STATE_VERSION}")
        self._the_loop.load_state_dict(state)


class GuardLoop:
    """A Guard at work on one run: at every step it looks, asks the policy, acts and records.

    Args:
        link: The Monitor.
        responses: The settings, by the name of the Guard's argument.
        snapshots: Takes snapshots; None for none.
        ticks: Takes back the ticks of schedulers for skipped steps.
        on_device: Whether steps are decided on the device.
        to_disk: Whether snapshots serve another process, and so must hold the Monitor's state too.
    """

    def __init__(
        self,
        link: MonitorLink,
        responses: Mapping[str, Response],
        snapshots: SnapshotManager | None,
        ticks: SkippedTicks,
        *,
        on_device: bool,
        to_disk: bool,
    ) -> None:
        clip, skip, reset, cut, rollback = responses.values()
        assert isinstance(clip, Clip)
        assert isinstance(skip, Skip)
        assert isinstance(reset, ResetMomentum)
        assert isinstance(cut, CutLR)
        assert isinstance(rollback, RollBack)
        self.clip, self.skip, self.reset, self.cut, self.rollback = clip, skip, reset, cut, rollback
        self.link, self.snapshots, self.ticks, self.to_disk = link, snapshots, ticks, to_disk
        self.on_device = on_device
        self.wrappers = [StepWrapper(one, on_device=on_device, clip=clip, skip=skip) for one in link.optimizers]
        self.policy = EscalationPolicy(skip, [reset, cut, rollback])
        self.clip_budget = ActionBudget(clip)
        self.lr_cuts = LRCuts()
        self.buffers = BufferBackup(link.model)
        self.step = 0
        """Steps of training that count."""
        self.num_snapshots = 0
        self.started = False
        """Whether there is a snapshot of where the run started."""
        self._now = -1
        """The Monitor's number of the step in progress."""
        self._skipped = self._dropped = self._scaler_skipped = False
        """Whether some of the step in progress was skipped, dropped by a rollback, or skipped by a GradScaler."""
        self._ended = True
        self._uncounted = -1
        """The last step that turned out not to count."""
        self._scaler_streak = 0
        """Steps in a row that a GradScaler skipped."""
        self._last_of_kind: dict[str, int] = {}
        """The last step of each kind of action."""
        self._wanted = {name for one in (reset, cut, rollback) if one.mode != "off" for name in one.on}
        """Findings that trigger a response."""
        self._findings: dict[str, Finding] = {}
        self._blind = False
        """Whether the diagnosis is too far behind to wait for."""
        self._rolled_back = -2
        """The last step at which the run was rolled back."""
        if self._wanted:
            link.use_findings()

    # -- before and after an optimizer's step -------------------------------------------------------------------------

    def before(self, wrapper: StepWrapper) -> bool:
        """Whether this optimizer is to make its step."""
        inputs = self.link.before_step(wrapper.optimizer)
        self._start_step(self.link.step)
        self.ticks.step_starts(wrapper.optimizer)
        make = not self._dropped and (inputs is None or self._may_step(wrapper, inputs))
        if make:
            self.lr_cuts.apply(wrapper.optimizer, self._now)
        return make

    def after(self, wrapper: StepWrapper, made: bool) -> None:
        """The optimizer has made its step, or the Guard has skipped it."""
        if made:
            wrapper.is_new = False
            if self._scaler_skipped and self.skip.mode == "on":
                self.buffers.restore()
            else:
                self.buffers.save()
        else:
            if not self._skipped:
                self.ticks.discount_scaler()
            self._skipped = True
            self.ticks.step_skipped(None if self._dropped else wrapper.optimizer)
            self.buffers.restore()
            self.link.step_skipped(wrapper.optimizer)
            wrapper.optimizer._opt_called = True  # type: ignore[attr-defined]  # else its scheduler warns of the order
        if self.link.step != self._now:
            self._end_step()

    def failed(self, wrapper: StepWrapper) -> None:
        """The optimizer's step raised: whoever catches that may step again."""
        self.link.step_failed(wrapper.optimizer)
        lr_factors(wrapper.optimizer).restore()

    def scaler_skipped(self) -> None:
        """A GradScaler has found Inf and skips a step without calling the optimizer."""
        self._start_step(self.link.step)
        if self.link.ranks.several:  # other ranks may be about to step: they must know
            per_tensor = self.wrappers[0].clipper.per_tensor
            step_numbers(None, per_tensor=per_tensor, ranks=self.link.ranks, scaler_skips=1.0)
        self._scaler_skipped = self._skipped = True
        if self.skip.mode == "on":
            self.buffers.restore()
        self._judge_scaler_skip(self._now)

    def _start_step(self, now: int) -> None:
        """If a new step has started, finish the last one, and respond to findings."""
        if now == self._now:
            return
        if not self._ended:  # an optimizer steps again before others have: its data is drawn already
            self._end_step(late=True)
        self._now, self._ended = now, False
        self._skipped = self._dropped = self._scaler_skipped = False
        if CutLR.kind in self.lr_cuts.remove_expired(now):
            self._record("restore_lr", now, "", True, "the cut has expired")
        if self.snapshots is not None:
            self.snapshots.complete()
            if not self.started:  # a rollback must be possible from the first step; its batch is drawn already
                self.started = True
                self.num_snapshots += self.snapshots.take(now, self._extra(), to_disk=False)
                self.snapshots.complete()
            # Results from the device are known some steps later, and so is whether there was trouble.
            self.snapshots.settle(now - LAG if self.on_device else now)
        findings = self._new_findings(now)
        if findings:
            if self.snapshots is not None:
                self.snapshots.spoil()
            words = "; ".join(finding.title for finding in findings.values())
            self._respond(Evidence(step=now, words=words, findings=tuple(findings), can_roll_back=self._can_roll_back))

    def _end_step(self, *, late: bool = False) -> None:
        """All optimizers have had their turn."""
        self._ended = True
        if self._dropped:
            self.link.restart_baselines()
        if self._skipped or self._scaler_skipped:
            return
        self.step += 1
        if not self.on_device:
            self._scaler_streak = 0
        if self.snapshots is not None and self.snapshots.due(self.link.step) and not (self.policy.bad or late):
            self.num_snapshots += self.snapshots.take(self.link.step, self._extra())

    def read_last_results(self) -> None:
        """Training has ended: record what the device decided in the last steps."""
        for wrapper in self.wrappers:
            for result in wrapper.check.results():
                self._judge_result(wrapper, result, ended=True)
        self.ticks.step_starts()

    # -- findings -----------------------------------------------------------------------------------------------------

    def _new_findings(self, now: int) -> dict[str, Finding]:
        """Findings that trigger a response, by id; only at every tenth step. The same on all ranks."""
        if now % FINDINGS_EVERY or not self._wanted:
            return {}
        new = [] if self._blind else self.link.new_findings(now - FINDINGS_EVERY - 1, FINDINGS_TIMEOUT)
        if new is None:
            self._blind = True
            self.link.report(notices.guard_blind(FINDINGS_TIMEOUT, now))
        # What started before a rollback did not happen; and the rollback itself looks like a huge update.
        found = {one.id: one for one in new or () if one.id in self._wanted and one.first_step > self._rolled_back + 1}
        self.link.request_findings()  # for the next look; on all ranks, as they exchange numbers
        ranks = self.link.ranks
        if ranks.several:  # what one rank has found counts for all
            count = ranks.sum(torch.full((1,), float(len(found)), dtype=torch.float64, device=ranks.device))
            theirs = ranks.gather([one.to_json() for one in found.values()]) if float(count) else []
            found = {}
            for finding in (Finding.from_json(one) for each in theirs for one in each):
                found.setdefault(finding.id, finding)
            found = dict(sorted(found.items()))
        self._findings |= found
        return found

    def _known(self, ids: Iterable[str]) -> list[Finding]:
        return [self._findings[name] for name in ids if name in self._findings]

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _may_step(self, wrapper: StepWrapper, inputs: StepInputs) -> bool:
        found_inf = getattr(wrapper.optimizer, "found_inf", 0.0)
        per_tensor = wrapper.clipper.per_tensor
        numbers = step_numbers(inputs, per_tensor=per_tensor, ranks=self.link.ranks, scaler_skips=found_inf)
        if numbers is None:
            return True
        if self.on_device:
            # A new optimizer is decided on the host; results that are pending come first.
            for result in wrapper.check.results(None if wrapper.is_new else self._now):
                self._judge_result(wrapper, result)
                if self._dropped:
                    return False
            if not wrapper.is_new:
                self._decide_on_device(wrapper, inputs, numbers)
                return True
        return self._decide_on_host(wrapper, inputs, numbers)

    def _decide_on_host(self, wrapper: StepWrapper, inputs: StepInputs, numbers: StepNumbers) -> bool:
        ours = float(getattr(wrapper.optimizer, "found_inf", 0.0)) > 0
        if ours or (numbers.scaler_skips is not None and float(numbers.scaler_skips) > 0):
            self._scaler_skipped = True
            self._judge_scaler_skip(self._now)
            return ours and not self._dropped  # the step will do nothing, as the scaler tells it to
        norm, loss = float(numbers.norm), float(numbers.loss)
        factors = wrapper.clipper.factors(numbers, inputs, wrapper.baseline)
        decisions = self._judge(wrapper, self._now, norm, loss, wrapper.baseline.limits(self.skip))
        make = not self._dropped and not any(one.kind == Skip.kind and one.taken for one in decisions)
        if make and factors is not None and norm <= LARGEST_NORM:
            factor = float(smallest(factors, numbers.norm))
            if factor < 1 and self._note_clip(self._now, norm, factor):
                wrapper.clipper.apply(factors, numbers, inputs, wrapper.optimizer)
        return make

    def _decide_on_device(self, wrapper: StepWrapper, inputs: StepInputs, numbers: StepNumbers) -> None:
        """Let the device decide; the host reads the result later."""
        limits = wrapper.baseline.limits(self.skip)
        allowed = not self.policy.budgets[Skip.kind].refusal(self._now)
        skips = wrapper.check.skips(numbers, *(limits if allowed else (math.inf, math.inf)))
        if self.skip.mode != "on":
            skips = torch.zeros_like(skips)
        scaler_skips = wrapper.mark(skips, numbers.scaler_skips)
        factors = wrapper.clipper.factors(numbers, inputs, wrapper.baseline)
        clipping = factors is not None and self.clip.mode == "on" and not self.clip_budget.refusal(self._now)
        if factors is not None and clipping:
            wrapper.clipper.apply(factors, numbers, inputs, wrapper.optimizer)
        if self.skip.mode == "on":
            self.buffers.restore(skips)
            if wrapper is self.wrappers[0]:
                self.ticks.discount_scaler(skips * (1 - scaler_skips.to(skips)))
        factor, streak = smallest(factors, numbers.norm), torch.as_tensor(wrapper.check.streak)
        wrapper.check.send(self._now, limits, clipping, numbers.norm, numbers.loss, skips, scaler_skips, factor, streak)

    def _judge_result(self, wrapper: StepWrapper, result: DeviceResult, *, ended: bool = False) -> None:
        """A step that was decided on the device some steps ago. After the training `ended` it is only recorded."""
        if result.scaler_skipped:
            self._uncount(result.step)
            if not ended:
                self._judge_scaler_skip(result.step)
            return
        self._scaler_streak = 0
        if result.skipped:
            self._uncount(result.step)
            self.ticks.step_skipped(wrapper.optimizer)  # its own tick is long past: the next one is taken back
        decisions: list[Decision] = []
        if not ended:
            decisions = self._judge(
                wrapper, result.step, result.norm, result.loss, result.limits, skipped=result.skipped
            )
        if result.skipped and not self._dropped and not any(one.kind == Skip.kind for one in decisions):
            trouble, words = classify(result.norm, result.loss, result.limits)
            cost = {"steps": 1, "seconds": 0.0}
            self._record(Skip.kind, result.step, FINDING_OF.get(trouble, ""), True, words, cost=cost)
        if result.factor < 1 and not result.skipped:
            self._note_clip(result.step, result.norm, result.factor, done=result.clipping)

    def _judge_scaler_skip(self, step: int) -> None:
        """A GradScaler skipped this step. It does so now and then; if it continues, lowering the scale did not help."""
        self._scaler_streak += 1
        if self.snapshots is not None:
            self.snapshots.spoil()
        if self._scaler_streak >= SCALER_SKIPS:
            words = f"the GradScaler has skipped {self._scaler_streak} steps in a row"
            evidence = Evidence(step=step, now=self._now, trouble="nonfinite", words=words, persistent=True,
                                can_roll_back=self._can_roll_back)  # fmt: skip
            self._respond(evidence)

    def _uncount(self, step: int) -> None:
        """This step does not count; several optimizers may report the same one."""
        if step != self._uncounted:
            self._uncounted = step
            self.step -= 1

    def _judge(
        self,
        wrapper: StepWrapper,
        step: int,
        norm: float,
        loss: float,
        limits: tuple[float, float],
        skipped: bool | None = None,
    ) -> list[Decision]:
        trouble, words = classify(norm, loss, limits)
        far = self.rollback.ratio is not None and norm > self.rollback.ratio * wrapper.baseline.typical_norm
        able = self._can_roll_back
        evidence = Evidence(step=step, now=self._now, trouble=trouble, words=words, far=far, can_roll_back=able)
        decisions = self._respond(evidence, skipped=skipped)
        wrapper.baseline.learn(norm, loss)
        harmless = any(one.kind == Skip.kind and one.taken for one in decisions) and self.policy.streak < 2
        if self.snapshots is not None and trouble and not harmless:
            self.snapshots.spoil()
        return decisions

    @property
    def _can_roll_back(self) -> bool:
        return self.snapshots is not None and self.snapshots.healthy_step is not None

    # -- acting -------------------------------------------------------------------------------------------------------

    def _respond(self, evidence: Evidence, skipped: bool | None = None) -> list[Decision]:
        """Ask the policy, act and record. `skipped`: what the device has done already."""
        decisions = self.policy.judge(evidence)
        for decision in decisions:
            kind, taken, reason = decision.kind, decision.taken, decision.reason
            if kind == Skip.kind and skipped is not None:
                taken = skipped
            before = {"step": self.step, "lr_factor": self.lr_cuts.factor(self._now)}
            started, steps, after = time.perf_counter(), 0, dict[str, Any]()
            if taken and kind == Skip.kind:
                after, steps = {"step": self.step}, 1
            elif taken and kind == ResetMomentum.kind:
                after = self._reset_momentum(evidence)
            elif taken and kind == CutLR.kind:
                cut = self.cut
                self.lr_cuts.cuts[kind] = LRCut(self._now, cut.factor, cut.hold, cut.restore)
                after = {"lr_factor": self.lr_cuts.factor(self._now)}
            elif taken and kind == RollBack.kind:
                after = self._roll_back(evidence)
                if after:
                    steps, self.step, self._dropped = self.step - after["step"], after["step"], True
                    self._rolled_back, self._scaler_streak = self._now, 0
                else:
                    taken, reason = False, "no snapshot fits the model as it is now"
            cost = {"steps": steps, "seconds": time.perf_counter() - started} if taken else {}
            self._record(kind, evidence.step, decision.finding, taken, reason, before, after, cost)
        return decisions

    def _reset_momentum(self, evidence: Evidence) -> dict[str, Any]:
        reset = self.reset
        names = set() if reset.whole else {name for one in self._known(evidence.findings) for name in one.tensors}
        chosen = [parameter for name, parameter in self.link.model.named_parameters() if name in names] or None
        count = 0
        for wrapper in self.wrappers:
            count += reset_momentum(wrapper.optimizer, chosen)
            wrapper.is_new = True
        if reset.warmup:
            self.lr_cuts.cuts[reset.kind] = LRCut(self._now, reset.warmup_from, 0, reset.warmup, cosine=True)
        return {"tensors": count, "lr_factor": self.lr_cuts.factor(self._now)}

    def _roll_back(self, evidence: Evidence) -> dict[str, Any]:
        """Restore a snapshot; returns nothing if none fits any more, as after a change of the model."""
        assert self.snapshots is not None
        restored = self.snapshots.restore(min((one.first_step for one in self._known(evidence.findings)), default=None))
        if restored is None:
            return {}
        state = resolve({**restored.extra["guard"]})
        self.lr_cuts.load_state_dict(state["lr_cuts"], shift=self._now - restored.step)
        uncounted = set[int]()
        for wrapper, saved in zip(self.wrappers, state["wrappers"], strict=True):
            # What was pending then has long been read: some of those steps did not count.
            uncounted |= {one["step"] for one in saved["pending"] if one["skipped"] or one["scaler_skipped"]}
            wrapper.load_state_dict({**saved, "pending": []})
            for one in saved["pending"]:
                wrapper.baseline.learn(one["norm"], one["loss"])
        self.buffers.save()
        self.ticks.step_skipped()
        return {"step": int(state["step"]) - len(uncounted)}

    def _note_clip(self, step: int, norm: float, factor: float, *, done: bool | None = None) -> bool:
        """Record that a gradient was clipped, or would have been; returns whether it is to be.

        Args:
            step: Which step.
            norm: The norm before.
            factor: What is left of it.
            done: What the device has done already; None if that is decided here.
        """
        refusal = self.clip_budget.refusal(step)
        taken = self.clip.mode == "on" and not refusal if done is None else done
        if taken or not refusal:
            self.clip_budget.spent.append(step)
        if taken:
            words = f"the gradient norm is {norm:.3g}; it was clipped to {norm * factor:.3g} ({self.clip.method})"
        elif refusal and self.clip.mode == "on":
            words = refusal
        else:
            words = f"dry run; the gradient norm is {norm:.3g}; it would be clipped to {norm * factor:.3g}"
        self._record("clip", step, "explosion", taken, words, {"norm": norm}, {"norm": norm * factor} if taken else {})
        return taken

    def _record(
        self,
        kind: str,
        step: int,
        finding: str,
        taken: bool,
        reason: str,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
        cost: Mapping[str, Any] | None = None,
    ) -> None:
        details = {"before": before or {}, "after": after or {}, "cost": cost or {}}
        action = Action(kind=kind, step=step, finding=finding, taken=taken, reason=reason, **details)
        self.link.record(action)
        # Clips, skips and dry runs may come often: only the first in a while is printed.
        news = step - self._last_of_kind.get(kind, -QUIET_STEPS) >= QUIET_STEPS
        self._last_of_kind[kind] = step
        if news or (taken and kind not in (Clip.kind, Skip.kind)):
            self.link.print(f"Guard, {action}")

    # -- its state ----------------------------------------------------------------------------------------------------

    def _extra(self) -> dict[str, Any]:
        """What a snapshot holds beside the training state."""
        monitor = {"monitor": self.link.state_later()} if self.to_disk else {}
        return {"guard": self.state_dict(), **monitor}

    def state_dict(self) -> dict[str, Any]:
        """Everything that decisions depend on: plain values, or functions that wait for them."""
        return {
            "step": self.step,
            "now": self.link.step,
            "policy": self.policy.state_dict(),
            "clipped": list(self.clip_budget.spent),
            "lr_cuts": self.lr_cuts.state_dict(),
            "ticks": self.ticks.state_dict(),
            "rolled_back": self._rolled_back,
            "wrappers": [wrapper.state_dict() for wrapper in self.wrappers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. If the Monitor counts its steps anew, remembered steps are shifted."""
        shift = self.link.step - int(state["now"])
        self.step = int(state["step"])
        self.policy.load_state_dict(state["policy"], shift)
        self.clip_budget.spent = [step + shift for step in state["clipped"]]
        self.lr_cuts.load_state_dict(state["lr_cuts"], shift)
        self.ticks.load_state_dict(state["ticks"])
        self._rolled_back = int(state["rolled_back"]) + shift
        for wrapper, saved in zip(self.wrappers, state["wrappers"], strict=True):
            pending = [{**one, "step": one["step"] + shift} for one in saved["pending"]]
            wrapper.load_state_dict({**saved, "pending": pending})
        self.buffers.save()
