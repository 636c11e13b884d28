"""How far the noise scale that norm layers show is that of the whole model, along a real training run.

A small transformer learns text, four micro-batches a step. At every reading three noise scales stand side by side: that
of the whole model from the exact gradient of every example, and what a Monitor makes of the same steps from the weights
of norm layers and from micro-batches. All three average signal and noise over the same readings.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradvitals as gv
from gradvitals import functional
from gradvitals.lab.char_lm import Characters, CharLM, CharLMConfig, shakespeare
from gradvitals.lab.markdown import markdown_table
from gradvitals.measure.cadence import is_due
from gradvitals.measure.history import RatioHistory
from gradvitals.types import Reading

MICRO_BATCHES, MICRO_SIZE = 4, 8
BATCH = MICRO_BATCHES * MICRO_SIZE
WARMUP_STEPS = 50
WINDOW = 20
BAR = 0.2
"""How far the noise scale may be from the exact one, on average over a run."""

Signals = dict[str, tuple[float, float]]


def compare(
    *, steps: int, every: int, seeds: int, progress: Callable[[int, int, str], object] = lambda *done: None
) -> dict[str, Any]:
    """Train, once for each seed, and say how far the noise scales agree."""
    runs = []
    for seed in range(seeds):
        runs.append(_train(steps, every, seed))
        progress(seed + 1, seeds, f"seed {seed}")
    return {
        "steps": steps,
        "every": every,
        "batch_size": BATCH,
        "micro_batches": MICRO_BATCHES,
        "window": WINDOW,
        "runs": runs,
        "summary": _summary(runs, steps),
        "cost": cost(),
    }


def _train(steps: int, every: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    data = Characters(shakespeare(), seed=seed)
    model = CharLM(CharLMConfig(vocab_size=data.vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    live: dict[int, dict[str, float]] = {}

    def note(reading: Reading) -> None:
        if reading.source in ("examples", "microbatch"):
            assert reading.batch_size is not None
            gsnr = reading.values["gsnr"] / reading.batch_size
            live.setdefault(reading.step, {})[reading.source] = 1 / gsnr if gsnr > 0 else math.nan

    exact = RatioHistory(WINDOW)
    rows: dict[int, dict[str, float]] = {}
    config = gv.Config(
        tensor_every=every,
        sources=("examples", "microbatch"),
        gsnr_window=WINDOW,
        diagnose=False,
        quiet=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        monitor = gv.watch(model, optimizer, run=Path(folder) / "run", config=config, batch_size=BATCH, on_reading=note)
        for step in range(steps):
            batches = [data.batch(MICRO_SIZE, model.config.context) for _ in range(MICRO_BATCHES)]
            if is_due(step, every):
                signals = exact_signals(model, *(torch.cat(part) for part in zip(*batches, strict=True)))
                rows[step] = _pooled(exact, signals, step)
            total = 0.0
            for tokens, targets in batches:
                loss = model(tokens, targets) / MICRO_BATCHES
                loss.backward()
                total += float(loss.detach())
            if step in rows:
                rows[step]["loss"] = total
            optimizer.step()
            optimizer.zero_grad()
            warmup.step()
        monitor.close()
    return {"seed": seed, "readings": [{"step": step, **row, **live.get(step, {})} for step, row in rows.items()]}


def exact_signals(model: CharLM, tokens: Tensor, targets: Tensor) -> Signals:
    """Signal and noise of one example in the whole model and in its norm weights, from every example's own gradient."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss_of_one(parameters: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = torch.func.functional_call(model, parameters, (tokens[None], targets[None]))
        return loss

    with sdpa_kernel(SDPBackend.MATH):  # the one that vmap has rules for
        grads = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))(named, tokens, targets)
    count = len(tokens)
    found: Signals = {}
    squares = np.array([float(grad.double().square().sum()) / count for grad in grads.values()])
    of_mean = np.array([float(grad.double().mean(0).square().sum()) for grad in grads.values()])
    signal, noise = functional.signal_and_noise_of_sums(squares, of_mean, 1.0, 1.0, 1 / count)
    norms = [place for place, name in enumerate(grads) if is_norm_weight(name)]
    found["model"] = float(signal.sum()), float(noise.sum())
    found["norms"] = functional.layer_shares(signal[norms], noise[norms])
    return found


def is_norm_weight(name: str) -> bool:
    """Whether a parameter of the model multiplies what a norm layer has normalised."""
    return "norm" in name and name.endswith(".weight")


def _pooled(history: RatioHistory, signals: Signals, step: int) -> dict[str, float]:
    """Noise scales from signal and noise averaged as a Monitor does."""
    signal, noise = (np.array([pair[i] for pair in signals.values()]) for i in (0, 1))
    history.push(list(signals), signal, noise, step)
    ratios = history.estimate(np.isfinite(signal), step)[0]
    return {name: 1 / ratio if ratio > 0 else math.nan for name, ratio in zip(signals, ratios.tolist(), strict=True)}


def _summary(runs: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Of all runs together: how far each noise scale is from that of the whole model, and whether they go together."""
    summary: dict[str, Any] = {}
    readings = [row for run in runs for row in run["readings"]]
    pairs = np.array([(row.get("examples", math.nan), row["norms"]) for row in readings])
    known = np.isfinite(pairs).all(1)
    summary["against_exact_norm_weights"] = float(np.abs(pairs[known, 0] / pairs[known, 1] - 1).max())
    for source in ("examples", "microbatch"):
        for part, first, last in (("first_quarter", 0, steps // 4), ("rest", steps // 4, steps), ("all", 0, steps)):
            rows = [row for row in readings if first <= row["step"] < last]
            summary.setdefault(source, {})[part] = _agreement(
                np.array([row.get(source, math.nan) for row in rows]), np.array([row["model"] for row in rows])
            )
    summary["bar"] = BAR
    summary["within_bar"] = abs(summary["examples"]["all"]["mean_ratio"] - 1) <= BAR
    return summary


def _agreement(found: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> dict[str, float | int]:
    known = np.isfinite(found) & np.isfinite(exact)
    if known.sum() < 3:
        nothing = dict.fromkeys(("mean_ratio", "typical_ratio", "spread", "correlation"), math.nan)
        return {"readings": int(known.sum()), **nothing}
    ratio, logs = found[known] / exact[known], np.log([found[known], exact[known]])
    return {
        "readings": int(known.sum()),
        "mean_ratio": float(ratio.mean()),
        "typical_ratio": float(np.exp(np.log(ratio).mean())),
        "spread": float(np.exp(np.log(ratio).std())),
        "correlation": float(np.corrcoef(logs)[0, 1]),
    }


# -- what it costs ---------------------------------------------------------------------------------------------------


def cost(rounds: int = 30) -> dict[str, float]:
    """What the source adds to a step at which it reads, as a share of the step without any monitoring.

    Three copies of one training take turns: alone, watched without the source, watched with it, reading at every step.
    What counts is the time of the training thread's own work.
    """
    seconds: dict[str, list[float]] = {"alone": [], "without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        steps = {name: _timed_step(name, Path(folder), stack) for name in seconds}
        for _ in range(rounds):
            for name, step in steps.items():
                seconds[name].append(step())
    alone, without, full = (statistics.median(times[3:]) for times in seconds.values())
    share = (full - without) / alone
    return {"step_ms": 1e3 * alone, "of_a_step_that_is_read": share, "of_all_steps_at_the_default": share / 50}


def _timed_step(name: str, folder: Path, stack: ExitStack) -> Callable[[], float]:
    torch.manual_seed(0)
    data = Characters(shakespeare())
    model = CharLM(CharLMConfig(vocab_size=data.vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name != "alone":
        config = gv.Config(tensor_every=1, detail_every=10**6, diagnose=False, quiet=True)
        config = replace(config, sources=(*config.sources, "examples")) if name == "with" else config
        stack.enter_context(gv.watch(model, optimizer, run=folder / name, config=config, batch_size=BATCH))

    def step() -> float:
        tokens, targets = data.batch(BATCH, model.config.context)
        started = time.thread_time()
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.thread_time() - started

    return step


# -- in words --------------------------------------------------------------------------------------------------------


def format_comparison(result: dict[str, Any]) -> str:
    """Tables of what `compare` found."""
    return "\n\n".join([*_tables(result), *_words(result)])


def _tables(result: dict[str, Any]) -> Iterator[str]:
    head = ["seed", "step", "loss", "whole model, exact", "norm weights, exact", "examples", "micro-batches", "ratio"]
    rows = [head]
    for run in result["runs"]:
        for row in run["readings"][WINDOW - 1 :: WINDOW]:
            found, exact = row.get("examples", math.nan), row["model"]
            numbers = [exact, row["norms"], found, row.get("microbatch", math.nan)]
            texts = [f"{number:.3g}" for number in numbers]
            rows.append([str(run["seed"]), str(row["step"]), f"{row['loss']:.2f}", *texts, f"{found / exact:.2f}"])
    yield markdown_table(rows)
    agreement = [["source", "readings", "n", "mean ratio", "typical ratio", "spread", "correlation"]]
    for source in ("examples", "microbatch"):
        for part, found in result["summary"][source].items():
            numbers = [found[name] for name in ("mean_ratio", "typical_ratio", "spread", "correlation")]
            agreement.append([source, part.replace("_", " "), str(found["readings"]), *(f"{n:.2f}" for n in numbers)])
    yield markdown_table(agreement, left=(0, 1))


def _words(result: dict[str, Any]) -> Iterator[str]:
    summary = result["summary"]
    yield (
        "Ratios are over the exact noise scale of the whole model; typical is their geometric mean, spread the factor "
        "of one standard deviation, and correlation that of the logarithms."
    )
    yield (
        f"Against the exact gradients of the same norm weights the live value is off by "
        f"{summary['against_exact_norm_weights']:.1g} at most."
    )
    cost = result["cost"]
    yield (
        f"It adds {100 * cost['of_a_step_that_is_read']:.1f} % to a step that is read ({cost['step_ms']:.1f} ms of the "
        f"training thread without monitoring), which is "
        f"{100 * cost['of_all_steps_at_the_default']:.2f} % with a reading every 50 steps."
    )
    mean = summary["examples"]["all"]["mean_ratio"]
    kept = "within" if summary["within_bar"] else "not within"
    yield f"On average over the run it is {mean:.2f} of the exact one: {kept} {100 * BAR:.0f} %."
