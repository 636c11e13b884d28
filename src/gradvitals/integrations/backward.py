"""Listening to backward passes: the one place where every loop shows its loss."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradvitals.collect import hooks as torch_hooks
from gradvitals.monitor import Monitor
from gradvitals.worker.worker import print_line


class Backwards:
    """Tells of every backward pass that is not part of another one, while it listens.

    ``torch.autograd.backward``, which ``Tensor.backward`` calls, is wrapped; it does what it did before.

    Args:
        before: Called before a pass.
        after: Called after it with the loss: a single number, unscaled, without its graph; None where there is none.
    """

    def __init__(self, before: Callable[[], None], after: Callable[[Tensor | None], None]) -> None:
        self.ear = Ear()
        self._before = before
        self._after = after
        self._listens = False
        self._undo: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin to listen."""
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if _is_inside() or not self._listens or _is_recorded():
                return original(tensors, grad_tensors, *args, **kwargs)
            self._tell(self._before)
            result = original(tensors, grad_tensors, *args, **kwargs)
            self._tell(lambda: self._after(self._loss(tensors, grad_tensors)))
            return result

        def undo() -> None:
            if torch.autograd.backward is backward:  # someone else may have wrapped it after us
                torch.autograd.backward = original

        self._undo, self._listens = undo, True
        torch.autograd.backward = backward
        torch_hooks.attach(self.ear)

    def stop(self) -> None:
        """Listen no more."""
        if self._listens:
            self._listens = False
            torch_hooks.detach(self.ear)
            self._undo()

    def _tell(self, call: Callable[[], None]) -> None:
        """An error of ours must not become one of the loop's."""
        try:
            if self._listens:
                call()
        except Exception as error:
            self.stop()
            print_line(f"losses are not heard any more: {type(error).__name__}: {error}", False)

    def _loss(self, tensors: Any, grad_tensors: Any) -> Tensor | None:
        """What backward was called on, where it is a loss: single numbers, with nothing to multiply them by."""
        scaler = self.ear.scaled.popleft() if self.ear.scaled else None
        roots = [tensors] if isinstance(tensors, Tensor) else tensors if isinstance(tensors, (list, tuple)) else []
        single = all(isinstance(root, Tensor) and root.numel() == 1 for root in roots)
        if not roots or not single or grad_tensors is not None:
            return None
        first, *others = [root.detach().reshape(()) for root in roots]
        loss = sum((other.to(first.device) for other in others), first)
        return loss if scaler is None or scaler._scale is None else loss / scaler._scale.to(loss.device)


class Ear(threading.local):
    """What else torch's hooks show: scaled losses, lower precision, clipping. Each thread has its own."""

    def __init__(self) -> None:
        self.scaled: deque[torch.amp.GradScaler] = deque(maxlen=64)
        """Scalers that have scaled a loss whose backward pass is still to come."""
        self.scaler: torch.amp.GradScaler | None = None
        self.autocast: dict[str, str] = {}
        """The precision that was first used on each kind of device."""
        self.clipped = False

    def on_loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A loss was scaled."""
        self.scaler = scaler
        self.scaled.append(scaler)

    def on_autocast(self, device: str, dtype: torch.dtype) -> None:
        """A block of lower precision was entered."""
        self.autocast.setdefault(device, str(dtype).removeprefix("torch."))

    def on_clip(self, parameters: Sequence[Tensor], max_norm: float | None = None) -> None:
        """Gradients are about to be clipped."""
        self.clipped = True

    @property
    def asleep(self) -> bool:
        """That the loop clips has to be heard once."""
        return self.clipped

    def on_norm(self, grads: Sequence[Tensor], total: Tensor) -> None:
        """Of no concern here."""

    def on_total_norm(
        self, grads: Sequence[Tensor], norms: Sequence[Tensor] | None, joined: Tensor | None = None
    ) -> None:
        """Of no concern here, as what follows."""

    def before_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """The losses of this step have all been seen."""
        self.scaled.clear()

    def after_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Of no concern here."""

    def on_divided(self, parameters: Sequence[Tensor], factor: float) -> None:
        """Of no concern here."""

    def before_groups_end(self) -> None:
        """Of no concern here."""


def observe_part(monitor: Monitor, loss: Tensor | None) -> None:
    """Tell a Monitor one of the losses whose sum is the loss of the step.

    Gradients of several backward passes add up, so what is descended on is the sum of their losses. A loop that
    accumulates gradients has divided each by their number: the sum is the mean that it would plot.
    """
    monitor.recorder.draft.observed.adds_up = True
    monitor.observe(loss)


def _is_inside() -> bool:
    """Whether a backward pass is going on in this thread: beside a GPU, that of a checkpoint runs in one of torch's."""
    return bool(torch._C._current_graph_task_id() != -1)


def _is_recorded() -> bool:
    """Whether what is called now is compiled or captured, to be done later."""
    return torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
