"""What watching costs several ranks: bare and watched steps of two copies of one model, in turn, in real processes.

Two copies, so that one monitor lives through a whole round, as it would in a long run: a round is as many watched steps
as the slowest cadence has, so that every kind of reading comes in it as often as it does there. The round is cut into
stretches, each between two bare ones, and only the ratio to their mean counts: what else the machine does cancels.
A stretch ends when everything of it has been exchanged and written, which in a training run nobody waits for: the
measured cost is an upper bound.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.lab.distributed.paper import on_paper
from gradvitals.lab.distributed.rank import join, sent
from gradvitals.lab.distributed.team import team
from gradvitals.lab.markdown import markdown_table
from gradvitals.lab.overhead import machine_name, percent
from gradvitals.lab.shapes import Training, gpt
from gradvitals.measure.tap import STEPS_TOGETHER
from gradvitals.monitor import Monitor
from gradvitals.monitor import watch

DEFAULT_RANKS = 4
DEFAULT_ROUNDS = 2
STRETCH = 5 * STEPS_TOGETHER
"""Steps of a stretch: whole shipments, and a fifth of the slowest cadence."""
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
    """Time watched steps against bare ones on several ranks, and count what they tell each other.

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
        # A young run is read more often: begin where it no longer is, so that a stretch ends with a shipment.
        monitor.recorder.start(10 * cycle + 1 - SETTLE)
        for _ in range(SETTLE):
            bare.step()
            watched.step(monitor.observe)
        monitor.flush()
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
            "ddp_bytes_per_step": sum(parameter.nbytes for parameter in bare.model.parameters()),
        }
        part = home / "result.part"
        part.write_text(json.dumps(found), "utf-8")
        part.replace(home / "result.json")
    dist.destroy_process_group()


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


def _stretch(training: Training, monitor: Monitor | None = None) -> tuple[float, float]:
    """Seconds of some steps as the first rank saw them, and of the processor on all ranks together."""
    dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(STRETCH):
        training.step(monitor.observe if monitor is not None else None)
    if monitor is not None:
        monitor.flush()
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
        ("collectives of gradvitals a step", f"{result['collectives_per_step']:.3f}"),
        ("bytes a rank hands to them a step", f"{result['bytes_per_step']:,.0f}"),
        ("the same of DDP itself", f"{result['ddp_bytes_per_step']:,.0f}"),
    ]
    lines = [
        f"{result['machine']}, torch {result['torch']}, {result['date']}",
        f"{result['ranks']} ranks over gloo under DDP, {result['size']}: {result['parameters'] / 1e6:.3g}M "
        f"parameters in {result['tensors']} tensors, {result['bare_ms']:.0f} ms a bare step, {result['steps']} watched "
        "steps",
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
    ("mean, a step of a rank", _kib("bytes_per_step")),
    ("collectives a step", lambda case: f"{case['collectives_per_step']:.3f}"),
    ("one exchange takes, at most", lambda case: f"{1000 * case['longest_seconds']:,.0f} ms"),
    ("exchanging, a step", lambda case: f"{1000 * case['seconds_per_step']:,.1f} ms"),
    ("judging an audit on the host", lambda case: f"{1000 * case['judging_seconds']:,.0f} ms"),
    ("memory of a rank, at most", lambda case: f"{case['memory_bytes'] / 2**20:,.1f} MiB"),
    ("read at the start, by a rank", lambda case: f"{case['start_bytes'] / 1024:,.0f} KiB"),
    ("connections of a rank", lambda case: f"{case['connections']:,}"),
)
