"""What is said about the rules of `gradvitals.diagnose.batch`."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words

WORDS: dict[str, Words] = {
    "batch_too_small": Words(
        name="Batch too small",
        pattern=(
            "The lower end of the noise scale is ten times the batch or more, or a batch of a few samples makes "
            "the loss swing."
        ),
        title="a batch of {batch_size} is small for this run: {grounds}",
        causes={
            "noise": "the few samples of a batch disagree: where a step goes is decided by which of them it got",
            "tiny": (
                "{batch_size} samples cannot average out what is special about each of them. The swing is of the "
                "losses as observed: where the loop smooths them before, single batches swing by more"
            ),
            "late": "the noise scale grows while a run goes on: what was enough at first may not be later",
        },
        cures={
            "accumulate": (
                "accumulate gradients to about {proposed} samples a step; or lower the learning rate of {lr}, "
                "which averages over steps instead"
            ),
            "nothing": (
                "nothing needs to be done while the loss falls: small batches use samples well, and only take "
                "more steps"
            ),
        },
        fine="the batch is not far below the noise scale",
        reference="arXiv 1812.06162 (noise scale), arXiv 2505.23971 (it may be far below the critical batch size)",
    ),
    "batch_too_large": Words(
        name="Batch too large",
        pattern=(
            "The batch is over twice the upper end of the noise scale at many readings in a row, five times for a "
            "warning, and not only while the learning rate is being raised."
        ),
        title=(
            "a batch of {batch_size} is {ratio} times the noise scale or more, which is about {noise_scale}: up "
            "to {wasted} of the samples buy no progress"
        ),
        causes={
            "early": "early in a run gradients agree, and a small batch would do; the noise scale grows later",
            "large": "the samples of a batch agree so much that fewer of them would point the same way",
        },
        cures={
            "smaller": "about {proposed} samples a step would do nearly as well at this stage; grow the batch later",
            "faster": "or keep the batch and raise the learning rate, if training stays stable",
        },
        fine="the batch is not far over the noise scale",
        reference="arXiv 1812.06162 (noise scale), arXiv 2505.23971 (it may be far below the critical batch size)",
    ),
    "estimator_unreliable": Words(
        name="GSNR not well known",
        pattern="The interval of the GSNR spans more than a decade, or holds 0, however many readings it averages.",
        title=(
            "the GSNR is not well known: between {low} and {high} at a batch of {batch_size}, after {readings} readings"
        ),
        causes={
            "few": (
                "it is measured between {count} micro-batches, and between fewer than 6 the ratio of a single "
                "coordinate has no finite variance"
            ),
            "weak": "the signal is weak beside the noise, so that it takes many samples to see it",
        },
        cures={
            "split": "split the same batch into more micro-batches: {needed} instead of {count} would do",
            "accumulate": "accumulate gradients over micro-batches, which can be compared with each other",
            "longer": (
                "read more often (Config(tensor_every=...)) or average over more readings (Config(gsnr_window=...))"
            ),
            "nothing": "nothing needs to be done if the GSNR is not used to decide anything",
        },
        fine="the GSNR of the model is known within a factor of ten",
        reference="arXiv 2309.13681 for the number of micro-batches",
    ),
    "mixed_passes": Words(
        name="Passes of different kinds",
        pattern=(
            "The GSNR between the backward passes of a step stays below 0, which samples of one thing do not have but "
            "by chance: four readings in a row in a GAN, 25 elsewhere (advice)."
        ),
        title=(
            "the backward passes of a step are not samples of the same thing: their gradients point against each "
            "other, and GSNR and noise scale from them mean nothing"
        ),
        causes={
            "game": "one pass is of real samples and one of generated ones, as in a GAN",
            "losses": "each pass has a loss of its own, and what one gains another loses",
            "whole": "together the passes hold the same samples at every step, and the run is at its minimum for them",
        },
        cures={
            "nothing": "nothing needs to be done: leave GSNR and noise scale of this model aside",
            "adam": "with an Adam-like optimizer, the GSNR from its moments holds: Config(sources=('adam',))",
        },
        fine="the passes of a step do not point against each other",
    ),
    "few_parts": Words(
        name="Few parts to compare",
        pattern="A variance-reduced optimizer scales gradients by how well fewer than six parts of a batch agree.",
        title="gradients are scaled by how well {count} parts of a batch agree, which say little of signal and noise",
        causes={
            "few": "a step has {count} backward passes: their ratio scatters so widely that a few elements decide",
        },
        cures={
            "split": "split the same batch of {batch_size} into {enough} or more backward passes a step, better more",
            "base": "or use the optimizer's plain form, as AdamW for VRAdamW: it needs no parts",
        },
        fine="the variance-reduced optimizer compares enough parts",
        reference="arXiv 2309.13681, which takes 8 or more",
    ),
    "identical_microbatches": Words(
        name="Identical micro-batches",
        pattern="The micro-batches of a step have no noise between them: the same samples in each.",
        title="all {count} micro-batches of a step give the same gradient",
        causes={
            "same_data": (
                "the loop puts the same samples into every micro-batch: the loader is asked once a step, not once"
                " a micro-batch"
            ),
            "seed": "each micro-batch is drawn with the same seed or from the same position",
            "one_batch": "the data is a single batch, as in a test of whether the model can learn it by heart",
        },
        cures={
            "next": (
                "fetch a new batch for each of the {count} micro-batches; now {step_size} samples a step have the"
                " worth of {batch_size}"
            ),
            "shuffle": "check that the loader shuffles, and that workers have different seeds",
        },
        fine="micro-batches differ",
    ),
}
