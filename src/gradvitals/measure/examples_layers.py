"""Normalisation layers whose weights tell what single examples add to their gradient, and how to see it.

Known are `nn.LayerNorm`, `nn.RMSNorm`, `nn.GroupNorm`, and modules that behave like them: one weight as wide as the
last dimension, by which something is multiplied that does not depend on it. That is not taken from their names but
tried out, with a few numbers on the CPU.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradvitals import functional, kernels
from gradvitals.measure import stats

CHUNK_ELEMENTS = 2**22
"""Elements of an input that are normalised at once, and at least one example: 16 MB of float32."""

TELLS_OF_CHECKPOINTS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
"""Not in torch 2.6. Without it, what a checkpointed segment gives up would be kept."""

PRECISE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class NormLayer:
    """A normalisation layer that is watched."""

    module: nn.Module
    row: int
    """Of its weight."""
    normalise: Callable[[Tensor], Tensor]
    """Its input without mean and scale, before weight and bias."""
    weight_dims: tuple[int, ...]
    """Dimensions of its input that the weight has."""
    example_dim: int
    """Dimension of its input that runs over examples."""

    @property
    def weight(self) -> Tensor:
        """What the normalised input is multiplied by."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    def fits(self, x: Tensor) -> bool:
        """Whether an input has a dimension for examples beside those of the weight."""
        own = {dim % x.dim() for dim in self.weight_dims} if x.dim() else set()
        return self.example_dim < x.dim() > len(own) and self.example_dim not in own

    def known_scale(self, output: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean and inverse deviation of the input, where backward of the layer's output has them at hand."""
        node = output.grad_fn
        if not isinstance(self.module, nn.LayerNorm) or type(node).__name__ != "NativeLayerNormBackward0":
            return None
        mean, inverse = getattr(node, "_saved_result1", None), getattr(node, "_saved_result2", None)
        if mean is None or inverse is None or mean.dim() != output.dim() or mean.dtype not in PRECISE:
            return None
        return mean.detach(), inverse.detach()

    def gradients(self, x: Tensor, grad_output: Tensor, scale: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """What each example adds to the gradient of the weight, `[B, P, n]`: in P parts, which are to be added up.

        Args:
            x: The input.
            grad_output: The gradient of the output.
            scale: What `known_scale` gave.
        """
        by_kernel = self._gradients_by_kernel(x, grad_output, scale)
        if by_kernel is not None:
            return by_kernel
        examples = x.shape[self.example_dim]
        at_once = max(1, CHUNK_ELEMENTS * examples // max(x.numel(), 1))
        given = (x, grad_output, *(scale or ()))
        if at_once >= examples:
            return self._gradients(*given).unsqueeze(1)
        starts = range(0, examples, at_once)
        chunks = [[part.narrow(self.example_dim, i, min(at_once, examples - i)) for part in given] for i in starts]
        return torch.cat([self._gradients(*chunk) for chunk in chunks]).unsqueeze(1)

    def _gradients_by_kernel(
        self, x: Tensor, grad_output: Tensor, scale: tuple[Tensor, Tensor] | None
    ) -> Tensor | None:
        """The same in one read, where there is a kernel for it."""
        if self.example_dim != 0 or self.weight_dims != (-1,):
            return None
        if not (kernels.usable(x) and kernels.usable(grad_output)):
            return None
        mean, inverse = scale or (None, self._inverse_scale(x))
        module: Any = kernels.ready("examples")
        if inverse is None or module is None or not module.readable(x, grad_output, inverse):
            return None
        try:
            found: Tensor = module.gradients(x, grad_output, mean, inverse)
        except Exception as error:
            kernels.give_up("examples", error, "single examples are read by torch")
            return None
        return found

    def _inverse_scale(self, x: Tensor) -> Tensor | None:
        """One over the root mean square of every position, of a layer that divides by that and no more."""
        if not isinstance(self.module, nn.RMSNorm):
            return None
        norms: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return norms.square_().div_(x.shape[-1]).add_(_rms_eps(self.module, x)).rsqrt_()

    def _gradients(self, x: Tensor, grad_output: Tensor, *scale: Tensor) -> Tensor:
        normalised = (x - scale[0]) * scale[1] if scale else self.normalise(x)
        return functional.norm_example_gradients(
            normalised, grad_output, example_dim=self.example_dim, weight_dims=self.weight_dims
        )


def norm_layers(model: nn.Module, row_of: Mapping[int, int], example_dim: int | None) -> list[NormLayer]:
    """The layers of a model whose calls can be seen.

    Args:
        model: The model.
        row_of: The row of each watched parameter, by its id.
        example_dim: The dimension of their inputs that runs over examples; None finds it.
    """
    if not TELLS_OF_CHECKPOINTS:
        return []
    hidden = _hidden(model)
    along = example_dim if example_dim is not None else _batch_dim(model)
    found = []
    for module in model.modules():
        row = row_of.get(id(module._parameters.get("weight")))
        if row is None or id(module) in hidden:
            continue
        known = _known(module)
        if known is not None:
            normalise, dims = known
            # Group norm has channels, and with them examples, in a place of their own.
            found.append(NormLayer(module, row, normalise, dims, 0 if isinstance(module, nn.GroupNorm) else along))
    return found


def why_none_seen(model: nn.Module) -> str | None:
    """Why no calls of norm layers can be seen in a model; None where some can."""
    if not TELLS_OF_CHECKPOINTS:
        return f"torch {torch.__version__} does not tell whether activations are checkpointed; a newer one does"
    hidden = _hidden(model)
    layers = [module for module in model.modules() if module._parameters.get("weight") is not None and _known(module)]
    if not layers:
        return "the model has no LayerNorm, RMSNorm or GroupNorm with a weight"
    if all(id(module) in hidden for module in layers):
        return "torch.compile hides the calls of the norm layers it has compiled"
    return None


def _hidden(model: nn.Module) -> set[int]:
    """The ids of modules whose calls `torch.compile` makes part of something else."""
    return {
        id(inner)
        for module in model.modules()
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for inner in module.modules()
    }


def _batch_dim(model: nn.Module) -> int:
    """Torch's own attention tells where it has its examples; everything else has them first."""
    told = [module.batch_first for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    return 1 if told and not any(told) else 0


def _known(module: nn.Module) -> tuple[Callable[[Tensor], Tensor], tuple[int, ...]] | None:
    if isinstance(module, nn.GroupNorm):
        return lambda x: F.group_norm(_precise(x), module.num_groups, eps=module.eps), (1,)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        shape = list(module.normalized_shape)
        dims = tuple(range(-len(shape), 0))
        if isinstance(module, nn.LayerNorm):
            return lambda x: F.layer_norm(_precise(x), shape, eps=module.eps), dims
        return lambda x: F.rms_norm(_precise(x), shape, eps=_rms_eps(module, x)), dims
    normalise = _like_a_norm(module)
    return None if normalise is None else (normalise, (-1,))


def _precise(x: Tensor) -> Tensor:
    return x.to(stats.accumulator(x.dtype))


def _rms_eps(module: nn.RMSNorm, x: Tensor) -> float:
    return module.eps if module.eps is not None else torch.finfo(x.dtype).eps


# -- modules that nobody has told us about --------------------------------------------------------------------------


def _like_a_norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    weight = module._parameters.get("weight")
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    if (
        "norm" not in type(module).__name__.lower()
        or weight is None
        or weight.dim() != 1
        or not names <= {"weight", "bias"}
    ):
        return None
    # With buffers it may keep statistics of its own, which a trial would change.
    if module._modules or any(buffer is not None for buffer in module._buffers.values()):
        return None
    try:
        return _tried(module, weight.numel())
    except Exception:  # it may want anything: a GPU, further arguments
        return None


@torch.no_grad()
def _tried(module: nn.Module, width: int) -> Callable[[Tensor], Tensor] | None:
    x = torch.arange(2 * 3 * width, dtype=torch.float32).mul(0.7).sin().reshape(2, 3, width) + 0.1
    factors = torch.linspace(0.5, 2, width)
    without, whole = _with_weight(module, torch.zeros(width))(x), _with_weight(module, torch.ones(width))(x)
    if not isinstance(whole, Tensor) or whole.shape != x.shape:
        return None
    alone = _with_weight(module, torch.ones(width))(x[:1])
    other = _with_weight(module, factors)(x)
    multiplies = torch.allclose(other, without + (whole - without) * factors, rtol=1e-4, atol=1e-5)
    if not multiplies or not torch.allclose(alone, whole[:1], rtol=1e-4, atol=1e-5) or math.isnan(float(whole.sum())):
        return None
    adds = bool(without.any())

    def normalise(given: Tensor) -> Tensor:
        values = _precise(given)
        result: Tensor = _with_weight(module, values.new_ones(width))(values)
        return result - _with_weight(module, values.new_zeros(width))(values) if adds else result

    return normalise


def _with_weight(module: nn.Module, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The module's own computation with another weight and no bias, on a shallow copy: the module stays as it is."""
    twin = copy.copy(module)
    others: Sequence[str] = [name for name in module._parameters if name != "weight"]
    bias = {name: None if module._parameters[name] is None else torch.zeros_like(weight) for name in others}
    object.__setattr__(twin, "_parameters", {"weight": weight, **bias})
    forward: Callable[[nn.Module, Tensor], Tensor] = type(module).forward
    return lambda x: forward(twin, x)
