"""One of the processes: runs scenarios one after the other and leaves what it saw in files.

Of job 3, rank 1 leaves `3.1.pkl`. When a job fails on any rank, all end with status 3 after it, so that no
half-finished collective meets the next; `rank_launch` starts them anew.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pickle
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from rank_data_parallel import Way
from rank_groups import end_those_of_monitors
from rank_scenarios import SCENARIOS, Scenario
from rank_troubles import TROUBLES
from rank_ways import WAYS

import gradvitals as gv
from gradvitals.types import Reading

FAILED = 3
PATIENCE = 30.0
"""Seconds to wait for the other ranks after a job."""


def config_of(scenario: Scenario) -> gv.Config:
    settings = {"tensor_every": 1, "quiet": True, "audit_every": 1, "rank_timeout": 20.0, **scenario.settings}
    known = {field.name for field in fields(gv.Config)}
    return gv.Config(**{name: value for name, value in settings.items() if name in known})


def plain(reading: Reading) -> dict[str, Any]:
    kinds = ("values", "tensors", "layers", "heads", "ranks")
    return {
        "step": reading.step,
        "source": reading.source,
        "stage": reading.stage,
        "batch_size": reading.batch_size,
        **{kind: dict(getattr(reading, kind, {})) for kind in kinds},
    }


class Seen:
    """Calls of collectives, by the thread they were made on."""

    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "reduce", "gather",
             "broadcast_object_list", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "barrier", "scatter",
             "gather_object", "monitored_barrier", "send", "recv", "isend", "irecv", "new_group")  # fmt: skip

    def __init__(self) -> None:
        self.main: Counter[str] = Counter()
        self.other: Counter[str] = Counter()
        self.sizes: list[int] = []
        for name in self.names:
            counted = self._counted(name, getattr(dist, name))
            setattr(dist, name, counted)
            setattr(dist.distributed_c10d, name, counted)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self.main[name] += 1
            else:
                op = kwargs.get("op", args[1] if len(args) > 1 else dist.ReduceOp.SUM)
                label = f"{name}:{str(op).rpartition('.')[2]}" if name == "all_reduce" else name
                self.other[label] += 1
                if name == "all_reduce":
                    self.sizes.append(args[0].numel() * args[0].element_size())
            return function(*args, **kwargs)

        return call

    def take(self) -> dict[str, Any]:
        taken = {"main": dict(self.main), "other": dict(self.other), "sizes": list(self.sizes)}
        self.main.clear()
        self.other.clear()
        self.sizes.clear()
        return taken


def train(way: Way, monitor: gv.Monitor | None, record: dict[str, Any] | None) -> None:
    """The ordinary loop. What the truth needs is kept beside it, where there is a record, without any collective."""
    scenario = way.scenario
    if scenario.tell == "micro" and monitor is not None:
        way.on_micro = lambda loss, size: monitor.observe(loss, batch_size=size)
    if record is not None:
        record["weights"].append(way.weights())
    for step in range(scenario.steps):
        losses = way.backward(step)
        if record is not None:
            record["grads"].append(way.gradients() if scenario.needs_gradients else {})
            record["scale"].append(way.scaler.get_scale())
            record["losses"].append([float(loss) for loss in losses])
        if monitor is not None and scenario.tell != "micro":
            sizes = [float(scenario.size(way.data_index, i)) for i in range(scenario.micro)]
            mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes) if losses else None
            monitor.observe(mean)
        if scenario.clip is not None:
            way.scaler.unscale_(way.optimizer)
            way.clip()
        step_of = getattr(way, "step", way.optimizer.step)
        if scenario.scaler:
            way.scaler.step(way.optimizer)
            way.scaler.update()
        else:
            step_of()
        if record is not None:
            record["weights"].append(way.weights())
            record["moments"].append(way.moments())
        if scenario.fault != "carried":
            way.optimizer.zero_grad()
            way.model.zero_grad()


def local_bits(way: Way) -> list[np.ndarray]:
    return [getattr(p, "_local_tensor", p).detach().clone().numpy() for _, p in way.named()]


def run(name: str, rank: int, folder: Path, seen: Seen) -> dict[str, Any]:
    """A scenario, watched, or for ``NAME / not watched`` as it is without."""
    if name.startswith("trouble: "):
        return TROUBLES[dist.get_world_size()][name](rank, folder / "runs")
    name, _, bare = name.partition(" / ")
    scenario = SCENARIOS[name]
    way = WAYS[scenario.way](scenario, rank)
    if bare == "not watched":
        seen.take()
        train(way, None, None)
        return {"final": local_bits(way), "calls": seen.take()}
    record: dict[str, Any] = {key: [] for key in ("weights", "grads", "scale", "losses", "moments")}
    readings: list[Reading] = []
    path = folder / "runs" / name.replace(" ", "_").replace(":", "").replace(",", "")
    monitor = gv.watch(
        way.model,
        way.optimizer,
        run=path,
        config=config_of(scenario),
        batch_size=float(scenario.total(way.data_index)) if scenario.tell == "watch" else None,
        on_reading=readings.append,
    )
    seen.take()
    train(way, monitor, record)
    record["calls"] = seen.take()
    monitor.close()
    record |= {
        "calls_at_close": seen.take(),
        "readings": [plain(reading) for reading in readings],
        "latest": dict(monitor.latest),
        "findings": [(f.id, f.title, f.severity, json.dumps(f.to_json()["evidence"])) for f in monitor.findings],
        "final": local_bits(way),
    }
    if rank == 0:
        with gv.open_run(monitor.run_path) as stored:
            record["names"] = {kind: stored.names(kind) for kind in ("tensors", "layers", "heads")}
            record["shapes"] = {info.name: info.shape for info in stored.tensors}
            record["stored"] = {
                metric: tuple(part.tolist() for part in stored.series(metric))
                for metric in ("loss", "grad/norm", "weight/norm")
                if metric in stored.metrics("values")
            }
    dist.barrier()
    record["files"] = sorted(str(f.name) for f in (folder / "runs").glob(f"{path.name}*"))
    return record


def meet(file: Path, rank: int, world: int) -> dist.Store:
    """A store of rank 0, whose port the others find in a file."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        file.with_suffix(".part").write_text(str(store.port), "utf-8")
        file.with_suffix(".part").rename(file)
        return store
    while not file.exists():
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(file.read_text("utf-8")), world, is_master=False)


def prepare() -> None:
    """What the ranks need of this process before they are forks of it."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    threads = Path("/proc/self/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "a process with threads is not to be forked"
    gc.freeze()  # a fork that collected what is here would copy it first


def work(folder: Path, rank: int, world: int, attempt: int, todo: dict[int, str]) -> None:
    """All jobs by their number, as one of the ranks."""
    timeout = timedelta(seconds=20)
    store = meet(folder / f"meet{attempt}", rank, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    done = dist.PrefixStore("done", store)
    seen = Seen()
    for number, name in todo.items():
        faulthandler.dump_traceback_later(PATIENCE - 5)
        begun = time.monotonic()
        try:
            result = run(name, rank, folder, seen)
        except BaseException:
            result = {"error": traceback.format_exc()}
        took, used = time.monotonic() - begun, time.process_time()
        print(f"{number} {took:.2f} s, {used:.1f} s of work so far: {name}", flush=True)
        faulthandler.cancel_dump_traceback_later()
        part = folder / f"{number}.{rank}.part"
        part.write_bytes(pickle.dumps(result))
        part.rename(part.with_suffix(".pkl"))
        done.set(f"{number}/{rank}", "failed" if "error" in result else "fine")
        keys = [f"{number}/{other}" for other in range(world)]
        try:
            done.wait(keys, timedelta(seconds=PATIENCE))
            if any(done.get(key) == b"failed" for key in keys):
                os._exit(FAILED)
        except dist.DistStoreError:
            os._exit(FAILED)
        if not name.startswith("trouble: "):
            end_those_of_monitors()
    dist.barrier()
    os._exit(0)  # threads of groups that nobody needs any more would take their time
