"""What is said about the rules of `gradvitals.diagnose.precision`."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words

WORDS: dict[str, Words] = {
    "precision_underflow": Words(
        name="Gradients too small for float16",
        pattern=(
            "Gradients in float16 are near its smallest number, 6e-8, by their root mean square, or small with many "
            "exact zeros: the rest of them is lost."
        ),
        title="gradients of {where} are too small for float16: {rms} or zero, and it ends at {expected_smallest}",
        causes={
            "unscaled": "float16 has no number between 0 and 6e-8, and no loss scale keeps gradients above it",
            "scaled": "the loss scale has become too small, after steps that overflowed",
            "vanishing": "gradients shrink from layer to layer: see vanishing",
        },
        cures={
            "unscaled": "use bfloat16, or scale the loss by {scale} with torch.amp.GradScaler and float32 weights",
            "scaled": "see why steps overflow, as each halves the scale; or use bfloat16, which needs none",
            "float32": "keep {first} in float32",
        },
        fine="gradients are well above the smallest number of their type",
        reference="Mixed precision training, arXiv 1710.03740",
    ),
}
