"""What watching costs several ranks: measured in real processes, and calculated for runs of thousands of ranks.

Two copies of one model take bare and watched steps in turn, so that one monitor lives through a whole round. A round is
as many watched steps as the slowest cadence has, cut into stretches, each between two bare ones; only the ratio to
their mean counts, so drift of the machine cancels. A stretch ends when all of it has been reduced and written, which
training never waits for: the measured cost is an upper bound. The time that the training thread spends on reducing is
measured on its own. The calculation uses the message layouts of the code itself.
"""

from __future__ import annotations

import json
import pickle
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradvitals
from benchmarks.distributed.launch import join, sent, team
from gradvitals.bench import Training, gpt, machine_name, markdown_table, percent
from gradvitals.collect.schedule import ReadSchedule
from gradvitals.config import Config
from gradvitals.distributed.allreduce import HEADER_NUMBERS, RANK_FLAGS, RANK_NUMBERS, STEPS_TOGETHER, Kind, StepPacker
from gradvitals.distributed.audit import MAX_WITNESSES, SAMPLES, Comparison, Memory, Seen, audit_numbers
from gradvitals.distributed.topology import Holdings, RankInfo, Topology, fingerprint, settings_of
from gradvitals.errors import GradvitalsError
from gradvitals.monitor import Monitor, watch
from gradvitals.types import Layout, TensorInfo
from gradvitals.worker.record import Context
from gradvitals.worker.sums import StepSums, Table

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
            f"Sums are {NUMBER_BYTES} bytes each; {STEPS_TOGETHER} plain steps are reduced together. The time is that "
            "of gloo's ring: 2 (ranks - 1) hops of",
            f"{1e6 * HOP_SECONDS:.0f} µs and twice the bytes at {BYTES_PER_SECOND / 1e9:g} GB/s. The all-reduce is "
            "asynchronous: training does not wait for it.",
            f"A plain step grows with tensors, and by {NUMBER_BYTES * len(RANK_FLAGS)} bytes per rank; a full one with "
            f"tensors and heads, and by {NUMBER_BYTES * len((*RANK_FLAGS, *RANK_NUMBERS))} bytes per rank; an audit "
            "with ranks.",
            f"No part grows with both, unless copies differ: then {MAX_WITNESSES} ranks send {4 * NUMBER_BYTES} bytes "
            "per tensor. Nothing grows with the size of tensors.",
        ],
    }


def topology_of(world: int, tensors: int, slots: int) -> Topology:
    """The topology of a run under DDP, as its first rank sees it."""
    infos = tuple(
        TensorInfo(index=i, name=f"layers.{i // 9}.{i % 9}.weight", shape=(64,), dtype="bfloat16", layer="", depth=0)
        for i in range(tensors)
    )
    heads = tuple(f"head{i}" for i in range(max(1, slots // 4))) if slots else ()
    return Topology(
        rank=0,
        world=world,
        group=None,
        check_group=None,
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
    topology = topology_of(world, tensors, slots)
    packer = StepPacker(topology)
    table = Table(Context(layout=topology.layout, slots=topology.slots))
    step = StepSums(step=0, time=0.0, full=True, table=table)
    plain, full = (NUMBER_BYTES * packer.length(Kind(full=full, detail=False)) for full in (False, True))
    largest = NUMBER_BYTES * len(packer.pack_largest(step))
    detail = NUMBER_BYTES * packer.length(Kind(full=True, detail=True))
    audit = NUMBER_BYTES * len(Comparison(topology).pack(step))
    sent = _collectives(plain, full, detail, largest, audit)
    cycle = _cycle()
    info = _rank_info_bytes()
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
        "audit_seconds": _audit_seconds(world),
        "memory_bytes": COPIES * max(sent) + NUMBER_BYTES * SAMPLES * world + world * info,
        "start_bytes": world * info + _holdings_bytes(topology),
        "connections": world - 1,
    }


def _cycle() -> int:
    """Steps after which all readings have come as often as they do in the mean."""
    config = Config()
    return config.tensor_every * config.detail_factor * 2


def _collectives(plain: int, full: int, detail: int, largest: int, audit: int) -> list[int]:
    """The bytes of every collective in one such stretch of a run that is not young."""
    schedule, cycle = ReadSchedule(Config(), audits=True, adapts=False), _cycle()
    sent, waiting = [], 0
    for step in range(10 * cycle + 1, 11 * cycle + 1):
        due = schedule.due(step)
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


def _audit_seconds(world: int) -> float:
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


def _rank_info_bytes() -> int:
    """Bytes that a rank sends about itself when watching starts."""
    info = RankInfo(
        version=gradvitals.__version__,
        settings=settings_of(Config(), True),
        holdings=fingerprint(""),
        shards=(0,),
        empty=(),
        data_ranks=(1000,),
        idle=(),
        stage=None,
    )
    return len(zlib.compress(pickle.dumps(info)))


def _holdings_bytes(topology: Topology) -> int:
    count = len(topology.layout.tensors)
    holdings = Holdings(
        tensors=topology.layout.tensors,
        layers=topology.layout.layers,
        heads=topology.layout.heads,
        slots=tuple(topology.slots),
        windows=tuple(topology.windows),
        shards=(1,) * count,
        worker_shards=(1,) * count,
        kinds=(0,) * count,
    )
    return len(zlib.compress(pickle.dumps(holdings)))


DEFAULT_RANKS = 4
DEFAULT_ROUNDS = 2
STRETCH = 5 * STEPS_TOGETHER
"""Steps per stretch: whole chunks, and a fifth of the slowest cadence."""
SETTLE = 3 * STEPS_TOGETHER
"""Steps of either copy before anything is timed."""
MOST_SECONDS = 3600.0
BUSY_SECONDS = 0.2
"""A step shorter than this is not what anybody trains on several ranks."""

SIZES: dict[str, dict[str, int]] = {
    "gpt-5m": {"n_layer": 6, "d_model": 256, "n_head": 8, "micro_batch_size": 2, "vocab_size": 512, "context": 128},
    "tiny": {"n_layer": 1, "d_model": 8, "n_head": 2, "micro_batch_size": 1, "vocab_size": 16, "context": 8},
}


def run_ranks(
    ranks: int = DEFAULT_RANKS,
    rounds: int = DEFAULT_ROUNDS,
    size: str = "gpt-5m",
    progress: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Time watched steps against bare ones on several ranks, and count what they send each other.

    Args:
        ranks: Processes, over gloo on this machine.
        rounds: How often to go through all kinds of readings.
        size: A name out of `SIZES`.
        progress: Called with a line of text now and then.

    Returns:
        Plain values, ready for JSON.
    """
    tell = progress or (lambda line: None)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        told = Path(folder) / "progress"
        result = Path(folder) / "result.json"
        with team(ranks, measure, rounds, size, folder) as processes:
            shown = 0

            def is_done() -> bool:
                nonlocal shown
                lines = told.read_text("utf-8").splitlines() if told.exists() else []
                for line in lines[shown:]:
                    tell(line)
                shown = len(lines)
                return result.exists()

            processes.wait_until(is_done, "timing", MOST_SECONDS)
        measured = json.loads(result.read_text("utf-8"))
    return {
        "machine": machine_name(torch.device("cpu")),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": ranks,
        "rounds": rounds,
        "size": size,
        **measured,
        "paper": on_paper(),
    }


# -- in the processes ------------------------------------------------------------------------------------------------


def measure(rank: int, world: int, port: int, rounds: int, size: str, folder: str) -> None:
    """The process of one rank; the first one writes the result."""
    join(rank, world, port)
    bare, watched = _training(size, rank), _training(size, rank)
    config = Config(quiet=True)
    cycle = config.tensor_every * config.detail_factor
    home = Path(folder)
    with watch(
        watched.model, watched.optimizer, run=home / "run", config=config, batch_size=bare.batch_size
    ) as monitor:
        # A young run is read more often: start where it no longer is, so that a stretch ends with a chunk.
        monitor.recorder.start(10 * cycle + 1 - SETTLE)
        for _ in range(SETTLE):
            bare.step()
            watched.step(monitor.observe)
        _settle(monitor)
        reducing = _timed_reducing(monitor)
        before = sent(monitor)
        ratios, cpu_ratios, seconds = _alternate(bare, watched, monitor, rounds * cycle // STRETCH, home, rank)
        after = sent(monitor)
    broken = [one for one in monitor.findings if one.id in ("monitor_error", "store_error", "ranks_lost")]
    if broken:
        raise GradvitalsError(f"the monitor failed while it was timed: {broken[0]}")
    if rank == 0:
        steps = rounds * cycle
        found = {
            "parameters": bare.num_parameters,
            "tensors": bare.num_tensors,
            "steps": steps,
            "bare_ms": 1000 * seconds,
            "ratio": statistics.fmean(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "ratios": ratios,
            "cpu_ratio": statistics.fmean(cpu_ratios),
            "collectives_per_step": (after[0] - before[0]) / steps,
            "bytes_per_step": (after[1] - before[1]) / steps,
            "reducing_ms": 1000 * sum(reducing) / len(reducing),
            "reducing_ms_largest": 1000 * max(reducing),
            "ddp_bytes_per_step": sum(parameter.nbytes for parameter in bare.model.parameters()),
        }
        part = home / "result.part"
        part.write_text(json.dumps(found), "utf-8")
        part.replace(home / "result.json")
    dist.destroy_process_group()


def _timed_reducing(monitor: Monitor) -> list[float]:
    """Have every step's time in the reducer, on the training thread, appended to the list that is returned."""
    reduce, seconds = monitor._reduce, list[float]()

    def timed(*args: Any) -> None:
        started = time.perf_counter()
        reduce(*args)
        seconds.append(time.perf_counter() - started)

    setattr(monitor, "_reduce", timed)  # noqa: B010
    return seconds


def _training(size: str, rank: int) -> Training:
    torch.manual_seed(rank)
    training = gpt(torch.device("cpu"), **SIZES[size], tied=False, bf16=False, num_micro_batches=1)
    model = DistributedDataParallel(training.model)
    return replace(training, model=model, loss=model)


def _alternate(
    bare: Training, watched: Training, monitor: Monitor, stretches: int, home: Path, rank: int
) -> tuple[list[float], list[float], float]:
    """The ratio of every watched stretch to the bare ones around it: wall time, processor time; and a bare step's."""
    around = [_stretch(bare)]
    ratios, cpu_ratios = [], []
    for number in range(stretches):
        wall, cpu = _stretch(watched, monitor)
        around.append(_stretch(bare))
        ratios.append(2 * wall / (around[-2][0] + around[-1][0]))
        cpu_ratios.append(2 * cpu / (around[-2][1] + around[-1][1]))
        if rank == 0:
            with (home / "progress").open("a", encoding="utf-8") as file:
                so_far = percent(statistics.fmean(ratios))
                file.write(f"stretch {number + 1} of {stretches} of {STRETCH} steps, {so_far} so far\n")
    return ratios, cpu_ratios, statistics.median(wall for wall, _ in around) / STRETCH


def _settle(monitor: Monitor) -> None:
    """Wait until all steps are reduced and written."""
    if monitor._reducer is not None:
        monitor._reducer.finish(MOST_SECONDS)
    monitor.flush()


def _stretch(training: Training, monitor: Monitor | None = None) -> tuple[float, float]:
    """Seconds of some steps as the first rank saw them, and of the processor on all ranks together."""
    dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(STRETCH):
        training.step(monitor.observe if monitor is not None else None)
    if monitor is not None:
        _settle(monitor)
    cpu = torch.tensor(time.process_time() - cpu_started, dtype=torch.float64)
    dist.barrier()  # all have written what was theirs
    wall = time.perf_counter() - started
    dist.all_reduce(cpu)
    return wall, float(cpu)


# -- in words --------------------------------------------------------------------------------------------------------


def format_ranks(result: dict[str, Any]) -> str:
    """The result as text."""
    rows = [
        ("", "watched, against bare"),
        ("step time, mean of the whole cadence", percent(result["ratio"])),
        ("step time, stretch by stretch", f"[{percent(result['ratio_low'])}, {percent(result['ratio_high'])}]"),
        ("processor time of all ranks", percent(result["cpu_ratio"])),
        ("time of the training thread in the reducer, per step", f"{result['reducing_ms']:.3f} ms"),
        ("the same, longest", f"{result['reducing_ms_largest']:.3f} ms"),
        ("collectives of gradvitals per step", f"{result['collectives_per_step']:.3f}"),
        ("bytes a rank sends with them per step", f"{result['bytes_per_step']:,.0f}"),
        ("the same of DDP itself", f"{result['ddp_bytes_per_step']:,.0f}"),
    ]
    lines = [
        f"{result['machine']}, torch {result['torch']}, {result['date']}",
        f"{result['ranks']} ranks over gloo under DDP, {result['size']}: {result['parameters'] / 1e6:.3g}M "
        f"parameters in {result['tensors']} tensors, {result['bare_ms']:.0f} ms per bare step, {result['steps']} "
        "watched steps",
        "",
        markdown_table(rows),
    ]
    if result["bare_ms"] < 1000 * BUSY_SECONDS:
        lines += ["", f"A bare step is shorter than {1000 * BUSY_SECONDS:.0f} ms: the ratio says little here."]
    return "\n".join([*lines, "", format_paper(result["paper"])])


def format_paper(paper: dict[str, Any]) -> str:
    """The calculation as text."""
    head = ("on paper", *(case["name"] for case in paper["cases"]))
    rows = [head] + [(label, *(how(case) for case in paper["cases"])) for label, how in PAPER_ROWS]
    return "\n".join([markdown_table(rows), "", *paper["notes"]])


def _kib(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda case: f"{case[name] / 1024:,.1f} KiB"


PAPER_ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("ranks", lambda case: f"{case['world']:,}"),
    ("tensors; slices of heads", lambda case: f"{case['tensors']:,}; {case['slots']:,}"),
    ("a plain step", _kib("plain_bytes")),
    ("a full step (every 50)", _kib("full_bytes")),
    ("a detailed step (every 200), with its largest values", _kib("detail_bytes")),
    ("an audit (every 100), on top", _kib("audit_bytes")),
    ("mean, per step and rank", _kib("bytes_per_step")),
    ("collectives per step", lambda case: f"{case['collectives_per_step']:.3f}"),
    ("one all-reduce takes, at most", lambda case: f"{1000 * case['longest_seconds']:,.0f} ms"),
    ("reducing, per step", lambda case: f"{1000 * case['seconds_per_step']:,.1f} ms"),
    ("comparing ranks in an audit, on the host", lambda case: f"{1000 * case['audit_seconds']:,.0f} ms"),
    ("memory of a rank, at most", lambda case: f"{case['memory_bytes'] / 2**20:,.1f} MiB"),
    ("read at the start, by a rank", lambda case: f"{case['start_bytes'] / 1024:,.0f} KiB"),
    ("connections of a rank", lambda case: f"{case['connections']:,}"),
)
