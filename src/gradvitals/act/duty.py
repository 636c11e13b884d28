"""What a Guard does at every step: look, ask the ladder, do what it says, and record it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradvitals.act.answers import Answers
from gradvitals.act.clipper import clip_words, smallest
from gradvitals.act.gate import LAG, Landed, Seen, look
from gradvitals.act.keeper import Keeper
from gradvitals.act.ladder import FINDING_OF, Call, Evidence, Ladder, Purse
from gradvitals.act.limits import LARGEST_NORM, judged
from gradvitals.act.lr_factor import lr_factors
from gradvitals.act.post import Post
from gradvitals.act.review import Review
from gradvitals.act.rungs import Clip, CutLR, RollBack, Skip
from gradvitals.act.together import Together
from gradvitals.collect.recorder import StepInputs
from gradvitals.monitor import Monitor
from gradvitals.types import Action

CALM = 50
"""Steps without clipping, or without one left out, after which the next is said aloud again."""

REFUSALS = 20
"""Steps in a row that a GradScaler leaves out before that is trouble: it also does so to find its scale."""


class Duty:
    """A Guard at work on one run.

    Args:
        monitor: What sees the run, and keeps the record.
        posts: One for each optimizer.
        ladder: Which rung answers what.
        answers: What each of them does.
        clip: The rung at the bottom, which is not part of the ladder's escalation.
        rollback: For when to take snapshots, and how large a norm is too large.
        keeper: Who takes them; None for nobody.
        to_disk: Whether they are to bring a new process back, and so must hold the Monitor's state too.
        review: Where findings come from.
        together: The ranks of the run, which decide as one.
    """

    def __init__(
        self,
        monitor: Monitor,
        posts: Sequence[Post],
        ladder: Ladder,
        answers: Answers,
        *,
        clip: Clip,
        rollback: RollBack,
        keeper: Keeper | None,
        to_disk: bool,
        review: Review,
        together: Together,
    ) -> None:
        self.monitor, self.posts, self.ladder, self.answers = monitor, posts, ladder, answers
        self.clip, self.skip, self.rollback = clip, ladder.skip, rollback
        self.clip_purse = Purse(clip)
        self.keeper, self.to_disk, self.review, self.together = keeper, to_disk, review, together
        self.step = 0
        """Steps of training that count."""
        self._now = -1
        """The Monitor's number of the step in progress."""
        self._left_out = False
        """Whether something of it was left out."""
        self._dropped = False
        """Whether the rest of it is dropped, as it was rolled back."""
        self._refused = False
        """Whether a GradScaler left it out."""
        self._ended = True
        self._uncounted = -1
        """The last step that turned out not to count after all."""
        self._refusals = 0
        """Steps in a row that a GradScaler left out."""
        self._said: dict[str, int] = {}
        """When each kind of action last came."""
        self.begun = False
        """Whether there is a snapshot of where the run began."""
        self.snapshots = 0

    # -- before and after an optimizer's step -------------------------------------------------------------------

    def before(self, post: Post) -> bool:
        """Whether this optimizer is to make its step."""
        arrival = self.monitor.recorder.arrive(post.optimizer) or self.together.nothing()
        self._begin(self.monitor.step)
        self.answers.hold.begin(post.optimizer)
        make = not self._dropped and (arrival is None or self._may_step(post, arrival))
        if make:
            self.answers.rates.lower(post.optimizer, self._now)
        return make

    def after(self, post: Post, made: bool) -> None:
        """The optimizer has made its step, or was kept from it."""
        if made:
            post.is_new = False
            if self._refused and self.skip.mode == "on":
                self.answers.buffers.put_back()
            else:
                self.answers.buffers.remember()
        else:
            if not self._left_out:
                self.answers.hold.uncount()
            self._left_out = True
            self.answers.hold.left_out(None if self._dropped else post.optimizer)
            self.answers.buffers.put_back()
            self.monitor.recorder.leave_out(post.optimizer)
            post.optimizer._opt_called = True  # type: ignore[attr-defined]  # or its scheduler warns of a wrong order
        if self.monitor.step != self._now:
            self._end()

    def failed(self, post: Post) -> None:
        """The optimizer's step ended in an error: whoever catches it may step again."""
        self.monitor.recorder.abandon(post.optimizer)
        lr_factors(post.optimizer).restore()

    def scaler_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler has found infinite gradients, and leaves the optimizer's step out without asking it."""
        self._begin(self.monitor.step)
        if self.together.several:  # others may be about to step: they must hear of it
            look(None, each=self.posts[0].clipper.each, together=self.together, refused=1.0)
        self._refused = self._left_out = True
        if self.skip.mode == "on":
            self.answers.buffers.put_back()
        self._judge_refused(self._now)

    def _begin(self, now: int) -> None:
        """If a new step has begun, put right what follows from the last one, and see what was found meanwhile."""
        if now == self._now:
            return
        if not self._ended:  # an optimizer steps again before others have: its data is drawn already
            self._end(late=True)
        self._now, self._left_out, self._dropped, self._refused, self._ended = now, False, False, False, False
        for kind in self.answers.rates.over(now):
            if kind == CutLR.kind:
                self._record("restore_lr", now, "", True, "the time it was lowered for is over")
        if self.keeper is not None:
            self.keeper.before_update()
            if not self.begun:  # something to go back to from the first step on; its batch is drawn already
                self.begun = True
                self.snapshots += self.keeper.take(now, self._snapshot(), to_disk=False, wait=True)
                self.keeper.before_update()
            # What the device has decided is known some steps later, and so is whether there was trouble.
            self.keeper.settle(now - LAG if any(post.on_device for post in self.posts) else now)
        findings = self.review.due(now)
        if findings:
            words = "; ".join(finding.title for finding in findings.values())
            if self.keeper is not None:
                self.keeper.spoil(now)
            self._answer(Evidence(step=now, words=words, findings=tuple(findings), can_roll_back=self._can_roll_back))

    def _end(self, *, late: bool = False) -> None:
        """The step is over: all optimizers have had their turn."""
        self._ended = True
        if self._dropped:
            self.monitor.recorder.flush()  # what led to the rollback is judged by what was before it
            if self.monitor.judge is not None:
                self.monitor.record(self.monitor.judge.start_over)
        if self._left_out or self._refused:
            return
        self.step += 1
        if not any(post.on_device for post in self.posts):
            self._refusals = 0
        due = self.keeper is not None and self.keeper.due(self.monitor.step) and not self.ladder.bad
        if self.keeper is not None and due and not late:
            self.snapshots += self.keeper.take(self.monitor.step, self._snapshot())

    # -- deciding -----------------------------------------------------------------------------------------------

    def _may_step(self, post: Post, arrival: StepInputs) -> bool:
        refused = getattr(post.optimizer, "found_inf", 0.0)
        seen = look(arrival, each=post.clipper.each, together=self.together, refused=refused)
        if seen is None:
            return True
        if post.on_device:
            # A new optimizer is decided here; what is still on its way comes first.
            for landed in post.landing.landed(None if post.is_new else self._now):
                self.judge_landed(post, landed)
                if self._dropped:
                    return False
        if not post.on_device or post.is_new:
            return self._decide_here(post, arrival, seen)
        self._decide_there(post, arrival, seen)
        return True

    def _limits(self, post: Post) -> tuple[float, float]:
        """The norm and the loss from which on a step is trouble."""
        skip = self.skip
        norm = post.usual.norm_limit(skip.ratio, skip.z, skip.first_steps)
        return norm, post.usual.loss_limit(skip.loss_z, skip.loss_rise, skip.first_steps)

    def _decide_here(self, post: Post, arrival: StepInputs, seen: Seen) -> bool:
        """Decide on the host, which knows the numbers at once."""
        ours = float(getattr(post.optimizer, "found_inf", 0.0)) > 0
        if ours or (seen.refused is not None and float(seen.refused) > 0):
            self._refused = True
            self._judge_refused(self._now)
            return ours and not self._dropped  # the step will do nothing, and the scaler knows why
        norm, loss = float(seen.norm), float(seen.loss)
        factors = post.clipper.factors(seen, arrival, post.usual) if self.clip.mode != "off" else None
        calls = self._judge(post, self._now, norm, loss, self._limits(post))
        make = not self._dropped and not any(call.kind == Skip.kind and call.taken for call in calls)
        if make and factors is not None and norm <= LARGEST_NORM:
            factor = float(smallest(factors))
            if factor < 1 and self._note_clip(self._now, norm, factor):
                post.clipper.apply(factors, seen, arrival, post.optimizer)
        return make

    def _decide_there(self, post: Post, arrival: StepInputs, seen: Seen) -> None:
        """Decide on the device; the host will know later."""
        limits = self._limits(post)
        allowed = not self.ladder.purses[Skip.kind].refusal(self._now)
        left_out = post.gate.left_out(seen, *(limits if allowed else (math.inf, math.inf)))
        if self.skip.mode != "on":
            left_out = torch.zeros_like(left_out)
        theirs = post.mark(left_out, seen.refused)
        factors = post.clipper.factors(seen, arrival, post.usual) if self.clip.mode != "off" else None
        clipping = factors is not None and self.clip.mode == "on" and not self.clip_purse.refusal(self._now)
        if factors is not None and clipping:
            post.clipper.apply(factors, seen, arrival, post.optimizer)
        if self.skip.mode == "on":
            self.answers.buffers.put_back(left_out)
            if post is self.posts[0]:
                self.answers.hold.uncount(left_out * (1 - theirs.to(left_out)))
        factor = torch.ones_like(seen.norm) if factors is None else smallest(factors)
        streak = torch.as_tensor(post.gate.streak)
        post.landing.send(self._now, limits, clipping, seen.norm, seen.loss, left_out, theirs, factor, streak)

    def judge_landed(self, post: Post, landed: Landed, *, over: bool = False) -> None:
        """A step that was decided on the device some steps ago. `over`: training has ended; for the record alone."""
        if landed.scaler_skipped:
            self._uncount(landed.step)
            if not over:
                self._judge_refused(landed.step)
            return
        self._refusals = 0
        if landed.left_out:
            self._uncount(landed.step)
            self.answers.hold.left_out(post.optimizer)  # its tick is long counted: the one to come is not
        told: list[Call] = []
        if not over:
            told = self._judge(post, landed.step, landed.norm, landed.loss, landed.limits, left_out=landed.left_out)
        if landed.left_out and not self._dropped and not any(call.kind == Skip.kind for call in told):
            trouble, words = judged(landed.norm, landed.loss, landed.limits)
            cost = {"steps": 1, "seconds": 0.0}
            self._record(Skip.kind, landed.step, FINDING_OF.get(trouble, ""), True, words, cost=cost)
        if landed.factor < 1 and not landed.left_out:
            self._note_clip(landed.step, landed.norm, landed.factor, done=landed.clipping)

    def _judge_refused(self, step: int) -> None:
        """A GradScaler left this step out. Now and then it does; where it goes on, lowering the scale did not help."""
        self._refusals += 1
        if self.keeper is not None:
            self.keeper.spoil(step)
        if self._refusals >= REFUSALS:
            words = f"the GradScaler has left out {self._refusals} steps in a row"
            self._answer(
                Evidence(
                    step=step,
                    now=self._now,
                    trouble="nonfinite",
                    words=words,
                    can_roll_back=self._can_roll_back,
                    persistent=True,
                )
            )

    def _uncount(self, step: int) -> None:
        """This step does not count; several optimizers may say so of the same one."""
        if step != self._uncounted:
            self._uncounted = step
            self.step -= 1

    def _judge(
        self,
        post: Post,
        step: int,
        norm: float,
        loss: float,
        limits: tuple[float, float],
        left_out: bool | None = None,
    ) -> list[Call]:
        trouble, words = judged(norm, loss, limits)
        ratio = self.rollback.ratio
        far = ratio is not None and norm > ratio * post.usual.usual_norm
        able = self._can_roll_back
        evidence = Evidence(step=step, now=self._now, trouble=trouble, words=words, far=far, can_roll_back=able)
        calls = self._answer(evidence, left_out=left_out)
        post.usual.learn(norm, loss)
        harmless = any(call.kind == Skip.kind and call.taken for call in calls) and self.ladder.streak < 2
        if self.keeper is not None and trouble and not harmless:
            self.keeper.spoil(step)
        return calls

    @property
    def _can_roll_back(self) -> bool:
        return self.keeper is not None and self.keeper.healthy_step is not None

    def _answer(self, evidence: Evidence, left_out: bool | None = None) -> list[Call]:
        """Ask the ladder, do what it says and record it. `left_out`: what the device has done already."""
        calls = self.ladder.judge(evidence)
        for call in calls:
            taken = left_out if call.kind == Skip.kind and left_out is not None else call.taken
            before = {"step": self.step, "lr_factor": self.answers.rates.factor(self._now)}
            started = time.perf_counter()
            after: dict[str, Any] = {}
            steps = 0
            if taken:
                after, steps = self.answers.do(call.kind, evidence, self._now, self.step)
            reason = call.reason
            if taken and call.kind == RollBack.kind:
                if after:
                    self.step, self._dropped, self.review.rolled_back = after["step"], True, self._now
                    self._refusals = 0
                else:
                    taken, reason = False, "no snapshot fits the model as it is now"
            cost = {"steps": steps, "seconds": time.perf_counter() - started} if taken else {}
            self._record(call.kind, evidence.step, call.finding, taken, reason, before, after, cost)
        return calls

    def _note_clip(self, step: int, norm: float, factor: float, *, done: bool | None = None) -> bool:
        """Record that a gradient was clipped, or would have been; returns whether it is to be.

        Args:
            step: Which step.
            norm: The norm before.
            factor: What is left of it.
            done: What was done already, on the device; None where that is to be decided here.
        """
        refusal = self.clip_purse.refusal(step)
        taken = self.clip.mode == "on" and not refusal if done is None else done
        if taken or not refusal:
            self.clip_purse.spent.append(step)
        words = clip_words(self.clip, norm, factor, taken=taken, refusal=refusal)
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
        told = {"before": before or {}, "after": after or {}, "cost": cost or {}}
        action = Action(kind=kind, step=step, finding=finding, taken=taken, reason=reason, **told)
        self.monitor.record(action)
        # Rungs that answer single steps may do so often, and so may all in a dry run: the first in a while is said.
        news = (taken and kind not in (Clip.kind, Skip.kind)) or step - self._said.get(kind, -CALM) >= CALM
        self._said[kind] = step
        if news:
            self.together.say(f"Guard, {action}")

    # -- what a snapshot holds of it ----------------------------------------------------------------------------

    def _snapshot(self) -> dict[str, Any]:
        extra: dict[str, Any] = {"guard": self.state_dict()}
        if self.to_disk:
            extra["monitor"] = self.monitor.state_soon()
        return extra

    def state_dict(self) -> dict[str, Any]:
        """Everything that its decisions depend on: plain values, or functions that wait for them."""
        return {
            "step": self.step,
            "now": self.monitor.step,
            "ladder": self.ladder.state_dict(),
            "clipped": list(self.clip_purse.spent),
            "rates": self.answers.rates.state_dict(),
            "hold": self.answers.hold.state_dict(),
            "rolled_back": self.review.rolled_back,
            "posts": [post.state_dict() for post in self.posts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Where the Monitor counts its steps anew, so does what is remembered of them."""
        shift = self.monitor.step - int(state["now"])
        self.step = int(state["step"])
        self.ladder.load_state_dict(state["ladder"], shift)
        self.clip_purse.spent = [step + shift for step in state["clipped"]]
        self.answers.rates.load_state_dict(state["rates"], shift)
        self.answers.hold.load_state_dict(state["hold"])
        self.review.rolled_back = int(state["rolled_back"]) + shift
        for post, saved in zip(self.posts, state["posts"], strict=True):
            flying = [{**one, "step": one["step"] + shift} for one in saved["flying"]]
            post.load_state_dict({**saved, "flying": flying})
        self.answers.buffers.remember()
