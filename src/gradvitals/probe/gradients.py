"""The gradient of one loss, without a trace on the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradvitals.errors import GradvitalsError


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have gradients, tied ones once.

    Raises:
        GradvitalsError: when there are none.
    """
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise GradvitalsError(
            f"{type(model).__name__} has no parameter with requires_grad; expected at least one: "
            "call model.requires_grad_(True)"
        )
    odd = [name for name, p in found.items() if p.is_complex()]
    if odd:
        raise GradvitalsError(f"{odd[0]} is complex; expected real parameters: give its parts as torch.view_as_real")
    made_without = [name for name, p in model.named_parameters() if not nn.parameter.is_lazy(p) and p.is_inference()]
    if made_without:
        raise GradvitalsError(
            f"{made_without[0]} was made in inference mode and can have no gradient; expected a model made outside of "
            "torch.inference_mode()"
        )
    return found


class Gradients:
    """Takes gradients of losses; `.grad` is left alone.

    Args:
        parameters: Those to differentiate for.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self._only_backward: bool | None = None

    def __call__(self, loss: Tensor) -> list[Tensor | None]:
        """The gradient for each parameter; None for those the loss does not depend on.

        Raises:
            GradvitalsError: when the loss depends on no parameter at all.
        """
        if not loss.requires_grad:
            raise GradvitalsError(
                "the loss does not depend on any parameter that has requires_grad; expected one that is made from the "
                "model's output, outside of torch.no_grad() and without .detach() or .item()"
            )
        if self._only_backward is None:
            self._only_backward = _is_checkpointed(loss)
        if not self._only_backward:
            return list(torch.autograd.grad(loss, self.parameters, allow_unused=True))
        kept = [p.grad for p in self.parameters]
        try:
            for p in self.parameters:
                p.grad = None
            loss.backward()
            return [p.grad for p in self.parameters]
        finally:
            for p, grad in zip(self.parameters, kept, strict=True):
                p.grad = grad


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of one loss, as `Gradients` takes it."""
    return Gradients(parameters)(loss)


def _is_checkpointed(loss: Tensor) -> bool:
    """Whether `checkpoint(..., use_reentrant=True)` was used: the parameters inside are seen by `backward()` only."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False
