"""A probe's record for the terminal. Names come from outside: they are printed as text, never as markup."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from gradvitals.report.format import clean, duration, interval, number, percent, plural, sparkline
from gradvitals.report.terminal import FittedTable, Paragraph

Record = Mapping[str, Any]

SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan", "fine": "green"}
VERDICT_STYLES = {
    "signal": "green",
    "nonfinite": "bold red",
    "exploding": "red",
    "vanishing": "yellow",
    "none": "yellow",
}
EXAMPLE_LISTS = {
    "suspects": ("Suspects", "The highest losses for their class: wrong labels come first here."),
    "largest": ("Largest gradients", "They decide most of a step."),
    "contrary": ("Most contrary", "They point away from the mean direction of the others; labels may be wrong here."),
}
"""The lists of single examples, in the order they are shown."""

TEXT_WIDTH = 110
MAX_ROWS = 40
"""Rows of a table; with more, those that stand out come first."""


def gsnr_text(row: Record, low: str = "gsnr_low", high: str = "gsnr_high") -> str:
    """Returns a GSNR with its interval; only its upper end if the estimate is not above zero."""
    value, end = row["gsnr"], row[high]
    return f"below {number(end)}" if value <= 0 < end else interval(value, row[low], end)


def example_name(row: Record) -> str:
    """Returns an example's index in the data set, or its place in the batches."""
    if row["dataset_index"] is not None:
        return str(row["dataset_index"])
    return f"batch {row['batch']}, place {row['position']}"


def example_label(row: Record) -> str:
    """Returns the name of an example's class."""
    return "-" if row["label"] is None else str(row["label"])


def counted_examples(samples: Record) -> str:
    """Returns how many examples were used, and of how many."""
    count, total = samples["examples"], samples["train_size"]
    return f"{count} of {total:,}" if total > count else f"{count}"


def render_probe(record: Record) -> RenderableType:
    """Returns everything a probe found, ready for `rich.console.Console.print`."""
    return Group(*_sections(record))


def probe_text(record: Record, width: int = TEXT_WIDTH) -> str:
    """Returns the same as plain text."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, markup=False, emoji=False, highlight=False, color_system=None)
    console.print(render_probe(record))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _sections(record: Record) -> Iterator[RenderableType]:
    yield _head(record["about"])
    yield Text()
    for found in record["verdict"]:
        text = Text(clean(found["title"]))
        if found["detail"]:
            text.append(f"  {clean(found['detail'])}", style="dim")
        if found["advice"] and found["severity"] != "fine":
            text.append(f"  Try: {clean(found['advice'])}.")
        yield Paragraph(f"  {found['severity']:<9}", text, SEVERITY_STYLES[found["severity"]])
    for note in record["notes"]:
        yield Paragraph("  note     ", Text(clean(note), style="dim"), "dim")
    for question, render in SECTIONS.items():
        if record[question]:
            yield Text()
            yield from render(record[question])


def _head(about: Record) -> Text:
    lr = f", lr {number(about['lr'])}" if about["lr"] else ""
    optimizer = f", {clean(about['optimizer'])}" if about["optimizer"] else ""
    batches = f"{about['batches']} batch{'es' if about['batches'] != 1 else ''} of {about['batch_size']}"
    return Text(clean(about["model"]), style="bold").append(
        f"  {about['num_parameters']:,} parameters in {plural(about['num_tensors'], 'tensor')}, {about['task']} task, "
        f"{about['mode']} mode on {about['device']}{optimizer}{lr}; {batches}, loss {number(about['loss'], 4)}, "
        f"{duration(about['seconds'])}",
        style="not bold",
    )


def _chosen(rows: list[Record]) -> list[Record]:
    """Returns the rows to show in the model's order, with those that stand out."""
    weight = {"nonfinite": 0, "exploding": 1, "none": 2, "vanishing": 3}
    order = sorted(range(len(rows)), key=lambda i: (weight.get(rows[i].get("verdict", ""), 9), i))
    return [rows[i] for i in sorted(order[:MAX_ROWS])]


def _hidden(rows: list[Record]) -> Iterator[RenderableType]:
    if len(rows) > MAX_ROWS:
        yield Text(f"  and {len(rows) - MAX_ROWS} more, in --json and in the page", style="dim")


def _signal(signal: Record) -> Iterator[RenderableType]:
    size = signal["batch_size"]
    title = f"Gradients of a batch of {size}: CV of the norm, GSNR; plug-in by coordinate: median, share below 1"
    columns = ("tensor", "norm", "CV", "GSNR", "median", "< 1", "verdict")
    table = FittedTable(title, columns, left=("verdict",), optional=("norm", "CV", "median", "< 1"))
    for row in _chosen(signal["tensors"]):
        table.add(
            row["name"],
            number(row["norm_mean"]),
            number(row["cv"], 2),
            gsnr_text(row),
            number(row["plug_in_median"], 2),
            percent(row["plug_in_below_one"], 2),
            Text(row["verdict"], style=VERDICT_STYLES.get(row["verdict"], "")),
        )
    yield table
    yield from _hidden(signal["tensors"])


def _layers(layers: Record) -> Iterator[RenderableType]:
    by = {"optimizer": "the optimizer's step", "lr": "lr times gradient", "none": "needs lr or optimizer"}
    title = f"What learns: norms; update ({by[layers['update_by']]}) over weights; effective rank of the gradient"
    columns = ("tensor", "gradient", "weights", "update/weights", "rank", "of")
    table = FittedTable(title, columns, optional=("of", "rank", "weights", "gradient"))
    for row in _chosen(layers["tensors"]):
        numbers = (number(row[key]) for key in ("grad_norm", "weight_norm", "update_ratio", "effective_rank"))
        table.add(row["name"], *numbers, str(row["full_rank"] or "-"))
    yield table
    yield from _hidden(layers["tensors"])
    if layers["activations"]:
        heads = ("activation", "kind", "dead units", "zero", "saturated")
        table = FittedTable("Activations", heads, left=("kind",), optional=("zero",))
        for row in layers["activations"][:MAX_ROWS]:
            dead = f"{row['dead']} of {row['units']}" if "relu" in row["kind"] else "-"
            shares = (percent(row[key], 2) for key in ("zero_share", "saturated_share"))
            table.add(row["module"] or "(the model)", row["kind"], dead, *shares)
        yield table
        yield from _hidden(layers["activations"])


def _samples(samples: Record) -> Iterator[RenderableType]:
    yield Text(f"Single examples: {counted_examples(samples)}, by {samples['method']}", style="bold")
    scale = interval(samples["noise_scale"], samples["noise_scale_low"], samples["noise_scale_high"])
    yield Paragraph("  noise scale  ", f"{scale} examples" if samples["low"] > 0 else "unknown")
    yield Paragraph("  GSNR of one  ", gsnr_text(samples, "low", "high"))
    osgr = interval(samples["osgr"], samples["osgr_low"], samples["osgr_high"])
    meaning = "share of a small step's gain on the training set that carries over to new data"
    yield Paragraph("  OSGR         ", f"{osgr} with {samples['train_size']:,} training examples: {meaning}")
    for key, (title, text) in EXAMPLE_LISTS.items():
        columns = ("example", "label", "loss", "above usual", "norm / median", "cosine")
        table = FittedTable(f"{title}. {text}", columns, optional=("norm / median", "cosine"))
        for row in samples[key][: 10 if key == "suspects" else 5]:
            numbers = (number(row[name]) for name in ("loss", "excess_loss", "norm_over_median"))
            table.add(example_name(row), example_label(row), *numbers, number(row["cosine"], 2))
        yield table


def _landscape(found: Record) -> Iterator[RenderableType]:
    losses, end = found["line"]["loss"], number(found["line"]["factor"][-1])
    yield Text(f"Loss along the {found['direction']}", style="bold")
    unit = "steps of the optimizer" if found["direction"] == "update" else f"times {number(found['unit'])}"
    ends = f"{number(losses[0], 4)} at 0 to {number(losses[-1], 4)} at {end} {unit}"
    yield Paragraph("  line       ", f"{sparkline(losses, len(losses))}  {ends}")
    converged = "" if found["converged"] else ", not converged"
    method = f"{found['method']}, {plural(found['iterations'], 'product')}{converged}"
    top = number(found["top_eigenvalue"])
    yield Paragraph("  sharpness  ", f"largest eigenvalue of the Hessian {top} ({method})")
    edge = f"plain gradient descent is stable below lr {number(found['edge'])}"
    if found["sharpness_limit"] is not None:
        edge += f"; at lr {number(found['lr'])}, 2/lr is {number(found['sharpness_limit'])}"
    yield Paragraph("  edge       ", edge)


def _saliency(saliency: Record) -> Iterator[RenderableType]:
    yield Text(f"Which inputs matter: {saliency['where']}, {saliency['explains']}; eval mode", style="bold")
    for token in saliency["tokens"][:8]:
        seen = plural(token["count"], "time")
        yield Paragraph("  token  ", f"{clean(token['text'])}  {number(token['score'])}, seen {seen}")
    for axis, values in saliency["profiles"]["integrated_gradients"].items():
        if axis != "picture":
            names = saliency["names"].get(axis, [])
            order = sorted(range(len(values)), key=lambda i: -values[i])[:5]
            top = ", ".join(f"{clean(names[i]) if i < len(names) else i} ({number(values[i])})" for i in order)
            yield Paragraph(f"  {axis:<9}", top)


def _robustness(robustness: Record) -> Iterator[RenderableType]:
    curves = robustness["curves"]
    has_classes = not math.isnan(robustness["chance"])
    what = "Loss and accuracy" if has_classes else "Loss"
    title = f"{what} when {robustness['where']} change, by size in standard deviations; eval mode"
    table = FittedTable(title, ("size", *curves))
    for i, size in enumerate(robustness["relative"]):
        losses = (number(curve["loss"][i]) for curve in curves.values())
        shares = (f"  {percent(curve['accuracy'][i], 2)}" if has_classes else "" for curve in curves.values())
        table.add(number(size), *map("".join, zip(losses, shares, strict=True)))
    yield table


SECTIONS = {
    "signal": _signal,
    "layers": _layers,
    "samples": _samples,
    "landscape": _landscape,
    "saliency": _saliency,
    "robustness": _robustness,
}
