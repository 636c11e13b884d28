"""From a run to settings for the next: learning rate, clipping, batch size, warmup, decay, and layers. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradvitals.advise.advice import CONFIDENCES, Advice, Confidence, Figure
from gradvitals.advise.batch import advise_batch
from gradvitals.advise.clip import advise_clip
from gradvitals.advise.decay import advise_decay
from gradvitals.advise.layers import advise_layers
from gradvitals.advise.learning_rate import advise_learning_rate
from gradvitals.advise.record import Record
from gradvitals.advise.warmup import advise_warmup
from gradvitals.store.reader import Run
from gradvitals.types import Finding

__all__ = ["CONFIDENCES", "Advice", "Advised", "Confidence", "Figure", "advise"]

TOPICS = {
    "learning_rate": advise_learning_rate,
    "max_grad_norm": advise_clip,
    "batch_size": advise_batch,
    "warmup": advise_warmup,
    "decay": advise_decay,
    "layers": advise_layers,
}


@dataclass(frozen=True, kw_only=True)
class Advised:
    """Everything `gradvitals advise` prints."""

    run: str
    steps: int
    """Steps from the first that was read to the last."""
    live: bool
    """Whether the run is still being written."""
    root: Finding | None
    """The first finding of `gradvitals doctor`, which comes before any setting; None if the run is healthy."""
    learning_rate: Advice
    max_grad_norm: Advice
    batch_size: Advice
    warmup: Advice
    decay: Advice
    layers: Advice

    @property
    def pieces(self) -> tuple[Advice, ...]:
        """Each piece of advice, in order."""
        return tuple(getattr(self, topic) for topic in TOPICS)

    def to_json(self) -> dict[str, Any]:
        """Returns the record as plain JSON values."""
        pieces = {advice.topic: advice.to_json() for advice in self.pieces}
        root = None if self.root is None else self.root.to_json()
        return {"run": self.run, "steps": self.steps, "live": self.live, "root": root, **pieces}


def advise(run: Run) -> Advised:
    """Returns what a run suggests for the next one, or for the rest of itself.

    Raises:
        RunError: If the run has no readings.
    """
    record = Record(run)
    pieces = {topic: advise_on(record) for topic, advise_on in TOPICS.items()}
    return Advised(run=str(run.path), steps=record.num_steps, live=run.is_live, root=record.root, **pieces)
