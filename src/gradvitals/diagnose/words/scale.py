"""What is said about the rule of `gradvitals.diagnose.scale`."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words

WORDS: dict[str, Words] = {
    "trapped_scale": Words(
        name="Trapped scale",
        pattern=(
            "Weight matrices under AdamW have the norm that noise and weight decay alone would have given them, "
            "reading after reading, in a run long enough to have forgotten the norm it began with."
        ),
        title=(
            "{tensors} of {matrices} weight matrices are as large as noise and weight decay make them: the elements "
            "of {first} are {rms} in root mean square, by noise alone they would be {noise_rms}"
        ),
        causes={
            "noise": (
                "perhaps most of their gradient is noise, so that each step moves them at random and the weight decay "
                "of {weight_decay} pulls them back; at a learning rate of {lr} the two would balance there, whatever "
                "size suits the loss. A norm alone does not prove it"
            ),
            "invariant": (
                "or their size does not matter, as of weights right before a normalisation: then nothing is lost"
            ),
        },
        cures={
            "multipliers": (
                "try learnable multipliers in the next run, on these {tensors} tensors or on all matrices: "
                "gv.multipliers.attach(model, where=gv.multipliers.suggest(run))"
            ),
            "decay": (
                "or choose their size by hand: it goes with the root of learning rate over weight decay, so that a "
                "quarter of the weight decay makes them twice as large"
            ),
            "nothing": "nothing needs to be done while the loss falls: what there is to gain is a little",
        },
        fine="no weight matrix was seen to be held by noise, as far as optimizer and length of the run let one tell",
        reference="arXiv 2601.04890 (learnable multipliers)",
    ),
}
