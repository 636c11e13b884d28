"""What a large run would send, from the code's own layouts: nothing here is measured but the time to judge an audit."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import gradvitals
from gradvitals.config import Config
from gradvitals.measure.cadence import Calendar
from gradvitals.worker.aggregate import StepSums, Table
from gradvitals.distributed.audit import SAMPLES
from gradvitals.distributed.audit import MAX_WITNESSES, Comparison
from gradvitals.distributed.allreduce import HEADER_NUMBERS
from gradvitals.distributed.topology import RankInfo, Holdings, fingerprint, settings_of
from gradvitals.distributed.topology import Topology
from gradvitals.distributed.audit import Memory, Seen, audit_numbers
from gradvitals.distributed.allreduce import RANK_FLAGS, RANK_NUMBERS, Kind, StepPacker
from gradvitals.measure.tap import STEPS_TOGETHER
from gradvitals.types import Layout, TensorInfo

NUMBER_BYTES = 8
HOP_SECONDS = 50e-6
"""From one host to the next and back into a program, over TCP."""
BYTES_PER_SECOND = 1.25e9
"""Of a 10 Gb/s network between hosts: that of the GPUs is not used."""
COPIES = 4
"""Of the largest vector at the same time: what is packed, its parts, what comes back, and its parts."""

CASES: tuple[tuple[str, int, int, int], ...] = (
    ("124M, 8 GPUs", 8, 148, 576),
    ("7B, 64 GPUs", 64, 291, 4096),
    ("7B, 1,024 GPUs", 1024, 291, 4096),
    ("70B, 1,024 GPUs", 1024, 723, 20480),
    ("70B, 8,192 GPUs", 8192, 723, 20480),
)
"""Name, ranks, tensors, slices of attention heads (each head has one in up to four tensors)."""


def on_paper(cases: Sequence[tuple[str, int, int, int]] = CASES) -> dict[str, Any]:
    """Bytes, time, memory, and what they grow with, as plain values."""
    return {
        "cases": [_case(*case) for case in cases],
        "hop_seconds": HOP_SECONDS,
        "bytes_per_second": BYTES_PER_SECOND,
        "notes": [
            f"Sums are {NUMBER_BYTES} bytes each, {STEPS_TOGETHER} plain steps leave together. The time is that of "
            "gloo's ring: 2 (ranks - 1) hops of",
            f"{1e6 * HOP_SECONDS:.0f} µs and twice the bytes at {BYTES_PER_SECOND / 1e9:g} GB/s. It is the writer's "
            "thread that waits for it, training does not.",
            f"A plain step grows with tensors, and by {NUMBER_BYTES * len(RANK_FLAGS)} bytes a rank; a full one with "
            f"tensors and heads, and by {NUMBER_BYTES * len((*RANK_FLAGS, *RANK_NUMBERS))} bytes a rank; an audit with "
            "ranks.",
            f"No part grows with both, unless copies differ: then {MAX_WITNESSES} ranks tell {4 * NUMBER_BYTES} bytes "
            "a tensor. Nothing grows with the size of tensors.",
        ],
    }


def roster_of(world: int, tensors: int, slots: int) -> Topology:
    """A run under DDP with so many ranks, seen from the first."""
    infos = tuple(
        TensorInfo(index=i, name=f"layers.{i // 9}.{i % 9}.weight", shape=(64,), dtype="bfloat16", layer="", depth=0)
        for i in range(tensors)
    )
    heads = tuple(f"head{i}" for i in range(max(1, slots // 4))) if slots else ()
    return Topology(
        rank=0,
        world=world,
        group=None,
        device_group=None,
        layout=Layout(tensors=infos, layers=("",), heads=heads),
        slots=[(i % tensors, i % len(heads)) for i in range(slots)],
        windows=[0, tensors - 1],
        rows=np.arange(tensors),
        slot_numbers=np.arange(slots),
        weights=np.full(tensors, 1 / world),
        part_weights=np.ones(tensors),
        is_current=np.ones(tensors, dtype=bool),
        is_shared_out=np.zeros(tensors, dtype=bool),
        share=1.0,
        num_sources=world,
        is_whole=np.ones(tensors, dtype=bool),
        expected=np.ones(tensors),
        num_stages=1,
        data_index=np.arange(world),
        kinds=np.zeros(tensors, dtype=np.int64),
        replica_sets=np.zeros((1, world), dtype=np.int64),
    )


def _case(name: str, world: int, tensors: int, slots: int) -> dict[str, Any]:
    topology = roster_of(world, tensors, slots)
    wire = StepPacker(topology)
    step = StepSums(step=0, time=0.0, full=True, table=Table(topology.layout, topology.slots))
    plain, full = (NUMBER_BYTES * wire.length(Kind(full=full, detail=False)) for full in (False, True))
    largest = NUMBER_BYTES * len(wire.pack_largest(step))
    detail = NUMBER_BYTES * wire.length(Kind(full=True, detail=True))
    audit = NUMBER_BYTES * len(Comparison(topology).pack(step))
    sent = _shipments(plain, full, detail, largest, audit)
    cycle = _cycle()
    card = _card_bytes()
    return {
        "name": name,
        "world": world,
        "tensors": tensors,
        "slots": slots,
        "plain_bytes": plain,
        "full_bytes": full,
        "detail_bytes": detail + largest,
        "audit_bytes": audit,
        "bytes_per_step": sum(sent) / cycle,
        "collectives_per_step": len(sent) / cycle,
        "longest_seconds": max(_ring_seconds(size, world) for size in sent),
        "seconds_per_step": sum(_ring_seconds(size, world) for size in sent) / cycle,
        "judging_seconds": _judging_seconds(world),
        "memory_bytes": COPIES * max(sent) + NUMBER_BYTES * SAMPLES * world + world * card,
        "start_bytes": world * card + _stock_bytes(topology),
        "connections": world - 1,
    }


def _cycle() -> int:
    """Steps after which all readings have come as often as they do in the mean."""
    config = Config()
    return config.tensor_every * config.detail_factor * 2


def _shipments(plain: int, full: int, detail: int, largest: int, audit: int) -> list[int]:
    """The bytes of every collective in one such stretch of a run that is not young."""
    calendar, cycle = Calendar(Config(), audits=True), _cycle()
    sent, waiting = [], 0
    for step in range(10 * cycle + 1, 11 * cycle + 1):
        due = calendar.due(step)
        waiting += detail if due.detail else full if due.full else plain
        waiting += audit if due.audit else 0
        if due.full or step % STEPS_TOGETHER == 0:
            sent += [NUMBER_BYTES * HEADER_NUMBERS, waiting]
            waiting = 0
        if due.detail:
            sent.append(largest)
    return sent


def _ring_seconds(size: int, world: int) -> float:
    return 2 * (world - 1) * HOP_SECONDS + 2 * size * (world - 1) / world / BYTES_PER_SECOND


def _judging_seconds(world: int) -> float:
    """Time to make an audit's numbers of what all ranks have sent, on this machine."""
    rng = np.random.default_rng(0)
    seen = Seen(
        norms=rng.lognormal(size=world),
        data_index=np.arange(world),
        rng_prints=np.full(world, 7, dtype=np.uint64),
        sample_prints=rng.integers(1, 2**63, (world, SAMPLES)).astype(np.uint64),
        grad_prints=rng.integers(1, 2**63, world).astype(np.uint64),
        param_digest=np.full((1, world), 7, dtype=np.uint64),
        state_digest=np.full((1, world), 7, dtype=np.uint64),
        replica_set=np.zeros((1, world), dtype=np.int64),
    )
    memory, times = Memory(), []
    for _ in range(3):
        started = time.perf_counter()
        audit_numbers(seen, memory)
        times.append(time.perf_counter() - started)
    return min(times)


def _card_bytes() -> int:
    """What a rank tells of itself when watching begins."""
    card = RankInfo(
        version=gradvitals.__version__,
        settings=settings_of(Config(), True),
        stock=fingerprint(""),
        shards=(0,),
        empty=(),
        data_ranks=(1000,),
        idle=(),
        stage=None,
    )
    return len(zlib.compress(card.to_json().encode()))


def _stock_bytes(topology: Topology) -> int:
    count = len(topology.layout.tensors)
    stock = Holdings(
        tensors=topology.layout.tensors,
        layers=topology.layout.layers,
        heads=topology.layout.heads,
        slots=tuple(topology.slots),
        windows=tuple(topology.windows),
        shards=(1,) * count,
        worker_shards=(1,) * count,
        kinds=(0,) * count,
    )
    return len(zlib.compress(stock.to_json().encode()))
