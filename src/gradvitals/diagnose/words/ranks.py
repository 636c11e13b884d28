"""What is said about the rules of `gradvitals.diagnose.ranks`."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words

WORDS: dict[str, Words] = {
    "high_dispersion": Words(
        name="Workers far apart",
        pattern=(
            "The standard deviation of the workers' local gradient norms is over their mean, or far over what is "
            "usual for this run."
        ),
        title=(
            "the gradient norms of the {world_size} workers lie far apart: their spread is {dispersion} of their "
            "mean, since step {since}"
        ),
        causes={
            "changed": (
                "one worker has changed: silent hardware failure, or data unlike that of the others (usual: {usual})"
            ),
            "shards": "the shards differ: lengths, sources, or samples of one class on one worker",
            "seeds": "workers draw with seeds that are not aligned, or their samplers are at different positions",
            "sizes": "workers have batches of different sizes, or some are padded",
        },
        cures={
            "compare": (
                "compare the local gradient norms of step {since}, worker by worker, and look at the data of the "
                "largest"
            ),
            "sampler": "check that every worker calls sampler.set_epoch with the same epoch",
            "hardware": "if it is always the same worker, run its node through a hardware test",
        },
        fine="the workers' gradients are of similar size",
    ),
    "low_dispersion": Words(
        name="Workers with the same data",
        pattern="The workers' local gradient norms are all the same, which only the same data gives.",
        title="all {world_size} workers have the same gradient norm: their spread is {dispersion} of their mean",
        causes={
            "sampler": (
                "every worker reads the same samples: no DistributedSampler, or one that was not told its rank"
            ),
            "seed": "every worker shuffles with the same seed and reads from the beginning",
            "after": "norms were compared after gradients had been averaged, where they must be equal",
        },
        cures={
            "sampler": (
                "give each of the {world_size} workers its own shard: DistributedSampler, or a loader seeded by rank"
            ),
            "check": (
                "print the indices of one batch on two workers; GSNR and noise scale between workers mean nothing"
                " until they differ"
            ),
        },
        fine="each worker has data of its own",
    ),
    "replica_mismatch": Words(
        name="Replicas differ",
        pattern="Weights that every worker should hold bit for bit differ between workers.",
        title="copies of the weights differ between workers: {where}",
        causes={
            "corruption": "silent data corruption: memory, a broken link, or a faulty unit on one worker",
            "not_reduced": "gradients were not averaged: no_sync on one worker, or parameters outside the wrapper",
            "random": (
                "workers began with different weights, or a layer is changed by code that is not the same on all"
            ),
        },
        cures={
            "go_back": (
                "stop, and go back to the last checkpoint from before step {step} at which all copies were equal"
            ),
            "broadcast": "broadcast the weights from one worker that is known to be good",
            "hardware": "find the worker that differs from the majority and test its hardware",
        },
        fine="all workers hold the same weights",
        reference="arXiv 2502.12340",
    ),
}
