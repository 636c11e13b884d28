"""One rank: an ordinary distributed training loop, watched, with a fault in it where it is the one."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradvitals.config import Config
from gradvitals.guard import Guard
from gradvitals.lab.distributed.cell import KILLED, Cell, RankResult
from gradvitals.lab.distributed.faults import Planted
from gradvitals.lab.distributed.task import BATCH_SIZE, LEARNING_RATE, RESEEDED, build, shards
from gradvitals.monitor import Monitor
from gradvitals.watching import watch

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
    exchange = monitor._completion.exchange
    return (exchange.collectives, exchange.bytes_sent) if exchange is not None else (0, 0)
