"""A probe's record for the terminal. Names come from somebody else's model: they are printed as text, not as markup."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from gradvitals.show.findings import Hanging
from gradvitals.show.probe_table import Fitted
from gradvitals.show.probe_words import LISTS, examined, example_name, gsnr_words, label_of
from gradvitals.show.sparkline import sparkline
from gradvitals.show.text import clean, duration, interval, number

Record = dict[str, Any]

STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan", "fine": "green"}
VERDICT_STYLES = {
    "signal": "green",
    "nonfinite": "bold red",
    "exploding": "red",
    "vanishing": "yellow",
    "none": "yellow",
}
MOST_ROWS = 40
"""Tensors that are shown; of more, those that stand out first."""

TEXT_WIDTH = 110


def render_probe(record: Record) -> RenderableType:
    """Everything a probe found, ready for `rich.console.Console.print`."""
    return Group(*_sections(record))


def probe_text(record: Record, width: int = TEXT_WIDTH) -> str:
    """The same as plain text."""
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False, color_system=None)
    console.print(render_probe(record))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _sections(record: Record) -> Iterator[RenderableType]:
    yield _head(record["about"])
    yield Text()
    for found in record["verdict"]:
        yield Hanging(f"  {found['severity']:<9}", _said(found), STYLES[found["severity"]])
    for note in record["notes"]:
        yield Hanging("  note     ", Text(clean(note), style="dim"), "dim")
    for question, draw in DRAWN.items():
        if record.get(question):
            yield Text()
            yield from draw(record[question])


def _head(about: Record) -> Text:
    text = Text(clean(about["model"]), style="bold")
    lr = f", lr {number(about['lr'])}" if about["lr"] else ""
    optimizer = f", {clean(about['optimizer'])}" if about["optimizer"] else ""
    batches = f"{about['batches']} batch{'es' if about['batches'] != 1 else ''} of {about['batch_size']}"
    text.append(
        f"  {about['num_parameters']:,} parameters in {about['num_tensors']} tensors, {about['task']} task, "
        f"{about['mode']} mode on {about['device']}{optimizer}{lr}; {batches}, loss {number(about['loss'], 4)}, "
        f"{duration(about['seconds'])}",
        style="not bold",
    )
    return text


def _said(found: Record) -> Text:
    text = Text(clean(found["title"]))
    if found["detail"]:
        text.append(f"  {clean(found['detail'])}", style="dim")
    if found["advice"] and found["severity"] != "fine":
        text.append(f"  Try: {clean(found['advice']).rstrip('.')}.")
    return text


def _chosen(rows: list[Record]) -> tuple[list[Record], int]:
    """What is shown, in the model's order, and how many are not: those that stand out come first."""
    if len(rows) <= MOST_ROWS:
        return rows, 0
    weight = {"nonfinite": 0, "exploding": 1, "none": 2, "vanishing": 3}
    order = sorted(range(len(rows)), key=lambda i: (weight.get(rows[i].get("verdict", ""), 9), i))
    return [rows[i] for i in sorted(order[:MOST_ROWS])], len(rows) - MOST_ROWS


def _signal(signal: Record) -> Iterator[RenderableType]:
    size = signal["batch_size"]
    title = f"Gradients of a batch of {size}: CV of the norm, GSNR; plug-in by coordinate: median, share below 1"
    columns = ["tensor", "norm", "CV", "GSNR", "median", "< 1", "verdict"]
    table = Fitted(title, columns, left=["verdict"], lesser=["norm", "CV", "median", "< 1"])
    rows, hidden = _chosen(signal["tensors"])
    for row in rows:
        table.add(
            clean(row["name"]),
            number(row["norm_mean"]),
            number(row["cv"], 2),
            gsnr_words(row["gsnr"], row["gsnr_low"], row["gsnr_high"]),
            number(row["plug_in_median"], 2),
            _percent(row["plug_in_below_one"]),
            Text(row["verdict"], style=VERDICT_STYLES.get(row["verdict"], "")),
        )
    yield table
    yield from _hidden(hidden)


def _layers(layers: Record) -> Iterator[RenderableType]:
    by = {"optimizer": "the optimizer's step", "lr": "lr times gradient", "none": "needs lr or optimizer"}
    title = f"What learns: norms; update ({by[layers['update_by']]}) over weights; effective rank of the gradient"
    columns = ["tensor", "gradient", "weights", "update/weights", "rank", "of"]
    table = Fitted(title, columns, lesser=["of", "rank", "weights", "gradient"])
    rows, hidden = _chosen(layers["tensors"])
    for row in rows:
        table.add(
            clean(row["name"]),
            number(row["grad_norm"]),
            number(row["weight_norm"]),
            number(row["update_ratio"]),
            number(row["effective_rank"]),
            str(row["full_rank"]) if row["full_rank"] else "-",
        )
    yield table
    yield from _hidden(hidden)
    if layers["activations"]:
        columns = ["activation", "kind", "dead units", "zero", "saturated"]
        shown = Fitted("Activations", columns, left=["kind"], lesser=["zero"])
        for row in layers["activations"][:MOST_ROWS]:
            dead = f"{row['dead']} of {row['units']}" if "relu" in row["kind"] else "-"
            name = clean(row["module"]) or "(the model)"
            shown.add(name, row["kind"], dead, _percent(row["zero_share"]), _percent(row["saturated_share"]))
        yield shown
        yield from _hidden(max(0, len(layers["activations"]) - MOST_ROWS))


def _samples(samples: Record) -> Iterator[RenderableType]:
    yield Text(f"Single examples: {examined(samples)}, by {samples['method']}", style="bold")
    scale = interval(samples["noise_scale"], samples["noise_scale_low"], samples["noise_scale_high"])
    yield Hanging("  noise scale  ", f"{scale} examples" if samples["low"] > 0 else "cannot be told")
    yield Hanging("  GSNR of one  ", gsnr_words(samples["gsnr"], samples["low"], samples["high"]))
    generalises = interval(samples["osgr"], samples["osgr_low"], samples["osgr_high"])
    means = "share of a small step's gain on the training set that new data would have too"
    yield Hanging("  OSGR         ", f"{generalises} with {samples['train_size']:,} training examples: {means}")
    for key, (title, words) in LISTS.items():
        columns = ["example", "label", "loss", "above usual", "norm / median", "cosine"]
        table = Fitted(f"{title}. {words}", columns, lesser=["norm / median", "cosine"])
        for one in samples[key][: 10 if key == "suspects" else 5]:
            table.add(
                example_name(one),
                clean(label_of(one)),
                number(one["loss"]),
                number(one["excess_loss"]),
                number(one["norm_over_median"]),
                number(one["cosine"], 2),
            )
        yield table


def _landscape(landscape: Record) -> Iterator[RenderableType]:
    line = landscape["line"]
    yield Text(f"Loss along the {landscape['direction']}", style="bold")
    unit = "steps of the optimizer" if landscape["direction"] == "update" else f"times {number(landscape['unit'])}"
    spark = sparkline(line["loss"], len(line["loss"]))
    yield Hanging(
        "  line       ",
        f"{spark}  {number(line['loss'][0], 4)} at 0 to {number(line['loss'][-1], 4)} at "
        f"{number(line['factor'][-1])} {unit}",
    )
    settled = "" if landscape["converged"] else ", not settled"
    eigenvalue = (
        f"{number(landscape['top_eigenvalue'])} ({landscape['method']}, {landscape['iterations']} products{settled})"
    )
    yield Hanging("  sharpness  ", f"largest eigenvalue of the Hessian {eigenvalue}")
    edge = f"plain gradient descent is stable below lr {number(landscape['edge'])}"
    if landscape["sharpness_limit"] is not None:
        edge += f"; at lr {number(landscape['lr'])}, 2/lr is {number(landscape['sharpness_limit'])}"
    yield Hanging("  edge       ", edge)


def _saliency(saliency: Record) -> Iterator[RenderableType]:
    explains = f"{clean(saliency['where'])}, {clean(saliency['explains'])}; eval mode"
    yield Text(f"Which inputs matter: {explains}", style="bold")
    for token in saliency["tokens"][:8]:
        yield Hanging("  token  ", f"{clean(token['text'])}  {number(token['score'])}, seen {token['count']} times")
    for axis, values in saliency["profiles"].get("integrated_gradients", {}).items():
        if not values or isinstance(values[0], list):
            continue
        names = saliency["names"].get(axis, [])
        order = sorted(range(len(values)), key=lambda i: -_or_zero(values[i]))[:5]
        said = ", ".join(f"{clean(names[i]) if i < len(names) else i} ({number(values[i])})" for i in order)
        yield Hanging(f"  {clean(axis):<9}", said)


def _robustness(robustness: Record) -> Iterator[RenderableType]:
    kinds = list(robustness["curves"])
    classes = any(not math.isnan(value) for kind in kinds for value in robustness["curves"][kind]["accuracy"])
    what = "Loss and accuracy" if classes else "Loss"
    title = f"{what} when {clean(robustness['where'])} change, by size in standard deviations; eval mode"
    table = Fitted(title, ["size", *kinds])
    for i, size in enumerate(robustness["relative"]):
        cells = []
        for kind in kinds:
            curve = robustness["curves"][kind]
            right = curve["accuracy"][i]
            cells.append(number(curve["loss"][i]) + ("" if math.isnan(right) else f"  {_percent(right)}"))
        table.add(number(size), *cells)
    yield table


DRAWN = {
    "signal": _signal,
    "layers": _layers,
    "samples": _samples,
    "landscape": _landscape,
    "saliency": _saliency,
    "robustness": _robustness,
}


def _hidden(count: int) -> Iterator[RenderableType]:
    if count:
        yield Text(f"  and {count} more, in --json and in the page", style="dim")


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.0f} %"


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
