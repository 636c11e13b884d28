"""What is said about the rules of `gradvitals.diagnose.gradients` and `nonfinite`."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words

WORDS: dict[str, Words] = {
    "nonfinite": Words(
        name="Gradient not finite",
        pattern="NaN or Inf in a gradient. The first tensor in the order of backward is named.",
        title="NaN or Inf in the gradient of {affected}{first_in} at step {at}",
        causes={
            "scaler": "GradScaler looks for its scale, at {steps} steps so far: it skips what overflows, as it should",
            "diverged": "the loss had risen to {loss} before: most often the learning rate is too high",
            "forward": "the loss is {loss}: the forward pass fails, and backward only passes it on",
            "backward": (
                "what comes after {first} is finite{known_loss}: backward fails in {first}, as at a square root or a "
                "norm of zero, or a sum too large for its type"
            ),
            "float16": "weights in float16 break: it ends at 65,504, and an eps of {eps} in Adam is zero in it",
            "earlier": "{unread} not read, and may have left weights that are not finite",
            "batch": (
                "no gradient is finite{known_loss}: backward fails at the loss itself, or the batch holds NaN or "
                "infinite values"
            ),
        },
        cures={
            "scaler": "nothing to do at step {at}, as long as it does not go on for many steps",
            "guard": "look at the batch of step {at}; the Guard left {steps} steps out so far, and training goes on",
            "diverged": "go back to before the loss rose, and lower the learning rate of {lr}",
            "skipping": "stop: GradScaler has skipped {steps} steps in a row, and no scale helps against a NaN",
            "backward": "run step {at} again under torch.autograd.detect_anomaly() and look at {first}",
            "earlier": "go back to before step {safe}, and check the batch of step {at} with torch.isfinite",
            "forward": "go back to a checkpoint from before step {safe}; check the batch of step {at}: torch.isfinite",
            "float16": "keep weights and the optimizer's state in float32 and compute in autocast; from step {at} on",
            "batch": "check the batch of step {at} with torch.isfinite, and the loss for a log or a root of zero",
            "skip": "leave out steps whose gradient is not finite: clip_grad_norm_(error_if_nonfinite=True) raises",
        },
        fine="every gradient was finite",
    ),
    "explosion": Words(
        name="Gradient explosion",
        pattern=(
            "The gradient norm of the model or of a tensor is over twice what is usual and far outside its spread; or "
            "it has grown tenfold while the loss rose; or it is out of all proportion to the weights from the start."
        ),
        title="{what}",
        causes={
            "dirty_batch": "the batch of step {at} is corrupted: the norm rose at this step and came back",
            "learning_rate": "the learning rate of {lr} is too high: the norm stays up or goes on growing",
            "momentum": "bad steps are in the optimizer's momentum: weights move too far on ordinary gradients",
            "lingers": (
                "the batch of step {began} is corrupted: the norm rose at this step and came back, but the optimizer's "
                "momentum kept it for some steps more"
            ),
            "harmless": "one step alone, and the loss shows nothing of it: healthy runs have such steps too",
            "initialisation": "weights are too large at the start, or a recurrence multiplies what passes through it",
            "loss_scale": "the loss is on the wrong scale: summed instead of averaged, or multiplied and never divided",
        },
        cures={
            "dirty_batch": "skip the batch of step {at}, and look at it: inputs not normalised, broken, wrong labels",
            "left_out": (
                "look at the batch of step {at}: inputs not normalised, broken, wrong labels; its step was left out, "
                "and training goes on"
            ),
            "learning_rate": "lower the learning rate from {lr} to {lr_proposed}, or lengthen the warmup",
            "momentum": "go back to before step {began} and reset the optimizer's state",
            "lingers": (
                "skip the batch of step {began}, and look at it; where the loss has not come back, go back to before "
                "it and reset the optimizer's state"
            ),
            "harmless": "nothing to do at step {at}; where it comes back, look at its batches",
            "initialisation": "begin with smaller weights, of spread 1 / sqrt(inputs): the norm of step {at} is {norm}",
            "loss_scale": "take the mean of the loss over samples and micro-batches: the norm at step {at} was {norm}",
            "clip": "clip gradients to a norm of {max_norm}, which nine in ten of this run's steps are below",
        },
        fine="no gradient stood out from those before it",
        reference="arXiv 2501.06842 (SPAM), 2504.02507 (ZClip)",
    ),
    "vanishing": Words(
        name="Vanishing gradient",
        pattern=(
            "For many steps, layers from the input on have less than 1e-5 of the largest layer's gradient, or the norm "
            "of all is under 1e-5 of what it was, while the loss is high."
        ),
        title="{what}",
        causes={
            "depth": "each layer passes on less than it gets: sigmoids or tanh in many layers, no residual path",
            "gone": "all units are off or saturated, or the loss no longer depends on the weights",
            "initialisation": "weights are too small at the start, so that signal shrinks from layer to layer",
            "decay": "weight decay has shrunk the weights until no signal passes",
            "precision": "gradients are too small for float16 and rounded to zero: see precision_underflow",
        },
        cures={
            "depth": "up to {layer}, use ReLU or GELU instead of sigmoids, add residual paths, or normalise each layer",
            "gone": "go back to before step {at} with a lower learning rate than {lr}",
            "decay": "lower the weight decay of {weight_decay}: it takes {taken} of the weights at every step",
            "initialisation": "initialise with a spread of 1 / sqrt(inputs), or by muP",
            "precision": "use bfloat16, or a loss scale, so that gradients reach {layer}",
        },
        fine="gradients reach every layer",
        reference="arXiv 2002.04745 (why norms in front of the layers help)",
    ),
}
