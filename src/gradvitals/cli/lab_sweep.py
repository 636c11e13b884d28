"""The options that all learning-rate sweeps of the VRGD lab share, and how their result is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradvitals.cli.output import json_option, print_json
from gradvitals.cli.progress import progress_bar
from gradvitals.lab.vrgd.trial import ARMS, GAMMA_SCHEDULES, OPTIMIZERS

if TYPE_CHECKING:
    from gradvitals.lab.vrgd.sweep import Train
    from gradvitals.lab.vrgd.trial import Trial

Command = Callable[..., Any]

graphs_option = click.option(
    "--graphs/--no-graphs",
    default=True,
    show_default=True,
    help="On a GPU, replay the passes of a step as one CUDA graph.",
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `sweep_options` read from the command line."""

    model: tuple[str, ...]
    batch: tuple[int, ...]
    optimizer: tuple[str, ...]
    arm: tuple[str, ...]
    k: tuple[int, ...]
    gamma: tuple[float, ...]
    gamma_schedule: tuple[str, ...]
    epochs: float
    weight_decay: float
    lr: float | None
    span: int
    reach: int
    refine: int
    sweep_seeds: int
    seeds: int
    out: Path | None
    workers: int
    minutes: float | None
    as_json: bool

    def groups(self, task: str, start_lr: Callable[[str, int], float]) -> list[Trial]:
        """The arms to sweep; `start_lr` (by optimizer and batch) says where, unless --lr does."""
        from gradvitals.lab.vrgd.groups import make_groups

        return make_groups(
            task,
            models=self.model,
            batches=self.batch,
            optimizers=self.optimizer,
            arms=self.arm,
            ks=self.k,
            epochs=self.epochs,
            weight_decay=self.weight_decay,
            start_lr=(lambda optimizer, batch: self.lr or start_lr(optimizer, batch)),
            gammas=self.gamma,
            gamma_schedules=self.gamma_schedule,
        )


def sweep_options(
    *,
    model: str,
    batch: int,
    optimizer: str,
    epochs: float = 24,
    weight_decay: float = 5e-4,
    length: str = "Epochs of a trial.",
    models: str = "",
) -> Callable[[Command], Command]:
    """Options of a sweep; the command receives them as one `Request` in its argument `request`.

    Args:
        model: Default of --model, and so on for the others.
        batch: Samples of a step.
        optimizer: By name.
        epochs: Length of a trial.
        weight_decay: Of matrices and kernels.
        length: Help of --epochs.
        models: Which there are, for the help.
    """
    many: dict[str, Any] = {"multiple": True, "show_default": True}
    one: dict[str, Any] = {"show_default": True}
    options = [
        click.option("--model", default=(model,), help=f"Which model{models}; may be given several times.", **many),
        click.option(
            "--batch", type=click.IntRange(min=2), default=(batch,), help="Samples of a step; several times.", **many
        ),
        click.option(
            "--optimizer",
            type=click.Choice(OPTIMIZERS),
            default=(optimizer,),
            help="Base optimizer; several times.",
            **many,
        ),
        click.option(
            "--arm",
            type=click.Choice(ARMS),
            default=("base", "vr"),
            help="What is done to its gradients; several times.",
            **many,
        ),
        click.option(
            "--k", type=click.IntRange(min=2), default=(8,), help="Micro-batches of a step; several times.", **many
        ),
        click.option(
            "--gamma",
            type=click.FloatRange(0, 1),
            multiple=True,
            help="Smallest factor; several times.  [default: 0.1, and 0 for wiener arms]",
        ),
        click.option(
            "--gamma-schedule",
            type=click.Choice(GAMMA_SCHEDULES),
            default=("constant",),
            help="How gamma changes: from 1 down to --gamma in a line or as a cosine, or with the tensor's GSNR "
            "(adaptive, for arm vr); several times.",
            **many,
        ),
        click.option("--epochs", type=click.FloatRange(min=0, min_open=True), default=epochs, help=length, **one),
        click.option(
            "--weight-decay",
            type=click.FloatRange(min=0),
            default=weight_decay,
            help="Of matrices and kernels; biases and gains have none.",
            **one,
        ),
        click.option(
            "--lr",
            type=click.FloatRange(min=0, min_open=True),
            metavar="START",
            help="Middle of the grid of learning rates.  [default: by optimizer and batch]",
        ),
        click.option(
            "--span", type=click.IntRange(min=0), default=2, help="Factors of 2 in the grid, down and up.", **one
        ),
        click.option(
            "--reach",
            type=click.IntRange(min=0),
            default=6,
            help="Factors of 2 to go on at most while the best is at an end of what was tried.",
            **one,
        ),
        click.option(
            "--refine",
            type=click.IntRange(0, 3),
            default=1,
            help="Then halve the distance around the best so often: 1 tries factors of the root of 2.",
            **one,
        ),
        click.option(
            "--sweep-seeds",
            type=click.IntRange(1, 100),
            default=1,
            help="Trials that a learning rate must lead with before it counts as the best.",
            **one,
        ),
        click.option(
            "--seeds", type=click.IntRange(min=0), default=3, help="Fresh seeds at the best learning rate.", **one
        ),
        click.option(
            "--out",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Add finished trials to this file; those it has are not run again.",
        ),
        click.option("--workers", type=click.IntRange(min=1), default=1, help="Trials at once.", **one),
        click.option(
            "--minutes",
            type=click.FloatRange(min=0),
            help="Begin no trial that would likely not end by then.",
        ),
        json_option,
    ]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_request(**given: Any) -> Any:
            request = Request(**{field.name: given.pop(field.name) for field in fields(Request)})
            return command(request=request, **given)

        wrapped: Command = with_request
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return decorate


def run_request(
    request: Request, train: Train, groups: list[Trial], settings: Mapping[str, float | str] | None = None
) -> None:
    """Sweep, tell how far it is, and print the tables. Ends with status 1 if trials failed."""
    from gradvitals.lab.vrgd.sweep import Plan, describe, run_sweep
    from gradvitals.lab.vrgd.tables import format_tables, summarise

    plan = Plan(
        span=request.span,
        reach=request.reach,
        refine=request.refine,
        sweep_seeds=request.sweep_seeds,
        seeds=request.seeds,
    )
    with progress_bar() as progress:
        outcome = run_sweep(
            train,
            groups,
            plan=plan,
            out=request.out,
            settings=settings,
            workers=request.workers,
            minutes=request.minutes,
            progress=progress,
        )
    summary = summarise(outcome.records)
    if request.as_json:
        print_json(summary)
    else:
        click.echo(format_tables(summary))
    if outcome.left:
        again = "; run the same again to go on" if request.out is not None else ""
        click.echo(f"out of time with {outcome.left} or more trials left{again}", err=True)
    for trial, error in outcome.failures:
        click.echo(f"failed: {describe(trial)}: {error}", err=True)
    if outcome.failures:
        click.get_current_context().exit(1)
