"""`gradvitals bench`: what monitoring and keeping a run cost on this machine."""

from __future__ import annotations

import click

from gradvitals.cli.bench_gpu import gpu
from gradvitals.cli.bench_page import page
from gradvitals.cli.bench_ranks import ranks
from gradvitals.cli.output import json_option, print_json

SHAPES = ("mlp", "cnn", "transformer", "gpt-124m", "gpt-1.3b")
OVERHEAD_VARIANTS = (
    "default",
    "norms+gsnr every step",
    "everything every step",
    "norm loop",
    "histograms",
    "bare",
)
PROBE_SHAPES = SHAPES[:4]

STORE_LABELS = {
    "put_ms_median": ("training thread, to hand over one step, median", "ms"),
    "put_ms_p99": ("training thread, to hand over one step, 99th percentile", "ms"),
    "write_ms_per_step": ("writer's thread, to write one step", "ms"),
    "bytes_per_value": ("on disk, everything included", "bytes a value"),
    "bytes_per_value_live": ("the same while it is being written", "bytes a value"),
    "series_ms_warm": ("to read one series of an open run", "ms"),
    "series_ms_cold": ("to open the run, read one series and close it", "ms"),
    "dropped": ("readings dropped", ""),
}

DIAGNOSIS_LABELS = {
    "plain_ms_median": "a plain step (norms of every tensor), median",
    "plain_ms_p99": "a plain step, 99th percentile",
    "full_ms_median": "a step with both GSNR sources, median",
    "mean_ms": "the mean step at the default cadence",
}


device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to run; auto takes a GPU where there is one.",
)


@click.group()
def bench() -> None:
    """Measure what gradvitals costs on this machine.

    \b
    Example:
      gradvitals bench overhead
      gradvitals bench store --json
      gradvitals bench diagnosis
      gradvitals bench guard --device cpu
      gradvitals bench ranks
      gradvitals bench page
    """


@bench.command()
@device_option
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(SHAPES),
    multiple=True,
    help="Model to time; may be given several times. [default: all that suit the device]",
)
@click.option(
    "--variant",
    "variants",
    type=click.Choice(OVERHEAD_VARIANTS),
    multiple=True,
    help="What to time; may be given several times. [default: all]",
)
@click.option("--steps", type=click.IntRange(min=1), help="Timed steps of each kind in a round.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds of bare and monitored steps in turn.")
@click.option(
    "--keep-memory/--no-keep-memory",
    default=True,
    show_default=True,
    help="On a CPU: have the C library keep freed memory, so that page faults do not blur the times.",
)
@json_option
def overhead(
    device: str,
    shapes: tuple[str, ...],
    variants: tuple[str, ...],
    steps: int | None,
    rounds: int | None,
    keep_memory: bool,
    as_json: bool,
) -> None:
    """Time monitored steps against bare steps of the same model, in turn.

    \b
    Example:
      gradvitals bench overhead
      gradvitals bench overhead --variant default --variant bare --rounds 40
      gradvitals bench overhead --device cuda --shape gpt-124m --json
    """
    from gradvitals.lab.overhead import format_overhead, run_overhead

    result = run_overhead(
        device=device,
        shapes=shapes or None,
        variants=variants or None,
        steps=steps,
        rounds=rounds,
        progress=lambda line: click.echo(line, err=True),
        keeps_memory=keep_memory,
    )
    if as_json:
        print_json(result)
    else:
        click.echo(format_overhead(result))


@bench.command()
@json_option
def store(as_json: bool) -> None:
    """Time writing and reading a run in a temporary folder: bytes a value, milliseconds a step.

    \b
    Example:
      gradvitals bench store
    """
    from gradvitals.store.selftest import measure_store

    result = measure_store()
    if as_json:
        print_json(result)
        return
    click.echo("500 tensors x 10 metrics a step; the series is one of 20,000 steps")
    for name, (label, unit) in STORE_LABELS.items():
        click.echo(f"  {label:<52} {result[name]:8.4g} {unit}")


@bench.command()
@click.option("--tensors", type=click.IntRange(min=1), default=500, show_default=True, help="Parameters of the model.")
@json_option
def diagnosis(tensors: int, as_json: bool) -> None:
    """Time the diagnosis of one step on one core, with made-up readings of a healthy run.

    \b
    Example:
      gradvitals bench diagnosis
      gradvitals bench diagnosis --tensors 2000 --json
    """
    from gradvitals.lab.diagnosis import time_diagnosis

    result = time_diagnosis(tensors)
    if as_json:
        print_json(result)
        return
    click.echo(f"{result['rules']} rules, {tensors} tensors; {result['false_alarms']} false alarms in the made-up run")
    for name, label in DIAGNOSIS_LABELS.items():
        click.echo(f"  {label:<52} {result[name]:8.4g} ms")


@bench.command()
@device_option
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(SHAPES),
    multiple=True,
    help="Model to time; may be given several times. [default: gpt-124m on a GPU, all small ones on a CPU]",
)
@click.option("--steps", type=click.IntRange(min=1), default=60, show_default=True, help="Timed steps of a stretch.")
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="Stretches of each kind.")
@json_option
def guard(device: str, shapes: tuple[str, ...], steps: int, rounds: int, as_json: bool) -> None:
    """Time guarded steps of a healthy run against bare ones, and what a snapshot holds up.

    \b
    Example:
      gradvitals bench guard
      gradvitals bench guard --device cuda --shape gpt-124m --json
    """
    from gradvitals.lab.guarding import format_guarding, run_guarding

    result = run_guarding(
        device=device,
        shapes=shapes or None,
        steps=steps,
        rounds=rounds,
        progress=lambda line: click.echo(line, err=True),
    )
    if as_json:
        print_json(result)
    else:
        click.echo(format_guarding(result))


bench.add_command(ranks)
bench.add_command(gpu)
bench.add_command(page)


@bench.command()
@device_option
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(PROBE_SHAPES),
    multiple=True,
    help="Model to examine; may be given several times. [default: all that suit the device]",
)
@click.option("--batches", type=click.IntRange(min=2), default=10, show_default=True, help="Batches of an examination.")
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="Stretches of each kind.")
@click.option("--peers", is_flag=True, help="Instead, gradients of single examples beside Opacus and BackPACK.")
@json_option
def probe(device: str, shapes: tuple[str, ...], batches: int, rounds: int, peers: bool, as_json: bool) -> None:
    """Time and weigh `gv.probe` against bare passes and against functions that keep every gradient.

    \b
    Example:
      gradvitals bench probe
      gradvitals bench probe --device cuda --shape gpt-124m --json
      gradvitals bench probe --peers
    """
    if peers:
        from gradvitals.lab.probe_peers import compare_with_peers, format_peers

        rows = compare_with_peers()
        if as_json:
            print_json(rows)
        else:
            click.echo(format_peers(rows))
        return
    from gradvitals.lab.probing import format_probing, run_probing

    result = run_probing(
        device=device,
        shapes=shapes or None,
        batches=batches,
        rounds=rounds,
        progress=lambda line: click.echo(line, err=True),
    )
    if as_json:
        print_json(result)
    else:
        click.echo(format_probing(result))
