"""The `gradvitals` command. Each subcommand is a file of this folder, and imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from gradvitals import __version__
from gradvitals.errors import GradvitalsError

COMMANDS = ("demo", "run", "report", "watch", "serve", "doctor", "advise", "probe", "export", "import", "bench")
"""In the order a new user meets them."""


class Commands(click.Group):
    """Finds a subcommand in the file of its name; says what went wrong in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, for the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported now."""
        if cmd_name not in COMMANDS:
            return None
        file, name = ("importing", "import_") if cmd_name == "import" else (cmd_name, cmd_name)  # a word of Python's
        command: click.Command = getattr(import_module(f"gradvitals.cli.{file}"), name)
        return command

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run and exit: 0 when all went well, 2 with one line on stderr when the request could not be met."""
        extra["windows_expand_args"] = windows_expand_args
        name = prog_name or "gradvitals"
        if not standalone_mode:
            return super().main(args, name, complete_var, standalone_mode=False, **extra)
        try:
            result = super().main(args, name, complete_var, standalone_mode=False, **extra)
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
    """Vital signs for neural-network training.

    \b
    Try it:
      gradvitals demo
      gradvitals report runs/demo
    """
