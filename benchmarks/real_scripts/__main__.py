"""`python -m benchmarks.real_scripts`: the gate."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from benchmarks.command_line import Command, json_option, print_result, progress_bar
from benchmarks.real_scripts.gate import CASES, format_gate, passes, run_gate
from gradvitals.errors import GradvitalsError


@click.command(cls=Command)
@click.argument("names", nargs=-1)
@click.option("--quick", is_flag=True, help="A handful of scripts that need torch alone, one pair each.")
@click.option("--pairs", type=click.IntRange(min=1), default=3, show_default=True, help="Bare and watched runs each.")
@click.option("--longer", type=click.IntRange(min=1), default=1, show_default=True, help="Train so many times as long.")
@click.option(
    "--scripts",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder that holds the folder nanoGPT.",
)
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="What nanoGPT trains on.")
@json_option
def main(
    names: tuple[str, ...],
    quick: bool,
    pairs: int,
    longer: int,
    scripts: Path | None,
    text: Path | None,
    as_json: bool,
) -> None:
    """Run scripts that know nothing of gradvitals, bare and under `gradvitals run`: all of them, or those NAMED.

    Exits with 1 if one is neither watched nor explained, ends with other weights, or if three verdicts are wrong.

    \b
    Example:
      python -m benchmarks.real_scripts --quick
      python -m benchmarks.real_scripts --scripts ../real --text tinyshakespeare.txt
    """
    known = {case.name: case for case in CASES}
    if unknown := [name for name in names if name not in known]:
        raise GradvitalsError(f"there is no script {unknown[0]!r}; expected one of {', '.join(known)}")
    chosen = [known[name] for name in names] or [case for case in CASES if case.quick or not quick]
    with progress_bar() as progress:
        result = run_gate(
            chosen, pairs=1 if quick else pairs, longer=longer, scripts=scripts, text=text, progress=progress
        )
    print_result(result, as_json, format_gate)
    if not passes(result):
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.real_scripts")
