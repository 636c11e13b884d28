"""What is said about the rules of `gradvitals.diagnose.swings`."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words
from gradvitals.diagnose.words.clipping import CLIPS_ALREADY

WORDS: dict[str, Words] = {
    "oscillation": Words(
        name="Oscillation",
        pattern=(
            "Over a window of steps, updates turn from one to the next by far more than momentum explains (a warning), "
            "or the norm or the loss swings by a large part of itself while the loss is still high (advice)."
        ),
        title="{what}",
        causes={
            "edge_of_stability": (
                "the learning rate of {lr} is at the edge of what the loss surface allows: each step goes too far "
                "and the next comes back"
            ),
            "batch_too_small": "the batch of {batch} is small against {noise}: each gradient says something else",
        },
        cures={
            "edge_of_stability": "lower the learning rate from {lr} to {lr_proposed}, or lengthen the warmup",
            "batch_too_small": "accumulate micro-batches to a batch of {batch_proposed}, or lower the learning rate",
        },
        fine="steps do not undo each other",
        reference="arXiv 2103.00065 (edge of stability), 1812.06162 (noise scale)",
    ),
    "unstable_norm": Words(
        name="Unstable norm",
        pattern="The norm of a tensor varies by more than its own size from one step to the next, over many steps.",
        title="the gradient norm of {where} varies by {cv} times its own size",
        causes={
            "noise": "few samples reach {first}: a small batch, or rows that are rarely used",
            "sharp": "a learning rate near its limit makes small causes large",
        },
        cures={
            "clip": "clip gradients to a norm of {max_norm}, so that single steps do not decide",
            **CLIPS_ALREADY,
            "batch": "use a larger batch, or accumulate micro-batches",
            "lr": "give {first} a smaller learning rate",
        },
        fine="norms vary less than their own size",
    ),
}
