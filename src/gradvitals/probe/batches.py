"""What a batch is: how a model is fed with it, what its target is, how many examples it has."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradvitals.errors import GradvitalsError
from gradvitals.probe.forms import Form, form_of

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Names under which a batch with names keeps what is to be predicted."""

INPUT_KEYS = ("inputs_embeds", "pixel_values", "input_values", "input_features", "input_ids", "inputs", "input", "x")
"""Names of what the model is fed, the most telling first."""

__all__ = ["Form", "Subject", "form_of", "map_tensors", "task_of", "tensors_of", "unwrapped"]

Found = TypeVar("Found")


def map_tensors(batch: Found, change: Callable[[Tensor], Any]) -> Found:
    """The same batch with every tensor changed: tensors, mappings, tuples, named tuples, lists, dataclasses."""
    result: Any
    if isinstance(batch, Tensor):
        result = change(batch)
    elif isinstance(batch, Mapping):
        # Of its own kind, where copies are known to be separate: a loss may want what a plain dict has not.
        result = copy.copy(batch) if isinstance(batch, (dict, UserDict)) else {}
        for key, value in batch.items():
            result[key] = map_tensors(value, change)
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        result = type(batch)(*(map_tensors(value, change) for value in batch))
    elif isinstance(batch, (tuple, list)):
        result = type(batch)(map_tensors(value, change) for value in batch)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        result = dataclasses.replace(batch, **{name: map_tensors(getattr(batch, name), change) for name in fields})
    else:
        result = batch
    return result  # type: ignore[no-any-return]


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of a batch, in order."""
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found


def parts_of(tree: Any) -> dict[Any, Any] | None:
    """The parts of something nested by name, or by place where they have none; None for what has no parts."""
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return dict(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (tuple, list)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def named(batch: Any) -> dict[Any, Any]:
    """The parts of a batch; the batch itself where it has none."""
    parts = parts_of(batch)
    return {0: batch} if parts is None else parts


def target_key(batch: Any) -> Any:
    """The name or place of the target; None where there is none, or the input is its own."""
    parts = named(batch)
    key = next((key for key in TARGET_KEYS if key in parts), None)
    if key is not None:
        return key
    # Without names that tell, what comes last is the target, as a DataLoader of pairs has it.
    told = [key for key, value in parts.items() if tensors_of(value)]
    alone = len(told) == 1 and told[0] != list(parts)[-1]  # (x, names of files) has no target
    return told[-1] if not isinstance(batch, Mapping) and len(parts) > 1 and told and not alone else None


@dataclass(frozen=True)
class Subject:
    """A model, its loss, and how a batch is read by them."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    form: Form
    device: torch.device
    task: str = "unknown"
    """``classification``, ``regression``, ``language`` or ``unknown``."""

    @property
    def splits(self) -> bool:
        """Whether output and loss can be had one after the other."""
        return self.form in ("output, target", "output")

    def move(self, batch: Found) -> Found:
        """The batch on the model's device."""
        return map_tensors(batch, lambda tensor: tensor.to(self.device, non_blocking=True))

    def size(self, batch: Any) -> int:
        """Number of examples: the first dimension of what the model is fed.

        Raises:
            GradvitalsError: when there is no such dimension, it is empty, or that of the target is another.
        """
        shape = self.inputs(batch).shape
        if not shape or shape[0] == 0:
            what = "no examples" if shape else "a tensor without dimensions"
            raise GradvitalsError(
                f"a batch of type {type(batch).__name__} holds {what}; expected examples along the first dimension"
            )
        target = self.target(batch)
        if isinstance(target, Tensor) and self.splits and target.shape[:1] != shape[:1]:
            raise GradvitalsError(
                f"inputs have shape {tuple(shape)} and the target {tuple(target.shape)}; expected as many examples "
                "along the first dimension of both: batches, not single examples; batch_first=True; or "
                "loss_fn(model, batch)"
            )
        return shape[0]

    def take(self, batch: Found, start: int, stop: int) -> Found:
        """The examples from `start` to `stop`; what has no dimension of examples stays as it is."""
        size = self.size(batch)
        return map_tensors(batch, lambda t: t[start:stop] if t.dim() and t.shape[0] == size else t)

    def inputs(self, batch: Any) -> Tensor:
        """The first tensor the model is fed."""
        value = named(batch)[self._input_key(batch)]
        return value if isinstance(value, Tensor) else tensors_of(value)[0]

    def target(self, batch: Any) -> Any:
        """What is to be predicted; the batch itself where it is a single tensor; None where there is none."""
        key = target_key(batch)
        if key is not None:
            return named(batch)[key]
        parts = list(named(batch).values())
        return parts[0] if len(parts) == 1 and not isinstance(batch, Mapping) else None

    def raw_output(self, batch: Any, *, with_target: bool = False) -> Any:
        """What the model returns for a batch."""
        key, parts = target_key(batch), named(batch)
        fed = {name: value for name, value in parts.items() if with_target or name != key or len(parts) == 1}
        if isinstance(batch, Mapping):
            accepted = _accepted(self.model, fed)
        else:
            fed, accepted = {name: value for name, value in fed.items() if tensors_of(value)}, {}
        try:
            return self.model(**accepted) if accepted else self.model(*fed.values())
        except Exception as error:
            how = _called_with(accepted or fed)
            error.add_note(f"gradvitals called the model with {how}, from a batch of type {type(batch).__name__}")
            if self.loss_fn is None:
                error.add_note("loss_fn is None, so the model was given the target too and expected to return its loss")
            raise

    def output(self, batch: Any) -> Tensor:
        """The tensor of predictions or logits."""
        return logits_of(self.raw_output(batch))

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """The loss of an output that is already there."""
        if self.loss_fn is None or not self.splits:
            raise GradvitalsError(
                f"the loss is called as {self.form!r} and cannot be had from an output; "
                "expected loss_fn(output, target) for this question"
            )
        # A loss of torch wants a tensor; a function of the user's knows what its model returns.
        if not isinstance(output, Tensor) and isinstance(self.loss_fn, nn.Module):
            output = logits_of(output)
        if self.form == "output":
            return checked_loss(self._called({"output": output}))
        target = self.target(batch)
        return checked_loss(self._called({"output": output, "target": batch if target is None else target}))

    def loss(self, batch: Any) -> Tensor:
        """The scalar loss of a batch, with its graph."""
        if self.form == "own":
            return checked_loss(_own_loss(self.raw_output(batch, with_target=True)))
        if self.form == "model, batch":
            return checked_loss(self._called({"model": self.model, "batch": batch}))
        return self.loss_of(self.raw_output(batch), batch)

    def _called(self, given: dict[str, Any]) -> Any:
        """What loss_fn returns; an error in it says how it was called."""
        assert self.loss_fn is not None
        try:
            return self.loss_fn(*given.values())
        except Exception as error:
            hint = "" if "model" in given else "; a function whose first argument is called model gets (model, batch)"
            error.add_note(f"gradvitals called loss_fn({', '.join(given)}) with {_called_with(given)}{hint}")
            raise

    def _input_key(self, batch: Any) -> Any:
        parts, target = named(batch), target_key(batch)
        candidates = [key for key in INPUT_KEYS if key in parts] + [key for key in parts if key != target]
        candidates += [*parts] if self.form == "model, batch" or len(parts) == 1 else []
        for key in candidates:
            if tensors_of(parts[key]):
                return key
        raise GradvitalsError(
            f"a batch of type {type(batch).__name__} holds no tensor to feed the model with ({_describe(batch)}); "
            "expected a tensor, (inputs, target), a mapping of tensors, a named tuple or a dataclass: texts are made "
            "tensors by the loader's collate_fn"
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile` or DDP, which share its parameters."""
    while True:
        if "_orig_mod" in model._modules:  # its class is not asked for: to import the compiler takes seconds
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            model = model.module
        else:
            return model


def checked_loss(loss: Any) -> Tensor:
    """The loss, if it is one number that depends on something.

    Raises:
        GradvitalsError: when it is not a tensor or has more than one element.
    """
    if not isinstance(loss, Tensor):
        raise GradvitalsError(f"the loss is {_describe(loss)}; expected a tensor with one element")
    if loss.numel() != 1:
        raise GradvitalsError(
            f"the loss has shape {tuple(loss.shape)}; expected one number: average it, for instance with "
            "reduction='mean' or .mean()"
        )
    return loss.reshape(())


def answers_in(output: Any, *, guess: bool = True) -> Tensor | None:
    """The tensor of predictions in whatever a model returns: itself, its `logits`, or the first that has an axis.

    Args:
        output: of the model.
        guess: whether to look through parts that have names other than `logits` too.
    """
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(found, Tensor):
        return found
    if not guess and not isinstance(output, (tuple, list)):
        return None
    return next((tensor for tensor in tensors_of(output) if tensor.is_floating_point() and tensor.dim()), None)


def logits_of(output: Any) -> Tensor:
    """The same without a guess.

    Raises:
        GradvitalsError: where there is none.
    """
    found = answers_in(output, guess=False)
    if found is None:
        raise GradvitalsError(
            f"the model returned {_describe(output)}; expected a tensor, something with .logits, or a tuple of tensors"
        )
    return found


def task_of(subject: Subject, batch: Any) -> str:
    """What is learnt, as far as one batch tells."""
    target = subject.target(batch)
    with torch.no_grad():
        output = subject.output(batch)
    if not isinstance(target, Tensor):
        return "unknown"
    if target.is_floating_point():
        return "regression" if target.shape == output.shape or target.numel() == output.numel() else "unknown"
    if output.dim() < 2 or target.dim() != output.dim() - 1:
        return "unknown"
    tokens = not subject.inputs(batch).is_floating_point()
    return "language" if tokens and output.dim() >= 3 else "classification"


def _own_loss(output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor) and output[0].numel() == 1:
        return output[0]
    raise GradvitalsError(
        f"loss_fn is None and the model returned {_describe(output)}; expected an output with .loss (does the batch "
        "have 'labels'?), a scalar, or a loss_fn"
    )


def _accepted(model: nn.Module, fed: Mapping[Any, Any]) -> dict[str, Any]:
    """What the model's forward has a name for; all of it where it takes any."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return {str(name): value for name, value in fed.items()}
    return {str(name): value for name, value in fed.items() if name in parameters}


def _called_with(given: Mapping[Any, Any]) -> str:
    return "; ".join(f"{name}: {_describe(value)}" for name, value in given.items())


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, nn.Module):
        return f"the {type(value).__name__}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {list(value)[:8]!r}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
