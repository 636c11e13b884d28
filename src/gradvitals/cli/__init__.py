"""The `gradvitals` command. A subcommand imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

import click

from gradvitals import __version__
from gradvitals.errors import GradvitalsError

COMMANDS = {
    "run": "Run your training script unchanged, and watch it.",
    "doctor": "Diagnose a run: what is wrong, why, and how to fix it.",
    "watch": "Follow a run in the terminal while it trains.",
    "serve": "Show all runs on a live page in the browser.",
    "report": "Print the numbers of a run, or write them as one HTML file.",
    "advise": "Suggest settings for the next run.",
    "diff": "Compare two runs: where they diverge, and what differs.",
    "ls": "List the runs in a folder.",
    "export": "Write the readings of a run as CSV or Parquet.",
    "import": "Import a run from W&B, TensorBoard or a CSV file.",
    "probe": "Examine a model and its data, without training.",
    "mcp": "Serve runs to a coding agent (Model Context Protocol).",
    "demo": "Watch a training run go wrong and get fixed, in a minute.",
    "bench": "Measure what monitoring costs on this machine.",
}
"""Each with what the list of commands shows, in the order of use. Nothing is imported to print it."""
ON_RUNS = ("watch", "serve", "report", "advise", "diff", "ls", "export", "mcp")
MODULES = {"import": "importing", **dict.fromkeys(ON_RUNS, "runs")}
"""Files that are not called like their command."""


class Commands(click.Group):
    """Finds a subcommand in its file; prints an error in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, for the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported now."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"gradvitals.cli.{MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, "import_" if cmd_name == "import" else cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest the one that was likely meant."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else f" Commands: {', '.join(COMMANDS)}."
            raise click.UsageError(f"There is no command '{name}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        """Run and exit: 0 when all went well, 2 with one line on stderr when the request could not be met."""
        exits, name = extra.pop("standalone_mode", True), prog_name or "gradvitals"
        if not exits:
            return super().main(args, name, standalone_mode=False, **extra)
        try:
            result = super().main(args, name, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(2)
        except click.UsageError as error:
            where = f" See '{error.ctx.command_path} --help'." if error.ctx else ""
            _fail(error.format_message() + where)
        except click.ClickException as error:
            _fail(error.format_message())
        except GradvitalsError as error:
            _fail(str(error))
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        except click.Abort:
            sys.exit(130)
        if callable(result):
            result = result()  # a script of the user's, whose errors are its own
        sys.exit(result if isinstance(result, int) else 0)


def _fail(message: str) -> NoReturn:
    click.echo("Error: " + " ".join(message.split()), err=True)
    sys.exit(2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="gradvitals %(version)s")
def main() -> None:
    """Vital signs for training: what is wrong, why, and how to fix it.

    Commands use the newest run in gradvitals_runs/ and runs/ if you do not name
    one.

    \b
    Start here:
      gradvitals run train.py     record a run of your unchanged script
      gradvitals doctor           get the verdict, the cause and the fix
      gradvitals demo             no script yet? one minute on a CPU
    """
