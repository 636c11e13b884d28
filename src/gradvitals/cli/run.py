"""`gradvitals run`: a training script as it is, watched."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import click

from gradvitals.places import RUNS_FOLDER


class OptionsFirst(click.Command):
    """Explains where an unknown option belongs: most likely it is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read our options, which stand before the script."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            raise click.UsageError(
                f"gradvitals run has no option {name}. Options of the script come after it: "
                f"gradvitals run train.py {name} ...",
                ctx,
            ) from None


@click.command(cls=OptionsFirst, context_settings={"allow_interspersed_args": False})
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module name, as with python -m.")
@click.option(
    "--run",
    "--out",  # torchrun mistakes --run for one of its own options, wherever it stands
    "folder",
    type=click.Path(path_type=Path),
    help="Folder for the run, numbered if it already has one.  [default: gradvitals_runs/DATE_TIME]",
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    metavar="N",
    help="Read every tensor every N steps.",
)
@click.option(
    "--sink", "sinks", multiple=True, metavar="SINK", help="Also send readings to SINK, such as tensorboard:logs."
)
@click.option(
    "--alert",
    "alerts",
    multiple=True,
    metavar="ALERT",
    help="Send findings to a webhook URL, or to command:PROGRAM.",
)
@click.option("--quiet", is_flag=True, help="Do not print findings or the verdict.")
@click.argument("script", required=True)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    is_module: bool,
    folder: Path | None,
    every: int,
    sinks: tuple[str, ...],
    alerts: tuple[str, ...],
    quiet: bool,
    script: str,
    args: tuple[str, ...],
) -> Callable[[], None]:
    """Run the training SCRIPT with its ARGS, and watch it. The script needs no edits.

    gradvitals finds models and optimizers when training starts, and records the loss that the script calls backward()
    on. Options come before SCRIPT; everything after it goes to the script. Its input, output, errors and exit status
    stay the same. Findings and the verdict go to stderr.

    \b
    Example:
      gradvitals run train.py --lr 3e-4
      gradvitals run --run runs/big -m mypackage.train --config big.toml
      torchrun --nproc_per_node=2 -m gradvitals run --out runs/two train.py
    """
    from gradvitals.integrations.zero_code.program import Launch, Program, Settings

    _check(sinks, alerts)
    place = folder if folder is not None else Path(RUNS_FOLDER) / time.strftime("%Y-%m-%d_%H-%M-%S")
    settings = Settings(
        run=Path.cwd() / place,  # the script may go elsewhere
        program=f"-m {script}" if is_module else script,
        every=every,
        sinks=sinks,
        alerts=alerts,
        quiet=quiet,
    )
    return Launch(Program(script, args, is_module), settings)


def _check(sinks: tuple[str, ...], alerts: tuple[str, ...]) -> None:
    """Report a text that means nothing before the script starts."""
    for package, texts in (("sinks", sinks), ("alerts", alerts)):
        for text in texts:
            import_module(f"gradvitals.{package}").from_text(text)
