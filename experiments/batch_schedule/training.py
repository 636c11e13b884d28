"""A GPT learns books, byte by byte, for a fixed number of tokens: with a fixed batch, or with one that grows."""

from __future__ import annotations

import math
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from experiments.vrgd.text import TRAIN_FILE, VALID_FILE, Text, evaluate, read_text, window_loss
from gradvitals.config import Config
from gradvitals.demo import CharLM, CharLMConfig, shakespeare
from gradvitals.monitor import watch
from gradvitals.schedules import BatchSizeScheduler

MODELS = {
    "gpt-22m": CharLMConfig(vocab_size=256, context=256, d_model=512, n_layer=7, n_head=8),
    "gpt-tiny": CharLMConfig(vocab_size=256, context=32, d_model=32, n_layer=1, n_head=2),
}
WARMUP, FLOOR = 0.05, 0.1
"""Share of the tokens over which the learning rate rises, and what a cosine ends at, by tokens in every arm."""
MICRO_BATCH = 16
"""Most sequences in one pass: few sizes, because each is compiled."""
GROWTH = 8
"""How far a batch may grow."""
EVAL_WINDOWS = 2048
CHECK_EVERY = 50


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training."""

    model: str
    arm: str
    """``fixed``; or ``follow`` and how many times the batch the noise scale has to be before the batch doubles."""
    batch: int
    """Sequences in a step; at the start, if it grows."""
    lr: float
    seed: int
    sequences: int
    """Of the whole training."""
    data: Path | None = None
    device: str = "cpu"
    compiled: bool = False


def lr_factor(share: float) -> float:
    """Returns the learning rate over its height, by the share of the tokens that were seen.

    >>> lr_factor(0.0), round(lr_factor(0.05), 3), round(lr_factor(1.0), 3)
    (0.0, 1.0, 0.1)
    """
    if share < WARMUP:
        return share / WARMUP
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP)))


@cache
def texts(data: Path | None, device: torch.device) -> tuple[Text, Text]:
    """Returns the books to learn from and those held out; without a folder, Shakespeare's plays."""
    if data is not None:
        return read_text(data / TRAIN_FILE, device), read_text(data / VALID_FILE, device)
    content = shakespeare().encode()
    border = len(content) * 9 // 10
    return Text(content[:border], device), Text(content[border:], device)


def train(trial: Trial) -> dict[str, Any]:
    """Returns the held-out loss in nats per byte, the optimizer steps, and where the batch grew."""
    device = torch.device(trial.device)
    text, unseen = texts(trial.data, device)
    torch.manual_seed(trial.seed)
    model = CharLM(MODELS[trial.model]).to(device)
    if trial.compiled:
        torch._dynamo.config.recompile_limit = 64  # code is kept for each size of micro-batch a process meets
        for block in model.blocks:
            block.compile(dynamic=False)  # blocks alike share their code
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=trial.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    generator = torch.Generator(device).manual_seed(trial.seed)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="batch", ignore_cleanup_errors=True) as folder:
        follows = trial.arm.startswith("follow")
        config = Config(tensor_every=5, detail_every=1000, overhead_budget=1, quiet=True, sources=("microbatch",))
        monitor = watch(model, optimizer, run=Path(folder) / "run", config=config) if follows else None
        schedule = None
        parts = max(2 if follows else 1, trial.batch // MICRO_BATCH)  # the noise scale needs two
        if monitor is not None:
            schedule = BatchSizeScheduler(
                monitor,
                batch_size=trial.batch,
                accumulation_steps=parts,
                max_batch_size=GROWTH * trial.batch,
                apply=True,
                optimizer=optimizer,
                scale_lr=True,
                factor=float(trial.arm.removeprefix("follow") or 2),
                cooldown=max(20, trial.sequences // trial.batch // 20),
            )
        micro = trial.batch // parts
        seen = steps = 0
        broken = False
        with monitor or nullcontext():
            while seen < trial.sequences and not broken:
                count = schedule.accumulation_steps if schedule is not None else parts
                count = min(count, -(-(trial.sequences - seen) // micro))
                for group in optimizer.param_groups:
                    group["lr"] = trial.lr * lr_factor((seen + count * micro / 2) / trial.sequences)
                for _ in range(count):
                    loss = window_loss(model, text.windows(micro, model.config.context, generator))
                    (loss / count).backward()
                    if monitor is not None:
                        monitor.observe(loss, batch_size=micro)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if schedule is not None:
                    schedule.step()
                seen, steps = seen + count * micro, steps + 1
                broken = steps % CHECK_EVERY == 0 and not bool(loss.isfinite())
    actions = [] if schedule is None else schedule.actions
    with torch.compiler.set_stance("force_eager"):  # not worth compiling for another size
        value = float(evaluate(model, unseen, EVAL_WINDOWS))
    return {
        "loss": value if math.isfinite(value) else math.nan,
        "steps": steps,
        "seconds": time.perf_counter() - start,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "growth": [{"step": action.step, **action.after} for action in actions if action.taken],
    }
