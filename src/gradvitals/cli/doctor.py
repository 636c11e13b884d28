"""`gradvitals doctor`: is this run healthy, what is wrong with it, and how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gradvitals.cli.output import console, json_option, print_json, replay_bar, resolve

if TYPE_CHECKING:
    from gradvitals.types import Severity

SEVERITIES = ("info", "warning", "critical")


@click.command()
@click.argument("run", metavar="[RUN]", required=False)
@click.option("-v", "--verbose", is_flag=True, help="Show every finding in full, and problems of gradvitals itself.")
@click.option("--all", "all_checks", is_flag=True, help="Like -v, and list every check that passed or was skipped.")
@click.option(
    "--format",
    "chosen",
    type=click.Choice(("text", "markdown", "json")),
    default="text",
    show_default=True,
    help="Output format; markdown is for issues and chats.",
)
@click.option(
    "--fail-on",
    type=click.Choice(SEVERITIES),
    default="warning",
    show_default=True,
    help="Exit with 1 if a finding is at least this serious.",
)
@click.option("--again", is_flag=True, help="Replay the stored readings with the current rules.")
@click.option("--explain", "rule", metavar="RULE", help="Explain a rule or another finding id; -v adds its settings.")
@click.option("--rules", "list_rules", is_flag=True, help="List every rule.")
@json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    run: str | None,
    verbose: bool,
    all_checks: bool,
    chosen: str,
    fail_on: Severity,
    again: bool,
    rule: str | None,
    list_rules: bool,
    as_json: bool,
) -> int:
    """Diagnose RUN: the verdict, the likely cause, and the fix.

    Works while the run is still training. Needs no torch. Exits with 0 if the run is healthy, 1 if a finding reaches
    --fail-on, and 2 if the run cannot be read.

    \b
    Example:
      gradvitals doctor                       the newest run
      gradvitals doctor runs/gpt -v
      gradvitals doctor --format markdown     to paste into an issue
      gradvitals doctor --explain explosion
    """
    if sum((run is not None, list_rules, rule is not None)) > 1:
        raise click.UsageError("give one of RUN, --rules and --explain RULE.", ctx)
    as_json = as_json or chosen == "json"
    if list_rules or rule is not None:
        if chosen == "markdown":
            raise click.UsageError("--format markdown is for a run; the documentation has a page per rule.", ctx)
        _show_rules(rule, verbose=verbose, as_json=as_json)
        return 0

    from gradvitals.report.report import Report
    from gradvitals.store.reader import open_run

    with open_run(resolve(run)) as opened:
        with replay_bar(opened.last_step or 0) as on_step:
            report = Report(opened, again=again, on_step=on_step)
            failed = report.verdict.reaches(fail_on)
        if as_json:
            print_json({**report.to_json(), "fail_on": fail_on, "failed": failed})
        elif chosen == "markdown":
            from gradvitals.report.markdown import render_markdown

            click.echo(render_markdown(report, verbose=verbose or all_checks), nl=False)
        else:
            from gradvitals.report.terminal import render_doctor

            console().print(render_doctor(report, verbose=verbose, all_checks=all_checks), crop=False)
    return int(failed)


def _show_rules(rule: str | None, *, verbose: bool, as_json: bool) -> None:
    from gradvitals.report import catalog

    entries = [catalog.entry(rule)] if rule is not None else catalog.entries()
    if as_json:
        described: Any = [entry.to_json() for entry in entries]
        print_json(described[0] if rule is not None else {"rules": described})
    else:
        from gradvitals.report.terminal import render_rule, render_rules

        console().print(render_rules(entries) if rule is None else render_rule(entries[0], verbose=verbose))
