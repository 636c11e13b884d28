"""`gradvitals bench`: what monitoring costs on this machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from gradvitals.cli.output import console, json_option, print_json

WORKLOADS = ("mlp", "cnn", "gpt", "gpt-124m", "gpt-1.3b")
VARIANTS = ("bare", "bare again", "watch", "run", "every step", "gv.optim.AdamW", "norm loop", "histograms")
"""Both as in `gradvitals.bench`, which imports torch."""

DEVICES, COUNT = click.Choice(["auto", "cpu", "cuda"]), click.IntRange(min=1)
WORKLOAD_HELP = "Model to train. Repeatable.  [default: all that suit the device]"
VARIANT_HELP = f"What to time besides bare steps: {', '.join(VARIANTS[1:])}. Repeatable.  [default: all]"
MEMORY_HELP = "Let the C library keep freed memory, so page faults do not blur the times."
_option = partial(click.option, show_default=True)


@click.group()
def bench() -> None:
    """Measure what gradvitals costs on this machine.

    \b
    Example:
      gradvitals bench overhead
    """


@bench.command()
@_option("--device", type=DEVICES, default="auto", help="Where to run; auto uses a GPU if there is one.")
@_option("--workload", "workloads", type=click.Choice(WORKLOADS), multiple=True, help=WORKLOAD_HELP)
@_option("--variant", "variants", type=click.Choice(VARIANTS), multiple=True, metavar="VARIANT", help=VARIANT_HELP)
@_option("--compile", "compiled", is_flag=True, help="Time compiled models too.", show_default=False)
@_option("--steps", type=COUNT, default=200, help="Timed steps per variant and round.")
@_option("--rounds", type=COUNT, default=6, help="Rounds, each with new processes; an interval needs at least six.")
@_option("--threads", type=COUNT, help="Torch threads per process.  [default: torch's]")
@_option("--keep-memory/--no-keep-memory", default=True, help=MEMORY_HELP)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown tables.")
@json_option
def overhead(as_markdown: bool, as_json: bool, **options: Any) -> None:
    """Time watched steps against bare steps of the same training loop.

    Each variant runs in its own process, a few steps at a time in turn, and each round starts new processes. "bare
    again" shows the noise of the machine. "plain", "norm" and "full" are the microseconds that recording takes on the
    training thread: for a plain step, for a step that also computes the gradient norm, and for a full reading. All
    workloads and variants take about ten minutes.

    \b
    Example:
      gradvitals bench overhead
      gradvitals bench overhead --workload gpt --variant watch
      gradvitals bench overhead --device cuda --compile --markdown
    """
    from gradvitals.bench import format_markdown, run_overhead

    if as_json and as_markdown:
        raise click.UsageError("got --json and --markdown; expected one of them")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # end the processes that are stopped too
    with _progress() as progress:
        result = run_overhead(progress=progress, **options)
    if as_json:
        print_json(result)
    elif as_markdown:
        click.echo(format_markdown(result))
    else:
        _print_tables(result)


def _print_tables(result: dict[str, Any]) -> None:
    """Print one table per workload, narrow enough for a terminal: the other two formats have more columns."""
    from rich import box
    from rich.table import Table

    from gradvitals.bench import describe_workload, headline, notes, table_rows

    screen = console()
    screen.print(headline(result))
    for found in result["workloads"]:
        rows = table_rows(found)
        shown = [name for name in rows[0] if name not in ("quartiles", "by means", "CPU time")]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in shown:
            table.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[name] for name in shown))
        screen.print()
        screen.print(describe_workload(found), table, *notes(found), sep="\n")


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], object]]:
    """A bar on stderr if that is a terminal, a line per round if it is not."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if not screen.is_terminal:
        yield lambda done, total, text: click.echo(f"{done} of {total} rounds; {text}", err=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)
