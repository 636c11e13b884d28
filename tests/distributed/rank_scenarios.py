"""What is trained in which way: every scenario by its name. No processes here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import gradvitals as gv

IN_PAIRS = ("tp_by_hand", "fsdp_tp", "fsdp_tp_sequence", "pipeline_by_hand", "pipeline_fsdp")
"""Ways in which four ranks are two data workers."""


@dataclass(frozen=True)
class Scenario:
    """One way to train, with one twist.

    Attributes:
        way: A key of `rank_ways.WAYS`.
        world: Processes.
        micro: Micro-batches a step, of each data worker.
        steps: Steps to make.
        optimizer: "adamw", "sgd" or "vradamw".
        sizes: Samples in the micro-batches: "even", "micro" (they differ) or "ranks" (data workers differ).
        equal: Whether a worker's micro-batches have the same weight, whatever their size.
        tell: Who is told of sizes: "watch", "micro" (observe, after every micro-batch) or nobody, "no".
        precision: "float32", "autocast" (to bfloat16) or "policy" (of FSDP2, to bfloat16).
        scaler: Whether the loss is scaled.
        clip: Largest norm of the gradient.
        side: When a branch is left out: "never", "third" (step 2, on all) or "second" (on data worker 1).
        keep_none: Whether the loop leaves gradients that one rank has and another has not as they are.
        tied: Tensors that are one: "head" (and embedding) or "mlp".
        frozen: Beginnings of the names of parameters that are not trained.
        recompute: Whether activations of blocks are computed again in backward.
        give_up: Whether each step begins with a backward that zero_grad throws away.
        fault: "nan" or "inf" in the loss of the last data worker at step 2, "carried" for gradients never zeroed.
        options: Of the wrapper.
        sync_always: Whether DDP reduces after every micro-batch.
        accumulate_locally: Whether FSDP2 reduces only after the last.
        scale_grads: Whether a pipeline divides gradients by the number of micro-batches.
        settings: Of the Config.
    """

    way: str
    world: int = 2
    micro: int = 2
    steps: int = 3
    optimizer: str = "adamw"
    sizes: str = "even"
    equal: bool = False
    tell: str = "watch"
    precision: str = "float32"
    scaler: bool = False
    clip: float | None = None
    side: str = "never"
    keep_none: bool = False
    tied: str | None = None
    frozen: tuple[str, ...] = ()
    recompute: bool = False
    give_up: bool = False
    fault: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    sync_always: bool = False
    accumulate_locally: bool = False
    scale_grads: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def num_data(self) -> int:
        """Data workers."""
        return 1 if self.way in ("tp", "tp_sequence", "pipeline") else 2 if self.way in IN_PAIRS else self.world

    @property
    def source(self) -> str | None:
        """Where samples at the same weights come from."""
        if self.num_data >= 2:
            return "ranks"
        return "microbatch" if self.micro >= 2 else None

    @property
    def has_replicas(self) -> bool:
        """Whether there are tensors of which several ranks hold the same part."""
        # Those that one rank steps for the others differ until the loop has sent them.
        return self.way not in ("fsdp", "pipeline", "pipeline_fsdp", "zero_by_hand")

    @property
    def exact(self) -> bool:
        """Whether gradients are those of float64 to seven digits."""
        return self.precision == "float32" and self.options.get("hook") not in ("fp16", "power")

    @property
    def needs_gradients(self) -> bool:
        """Whether the truth is of the ranks' own gradients, for they are not those of the dense model."""
        return not self.exact or self.fault == "nan"

    @property
    def tolerance(self) -> float:
        """Relative error of a norm. Over many steps some gradients come near zero, where float32 has fewer digits."""
        return 1e-5 if self.steps < 10 else 5e-5

    def size(self, worker: int, micro: int) -> int:
        return {"even": 3, "micro": 2 + 2 * micro, "ranks": 2 * (worker + 1)}[self.sizes]

    def total(self, worker: int) -> int:
        return sum(self.size(worker, i) for i in range(self.micro))

    def weight(self, worker: int, micro: int, num_data: int) -> float:
        """Of a micro-batch's mean gradient in the gradient of the step."""
        # Data workers average their gradients, whatever number of samples each has.
        return 1 / num_data * (1 / self.micro if self.equal else self.size(worker, micro) / self.total(worker))

    def seed(self, step: int, worker: int, micro: int) -> int:
        return 10_000 * step + 100 * worker + micro

    def leaves_out_side(self, step: int, worker: int) -> bool:
        return {"never": False, "third": step == 2, "second": worker == 1}[self.side]

    def plant(self, step: int, worker: int) -> float:
        if self.fault in ("nan", "inf") and step == 2 and worker == self.num_data - 1:
            return float(self.fault)
        return 1.0

    def make_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        if self.optimizer == "vradamw":
            return gv.optim.VRAdamW(parameters, lr=0.01)
        # Many DTensors at once, as on a GPU: one by one their dispatcher takes longer than all else of a step.
        mixed = self.options.keys() & {"offload", "ignore", "root"}
        foreach = True if self.way in ("fsdp", "hsdp") and not mixed else None
        return torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.95), weight_decay=0.01, foreach=foreach)


WINDOW = {"steps": 22, "micro": 1, "settings": {"window_steps": 20, "window_tensors": ("embed.weight", "head.weight")}}

DDP_TWISTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one micro-batch": {"micro": 1},
    "three micro-batches": {"micro": 3, "optimizer": "sgd"},
    "reduced after each": {"sync_always": True},
    "static graph": {"micro": 1, "options": {"static_graph": True}},
    "bucket views": {"options": {"gradient_as_bucket_view": True}},
    "small buckets and views": {"options": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}},
    "unused on all": {"side": "third", "options": {"find_unused_parameters": True}},
    "unused on one": {"side": "second", "options": {"find_unused_parameters": True}},
    "own hook": {"options": {"hook": "own"}},
    "float16 hook": {"options": {"hook": "fp16"}},
    "PowerSGD hook": {"options": {"hook": "power"}, "micro": 1},
    "autocast": {"precision": "autocast"},
    "scaler": {"scaler": True},
    "scaler and clipping": {"scaler": True, "clip": 0.3},
    "overflow": {"scaler": True, "fault": "inf", "steps": 4},
    "clipping": {"clip": 0.3},
    "tied": {"tied": "head"},
    "frozen and tied": {"tied": "head", "frozen": ("blocks.0.mlp.up",)},
    "recomputed": {"recompute": True},
    "a batch given up": {"give_up": True},
    "not a number": {"fault": "nan", "steps": 6, "optimizer": "sgd"},
    "carried": {"fault": "carried", "optimizer": "sgd", "steps": 4},
    "unequal micro-batches": {"sizes": "micro", "tell": "micro", "settings": {"micro_batch_weights": "size"}},
    "unequal ranks": {"sizes": "ranks"},
    "unequal micro-batches of equal weight": {
        "sizes": "micro",
        "tell": "micro",
        "equal": True,
        "settings": {"micro_batch_weights": "equal"},
    },
    "unequal ranks, sizes told": {"sizes": "ranks", "tell": "micro"},
    "sizes not told": {"tell": "no"},
    "window": WINDOW,
    "variance reduced": {"optimizer": "vradamw", "micro": 3},
}
FSDP_TWISTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one micro-batch": {"micro": 1, "optimizer": "sgd"},
    "accumulated before": {"accumulate_locally": True},
    "not resharded": {"options": {"reshard_after_forward": False}},
    "kept whole": {"accumulate_locally": True, "options": {"reshard_after_forward": False, "keep": True}},
    "offloaded": {"options": {"offload": True}},
    "columns": {"options": {"columns": True}},
    "another divisor": {"options": {"divide": 1.0}},
    "blocks alone": {"options": {"root": False}},
    "some ignored": {"options": {"ignore": True}},
    "compiled": {"options": {"compile": "whole"}},
    "blocks compiled": {"options": {"compile": "blocks"}},
    "recomputed": {"recompute": True},
    "frozen and tied": {"tied": "head", "frozen": ("blocks.0.mlp.up", "blocks.0.side")},
    "mixed precision": {"precision": "policy"},
    "autocast": {"precision": "autocast"},
    "scaler": {"scaler": True},
    "clipping": {"clip": 0.3},
    "unused on all": {"side": "third"},
    "tied": {"tied": "head"},
    "not a number": {"fault": "nan", "steps": 6, "optimizer": "sgd"},
    "unequal ranks": {"sizes": "ranks"},
    "window": WINDOW,
}
TP_TWISTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one micro-batch": {"micro": 1},
    "three micro-batches": {"micro": 3, "optimizer": "sgd"},
    "autocast": {"precision": "autocast"},
    "clipping": {"clip": 0.3},
    "unused on all": {"side": "third"},
    "tied": {"tied": "head"},
    "not a number": {"fault": "nan", "steps": 6, "optimizer": "sgd"},
    "window": WINDOW,
}


def _some(twists: dict[str, dict[str, Any]], *names: str) -> dict[str, dict[str, Any]]:
    return {name: twists[name] for name in names}


PIPELINE_TWISTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpipe": {"options": {"schedule": "gpipe"}, "optimizer": "sgd"},
    "scaled by torch": {"scale_grads": True},
    "three micro-batches": {"micro": 3},
    "autocast": {"precision": "autocast"},
    "clipping": {"clip": 0.3},
    "unused on all": {"side": "third"},
    "tied": {"tied": "mlp"},
    "not told": {"tell": "no"},
}

# A twist is run in all ways in which it takes a path of its own through our code or torch's, and in one of those in
# which it does not: ranks cost time, four of them twice that of two.
MATRIX: dict[tuple[str, int], dict[str, dict[str, Any]]] = {
    ("ddp", 2): DDP_TWISTS,
    ("ddp", 4): _some(DDP_TWISTS, "plain", "unused on one", "unequal ranks"),
    ("compiled", 2): _some(DDP_TWISTS, "plain"),
    ("by_hand", 2): {
        **_some(DDP_TWISTS, "plain", "one micro-batch", "clipping", "unequal ranks", "tied"),
        "unused on one": {"side": "second"},
        "none on one": {"side": "second", "keep_none": True},
    },
    ("zero", 2): _some(DDP_TWISTS, "plain", "clipping"),
    ("zero_by_hand", 2): _some(DDP_TWISTS, "plain"),
    ("fsdp", 2): FSDP_TWISTS,
    ("fsdp", 4): {**_some(FSDP_TWISTS, "plain"), "resharded to two": {"options": {"reshard_after_forward": 2}}},
    ("hsdp", 4): _some(FSDP_TWISTS, "plain", "one micro-batch", "accumulated before", "clipping"),
    ("tp", 2): TP_TWISTS,
    ("tp_sequence", 2): _some(TP_TWISTS, "plain", "one micro-batch", "clipping", "not a number"),
    ("tp_by_hand", 4): _some(TP_TWISTS, "plain"),
    ("fsdp_tp", 4): _some(FSDP_TWISTS, "plain", "mixed precision", "tied", "unequal ranks"),
    ("fsdp_tp_sequence", 4): _some(TP_TWISTS, "plain"),
    ("pipeline", 2): PIPELINE_TWISTS,
    ("pipeline_by_hand", 4): _some(PIPELINE_TWISTS, "plain"),
    ("pipeline_fsdp", 4): {"plain": {"accumulate_locally": True}},
}

SCENARIOS: dict[str, Scenario] = {
    f"{way} on {world}: {twist}": replace(Scenario(way, world), **settings)
    for (way, world), twists in MATRIX.items()
    for twist, settings in twists.items()
}

ALSO_BARE: tuple[str, ...] = (
    *(f"{way} on {world}: plain" for way, world in MATRIX if world == 2 or (way, 2) not in MATRIX),
    "ddp on 2: small buckets and views",
    "ddp on 2: scaler and clipping",
    "ddp on 2: unused on one",
    "ddp on 2: static graph",
    "ddp on 2: PowerSGD hook",
    "fsdp on 2: clipping",
    "fsdp on 2: mixed precision",
    "tp_sequence on 2: clipping",
)
"""Trained without being watched too, to the same bits."""

COUNTED = ("ddp on 2: plain", "fsdp on 2: plain", "tp on 2: plain", "pipeline on 2: plain", "fsdp_tp on 4: plain")
"""Its collectives are counted."""

JOBS: dict[int, list[str]] = {
    world: [
        *(name for name in SCENARIOS if SCENARIOS[name].world == world),
        *(f"{name} / not watched" for name in ALSO_BARE if SCENARIOS[name].world == world),
    ]
    for world in (2, 4)
}
"""What the processes of each world do, in this order."""
