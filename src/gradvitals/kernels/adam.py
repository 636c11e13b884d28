"""AdamW's update of many tensors in one pass, with the vitals of gradients, weights and moments out of the registers.

`prepare` is one small launch before it: it counts the steps, and turns them, the norm to clip to and the loss scale
into the few numbers each tensor needs, on the device. Variance-reduced updates scale the gradient on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvitals.kernels.cut import Cut
from gradvitals.kernels.paper import factor_of, taken_in
from gradvitals.kernels.preparing import Prepared, Ratios, Rule, prepare
from gradvitals.kernels.sums import KINDS, absolute_bits, load, pointer, put

__all__ = ["MAXIMA", "ROOTS", "SPAN", "VITALS", "Ratios", "Reduction", "Rule", "Tables", "prepare", "update"]

VITALS = (
    "square", "largest", "nonzero", "nonfinite", "along_weight", "along_momentum", "momentum_before", "weight_before",
    "weight", "update", "first", "second", "alive", "below_one",
)  # fmt: skip
"""What is summed over each tensor: of the gradient as it lies in memory, then of weights and moments."""

MAXIMA = 1 << VITALS.index("largest")
ROOTS = sum(1 << VITALS.index(name) for name in ("square", "weight_before", "weight", "first"))

BLOCK = 512
SPAN = 8192
"""Below 2¹⁵: counts share 32 bits."""
NUM_WARPS = 4
STAGES = 3


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x, seed, offsets, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """To the type of the weights: to the nearest, or up as often as the rest is long."""
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
    counts = tl.zeros((BLOCK,), dtype=tl.int32)  # of non-zero numbers, and in the upper half of non-finite ones
    along_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    along_momentum = tl.zeros((BLOCK,), dtype=tl.float32)
    momentum_before = tl.zeros((BLOCK,), dtype=tl.float32)
    weight_before = tl.zeros((BLOCK,), dtype=tl.float32)
    weight_after = tl.zeros((BLOCK,), dtype=tl.float32)
    update = tl.zeros((BLOCK,), dtype=tl.float32)
    first_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    second_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    alive = tl.zeros((BLOCK,), dtype=tl.int32)  # and in the upper half of those below 1
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
                average = taken_in(load(average_at, offsets, end, WHOLE), reduced, share, GRAD)
                put(average_at, offsets, end, average, WHOLE)
                reduced = average.to(tl.float32)
            grad = (raw * reduced).to(GRAD).to(tl.float32)
        grad = grad * factor
        if MAXIMIZE:
            grad = -grad
        # Spelt out, so that the step is the same, bit for bit, whatever is summed up beside it.
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
        if SCALED:  # torch's fused optimizers leave gradients unscaled too
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
    tensor = tl.load(chunks + number)
    start = tl.load(chunks + num_chunks + number)
    end = tl.load(chunks + 2 * num_chunks + number)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    weight_at = pointer(weights, tensor, KIND, ALIGNED)
    grad_at = pointer(grads, tensor, GRAD, ALIGNED)
    first_at = pointer(firsts, tensor, MOMENT, ALIGNED)
    second_at = pointer(seconds, tensor, MOMENT, ALIGNED)
    # What is not asked for is never read: its tables are those of the weights.
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
    """Where the four tensors of every parameter lie, and their types."""

    weights: Tensor
    grads: Tensor
    firsts: Tensor
    seconds: Tensor
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    """Of weights, gradients and moments."""
    aligned: bool


@dataclass(frozen=True)
class Reduction:
    """Where the tensors lie that a variance-reduced update needs beside the four, and its smallest factor."""

    noises: Tensor
    """Squared deviations; none where not positive."""
    averages: Tensor | None
    """Moving averages of the factors, of the gradients' type: these, where there are any, are multiplied by."""
    factors: Tensor | None
    """Take the factors in float32, where they are wanted."""
    noise_dtype: torch.dtype
    gamma: float


def update(
    cut: Cut,
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
    """Make the step. Returns the sums of every chunk, in the order of `VITALS`, where asked for.

    Args:
        cut: Of the parameters.
        tables: Where everything lies.
        rule: Of their group.
        prepared: By `prepare`, for this step.
        vitals: Whether to sum up what there is to tell.
        grad_scale: What gradients are still multiplied by; they are divided in memory too.
        found_inf: Other than 0 where nothing is to be changed.
        seed: Where weights are to be rounded stochastically.
        reduction: Where gradients are to be scaled by the paper's factors on the way; ``.grad`` stays as it is.
    """
    device = tables.weights.device
    sums = torch.empty((len(VITALS), cut.num_chunks), dtype=torch.float32, device=device) if vitals else None
    _update[(cut.num_chunks,)](
        cut.chunks,
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
        cut.num_chunks,
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
