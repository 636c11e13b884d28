"""The places at which data enter a model, and the model as a function of these inputs.

Saliency and robustness both ask what happens to the loss when the data change a little. Numbers, such as an image or a
row of a table, change at the model's input. Tokens cannot change a little, so the vectors change that the model's
`torch.nn.Embedding` looks up for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradvitals.errors import GradvitalsError
from gradvitals.probe.data import Subject, answers_in, map_tensors, parts_of

Path = tuple[str | int, ...]

NOT_DATA = ("mask", "label", "target", "position", "token_type", "length")
"""Parts of the names of arguments that are not the data."""

IGNORED = -100
"""The target that torch's cross entropy ignores."""


class Outcome(NamedTuple):
    """The result of one call of the model."""

    loss: Tensor
    output: Tensor | None
    """The tensor that the model returned, or the logits in it; None if there are none."""


class Opening:
    """The place at which one batch enters the model; `run` calls the model with other values there.

    The place is the first tensor of data that the model is called with. If it holds whole numbers, the place is the
    output of the `torch.nn.Embedding` that looks these numbers up. Only the first call of the model inside the loss
    counts. Hooks are on the model only while it runs.

    Raises:
        GradvitalsError: when the data have no gradient; the message says why.

    Example:
        >>> model, batch = nn.Linear(2, 1), (torch.ones(3, 2), torch.zeros(3, 1))
        >>> opening = Opening(Subject(model, nn.MSELoss(), "output, target", torch.device("cpu")), batch)
        >>> opening.kind, opening.name, tuple(opening.values.shape)
        ('inputs', 'input', (3, 2))
        >>> opening.run(torch.zeros(3, 2)).output.equal(model.bias.expand(3, 1))
        True
    """

    def __init__(self, subject: Subject, batch: Any) -> None:
        self.model = subject.model
        self._loss: Callable[[], Tensor] = lambda: subject.loss(batch)
        target = subject.target(batch)
        self.target: Tensor | None = target if isinstance(target, Tensor) else None
        call, lookups = self._first_call()
        given = list(_tensors(call))
        words = [(" ".join(key.lower() for key in path if isinstance(key, str)), path, t) for path, t in given]
        data = [(path, tensor) for word, path, tensor in words if not any(part in word for part in NOT_DATA)]
        numbers = [(path, tensor) for path, tensor in data if tensor.is_floating_point()]
        if numbers and data[0][0] == numbers[0][0]:
            self.kind, (path, tensor) = "inputs", numbers[0]
            self._index = [each for each, _ in given].index(path)
            self.name, self.values = _argument_name(path), tensor.detach().clone()
            self.ids: Tensor | None = None
        elif lookups:
            # Prefer the embedding that looks up the data themselves over one of positions.
            whole = [t for _, t in data if not t.is_floating_point() and not t.is_complex()]
            chosen = next((one for one in lookups if whole and _equal(one.ids, whole[0])), lookups[0])
            self.kind, self._lookup = "embeddings", chosen
            self.name = next(name for name, module in self.model.named_modules() if module is chosen.module)
            self.values, self.ids = chosen.output.detach().clone(), chosen.ids
        else:
            found = [f"{_argument_name(at)} ({t.dtype}, shape {tuple(t.shape)})" for at, t in given]
            raise GradvitalsError(
                f"the model was called with {', '.join(found[:4]) or 'no tensor'} and called no torch.nn.Embedding; "
                "expected inputs as floating-point numbers, or a model that looks whole numbers up in an Embedding"
            )

    def run(self, values: Tensor) -> Outcome:
        """Call the model with these values at the opening."""
        outputs: list[Any] = []
        with ExitStack() as hooks:
            if self.kind == "inputs":
                replace = _replacing_first_call(self._index, values)
                hooks.callback(self.model.register_forward_pre_hook(replace, with_kwargs=True).remove)
            else:
                module, turn = self._lookup.module, self._lookup.turn
                hooks.callback(module.register_forward_hook(_replacing_output(turn, values)).remove)
            hooks.callback(self.model.register_forward_hook(lambda *call: outputs.append(call[-1])).remove)
            loss = self._loss()
        return Outcome(loss, answers_in(outputs[0]))

    def gradient(self, values: Tensor, score: Callable[[Outcome], Tensor]) -> tuple[Tensor, Outcome]:
        """Returns the gradient of a score with respect to the values, and the outcome, without changing any `.grad`.

        Args:
            values: Where to take the gradient.
            score: Maps the outcome to a number, or to one number per example; their sum is differentiated.
        """
        leaf = values.detach().requires_grad_(True)
        with torch.enable_grad():
            outcome = self.run(leaf)
            number = score(outcome).sum()
            if not number.requires_grad:
                raise GradvitalsError(
                    "the loss does not depend on the data through operations that have a gradient; expected no "
                    "detach(), no torch.no_grad() and no rounding between the model's input and its loss"
                )
            (grad,) = torch.autograd.grad(number, leaf, allow_unused=True)
        output = None if outcome.output is None else outcome.output.detach()
        return torch.zeros_like(leaf) if grad is None else grad.detach(), Outcome(outcome.loss.detach(), output)

    def _first_call(self) -> tuple[Any, list[_Lookup]]:
        """Returns the arguments of the first call of the model, and what its embeddings looked up, in order."""
        calls: list[Any] = []
        lookups: list[_Lookup] = []

        def record_lookup(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if len(calls) == 1 and args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                turn = sum(one.module is module for one in lookups)
                lookups.append(_Lookup(module, turn, args[0].detach(), output))

        def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args, kwargs))

        with ExitStack() as hooks, torch.no_grad():
            hooks.callback(self.model.register_forward_pre_hook(record_call, with_kwargs=True).remove)
            for module in self.model.modules():
                if isinstance(module, nn.Embedding):
                    hooks.callback(module.register_forward_hook(record_lookup).remove)
            self._loss()
        if not calls:
            raise GradvitalsError("the loss did not call the model itself (a method of it, perhaps); expected model()")
        return calls[0], lookups


class _Lookup(NamedTuple):
    module: nn.Module
    turn: int
    """How often this module was called before in this call of the model."""
    ids: Tensor
    output: Tensor


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, and restore every module's flag at the end.

    Dropout and batch statistics would otherwise mix the examples of a batch. cuDNN is off, since its recurrent layers
    have no backward in eval mode, and so is compiled code, which ignores hooks added after its compilation.
    """
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        # If the compiler, which takes seconds to import, is not imported, nothing is compiled.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        with torch.backends.cudnn.flags(enabled=False), eager:
            yield
    finally:
        for module, training in flags:
            module.training = training


def predicts_own_tokens(target: Tensor, tokens: Tensor | None) -> bool:
    """Whether the targets are the model's own tokens, so that the model shifts them itself and predicts the next one.

    >>> predicts_own_tokens(torch.tensor([[-100, 5, 6]]), torch.tensor([[4, 5, 6]]))
    True
    """
    if tokens is None or target.ndim != 2 or target.shape != tokens.shape:
        return False
    return bool((target == tokens.to(target.device))[target != IGNORED].all())


def _replacing_first_call(index: int, values: Tensor) -> Callable[..., Any]:
    """Returns a hook that replaces one of the tensors which the model is first called with."""
    waiting = True

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal waiting
        first, waiting = waiting, False
        places = count()
        return (
            map_tensors((args, kwargs), lambda tensor: values if next(places) == index else tensor) if first else None
        )

    return hook


def _replacing_output(turn: int, values: Tensor) -> Callable[..., Any]:
    calls = -1

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        nonlocal calls
        calls += 1
        return values if calls == turn else None

    return hook


def _tensors(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yields every tensor in nested arguments, in order, with the path to it."""
    if isinstance(tree, Tensor):
        yield path, tree
    else:
        for key, child in (parts_of(tree) or {}).items():
            yield from _tensors(child, (*path, key))


def _argument_name(path: Path) -> str:
    """Returns the name of an argument: its keyword or its position.

    >>> _argument_name((0, 0)), _argument_name((0, 2)), _argument_name((1, "pixel_values")), _argument_name((0, 0, "x"))
    ('input', 'input 2', 'pixel_values', 'x')
    """
    names = [key for key in path if isinstance(key, str)]
    if names:
        return ".".join(names)
    return f"input {path[-1]}" if path[-1] else "input"


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())
