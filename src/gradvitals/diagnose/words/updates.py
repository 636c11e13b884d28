"""What is said about the rules of `gradvitals.diagnose.updates`."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words

WORDS: dict[str, Words] = {
    "dead_tensor": Words(
        name="No gradient",
        pattern="A tensor's gradient is missing or exactly zero for many steps, while other tensors have one.",
        title="{where} had no gradient for {steps} steps, since step {at}",
        causes={
            "unused": "{first} has no gradient from step {at} on: not used in the forward pass, or detached on the way",
            "zero": "the gradient of {first} is exactly zero: what it makes is multiplied by zero or masked further on",
            "rounded": "the gradient of {first} is too small for float16 and rounded to zero: see precision_underflow",
            "cut_off": "{first} had gradients until step {at}: it was frozen or detached then, or is no longer used",
            "died": "all units behind {first} are off: a ReLU that is negative for every input passes nothing back",
        },
        cures={
            "unused": "look where the forward pass leaves out {first}: .detach(), no_grad(), a branch never taken",
            "zero": "look at what multiplies the output of {first}: a mask, a gate, or weights that begin at zero",
            "rounded": "use bfloat16, or a loss scale, so that {first} gets a gradient",
            "cut_off": "look for what happened at step {at}: requires_grad_(False), a callback, a branch that ended",
            "died": "begin again with a lower learning rate or smaller weights, or use LeakyReLU or GELU",
            "meant": "if it is meant to be frozen, set requires_grad to False and leave it out of the optimizer",
        },
        fine="every tensor has a gradient",
    ),
    "unchanged_weights": Words(
        name="Weights do not move",
        pattern="Weights have a gradient and stay exactly as they are over many steps.",
        title="{where} did not change for {steps} steps, though the gradient has a norm of {gradient}",
        causes={
            "left_out": "{first} was not given to the optimizer, or is in a group whose learning rate is 0",
            "zero_lr": "the learning rate is 0",
            "stopped": "{first} moved until step {at}: the lr of its group is 0 now, or its gradient too small",
            "resolution": "updates of {first} are lost: they are under half the distance between two {dtype} numbers",
        },
        cures={
            "left_out": "check that {first} is in one of optimizer.param_groups, and that the lr of its group is not 0",
            "zero_lr": "check the schedule: its learning rate is 0 since step {at}",
            "stopped": "look for what happened at step {at}: a group's lr set to 0, or a gradient down to {gradient}",
            "resolution": "keep {first} in float32, or a float32 copy of it in the optimizer that can hold small steps",
        },
        fine="no tensor stood still",
    ),
    "update_ratio": Words(
        name="Size of the update",
        pattern="One step changes weights by more than a tenth of their size, or by next to nothing, again and again.",
        title="one step changes {where} by {ratio} {of}; {expected_ratio} is healthy",
        causes={
            "high_lr": "the learning rate of {lr} is too high for weights of this size",
            "small_weights": "the weights of {first} are very small: they began so, or decay has shrunk them",
            "decay": "weight decay of {weight_decay} takes {taken} of the weights at every step",
            "momentum": "the optimizer's momentum moves them, at the same learning rate: bad steps are in its state",
            "low_lr": "the learning rate of {lr} is too low: it would take {needed} steps to change the weights",
            "cut_lr": "the learning rate fell from {lr_proposed} to {lr} at step {at}",
            "small_gradient": "hardly any gradient reaches {first}, or its group has a far smaller learning rate",
        },
        cures={
            "high_lr": "lower the learning rate from {lr} to about {lr_proposed}: 0.001 of the weights a step is usual",
            "small_weights": "begin with larger weights in {first}, or lower the learning rate from {lr}",
            "decay": "lower the weight decay of {weight_decay}",
            "momentum": "go back to before step {at} and reset the optimizer's state",
            "low_lr": "raise the learning rate from {lr} to about {lr_proposed}: 0.001 of the weights a step is usual",
            "cut_lr": "take the learning rate back from {lr} to {lr_proposed}, unless it was meant",
            "small_gradient": "see why the gradient of {first} is so small, or give it a learning rate of its own",
        },
        fine="updates have a healthy size for the weights",
        reference="SageMaker Debugger's WeightUpdateRatio",
    ),
    "update_spike": Words(
        name="Update spike",
        pattern="One step moves the weights far more than usual, while the gradient is as usual.",
        title="step {at} moved {where} {ratio}× as far as usual, on a gradient that was as usual",
        causes={
            "momentum": (
                "the optimizer's momentum holds something that does not belong there, or its second moment had become "
                "too small for the gradients to come"
            ),
            "lingers": "the gradient of step {exploded} was far too large, and is still in the optimizer's momentum",
            "lr": "the learning rate rose from {lr_before} to {lr}",
            "unread": "{unread} not read, and may have had a gradient that was not as usual",
            "outside": "something else changed the weights: a checkpoint was loaded, or an average swapped in",
        },
        cures={
            "momentum": "go back to before step {safe} and reset the optimizer's state (momentum and second moments)",
            "lingers": "leave the batch of step {exploded} out, or clip to a norm that would have cut its gradient",
            "lr": "take the learning rate back from {lr} to {lr_before}, or raise it over some hundred steps",
            "beta2": "lower beta2 (0.95 instead of 0.999), so that Adam adapts sooner",
        },
        fine="no step moved the weights far more than usual",
        reference="arXiv 2304.09871: in Adam, large updates come before spikes of the loss",
    ),
}
