"""`python -m experiments.scale_adaptation`: which tensors can adapt their scale, and what helps those that cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from benchmarks.command_line import Command, device_option, json_option, pick_device, print_json, progress_bar
from experiments.scale_adaptation.figures import draw_figures
from experiments.scale_adaptation.report import format_results, summarise
from experiments.scale_adaptation.run import PARTS, QUICK, Plan, read_results, run_plan


@click.command(cls=Command)
@click.option("--only", "parts", type=click.Choice(PARTS), multiple=True, help="Only this part; may be repeated.")
@click.option("--quick", is_flag=True, help="Very little of everything, on the CPU in about a minute.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    help="Folder with books_train.txt.xz and books_valid.txt.xz; without it, plays that come with the package.",
)
@device_option
@click.option("--steps", type=click.IntRange(min=50), help="Steps of each training of a language model.")
@click.option("--seeds", type=click.IntRange(min=2), help="How often to train with and without multipliers.")
@click.option("--no-graphs", is_flag=True, help="On a GPU, do not replay the passes of a step as one CUDA graph.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep what was found here, as JSON; trainings that it has, made in the same way, are not made again.",
)
@click.option(
    "--reuse",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Do not train: print and draw what --out kept.",
)
@click.option(
    "--figures",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Draw the figures into this folder, as SVG.",
)
@json_option
def main(
    parts: tuple[str, ...],
    quick: bool,
    data: Path | None,
    device: str,
    steps: int | None,
    seeds: int | None,
    no_graphs: bool,
    out: Path | None,
    reuse: Path | None,
    figures: Path | None,
    as_json: bool,
) -> None:
    """See which tensors can adapt their scale under weight decay, and what tells it beforehand.

    First a simulation: tensors of several shapes under noise over seven orders of magnitude. Then small language models
    in which the scale that each tensor needs is changed in turn, beside what AdamW does on pure noise, and which of
    four numbers tells who follows. Last the same model with and without learnable multipliers.

    The simulation takes about a minute on one core; the trainings want a GPU, and take two minutes on a large one.

    \b
    Example:
      python -m experiments.scale_adaptation --quick
      python -m experiments.scale_adaptation --only simulation --figures figures
      python -m experiments.scale_adaptation --device cuda --data data --out scale.json
      python -m experiments.scale_adaptation --reuse scale.json --figures figures
    """
    if reuse is not None and (out is not None or parts or quick):
        raise click.UsageError("--reuse trains nothing; give it without --out, --only and --quick.")

    if reuse is not None:
        results = read_results(reuse)
    else:
        plan = QUICK if quick else Plan()
        plan = replace(plan, parts=tuple(part for part in PARTS if not parts or part in parts))
        if steps is not None:
            plan = replace(plan, size=replace(plan.size, steps=steps), cure_steps=steps)
        if seeds is not None:
            plan = replace(plan, cure_seeds=seeds)
        with progress_bar() as progress:
            results = run_plan(
                plan,
                data=data,
                device="cpu" if quick and device == "auto" else pick_device(device),
                out=out,
                graphs=not no_graphs,
                progress=progress,
            )
    drawn = draw_figures(results, figures) if figures is not None else []
    if as_json:
        print_json({**summarise(results), "figures": [str(path) for path in drawn]})
    else:
        click.echo(format_results(results))
        for path in drawn:
            click.echo(f"drawn: {path}")


if __name__ == "__main__":
    main(prog_name="python -m experiments.scale_adaptation")
