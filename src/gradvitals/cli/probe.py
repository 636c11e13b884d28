"""`gradvitals probe`: examine a model and its data, from a function that makes them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from gradvitals.cli.output import console, json_option, print_json
from gradvitals.errors import GradvitalsError

QUESTIONS = ("signal", "layers", "samples", "landscape", "saliency", "robustness")
PLACES = ("model", "loader", "loss_fn", "optimizer")
WANTED = "(model, loader), (model, loader, loss), (model, loader, loss, optimizer) or a dict of arguments of gv.probe"


@click.command()
@click.argument("factory")
@click.option(
    "--batches", type=click.IntRange(min=1), help="Batches to take gradients of. [default: the factory's, or 10]"
)
@click.option("--lr", type=float, help="Learning rate, for thresholds and the edge of stability.")
@click.option(
    "--only",
    type=click.Choice(QUESTIONS),
    multiple=True,
    help="Ask only this question; may be given several times. [default: all]",
)
@click.option(
    "--examples", type=click.IntRange(min=2), help="Examples to examine one by one. [default: the factory's, or 256]"
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Move the model there. [default: where it is]"
)
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page with charts.")
@json_option
def probe(
    factory: str,
    batches: int | None,
    lr: float | None,
    only: tuple[str, ...],
    examples: int | None,
    device: str | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Examine the model and the data that FACTORY returns, without training.

    FACTORY is `package.module:function`, found from the current folder. The function takes no arguments and returns
    (model, loader) for a model that returns its loss, (model, loader, loss), (model, loader, loss, optimizer), or a
    dict of arguments of gv.probe. What it and the model print goes to stderr.

    \b
    Example:
      gradvitals probe examples.probe_factory:factory
      gradvitals probe examples.probe_factory:factory --lr 0.1 --html probe.html
      gradvitals probe examples.probe_factory:factory --only samples --json | jq .samples.suspects
    """
    from gradvitals.probe.examination import probe as examine

    if html is not None and not (html.parent.is_dir() and os.access(html if html.exists() else html.parent, os.W_OK)):
        raise click.BadParameter(f"cannot write {html}; expected a writable folder", param_hint="--html")
    asked = [question for question in QUESTIONS if question in only] or None
    given = {"n_batches": batches, "examples": examples, "lr": lr, "questions": asked}
    with contextlib.redirect_stdout(sys.stderr):
        arguments = _made_by(factory)
        if device is not None:
            arguments["model"].to(_device(device))
        if not sys.stderr.isatty():
            arguments.setdefault("progress", _Lines())  # a bar needs a terminal
        found = examine(**{**arguments, **{name: value for name, value in given.items() if value is not None}})
    if html is not None:
        found.save_html(html)
        click.echo(f"wrote {html}", err=True)
    if as_json:
        print_json(found.to_dict())
    else:
        from gradvitals.report.probe_terminal import render_probe

        console().print(render_probe(found.record()))


class _Lines:
    """Prints a line to stderr whenever another part begins."""

    def __init__(self) -> None:
        self.part = ""

    def __call__(self, done: int, total: int, label: str) -> None:
        part = label.split()[0]
        if part != self.part:
            self.part = part
            click.echo(f"{done} of {total}: {label}", err=True)


def _made_by(path: str) -> dict[str, Any]:
    """Returns the arguments of `gv.probe` that a factory function makes; finds modules in the current folder too."""
    from torch import nn

    from gradvitals.probe.examination import probe as examine

    made = _function(path)()
    if isinstance(made, Mapping):
        arguments = {str(key): value for key, value in made.items()}
    elif isinstance(made, (tuple, list)) and 2 <= len(made) <= len(PLACES):
        arguments = dict(zip(PLACES, made, strict=False))
    else:
        raise GradvitalsError(f"{path} returned {type(made).__name__}; expected {WANTED}")
    if not isinstance(arguments.get("model"), nn.Module) or "loader" not in arguments:
        got = type(arguments.get("model")).__name__
        raise GradvitalsError(f"{path} returned a model of type {got}; expected {WANTED}, with a torch.nn.Module first")
    known = list(inspect.signature(examine).parameters)
    unknown = [key for key in arguments if key not in known]
    if unknown:
        raise GradvitalsError(
            f"{path} returned a dict with the key {unknown[0]!r}; expected some of {', '.join(known)}"
        )
    return arguments


def _function(path: str) -> Any:
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise GradvitalsError(f"the factory is {path!r}; expected package.module:function, e.g. train:make_probe")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise GradvitalsError(f"the factory is {path!r}; expected the module without .py: {dotted}:{name}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise GradvitalsError(
            f"there is no module {error.name!r} to import {path!r} from; expected it in {here} or installed"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise GradvitalsError(f"{module_name} has no function {name!r}; expected one that returns {WANTED}")
    needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise GradvitalsError(
            f"{path} takes {', '.join(needed)}; expected a function without arguments that returns {WANTED}"
        )
    return function


def _device(name: str) -> str:
    import torch

    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise GradvitalsError("device is cuda and torch finds no GPU here; expected cpu or auto")
    return ("cuda" if has_gpu else "cpu") if name == "auto" else name
