"""`gradvitals probe`: examine a model and its data, from a function that makes them."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import click

from gradvitals.cli.output import console, json_option, print_json

QUESTIONS = ("signal", "layers", "samples", "landscape", "saliency", "robustness")


@click.command()
@click.argument("factory")
@click.option("--batches", type=click.IntRange(min=1), help="Number of batches. [default: the factory's, or 10]")
@click.option("--lr", type=float, help="Learning rate for thresholds and the edge of stability.")
@click.option(
    "--only",
    type=click.Choice(QUESTIONS),
    multiple=True,
    help="Answer only this question. Repeatable. [default: all]",
)
@click.option(
    "--examples", type=click.IntRange(min=2), help="Number of single examples. [default: the factory's, or 256]"
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Move the model to this device. [default: where it is]"
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
    """Examine the model and data that FACTORY returns, without training.

    FACTORY is `package.module:function`, importable from the current folder. The function takes no arguments and
    returns (model, loader) if the model returns its loss, else (model, loader, loss) or (model, loader, loss,
    optimizer), or a dict of arguments for gv.probe. Everything it prints goes to stderr.

    \b
    Example:
      gradvitals probe examples.probe_factory:factory
      gradvitals probe examples.probe_factory:factory --lr 0.1 --html probe.html
      gradvitals probe examples.probe_factory:factory --only samples --json
    """
    from gradvitals.probe.examination import made_by
    from gradvitals.probe.examination import probe as examine

    if html is not None and not (html.parent.is_dir() and os.access(html if html.exists() else html.parent, os.W_OK)):
        raise click.BadParameter(f"cannot write {html}; expected a writable folder", param_hint="--html")
    asked = [question for question in QUESTIONS if question in only] or None
    given = {"n_batches": batches, "examples": examples, "lr": lr, "questions": asked}
    with contextlib.redirect_stdout(sys.stderr):
        arguments = made_by(factory, device)
        if not sys.stderr.isatty():
            arguments.setdefault("progress", _Lines())  # a bar needs a terminal
        found = examine(**{**arguments, **{name: value for name, value in given.items() if value is not None}})
    if html is not None:
        found.save_html(html)
        click.echo(f"wrote {html}", err=True)
    if as_json:
        print_json(found.to_dict())
    else:
        from gradvitals.report.probe import render_probe

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
