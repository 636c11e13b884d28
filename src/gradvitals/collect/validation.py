"""Finds the validation loss of an ordinary loop, and evaluations in training mode."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks as PRE_HOOKS

from gradvitals.collect.wrapper import Wrapper, is_compiled

VALIDATED = (
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss"),
    *("smooth_l1_loss", "huber_loss", "kl_div"),
)
"""Losses of torch.nn.functional whose values count as validation losses."""
MAX_LOSSES = 10_000
"""Losses of one evaluation that are averaged."""
MAX_BLOCKS = 200
"""Blocks without gradients in a row that do not call the model, after which nobody looks any more."""
MAX_SILENT = 20
"""Evaluations in a row without such a loss, after which nobody listens any more."""


class Validation:
    """Finds the validation loss of an ordinary loop: what torch's losses return between model.eval() and model.train().

    A training step costs nothing: only ``nn.Module.train`` is wrapped, and the losses while the model evaluates.

    It also counts how often the script evaluates the model in training mode: calls it under torch.no_grad() while it
    drops activations or uses the statistics of the batch. A hook of torch's, not of the model's, sees the calls while
    such a block is open: the model can be copied and pickled as ever.

    Args:
        model: The model.
        report: Called on the training thread with the mean loss of each evaluation.
    """

    def __init__(self, model: nn.Module, report: Callable[[Tensor], None]) -> None:
        self._model, self._report = weakref.ref(model), weakref.WeakMethod(report)
        self._losses: list[Tensor] = []
        self._silent = 0
        self._evaluations = 0
        self._fed: weakref.ref[Tensor] | None = None
        """First input of the model since the script last built a graph."""
        self._graphs = -1
        """Autograd's count of nodes then."""
        self.has_evaluated = False
        """Whether the script has ever switched the model to evaluation mode."""
        self._block: Any = None
        """The block without gradients that is open."""
        self._blocks = 0
        """Blocks without gradients in a row that did not call the model."""
        _TRAIN.add(self)
        if any(map(_acts_in_training, model.modules())) and not is_compiled():
            for wrapper in _BLOCKS:
                wrapper.add(self)

    @property
    def in_training_mode(self) -> int:
        """Evaluations in training mode so far, with steps between them; a single one may be a dry run."""
        return self._evaluations if self._evaluations > 1 else 0

    def stop(self) -> None:
        """Report what is left, and take everything away."""
        _TRAIN.discard(self)
        self._stop_counting()
        self._switch(True)

    def before_train(self, module: nn.Module, mode: bool = True) -> None:
        """A module is about to switch between training and evaluation."""
        if module is self._model():
            self.has_evaluated |= not mode
            if self.has_evaluated:
                self._stop_counting()
            self._switch(mode)

    def _stop_counting(self) -> None:
        for wrapper in _BLOCKS:
            wrapper.discard(self)
        self._leave_block()

    def before_block(self, block: Any, *_: Any) -> None:
        """Gradients are about to be turned off: by the script, if not by torch."""
        model, frame = self._model(), sys._getframe(3)
        caller = frame.f_globals.get("__name__", "")
        if caller == "torch.utils._contextlib":  # a decorator: of whose function?
            caller = getattr(frame.f_locals.get("func"), "__globals__", {}).get("__name__", "")
        ours = caller.startswith(("torch.", "gradvitals."))
        if ours or model is None or not model.training or self._block is not None:
            return
        self._blocks += 1
        if self._blocks > MAX_BLOCKS or is_compiled():
            self._stop_counting()
        else:  # in this order, no other thread leaves the hook behind
            PRE_HOOKS[id(self)] = self._called
            self._block = block

    def after_block(self, block: Any, *_: Any) -> None:
        """A block without gradients ends."""
        if block is self._block:
            self._leave_block()

    def _leave_block(self) -> None:
        self._block = None
        PRE_HOOKS.pop(id(self), None)

    def _called(self, module: nn.Module, fed: tuple[Any, ...]) -> None:
        """A module is called while a block without gradients is open."""
        if not torch.compiler.is_compiling() and module is self._model():
            with contextlib.suppress(Exception):  # ours, in the middle of the script's own call
                self._count(module, fed[0] if fed else None)

    def _count(self, model: nn.Module, fed: Any) -> None:
        """Count the first call since the script last built a graph, unless the second one has the same input."""
        if torch.is_grad_enabled() or not any(map(_acts_in_training, model.modules())):
            self._leave_block()
            return
        self._blocks = 0
        if (graphs := torch._C._autograd._get_sequence_nr()) != self._graphs:
            self._evaluations += 1
            self._graphs, self._fed = graphs, weakref.ref(fed) if isinstance(fed, Tensor) else None
            return
        self._leave_block()
        if self._fed is not None and fed is not None and fed is self._fed():  # Monte Carlo dropout is meant to drop
            self._evaluations -= 1
        self._fed = None

    def after_loss(self, loss: Any) -> None:
        """A loss was computed while the model evaluates."""
        single = isinstance(loss, Tensor) and loss.numel() == 1 and not loss.requires_grad
        if single and len(self._losses) < MAX_LOSSES and (not self._losses or self._losses[0].device == loss.device):
            self._losses.append(loss.detach().reshape(()).float())
            self._silent = 0

    def _switch(self, trains: bool) -> None:
        for wrapper in _LOSSES:
            wrapper.discard(self)
        losses, self._losses = self._losses, []
        report = self._report()
        if losses and report is not None:
            report(torch.stack(losses).mean())
        if not trains and self._silent < MAX_SILENT and not is_compiled():
            self._silent += 1
            for wrapper in _LOSSES:
                wrapper.add(self)


_TRAIN = Wrapper(nn.Module, "train", before=Validation.before_train)
_BLOCKS = [
    Wrapper(kind, name, before=before)
    for kind in (torch.no_grad, torch.inference_mode)
    for name, before in (("__enter__", Validation.before_block), ("__exit__", Validation.after_block))
]
_LOSSES = [Wrapper(nn.functional, name, after=Validation.after_loss) for name in VALIDATED]


def _acts_in_training(module: nn.Module) -> bool:
    """Whether a layer is in training mode, and acts differently in it."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.training and module.p > 0
    return module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)
