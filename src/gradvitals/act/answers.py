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
            return self._roll_back(step)
        return {"step": step}, 1  # a step that is left out: nothing to do

    def _forget_momentum(self, evidence: Evidence, now: int) -> Done:
        names = set() if self._reset.whole else self._review.tensors(evidence.findings)
        chosen = [parameter for name, parameter in self._model.named_parameters() if name in names] or None
        count = sum(reset_momentum(post.optimizer, chosen) for post in self._posts)
        reset = self._reset
        if reset.warmup:
            self.rates.add(reset.kind, now, share=reset.warmup_from, hold=0, rise=reset.warmup, shape="cosine")
        return {"tensors": count, "lr_factor": self.rates.factor(now)}, 0

    def _roll_back(self, step: int) -> Done:
        assert self._keeper is not None
        restored = self._keeper.restore()
        assert restored is not None, "the ladder asks only where there is a healthy snapshot"
        state = restored.extra["guard"]
        self.rates.load_state_dict(state["rates"])
        for post, saved in zip(self._posts, state["posts"], strict=True):
            post.load_state_dict(saved)
        self.buffers.remember()
        return {"step": int(state["step"])}, step - int(state["step"])
