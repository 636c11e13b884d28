"""A model and its batches: how the loss is called, what an example is, and what features and classes are called."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gradvitals.errors import ConfigError, GradvitalsError

MODEL_NAMES = ("model", "net", "network", "module")
BATCH_NAMES = ("batch", "data", "examples", "samples")

Form = Literal["output, target", "output", "model, batch", "own"]
"""How the loss is called; `own` means that the model returns its loss."""


def form_of(loss_fn: Callable[..., Any] | None) -> Form:
    """Returns how a loss function expects to be called, from its signature.

    Returns:
        ``own`` for None; ``model, batch`` if the first argument is called `model`, `net`, `network` or `module`, or
        is annotated as a module; ``output`` for a function of one argument; else ``output, target``.

    Example:
        >>> form_of(nn.MSELoss()), form_of(lambda model, batch: model(batch).mean()), form_of(None)
        ('output, target', 'model, batch', 'own')
    """
    if loss_fn is None:
        return "own"
    if not callable(loss_fn):
        raise GradvitalsError(
            f"loss_fn is {loss_fn!r}; expected loss_fn(output, target), loss_fn(model, batch), or None for a model "
            "that gives its own loss"
        )
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise GradvitalsError(f"loss_fn is the class {loss_fn.__name__}; expected one of it: {loss_fn.__name__}()")
    if isinstance(loss_fn, nn.Module):
        return "output, target"
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # a function that is not written in Python
        return "output, target"
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not placed and variadic:
        return "output, target"
    required = [p.name for p in placed if p.default is p.empty]
    if not placed or len(required) > 2:
        raise GradvitalsError(
            f"loss_fn takes {', '.join(required) or 'no arguments'}; expected loss_fn(output, target) or "
            "loss_fn(model, batch)"
        )
    annotation = placed[0].annotation
    is_module = isinstance(annotation, type) and issubclass(annotation, nn.Module)
    if placed[0].name in MODEL_NAMES or is_module or str(annotation).endswith("Module"):
        return "model, batch"
    if len(placed) == 1 and placed[0].name in BATCH_NAMES and not variadic:
        raise GradvitalsError(
            f"loss_fn takes one argument, {placed[0].name}, and would get the model's output; expected "
            f"loss_fn(model, {placed[0].name}) for a loss that reads the batch itself"
        )
    return "output" if len(placed) == 1 and not variadic else "output, target"


TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Names of targets in batches that are mappings."""

INPUT_KEYS = ("inputs_embeds", "pixel_values", "input_values", "input_features", "input_ids", "inputs", "input", "x")
"""Names of model inputs, most likely first."""

Found = TypeVar("Found")


def map_tensors(batch: Found, change: Callable[[Tensor], Any]) -> Found:
    """Returns the same batch with every tensor changed: tensors, mappings, tuples, named tuples, lists, dataclasses."""
    result: Any
    if isinstance(batch, Tensor):
        result = change(batch)
    elif isinstance(batch, Mapping):
        # Keep the type if its copies are independent: a loss may use methods that a plain dict lacks.
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
    """Yields the tensors of a batch in order."""
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found


def parts_of(tree: Any) -> dict[Any, Any] | None:
    """Returns the parts of a nested object by name or else by position; None if it has no parts."""
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
    """Returns the parts of a batch, or the batch itself if it has none."""
    parts = parts_of(batch)
    return {0: batch} if parts is None else parts


def target_key(batch: Any) -> Any:
    """Returns the name or position of the target; None if there is none or the input is its own target."""
    parts = named(batch)
    key = next((key for key in TARGET_KEYS if key in parts), None)
    if key is not None:
        return key
    # Without known names the last part is the target, as in a DataLoader of pairs.
    told = [key for key, value in parts.items() if tensors_of(value)]
    alone = len(told) == 1 and told[0] != list(parts)[-1]  # (x, names of files) has no target
    return told[-1] if not isinstance(batch, Mapping) and len(parts) > 1 and told and not alone else None


@dataclass(frozen=True)
class Subject:
    """A model, its loss, and how they read a batch."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    form: Form
    device: torch.device
    task: str = "unknown"
    """``classification``, ``regression``, ``language`` or ``unknown``."""

    @property
    def splits(self) -> bool:
        """Whether the output can be computed before the loss."""
        return self.form in ("output, target", "output")

    def move(self, batch: Found) -> Found:
        """Returns the batch on the model's device."""
        return map_tensors(batch, lambda tensor: tensor.to(self.device, non_blocking=True))

    def size(self, batch: Any) -> int:
        """Returns the number of examples: the first dimension of the model's input.

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
        """Returns the examples from `start` to `stop`; parts without a batch dimension stay as they are."""
        size = self.size(batch)
        return map_tensors(batch, lambda t: t[start:stop] if t.dim() and t.shape[0] == size else t)

    def inputs(self, batch: Any) -> Tensor:
        """Returns the first input tensor of the model."""
        value = named(batch)[self._input_key(batch)]
        return value if isinstance(value, Tensor) else tensors_of(value)[0]

    def target(self, batch: Any) -> Any:
        """Returns the target; the batch itself if it is a single tensor; None if there is none."""
        key = target_key(batch)
        if key is not None:
            return named(batch)[key]
        parts = list(named(batch).values())
        return parts[0] if len(parts) == 1 and not isinstance(batch, Mapping) else None

    def raw_output(self, batch: Any, *, with_target: bool = False) -> Any:
        """Returns the model's output for a batch."""
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
        """Returns the tensor of predictions or logits."""
        return logits_of(self.raw_output(batch))

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """Returns the loss of an output that is already computed."""
        if self.loss_fn is None or not self.splits:
            raise GradvitalsError(
                f"the loss is called as {self.form!r} and cannot be had from an output; "
                "expected loss_fn(output, target) for this question"
            )
        # A torch loss expects a tensor; a user's function knows what its model returns.
        if not isinstance(output, Tensor) and isinstance(self.loss_fn, nn.Module):
            output = logits_of(output)
        if self.form == "output":
            return checked_loss(self._called({"output": output}))
        target = self.target(batch)
        return checked_loss(self._called({"output": output, "target": batch if target is None else target}))

    def loss(self, batch: Any) -> Tensor:
        """Returns the scalar loss of a batch, with its graph."""
        if self.form == "own":
            return checked_loss(_own_loss(self.raw_output(batch, with_target=True)))
        if self.form == "model, batch":
            return checked_loss(self._called({"model": self.model, "batch": batch}))
        return self.loss_of(self.raw_output(batch), batch)

    def _called(self, given: dict[str, Any]) -> Any:
        """Returns what loss_fn returns; errors report how it was called."""
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
    """Returns the model inside `torch.compile` or DDP, which share its parameters."""
    while True:
        if "_orig_mod" in model._modules:  # no isinstance: importing the compiler takes seconds
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            model = model.module
        else:
            return model


def checked_loss(loss: Any) -> Tensor:
    """Returns the loss if it is one number that depends on something.

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
    """Returns the predictions in a model's output: the tensor itself, its `logits`, or the first tensor with an axis.

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
    """Returns the same, but does not guess.

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
    """Returns the kind of task, as far as one batch shows it."""
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
    """Returns the parts that the model's forward has a parameter for; all of them if it takes any."""
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


WANTED = "expected a DataLoader or another iterable of batches"


def check_model(model: Any) -> nn.Module:
    """Returns the model if it is one.

    Raises:
        ConfigError: when it is none.
    """
    if not isinstance(model, nn.Module):
        order = "probe(model, loader, loss_fn)"
        raise ConfigError(f"model is {type(model).__name__}; expected a torch.nn.Module first, as in {order}")
    return model


def check_loader(loader: Any) -> None:
    """Reject a data set or a single batch where a loader of batches is expected.

    Raises:
        ConfigError: when it is no loader; it says how to make one.
    """
    kind = type(loader).__name__
    if isinstance(loader, Tensor):
        raise ConfigError(f"loader is a tensor of shape {tuple(loader.shape)}; {WANTED}: x.split(32)")
    if isinstance(loader, Mapping):
        raise ConfigError(f"loader is a mapping with the keys {list(loader)[:8]!r}; {WANTED}: for one batch [batch]")
    # Hugging Face data sets are not subclasses of torch's; do not import their package for this.
    of_rows = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if of_rows or (type(loader).__module__.startswith("datasets.") and hasattr(loader, "__getitem__")):
        raise ConfigError(
            f"loader is {kind}, a data set of single examples; {WANTED}: DataLoader(dataset, batch_size=32)"
        )
    if isinstance(loader, tuple) and len(loader) > 1 and all(isinstance(part, Tensor) for part in loader):
        first = loader[0]
        if any(part.dtype != first.dtype or part.shape[1:] != first.shape[1:] for part in loader):
            shapes = ", ".join(str(tuple(part.shape)) for part in loader)
            raise ConfigError(
                f"loader is a tuple of tensors of shapes {shapes}, which is one batch; {WANTED}: [(x, y)], or "
                "DataLoader(TensorDataset(x, y), batch_size=32)"
            )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ConfigError(f"loader is {kind}; {WANTED}")


class Reading:
    """Reads the first batches of a loader and records, if possible, which examples they hold.

    Args:
        loader: Is not changed; its own generators are put back after reading.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.indices: list[list[int]] | None = None
        """For each batch read, the indices of its examples in the data set; None if the loader does not show them."""

    def first(self, n_batches: int) -> Generator[Any]:
        """Yields at most this many batches."""
        loader = self._recording()
        sampler = getattr(self.loader, "sampler", None)
        holders = (self.loader, sampler, getattr(getattr(self.loader, "batch_sampler", None), "sampler", None))
        generators = [g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)]
        states = [(generator, generator.get_state()) for generator in generators]
        try:
            if n_batches > 0:
                for number, batch in enumerate(loader, 1):
                    yield batch
                    if number == n_batches:
                        break
        finally:
            for generator, state in states:
                generator.set_state(state)

    def of(self, batch: int, size: int) -> list[int | None]:
        """Returns the data set indices of the examples of one batch; None for each if unknown."""
        known = self.indices[batch] if self.indices is not None and batch < len(self.indices) else []
        return [*known] if len(known) == size else [None] * size

    def _recording(self) -> Iterable[Any]:
        """Returns the loader, or a copy that records the indices of its sampler."""
        loader = self.loader
        if (
            not isinstance(loader, DataLoader)
            or type(loader).__iter__ is not DataLoader.__iter__
            or isinstance(loader.dataset, IterableDataset)
            or loader.batch_sampler is None
            or not getattr(loader, "in_order", True)
        ):
            return loader
        self.indices = []
        twin = copy.copy(loader)
        # Bypasses the loader's setter, which forbids this; persistent workers stay with the original.
        vars(twin).update(batch_sampler=_RecordingSampler(loader.batch_sampler, self.indices), _iterator=None)
        return twin


class _RecordingSampler:
    """A batch sampler that records what it yields."""

    def __init__(self, inner: Any, seen: list[list[int]]) -> None:
        self.inner, self.seen = inner, seen

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            known = isinstance(batch, (list, tuple)) and all(isinstance(i, int) for i in batch)
            self.seen.append(list(batch) if known else [])
            yield batch

    def __len__(self) -> int:
        return len(self.inner)


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names to use in the answers: features of a table, classes, and the token behind each number.

    Example:
        >>> names = Names(classes=["cat", "dog"], tokens={7: "seven"}.get)
        >>> names.label(1), names.label(2), names.token(7)
        ('dog', '2', 'seven')
    """

    features: Sequence[str] = ()
    classes: Sequence[str] = ()
    tokens: Callable[[int], str | None] | Sequence[str] | Mapping[int, str] | None = None
    """A list, a dictionary or a function from a number to its text, such as a tokenizer's `convert_ids_to_tokens`."""

    def label(self, number: int) -> str:
        """Returns the name of a class, or its number."""
        return str(self.classes[number]) if 0 <= number < len(self.classes) else str(number)

    def token(self, number: int) -> str:
        """Returns the text of a token, or its number."""
        text: object = None
        if isinstance(self.tokens, Mapping):
            text = self.tokens.get(number)
        elif callable(self.tokens):
            text = self.tokens(number)
        elif self.tokens is not None and 0 <= number < len(self.tokens):
            text = self.tokens[number]
        return str(number) if text is None else str(text)


def names_of(model: Any, loader: Any) -> Names:
    """Returns the names that a data set, a tokenizer or a model carry, if they follow the usual conventions.

    Classes are the `classes` of the data set, as torchvision has them, or the `id2label` of the model's `config`, as
    Hugging Face has them. Tokens are those of a `tokenizer` of the loader's `collate_fn`, of the data set or of the
    model. Features are the `feature_names` of the data set.

    Args:
        model: the model.
        loader: gives the batches.

    Returns:
        The names found; anything unconventional is skipped.
    """
    dataset = getattr(loader, "dataset", None)
    classes = _texts(getattr(dataset, "classes", None))
    id2label = getattr(getattr(model, "config", None), "id2label", None)
    if not classes and isinstance(id2label, Mapping):
        classes = _texts([id2label.get(number) for number in range(len(id2label))])
    holders = (getattr(loader, "collate_fn", None), dataset, model)
    tokenizer = next((found for holder in holders if (found := getattr(holder, "tokenizer", None)) is not None), None)
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    return Names(
        features=_texts(getattr(dataset, "feature_names", None)),
        classes=classes,
        tokens=convert if callable(convert) else None,
    )


def _texts(found: Any) -> list[str]:
    return list(found) if isinstance(found, (list, tuple)) and all(isinstance(item, str) for item in found) else []
