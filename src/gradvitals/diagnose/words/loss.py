"""What is said about losses."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words

WORDS: dict[str, Words] = {
    "loss_nonfinite": Words(
        name="Loss not finite",
        pattern="The loss is NaN or infinite.",
        title="the loss is {loss} at step {at}; it was {last_loss} before",
        causes={
            "weights": "weights are not finite since step {broken}, so every forward pass fails from then on",
            "earlier": "{unread} not read, and may have left weights that are not finite",
            "diverged": "the gradient had grown to {ratio}× its usual norm: training diverged until numbers ran out",
            "forward": "the forward pass overflows: a division by zero, the log of zero, a sum too large for its type",
            "data": "the batch itself holds NaN or infinite values",
        },
        cures={
            "weights": "go back to a checkpoint from before step {broken}; what is trained after it is lost",
            "earlier": "go back to before step {safe}, and check the batch of step {at} with torch.isfinite",
            "diverged": "go back to before step {safe} and lower the learning rate from {lr} to {lr_proposed}",
            "check_batch": "check the batch of step {at} with torch.isfinite, and go on from a checkpoint before it",
            "left_out": "check the batch of step {at} with torch.isfinite; its step was left out, training goes on",
            "anomaly": "run the step again under torch.autograd.detect_anomaly() to find the operation",
        },
        fine="the loss was finite at every step",
    ),
    "loss_spike": Words(
        name="Loss spike",
        pattern="One loss lies far above those before it, by the spread of this run's losses and of their logarithms.",
        title="the loss jumped to {loss} at step {at}; {expected_loss} was usual",
        causes={
            "update": "step {pushed} moved the weights {moved}× as far as usual: momentum or the learning rate",
            "batch": "the batch of step {at} is unlike the others: corrupted, mislabelled, or not normalised",
            "sharp": "the learning rate is near the limit of this model, so that small causes have large effects",
        },
        cures={
            "batch": "look at the batch of step {at}; leave it out if it is broken",
            "left_out": "look at the batch of step {at}; its step was left out, and training goes on",
            "update": "go back to before step {pushed}; reset the optimizer's state if its momentum is to blame",
            "sharp": "lower the learning rate from {lr} to {lr_proposed}, or clip gradients to a norm of {max_norm}",
        },
        fine="no loss stood out from the others",
        reference="PaLM (arXiv 2204.02311) went back 100 steps and left out 200 to 500 batches",
    ),
    "loss_rising": Words(
        name="Loss rising",
        pattern="The mean of the last 20 losses is far above the lowest such mean: much of what was learned is lost.",
        title="the loss rose to {loss} from {expected_loss} at step {best_step}, and stayed up",
        causes={
            "lr": "the learning rate rose from {lr_before} to {lr}, which this model cannot take",
            "batch": "the gradient of step {spiked} was {spike}× its usual size: one batch has thrown the weights back",
            "update": "step {pushed} moved the weights {moved}× as far as usual, to a place where they know less",
            "data": "the data changed around step {at}: other labels, another source, another order",
            "high_lr": "the learning rate of {lr} is too high for where the run is now",
            "decay": "weight decay of {weight_decay} takes more from the weights than the gradient gives",
            "stale": "gradients are not zeroed between steps, so that steps become ever longer: see stale_gradients",
        },
        cures={
            "data": "compare batches before and after step {at}: inputs and targets must still be as they were",
            "lr": "go back to before step {at} and take the learning rate back to {lr_before}",
            "batch": "go back to before step {spiked} and leave its batch out; clip, so that one batch cannot do it",
            "update": "go back to before step {pushed} and reset the optimizer's state",
            "high_lr": "go back to about step {best_step} and lower the learning rate from {lr} to {lr_proposed}",
            "decay": "lower the weight decay of {weight_decay}",
            "stale": "call optimizer.zero_grad() once a step, and go back to about step {best_step}",
        },
        fine="the loss never rose far above its best",
    ),
    "loss_plateau": Words(
        name="Loss plateau",
        pattern=(
            "The loss has hardly fallen since the start of the run and is flat (advice at first, then a warning), or "
            "has stopped falling later on (advice). Both are judged by a line through the losses and its standard "
            "error."
        ),
        title="the loss {kind}: {loss} after {steps} steps",
        causes={
            "small_lr": "the learning rate of {lr} is so small that a step changes weights by {ratio} of their size",
            "no_signal": "inputs and targets may not belong together: shuffled labels, wrong targets, inputs all alike",
            "decay": "weight decay of {weight_decay} has left {left} of the weights: it takes more than gradients give",
            "large_lr": "the learning rate of {lr} may be too high: each step undoes the one before",
            "initialisation": "weights may begin too small or too large for signal to pass",
            "done": "the model has learned what it can at a learning rate of {lr}",
        },
        cures={
            "small_lr": "raise the learning rate from {lr} to about {lr_proposed}",
            "no_signal": "train on 10 samples alone: if the loss of {loss} does not fall even then, check the targets",
            "decay": "lower the weight decay of {weight_decay}: it takes {taken} of the weights at every step",
            "done": "lower the learning rate from {lr} to {lr_lower}, or stop here",
            "large_lr": "try a learning rate of {lr_lower}, and one of {lr_proposed}",
            "initialisation": "compare the outputs of each layer at the start: their spread should be near 1",
        },
        fine="the loss did not stand still",
    ),
}
