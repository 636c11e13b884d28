"""What is said about the rules of `gradvitals.diagnose.clipping`."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words

CLIPS_ALREADY = {
    "limit_bites": (
        "gradients are clipped to {clips_at} already, at {clipped} of the last steps: lower the learning rate of {lr} "
        "rather than the limit"
    ),
    "limit_high": (
        "clip to {max_norm} instead of {clips_at}: nine in ten of this run's steps are below it, and the limit in use "
        "cut {clipped} of the last ones"
    ),
}
"""What is said instead of advice to clip where the loop clips."""

AT_THE_END = "; once the run is over, take the limit of `gradvitals advise`, which goes by all its healthy steps"
"""What is said of a limit that recent steps give: norms change, and a later look gives another one."""

WORDS: dict[str, Words] = {
    "clip_saturated": Words(
        name="Clipping all the time",
        pattern=(
            "More than 95 % of the last few hundred norms are over the norm that gradients are clipped to (advice), or "
            "20 in a row are over 1,000 times of it (a warning)."
        ),
        title="{percent} % of the last {steps} steps were clipped: max_norm is {max_norm}, a usual norm {norm}",
        causes={
            "low": (
                "the limit of {max_norm} is under the ordinary norm of {norm}: every step is scaled to one length, so "
                "that clipping sets the pace and does not stop spikes"
            ),
            "scale": "the gradient is larger than meant: a loss summed instead of averaged, or multiplied",
        },
        cures={
            "low": "clip to {proposed} instead of {max_norm}: nine in ten of these {steps} steps are below it"
            + AT_THE_END,
            "scale": "take the mean of the loss over samples and micro-batches: a norm of {norm} is far too large",
        },
        fine="clipping leaves most steps alone",
    ),
    "clip_idle": Words(
        name="Clipping never",
        pattern="Over 500 steps no norm came near the norm that gradients are clipped to: it is 10 times the largest.",
        title="gradients are clipped to {max_norm}, and no norm of {steps} steps was over {norm}",
        causes={"high": "the limit of {max_norm} is so high that a spike of 10 times a usual norm would pass"},
        cures={"lower": "clip to {proposed}: it leaves ordinary steps of this run alone and stops spikes" + AT_THE_END},
        fine="the limit of clipping is within reach of this run's norms",
    ),
}
