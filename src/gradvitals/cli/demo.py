"""`gradvitals demo`: a training run goes wrong, is diagnosed, and is fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradvitals.cli.output import console, json_option, print_json

if TYPE_CHECKING:
    from rich.console import Console

FAULTS = ("stale", "lr", "none")
"""As in `gradvitals.demo`, which imports torch."""


@click.command()
@click.option(
    "--fault", type=click.Choice(FAULTS), default="stale", show_default=True, help="Bug to plant in the loop."
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=200, show_default=True, help="Optimizer steps per training."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("gradvitals_runs/demo"),
    show_default=True,
    help="Folder for the run, numbered if it already has one.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed for weights and batches.")
@json_option
def demo(fault: str, steps: int, out: Path, seed: int, as_json: bool) -> None:
    """Watch a training run go wrong and get fixed.

    Trains a small transformer on Shakespeare with a bug in the loop, prints the verdict, applies the fix, trains again
    and draws both loss curves. Takes less than a minute on a CPU and needs no network. Ctrl-C stops early.

    \b
    Example:
      gradvitals demo
      gradvitals demo --fault lr --out runs/hot
    """
    screen = console()
    show = (lambda *parts, **style: None) if as_json else screen.print
    about = {"stale": "its loop never calls optimizer.zero_grad()", "lr": "its learning rate is 100 times too high"}
    what = f" This one has a bug: {about[fault]}." if fault in about else ""
    show(f"A small transformer learns Shakespeare, one character at a time.{what}")

    from gradvitals.demo import LEARNING_RATE, DemoSettings, run_demo
    from gradvitals.report.report import Report
    from gradvitals.report.terminal import Curves, render_doctor
    from gradvitals.store.reader import open_run

    settings: dict[str, Any] = {"steps": steps, "seed": seed}
    with _progress(screen, steps, silent=as_json) as on_step:
        first = run_demo(DemoSettings(out=out, fault=fault, **settings), on_step)  # type: ignore[arg-type]
    with open_run(first.path) as run:
        report = Report(run)
        verdict = report.verdict
        show()
        show(render_doctor(report))
    result: dict[str, Any] = {**first.to_json(), "verdict": verdict.to_json()}
    if fault == "none" or first.interrupted:
        show(f"\nThe run is in {first.path}. See it: gradvitals serve")
        if as_json:
            print_json(result)
        return

    proposed = getattr(verdict.fix, "change", {}).get("lr") if fault == "lr" else None
    rate = proposed or LEARNING_RATE
    names = ("without zero_grad()", "with zero_grad()") if fault == "stale" else ("before", f"at a rate of {rate:g}")
    show(f"\nThe same training {names[1]}:")
    fixed_path = first.path.with_name(f"{first.path.name}-fixed")
    with _progress(screen, steps, silent=as_json) as on_step:
        second = run_demo(DemoSettings(out=fixed_path, fault="none", lr=proposed, **settings), on_step)
    with open_run(first.path) as before, open_run(second.path) as after:
        curves = [run.series("loss")[1] for run in (before, after)]
        level = Report(after).verdict
    result["fixed"] = {**second.to_json(), "verdict": level.to_json()}
    ends = [float(sum(curve[-10:]) / max(1, len(curve[-10:]))) for curve in curves]
    result["loss"], result["fixed"]["loss"] = ends
    if as_json:
        print_json(result)
        return
    show()
    show(Curves(curves, [f"Loss {name}" for name in names]))
    show(
        f"\nThe fix lowers the loss after {second.steps} steps from {ends[0]:.2f} to {ends[1]:.2f} "
        "(mean of the last 10 steps).",
        style="bold",
    )
    show(f"\nBoth runs are kept. Next:\n  gradvitals diff {first.path} {second.path}\n  gradvitals serve")


@contextmanager
def _progress(screen: Console, steps: int, *, silent: bool) -> Iterator[Callable[[int, float], None]]:
    """A bar with the loss if the screen can be redrawn, and five lines if it cannot."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from gradvitals.report.live import can_redraw

    if silent or not can_redraw(screen):
        every = max(1, steps // 5)

        def print_line(done: int, loss: float) -> None:
            if not silent and (done % every == 0 or done == steps):
                screen.print(f"  {done:>4} of {steps} steps  loss {loss:.2f}")

        yield print_line
        return
    columns = (
        TextColumn(" "),
        MofNCompleteColumn(),
        TextColumn("steps"),
        BarColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("", total=steps, loss="")
        yield lambda done, loss: bar.update(task, completed=done, loss=f"loss {loss:.2f}")
