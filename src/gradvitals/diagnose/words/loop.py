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
    "batches_given_up": Words(
        name="Batches given up",
        pattern=(
            "The loop throws away a batch now and then, without a step: a warning where its loss or its gradient was "
            "NaN or Inf."
        ),
        title="the loop gave up batches{whose}, without a step, the first before step {step}",
        causes={
            "broken": "their loss was {loss}, and the loop went on without a step",
            "gradient": "the norm of their gradient was {norm}, and the loop went on without a step",
            "chosen": "the loop zeroed the gradients of a batch, or went on to the next one, without a step",
        },
        cures={
            "find": (
                "look for the batch: steps are counted here as the optimizer makes them, so a counter of batches is "
                "ahead by those given up"
            ),
            "broken": (
                "look there for samples with NaN, Inf or nothing in them, and in the loss, which was {loss}, for a "
                "division by 0 or a log of 0"
            ),
            "gradient": (
                "look there for values that are far too large or 0: a loss can be finite where its gradient is not, as "
                "behind a square root or a norm at 0, a division by nearly 0, or a product that float16 cannot hold"
            ),
            "chosen": "nothing, if it is meant ({batches} when this was found)",
        },
        fine="no batch was given up now and then",
    ),
    "trained_in_turn": Words(
        name="Trained in turn",
        pattern=(
            "Another optimizer steps in turn with this one, and the loss of one side goes through the other, as in a "
            "GAN (advice)."
        ),
        title="trained in turn with another model, as in a GAN: a loss that rises or stands still is not judged",
        causes={"game": "what one side gains the other loses, so that neither loss has to fall"},
        cures={
            "look": "judge by what is generated, or by a score of it: these losses do not tell",
            "balance": "where the loss of one side goes to 0 and stays there, the other learns nothing: slow that side",
        },
        fine="the model is not one side of a game",
    ),
    "frozen_weights": Words(
        name="Frozen weights",
        pattern="Tensors that the optimizer holds do not require a gradient, and stay as they are (advice).",
        title="{frozen} of {tensors} tensors are frozen and stay as they are: {where}",
        causes={"frozen": "requires_grad is False for {first}: it was frozen, as for fine-tuning, or by mistake"},
        cures={
            "meant": "nothing, if {first} is meant to stay as it is; else requires_grad_(True) on it before training",
        },
        fine="no tensor is frozen",
    ),
}
