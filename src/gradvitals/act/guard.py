"""Guard: stands between the gradients and the optimizer, and answers trouble by the rungs of its ladder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from gradvitals import notices
from gradvitals.act.answers import Answers
from gradvitals.act.duty import Duty
from gradvitals.act.hold import Hold
from gradvitals.act.keeper import Keeper
from gradvitals.act.ladder import Ladder
from gradvitals.act.post import Post, can_be_told, is_guarded
from gradvitals.act.review import Review
from gradvitals.act.rungs import RUNGS, Clip, CutLR, Mode, ResetMomentum, RollBack, Rung, Skip, rung_of
from gradvitals.act.snapshot import arrived
from gradvitals.act.subject import Subject
from gradvitals.act.together import Together
from gradvitals.errors import ConfigError, GradvitalsError, RunError
from gradvitals.monitor import Monitor
from gradvitals.report.describe import GUARD_KINDS, summarize_actions
from gradvitals.store.reader import open_run
from gradvitals.types import Action

STATE_VERSION = 1


class Guard:
    """Keeps a run alive: clips, leaves steps out, forgets momentum, lowers the learning rate, rolls back.

    Everything it does, would do in a dry run, or may not do, is an `Action` in the run's record.

    Args:
        monitor: The Monitor of the run; or none yet, where the Guard is handed to `gradvitals.watch`.
        mode: What rungs do that are not named: ``observe`` makes each a dry run, ``act`` turns each on.
        clip: The first rung: ``on``, ``off``, ``dry_run`` or its settings, a `Clip`; None for what `mode` says.
        skip: Leaving a step out; a `Skip`.
        reset: Forgetting momentum; a `ResetMomentum`.
        lr: A lower learning rate for a while; a `CutLR`.
        rollback: Back to the last healthy snapshot; a `RollBack`.
        scheduler: The learning rate scheduler, or several. Those that tick at every step do not count one that was left
            out, and are rolled back with the rest.
        scaler: The GradScaler, if there is one.
        data: Where the data stands: an object with `state_dict` and `load_state_dict`, such as a stateful loader or
            sampler, or a pair of functions that get and set it. For `resume`.
        folder: Where to keep snapshots on disk, for `resume`; None keeps them in memory alone.
        decide: ``auto`` decides on the device where all optimizers can be told so (torch's fused ones, on a GPU), and
            on the host elsewhere, which on a GPU waits for the device at every step. ``host`` and ``device`` force it.

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
        usual: Mode = "on" if mode == "act" else "dry_run"
        self.rungs: dict[str, Rung] = {name: rung_of(name, given[name], usual) for name in RUNGS}
        """The settings in force, from the bottom of the ladder to its top."""
        self._schedulers = list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler] if scheduler else []
        self._scaler, self._data, self._decide = scaler, data, decide
        self._folder = Path(folder) if folder is not None else None
        self._duty: Duty | None = None
        self._keeper: Keeper | None = None
        self._standing = False
        self._closed = self._said_absent = False
        self._earlier: list[Action] = []
        if monitor is not None:
            self.attach(monitor)

    # -- beginning and end --------------------------------------------------------------------------------------

    def attach(self, monitor: Monitor) -> None:
        """Guard the run of this Monitor. `gradvitals.watch` does it for a Guard it is given."""
        if not isinstance(monitor, Monitor):
            raise TypeError(f"Guard got a {type(monitor).__name__} as monitor; expected what gradvitals.watch returns")
        if monitor._closed:
            raise GradvitalsError("this Monitor is closed; make a new one with gradvitals.watch")
        if self._duty is not None:
            raise GradvitalsError("this Guard guards a run already; make another one for another run")
        clip, skip, reset, cut, rollback = (self.rungs[name] for name in RUNGS)
        assert isinstance(clip, Clip)
        assert isinstance(skip, Skip)
        assert isinstance(reset, ResetMomentum)
        assert isinstance(cut, CutLR)
        assert isinstance(rollback, RollBack)
        optimizers, model = monitor.recorder.table.optimizers, monitor.recorder.table.model
        if any(map(is_guarded, optimizers)):
            raise GradvitalsError("a Guard stands before this optimizer already; close its Monitor first")
        on_device, together = self._decides_on_device(monitor), Together(monitor)
        together.agree(repr([self.rungs[name] for name in RUNGS]))
        subject = Subject(model, optimizers, schedulers=self._schedulers, scaler=self._scaler, data=self._data)
        if rollback.mode == "on" or self._folder is not None:
            self._keeper = Keeper(
                subject,
                every=rollback.every,
                settle=rollback.settle,
                keep=rollback.keep,
                folder=self._folder,
                on_problem=self._note_problem,
                group=together.group,
                place=together.place,
            )
            if self._folder is not None and subject.cannot_restore:
                together.say("snapshots cannot restore " + "; ".join(subject.cannot_restore))
        posts = [Post(one, on_device=on_device, clip=clip, skip=skip) for one in optimizers]
        ladder = Ladder(skip, [reset, cut, rollback])
        review, hold = Review(monitor, ladder.higher, together), Hold(self._schedulers, self._scaler)
        answers = Answers(model, posts, reset=reset, cut=cut, keeper=self._keeper, hold=hold, review=review)
        self._duty = Duty(
            monitor,
            posts,
            ladder,
            answers,
            clip=clip,
            rollback=rollback,
            keeper=self._keeper,
            to_disk=self._folder is not None,
            review=review,
            together=together,
        )
        self._standing = True
        for post in posts:
            post.stand(self._before, self._after, self._failed, self._unguarded)
        monitor.recorder.on_scaler_skip = self._scaler_skipped
        monitor.at_close(self.close)

    def _note_problem(self, words: str) -> None:
        if self._duty is not None:
            self._duty.monitor.report(notices.snapshot_error(words, self._duty.monitor.step))

    def _decides_on_device(self, monitor: Monitor) -> bool:
        optimizers = monitor.recorder.table.optimizers
        told = all(map(can_be_told, optimizers))
        if self._decide == "device" and not told:
            names = ", ".join(sorted({type(one).__name__ for one in optimizers}))
            raise ConfigError(f"decide is 'device' with {names}; expected torch's own optimizers, with fused=True")
        on_gpu = all(parameter.is_cuda for parameter in monitor.recorder.table.parameters)
        return self._decide == "device" or (self._decide == "auto" and told and on_gpu)

    def close(self) -> None:
        """Stop guarding: optimizers step alone again, snapshots are on disk, and what was done is said."""
        if self._duty is None or self._closed:
            return
        self._closed = True
        duty = self._duty
        if self._standing:
            self._attempt(self._settle_up, None)
        self._standing = False
        duty.monitor.recorder.on_scaler_skip = None
        duty.answers.buffers.close()
        for post in duty.posts:
            post.leave()
            duty.answers.rates.release(post.optimizer)
        if self._keeper is not None:
            self._keeper.close()
        if self.actions:
            duty.together.say(self.summary())

    def _settle_up(self) -> None:
        """What is still on its way is for the record alone: the model is the user's by now."""
        duty = self._on_duty
        for post in duty.posts:
            for landed in post.landing.landed():
                duty.judge_landed(post, landed, over=True)
        duty.answers.hold.begin()

    @property
    def _on_duty(self) -> Duty:
        if self._duty is None:
            raise GradvitalsError("this Guard has no run yet; give it to gradvitals.watch, or a Monitor to it")
        return self._duty

    # -- at every step ------------------------------------------------------------------------------------------

    def _before(self, post: Post) -> bool:
        if self._keeper is not None and self._keeper.found and not self._on_duty.begun:
            words = f"{self._folder} holds snapshots of an earlier run, which guard.resume() would go on from"
            self._on_duty.together.say(f"{words}; this run's own take their place as they become healthy")
        return not self._standing or self._attempt(lambda: self._on_duty.before(post), True)

    def _after(self, post: Post, made: bool) -> None:
        if self._standing:
            self._attempt(lambda: self._on_duty.after(post, made), None)

    def _failed(self, post: Post) -> None:
        if self._standing:
            self._attempt(lambda: self._on_duty.failed(post), None)

    def _scaler_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._standing:
            self._attempt(lambda: self._on_duty.scaler_skipped(optimizer), None)

    def _unguarded(self) -> None:
        if self._standing and not self._said_absent:
            self._said_absent = True
            self._on_duty.monitor.report(notices.guard_absent(self._on_duty.monitor.step))

    def _attempt(self, work: Callable[[], Any], otherwise: Any) -> Any:
        """Do our part of a step. An error of ours ends the guarding, not the training.

        With several ranks it ends that, too: the others would wait for this one's numbers for ever.
        """
        try:
            return work()
        except Exception as error:
            self._standing = False
            duty = self._on_duty
            if duty.together.several:
                raise
            for post in duty.posts:
                duty.answers.rates.release(post.optimizer)
            duty.monitor.report(notices.guard_error(error, duty.monitor.step))
            return otherwise

    # -- for the user -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps of training that count: without those left out, and back where the Guard has rolled back to.

        Where the device decides, steps of the last moments may still turn out not to count.
        """
        return self._duty.step if self._duty is not None else 0

    @property
    def snapshots(self) -> int:
        """How many snapshots were taken so far."""
        return self._duty.snapshots if self._duty is not None else 0

    @property
    def actions(self) -> list[Action]:
        """What was done so far, would have been in a dry run, or was refused; after `resume`, before it too."""
        done = self._duty.monitor.actions if self._duty is not None else ()
        return [*self._earlier, *(action for action in done if action.kind in GUARD_KINDS)]

    def summary(self) -> str:
        """What the Guard did, in a few lines."""
        return summarize_actions(self.actions)

    def resume(self) -> int:
        """Go on from the newest snapshot in `folder`, if there is one. Call it before the first step.

        Model, optimizers, schedulers, scaler, random generators, data position, the Monitor and the Guard itself are as
        they were when it was taken. There may be more or fewer ranks than wrote it, and they may shard the model in
        another way; what cannot be restored then is said.

        Returns:
            The number of steps that were done by then; 0 where there is no snapshot.
        """
        duty = self._on_duty
        if self._folder is None or self._keeper is None:
            raise GradvitalsError("there is no folder to resume from; give the Guard one, such as folder='snapshots'")
        restored = self._keeper.resume()
        if restored is None:
            return 0
        duty.monitor.load_state_dict(restored.extra["monitor"])
        duty.load_state_dict(restored.extra["guard"])
        duty.begun = True
        duty.together.say(f"the Guard goes on from step {duty.step}, from {self._folder}")
        for words in restored.changed:
            duty.together.say(f"after a change of ranks, {words}")
        with contextlib.suppress(RunError), open_run(duty.monitor.run_path) as run:
            before = [action for action in run.actions() if action.step < duty.monitor.step]
            self._earlier = [action for action in before if action.kind in GUARD_KINDS]
        return duty.step

    def state_dict(self) -> dict[str, Any]:
        """What the Guard has learnt and may still spend, for a checkpoint of your own."""
        return {"version": STATE_VERSION, **arrived(self._on_duty.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        if state.get("version") != STATE_VERSION:
            raise GradvitalsError(f"the state has version {state.get('version')!r}; this Guard reads {STATE_VERSION}")
        self._on_duty.load_state_dict(state)
