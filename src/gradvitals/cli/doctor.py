"""`gradvitals doctor`: is this run healthy, what is wrong with it, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradvitals.cli.output import console, json_option, judging_bar, print_json

if TYPE_CHECKING:
    from gradvitals.show.checkup import Checkup
    from gradvitals.types import Severity

SEVERITIES = ("info", "warning", "critical")


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option(
    "--fail-on",
    type=click.Choice(SEVERITIES),
    default="warning",
    show_default=True,
    help="Exit with 1 where something weighs this much or more.",
)
@click.option("--again", is_flag=True, help="Judge the kept readings by the rules of today.")
@click.option("--all", "whole", is_flag=True, help="Name each pattern that is fine or was not judged.")
@click.option("--rules", "list_rules", is_flag=True, help="List every rule with its pattern, instead of judging a run.")
@click.option(
    "--explain",
    "rule",
    metavar="RULE",
    help="Explain one rule, or any other id of a finding: pattern, settings, causes, what to do.",
)
@click.option("--markdown", is_flag=True, help="With --rules: the whole catalogue, as docs/findings.md has it.")
@json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    run: Path | None,
    fail_on: Severity,
    again: bool,
    whole: bool,
    list_rules: bool,
    rule: str | None,
    markdown: bool,
    as_json: bool,
) -> int:
    """Judge RUN: healthy or not, what is wrong since when and why, what to do.

    Works on a finished run and on one that is being written. Needs no torch. Exits with 0 when the run is healthy,
    1 when a finding weighs as much as --fail-on or more, and 2 when it could not look. What goes on weighs as much
    as its severity, what is over weighs less, and advice is info.

    \b
    Example:
      gradvitals doctor runs/demo
      gradvitals doctor runs/demo --all
      gradvitals doctor runs/demo --json --fail-on critical
      gradvitals doctor --rules
      gradvitals doctor --explain explosion
    """
    chosen = [run is not None, list_rules, rule is not None]
    if sum(chosen) != 1:
        raise click.UsageError("give one of RUN, --rules and --explain RULE.", ctx)
    if markdown and (not list_rules or as_json):
        raise click.UsageError("--markdown goes with --rules, and not with --json.", ctx)
    if run is None:
        _show_rules(rule, markdown=markdown, as_json=as_json)
        return 0
    checkup = _examine(run, again=again)
    if as_json:
        print_json({**checkup.to_json(), "fail_on": fail_on, "failed": checkup.verdict.reaches(fail_on)})
    else:
        from gradvitals.show.doctor import render_checkup

        console().print(render_checkup(checkup, whole=whole))
    return int(checkup.verdict.reaches(fail_on))


def _examine(path: Path, *, again: bool) -> Checkup:
    from gradvitals.show.checkup import examine
    from gradvitals.store.reader import open_run

    opened = open_run(path)
    try:
        with judging_bar(opened.last_step or 0) as on_step:
            return examine(opened, again=again, on_step=on_step)
    finally:
        opened.close()


def _show_rules(rule: str | None, *, markdown: bool, as_json: bool) -> None:
    from gradvitals.show import catalogue

    if markdown:
        click.echo(catalogue.markdown(), nl=False)
        return
    entries = [catalogue.entry(rule)] if rule is not None else catalogue.entries()
    if as_json:
        described: Any = [entry.to_json() for entry in entries]
        print_json(described[0] if rule is not None else {"rules": described})
    else:
        from gradvitals.show.doctor import render_rule, render_rules

        console().print(render_rules(entries) if rule is None else render_rule(entries[0]))
