"""Shared by integrations: backward passes and their losses, sharded models, values for other logs."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.collect import hooks as torch_hooks
from gradvitals.monitor import Monitor
from gradvitals.worker.worker import print_line


class BackwardPasses:
    """Reports every backward pass that is not part of another one, from `start` to `stop`.

    It wraps ``torch.autograd.backward``, which ``Tensor.backward`` calls.

    Args:
        after: Called after a pass with the loss: one number, unscaled and detached, or None.
        before: Called before a pass with what backward was called on.
        on_error: Called once with an error of these two, after which nothing more is reported.
    """

    def __init__(
        self,
        after: Callable[[Tensor | None], None],
        before: Callable[[Any], None] = lambda _: None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self.events = TorchEvents()
        self._before = before
        self._after = after
        self._on_error = on_error or _print_error
        self._active = False
        self._undo: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Start reporting."""
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            # With a GPU, checkpointed backward runs in a thread of torch's, inside another pass.
            inside = torch._C._current_graph_task_id() != -1
            captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # to run later
            if not self._active or inside or captured or torch.compiler.is_compiling():
                return original(tensors, grad_tensors, *args, **kwargs)
            try:
                self._before(tensors)
            except Exception as error:
                self._fail(error)
            result = original(tensors, grad_tensors, *args, **kwargs)
            try:
                if self._active:
                    self._after(self._loss(tensors, grad_tensors))
            except Exception as error:
                self._fail(error)
            return result

        def undo() -> None:
            if torch.autograd.backward is backward:  # another tool may have wrapped it after us
                torch.autograd.backward = original

        self._undo, self._active = undo, True
        torch.autograd.backward = backward
        torch_hooks.attach(self.events)

    def stop(self) -> None:
        """Stop reporting, and leave torch as it was."""
        self.pause()
        torch_hooks.detach(self.events)
        self._undo()

    def pause(self) -> None:
        """Stop reporting at once, taking no lock: a forked child may call this."""
        self._active = False

    def _fail(self, error: Exception) -> None:
        """Stop after an error of ours, which must not end the training loop."""
        self.stop()
        self._on_error(error)

    def _loss(self, tensors: Any, grad_tensors: Any) -> Tensor | None:
        """Returns the sum of what backward was called on if those are single numbers without gradients of their own."""
        scaled = self.events.scaled
        if not scaled and grad_tensors is None and type(tensors) is Tensor and tensors.dim() == 0:
            return tensors.detach()
        scaler = scaled.popleft() if scaled else None
        roots = [tensors] if isinstance(tensors, Tensor) else tensors if isinstance(tensors, (list, tuple)) else []
        single = all(isinstance(root, Tensor) and root.numel() == 1 for root in roots)
        if not roots or not single or grad_tensors is not None:
            return None
        first, *others = [root.detach().reshape(()) for root in roots]
        loss = sum((other.to(first.device) for other in others), first)
        return loss if scaler is None or scaler._scale is None else loss / scaler._scale.to(loss.device)


class TorchEvents(threading.local, torch_hooks.Listener):
    """Further events of `collect.hooks`: scaled losses, autocast, clipping. Each thread has its own."""

    def __init__(self) -> None:
        self.scaled: deque[torch.amp.GradScaler] = deque(maxlen=64)
        """The scaler of each loss that was scaled and has not gone through backward yet."""
        self.scaler: torch.amp.GradScaler | None = None
        self.autocast: dict[str, str] = {}
        """The first autocast dtype on each device type."""
        self.clipped = False

    def on_loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A loss was scaled."""
        self.scaler = scaler
        self.scaled.append(scaler)

    def on_autocast(self, device: str, dtype: torch.dtype) -> None:
        """The script entered an autocast block."""
        self.autocast.setdefault(device, str(dtype).removeprefix("torch."))

    def on_clip(self, parameters: Sequence[Tensor], max_norm: float | None = None) -> None:
        """Gradients are about to be clipped."""
        self.clipped = True

    def before_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Every scaled loss of this step has gone through backward."""
        self.scaled.clear()


def divisor_of(tensors: Any) -> int | None:
    """Returns the whole number that a loop has divided its loss by; None if it has not."""
    node: Any = tensors.grad_fn if isinstance(tensors, Tensor) and tensors.dim() == 0 else None
    for _ in range(4):  # past the multiplication of a GradScaler, and a change of dtype
        name = "" if node is None else node.name()
        if not name.startswith(("DivBackward", "MulBackward", "ToCopyBackward")):
            return None
        factor = getattr(node, "_saved_other", None)
        if isinstance(factor, Tensor) and factor.dim() == 0 and factor.is_cpu:
            number = float(factor) if name.startswith("Div") else 1 / (float(factor) or math.inf)
            if number >= 2 and abs(number - round(number)) < 1e-6:
                return round(number)
        node = node.next_functions[0][0]
    return None


def _print_error(error: Exception) -> None:
    print_line(f"losses are no longer recorded: {type(error).__name__}: {error}", False)


def sharded_modules(model: nn.Module) -> list[Any]:
    """Returns the parts of a model that `fully_shard` has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [module for module in model.modules() if isinstance(module, kind)] if kind is not None else []


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's class; `fully_shard` replaces the class with a subclass."""
    kind = type(module)
    return kind.__bases__[-1].__name__ if module in sharded_modules(module) else kind.__name__


def show_shards(model: nn.Module) -> None:
    """Make a sharded model show the parameters that its optimizer steps.

    After a forward pass the outermost part still holds gathered parameters, whose memory is freed later; torch gathers
    them again when needed. Do not call this between a forward pass and its backward pass.
    """
    for module in sharded_modules(model):
        module.reshard()


LOGGED = ("grad/norm", "gsnr", "noise_scale", "update/rms")


def newest(monitor: Monitor) -> dict[str, float]:
    """Returns the newest of the `LOGGED` values as ``gradvitals/...``, without those unknown or not finite."""
    latest = monitor.latest
    return {f"gradvitals/{name}": latest[name] for name in LOGGED if math.isfinite(latest.get(name, math.nan))}
