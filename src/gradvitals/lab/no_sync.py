"""Proof that a monitored step never waits for the device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gradvitals.errors import GradvitalsError
from gradvitals.lab.shapes import transformer
from gradvitals.lab.variants import MONITORED, WARM_UP_STEPS
from gradvitals.monitor import watch


def check_no_sync(device: str = "cuda", steps: int = 100) -> int:
    """Train with a monitor while torch turns every wait for the device into an error.

    A small transformer makes `steps` steps with everything read at every step, and as many with the defaults.

    Args:
        device: A CUDA device.
        steps: Steps with each of the two settings.

    Returns:
        The number of steps done, `2 * steps`.

    Raises:
        ValueError: There is no CUDA device.
        GradvitalsError: The monitor waited for the device. Where training itself did, torch says so.
    """
    place = torch.device(device)
    if place.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}; waiting for the device can only be noticed on a CUDA device")
    training = transformer(place, micro_batch_size=4)
    for _ in range(WARM_UP_STEPS):
        training.step()
    done = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in ("everything every step", "default"):
            run = Path(folder) / name.replace(" ", "-")
            with watch(training.model, training.optimizer, run=run, config=MONITORED[name]) as monitor:
                with _sync_is_error():
                    for _ in range(steps):
                        training.step(monitor.observe)
                        done += 1
                monitor.flush()
            for finding in monitor.findings:
                if finding.id == "monitor_error":  # the monitor catches its own errors, this one among them
                    raise GradvitalsError(f"{name}: {finding.title}\n{finding.evidence.get('traceback', '')}")
    return done


@contextmanager
def _sync_is_error() -> Iterator[None]:
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
