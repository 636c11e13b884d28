"""Where data enters a model, and the model as a function of what enters there.

Saliency and robustness both ask what happens to the loss when the data change a little. Numbers (an image, a row of a
table) change where the model is called. Tokens have no "a little", so the vectors change that the model's first
`torch.nn.Embedding` looks up for them.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradvitals.errors import GradvitalsError, expect
from gradvitals.probe.data import answers_in, checked_loss, parts_of

Where = Literal["auto", "inputs", "embeddings"]
Path = tuple[str | int, ...]

# Arguments by these names say which parts of the data count or what the answer is; they are not the data.
_BESIDE_THE_DATA = ("mask", "label", "target", "position", "token_type", "length")


class CannotPerturb(GradvitalsError):
    """The model has no input with a gradient; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One batch for questions about inputs."""

    loss: Callable[[], Tensor]
    """Calls the model on the batch and returns the loss, one number."""
    target: Tensor | None = None
    """The target: classes, tokens or values. Needed for accuracies and for results per class."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one call of the model."""

    loss: Tensor
    output: Tensor | None
    """The model's output: the tensor it returned, or the logits in it; None if there are none."""


class Opening:
    """Where one batch enters the model; `run` calls the model with other values at that place.

    The place is the first tensor the model is called with that holds data (masks and labels are passed over). Where
    that one is made of whole numbers, it is the output of the `torch.nn.Embedding` that looks these numbers up. Only
    the first call of the model inside the loss is looked at.

    The model is called once to find the place. Hooks are on it only while it is called.

    Example:
        >>> model, x, y = nn.Linear(2, 1), torch.ones(3, 2), torch.zeros(3, 1)
        >>> opening = Opening(model, Sample(loss=lambda: nn.functional.mse_loss(model(x), y)))
        >>> opening.kind, opening.name, tuple(opening.values.shape)
        ('inputs', 'input', (3, 2))
        >>> opening.run(torch.zeros(3, 2)).output.equal(model.bias.expand(3, 1))
        True
    """

    kind: Literal["inputs", "embeddings"]
    name: str
    """Name of the argument, or of the embedding module."""
    values: Tensor
    """The values that enter there, one example per row."""
    ids: Tensor | None
    """For embeddings: the indices that were looked up."""

    def __init__(self, model: nn.Module, sample: Sample, where: Where = "auto") -> None:
        expect(where in ("auto", "inputs", "embeddings"), "where", where, "'auto', 'inputs' or 'embeddings'")
        self._model = model
        self._sample = sample
        call, lookups = self._listen()
        data = [(path, tensor) for path, tensor in _tensors(call) if not _is_beside(path)]
        numbers = [(path, tensor) for path, tensor in data if tensor.is_floating_point()]
        whole = [(path, tensor) for path, tensor in data if not tensor.is_floating_point() and not tensor.is_complex()]
        if where == "auto":
            where = "inputs" if data and numbers and data[0][0] == numbers[0][0] else "embeddings"
        if where == "inputs":
            if not numbers:
                raise CannotPerturb(
                    f"the model was called with {_described(call)}; expected a tensor of floating-point numbers"
                )
            self.kind, (self._path, tensor) = "inputs", numbers[0]
            self.name, self.values, self.ids = _written(self._path), tensor.detach().clone(), None
        else:
            if not lookups:
                raise CannotPerturb(
                    f"the model was called with {_described(call)} and called no torch.nn.Embedding; expected inputs "
                    "as floating-point numbers, or a model that looks whole numbers up in an Embedding"
                )
            given = whole[0][1] if whole else None
            chosen = next((look for look in lookups if given is not None and _same(look.ids, given)), lookups[0])
            self.kind, self._path, self._turn, self._module = "embeddings", (), chosen.turn, chosen.module
            names = {module: name for name, module in model.named_modules()}
            self.name, self.values, self.ids = names[chosen.module], chosen.output.detach().clone(), chosen.ids

    def run(self, values: Tensor | None = None) -> Outcome:
        """Call the model with these values at the opening, or as it stands.

        Args:
            values: as `self.values` in shape. Where they require a gradient, the outcome can be differentiated by them.

        Returns:
            The loss and the output.
        """
        seen: list[Any] = []
        with ExitStack() as hooks:
            if values is not None and self.kind == "inputs":
                hooks.callback(_before_first_call(self._model, lambda call: _replaced(call, self._path, values)).remove)
            elif values is not None:
                hooks.callback(_in_turn(self._module, self._turn, values).remove)
            hooks.callback(self._model.register_forward_hook(lambda module, args, output: seen.append(output)).remove)
            loss = self._sample.loss()
        try:
            return Outcome(loss=checked_loss(loss), output=answers_in(seen[0]))
        except GradvitalsError as error:
            raise CannotPerturb(str(error)) from error

    def gradient(self, values: Tensor, score: Callable[[Outcome], Tensor] | None = None) -> tuple[Tensor, Outcome]:
        """Returns the gradient of a score with respect to the values, without changing any `.grad`.

        Args:
            values: where to take it.
            score: makes a number, or one number an example, of the outcome; their sum is differentiated. The loss
                when not given.

        Returns:
            The gradient, zero for values that have no influence, and the outcome, detached.
        """
        leaf = values.detach().requires_grad_(True)
        with torch.enable_grad():
            outcome = self.run(leaf)
            number = (outcome.loss if score is None else score(outcome)).sum()
            if not number.requires_grad:
                raise CannotPerturb(
                    "the loss does not depend on the data through operations that have a gradient; expected no "
                    "detach(), no torch.no_grad() and no rounding between the model's input and its loss"
                )
            (grad,) = torch.autograd.grad(number, leaf, allow_unused=True)
        output = None if outcome.output is None else outcome.output.detach()
        return torch.zeros_like(leaf) if grad is None else grad.detach(), Outcome(
            loss=outcome.loss.detach(), output=output
        )

    def _listen(self) -> tuple[Any, list[_Lookup]]:
        """Call the model once, and record its arguments and what its embeddings looked up, in order."""
        calls: list[Any] = []
        lookups: list[_Lookup] = []

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if len(calls) == 1 and args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                turn = sum(look.module is module for look in lookups)
                lookups.append(_Lookup(module=module, turn=turn, ids=args[0].detach(), output=output))

        with ExitStack() as hooks, torch.no_grad():
            tables = [module for module in self._model.modules() if isinstance(module, nn.Embedding)]
            hooks.callback(_before_first_call(self._model, calls.append, every=True).remove)
            for table in tables:
                hooks.callback(table.register_forward_hook(note).remove)
            self._sample.loss()
        if not calls:
            raise CannotPerturb("the loss did not call the model itself (a method of it, perhaps); expected model(...)")
        return calls[0], lookups


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, and restore every module's flag at the end.

    Dropout and batch statistics would otherwise mix the examples of a batch, or change between two calls, and a change
    of the data could not be told from them. cuDNN is left out: its recurrent layers have no backward in eval mode.
    Compiled code is too: it does not see hooks that came after it was compiled.
    """
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        # If the compiler, which takes seconds to import, is not imported, nothing is compiled.
        compiled = "torch._dynamo" in sys.modules
        eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with torch.backends.cudnn.flags(enabled=False), eager:
            yield
    finally:
        for module, training in flags:
            module.training = training


@dataclass(frozen=True, kw_only=True)
class _Lookup:
    module: nn.Module
    turn: int
    """Returns how many times this module was called before in this call of the model."""
    ids: Tensor
    output: Tensor


def _before_first_call(model: nn.Module, change: Callable[[Any], Any], *, every: bool = False) -> Any:
    """Returns a hook that passes (args, kwargs) of a call to a function and uses what it returns instead."""
    done = False

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal done
        if done and not every:
            return None
        done = True
        return change((args, kwargs))

    return model.register_forward_pre_hook(hook, with_kwargs=True)


def _in_turn(module: nn.Module, turn: int, values: Tensor) -> Any:
    """Returns a hook that replaces the module's output at its call number `turn`."""
    calls = -1

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        nonlocal calls
        calls += 1
        return values if calls == turn else None

    return module.register_forward_hook(hook)


def _tensors(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yields every tensor in nested arguments, in order, with the path to it."""
    if isinstance(tree, Tensor):
        yield path, tree
    else:
        for key, child in (parts_of(tree) or {}).items():
            yield from _tensors(child, (*path, key))


def _replaced(tree: Any, path: Path, value: Tensor) -> Any:
    """Returns a copy of the nested arguments with another tensor at that path."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(tree, Mapping):
        changed: Any = copy.copy(tree)
        changed[key] = _replaced(tree[key], rest, value)
        return changed
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        named = zip(tree._fields, tree, strict=True)
        return type(tree)(*[_replaced(child, rest, value) if name == key else child for name, child in named])
    if isinstance(tree, (list, tuple)):
        return type(tree)(_replaced(child, rest, value) if at == key else child for at, child in enumerate(tree))
    return dataclasses.replace(tree, **{str(key): _replaced(getattr(tree, str(key)), rest, value)})


def _is_beside(path: Path) -> bool:
    return any(isinstance(key, str) and word in key.lower() for key in path for word in _BESIDE_THE_DATA)


def _written(path: Path) -> str:
    """Returns the name of an argument: its keyword or its position.

    >>> _written((0, 0)), _written((0, 2)), _written((1, "pixel_values")), _written((0, 0, "image"))
    ('input', 'input 2', 'pixel_values', 'image')
    """
    names = [key for key in path if isinstance(key, str)]
    if names:
        return ".".join(names)
    return f"input {path[-1]}" if path[-1] else "input"


def _described(call: Any) -> str:
    found = [f"{_written(path)} ({tensor.dtype}, shape {tuple(tensor.shape)})" for path, tensor in _tensors(call)]
    return ", ".join(found[:4]) or "no tensor that could be found"


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def class_scores(output: Tensor | None, target: Tensor | None) -> Tensor | None:
    """Returns the class to explain each example by, if the output has one score per class and example.

    Args:
        output: of the model.
        target: classes as whole numbers; where it is not given, the class with the highest score counts.

    Returns:
        One class an example, or None where the output is not of that kind.
    """
    if output is None or output.ndim != 2 or output.shape[1] < 2:
        return None
    if target is None:
        return output.argmax(dim=1)
    if target.is_floating_point() or target.shape != output.shape[:1]:
        return None
    fits = bool(((target >= 0) & (target < output.shape[1])).all())
    return target.to(output.device, torch.int64) if fits else None


def first_examples(items: Sequence[Any], most: int, *, of: Callable[[Any], Any]) -> list[Any]:
    """Returns up to `most` items, of as many kinds as possible, in order.

    >>> first_examples(["a1", "a2", "b1"], 2, of=lambda item: item[0])
    ['a1', 'b1']
    """
    turns: dict[Any, int] = {}
    order = []
    for place, item in enumerate(items):
        turn = turns.get(of(item), 0)
        turns[of(item)] = turn + 1
        order.append((turn, place))
    return [items[place] for _, place in sorted(sorted(order)[:most], key=lambda pair: pair[1])]
