"""What is said about the rules of `gradvitals.diagnose.schedule`."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words
from gradvitals.diagnose.words.clipping import CLIPS_ALREADY

WORDS: dict[str, Words] = {
    "warmup_needed": Words(
        name="Warmup needed",
        pattern=(
            "The learning rate is at its full height from the first step, and the loss rises in the first steps, or "
            "the first gradients are ten times all that follow."
        ),
        title="training began at the full learning rate of {lr}, and its first steps were a shock: {harm}",
        causes={
            "rose": "the first steps were too long for weights that have learnt nothing yet",
            "shock": (
                "the first gradients were far larger than all that follow, and at the full learning rate they throw "
                "the weights far from where they began"
            ),
            "too_high": "the learning rate of {lr} is too high for this model, with or without a warmup",
            "moments": "an adaptive optimizer knows little of the size of gradients in its first steps",
        },
        cures={
            "warmup": "start again with a warmup over about {warmup} steps, from {lr_proposed} to {lr}",
            "lower": "start again with a learning rate of {lr_tenth} or less, and raise it from there",
            "clip": "clip gradients to a norm of {usual_norm}, so that the first do not count for more than others",
            **CLIPS_ALREADY,
            "pre_ln": "in a transformer, normalise before each layer (pre-LN), which makes warmup less needed",
        },
        fine="the start was smooth",
        reference="arXiv 1706.02677, arXiv 2002.04745",
    ),
    "lr_too_high": Words(
        name="Learning rate too high",
        pattern=(
            "Within the first steps, at the full learning rate, the loss rises to ten times the first one or more, the "
            "gradient with it, and the weights change by a large part of their size: critical until the loss is back "
            "under the first one. Or the first steps multiply the weights, and from then on the loss stays high and "
            "no signal is left in most tensors: a warning."
        ),
        title="the learning rate of {lr} is too high: {harm}",
        causes={
            "too_far": "one step changed the weights by {ratio} of their size, and what they began with is lost",
            "no_signal": (
                "what the weights began with is lost, and no signal is left in the gradients of most tensors, with a "
                "median GSNR of {gsnr}: they cancel from step to step, or are far smaller than they were"
            ),
        },
        cures={
            "lower": "start again and lower the learning rate from {lr} to about {lr_proposed}",
            "warmup": "if that is slow, raise it step by step, with a warmup and clipped gradients",
        },
        fine="the first steps did not throw the weights away",
    ),
    "decay_due": Words(
        name="Decay due",
        pattern="The GSNR has fallen far below its best and the loss has levelled out, at a constant learning rate.",
        title=(
            "the signal has faded and the loss is level at {loss}: the GSNR is {high} at most where it was "
            "{best}, and the learning rate still {lr}"
        ),
        causes={
            "too_long": "steps of this length only move the weights around in the noise; shorter ones average it out",
            "learnt": "the model has learnt what this data and this size of model allow",
        },
        cures={
            "decay": "lower the learning rate from {lr} to about {lr_proposed}, or let it decay from here to the end",
            "batch": "or raise the batch over {batch_size}, which does to the noise what a decay does",
        },
        fine="the learning rate suits the signal there is",
        reference="arXiv 1711.00489",
    ),
}
