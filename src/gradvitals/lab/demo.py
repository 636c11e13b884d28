"""The demo: a small transformer learns Shakespeare on the CPU, and one bad batch is planted on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gradvitals.config import Config
from gradvitals.lab.char_lm import Characters, CharLM, CharLMConfig, shakespeare
from gradvitals.types import Reading
from gradvitals.monitor import watch

MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 8
WARMUP_STEPS = 20
LEARNING_RATE = 3e-3
MAX_NORM = 1.0
FAULT_SCALE = 8.0
"""How much the loss of the bad batch is scaled up, as a wrong reduction over the batch would do."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What to run."""

    out: Path
    steps: int = 300
    seed: int = 0
    fault: bool = True

    @property
    def fault_step(self) -> int | None:
        """The optimizer step, counted from 0, whose batch is corrupted; None for no fault."""
        return self.steps * 3 // 5 if self.fault else None


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What ran."""

    path: Path
    steps: int
    seconds: float
    fault_step: int | None
    """None also when the run was stopped before the fault."""
    num_parameters: int
    interrupted: bool

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {**asdict(self), "path": str(self.path)}


OnStep = Callable[[int, float, Mapping[str, float]], None]
"""Called for each step as its reading is finished: the number of steps done, the loss, and the latest values."""


def run_demo(settings: DemoSettings, on_step: OnStep) -> DemoResult:
    """Train, with a monitor watching, and return where the run was kept. Ctrl-C ends it early and cleanly."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains little from more, and loses a lot on a busy machine
    try:
        return _train(settings, on_step)
    finally:
        torch.set_num_threads(threads)


def _train(settings: DemoSettings, on_step: OnStep) -> DemoResult:
    torch.manual_seed(settings.seed)
    text = Characters(shakespeare(), seed=settings.seed)
    model = CharLM(CharLMConfig(vocab_size=text.vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))

    config = Config(tensor_every=1, quiet=True, extra={"command": "gradvitals demo", "seed": settings.seed})
    latest: dict[str, float] = {}

    def on_reading(reading: Reading) -> None:
        if reading.source in (None, "microbatch"):
            latest.update(reading.values)
        if reading.source is None:
            on_step(reading.step + 1, reading.values["loss"], latest)

    monitor = watch(
        model,
        optimizer,
        run=settings.out,
        config=config,
        batch_size=MICRO_BATCHES * MICRO_BATCH_SIZE,
        on_reading=on_reading,
    )
    start = time.perf_counter()
    done = 0
    interrupted = False
    with monitor:
        try:
            for step in range(settings.steps):
                for _ in range(MICRO_BATCHES):
                    tokens, targets = text.batch(MICRO_BATCH_SIZE, model.config.context)
                    if step == settings.fault_step:
                        loss = FAULT_SCALE * model(tokens, text.noise_like(targets))
                    else:
                        loss = model(tokens, targets)
                    (loss / MICRO_BATCHES).backward()
                    monitor.observe(loss, batch_size=MICRO_BATCH_SIZE)
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                warmup.step()
                done = step + 1
        except KeyboardInterrupt:
            interrupted = True
    fault_step = settings.fault_step
    return DemoResult(
        path=monitor.run_path,
        steps=done,
        seconds=time.perf_counter() - start,
        fault_step=fault_step if fault_step is not None and fault_step < done else None,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        interrupted=interrupted,
    )
