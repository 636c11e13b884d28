"""What each rung does when its turn comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from gradvitals.act.buffers import Buffers
from gradvitals.act.hold import Hold
from gradvitals.act.keeper import Keeper
from gradvitals.act.ladder import Evidence
from gradvitals.act.momentum import reset_momentum
from gradvitals.act.post import Post
from gradvitals.act.rates import Rates
from gradvitals.act.review import Review
from gradvitals.act.rungs import CutLR, ResetMomentum, RollBack
from gradvitals.act.snapshot import arrived

Done = tuple[dict[str, Any], int]
"""How things are afterwards, and how many steps of training were lost."""


class Answers:
    """The hands of a Guard."""

    def __init__(
        self,
        model: nn.Module,
        posts: Sequence[Post],
        *,
        reset: ResetMomentum,
        cut: CutLR,
        keeper: Keeper | None,
        hold: Hold,
        review: Review,
    ) -> None:
        self._model, self._posts, self._reset, self._cut = model, posts, reset, cut
        self._keeper, self._review = keeper, review
        self.hold = hold
        self.rates = Rates()
        self.buffers = Buffers(model)

    def do(self, kind: str, evidence: Evidence, now: int, step: int) -> Done:
        """Act.

        Args:
            kind: Which rung.
            evidence: What called for it.
            now: The Monitor's number of the step in progress.
            step: Steps of training that count so far.
        """
        if kind == ResetMomentum.kind:
            return self._forget_momentum(evidence, now)
        if kind == CutLR.kind:
            cut = self._cut
            self.rates.add(kind, now, share=cut.factor, hold=cut.hold, rise=cut.restore, shape="linear")
            return {"lr_factor": self.rates.factor(now)}, 0
        if kind == RollBack.kind:
            return self._roll_back(evidence, now, step)
        return {"step": step}, 1  # a step that is left out: nothing to do

    def _forget_momentum(self, evidence: Evidence, now: int) -> Done:
        names = set() if self._reset.whole else self._review.tensors(evidence.findings)
        chosen = [parameter for name, parameter in self._model.named_parameters() if name in names] or None
        count = 0
        for post in self._posts:
            count += reset_momentum(post.optimizer, chosen)
            post.is_new = True
        reset = self._reset
        if reset.warmup:
            self.rates.add(reset.kind, now, share=reset.warmup_from, hold=0, rise=reset.warmup, shape="cosine")
        return {"tensors": count, "lr_factor": self.rates.factor(now)}, 0

    def _roll_back(self, evidence: Evidence, now: int, step: int) -> Done:
        """Nothing where no snapshot fits any more, as after a change of the model."""
        assert self._keeper is not None
        restored = self._keeper.restore(self._review.began(evidence.findings))
        if restored is None:
            return {}, 0
        state = arrived({**restored.extra["guard"]})
        self.rates.load_state_dict(state["rates"], shift=now - restored.step)
        done, uncounted = int(state["step"]), set[int]()
        for post, saved in zip(self._posts, state["posts"], strict=True):
            # What was on its way then has long landed: some of it did not count.
            uncounted |= {one["step"] for one in saved["flying"] if one["left_out"] or one["scaler_skipped"]}
            post.load_state_dict({**saved, "flying": []})
            for one in saved["flying"]:
                post.usual.learn(one["norm"], one["loss"])
        self.buffers.remember()
        self.hold.left_out()
        return {"step": done - len(uncounted)}, step - done + len(uncounted)
