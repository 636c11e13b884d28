"""Shared by all tests. torch is imported only where a test needs it."""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradvitals.types import Finding, Layout, Reading, TensorInfo

# One thread, set before torch is loaded: workers would wait for each other, and processes that are compared bit for bit
# must have equally many.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A thread instead of a process for every run: tests of the process say so.
os.environ.setdefault("GRADVITALS_WORKER", "thread")

# What compiles, compiles in its own process: others to compile in would first have to import torch, each of them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As shells start what runs in the background. Processes of tests would inherit it, and not hear Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if shutil.which("nvidia-smi") is None:
    # Without a GPU, Triton interprets kernels. It asks when they are defined, and any test file may import them.
    os.environ.setdefault("TRITON_INTERPRET", "1")

sys.path.insert(0, str(Path(__file__).parent / "warm"))  # for `warm_process`, which many tests use
collect_ignore = ["warm"]

TENSOR_NAMES = ("embed.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.weight", "head.weight")
LAYER_NAMES = ("embed", "blocks.0", "head")
SPIKE_STEP = 30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wants_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not wants_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wants_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    schedule = sys.modules.get("gradvitals.collect.schedule")
    if schedule is not None:  # readings must not depend on how busy this machine is: only an explicit budget thins them
        schedule.FREE_SECONDS = math.inf  # type: ignore[attr-defined]
    gc.freeze()  # what has been imported by now stays: a collection, of which tests ask many, need not look at it


def pytest_unconfigure() -> None:
    gc.unfreeze()  # to be taken apart in order, which some of it asks for


@pytest.fixture(scope="module")
def spawned_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Runs ``work(rank, folder)`` in processes of their own, once for all workers of xdist; returns what each saved.

    All scenarios run in one group of processes, which takes long to start.
    """

    def run(name: str, work: Callable[[int, str], None], world: int) -> list[dict[str, Any]]:
        import torch
        import warm_process
        from torch import multiprocessing

        shared = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            shared = shared.parent  # which the workers share: the first to come runs for all
        folder, ended = shared / name, shared / name / "ended"
        try:
            folder.mkdir()
        except FileExistsError:
            while not ended.exists():
                time.sleep(0.1)
        else:
            try:
                warm_process.context()
                multiprocessing.start_processes(work, (str(folder),), world, start_method="forkserver")
            finally:
                ended.touch()
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]

    return run


def make_layout() -> Layout:
    depths = [next(i for i, layer in enumerate(LAYER_NAMES) if name.startswith(layer)) for name in TENSOR_NAMES]
    tensors = tuple(
        TensorInfo(index=i, name=name, shape=(4, 5), dtype="float32", layer=LAYER_NAMES[depth], depth=depth)
        for i, (name, depth) in enumerate(zip(TENSOR_NAMES, depths, strict=True))
    )
    return Layout(tensors=tensors, layers=LAYER_NAMES, heads=("blocks.0.attn/head0", "blocks.0.attn/head1"))


def make_readings(step: int) -> list[Reading]:
    """Two readings a step, as a monitor gives them: one of norms, one of GSNR from micro-batches."""
    spike = 20.0 if step == SPIKE_STEP else 1.0
    row = np.arange(1, len(TENSOR_NAMES) + 1)
    layer = np.arange(1, len(LAYER_NAMES) + 1)
    values = {"loss": 4.0 / (1 + 0.1 * step), "lr": 1e-3, "grad/norm": 2.0 * spike, "grad/spike_ratio": spike}
    norms = Reading(
        step=step,
        time=1000.0 + 0.5 * step,
        batch_size=32,
        values=values,
        tensors={
            "grad/norm": 1.0 * row * spike,
            "grad/spike_ratio": 1.0 + (spike - 1) * row / len(row),
            "grad/nonfinite": np.where((row == 2) & (step == 25), 3.0, 0.0),
            "weight/norm": 10.0 * row,
            "update/norm": 0.01 * row**2,
            "update/ratio": 0.001 * row,
        },
    )
    gsnr = Reading(
        step=step,
        time=1000.0 + 0.5 * step,
        source="microbatch",
        batch_size=32,
        values={"gsnr": 0.5, "gsnr_low": 0.4, "gsnr_high": 0.6, "noise_scale": 64.0}
        | {"noise_scale_low": 50.0, "noise_scale_high": 90.0},
        tensors={"gsnr": 1.0 / row, "gsnr_low": 0.9 / row, "gsnr_high": 1.1 / row},
        layers={"gsnr": 2.0 / layer, "gsnr_low": 1.5 / layer, "gsnr_high": 2.5 / layer},
        heads={"gsnr": np.array([0.25, 0.75])},
    )
    return [norms, gsnr]


FINDINGS = (
    Finding(id="note", severity="info", title="something to know", first_step=1),
    Finding(
        id="spike", severity="critical", title="the norm jumped", tensors=TENSOR_NAMES, first_step=30, last_step=31
    ),
)


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a made-up run of 40 steps and returns its folder."""
    from gradvitals.store.writer import RunWriter

    def write(
        *,
        steps: int = 40,
        layout: Layout | None = None,
        readings: Callable[[int], list[Reading]] = make_readings,
        findings: tuple[Finding, ...] = FINDINGS,
    ) -> Path:
        path = tmp_path / "run"
        with RunWriter(path, meta={"name": "made up"}) as writer:
            writer.write(layout or make_layout())
            for step in range(steps):
                for reading in readings(step):
                    writer.write(reading)
            for finding in findings:
                writer.write(finding)
            writer.commit()
        return path

    return write
