"""`gradvitals doctor`: is this run healthy, what is wrong with it, and how to fix it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradvitals.cli.output import console, json_option, print_json, replay_bar

if TYPE_CHECKING:
    from gradvitals.types import Severity

SEVERITIES = ("info", "warning", "critical")


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option(
    "--fail-on",
    type=click.Choice(SEVERITIES),
    default="warning",
    show_default=True,
    help="Exit with 1 if a finding weighs this much or more.",
)
@click.option("--again", is_flag=True, help="Replay the stored readings with the current rules.")
@click.option("-v", "--verbose", is_flag=True, help="Show every finding in full.")
@click.option("--all", "all_checks", is_flag=True, help="The same, and list each check that passed or was skipped.")
@click.option("--rules", "list_rules", is_flag=True, help="List every rule with its pattern, instead of judging a run.")
@click.option(
    "--explain",
    "rule",
    metavar="RULE",
    help="Explain one rule, or any other id of a finding: pattern, settings, causes, fixes.",
)
@click.option("--markdown", is_flag=True, help="With --rules: the whole catalog, as in docs/findings.md.")
@json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    run: Path | None,
    fail_on: Severity,
    again: bool,
    verbose: bool,
    all_checks: bool,
    list_rules: bool,
    rule: str | None,
    markdown: bool,
    as_json: bool,
) -> int:
    """Judge RUN: healthy or not, the likely cause, and the fix.

    Works on a finished run and on one that is being written. Needs no torch. Exits with 0 if the run is healthy,
    1 if a finding weighs as much as --fail-on or more, and 2 if it could not look. An open finding weighs as much
    as its severity, a resolved one weighs less, and advice is info.

    \b
    Example:
      gradvitals doctor runs/demo
      gradvitals doctor runs/demo -v
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

    from gradvitals.report.report import Report
    from gradvitals.store.reader import open_run

    with open_run(run) as opened:
        with replay_bar(opened.last_step or 0) as on_step:
            report = Report(opened, again=again, on_step=on_step)
            failed = report.verdict.reaches(fail_on)
        if as_json:
            print_json({**report.to_json(), "fail_on": fail_on, "failed": failed})
        else:
            from gradvitals.report.terminal import render_doctor

            console().print(render_doctor(report, verbose=verbose, all_checks=all_checks))
    return int(failed)


def _show_rules(rule: str | None, *, markdown: bool, as_json: bool) -> None:
    from gradvitals.report import catalog

    if markdown:
        click.echo(catalog.markdown(), nl=False)
        return
    entries = [catalog.entry(rule)] if rule is not None else catalog.entries()
    if as_json:
        described: Any = [entry.to_json() for entry in entries]
        print_json(described[0] if rule is not None else {"rules": described})
    else:
        from gradvitals.report.terminal import render_rule, render_rules

        console().print(render_rules(entries) if rule is None else render_rule(entries[0]))
