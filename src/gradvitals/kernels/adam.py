"""AdamW's update of many tensors in one pass, which also measures the vitals of gradients, weights and moments.

`prepare` is one small launch before it: it counts the steps, and computes the few coefficients that each tensor needs
from the steps, the clip norm and the loss scale, on the device. Variance-reduced updates scale the gradient on the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvitals.kernels.reductions import KINDS, absolute_bits, chunk_of, load, pointer, put
from gradvitals.kernels.tables import Chunks
from gradvitals.kernels.vrgd import factor_of, updated_average

NUM_COEFFICIENTS = 8
"""Numbers per tensor: decay, size, root and limit of its update, its step, inverse mean ratio and factor weight."""


@dataclass(frozen=True)
class Rule:
    """The settings of a parameter group."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


@triton.jit  # type: ignore[untyped-decorator]
def _prepare(  # type: ignore[no-untyped-def]
    steps, squares, num_squares, lr_at, scale_at, found_at, coefficients, common, counts, norm_at,
    ratios, num_ratios, weights, lr, log_beta1, log_beta2, spread, weight_decay, max_norm,
    CLIP: tl.constexpr, SCALED: tl.constexpr, FOUND: tl.constexpr, LR_ON_DEVICE: tl.constexpr, REDUCED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tensor = tl.program_id(0)
    factor = 1.0
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_at).to(tl.float32)
        factor = 1.0 / scale
    skip = 0.0
    if FOUND:
        skip = tl.load(found_at).to(tl.float32)
    if tensor == 0:
        if CLIP:
            total = tl.zeros((BLOCK,), dtype=tl.float64)
            for at in range(0, num_squares, BLOCK):
                offsets = at + tl.arange(0, BLOCK)
                total += tl.load(squares + offsets, mask=offsets < num_squares, other=0.0)
            norm = (tl.sqrt(tl.sum(total, axis=0)) / scale).to(tl.float32)
            share = max_norm / (norm + 1e-6)
            factor *= tl.where(share >= 1.0, 1.0, share)  # NaN stays
            tl.store(norm_at, norm)
        tl.store(common, factor)
        tl.store(common + 1, skip)
    step_at = tl.load(steps + tensor).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at) + tl.where(skip != 0.0, 0.0, 1.0)
    tl.store(step_at, step)
    tl.store(counts + tensor, step.to(tl.float64))
    if LR_ON_DEVICE:
        lr = tl.load(lr_at).to(tl.float32)
    many = step.to(tl.float64)
    power1 = tl.exp2(many * log_beta1)
    power2 = tl.exp2(many * log_beta2)
    debias1 = 1.0 - power1
    debias2 = 1.0 - power2
    limit = (1.0 + spread * (1.0 + power1) / debias1) / 2.0 * debias1 * debias1 / debias2
    mine = coefficients + tensor * 8
    tl.store(mine, 1.0 - lr * weight_decay)
    tl.store(mine + 1, (lr / debias1).to(tl.float32))
    tl.store(mine + 2, (1.0 / tl.sqrt(debias2)).to(tl.float32))
    tl.store(mine + 3, limit.to(tl.float32))
    tl.store(mine + 4, step)
    if REDUCED:
        total, number = tl.load(ratios + tensor), tl.load(ratios + num_ratios + tensor)
        tl.store(mine + 5, (number / total).to(tl.float32))
        tl.store(mine + 6, tl.load(weights + tensor))


@dataclass(frozen=True)
class Reduction:
    """Further inputs of a variance-reduced step, on the device; tensors per parameter are given by their addresses."""

    ratios: Tensor
    """Sums of the signal-to-noise ratios, and their counts; see `vrgd.sum_ratios`."""
    weights: Tensor
    """Weights of this step's factors in their moving averages."""
    noises: Tensor
    """Squared deviations; a value that is not positive means no noise."""
    averages: Tensor | None
    """Moving averages of the factors, in the gradients' dtype. If given, they multiply the gradients."""
    factors: Tensor | None
    """Receive the factors in float32, if wanted."""
    noise_dtype: torch.dtype
    gamma: float


@dataclass(frozen=True)
class Prepared:
    """The numbers that `prepare` computes for `update`, on the device."""

    coefficients: Tensor
    common: Tensor
    steps: Tensor
    """Number of steps of each tensor, including this one."""
    norm: Tensor
    """Norm of all gradients, without the loss scale; undefined if nothing is clipped."""


def prepare(
    steps: Tensor,
    number: int,
    rule: Rule,
    *,
    squares: Tensor | None,
    max_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    reduction: Reduction | None = None,
) -> Prepared:
    """Count a step of each tensor, and compute the coefficients of its update.

    Args:
        steps: Addresses of the step counts.
        number: Number of tensors.
        rule: Settings of their group.
        squares: Squared norms of all gradients to clip together.
        max_norm: The norm to clip to.
        grad_scale: Loss scale that gradients still contain.
        found_inf: Not 0 to skip the step.
        reduction: For a variance-reduced update.
    """
    device = steps.device
    numbers = torch.empty(number * NUM_COEFFICIENTS + 4, dtype=torch.float32, device=device)
    coefficients, common, norm = numbers[:-4], numbers[-4:-2], numbers[-2:-1]
    counts = torch.empty(number, dtype=torch.float64, device=device)
    clip = squares is not None and max_norm is not None
    _prepare[(number,)](
        steps,
        squares if clip else counts,
        squares.numel() if squares is not None and clip else 0,
        rule.lr if isinstance(rule.lr, Tensor) else numbers,
        numbers if grad_scale is None else grad_scale,
        numbers if found_inf is None else found_inf,
        coefficients,
        common,
        counts,
        norm,
        counts if reduction is None else reduction.ratios,
        0 if reduction is None else reduction.ratios.shape[1],
        numbers if reduction is None else reduction.weights,
        0.0 if isinstance(rule.lr, Tensor) else float(rule.lr),
        _log2(rule.beta1),
        _log2(rule.beta2),
        (1 - rule.beta1) / (1 + rule.beta1),
        float(rule.weight_decay),
        float(max_norm or 0.0),
        CLIP=clip,
        SCALED=grad_scale is not None,
        FOUND=found_inf is not None,
        LR_ON_DEVICE=isinstance(rule.lr, Tensor),
        REDUCED=reduction is not None,
        BLOCK=1024,
    )
    return Prepared(coefficients, common, counts, norm)


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -1e30


VITALS = (
    "square", "largest", "nonzero", "nonfinite", "along_weight", "along_momentum", "momentum_before", "weight_before",
    "weight", "update", "first", "second", "alive", "below_one",
)  # fmt: skip
"""Sums over each tensor: of the gradient as in memory, then of weights and moments."""

MAXIMA = 1 << VITALS.index("largest")
ROOTS = sum(1 << VITALS.index(name) for name in ("square", "weight_before", "weight", "first"))

BLOCK = 512
SPAN = 8192
"""Below 2¹⁵, because two counts share 32 bits."""
NUM_WARPS = 4
STAGES = 3


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x, seed, offsets, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round to the dtype of the weights: to nearest, or up with a probability equal to the remainder."""
    if STOCHASTIC:
        bits = x.to(tl.uint32, bitcast=True)
        noise = tl.randint(seed, offsets).to(tl.uint32, bitcast=True) & 0xFFFF
        kept = tl.where((bits & 0x7F800000) == 0x7F800000, bits, bits + noise) & 0xFFFF0000
        return kept.to(tl.float32, bitcast=True).to(KIND)
    return x.to(KIND)


@triton.jit  # type: ignore[untyped-decorator]
def _update_chunk(  # type: ignore[no-untyped-def]
    weight_at, grad_at, first_at, second_at, noise_at, average_at, factor_at, start, end, sums, num_chunks, seed,
    number, factor, scale, skip, decay, size, root, limit, inverse, share, beta1, beta2, rest1, rest2, eps, gamma,
    KIND: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr, VITALS: tl.constexpr, SCALED: tl.constexpr,
    FOUND: tl.constexpr, MAXIMIZE: tl.constexpr, STOCHASTIC: tl.constexpr, REDUCED: tl.constexpr,
    AVERAGED: tl.constexpr, KEEP: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    square = tl.zeros((BLOCK,), dtype=tl.float32)
    bits = tl.zeros((BLOCK,), dtype=tl.int32)
    counts = tl.zeros((BLOCK,), dtype=tl.int32)  # of nonzero elements; the upper half counts nonfinite ones
    along_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    along_momentum = tl.zeros((BLOCK,), dtype=tl.float32)
    momentum_before = tl.zeros((BLOCK,), dtype=tl.float32)
    weight_before = tl.zeros((BLOCK,), dtype=tl.float32)
    weight_after = tl.zeros((BLOCK,), dtype=tl.float32)
    update = tl.zeros((BLOCK,), dtype=tl.float32)
    first_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    second_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    alive = tl.zeros((BLOCK,), dtype=tl.int32)  # the upper half counts those below 1
    length = SPAN if WHOLE else end - start
    for i in tl.range(0, length, BLOCK, num_stages=STAGES):
        offsets = start + i + tl.arange(0, BLOCK)
        raw = load(grad_at, offsets, end, WHOLE)
        old = load(weight_at, offsets, end, WHOLE)
        m_old = load(first_at, offsets, end, WHOLE)
        v_old = load(second_at, offsets, end, WHOLE)
        grad = raw
        if REDUCED:
            reduced = factor_of(raw, load(noise_at, offsets, end, WHOLE), inverse, gamma)
            if KEEP:
                put(factor_at, offsets, end, reduced, WHOLE)
            if AVERAGED:
                average = updated_average(load(average_at, offsets, end, WHOLE), reduced, share, GRAD)
                put(average_at, offsets, end, average, WHOLE)
                reduced = average.to(tl.float32)
            grad = (raw * reduced).to(GRAD).to(tl.float32)
        grad = grad * factor
        if MAXIMIZE:
            grad = -grad
        # Explicit fma, so that the step is the same bit for bit with and without vitals.
        m = tl.fma(beta1, m_old, rest1 * grad)
        v = tl.fma(rest2 * grad, grad, beta2 * v_old)
        new = tl.fma(-size, m / tl.fma(tl.sqrt(v), root, eps), old * decay)
        if FOUND:
            m = tl.where(skip != 0.0, m_old, m)
            v = tl.where(skip != 0.0, v_old, v)
            new = tl.where(skip != 0.0, old, new)
        kept = _rounded(new, seed, number * SPAN + i + tl.arange(0, BLOCK), KIND, STOCHASTIC)
        put(weight_at, offsets, end, kept, WHOLE)
        put(first_at, offsets, end, m.to(MOMENT), WHOLE)
        put(second_at, offsets, end, v.to(MOMENT), WHOLE)
        if SCALED:  # torch's fused optimizers unscale .grad too
            put(grad_at, offsets, end, (raw * scale).to(GRAD), WHOLE)
        if VITALS:
            found = absolute_bits(raw)
            square += raw * raw
            bits = tl.maximum(bits, found)
            counts += (found != 0).to(tl.int32) + (found >= 0x7F800000).to(tl.int32) * 0x10000
            along_weight += old * raw
            along_momentum += m_old * raw
            momentum_before += m_old * m_old
            weight_before += old * old
            now = kept.to(tl.float32)
            weight_after += now * now
            update += (now - old) * (now - old)
            first_sum += m * m
            second_sum += v
            alive += (v > 0.0).to(tl.int32) + ((v > 0.0) & (m * m < limit * v)).to(tl.int32) * 0x10000
    if VITALS:
        tl.store(sums, tl.sum(square, axis=0))
        tl.store(sums + num_chunks, tl.max(bits, axis=0).to(tl.float32, bitcast=True))
        number_of = tl.sum(counts, axis=0)
        tl.store(sums + 2 * num_chunks, (number_of & 0xFFFF).to(tl.float32))
        tl.store(sums + 3 * num_chunks, (number_of >> 16).to(tl.float32))
        tl.store(sums + 4 * num_chunks, tl.sum(along_weight, axis=0))
        tl.store(sums + 5 * num_chunks, tl.sum(along_momentum, axis=0))
        tl.store(sums + 6 * num_chunks, tl.sum(momentum_before, axis=0))
        tl.store(sums + 7 * num_chunks, tl.sum(weight_before, axis=0))
        tl.store(sums + 8 * num_chunks, tl.sum(weight_after, axis=0))
        tl.store(sums + 9 * num_chunks, tl.sum(update, axis=0))
        tl.store(sums + 10 * num_chunks, tl.sum(first_sum, axis=0))
        tl.store(sums + 11 * num_chunks, tl.sum(second_sum, axis=0))
        number_of = tl.sum(alive, axis=0)
        tl.store(sums + 12 * num_chunks, (number_of & 0xFFFF).to(tl.float32))
        tl.store(sums + 13 * num_chunks, (number_of >> 16).to(tl.float32))


@triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    chunks, weights, grads, firsts, seconds, noises, averages, factors, coefficients, common, scale_at, sums,
    num_chunks, seed, beta1, beta2, rest1, rest2, eps, gamma,
    KIND: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr, VITALS: tl.constexpr, SCALED: tl.constexpr,
    FOUND: tl.constexpr, MAXIMIZE: tl.constexpr, STOCHASTIC: tl.constexpr, REDUCED: tl.constexpr,
    AVERAGED: tl.constexpr, KEEP: tl.constexpr, NOISE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    tensor, start, end = chunk_of(chunks, number, num_chunks, ALIGNED)
    weight_at = pointer(weights, tensor, KIND, ALIGNED)
    grad_at = pointer(grads, tensor, GRAD, ALIGNED)
    first_at = pointer(firsts, tensor, MOMENT, ALIGNED)
    second_at = pointer(seconds, tensor, MOMENT, ALIGNED)
    # Unused tables are those of the weights, and are never read.
    noise_at = pointer(noises, tensor, NOISE, ALIGNED)
    average_at = pointer(averages, tensor, GRAD, ALIGNED)
    factor_at = pointer(factors, tensor, tl.float32, ALIGNED)
    mine = coefficients + tensor * 8
    decay, size, root, limit = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2), tl.load(mine + 3)
    inverse, share = tl.load(mine + 5), tl.load(mine + 6)
    factor, skip = tl.load(common), tl.load(common + 1)
    scale = 1.0
    if SCALED:
        scale = 1.0 / tl.load(scale_at).to(tl.float32)
    if STOCHASTIC:
        seed += tl.load(mine + 4).to(tl.int32)
    if end - start == SPAN:
        _update_chunk(
            weight_at, grad_at, first_at, second_at, noise_at, average_at, factor_at, start, end, sums + number,
            num_chunks, seed, number, factor, scale, skip, decay, size, root, limit, inverse, share,
            beta1, beta2, rest1, rest2, eps, gamma,
            KIND, GRAD, MOMENT, VITALS, SCALED, FOUND, MAXIMIZE, STOCHASTIC, REDUCED, AVERAGED, KEEP, True,
            BLOCK, SPAN, STAGES,
        )  # fmt: skip
    else:
        _update_chunk(
            weight_at, grad_at, first_at, second_at, noise_at, average_at, factor_at, start, end, sums + number,
            num_chunks, seed, number, factor, scale, skip, decay, size, root, limit, inverse, share,
            beta1, beta2, rest1, rest2, eps, gamma,
            KIND, GRAD, MOMENT, VITALS, SCALED, FOUND, MAXIMIZE, STOCHASTIC, REDUCED, AVERAGED, KEEP, False,
            BLOCK, SPAN, STAGES,
        )  # fmt: skip


@dataclass(frozen=True)
class Tables:
    """Addresses of the four tensors of every parameter, and their dtypes."""

    weights: Tensor
    grads: Tensor
    firsts: Tensor
    seconds: Tensor
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    """Of weights, gradients and moments."""
    aligned: bool


def update(
    chunks: Chunks,
    tables: Tables,
    rule: Rule,
    prepared: Prepared,
    *,
    vitals: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    seed: int | None,
    reduction: Reduction | None = None,
) -> Tensor | None:
    """Make the step. Return the sums of every chunk in the order of `VITALS`, if wanted.

    Args:
        chunks: Of the parameters.
        tables: Addresses of all tensors.
        rule: Settings of their group.
        prepared: From `prepare`, for this step.
        vitals: Whether to compute the sums.
        grad_scale: Loss scale that gradients still contain; it is removed from ``.grad`` too.
        found_inf: Not 0 to change nothing.
        seed: Rounds weights stochastically, if given.
        reduction: Scales gradients by the paper's factors; ``.grad`` stays unchanged.
    """
    device = tables.weights.device
    sums = torch.empty((len(VITALS), chunks.num_chunks), dtype=torch.float32, device=device) if vitals else None
    _update[(chunks.num_chunks,)](
        chunks.table,
        tables.weights,
        tables.grads,
        tables.firsts,
        tables.seconds,
        tables.weights if reduction is None else reduction.noises,
        tables.weights if reduction is None or reduction.averages is None else reduction.averages,
        tables.weights if reduction is None or reduction.factors is None else reduction.factors,
        prepared.coefficients,
        prepared.common,
        prepared.common if grad_scale is None else grad_scale,
        prepared.common if sums is None else sums,
        chunks.num_chunks,
        seed or 0,
        rule.beta1,
        rule.beta2,
        1 - rule.beta1,
        1 - rule.beta2,
        rule.eps,
        0.0 if reduction is None else reduction.gamma,
        KIND=KINDS[tables.dtypes[0]],
        GRAD=KINDS[tables.dtypes[1]],
        MOMENT=KINDS[tables.dtypes[2]],
        VITALS=vitals,
        SCALED=grad_scale is not None,
        FOUND=found_inf is not None,
        MAXIMIZE=rule.maximize,
        STOCHASTIC=seed is not None,
        REDUCED=reduction is not None,
        AVERAGED=reduction is not None and reduction.averages is not None,
        KEEP=reduction is not None and reduction.factors is not None,
        NOISE=KINDS[torch.float32 if reduction is None else reduction.noise_dtype],
        ALIGNED=tables.aligned,
        BLOCK=BLOCK,
        SPAN=SPAN,
        STAGES=STAGES,
        num_warps=NUM_WARPS,
    )
    return sums
