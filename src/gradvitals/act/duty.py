"""What a Guard does at every step: look, ask the ladder, do what it says, and record it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradvitals.act.answers import Answers
from gradvitals.act.clipper import smallest
from gradvitals.act.gate import LARGEST, Landed, Seen, look
from gradvitals.act.keeper import Keeper
from gradvitals.act.ladder import Call, Evidence, Ladder, Purse, Trouble
from gradvitals.act.post import Post
from gradvitals.act.review import Review
from gradvitals.act.rungs import Clip, CutLR, RollBack, Skip
from gradvitals.measure.rawstep import Arrival
from gradvitals.monitor import Monitor
from gradvitals.types import Action


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
    ) -> None:
        self.monitor, self.posts, self.ladder, self.answers = monitor, posts, ladder, answers
        self.clip, self.skip, self.rollback = clip, ladder.skip, rollback
        self.clip_purse = Purse(clip)
        self.keeper, self.to_disk, self.review = keeper, to_disk, review
        self.step = 0
        """Steps of training that count."""
        self._now = -1
        """The Monitor's number of the step in progress."""
        self._left_out = False
        """Whether something of it was left out."""
        self._dropped = False
        """Whether the rest of it is dropped, as it was rolled back."""
        self.begun = False
        """Whether there is a snapshot of where the run began."""
        self.snapshots = 0

    # -- before and after an optimizer's step -------------------------------------------------------------------

    def before(self, post: Post) -> bool:
        """Whether this optimizer is to make its step."""
        arrival = self.monitor.tap.arrive(post.optimizer)
        if self.monitor.step != self._now:
            self._begin(self.monitor.step)
        make = not self._dropped and (arrival is None or self._may_step(post, arrival))
        if make:
            self.answers.rates.lower(post.optimizer, self._now)
        return make

    def after(self, post: Post, made: bool) -> None:
        """The optimizer has made its step, or was kept from it."""
        if not made:
            self._left_out = True
            self.answers.hold.uncount()
            self.monitor.tap.leave_out(post.optimizer)
            post.optimizer._opt_called = True  # type: ignore[attr-defined]  # or its scheduler warns of a wrong order
        if self.monitor.step != self._now:
            self._end()

    def _begin(self, now: int) -> None:
        """A new step: put right what follows from the last one, and see what was found meanwhile."""
        self._now, self._left_out, self._dropped = now, False, False
        self.answers.hold.begin()
        for kind in self.answers.rates.over(now):
            if kind == CutLR.kind:
                self._record("restore_lr", now, "", True, "the time it was lowered for is over")
        if self.keeper is not None:
            self.keeper.before_update()
            if not self.begun:  # something to go back to from the first step on; its batch is drawn already
                self.begun = True
                self.snapshots += self.keeper.take(now, self._snapshot(), to_disk=False, wait=True)
                self.keeper.before_update()
            self.keeper.settle(now)
        findings = self.review.due(now)
        if findings:
            words = "; ".join(finding.title for finding in findings.values())
            self._answer(Evidence(step=now, words=words, findings=tuple(findings), can_roll_back=self._can_roll_back))

    def _end(self) -> None:
        """The step is over: all optimizers have had their turn."""
        if self._left_out:
            self.answers.hold.left_out()
            self.answers.buffers.put_back()
            return
        self.step += 1
        self.answers.buffers.remember()
        if self.keeper is not None and self.keeper.due(self.monitor.step) and not self.ladder.streak:
            self.snapshots += self.keeper.take(self.monitor.step, self._snapshot())

    # -- deciding -----------------------------------------------------------------------------------------------

    def _may_step(self, post: Post, arrival: Arrival) -> bool:
        seen = look(arrival, each=post.clipper.each)
        if seen is None:
            return True
        if not post.on_device or post.is_new:
            return self._decide_here(post, arrival, seen)
        for landed in post.landing.landed(self._now):
            self.judge_landed(post, landed)
        if self._dropped:
            return False
        self._decide_there(post, arrival, seen)
        return True

    def _limits(self, post: Post) -> tuple[float, float]:
        """The norm and the loss from which on a step is trouble."""
        skip = self.skip
        norm = post.usual.norm_limit(skip.ratio, skip.z, skip.first_steps)
        return norm, post.usual.loss_limit(skip.loss_z, skip.loss_rise, skip.first_steps)

    def _decide_here(self, post: Post, arrival: Arrival, seen: Seen) -> bool:
        """Decide on the host, which knows the numbers at once."""
        scaler = getattr(post.optimizer, "found_inf", None)
        if scaler is not None and float(scaler) > 0:
            return True  # the step will do nothing, and the scaler knows why
        norm, loss = float(seen.norm), float(seen.loss)
        factors = post.clipper.factors(seen, arrival, post.usual) if self.clip.mode != "off" else None
        calls = self._judge(post, self._now, norm, loss, self._limits(post))
        make = not self._dropped and not any(call.kind == Skip.kind and call.taken for call in calls)
        if make and factors is not None and norm <= LARGEST:
            factor = float(smallest(factors))
            if factor < 1 and self._note_clip(self._now, norm, factor):
                post.clipper.apply(factors, seen, arrival, post.optimizer)
        return make

    def _decide_there(self, post: Post, arrival: Arrival, seen: Seen) -> None:
        """Decide on the device; the host will know later."""
        limits = self._limits(post)
        allowed = not self.ladder.purses[Skip.kind].refusal(self._now)
        left_out = post.gate.left_out(seen, *(limits if allowed else (math.inf, math.inf)))
        if self.skip.mode != "on":
            left_out = torch.zeros_like(left_out)
        theirs = post.mark(left_out)
        factors = post.clipper.factors(seen, arrival, post.usual) if self.clip.mode != "off" else None
        if factors is not None and self.clip.mode == "on" and not self.clip_purse.refusal(self._now):
            post.clipper.apply(factors, seen, arrival, post.optimizer)
        if self.skip.mode == "on":
            self.answers.buffers.put_back(left_out)
            self.answers.hold.uncount(left_out * (1 - theirs.to(left_out)))
        factor = torch.ones_like(seen.norm) if factors is None else smallest(factors)
        streak = torch.as_tensor(post.gate.streak)
        post.landing.send(self._now, limits, seen.norm, seen.loss, left_out, theirs, factor, streak)

    def judge_landed(self, post: Post, landed: Landed) -> None:
        """A step that was decided on the device, a few steps ago."""
        if landed.scaler_skipped:
            self.step -= 1
            return
        self.step -= landed.left_out
        self._judge(post, landed.step, landed.norm, landed.loss, landed.limits, left_out=landed.left_out)
        if landed.factor < 1 and not landed.left_out:
            self._note_clip(landed.step, landed.norm, landed.factor)

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
        evidence = Evidence(step=step, trouble=trouble, words=words, far=far, can_roll_back=self._can_roll_back)
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
            if taken and call.kind == RollBack.kind:
                self.step, self._dropped = after["step"], True
            cost = {"steps": steps, "seconds": time.perf_counter() - started} if taken else {}
            self._record(call.kind, evidence.step, call.finding, taken, call.reason, before, after, cost)
        return calls

    def _note_clip(self, step: int, norm: float, factor: float) -> bool:
        """Record that a gradient was clipped, or would have been; returns whether it is to be."""
        refusal = self.clip_purse.refusal(step)
        if not refusal:
            self.clip_purse.spent.append(step)
        taken = self.clip.mode == "on" and not refusal
        words = f"the gradient norm is {norm:.3g}; it was clipped to {norm * factor:.3g} ({self.clip.method})"
        if not taken:
            words = refusal or f"dry run; the gradient norm is {norm:.3g}; {norm * factor:.3g} would be left of it"
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
        self.monitor.record(
            Action(
                kind=kind,
                step=step,
                finding=finding,
                taken=taken,
                before=before or {},
                after=after or {},
                reason=reason,
                cost=cost or {},
            )
        )

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
            "ladder": self.ladder.state_dict(),
            "clipped": list(self.clip_purse.spent),
            "rates": self.answers.rates.state_dict(),
            "posts": [post.state_dict() for post in self.posts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.step = int(state["step"])
        self.ladder.load_state_dict(state["ladder"])
        self.clip_purse.spent = list(state["clipped"])
        self.answers.rates.load_state_dict(state["rates"])
        for post, saved in zip(self.posts, state["posts"], strict=True):
            post.load_state_dict(saved)


def judged(norm: float, loss: float, limits: tuple[float, float]) -> tuple[Trouble, str]:
    """What is wrong with a step, if anything, and in words."""
    norm_limit, loss_limit = limits
    if not norm <= LARGEST:
        return "nonfinite", f"the gradient norm is {norm}"
    if norm > norm_limit:
        return "norm", f"the gradient norm is {norm:.3g}, over the limit of {norm_limit:.3g}"
    if loss > loss_limit:
        return "loss", f"the loss is {loss:.4g}, over the limit of {loss_limit:.4g}"
    return "", ""
