"""The two GSNR functions of the post "Probing gradients", as they stand; they return what they would print.

They keep a copy of every gradient, and go through the batches once each. `gradvitals bench probe` times them beside the
streaming examination, and the tests compare their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Any], Tensor]


def _all_gradients(model: nn.Module, batches: Iterable[Any], loss: Loss, n_batches: int) -> dict[str, list[Tensor]]:
    all_grads: dict[str, list[Tensor]] = {}
    for i, batch in enumerate(batches):
        if i >= n_batches:
            break
        model.zero_grad()
        loss(batch).backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                all_grads.setdefault(name, []).append(param.grad.clone().flatten())
    return all_grads


def check_gradient_snr_perparam(
    model: nn.Module, batches: Iterable[Any], loss: Loss, n_batches: int = 10
) -> dict[str, dict[str, float]]:
    """Median and mean over coordinates of ``mean^2 / (variance + 1e-8)``, and the share below 1, for each tensor."""
    found = {}
    for name, grads in _all_gradients(model, batches, loss, n_batches).items():
        if len(grads) > 1:
            stacked = torch.stack(grads)
            gsnr = (stacked.mean(dim=0) ** 2) / (stacked.var(dim=0) + 1e-8)
            found[name] = {
                "median": gsnr.median().item(),
                "mean": gsnr.mean().item(),
                "below_one": (gsnr < 1.0).float().mean().item(),
            }
    return found


def check_gradient_snr_perlayer(
    model: nn.Module, batches: Iterable[Any], loss: Loss, n_batches: int = 10
) -> dict[str, float]:
    """The mean alone, for each tensor."""
    found = {}
    for name, grads in _all_gradients(model, batches, loss, n_batches).items():
        if len(grads) > 1:
            stacked = torch.stack(grads)
            gsnr = (stacked.mean(dim=0) ** 2) / (stacked.var(dim=0) + 1e-8)
            found[name] = gsnr.mean().item()
    return found
