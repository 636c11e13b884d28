"""Writes synthetic runs of any length, with the readings that a monitor takes of a transformer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradvitals.config import Config
from gradvitals.store.writer import RunWriter
from gradvitals.types import Action, Finding, Layout, Reading, TensorInfo

Floats = NDArray[np.float64]
PARTS = (
    "norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias",
    "norm2.weight", "norm2.bias", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias",
)  # fmt: skip
HEADS = 8
SECONDS_PER_STEP = 0.25
BATCH = 64


def transformer_layout(num_tensors: int) -> Layout:
    """An embedding, as many blocks as fit, and an output head."""
    names = ["embed.weight", *(f"blocks.{i // 12}.{PARTS[i % 12]}" for i in range(num_tensors - 2)), "head.weight"]
    layers = list(dict.fromkeys(_layer(name) for name in names))
    depth = {layer: at for at, layer in enumerate(layers)}
    tensors = tuple(
        TensorInfo(
            index=i, name=name, shape=(768, 768) if name.endswith("weight") else (768,), dtype="float32",
            layer=_layer(name), depth=depth[_layer(name)], heads=HEADS if "qkv.weight" in name else 0,
        )
        for i, name in enumerate(names)
    )  # fmt: skip
    heads = [f"{info.layer}.attn/head{head}" for info in tensors if info.heads for head in range(HEADS)]
    return Layout(tensors=tensors, layers=tuple(layers), heads=tuple(heads))


def write_synthetic_run(
    path: Path,
    *,
    steps: int,
    num_tensors: int,
    config: Config | None = None,
    seed: int = 0,
    started: float | None = None,
) -> Layout:
    """Write a finished run and return its layout.

    Args:
        path: Folder of the run.
        steps: Its length.
        num_tensors: Parameters of the model, 14 or more.
        config: How often single tensors are read; the defaults where None.
        seed: Another one makes another run.
        started: When it began, in seconds since the epoch; by default so that it ends now.
    """
    layout = transformer_layout(num_tensors)
    begin = time.time() - steps * SECONDS_PER_STEP if started is None else started
    with RunWriter(path, meta={"facts": {}, "config": {}, "name": "made up"}) as writer:
        writer.write(layout)
        for number, reading in enumerate(readings(layout, steps, config or Config(), seed, begin)):
            writer.write(reading)
            if number % 1000 == 999:
                writer.commit()
        for record in records(layout, steps):
            writer.write(record)
        writer.commit()
    return layout


def readings(layout: Layout, steps: int, config: Config, seed: int, begin: float, first: int = 0) -> Iterator[Reading]:
    """What a monitor reads, step by step: global values always, single tensors at the cadence of `config`."""
    rng = np.random.default_rng(seed)
    size = len(layout.tensors)
    usual = 0.05 * np.exp(rng.normal(0, 0.7, size))  # each tensor's own norm
    depth = np.array([info.depth for info in layout.tensors]) / max(1, len(layout.layers) - 1)
    for step in range(first, first + steps):
        done = step / max(1, steps)
        spike = 14.0 if step > 100 and step % max(100, steps // 3) == 0 else 1.0
        norm = float((0.7 + 1.5 * np.exp(-20 * done)) * rng.lognormal(0, 0.15) * spike)
        gsnr = float((0.08 + 2.5 * np.exp(-9 * done)) * rng.lognormal(0, 0.06))
        scale = float((30 + 900 * done) * rng.lognormal(0, 0.05))
        loss = float(2.1 + 8 * np.exp(-12 * done) + rng.normal(0, 0.03) + (spike - 1) * 0.2)
        when = begin + step * SECONDS_PER_STEP
        values = {"loss": loss, "lr": 3e-4, "grad/norm": norm, "grad/spike_ratio": spike, "grad/nonfinite": 0.0}
        samples = {"gsnr": gsnr, "gsnr_low": 0.8 * gsnr, "gsnr_high": 1.25 * gsnr}
        samples |= {"noise_scale": scale, "noise_scale_low": 0.7 * scale, "noise_scale_high": 1.5 * scale}
        if _reads_tensors(step, config):
            yield _of_tensors(step, when, values, norm * usual * rng.lognormal(0, 0.3, size) * (1.4 - depth), rng)
            own = gsnr * rng.lognormal(0, 0.5, size) * (0.4 + depth)
            yield _samples(step, when, samples, own, layout, rng)
        else:
            yield Reading(step=step, time=when, batch_size=BATCH, values=values)
            yield Reading(step=step, time=when, source="microbatch", batch_size=BATCH, values=samples)


def records(layout: Layout, steps: int) -> Iterator[Finding | Action]:
    """Findings and actions as such a run may have them."""
    third = max(100, steps // 3)
    names = layout.names("tensors")
    yield Finding(
        id="explosion", severity="critical", title="the gradient norm rose to 14× its usual size", tensors=names[2:40],
        first_step=third, last_step=third + 2, found_step=third,
        evidence={"seen": {"ratio": 14.0}, "expected": {"ratio": "under 5"}},
        causes=("a bad batch", "the learning rate is too high"), fixes=("clip gradients", "look at the batch"),
    )  # fmt: skip
    yield Finding(
        id="noisy_gradients", severity="warning", title="gradients are noisier than they are large",
        first_step=steps // 2, found_step=steps // 2 + 10,
        evidence={"seen": {"gsnr": 0.08}, "expected": {"gsnr": "above 0.1"}},
        causes=("the batch is small for this stage",), fixes=("a larger batch",),
    )  # fmt: skip
    for at in (third, third + 1, 2 * third):
        yield Action(
            kind="skip", step=at, finding="explosion", taken=True, reason="the norm was 14 times its usual size"
        )


def _of_tensors(step: int, when: float, values: dict[str, float], norms: Floats, rng: np.random.Generator) -> Reading:
    size = norms.size
    weights = 20 + 5 * np.sin(np.arange(size))
    updates = 0.02 * rng.lognormal(0, 0.2, size)
    tensors = {
        "grad/norm": norms, "grad/spike_ratio": rng.lognormal(0, 0.2, size) * values["grad/spike_ratio"],
        "grad/nonfinite": np.zeros(size), "weight/norm": weights, "update/norm": updates,
        "update/ratio": updates / weights,
    }  # fmt: skip
    return Reading(step=step, time=when, batch_size=BATCH, values=values, tensors=tensors)


def _samples(
    step: int, when: float, values: dict[str, float], own: Floats, layout: Layout, rng: np.random.Generator
) -> Reading:
    layers = values["gsnr"] * rng.lognormal(0, 0.3, len(layout.layers))
    heads = values["gsnr"] * rng.lognormal(0, 0.5, len(layout.heads))
    return Reading(
        step=step, time=when, source="microbatch", batch_size=BATCH, values=values,
        tensors={"gsnr": own, "gsnr_low": 0.8 * own, "gsnr_high": 1.2 * own},
        layers={"gsnr": layers, "gsnr_low": 0.8 * layers, "gsnr_high": 1.2 * layers},
        heads={"gsnr": heads} if layout.heads else {},
    )  # fmt: skip


def _reads_tensors(step: int, config: Config) -> bool:
    young = step < config.tensor_every and (step & (step - 1)) == 0  # 0, 1, 2, 4, 8 and so on
    return young or step % config.tensor_every == 0


def _layer(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("blocks") else name.split(".")[0]
