"""A dense float64 truth to hold readings against, computed by hand from copies of the model.

Nothing of `gradvitals.measure` is used here. Before a step the model is copied in float64 and the contribution h_i of
every micro-batch to the accumulated gradient is found with autograd; everything else follows from these vectors by the
definitions in science.md.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradvitals as gv
from gradvitals.functional.distributions import student_t_quantile

Batch = tuple[Tensor, Tensor]
Arrays = dict[str, np.ndarray]
Loss = Callable[[nn.Module, Batch], Tensor]


# -- models and data ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention with one fused projection, as nanoGPT writes it."""

    def __init__(self, width: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, n_head: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width, n_head)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, *, tokens: int = 11, width: int = 8, n_head: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, n_head) for _ in range(depth))
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 6, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(x.mean((2, 3)))


def mlp(*, dropout: float = 0.0) -> nn.Sequential:
    middle = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), *middle, nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))


def regression(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x.to(_dtype(model))).to(y.dtype) - y).square().mean()


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return nn.functional.cross_entropy(logits.flatten(0, 1).to(kind), y.flatten())


def _dtype(model: nn.Module) -> torch.dtype:
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


class Data:
    """Batches of made-up data, the same for the same seed."""

    def __init__(self, seed: int = 0, *, kind: str = "vectors") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.kind = kind

    def batch(self, size: int) -> Batch:
        if self.kind == "tokens":
            ids = torch.randint(0, 11, (size, 6), generator=self.generator)
            return ids[:, :-1], ids[:, 1:]
        shape = (size, 3, 5, 5) if self.kind == "images" else (size, 6)
        x = torch.randn(shape, generator=self.generator)
        y = torch.stack([x.flatten(1).sum(1), x.flatten(1)[:, 0] * 2, x.flatten(1)[:, 1] - 1], dim=1)
        return x, y + 0.3 * torch.randn(size, 3, generator=self.generator)

    def batches(self, sizes: Sequence[int]) -> list[Batch]:
        return [self.batch(size) for size in sizes]


# -- the truth ------------------------------------------------------------------------------------------------------


def layer_name(tensor: str) -> str:
    found = re.match(r"(.*?(?:^|\.)\d+)\.", tensor)
    return found.group(1) if found else tensor.rpartition(".")[0] or tensor


def signal_and_noise(parts: np.ndarray, sizes: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Squared signal and noise trace of one sample from contributions h_i = w_i g_i, by the scatter of the g_i."""
    b, w = np.asarray(sizes, float), np.asarray(weights, float)
    means = parts / w[:, None]
    mean = (w[:, None] * means).sum(0) / w.sum()
    scatter = (w * np.square(means - mean).sum(1)).sum() / w.sum()
    # E scatter = tr(Sigma) (P - V), E |mean|^2 = |mu|^2 + V tr(Sigma), with weights that sum to one.
    w = w / w.sum()
    p, v = (w / b).sum(), (w**2 / b).sum()
    noise = scatter / (p - v)
    return float(mean @ mean - v * noise), float(noise)


class StepTruth:
    """Everything one step should show."""

    def __init__(self) -> None:
        self.parts: list[dict[str, np.ndarray | None]] = []
        self.sizes: list[float] = []
        self.weights: list[float] = []
        self.before: Arrays = {}
        self.after: Arrays = {}
        self.losses: list[float] = []
        self.lr: float | None = None
        self.adam: dict[str, tuple[float, float]] = {}
        """Signal and noise of each tensor from the optimizer's raw state."""

    def names(self) -> list[str]:
        return [name for name in self.before if any(part.get(name) is not None for part in self.parts)]

    def part_vectors(self, name: str, mask: np.ndarray | None = None) -> np.ndarray:
        shape = self.before[name].shape
        dense = [np.zeros(shape) if part.get(name) is None else part[name] for part in self.parts]
        return np.stack([h[mask] if mask is not None else h.ravel() for h in dense])

    def total(self, name: str) -> np.ndarray:
        return self.part_vectors(name).sum(0)

    def whole(self, names: Sequence[str]) -> np.ndarray:
        return np.concatenate([self.total(name) for name in names]) if names else np.zeros(0)

    def signal_and_noise(self, members: Mapping[str, np.ndarray | None]) -> tuple[float, float]:
        vectors = np.concatenate([self.part_vectors(name, mask) for name, mask in members.items()], axis=1)
        return signal_and_noise(vectors, self.sizes, self.weights)

    def radial(self, name: str) -> tuple[float, float]:
        weight = self.before[name].ravel()
        along = self.part_vectors(name) @ weight / np.linalg.norm(weight)
        return signal_and_noise(along[:, None], self.sizes, self.weights)


class Truth:
    """The truth of a run, step by step; `check` compares it with what was recorded.

    Args:
        model: The model being trained.
        optimizers: Those that step it.
        loss: Loss of a batch, a mean over its samples.
        window: Readings a live GSNR is averaged over.
        heads: For every head the elements of each tensor that are its own, as boolean masks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loss: Loss,
        *,
        window: int = 20,
        heads: Mapping[str, Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        self.model, self.optimizers, self.loss, self.window = model, list(optimizers), loss, window
        self.heads = heads or {}
        self.steps: list[StepTruth] = []

    def _named(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.numel()}

    def before(
        self, batches: Sequence[Any], weights: Sequence[float], sizes: Sequence[float], loss: Loss | None = None
    ) -> StepTruth:
        """Look at the gradients of the coming step, micro-batch by micro-batch."""
        step = StepTruth()
        step.weights, step.sizes = list(weights), list(sizes)
        step.before = {name: p.detach().double().numpy().copy() for name, p in self._named().items()}
        dense = copy.deepcopy(self.model).double()
        named = {name: p for name, p in dense.named_parameters() if p.numel() and p.requires_grad}
        for batch, weight in zip(batches, weights, strict=True):
            batch = tuple(t.double() if t.is_floating_point() else t for t in batch)
            value = (loss or self.loss)(dense, batch)
            grads = torch.autograd.grad(weight * value, list(named.values()), allow_unused=True)
            step.losses.append(float(value.detach()))
            step.parts.append(
                {
                    name: None if grad is None else (grad.to_dense() if grad.is_sparse else grad).numpy().copy()
                    for name, grad in zip(named, grads, strict=True)
                }
            )
        self.steps.append(step)
        return step

    def after(self) -> None:
        """Look at the weights and the optimizers' state after the step."""
        step, named = self.steps[-1], self._named()
        step.after = {name: p.detach().double().numpy().copy() for name, p in named.items()}
        lr = self.optimizers[0].param_groups[0]["lr"]
        step.lr = float(lr)
        name_of = {id(p): name for name, p in named.items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    if "exp_avg_sq" in state and "betas" in group and id(parameter) in name_of:
                        step.adam[name_of[id(parameter)]] = _adam(state, *group["betas"])

    # -- comparing --------------------------------------------------------------------------------------------------

    def check(
        self,
        run: gv.Run,
        *,
        rtol: float = 1e-5,
        gsnr_rtol: float = 1e-4,
        skip: Sequence[str] = (),
        first: int = 0,
        samples_known: bool = True,
        steps: Sequence[int] | None = None,
        radial: bool = False,
    ) -> None:
        """Hold everything recorded against the truth.

        Args:
            run: The record.
            rtol: Relative error allowed in norms.
            gsnr_rtol: The same for ratios, in which the difference of two sums loses digits.
            skip: Metrics (``source:metric`` for one source) to leave out.
            first: Number of the first step in the record.
            samples_known: Whether the loop told batch sizes, so that there is a noise scale.
            steps: Which steps to look at, counted from 0 in this truth; all by default.
            radial: Whether to look at the radial GSNR too.
        """
        wanted = list(range(len(self.steps))) if steps is None else list(steps)
        for metric in ("grad/norm", "grad/max", "grad/zero_fraction", "weight/norm", "update/norm", "update/ratio"):
            if metric not in skip:
                self._check_plain(run, metric, wanted, first, rtol)
        if "microbatch:gsnr" not in skip and any(len(step.parts) > 1 for step in self.steps):
            self._check_ratio(run, "gsnr", "microbatch", wanted, first, gsnr_rtol)
            if samples_known and "noise_scale" not in skip:
                self._check_noise_scale(run, wanted, first, gsnr_rtol)
            if radial:
                self._check_ratio(run, "radial_gsnr", "microbatch", wanted, first, gsnr_rtol)
        if "adam:gsnr" not in skip and any(step.adam for step in self.steps):
            self._check_ratio(run, "gsnr", "adam", wanted, first, gsnr_rtol)

    def _check_plain(self, run: gv.Run, metric: str, wanted: Sequence[int], first: int, rtol: float) -> None:
        rows = {name: row for row, name in enumerate(run.names("tensors"))}
        of_run = dict(zip(*run.series(metric), strict=True))
        found_steps, matrix = run.matrix(metric)
        of_rows = dict(zip(found_steps.tolist(), matrix, strict=True))
        for index in wanted:
            step = self.steps[index]
            whole, each = plain(step, metric)
            close(of_run.get(first + index), whole, rtol, f"{metric} of the model at step {index}")
            assert first + index in of_rows, f"no {metric} of the tensors at step {index}"
            for name, value in each.items():
                close(of_rows[first + index][rows[name]], value, rtol, f"{metric} of {name} at step {index}")

    def _groups(self, step: StepTruth, kind: str) -> dict[str, dict[str, np.ndarray | None]]:
        names = step.names()
        if kind == "values":
            return {"": dict.fromkeys(names)}
        if kind == "tensors":
            return {name: {name: None} for name in names}
        if kind == "heads":
            return {head: dict(masks) for head, masks in self.heads.items()}
        layers: dict[str, dict[str, np.ndarray | None]] = {}
        for name in names:
            layers.setdefault(layer_name(name), {})[name] = None
        return layers

    def pairs(self, metric: str, source: str, kind: str) -> list[dict[str, tuple[float, float]]]:
        """Signal and noise of every group at every step, per sample where the source knows samples."""
        result = []
        for step in self.steps:
            pairs: dict[str, tuple[float, float]] = {}
            for group, members in self._groups(step, kind).items():
                if source == "adam":
                    known = [step.adam[name] for name in members if name in step.adam]
                    known = [pair for pair in known if math.isfinite(sum(pair))]
                    if known:
                        pairs[group] = (sum(pair[0] for pair in known), sum(pair[1] for pair in known))
                elif len(step.parts) > 1:
                    pairs[group] = step.radial(group) if metric == "radial_gsnr" else step.signal_and_noise(members)
            result.append(pairs)
        return result

    def ratios(self, metric: str, source: str, kind: str) -> list[dict[str, float]]:
        """Signal over noise, each averaged over the last `window` readings that had them, none from before half-time.

        A group without a number at a step has no ratio there.
        """
        history: dict[str, list[tuple[int, float, float]]] = {}
        result = []
        for now, (step, pairs) in enumerate(zip(self.steps, self.pairs(metric, source, kind), strict=True)):
            for group, pair in pairs.items():
                if math.isfinite(sum(pair)):
                    history.setdefault(group, []).append((now, *pair))
            scale = 1.0 if source == "adam" else float(np.mean(step.sizes))
            ratios = {}
            for group in pairs:
                kept = history.get(group, [])[-self.window :]
                recent = np.array([pair for when, *pair in kept if when >= now / 2])
                if len(recent) and math.isfinite(sum(pairs[group])):
                    signal, noise = recent.mean(0)
                    if abs(noise) < 1e-6 * abs(signal):
                        continue  # nothing but rounding
                    ratios[group] = scale * signal / noise if noise > 0 else math.nan
            result.append(ratios)
        return result

    def _check_ratio(
        self, run: gv.Run, metric: str, source: str, wanted: Sequence[int], first: int, rtol: float
    ) -> None:
        kinds = ("tensors",) if metric == "radial_gsnr" else ("values", "tensors", "layers")
        for kind in (*kinds, *(("heads",) if self.heads and source != "adam" and metric == "gsnr" else ())):
            truth = self.ratios(metric, source, kind)
            found = _table(run, metric, kind, source)
            for index in wanted:
                for group, value in truth[index].items():
                    what = f"{source} {metric} of {kind} {group or 'model'} at step {index}"
                    assert first + index in found, f"no {what}"
                    got = found[first + index].get(group)
                    # A ratio far above 1 is the quotient by a small difference; one near 0 has a small numerator.
                    close(got, value, rtol * max(1.0, abs(value)), what, atol=rtol)

    def noise_scales(self) -> list[float]:
        """Noise over signal, from half-time on, once earlier readings have shown that there is a signal."""
        pairs = [found.get("", (math.nan, math.nan)) for found in self.pairs("gsnr", "microbatch", "values")]
        since = needed = None
        result = []
        for now in range(len(pairs)):
            recent = [i for i in range(now + 1) if i >= now / 2 and math.isfinite(sum(pairs[i]))]
            fresh = [i for i in recent if since is not None and i > since]
            shown = needed is not None and len(fresh) >= needed
            signal, noise = np.mean([pairs[i] for i in fresh], axis=0) if shown else (math.nan, math.nan)
            result.append(noise / signal if signal > 0 else math.nan)
            if needed is None and len(recent) > 1 and _end(np.array([pairs[i] for i in recent]), -1) > 0:
                since, needed = now, len(recent)
        return result

    def _check_noise_scale(self, run: gv.Run, wanted: Sequence[int], first: int, rtol: float) -> None:
        truth = self.noise_scales()
        found = dict(zip(*run.series("noise_scale"), strict=True))
        for index in wanted:
            if len(self.steps[index].parts) > 1:
                close(found[first + index], truth[index], rtol * max(1, truth[index]), f"noise_scale at step {index}")


def plain(step: StepTruth, metric: str) -> tuple[float, dict[str, float]]:
    """One metric that needs no history: of the whole model, and of every tensor."""
    names = step.names()
    if metric == "grad/norm":
        return float(np.linalg.norm(step.whole(names))), {n: float(np.linalg.norm(step.total(n))) for n in names}
    if metric == "grad/max":
        return float(np.abs(step.whole(names)).max()), {n: float(np.abs(step.total(n)).max()) for n in names}
    if metric == "grad/zero_fraction":
        return float((step.whole(names) == 0).mean()), {n: float((step.total(n) == 0).mean()) for n in names}
    after = {name: float(np.linalg.norm(value)) for name, value in step.after.items()}
    moved = {name: float(np.linalg.norm(step.after[name] - step.before[name])) for name in step.after}
    all_after = math.hypot(*after.values())
    all_moved = math.hypot(*moved.values())
    if metric == "weight/norm":
        return all_after, after
    if metric == "update/norm":
        return all_moved, moved
    return all_moved / all_after, {name: moved[name] / after[name] for name in moved if after[name] > 0}


def _adam(state: Mapping[str, Any], beta1: float, beta2: float) -> tuple[float, float]:
    """Signal and noise by section 7 of science.md, from m and v as the optimizer keeps them."""
    t = float(state["step"])
    if t < 2:
        return math.nan, math.nan
    m = state["exp_avg"].detach().double().numpy() / (1 - beta1**t)
    v = state["exp_avg_sq"].detach().double().numpy() / (1 - beta2**t)
    c1 = (1 - beta1) / (1 + beta1) * (1 + beta1**t) / (1 - beta1**t)
    return float((m**2 - c1 * v).sum()), float((v - m**2).sum())


def _table(run: gv.Run, metric: str, kind: str, source: str) -> dict[int, dict[str, float]]:
    if kind == "values":
        steps, values = run.series(metric, source=source)
        return {int(step): {"": float(value)} for step, value in zip(steps, values, strict=True)}
    steps, matrix = run.matrix(metric, kind, source=source)
    names = run.names(kind)
    return {int(step): dict(zip(names, row.tolist(), strict=True)) for step, row in zip(steps, matrix, strict=True)}


def close(got: float | None, expected: float, rtol: float, what: str, atol: float = 0.0) -> None:
    """Equal up to a relative error, with a message that says what is not."""
    assert got is not None, f"no {what}; expected {expected}"
    if math.isnan(expected):
        assert math.isnan(got) or math.isinf(got), f"{what} is {got}; expected nan"
        return
    tiny = 1e-12  # a gradient of exactly zero
    assert abs(got - expected) <= rtol * abs(expected) + atol + tiny, f"{what} is {got}; expected {expected}"


# -- a training loop with everything a test may want to vary ----------------------------------------------------------


class Rig:
    """A model, its optimizer, a Monitor and the truth beside it, in an ordinary loop.

    Args:
        path: Folder to keep the run in.
        model: What to train.
        optimizer: One that steps it, or several, which `turn` steps.
        loss: Its loss.
        data: Its data.
        sizes: Samples in each micro-batch.
        observe: When to call observe: "micro", "step", "clipped" (once, after clipping) or "never".
        tell: How sizes are told: "micro" with observe, "step" as a sum with observe, "watch" to watch, or "no".
        equal: Whether every loss is divided by the number of micro-batches, whatever their size.
        clip: Called with the parameters before the step.
        scaler: A GradScaler.
        unscale: Whether to call unscale_ before clipping.
        autocast: Type to cast to in the forward pass.
        set_to_none: Passed to zero_grad.
        turn: Called in place of the optimizer's step and all that the loop does just before it.
        heads: See `Truth`.
        settings: Of the Config.
    """

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        loss: Loss = regression,
        data: Data | None = None,
        sizes: Sequence[int] = (4, 4, 4),
        observe: str = "step",
        tell: str = "watch",
        equal: bool = False,
        clip: Callable[[list[nn.Parameter]], Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        unscale: bool = False,
        autocast: torch.dtype | None = None,
        set_to_none: bool = True,
        turn: Callable[[], None] | None = None,
        heads: Mapping[str, Mapping[str, np.ndarray]] | None = None,
        **settings: Any,
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self.model, self.optimizer, self.loss, self.data = model, optimizers[0], loss, data or Data()
        self.sizes, self.observe, self.tell, self.equal = sizes, observe, tell, equal
        self.clip, self.scaler, self.unscale, self.autocast = clip, scaler, unscale, autocast
        self.set_to_none, self.turn = set_to_none, turn
        weights = "equal" if equal else "size"
        self.config = gv.Config(
            **{"tensor_every": 1, "quiet": True, "micro_batch_weights": weights, "window_steps": 20, **settings}
        )
        self.truth = Truth(model, optimizers, loss, window=self.config.gsnr_window, heads=heads)
        self.monitor = gv.watch(
            model,
            optimizers,
            run=path / "run",
            config=self.config,
            batch_size=float(sum(sizes)) if tell == "watch" else None,
        )
        self.plant: Callable[[], None] | None = None
        """Called between backward and everything else, to spoil gradients."""
        self.clip_results: list[Any] = []

    def step(self, *, sizes: Sequence[int] | None = None, know: bool = True) -> None:
        sizes = sizes or self.sizes
        batches = self.data.batches(sizes)
        weights = [1 / len(sizes) if self.equal else size / sum(sizes) for size in sizes]
        told = sizes if self.tell == "micro" or self.equal else [sum(sizes) / len(sizes)] * len(sizes)
        if know:
            self.truth.before(batches, weights, [1.0] * len(sizes) if self.tell == "no" else told)
        losses = []
        for batch, weight, size in zip(batches, weights, sizes, strict=True):
            cast = torch.autocast("cpu", dtype=self.autocast) if self.autocast else nullcontext()
            with cast:
                loss = self.loss(self.model, batch)
            scaled = weight * loss
            (self.scaler.scale(scaled) if self.scaler else scaled).backward()
            losses.append(loss.detach())
            if self.observe == "micro":
                self.monitor.observe(loss, batch_size=size if self.tell == "micro" else None)
        if self.plant:
            self.plant()
        total = float(sum(sizes)) if self.tell == "step" else None
        if self.observe == "step":
            self.monitor.observe(torch.stack(losses).mean(), batch_size=total)
        if self.turn:
            self.turn()
        else:
            self._clip_and_step(torch.stack(losses).mean(), total)
        if know:
            self.truth.after()
        for optimizer in self.truth.optimizers:
            optimizer.zero_grad(set_to_none=self.set_to_none)

    def _clip_and_step(self, loss: Tensor, total: float | None) -> None:
        if self.unscale and self.scaler:
            self.scaler.unscale_(self.optimizer)
        if self.clip:
            self.clip_results.append(self.clip(list(self.model.parameters())))
        if self.observe == "clipped":
            self.monitor.observe(loss, batch_size=total)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def steps(self, count: int) -> Rig:
        for _ in range(count):
            self.step()
        return self

    def check(self, **options: Any) -> None:
        """Close the run and hold it against the truth."""
        self.monitor.close()
        assert_no_errors(self.monitor)
        with gv.open_run(self.monitor.run_path) as run:
            assert run.last_step == len(self.truth.steps) - 1
            self.truth.check(run, samples_known=self.tell != "no", **options)

    def stages(self) -> list[str]:
        with gv.open_run(self.monitor.run_path) as run:
            return run.stage("grad/norm")[1].tolist()


def _end(pairs: np.ndarray, sign: int) -> float:
    """The lower (-1) or upper (1) end of the interval of signal over noise, by the delta method."""
    (signal, noise), (spread, mixed) = pairs.mean(0), np.cov(pairs.T)
    ratio = signal / noise
    variance = max(spread[0] - 2 * ratio * spread[1] + ratio**2 * mixed[1], 0.0)
    half = student_t_quantile(0.975, len(pairs) - 1) * math.sqrt(variance / len(pairs)) / noise
    return float(ratio + sign * half)


def assert_no_errors(monitor: gv.Monitor) -> None:
    errors = [f for f in monitor.findings if f.id in ("monitor_error", "store_error")]
    assert not errors, errors[0].evidence


def finished(monitor: gv.Monitor) -> gv.Run:
    """The run of a monitor, which is closed and has had no error of its own."""
    monitor.close()
    assert_no_errors(monitor)
    return gv.open_run(monitor.run_path)


def head_masks(weight: Tensor, heads: int, parts: int, *, layout: str = "stacked") -> list[np.ndarray]:
    """For every head a mask of its elements in a projection weight, found index by index.

    Args:
        weight: The projection.
        heads: Number of heads.
        parts: 3 for a fused q, k and v, 1 for one of them.
        layout: "stacked" [q; k; v], each head after head; "interleaved" with q, k, v of one head together;
            "transposed" as "stacked" but stored [in, out].
    """
    out = weight.shape[1] if layout == "transposed" else weight.shape[0]
    size = out // (parts * heads)
    masks = []
    for head in range(heads):
        mask = np.zeros(tuple(weight.shape), dtype=bool)
        for index in range(out):
            owner = index // (parts * size) if layout == "interleaved" else (index % (heads * size)) // size
            if owner == head:
                if layout == "transposed":
                    mask[:, index] = True
                else:
                    mask[index] = True
        masks.append(mask)
    return masks
