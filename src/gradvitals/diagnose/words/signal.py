"""What is said about the rules of `gradvitals.diagnose.signal`."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words

WORDS: dict[str, Words] = {
    "near_zero_initial_gsnr": Words(
        name="No signal at the start",
        pattern="The interval of the GSNR holds 0 and little more over the first readings, and the loss does not fall.",
        title=(
            "gradients hold no signal so far: the GSNR of a step is between {low} and {high}, and the loss stays "
            "at {loss}"
        ),
        causes={
            "labels": (
                "inputs and targets do not belong together: shuffled, shifted by one, or wrong for many samples"
            ),
            "init": "weights began too large or too small, so that what comes out has little to do with what goes in",
            "no_warmup": (
                "the learning rate was {lr_first} from the first step: it may have broken the weights before they had "
                "learnt anything"
            ),
            "batch": "the batch of {batch_size} is so small that the signal cannot be seen in {readings} readings",
        },
        cures={
            "labels": "look at ten samples of a batch with their targets, as the model gets them",
            "warmup": "start again with a warmup: from {lr_proposed} to {lr_first} over the first few hundred steps",
            "overfit": (
                "train on one batch alone: if the loss does not fall to near zero there, the model or the loss is"
                " wrong, not the data"
            ),
            "init": "check the initialisation: activations should have a standard deviation near 1 in every layer",
        },
        fine="the gradients held a signal from the start",
        reference="arXiv 2001.07384 for GSNR",
    ),
    "deep_layer_collapse": Words(
        name="Signal fades with depth",
        pattern=(
            "The GSNR falls from layer to layer towards one end of a stack, further than its intervals can explain."
        ),
        title="the signal fades towards the {towards}: the GSNR is {low_end} in {first} and {high_end} in {strong}",
        causes={
            "attenuation": (
                "on its way back through {layers} layers the gradient is drowned in noise, as in deep networks "
                "without a path around the layers (post-LN) or with saturating activations"
            ),
            "output": (
                "layers near the output get contradicting gradients: targets that are noisy, or a loss that pulls"
                " in several directions"
            ),
        },
        cures={
            "pre_ln": (
                "normalise before each layer of the stack that holds {first}, not behind the sum (pre-LN, RMSNorm)"
            ),
            "scale": "scale the residual branches by 1/√{layers} at the start",
            "warmup": "warm up longer: such stacks are most fragile in their first steps",
        },
        fine="the signal is as strong in deep layers as in others",
        reference="arXiv 2002.04745 for post-LN and pre-LN",
    ),
    "sudden_gsnr_drop": Words(
        name="Signal lost",
        pattern=(
            "The GSNR of one source at one batch size drops far below the interval it had, faster than by a "
            "decline with the length of the run or as it fell before, and not while the learning rate is rising."
        ),
        title=(
            "the GSNR at a batch of {batch_size} dropped from {before} before step {from_step} to {gsnr}, {high} "
            "at most"
        ),
        causes={
            "edge": (
                "the weights have reached a place of high curvature, where the learning rate of {lr} makes steps "
                "go back and forth"
            ),
            "data": "the data has changed: another source, another order, targets that no longer fit",
            "learnt": "what was easy is learnt, and what is left cannot be told from noise at this batch size",
        },
        cures={
            "lower": "lower the learning rate from {lr} to about {lr_proposed}",
            "data": "compare batches from before step {from_step} with those after it",
            "batch": "double the batch: the GSNR of a step doubles with it",
        },
        fine="the signal did not drop",
    ),
    "sparse_feature_noise": Words(
        name="Heads without signal",
        pattern=(
            "Heads of one attention layer split into some with signal and others with next to none, by intervals "
            "that do not meet, or some have no gradient at all."
        ),
        title="attention: {where} {state}, while heads beside it have a GSNR of about {others}",
        causes={
            "masked": "what {first} computes never reaches the output: masked, pruned, or multiplied by zero",
            "unbalanced": "other heads of the layer already do what {first} could learn, so that nothing pulls on it",
        },
        cures={
            "unmask": (
                "look for what silences {first}: a head mask, a gate, or columns of the output projection at zero"
            ),
            "watch": "if {first} stays so, prune it: attention works as well without a head that learns nothing",
            "momentum": (
                "or give weak heads their own parameter group; DeepKD raises the momentum of parts with a high "
                "GSNR and lowers that of the others"
            ),
        },
        fine="all attention heads have a signal",
        reference="arXiv 2505.15133 (DeepKD), arXiv 1905.09418 (pruning heads)",
    ),
    "high_effort_low_progress": Words(
        name="High effort, low progress",
        pattern="The gradient norm is high for this run, the GSNR is near zero, and the loss lies over its best.",
        title=(
            "large steps, no progress: the gradient norm is {ratio} times the usual, its GSNR {high} at most, and"
            " the loss {loss} where it has been {best_loss}"
        ),
        causes={
            "edge": "the learning rate of {lr} throws the weights to and fro across a valley",
            "damaged": "an earlier step did harm, and the run has not found back",
            "data": "the data has changed, so that what was learnt no longer helps",
        },
        cures={
            "lower": "lower the learning rate from {lr} to about {lr_proposed}",
            "go_back": "go back to a checkpoint from before the loss rose, if it does not fall by itself",
            "reset": "reset the optimizer's momentum: it remembers the steps that went wrong",
        },
        fine="large gradients came with progress",
    ),
    "noisy_gradients": Words(
        name="Noisy gradients",
        pattern="The median GSNR is under 1 at the batch size in use; the share of coordinates below 1 is told.",
        title=(
            "gradients are noisier than they are large: at a batch of {batch_size} the median GSNR of a tensor is "
            "{median}, and {share} are below 1"
        ),
        causes={
            "ordinary": (
                "this is ordinary: healthy runs are below 1 most of the time, and learn by taking many steps. The"
                " figure 1 is a convention and moves with the batch size. An estimate below 0 says that no signal can"
                " be told from the noise yet"
            ),
            "small_batch": (
                "a larger batch has less noise: with twice the {batch_size} samples a step the true GSNR, whatever it "
                "is now, is twice as large"
            ),
        },
        cures={
            "nothing": "nothing needs to be done while the loss falls",
            "batch": (
                "if it does not, raise the batch over {batch_size} by accumulating gradients, or lower the "
                "learning rate"
            ),
        },
        fine="most coordinates have more signal than noise",
        reference="arXiv 2001.07384",
    ),
}
