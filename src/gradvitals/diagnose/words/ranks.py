"""What is said about the rules of `gradvitals.diagnose.ranks`."""

from __future__ import annotations

from gradvitals.diagnose.explain import Words

WORDS: dict[str, Words] = {
    "high_dispersion": Words(
        name="Workers far apart",
        pattern=(
            "One worker's gradient norm stays far from those of the others, or the standard deviation of all norms is "
            "over their mean, or far over what is usual for this run."
        ),
        title="{what}, since step {since}",
        causes={
            "one": (
                "what rank {rank} does is not what the others do: its data, the scale of its loss, its batch size, or "
                "hardware that computes wrongly"
            ),
            "two": (
                "one of the two does not do what the other does: its data, the scale of its loss, its batch size, or "
                "hardware that computes wrongly (from two alone, {ratio} and its inverse, it cannot be told which)"
            ),
            "changed": (
                "one worker has changed: silent hardware failure, or data unlike that of the others (usual: {usual})"
            ),
            "shards": "the shards differ: lengths, sources, or samples of one class on one worker",
            "seeds": "workers draw with seeds that are not aligned, or their samplers are at different positions",
            "sizes": "workers have batches of different sizes, or some are padded",
        },
        cures={
            "rank": (
                "look at the data and the loss of rank {rank} at step {since}; if both are like those of the others, "
                "run its node through a hardware test"
            ),
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
        pattern=(
            "Workers have the same samples or the same gradient, or the gradient norms of all are the same, which only "
            "the same data gives."
        ),
        title="{who} have the same data: {how}",
        causes={
            "pair": (
                "rank {rank} was given the shard of rank {twin}: a sampler or loader that was told the wrong rank, or "
                "the wrong number of them"
            ),
            "sampler": (
                "every worker reads the same samples: no DistributedSampler, or one that was not told its rank"
            ),
            "seed": "every worker shuffles with the same seed and reads from the beginning",
            "after": "norms were compared after gradients had been averaged, where they must be equal",
        },
        cures={
            "pair": (
                "compare what the loaders of ranks {twin} and {rank} were given: rank, number of ranks, seed and files"
            ),
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
        pattern="Weights or optimizer state that every worker should hold bit for bit differ between workers.",
        title="copies of the weights or of optimizer state differ between {who}: {where}",
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
            "last_equal": "all copies were last found equal at step {last_equal}; a checkpoint from before is good",
            "rank": "test the hardware of rank {rank}, which differs from the majority",
            "broadcast": "broadcast the weights from one worker that is known to be good",
            "hardware": "where there is no majority, test the hardware of all workers that differ",
        },
        fine="all workers hold the same weights",
        reference="arXiv 2502.12340",
    ),
    "rng_mismatch": Words(
        name="A rank out of step",
        pattern=(
            "At several checks a rank's random numbers are not those of the others, where all had been the same; or "
            "ranks that split the work on the same samples were given different ones."
        ),
        title="the {what} of {who} are not those of the other ranks any more, since step {since}",
        causes={
            "draws": (
                "{who} drew random numbers that the others did not: an evaluation, a log or a retry on one rank alone"
            ),
            "samples": (
                "the loader of {who} is at another position, or shuffles with another seed, than that of its group"
            ),
            "resumed": "one rank was resumed from another checkpoint, or without its random state",
        },
        cures={
            "draws": (
                "save and restore the random state around what {who} does alone, or draw there from a torch.Generator "
                "of its own; it is harmless where nothing on the ranks relies on equal draws"
            ),
            "samples": (
                "seed the loaders of ranks that split one batch alike: by the index of their group, not by the rank"
            ),
            "seeds": "where every rank is meant to draw its own numbers, seed each by its rank from the beginning",
        },
        fine="the ranks draw the same random numbers where they did from the start",
    ),
}
