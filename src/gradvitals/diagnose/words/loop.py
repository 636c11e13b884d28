"""What is said about the rules of `gradvitals.diagnose.loop`."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words

WORDS: dict[str, Words] = {
    "stale_gradients": Words(
        name="Gradients not zeroed",
        pattern="Backward adds to the gradients that the step before had left, step after step.",
        title="gradients are not zeroed between steps: each step since {step} uses the sum of all before it",
        causes={
            "forgotten": "optimizer.zero_grad() is not called, or only now and then",
            "elsewhere": "zero_grad() is called on another model or another optimizer than the one that is stepped",
        },
        cures={
            "zero": "call optimizer.zero_grad() once a step, before the first backward",
            "meant": "to gather gradients over several batches, call optimizer.step() only after the last of them",
        },
        fine="gradients are zeroed between steps",
    ),
}
