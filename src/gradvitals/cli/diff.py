"""`gradvitals diff`: where two runs diverge, and what differs between them."""

from __future__ import annotations

import click

from gradvitals.cli.output import console, json_option, print_json, resolve


@click.command()
@click.argument("first", metavar="[A]", required=False)
@click.argument("second", metavar="[B]", required=False)
@json_option
def diff(first: str | None, second: str | None, as_json: bool) -> None:
    """Compare run A with run B: where they diverge for good, settings, findings.

    With one run, compares it with the newest; with none, compares the two newest runs in gradvitals_runs/ and runs/.
    Needs no torch.

    \b
    Example:
      gradvitals diff runs/before runs/after
      gradvitals diff runs/before
      gradvitals diff runs/before runs/after --json | jq .curves
    """
    from gradvitals.report.diff import diff as compare
    from gradvitals.report.listing import newest_runs

    named = [resolve(name) for name in (first, second) if name is not None]
    if len(named) < 2:
        named = [*named, *newest_runs(2 - len(named), without=named)]
    found = compare(*named)
    if as_json:
        print_json(found.to_json())
    else:
        console().print(str(found), soft_wrap=True)
