"""`gradvitals demo`: watch a real training run for half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gradvitals.cli.output import console, json_option, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gradvitals.demo import DemoResult
    from gradvitals.report.report import Report
    from gradvitals.report.summary import Summary


@click.command()
@click.option("--steps", type=click.IntRange(min=1), default=300, show_default=True, help="Optimizer steps to train.")
@click.option("--fault/--no-fault", default=True, help="Plant one corrupted batch on the way.  [default: fault]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Where to keep the run; a number is added where there is one already.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of weights and batches.")
@json_option
def demo(steps: int, fault: bool, out: Path, seed: int, as_json: bool) -> None:
    """Train a small transformer on Shakespeare and watch its vital signs.

    Runs on the CPU in under a minute, with text that comes with the package. On the way one batch is corrupted
    (random targets, the loss scaled up), so that there is something to find. Ctrl-C ends it early and keeps
    what there is.

    \b
    Example:
      gradvitals demo
      gradvitals demo --no-fault --steps 100 --out runs/calm
    """
    screen = console()
    if not as_json:
        screen.print("Training a small transformer on Shakespeare, one character at a time ...")

    from gradvitals.demo import DemoSettings, run_demo
    from gradvitals.report.live import live_view
    from gradvitals.report.report import Report
    from gradvitals.store.reader import open_run

    settings = DemoSettings(out=out, steps=steps, seed=seed, fault=fault)
    if as_json:
        result = run_demo(settings, lambda step, loss, latest: None)
    else:
        with live_view(screen, steps) as view:
            result = run_demo(settings, view.update)
    with open_run(result.path) as run:
        report = Report(run)
        if as_json:
            print_json({**result.to_json(), "report": report.summary_json()})
        else:
            for line in _closing(result, report):
                screen.print(line, soft_wrap=isinstance(line, str))


def _closing(result: DemoResult, report: Report) -> Iterator[RenderableType]:
    from gradvitals.report.format import duration, number
    from gradvitals.report.terminal import findings_section

    summary = report.summary
    early = " (stopped early)" if result.interrupted else ""
    yield ""
    yield f"{result.steps} steps in {duration(result.seconds)}{early}, {result.num_parameters:,} parameters."
    for metric, label in (("loss", "Loss"), ("grad/norm", "Gradient norm"), ("gsnr", "GSNR")):
        trend = summary.trend(metric)
        if trend is not None:
            yield f"{label} went from {number(trend.first)} to {number(trend.latest)}{_of(summary, metric)}."
    spike = summary.largest_spike
    if spike is not None:
        planted = ", where the corrupted batch was planted" if spike.step == result.fault_step else ""
        yield f"Largest spike: {number(spike.ratio)} times the moving average at step {spike.step}{planted}."
        if spike.layers:
            yield "Hit most: " + ", ".join(f"{layer.name} ({number(layer.value)}x)" for layer in spike.layers) + "."
    scale = summary.noise_scale
    if scale.identifiable:
        yield f"Noise scale: {number(scale.value)} samples (95%: {number(scale.low)} to {number(scale.high)})."
    else:
        yield "Noise scale: not identifiable from these readings."
    yield ""
    yield from findings_section(report)
    yield ""
    yield f"Kept in {result.path}. Next:"
    yield f"  gradvitals doctor {result.path}"
    yield f"  gradvitals report {result.path}"
    yield f"  gradvitals export {result.path} --csv -"


def _of(summary: Summary, metric: str) -> str:
    if metric != "gsnr" or summary.gsnr_batch_size is None:
        return ""
    return f" (source {summary.gsnr_source}, batch size {summary.gsnr_batch_size:g})"
