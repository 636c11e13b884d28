"""Exact gradients of single examples, some at a time, within a bound on memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradvitals.probe.batches import Subject, map_tensors, tensors_of
from gradvitals.probe.gradients import gradients
from gradvitals.probe.untouched import same_randomness

SEEDS_A_BATCH = 1_000_003


class _Loss(nn.Module):
    """The loss as a module, so that `functional_call` can give the model other parameters."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model = subject.model
        self.subject = subject

    def forward(self, batch: Any) -> Tensor:
        return self.subject.loss(batch)


class PerExample:
    """Gradients of single examples: by `torch.func.vmap` where the model can, else one after the other.

    Batch norm takes its running statistics, as in eval mode: with those of the batch, one example's gradient would
    depend on the others.

    Args:
        subject: The model and its loss.
        parameters: By name, as in `model.named_parameters()`.
        memory_limit: Bytes that the gradients of one chunk may take, together with about as much for the pass.
    """

    def __init__(self, subject: Subject, parameters: dict[str, nn.Parameter], memory_limit: int) -> None:
        self.subject, self.parameters = subject, parameters
        size = sum(p.numel() * p.element_size() for p in parameters.values())
        self.chunk = max(1, memory_limit // (2 * max(1, size)))
        self.method, self.why = "vmap", ""

    def freeze_batch_norm(self) -> list[str]:
        """Let batch norm use its running statistics; the names of the modules where this changes something."""
        frozen = []
        for name, module in self.subject.model.named_modules():
            if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
                module.eval()
                frozen.append(name)
        return frozen

    def chunks(self, batch: Any, size: int, number: int = 0) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """For some examples at a time: their losses `[n]`, and their gradients `[n, ...]` for each parameter.

        Random numbers are those of the batch's number and the place in it: another pass draws the same.
        """
        start = 0
        whole = self.subject.size(batch)
        per_example = [leaf.dim() > 0 and leaf.shape[0] == whole for leaf in tensors_of(batch)]
        while start < size:
            stop = min(start + self.chunk, size)
            part = self.subject.take(batch, start, stop)
            seed = SEEDS_A_BATCH * number + start
            if self.method == "vmap":
                try:
                    with same_randomness(seed):
                        found = self._by_vmap(part, per_example)
                    yield found
                    start = stop
                    continue
                except torch.cuda.OutOfMemoryError:
                    if self.chunk == 1:
                        raise
                    self.chunk = max(1, self.chunk // 2)
                    continue
                except Exception as error:  # what vmap cannot do is told by errors of many kinds
                    self.method, self.why = "loop", self._reason(error)
            with same_randomness(seed):
                found = self._by_loop(part, stop - start)
            yield found
            start = stop

    def _by_vmap(self, batch: Any, per_example: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
        module = _Loss(self.subject)
        leaves = tensors_of(batch)
        mapped = [0 if own else None for own in per_example]

        def loss_of_one(parameters: dict[str, Tensor], *of_one: Tensor) -> Tensor:
            fed = iter([leaf if dim is None else leaf.unsqueeze(0) for leaf, dim in zip(of_one, mapped, strict=True)])
            one = map_tensors(batch, lambda _: next(fed))
            loss: Tensor = torch.func.functional_call(module, parameters, (one,))
            return loss

        both = torch.func.vmap(torch.func.grad_and_value(loss_of_one), in_dims=(None, *mapped), randomness="different")
        fixed = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        with warnings.catch_warnings():
            # For what has no batching rule, as a recurrent layer, vmap makes a loop of its own and says so.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            found, losses = both(fixed, *leaves)
        return losses.detach(), [found[name] for name in fixed]

    def _by_loop(self, batch: Any, size: int) -> tuple[Tensor, list[Tensor]]:
        losses, rows = [], []
        for i in range(size):
            loss = self.subject.loss(self.subject.take(batch, i, i + 1))
            losses.append(loss.detach())
            rows.append(self._whole(gradients(loss, list(self.parameters.values()))))
        return torch.stack(losses), [torch.stack(column) for column in zip(*rows, strict=True)]

    def _reason(self, error: Exception) -> str:
        """Why it cannot, and a way out where one is known."""
        text = (str(error) or type(error).__name__).strip().splitlines()[0].removeprefix("vmap: ")
        if ".item()" in text or "data-dependent" in text:
            text = "the model, or its loss, looks at values to decide what to do"
        attention = getattr(getattr(self.subject.model, "config", None), "_attn_implementation", None)
        way_out = "; a model made with attn_implementation='eager' may do" if attention not in (None, "eager") else ""
        return (text if len(text) <= 160 else text[:157] + "...") + way_out

    def _whole(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        return [
            torch.zeros_like(p) if grad is None else grad.to_dense() if grad.is_sparse else grad
            for grad, p in zip(grads, self.parameters.values(), strict=True)
        ]
