"""Processes that train together: started here, watched while they work, and never left behind.

Each rank runs an ordinary distributed training loop, watched, with a fault in it if it is the one to fail.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.distributed.faults import (
    BATCH_SIZE,
    KILLED,
    LEARNING_RATE,
    RESEEDED,
    Cell,
    Planted,
    RankResult,
    build,
    shards,
)
from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.guard import Guard
from gradvitals.monitor import Monitor, watch

POLL_SECONDS = 0.1
GRACE_SECONDS = 30.0
"""For processes that have done their work to end."""

STORE_TIMEOUT = timedelta(seconds=300)
ORPHAN_SECONDS = 1.0
"""How often a process looks whether the one that started it still lives."""


class Team:
    """The processes of all ranks.

    Args:
        processes: In the order of ranks.
        may_be_killed: The rank whose death is part of the experiment; None for nobody's.
    """

    def __init__(self, processes: list[BaseProcess], may_be_killed: int | None) -> None:
        self.processes = processes
        self._may_be_killed = may_be_killed

    def wait_until(self, is_done: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait for something that the processes do.

        Raises:
            GradvitalsError: Where one of them ends before that, or it takes too long.
        """
        deadline = time.monotonic() + seconds
        while not is_done():
            self._check(what)
            if time.monotonic() > deadline:
                raise GradvitalsError(f"{what}: not done within {seconds:.0f} s; is the machine very busy?")
            time.sleep(POLL_SECONDS)

    def _check(self, what: str) -> None:
        for rank, process in enumerate(self.processes):
            code = process.exitcode
            if code == -signal.SIGKILL and rank == self._may_be_killed:
                continue
            if code:
                raise GradvitalsError(f"{what}: the process of rank {rank} ended with {code}; its output says why")


@contextmanager
def team(world: int, work: Callable[..., Any], *arguments: Any, may_be_killed: int | None = None) -> Iterator[Team]:
    """Start a process for each rank, which calls ``work(rank, world, port, *arguments)``.

    The store that ranks meet in is in this process: it outlives any of them, as under torchrun.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    # Spawned, not forked: a fork of a process in which torch has threads may hang.
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    try:
        for rank in range(world):
            everything = (os.getpid(), work, rank, world, store.port, *arguments)
            started = context.Process(target=_one, args=everything, daemon=True)
            started.start()
            processes.append(started)
        yield Team(processes, may_be_killed)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        del store


def _one(parent: int, work: Callable[..., Any], *arguments: Any) -> None:
    """What each process runs. It ends where the one that started it was killed and could not end it."""

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch_parent, daemon=True).start()
    work(*arguments)


TIMEOUT = timedelta(seconds=300)
RUN = "run"


def serve(rank: int, world: int, port: int, cells: Sequence[Cell], folder: str) -> None:
    """The process of one rank: joins the others and makes all runs, one after the other."""
    join(rank, world, port)
    for cell in cells:
        home = Path(folder) / cell.label
        result = train(cell, rank, home)
        # Written aside and moved, so that who waits for it never sees half of it.
        whole = home / f"rank{rank}.json"
        part = whole.with_suffix(".part")
        part.write_text(json.dumps(result.to_json()), "utf-8")
        part.replace(whole)
    if KILLED not in [cell.fault for cell in cells]:
        dist.destroy_process_group()


def join(rank: int, world: int, port: int) -> None:
    """Become one of the ranks, over gloo. The store they meet in is the parent's, as torchrun's is its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of gloo and DDP: they warn of much that does not matter here
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)


def train(cell: Cell, rank: int, home: Path) -> RankResult:
    """Make one run, as this rank's part of it."""
    home.mkdir(parents=True, exist_ok=True)
    model, data = build(cell), shards(cell, rank)
    if cell.has_dropout:
        torch.manual_seed(RESEEDED * (cell.seed + 1) + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    fault = Planted(cell, rank, data)
    guard = Guard(mode="act") if cell.is_guarded else None
    config = Config(audit_every=cell.audit_every, quiet=True)
    error, step, loss = "", 0, torch.zeros(())
    monitor = watch(model, optimizer, run=home / RUN, config=config, batch_size=BATCH_SIZE, guard=guard)
    started = time.perf_counter()
    try:
        with monitor:
            for step in range(cell.steps):
                fault.before_step(step)
                loss = model(*data.take())
                fault.loss(step, loss).backward()
                monitor.observe(loss)
                optimizer.step()
                optimizer.zero_grad()
                fault.after_step(step, optimizer)
    except RuntimeError as broken:  # what torch.distributed raises where another rank is gone
        if cell.fault != KILLED:
            raise
        error = str(broken).strip().split("\n")[0]
    seconds = (time.perf_counter() - started) / (step + 1)
    collectives, bytes_sent = sent(monitor)
    return RankResult(
        rank=rank,
        steps=step + 1,
        seconds=seconds,
        loss=float(loss.detach()),
        left_out=tuple(action.step for action in guard.actions if action.kind == "skip" and action.taken)
        if guard is not None
        else (),
        digest=digest(model) if cell.wrap == "ddp" else "",
        collectives=collectives,
        bytes_sent=bytes_sent,
        error=error,
    )


def digest(model: nn.Module) -> str:
    """Of all weights, bit for bit."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def sent(monitor: Monitor) -> tuple[int, int]:
    """Collectives of gradvitals' own so far, and the bytes that were handed to them."""
    reducer = monitor._reducer
    return (reducer.collectives, reducer.bytes_sent) if reducer is not None else (0, 0)
