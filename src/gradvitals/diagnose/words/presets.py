"""What is said where a detector of another project flags a step."""

from __future__ import annotations

from gradvitals.diagnose.message import Message

SEEN = {
    "loss": "loss {loss}",
    "norm": "gradient norm {grad_norm}",
    "both": "loss {loss}, gradient norm {grad_norm}",
    "update": "update norm {update_norm}",
}


def _words(name: str, pattern: str, sees: str, reference: str) -> Message:
    return Message(
        name=name,
        pattern=f"{pattern} Off unless asked for.",
        title="{detector} flags step {step}: " + SEEN[sees],
        causes={
            "outlier": "one batch unlike the others, or a learning rate at the edge; this detector does not tell which",
            "ordinary": "an ordinary swing: it judges by its own fixed figures, not by what this run usually does",
        },
        fixes={
            "others": "look at what else was found near step {step}: the other rules say what and where",
            "off": "leave this detector out if it flags steps that do no harm",
        },
        passed=f"{name} flagged no step",
        reference=reference,
    )


WORDS = {
    "preset_olmo": _words(
        "OLMo skip step",
        "The loss or the gradient norm is over the mean plus 6 standard deviations of the last 128 steps.",
        "both",
        "OLMo-core, SkipStepOptimizer",
    ),
    "preset_zclip": _words(
        "ZClip",
        "The gradient norm has a z-score over 2.5 under moving averages with factor 0.97.",
        "norm",
        "arXiv 2504.02507",
    ),
    "preset_llmfoundry": _words(
        "llm-foundry loss spike",
        "Five losses in a row are twice the mean of the last 100, or half of the last 100 are over the first ones.",
        "loss",
        "llm-foundry, KillLossSpike",
    ),
    "preset_lightning": _words(
        "Lightning spike",
        "The loss is no better than the last and three times the mean of the last 10, or not finite.",
        "loss",
        "Lightning, SpikeDetection",
    ),
    "preset_megatron": _words(
        "Megatron large value",
        "The loss or the gradient norm is ten times the largest of the first 100 steps, or not finite.",
        "both",
        "Megatron-LM, rerun state machine",
    ),
    "preset_levanter": _words(
        "Levanter update norm",
        "The norm of the update is over the mean plus 3 standard deviations of the last 128 steps.",
        "update",
        "Levanter, ClipUpdateNorm",
    ),
    "preset_llmc": _words(
        "llm.c outlier",
        "The loss or the gradient norm has a z-score over 3 in the last 64 steps, itself included.",
        "both",
        "llm.c, outlier detector",
    ),
}
