"""`gradvitals lab vrgd`: does scaling gradients by their signal-to-noise ratio help, when all arms are tuned alike?"""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.cli.lab_sweep import Request, graphs_option, run_request, sweep_options
from gradvitals.cli.lab_vrgd_tasks import clicks, cost, regression, text
from gradvitals.cli.output import json_option, print_json


@click.group()
def vrgd() -> None:
    """VRGD and other uses of the GSNR against their base optimizers, each with its own best learning rate.

    \b
    Example:
      gradvitals lab vrgd regression
      gradvitals lab vrgd cifar --data data --out trials.jsonl
      gradvitals lab vrgd table trials.jsonl
    """


@vrgd.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="FOLDER",
    help="Folder that holds cifar10/train_0.webp, ..., cifar10/test.webp and cifar10/labels.npz.",
)
@sweep_options(
    model="resnet20", batch=4096, optimizer="momentum", models=": resnet20, resnet56, or another of 6n + 2 layers"
)
@click.option(
    "--warmup",
    type=click.FloatRange(0, 1),
    default=0.15,
    show_default=True,
    help="Share of the steps over which the learning rate rises.",
)
@click.option(
    "--smoothing", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="Of the labels, in training."
)
@click.option("--device", type=click.Choice(("auto", "cpu", "cuda")), default="auto", help="Where to train.")
@click.option(
    "--precision",
    type=click.Choice(("auto", "bf16", "float32")),
    default="auto",
    help="Of activations; weights are float32.  [default: bf16 on a GPU]",
)
@click.option(
    "--compile/--no-compile",
    "compiled",
    default=None,
    help="Compile the network for training.  [default: on a GPU]",
)
@graphs_option
def cifar(
    data: Path,
    request: Request,
    warmup: float,
    smoothing: float,
    device: str,
    precision: str,
    compiled: bool | None,
    graphs: bool,
) -> None:
    """Train ResNets on CIFAR-10 with large batches.

    Every arm goes through the same k micro-batches a step, which batch norm sees one at a time. Shifts and mirrors,
    label smoothing, linear warm-up, cosine decay to 0, weight decay on all weights but not on biases and batch norm;
    the last batch of an epoch is dropped where it is not full. The score is the accuracy on the test images.

    \b
    Example:
      gradvitals lab vrgd cifar --data data --arm base --arm vr --arm mean --out trials.jsonl --workers 4
      gradvitals lab vrgd cifar --data data --model resnet56 --batch 8192 --optimizer lars --minutes 9
    """
    from functools import partial

    from gradvitals.lab.device import pick_device
    from gradvitals.lab.vrgd.cifar import CifarSettings, start_lr, train_cifar

    place = pick_device(device)
    on_gpu = place == "cuda"
    chosen = ("bf16" if on_gpu else "float32") if precision == "auto" else precision
    settings = CifarSettings(warmup=warmup, smoothing=smoothing, precision=chosen)
    train = partial(
        train_cifar,
        data=data,
        device=place,
        settings=settings,
        compiled=on_gpu if compiled is None else compiled,
        graphs=graphs,
    )
    run_request(request, train, request.groups("cifar", start_lr), settings.as_dict())


@vrgd.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@json_option
def table(files: tuple[Path, ...], as_json: bool) -> None:
    """Compare the arms of finished trials, from the files that --out wrote.

    \b
    Example:
      gradvitals lab vrgd table trials.jsonl
      gradvitals lab vrgd table cifar.jsonl text.jsonl --json
    """
    from gradvitals.lab.vrgd.records import read_records
    from gradvitals.lab.vrgd.tables import format_tables, summarise

    summary = summarise(record for file in files for record in read_records(file))
    if as_json:
        print_json(summary)
    else:
        click.echo(format_tables(summary))


for command in (text, clicks, regression, cost):
    vrgd.add_command(command)
