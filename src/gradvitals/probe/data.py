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
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gradvitals.errors import ConfigError, GradvitalsError

MODEL_NAMES = ("model", "net", "network", "module")
BATCH_NAMES = ("batch", "data", "examples", "samples")
TARGET_KEYS = ("labels", "label", "targets", "target", "y")
INPUT_KEYS = ("inputs_embeds", "pixel_values", "input_values", "input_features", "input_ids", "inputs", "input", "x")
"""Names of model inputs in batches that are mappings, most likely first."""

LOADER = "expected a DataLoader or another iterable of batches"

Form = Literal["output, target", "output", "model, batch", "own"]
"""How the loss is called; `own` means that the model returns its loss."""

Found = TypeVar("Found")


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
            "that returns its own loss"
        )
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise GradvitalsError(f"loss_fn is the class {loss_fn.__name__}; expected an instance: {loss_fn.__name__}()")
    if isinstance(loss_fn, nn.Module):
        return "output, target"
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # a function that is not written in Python
        return "output, target"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = [p.name for p in positional if p.default is p.empty]
    if len(required) > 2 or not (positional or variadic):
        raise GradvitalsError(
            f"loss_fn takes {', '.join(required) or 'no arguments'}; expected loss_fn(output, target) or "
            "loss_fn(model, batch)"
        )
    if not positional:
        return "output, target"
    first = positional[0]
    is_module = isinstance(first.annotation, type) and issubclass(first.annotation, nn.Module)
    if first.name in MODEL_NAMES or is_module or str(first.annotation).endswith("Module"):
        return "model, batch"
    if len(positional) > 1 or variadic:
        return "output, target"
    if first.name in BATCH_NAMES:
        raise GradvitalsError(
            f"loss_fn takes one argument, {first.name}, and would get the model's output; expected "
            f"loss_fn(model, {first.name}) for a loss that reads the batch itself"
        )
    return "output"


def map_tensors(batch: Found, change: Callable[[Tensor], Any]) -> Found:
    """Returns the same batch with every tensor changed: tensors, mappings, tuples, named tuples, lists, dataclasses."""
    result: Any = batch
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
    return result  # type: ignore[no-any-return]


def tensors_of(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch in order."""
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
    if key is not None or isinstance(batch, Mapping) or len(parts) < 2:
        return key
    # Without known names the last part is the target, as in a DataLoader of pairs; (x, names of files) has none.
    with_tensors = [key for key, value in parts.items() if tensors_of(value)]
    if not with_tensors or (len(with_tensors) == 1 and with_tensors[0] != list(parts)[-1]):
        return None
    return with_tensors[-1]


@dataclass(frozen=True)
class Subject:
    """A model, its loss, and how they read a batch."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    form: Form
    device: torch.device

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
            GradvitalsError: when inputs or target have no such dimension.
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
        parts, target = named(batch), target_key(batch)
        candidates = [key for key in INPUT_KEYS if key in parts] + [key for key in parts if key != target]
        if self.form == "model, batch" or len(parts) == 1:
            candidates += [*parts]
        for key in candidates:
            if found := tensors_of(parts[key]):
                return found[0]
        raise GradvitalsError(
            f"a batch of type {type(batch).__name__} holds no tensor to feed the model with ({_describe(batch)}); "
            "expected a tensor, (inputs, target), a mapping of tensors, a named tuple or a dataclass: the loader's "
            "collate_fn turns text into tensors"
        )

    def target(self, batch: Any) -> Any:
        """Returns the target; the batch itself if it is a single tensor; None if there is none."""
        key, parts = target_key(batch), named(batch)
        if key is not None:
            return parts[key]
        return next(iter(parts.values())) if len(parts) == 1 and not isinstance(batch, Mapping) else None

    def raw_output(self, batch: Any, *, with_target: bool = False) -> Any:
        """Returns the model's output for a batch."""
        key, parts = target_key(batch), named(batch)
        fed = {name: value for name, value in parts.items() if with_target or name != key or len(parts) == 1}
        by_name: dict[str, Any] = {}
        if isinstance(batch, Mapping):
            accepted = inspect.signature(self.model.forward).parameters
            takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
            by_name = {str(name): value for name, value in fed.items() if takes_any or name in accepted}
        else:
            fed = {name: value for name, value in fed.items() if tensors_of(value)}
        try:
            return self.model(**by_name) if by_name else self.model(*fed.values())
        except Exception as error:
            how = _describe_call(by_name or fed)
            error.add_note(f"gradvitals called the model with {how}, from a batch of type {type(batch).__name__}")
            if self.loss_fn is None:
                error.add_note("loss_fn is None, so the model also got the target and should have returned its loss")
            raise

    def output(self, batch: Any) -> Tensor:
        """Returns the tensor of predictions or logits."""
        return logits_of(self.raw_output(batch))

    def loss(self, batch: Any) -> Tensor:
        """Returns the scalar loss of a batch, with its graph."""
        if self.form == "own":
            return checked_loss(_own_loss(self.raw_output(batch, with_target=True)))
        given: dict[str, Any]
        if self.form == "model, batch":
            given = {"model": self.model, "batch": batch}
        else:
            output, target = self.raw_output(batch), self.target(batch)
            # A torch loss expects a tensor; a user's function knows what its model returns.
            if not isinstance(output, Tensor) and isinstance(self.loss_fn, nn.Module):
                output = logits_of(output)
            given = {"output": output}
            if self.form == "output, target":
                given["target"] = batch if target is None else target
        assert self.loss_fn is not None
        try:
            loss = self.loss_fn(*given.values())
        except Exception as error:
            hint = "" if "model" in given else "; a function whose first argument is called model gets (model, batch)"
            error.add_note(f"gradvitals called loss_fn({', '.join(given)}) with {_describe_call(given)}{hint}")
            raise
        return checked_loss(loss)

    def task(self, batch: Any) -> str:
        """Returns ``classification``, ``regression``, ``language`` or ``unknown``, as far as one batch shows it."""
        target = self.target(batch)
        with torch.no_grad():
            output = self.output(batch)
        if not isinstance(target, Tensor):
            return "unknown"
        if target.is_floating_point():
            return "regression" if target.shape == output.shape or target.numel() == output.numel() else "unknown"
        if output.dim() < 2 or target.dim() != output.dim() - 1:
            return "unknown"
        tokens = not self.inputs(batch).is_floating_point()
        return "language" if tokens and output.dim() >= 3 else "classification"


def checked_loss(loss: Any) -> Tensor:
    """Returns the loss if it is a tensor with one element.

    Raises:
        GradvitalsError: when it is not.
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

    Without `guess`, parts with other names than `logits` do not count.
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
    """Returns the predictions in a model's output.

    Raises:
        GradvitalsError: when they would have to be guessed.
    """
    found = answers_in(output, guess=False)
    if found is None:
        raise GradvitalsError(
            f"the model returned {_describe(output)}; expected a tensor, something with .logits, or a tuple of tensors"
        )
    return found


def _own_loss(output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(first, Tensor) and first.numel() == 1:
        return first
    raise GradvitalsError(
        f"loss_fn is None and the model returned {_describe(output)}; expected an output with .loss (does the batch "
        "have 'labels'?), a scalar, or a loss_fn"
    )


def _describe_call(given: Mapping[Any, Any]) -> str:
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


def check_arguments(model: Any, loader: Any) -> None:
    """Check that the model is a module and the loader an iterable of batches.

    Raises:
        ConfigError: when one is something else, such as a data set or a single batch.
    """
    if not isinstance(model, nn.Module):
        order = "probe(model, loader, loss_fn)"
        raise ConfigError(f"model is {type(model).__name__}; expected a torch.nn.Module first, as in {order}")
    kind = type(loader).__name__
    if isinstance(loader, Tensor):
        raise ConfigError(f"loader is a tensor of shape {tuple(loader.shape)}; {LOADER}: x.split(32)")
    if isinstance(loader, Mapping):
        raise ConfigError(f"loader is a mapping with the keys {list(loader)[:8]!r}; {LOADER}: for one batch [batch]")
    # Hugging Face data sets are not subclasses of torch's; do not import their package for this.
    of_rows = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if of_rows or (type(loader).__module__.startswith("datasets.") and hasattr(loader, "__getitem__")):
        raise ConfigError(
            f"loader is {kind}, a data set of single examples; {LOADER}: DataLoader(dataset, batch_size=32)"
        )
    tensors = loader if isinstance(loader, tuple) and all(isinstance(part, Tensor) for part in loader) else ()
    if len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError(
            f"loader is a tuple of tensors of shapes {shapes}, which is one batch; {LOADER}: [(x, y)], or "
            "DataLoader(TensorDataset(x, y), batch_size=32)"
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ConfigError(f"loader is {kind}; {LOADER}")


class Reading:
    """Reads the first batches of a loader and records, if possible, which examples they hold.

    The loader is not changed: its own generators are restored after reading.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.indices: list[list[int]] | None = None
        """For each batch read, the indices of its examples in the data set; None if the loader does not show them."""

    def first(self, n_batches: int) -> Generator[Any]:
        """Yields at most this many batches."""
        loader = self.loader
        if (
            isinstance(loader, DataLoader)
            and type(loader).__iter__ is DataLoader.__iter__
            and not isinstance(loader.dataset, IterableDataset)
            and loader.batch_sampler is not None
            and getattr(loader, "in_order", True)
        ):
            self.indices = []
            twin = copy.copy(loader)
            # Bypasses the loader's setter, which forbids this; persistent workers stay with the original.
            vars(twin).update(batch_sampler=_RecordingSampler(loader.batch_sampler, self.indices), _iterator=None)
            loader = twin
        sampler = getattr(self.loader, "sampler", None)
        holders = (self.loader, sampler, getattr(getattr(self.loader, "batch_sampler", None), "sampler", None))
        generators = [g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)]
        states = [(generator, generator.get_state()) for generator in generators]
        try:
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
    """Returns the names that a data set, a tokenizer or a model carry by convention.

    Classes are the `classes` of the data set, as in torchvision, or the `id2label` of the model's `config`, as in
    Hugging Face. Tokens are those of a `tokenizer` of the loader's `collate_fn`, of the data set or of the model.
    Features are the `feature_names` of the data set.
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
