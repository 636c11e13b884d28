"""Guard: checks every step before the optimizer makes it, and responds to trouble as its policy says."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from gradvitals import notices
from gradvitals.collect.optimizer_state import StepInputs
from gradvitals.errors import ConfigError, GradvitalsError, RunError
from gradvitals.guard.actions import (
    LAG,
    BufferBackup,
    SkippedTicks,
    StepNumbers,
    StepResult,
    StepWrapper,
    WeightCheck,
    copy_all,
    is_guarded,
    largest_lr,
    smallest,
    step_numbers,
    supports_found_inf,
)
from gradvitals.guard.policy import (
    LARGEST_NORM,
    LEVEL_HISTORY,
    LEVEL_STEPS,
    RESPONSES,
    Clip,
    LossLevel,
    Mode,
    RollBack,
    Skip,
    SpikeMemory,
    response_from,
)
from gradvitals.guard.ranks import Ranks
from gradvitals.guard.snapshot import HostCopy, Snapshot, SnapshotManager, resolve
from gradvitals.guard.training_state import TrainingState, dense
from gradvitals.monitor import Monitor
from gradvitals.report.format import GUARD_KINDS, summarize_actions
from gradvitals.schedules import lr_factors
from gradvitals.store.reader import open_run
from gradvitals.types import Action
from gradvitals.worker.worker import print_line

STATE_VERSION = 3
LR_ROSE = 1.5
"""A learning rate that rose by this factor since the snapshot, within what the run has used, explains a higher loss."""

BUDGET_WINDOW = 1000  # a budget limits how often a response acts within this many steps
QUIET_STEPS = 50  # steps without clipping, or without a skip, after which the next one is printed again


class Guard:
    """Keeps a run alive: skips steps that would ruin it, and rolls back a model that has become worse.

    Everything it does, would do in a dry run, or is not allowed to do, is an `Action` in the run's record.

    A step that is not finite is skipped, and so is one far beyond everything the run has shown. The run is rolled back
    if its weights are not finite; or if its loss rises above all recent levels, something has happened to the weights
    that explains it, and a `Trial` shows that the snapshot is better.

    Args:
        monitor: The Monitor of the run; None if the Guard is passed to `gradvitals.watch`.
        mode: The mode of responses that are not given: ``observe`` makes each a dry run, ``act`` turns each on.
        skip: Skipping a step: ``on``, ``off``, ``dry_run`` or settings, a `Skip`; None to follow `mode`.
        rollback: Restoring the last healthy snapshot; a `RollBack`.
        clip: Clipping gradients by the run's own norms; a `Clip`. Off unless given.
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
        skip: Mode | Skip | None = None,
        rollback: Mode | RollBack | None = None,
        clip: Mode | Clip | None = None,
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
        given = {"clip": clip, "skip": skip, "rollback": rollback}
        default: Mode = "on" if mode == "act" else "dry_run"
        self.responses: dict[str, Any] = {name: response_from(name, given[name], default) for name in RESPONSES}
        """The settings in force."""
        self._clip: Clip = self.responses["clip"]
        self._skip: Skip = self.responses["skip"]
        self._rollback: RollBack = self.responses["rollback"]
        self._schedulers = list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler] if scheduler else []
        self._scaler, self._data, self._decide = scaler, data, decide
        self._folder = Path(folder) if folder is not None else None
        self.step = 0
        """Steps of training that count: without skipped ones, and reset by a rollback. If the device decides, some of
        the last steps may still turn out to be skipped."""
        self.snapshots = 0
        """Number of snapshots taken so far."""
        self._earlier: list[Action] = []  # actions from before a resume
        self._num_problems = 0  # of snapshots, as far as they were reported
        self._attached = self._active = self._closed = False
        self._started = self._stopped = self._reported_closure = False
        """Whether the first step has started, and whether the Guard has stopped acting."""
        self._start_fine = False  # whether a step was finite: what the weights were then is a start to go back to
        self._now = -1  # the Monitor's number of the step in progress
        self._skipped = self._dropped = self._scaler_skipped = self._spiked = False
        """Whether some of the step in progress was skipped, dropped by a rollback or a trial, skipped by a GradScaler,
        or was a spike that was not skipped."""
        self._ended = True
        self._uncounted = set[int]()  # steps that turned out not to count
        self._spikes = SpikeMemory()
        self._nonfinite, self._last_nonfinite, self._tried = 0, -2, False
        """Steps in a row that were not finite, the last of them, and whether a rollback was tried since they began."""
        self._rollbacks: list[int] = []  # steps of the rollbacks within the budget's window
        self._trial: Trial | None = None
        self._next_look, self._patience = 0, 2 * LEVEL_HISTORY
        """When a rise of the loss is looked at again, and for how long not after a trial in vain."""
        self._losses: dict[int, float] = {}
        """This step's loss by optimizer. If they differ, the optimizers play a game, and no loss can rise."""
        self._game = False
        self._lr_sum = 0.0  # of all steps made: how far the weights may have moved
        self._last_of_kind: dict[str, int] = {}  # the last step of each kind of action
        if monitor is not None:
            self.attach(monitor)

    # -- start and end ----------------------------------------------------------------------------------------------

    def attach(self, monitor: Monitor) -> None:
        """Guard the run of this Monitor. `gradvitals.watch` calls it for a Guard that it is given."""
        if not isinstance(monitor, Monitor):
            raise TypeError(f"Guard got a {type(monitor).__name__} as monitor; expected what gradvitals.watch returns")
        if monitor._closed:
            raise GradvitalsError("this Monitor is closed; make a new one with gradvitals.watch")
        if self._attached:
            raise GradvitalsError("this Guard guards a run already; make another one for another run")
        table, ranks = monitor.recorder.table, Ranks(monitor)
        if any(map(is_guarded, table.optimizers)):
            raise GradvitalsError("this optimizer has a Guard already; close its Monitor first")
        supported = all(map(supports_found_inf, table.optimizers))
        if self._decide == "device" and not supported:
            names = ", ".join(sorted({type(one).__name__ for one in table.optimizers}))
            raise ConfigError(f"decide is 'device' with {names}; expected torch's own optimizers, with fused=True")
        on_gpu = all(parameter.is_cuda for parameter in table.parameters)
        ranks.require_same(repr(list(self.responses.values())))
        state = TrainingState(
            table.model, table.optimizers, schedulers=self._schedulers, scaler=self._scaler, data=self._data
        )
        self._monitor, self._recorder, self._ranks = monitor, monitor.recorder, ranks
        self._on_device = self._decide == "device" or (self._decide == "auto" and supported and on_gpu)
        self._manager = SnapshotManager(state, self._rollback, self._folder, ranks.group, ranks.stage)
        self._ticks = SkippedTicks(state.schedulers, state.scaler)
        self._wrappers = [StepWrapper(one, self._clip, self._skip) for one in table.optimizers]
        self._buffers = BufferBackup(table.model)
        self._weights = WeightCheck(table.parameters)
        # A rollback must be possible from the first step, whatever happens before it.
        self.snapshots += self._manager.take(monitor.step, self._extra(), to_disk=False, healthy=True)
        if self._folder is not None and state.cannot_restore:
            self._print("snapshots cannot restore " + "; ".join(state.cannot_restore))
        self._attached = self._active = True
        for wrapper in self._wrappers:
            wrapper.wrap(
                before=lambda one: bool(self._attempt(self._before, one, otherwise=True)),
                after=lambda one, made: self._attempt(self._after, one, made),
                failed=lambda one: self._attempt(self._failed, one),
                unguarded=lambda: self._attempt(self._on_closure),
            )
        monitor.recorder.on_scaler_skip = lambda _: self._attempt(self._on_scaler_skip)
        monitor.at_close(self.close)

    def close(self) -> None:
        """Stop guarding: optimizers step alone again, snapshots are on disk, and a summary is printed."""
        if not self._attached or self._closed:
            return
        self._closed = True
        self._attempt(self._finish)
        self._active = False
        self._recorder.on_scaler_skip = None
        self._buffers.close()
        for wrapper in self._wrappers:
            wrapper.unwrap()
            wrapper.release_lr()
        self._manager.close()
        self._report_problems()
        if self.actions:
            self._print(self.summary())

    def _attempt(self, work: Callable[..., Any], *args: Any, otherwise: Any = None) -> Any:
        """Do the Guard's part of a step while it is active. An error in it ends the guarding, not the training.

        With several ranks it ends the training too: the others would wait for this one's numbers forever.
        """
        if not self._active:
            return otherwise
        try:
            return work(*args)
        except Exception as error:
            self._active = False
            self._end_trial()
            if self._ranks.several:
                raise
            for wrapper in self._wrappers:
                wrapper.release_lr()
            self._monitor.report(notices.guard_error(error, self._monitor.step))
            return otherwise

    # -- for the user -----------------------------------------------------------------------------------------------

    def _expect_run(self) -> None:
        if not self._attached:
            raise GradvitalsError("this Guard has no run yet; give it to gradvitals.watch, or a Monitor to it")

    @property
    def actions(self) -> list[Action]:
        """Actions so far: taken, proposed in a dry run, or withheld; after `resume`, also those from before it."""
        done = self._monitor.actions if self._attached else ()
        return [*self._earlier, *(action for action in done if action.kind in GUARD_KINDS)]

    def summary(self) -> str:
        """A summary of the Guard's actions in a few lines."""
        return summarize_actions(self.actions)

    def __str__(self) -> str:
        return self.summary() if self.actions else "no actions"

    def resume(self) -> int:
        """Continue from the newest snapshot in `folder`, if there is one. Call it before the first step.

        Restores model, optimizers, schedulers, scaler, random generators, data position, the Monitor and the Guard. If
        the number of ranks has changed, sharded tensors are re-sharded, but random generators and the data position
        stay as they are.

        Returns:
            The number of steps that were done by then; 0 if there is no snapshot.
        """
        self._expect_run()
        if self._folder is None:
            raise GradvitalsError("there is no folder to resume from; give the Guard one, such as folder='snapshots'")
        restored = self._manager.resume()
        if restored is None:
            return 0
        self._monitor.load_state_dict(restored.extra["monitor"])
        self._load_state(restored.extra["guard"])
        self._started = True
        self._print(f"the Guard continues from step {self.step}, from {self._folder}")
        if restored.changed:
            self._print(restored.changed)
        with contextlib.suppress(RunError), open_run(self._monitor.run_path) as run:
            before = [action for action in run.actions if action.step < self._monitor.step]
            self._earlier = [action for action in before if action.kind in GUARD_KINDS]
        return self.step

    def state_dict(self) -> dict[str, Any]:
        """The Guard's learned state and remaining budget, for a checkpoint of your own."""
        self._expect_run()
        return {"version": STATE_VERSION, **resolve(self._state())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._expect_run()
        if state.get("version") != STATE_VERSION:
            raise GradvitalsError(f"the state has version {state.get('version')!r}; this Guard reads {STATE_VERSION}")
        self._load_state(state)

    # -- before and after an optimizer's step -------------------------------------------------------------------------

    def _before(self, wrapper: StepWrapper) -> bool:
        """Whether this optimizer is to make its step."""
        if self._stopped:
            self._now = self._monitor.step
            return True
        inputs = self._recorder.arrive(wrapper.optimizer)
        if inputs is None and self._ranks.several:  # all ranks take part in the reduction
            inputs = StepInputs([], self._recorder.table.parameters)
        self._start_step(self._monitor.step)
        self._ticks.step_starts(wrapper.optimizer)
        make = not self._dropped and (inputs is None or self._may_step(wrapper, inputs))
        if make:
            wrapper.hold_lr()
            lr = largest_lr(wrapper.optimizer)
            wrapper.baseline.lr.learn(self._now, lr, self._rollback.lr_jump)
            self._lr_sum += lr if wrapper is self._wrappers[0] else 0.0
        return make

    def _after(self, wrapper: StepWrapper, made: bool) -> None:
        """The optimizer has made its step, or the Guard has skipped it."""
        if self._stopped and made:
            self.step += self._monitor.step != self._now
            return
        if made:
            wrapper.is_new = False
            if self._scaler_skipped and self._skip.mode == "on":
                self._buffers.restore()
            else:
                self._buffers.save()
        else:
            if not self._skipped:
                self._ticks.discount_scaler()
            self._skipped = True
            self._ticks.step_skipped(None if self._dropped else wrapper.optimizer)
            self._buffers.restore()
            self._recorder.skip_step(wrapper.optimizer)
            wrapper.optimizer._opt_called = True  # type: ignore[attr-defined]  # else its scheduler warns of the order
        if self._monitor.step != self._now:
            self._end_step()

    def _failed(self, wrapper: StepWrapper) -> None:
        """The optimizer's step raised: whoever catches that may step again."""
        self._recorder.abandon(wrapper.optimizer)
        lr_factors(wrapper.optimizer).restore()

    def _on_closure(self) -> None:
        """A step of a kind that it does not check."""
        if not self._reported_closure:
            self._reported_closure = True
            self._monitor.report(notices.guard_absent(self._monitor.step))

    def _on_scaler_skip(self) -> None:
        """A GradScaler has found Inf and skips a step without calling the optimizer."""
        if self._stopped:
            return
        self._start_step(self._monitor.step)
        if self._ranks.several:  # other ranks may be about to step: they must know
            per_tensor = self._wrappers[0].clipper.per_tensor
            step_numbers(None, per_tensor=per_tensor, ranks=self._ranks, scaler_skips=1.0)
        self._scaler_skipped = self._skipped = True
        if self._skip.mode == "on":
            self._buffers.restore()
        self._judge_scaler_skip(self._now)

    def _start_step(self, now: int) -> None:
        """If a new step has started, finish the last one."""
        if now == self._now:
            return
        if not self._ended:  # an optimizer steps again before others have: its data is drawn already
            self._end_step(late=True)
        self._now, self._ended = now, False
        self._skipped = self._dropped = self._scaler_skipped = self._spiked = False
        self._losses.clear()
        self._manager.complete()
        self._report_problems()
        # Results from the device are known some steps later, and so is whether there was trouble.
        self._manager.settle(now - LAG if self._on_device else now)
        if self._manager.found and not self._started:
            text = f"{self._folder} holds snapshots of an earlier run, which guard.resume() would continue"
            self._print(f"{text}; this run's own replace them as they become healthy")
        self._started = True
        if now % WeightCheck.EVERY == 0 and self._trial is None:
            self._check_weights(now)

    def _end_step(self, *, late: bool = False) -> None:
        """All optimizers have had their turn."""
        self._ended = True
        if self._skipped or self._scaler_skipped:
            return
        self.step += 1
        troubled = self._spiked or late or any(one.baseline.loss.episode is not None for one in self._wrappers)
        if self._manager.due(self._monitor.step) and not troubled:
            self.snapshots += self._manager.take(self._monitor.step, self._extra())

    def _finish(self) -> None:
        """Training has ended: record what the device decided in the last steps, and end a trial."""
        self._end_trial()
        for wrapper in self._wrappers:
            for result in wrapper.check.results():
                self._judge_result(wrapper, result, ended=True)
        self._ticks.step_starts()

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _may_step(self, wrapper: StepWrapper, inputs: StepInputs) -> bool:
        surprise = self._buffers.surprise(self._skip.ratio) if wrapper is self._wrappers[0] else None
        found_inf, each = getattr(wrapper.optimizer, "found_inf", 0.0), wrapper.clipper.per_tensor
        numbers = step_numbers(inputs, per_tensor=each, ranks=self._ranks, surprise=surprise, scaler_skips=found_inf)
        if numbers is None:
            return True
        if self._trial is not None:
            return self._continue_trial(wrapper, numbers)
        if self._on_device:
            # A new optimizer is decided on the host; results that are pending come first.
            for result in wrapper.check.results(None if wrapper.is_new else self._now):
                self._judge_result(wrapper, result)
                if self._dropped or self._stopped:
                    return not self._dropped
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
        surprise = float(numbers.surprise) if numbers.surprise is not None else 0.0
        factors = wrapper.clipper.factors(numbers, inputs)
        factor = 1.0 if factors is None or not norm <= LARGEST_NORM else float(smallest(factors, numbers.norm))
        limit = wrapper.baseline.norm.limit(self._skip.ratio, self._skip.first_steps)
        result = StepResult(step=self._now, limit=limit, norm=norm, loss=loss, surprise=surprise, factor=factor)
        if self._judge(wrapper, result):
            return False
        if factors is not None and factor < 1 and self._note_clip(result):
            wrapper.clipper.apply(factors, numbers, inputs, wrapper.optimizer)
        self._buffers.learn()
        return True

    def _decide_on_device(self, wrapper: StepWrapper, inputs: StepInputs, numbers: StepNumbers) -> None:
        """Let the device decide; the host reads the result later."""
        limit = wrapper.baseline.norm.limit(self._skip.ratio, self._skip.first_steps)
        allowed = not self._spikes.refusal(self._now, self._skip)
        most = self._skip.ratio if allowed and self._buffers.count >= self._skip.first_steps else math.inf
        skips = wrapper.check.skips(numbers, limit if allowed else math.inf, most)
        if self._skip.mode != "on":
            skips = torch.zeros_like(skips)
        scaler_skips = wrapper.mark(skips, numbers.scaler_skips)
        factors = wrapper.clipper.factors(numbers, inputs)
        clipping = factors is not None and self._clip.mode == "on"
        if factors is not None and clipping:
            wrapper.clipper.apply(factors, numbers, inputs, wrapper.optimizer)
        self._buffers.learn(skips)
        if self._skip.mode == "on":
            self._buffers.restore(skips)
            if wrapper is self._wrappers[0]:
                self._ticks.discount_scaler(skips * (1 - scaler_skips.to(skips)))
        factor, streak = smallest(factors, numbers.norm), torch.as_tensor(wrapper.check.streak)
        surprise = torch.zeros_like(numbers.norm) if numbers.surprise is None else numbers.surprise
        sent = (numbers.norm, numbers.loss, skips, scaler_skips, factor, streak, surprise)
        wrapper.check.send(self._now, limit, clipping, *sent)

    def _judge_result(self, wrapper: StepWrapper, result: StepResult, *, ended: bool = False) -> None:
        """A step that was decided on the device some steps ago. After the training `ended` it is only recorded."""
        if result.scaler_skipped:
            self._uncount(result.step)
            if not ended:
                self._judge_scaler_skip(result.step)
            return
        if result.skipped:
            self._uncount(result.step)
            self._ticks.step_skipped(wrapper.optimizer)  # its own tick is long past: the next one is taken back
        self._judge(wrapper, result, ended=ended)
        if result.factor < 1 and not result.skipped:
            self._note_clip(result)

    def _uncount(self, step: int) -> None:
        """This step does not count; several optimizers may report the same one."""
        if step not in self._uncounted:
            self._uncounted.add(step)
            self.step -= 1

    def _judge(self, wrapper: StepWrapper, result: StepResult, *, ended: bool = False) -> bool:
        """Respond to a step; returns whether it is not to be made."""
        step, norm = result.step, result.norm
        if not norm <= LARGEST_NORM:
            skips = self._skip.mode == "on" if result.skipped is None else result.skipped
            self._record_skip(step, "nonfinite", f"the gradient norm is {norm}", skips)
            if not ended:
                self._judge_nonfinite(step)
            return skips or self._dropped
        if step > self._last_nonfinite:
            self._nonfinite, self._tried = 0, False
        if not self._start_fine:
            self._start_fine = True
            if not ended and self.step == 0:  # a checkpoint may have been loaded since
                self._manager.forget()
                self._manager.take(self._now, self._extra(), to_disk=False, healthy=True)
                self._manager.complete()
        known = self._buffers.count >= self._skip.first_steps
        words = f"the gradient norm is {norm:.3g}, over the limit of {result.limit:.3g}" if norm > result.limit else ""
        if not words and known and result.surprise > self._skip.ratio:
            words = f"the batch changes a buffer (batch norm) {result.surprise:.3g} times as much as any before"
        if words:
            return self._judge_spike(wrapper, result, words)
        wrapper.clipper.learn(norm, result.factor)
        if result.factor == 1 or self._clip.mode != "on":
            wrapper.baseline.learn(step, norm, result.loss)
            if self._rollback.mode != "off" and not ended:
                self._judge_loss(wrapper, step, result.loss)
        return self._dropped

    def _judge_spike(self, wrapper: StepWrapper, result: StepResult, words: str) -> bool:
        step = result.step
        if self._skip.mode == "off":
            wrapper.baseline.norm.learn(result.norm)
            return False
        self._spikes.see(step)
        refusal = self._spikes.refusal(step, self._skip)
        skips = self._skip.mode == "on" and not refusal if result.skipped is None else result.skipped
        if skips:
            self._spikes.skipped.append(step)
            self._record_skip(step, "explosion", words, True)
            return True
        if self._spikes.streak > self._skip.max_streak and self._check_weights(step, wait=True):
            return True
        self._spiked = True
        wrapper.baseline.norm.learn(result.norm)  # it was made, and is part of the run
        self._manager.spoil()
        self._record_skip(step, "explosion", refusal if refusal and self._skip.mode == "on" else words, False)
        return False

    def _judge_scaler_skip(self, step: int) -> None:
        """A GradScaler skipped this step. It does so now and then; if it continues, lowering the scale did not help."""
        self._manager.spoil()
        self._judge_nonfinite(step, by_scaler=True)

    def _judge_nonfinite(self, step: int, *, by_scaler: bool = False) -> None:
        """A step is not finite: roll back if the weights are not either, or if it happens again; at last, give up."""
        if step == self._last_nonfinite:
            return
        self._nonfinite, self._last_nonfinite = self._nonfinite + 1, step
        if self._nonfinite > 1:
            self._manager.spoil()
        rounds = self._nonfinite // self._skip.give_up if self._nonfinite % self._skip.give_up == 0 else 0
        words = f"{self._nonfinite} steps in a row are not finite"
        if self._nonfinite <= 3 and not by_scaler and self._anywhere(not self._weights.are_finite()):
            words = "weights are not finite"
        elif self._nonfinite == 3 and not by_scaler and (moved := self._moved_far()):
            words += f", and {moved}"
        elif not rounds:
            return
        if not self._tried and self._roll_back(step, "nonfinite", words):
            self._tried = True
        elif rounds and (rounds > 1 or not self._tried) and self._skip.mode == "on":
            self._stopped = True
            self._monitor.report(notices.guard_gave_up(self._nonfinite, step))

    def _check_weights(self, step: int, *, wait: bool = False) -> bool:
        """Roll back if a parameter has grown as no training makes it grow; returns whether it was done."""
        if self._rollback.mode == "off":
            return False
        growth = self._weights.growth(wait=wait)
        if not self._anywhere(growth > self._rollback.grown):
            return False
        words = f"the norm of a parameter grew by a factor of {growth:.3g} within {WeightCheck.EVERY} steps"
        looks = 2 if self._weights.lags and not wait else 1  # on a GPU the norms are those of the look before
        finding = "update_spike" if growth < math.inf else "nonfinite"
        return self._roll_back(step, finding, words, step - looks * WeightCheck.EVERY)

    def _anywhere(self, here: bool) -> bool:
        """Whether this holds on any rank."""
        if not self._ranks.several:
            return here
        return float(self._ranks.sum(torch.full((1,), float(here), dtype=torch.float64, device=self._ranks.device))) > 0

    # -- has the model become worse? ----------------------------------------------------------------------------------

    def _judge_loss(self, wrapper: StepWrapper, step: int, loss: float) -> None:
        """If the loss rose above all recent levels, and the weights show why, compare them with a snapshot."""
        self._losses[id(wrapper)] = loss
        self._game = self._game or len({value for value in self._losses.values() if not math.isnan(value)}) > 1
        level = wrapper.baseline.loss
        if level.episode is not None:
            self._manager.spoil()
        rise, hurt = level.rise, level.hurt
        if (rise is None and hurt is None) or step < self._next_look or self._game or self._dropped:
            return
        self._next_look = step + LEVEL_STEPS
        jumped = wrapper.baseline.lr.jumped
        cause = "" if jumped is None else f"the learning rate jumped at step {jumped}"
        cause = cause or (f"it was above anything seen since step {hurt}" if hurt is not None else self._moved_far())
        if not cause:
            return  # nothing happened to the weights: the data is harder
        jumped = hurt if jumped is None else jumped
        words = f"the loss rose to {level.levels[-1]:.4g}, and {cause}"
        if self._rollback.mode == "dry_run":
            self._withhold("roll_back", step, "loss_rising", f"dry run; {words}")
            self._next_look = step + self._patience
        elif (snapshot := self._manager.newest(jumped)) is not None:
            lr = largest_lr(self._wrappers[0].optimizer)
            if wrapper.baseline.lr.jumped is None and lr > LR_ROSE * snapshot.plain["extra"]["guard"]["lr"]:
                return  # a schedule that raises the rate, as in a warm restart, costs some loss at first
            if refusal := self._refusal(step):
                self._withhold("roll_back", step, "loss_rising", refusal)
                self._next_look = step + self._patience
                return
            self._manager.spoil()
            self._trial = Trial(wrapper, self._manager.state, snapshot, jumped, words)
            self._dropped = True

    def _moved_far(self) -> str:
        """Whether parameters have moved far more than usual since the last healthy snapshot, in words; or nothing.

        Half of them must have, or one by 25 times as much: a small one moves far by chance.
        """
        moves = self._manager.moves(self._lr_sum)
        typical = statistics.median(moves.values()) if moves else 0.0
        name = max(moves, key=lambda one: moves[one], default="")
        alone = moves.get(name, 0.0) > 25 * self._rollback.moved
        if not self._anywhere(alone or typical > self._rollback.moved):
            return ""
        if alone:
            return f"{name} has moved {moves[name]:.3g} times as far as usual"
        return f"parameters have moved {typical:.3g} times as far as usual"

    def _continue_trial(self, wrapper: StepWrapper, numbers: StepNumbers) -> bool:
        assert self._trial is not None
        trial, owner, self._dropped = self._trial, self._trial.owner, True
        if wrapper is not owner:
            return False
        norm, loss = float(numbers.norm), float(numbers.loss)
        trial.add(loss if norm <= LARGEST_NORM else math.inf)
        if trial.verdict is None:
            trial.install(trial.arm)
            return False
        self._end_trial()
        words, cost = f"{trial.words}; {trial}", {"steps": trial.count + 1}
        held = owner.baseline.lr.peak if owner.baseline.lr.jumped is not None else None
        if trial.verdict and self._roll_back(self._now, "loss_rising", words, trial.jumped, cost["steps"]):
            if held is not None:
                self._hold_lr(owner, held)
            return False
        self._record("trial", self._now, "loss_rising", f"{words}: not rolled back", cost=cost)
        owner.baseline.loss = LossLevel()
        self._next_look, self._patience = self._now + self._patience, 2 * self._patience
        return False

    def _end_trial(self) -> None:
        """Put the run's own weights back."""
        if self._trial is not None:
            self._trial.install("current")
            self._trial = None

    # -- acting -------------------------------------------------------------------------------------------------------

    def _refusal(self, step: int) -> str:
        """Why the run may not be rolled back; empty if it may."""
        self._rollbacks = [then for then in self._rollbacks if step - then < BUDGET_WINDOW]
        if len(self._rollbacks) >= self._rollback.budget:
            return f"its budget of {self._rollback.budget} in {BUDGET_WINDOW:,} steps is spent"
        return ""

    def _roll_back(self, step: int, finding: str, words: str, before: int | None = None, lost: int = 0) -> bool:
        """Restore a snapshot, from before a step if that is known; returns whether it was done."""
        if self._rollback.mode == "off":
            return False
        started, refusal = time.perf_counter(), self._refusal(step)
        if self._rollback.mode == "dry_run":
            refusal = f"dry run; {words}"
        restored = None if refusal else self._manager.restore(before)
        if restored is None:
            self._withhold("roll_back", step, finding, refusal or "no snapshot fits the model as it is now")
            return False
        state = resolve({**restored.extra["guard"]})
        uncounted = set[int]()
        for wrapper, saved in zip(self._wrappers, state["wrappers"], strict=True):
            # What was pending then has long been read: some of those steps did not count.
            uncounted |= {one["step"] for one in saved["pending"] if one["skipped"] or one["scaler_skipped"]}
            limit = wrapper.lr_limit if wrapper.lr_limit is not None else saved["lr_limit"]
            wrapper.load_state_dict({**saved, "pending": [], "lr_limit": limit})
            for one in saved["pending"]:
                if not one["skipped"]:
                    wrapper.baseline.learn(one["step"], one["norm"], one["loss"])
        self._lr_sum = state["lr_sum"]
        self._weights.reset()
        self._buffers.load_state_dict(state["buffers"])
        self._ticks.step_skipped()
        self._rollbacks.append(step)
        before_step, self.step, self._dropped = self.step, int(state["step"]) - len(uncounted), True
        cost = {"steps": before_step - self.step + lost, "seconds": time.perf_counter() - started}
        where = {"step": before_step}
        self._record("roll_back", step, finding, words, before=where, after={"step": self.step}, cost=cost)
        self._monitor.start_diagnosis_over()
        return True

    def _hold_lr(self, wrapper: StepWrapper, peak: float) -> None:
        """The learning rate jumped and the model became worse: hold it at what the run had used before."""
        wrapper.lr_limit = peak
        words = f"a learning rate above {peak:.3g} made the model worse: it is held at {peak:.3g} from here on"
        self._record("hold_lr", self._now, "loss_rising", words, after={"lr": peak})

    def _note_clip(self, result: StepResult) -> bool:
        """Record that a gradient was clipped, or would have been; returns whether it is to be."""
        taken = self._clip.mode == "on" if result.clipping is None else result.clipping
        norm, left = result.norm, result.norm * result.factor
        was = "it was" if taken else "it would be"
        words = f"the gradient norm is {norm:.3g}; {was} clipped to {left:.3g} ({self._clip.method})"
        words, after = (words, {"norm": left}) if taken else (f"dry run; {words}", {})
        self._record("clip", result.step, "explosion", words, taken=taken, before={"norm": norm}, after=after)
        return taken

    def _record_skip(self, step: int, finding: str, words: str, taken: bool) -> None:
        if taken:
            where, cost = {"step": self.step}, {"steps": 1, "seconds": 0.0}
            self._record("skip", step, finding, words, before=where, after=where, cost=cost)
        elif self._skip.mode != "off":
            self._withhold("skip", step, finding, f"dry run; {words}" if self._skip.mode == "dry_run" else words)

    def _withhold(self, kind: str, step: int, finding: str, reason: str) -> None:
        """Record what a dry run would have done, or what may not be done; once in a while is enough."""
        known = f"{kind} withheld"
        if step - self._last_of_kind.get(known, -QUIET_STEPS) >= QUIET_STEPS:
            self._last_of_kind[known] = step
            self._record(kind, step, finding, reason, taken=False)

    def _record(
        self, kind: str, step: int, finding: str, reason: str, *, taken: bool = True, **details: Mapping[str, Any]
    ) -> None:
        """Record and print an action; `details` are its `before`, `after` and `cost`."""
        action = Action(kind=kind, step=step, finding=finding, taken=taken, reason=reason, **details)
        self._monitor.record(action)
        # Clips, skips and dry runs may come often: only the first in a while is printed.
        news = step - self._last_of_kind.get(kind, -QUIET_STEPS) >= QUIET_STEPS
        self._last_of_kind[kind] = step
        if news or (taken and kind not in ("clip", "skip")):
            self._print(f"Guard, {action}")

    def _print(self, text: str) -> None:
        """Print a line to stderr, on the first rank, unless the config is quiet."""
        if self._ranks.leads:
            print_line(text, self._monitor.config.quiet)

    def _report_problems(self) -> None:
        """Report what kept snapshots from being written or restored since the last call."""
        new = self._manager.problems[self._num_problems :]
        self._num_problems += len(new)
        for text in new:
            self._monitor.report(notices.snapshot_error(text, self._monitor.step))

    # -- its state ----------------------------------------------------------------------------------------------------

    def _extra(self) -> dict[str, Any]:
        """The contents of a snapshot besides the training state."""
        monitor = {"monitor": self._monitor.state_soon()} if self._folder is not None else {}
        return {"guard": self._state(), **monitor}

    def _state(self) -> dict[str, Any]:
        """Everything that decisions depend on: plain values, or functions that wait for them."""
        return {
            "step": self.step,
            "now": self._monitor.step,
            "spikes": asdict(self._spikes),
            "nonfinite": [self._nonfinite, self._last_nonfinite, self._tried],
            "rollbacks": list(self._rollbacks),
            "look": [self._next_look, self._patience, self._game],
            "lr_sum": self._lr_sum,
            "lr": largest_lr(self._wrappers[0].optimizer),
            "buffers": self._buffers.state_dict(),
            "ticks": self._ticks.state_dict(),
            "wrappers": [wrapper.state_dict() for wrapper in self._wrappers],
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. If the Monitor counts its steps anew, remembered steps are shifted."""
        shift = self._monitor.step - int(state["now"])
        self.step, self._lr_sum, self._start_fine = int(state["step"]), float(state["lr_sum"]), True
        self._spikes = SpikeMemory.from_state(state["spikes"], shift)
        count, last, tried = state["nonfinite"]
        self._nonfinite, self._last_nonfinite, self._tried = int(count), int(last) + shift, bool(tried)
        self._rollbacks = [step + shift for step in state["rollbacks"]]
        look, self._patience, self._game = state["look"]
        self._next_look = int(look) + shift
        self._ticks.load_state_dict(state["ticks"])
        for wrapper, saved in zip(self._wrappers, state["wrappers"], strict=True):
            pending = [{**one, "step": one["step"] + shift} for one in saved["pending"]]
            wrapper.load_state_dict({**saved, "pending": pending}, shift)
        self._buffers.load_state_dict(state["buffers"])


class Trial:
    """Compares the weights with a snapshot's on the coming batches, in turn, before anything is rolled back.

    Both see the same kind of data, and no step is made meanwhile. The order is balanced against trends and against
    data that alternates.

    Args:
        owner: The optimizer whose losses count.
        state: What the weights are part of.
        snapshot: What they are compared with.
        jumped: The step at which something happened to the weights; None if it is unknown.
        words: Why it is made.
    """

    ORDER: ClassVar[str] = "csscsccssccscssc"
    NEEDED: ClassVar[float] = 60 / 64  # share of pairs of batches in which the snapshot must have the lower loss
    CLEAR: ClassVar[float] = 2.0
    """Three batches each are enough if every loss of one side is this many times every loss of the other."""

    def __init__(
        self, owner: StepWrapper, state: TrainingState, snapshot: Snapshot, jumped: int | None, words: str
    ) -> None:
        self.owner, self.jumped, self.words = owner, jumped, words
        self.losses: dict[str, list[float]] = {"current": [], "snapshot": []}
        self.verdict: bool | None = None  # whether the snapshot is better; None before that is known
        self._live = {f"parameter/{name}": tensor for name, tensor in state.parameters().items()}
        ours = HostCopy(self._live)
        ours.hold_back()
        self._weights = {"current": ours.wait(), "snapshot": snapshot.tensors()}

    @property
    def count(self) -> int:
        """Batches used so far."""
        return sum(map(len, self.losses.values()))

    @property
    def arm(self) -> str:
        """Whose weights the next batch is for."""
        return {"c": "current", "s": "snapshot"}[self.ORDER[self.count]]

    def install(self, arm: str) -> None:
        """Put the weights of one side into the model."""
        copy_all([(dense(tensor), self._weights[arm][name]) for name, tensor in self._live.items()])

    def add(self, loss: float) -> None:
        """Add the loss of a batch."""
        self.losses[self.arm].append(math.inf if math.isnan(loss) else loss)
        current, snapshot = self.losses.values()
        if len(current) >= 3 and len(snapshot) >= 3 and 0 < self.CLEAR * max(snapshot) < min(current):
            self.verdict = True
        elif self.count == len(self.ORDER):
            wins = sum(ours > theirs for ours in current for theirs in snapshot)
            self.verdict = wins >= self.NEEDED * len(current) * len(snapshot)

    def __str__(self) -> str:
        current, snapshot = (statistics.median(losses) for losses in self.losses.values())
        return f"on {self.count} batches the loss is {current:.4g}, with the snapshot's weights {snapshot:.4g}"
