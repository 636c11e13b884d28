"""Whole training steps: bare, with torch's fused AdamW and clipping, beside watched ones with `gv.optim.AdamW`."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals import optim
from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.lab.shapes import LEARNING_RATE, MAX_NORM, SHAPES, MicroBatch, Training
from gradvitals.monitor import watch

STEPS = {"gpt-124m": 16, "gpt-1.3b": 6}
ROUNDS = {"gpt-124m": 3, "gpt-1.3b": 2}
WARM_UP = 4

CONFIGS = {
    "watched, everything every step": Config(tensor_every=1, quiet=True),
    "the same, not judged": Config(tensor_every=1, diagnose=False, quiet=True),
    "watched, default settings, between full readings": Config(quiet=True),
}


class _Loop:
    """One way to train: its optimizer, and whether it clips by torch's function."""

    def __init__(self, training: Training, optimizer: torch.optim.Optimizer, *, clips: bool) -> None:
        self.training, self.optimizer, self.clips = training, optimizer, clips
        self._turns: Iterator[list[MicroBatch]] = cycle(map(list, training.batches))

    def step(self, observe: Callable[[Tensor], object] | None = None) -> None:
        training = self.training
        self.optimizer.zero_grad()
        total = torch.zeros((), device=training.device)
        for inputs, targets in next(self._turns):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = training.loss(inputs, targets) / training.num_micro_batches
            loss.backward()
            total += loss.detach()
        if observe is not None:
            observe(total)
        if self.clips:
            nn.utils.clip_grad_norm_(training.model.parameters(), MAX_NORM)
        self.optimizer.step()

    def time(self, steps: int, observe: Callable[[Tensor], object] | None = None) -> tuple[float, float]:
        """Milliseconds a step, from idle to idle; and those of the host, until it had launched everything."""
        for _ in range(WARM_UP):
            self.step(observe)
        gc.collect()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            self.step(observe)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - started) / steps, 1000 * (launched - started) / steps


def time_training(name: str, device: torch.device, tell: Callable[[str], object]) -> dict[str, Any]:
    """Time every variant between two bare stretches of the same model, and keep its ratio to their mean."""
    torch.manual_seed(0)
    training = SHAPES[name](device)
    parameters = list(training.model.parameters())
    bare = _Loop(training, training.optimizer, clips=True)
    ours = _Loop(training, optim.AdamW(parameters, lr=LEARNING_RATE, max_norm=MAX_NORM), clips=False)
    unclipped = _Loop(training, training.optimizer, clips=False)
    alone = {"bare": bare, "AdamW alone": ours, "bare, not clipped": unclipped}
    times: dict[str, list[float]] = {variant: [] for variant in (*alone, "VRAdamW, not clipped", *CONFIGS)}
    hosts: dict[str, list[float]] = {variant: [] for variant in times}
    ratios: dict[str, list[float]] = {variant: [] for variant in times}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        before, _ = bare.time(STEPS[name])
        for number in range(ROUNDS[name]):
            for variant in times:
                if variant in alone:
                    spent, host = alone[variant].time(STEPS[name])
                elif variant not in CONFIGS:
                    spent, host = _time_reduced(training, STEPS[name])
                else:
                    run = Path(folder) / f"{number}-{list(times).index(variant)}"
                    spent, host = _time_watched(ours, CONFIGS[variant], training, STEPS[name], run)
                after, _ = bare.time(STEPS[name])
                times[variant].append(spent)
                hosts[variant].append(host)
                ratios[variant].append(spent / statistics.fmean((before, after)))
                before = after
            so_far = statistics.median(ratios["watched, everything every step"])
            tell(f"{name}: round {number + 1} of {ROUNDS[name]}, everything every step at {so_far:.4f} of bare")
    return {
        "micro_batches": training.num_micro_batches,
        "variants": {variant: _summary(times[variant], hosts[variant], ratios[variant]) for variant in times},
    }


def _time_reduced(training: Training, steps: int) -> tuple[float, float]:
    """A VRAdamW of its own, which collects from any backward while it is there."""
    parameters = list(training.model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few parts, which are meant
        vr = optim.VRAdamW(parameters, lr=LEARNING_RATE, k=training.num_micro_batches)
        return _Loop(training, vr, clips=False).time(steps)


def _time_watched(loop: _Loop, config: Config, training: Training, steps: int, run: Path) -> tuple[float, float]:
    with watch(training.model, loop.optimizer, run=run, config=config, batch_size=training.batch_size) as monitor:
        # A young run is read more often; this one is just after a full reading.
        monitor._tap.start(20 * config.tensor_every * config.detail_factor + 1)
        loop.step(monitor.observe)
        monitor.flush()
        spent = loop.time(steps, monitor.observe)
    broken = [finding for finding in monitor.findings if finding.id in ("monitor_error", "store_error")]
    if broken:  # one that has given up on something is cheap: its time would mean nothing
        raise GradvitalsError(f"the monitor failed while it was timed: {broken[0]}")
    return spent


def _summary(times: list[float], hosts: list[float], ratios: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "ms": statistics.median(times),
        "host_ms": statistics.median(hosts),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "ratios": ratios,
    }
