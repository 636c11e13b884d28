"""A probe's record for the terminal and as one HTML file.

Names come from other people's models: they are printed as text, never as markup.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from gradvitals.report.charts import Axis, bar, heat, histogram, image, interval_mark, line_chart, photo
from gradvitals.report.format import as_float, as_floats, clean, duration, interval, number, percent, sparkline
from gradvitals.report.markup import Html, Part, document, facts, folded, join, table, tag
from gradvitals.report.terminal import Paragraph

Record = Mapping[str, Any]

SEVERITIES = {"critical": "Critical", "warning": "Warning", "info": "Info", "fine": "Fine"}
SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan", "fine": "green"}
VERDICT_STYLES = {
    "signal": "green",
    "nonfinite": "bold red",
    "exploding": "red",
    "vanishing": "yellow",
    "none": "yellow",
}
VERDICT_CLASSES = {"signal": "fine", "vanishing": "critical", "exploding": "critical", "nonfinite": "critical"}
EXAMPLE_LISTS = {
    "suspects": ("Suspects", "The highest losses for their class: wrong labels come first here."),
    "largest": ("Largest gradients", "They decide most of a step."),
    "contrary": ("Most contrary", "They point away from the mean direction of the others; labels may be wrong here."),
}
"""The lists of single examples, in the order they are shown."""
METHODS = {
    "integrated_gradients": "Integrated gradients",
    "gradient_x_input": "Gradient × input",
    "gradient": "Gradient",
    "smoothgrad": "SmoothGrad",
}
SIGNED = ("integrated_gradients", "gradient_x_input")
ATTACKS = {"noise": "Random noise", "fgsm": "FGSM", "pgd": "PGD"}
WHITESPACE = str.maketrans({"\n": "⏎", "\t": "⇥"})

TEXT_WIDTH = 110
MAX_TERMINAL_ROWS = 40
"""Tensors in the terminal; with more, those that stand out come first."""
MAX_ROWS = 24
MAX_BARS = 20
NAME_WIDTH = 16
"""Characters that a name gets before a column is dropped; longer names are folded."""


def _gsnr(row: Record, low: str = "gsnr_low", high: str = "gsnr_high") -> str:
    """Returns a GSNR with its interval; only what it is below if the estimate is not above zero."""
    value, start, end = (as_float(row.get(key)) for key in ("gsnr", low, high))
    return f"below {number(end)}" if value <= 0 < end else interval(value, start, end)


def _example_name(row: Record) -> str:
    """Returns an example's index in the data set, or its place in the batches."""
    if row.get("dataset_index") is not None:
        return str(row["dataset_index"])
    return f"batch {row.get('batch', '?')}, place {row.get('position', '?')}"


def _class_of(row: Record) -> str:
    found = row.get("label") if row.get("label") is not None else row.get("target")
    return "-" if found is None else str(found)


def _num_examples(samples: Record) -> str:
    count, total = samples.get("examples", "?"), as_float(samples.get("train_size"))
    return f"{count} of {int(total):,}" if total > as_float(count) else f"{count}"


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


# -- the terminal --------------------------------------------------------------------------------------------------


def render_probe(record: Record) -> RenderableType:
    """Returns everything a probe found, ready for `rich.console.Console.print`."""
    return Group(*_sections(record))


def probe_text(record: Record, width: int = TEXT_WIDTH) -> str:
    """Returns the same as plain text."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, markup=False, emoji=False, highlight=False, color_system=None)
    console.print(render_probe(record))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


@dataclass
class FittedTable:
    """A table that drops its less important columns, the last one first, if the window is narrow."""

    title: str
    columns: Sequence[str]
    """The first one holds names."""
    left: Sequence[str] = ()
    """Columns aligned to the left, beside the first."""
    optional: Sequence[str] = ()
    rows: list[list[str | Text]] = field(default_factory=list)

    def add(self, *cells: str | Text) -> None:
        """Adds a row."""
        self.rows.append(list(cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders the table as wide as there is room for."""
        widths = [
            max([cell_len(name), *(cell_len(str(row[at])) for row in self.rows)])
            for at, name in enumerate(self.columns)
        ]
        kept, optional = list(range(len(self.columns))), list(self.optional)
        name_width = min(widths[0], NAME_WIDTH)
        while optional and sum(widths[at] + 3 for at in kept[1:]) > options.max_width - 2 - name_width:
            kept.remove(list(self.columns).index(optional.pop()))
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for at in kept:
            shown.add_column(
                Text(self.columns[at]),
                justify="left" if at == 0 or self.columns[at] in self.left else "right",
                no_wrap=at > 0,
                overflow="fold" if at == 0 else "ellipsis",
                min_width=name_width if at == 0 else None,
            )
        for row in self.rows:
            shown.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in (row[at] for at in kept)))
        yield Text(self.title, style="bold")
        yield shown


def _sections(record: Record) -> Iterator[RenderableType]:
    yield _head(record["about"])
    yield Text()
    for found in record["verdict"]:
        text = Text(clean(found["title"]))
        if found["detail"]:
            text.append(f"  {clean(found['detail'])}", style="dim")
        if found["advice"] and found["severity"] != "fine":
            text.append(f"  Try: {clean(found['advice']).rstrip('.')}.")
        yield Paragraph(f"  {found['severity']:<9}", text, SEVERITY_STYLES[found["severity"]])
    for note in record["notes"]:
        yield Paragraph("  note     ", Text(clean(note), style="dim"), "dim")
    for question, render in _TERMINAL.items():
        if record.get(question):
            yield Text()
            yield from render(record[question])


def _head(about: Record) -> Text:
    lr = f", lr {number(about['lr'])}" if about["lr"] else ""
    optimizer = f", {clean(about['optimizer'])}" if about["optimizer"] else ""
    batches = f"{about['batches']} batch{'es' if about['batches'] != 1 else ''} of {about['batch_size']}"
    return Text(clean(about["model"]), style="bold").append(
        f"  {about['num_parameters']:,} parameters in {about['num_tensors']} tensors, {about['task']} task, "
        f"{about['mode']} mode on {about['device']}{optimizer}{lr}; {batches}, loss {number(about['loss'], 4)}, "
        f"{duration(about['seconds'])}",
        style="not bold",
    )


def _chosen(rows: list[Record]) -> tuple[list[Record], int]:
    """Returns the rows to show, in the model's order, and how many are hidden."""
    if len(rows) <= MAX_TERMINAL_ROWS:
        return rows, 0
    weight = {"nonfinite": 0, "exploding": 1, "none": 2, "vanishing": 3}
    order = sorted(range(len(rows)), key=lambda i: (weight.get(rows[i].get("verdict", ""), 9), i))
    return [rows[i] for i in sorted(order[:MAX_TERMINAL_ROWS])], len(rows) - MAX_TERMINAL_ROWS


def _hidden(count: int) -> Iterator[RenderableType]:
    if count > 0:
        yield Text(f"  and {count} more, in --json and in the page", style="dim")


def _signal_text(signal: Record) -> Iterator[RenderableType]:
    size = signal["batch_size"]
    title = f"Gradients of a batch of {size}: CV of the norm, GSNR; plug-in by coordinate: median, share below 1"
    columns = ["tensor", "norm", "CV", "GSNR", "median", "< 1", "verdict"]
    shown = FittedTable(title, columns, left=["verdict"], optional=["norm", "CV", "median", "< 1"])
    rows, hidden = _chosen(signal["tensors"])
    for row in rows:
        shown.add(
            clean(row["name"]),
            number(row["norm_mean"]),
            number(row["cv"], 2),
            _gsnr(row),
            number(row["plug_in_median"], 2),
            percent(row["plug_in_below_one"], 2),
            Text(row["verdict"], style=VERDICT_STYLES.get(row["verdict"], "")),
        )
    yield shown
    yield from _hidden(hidden)


def _layers_text(layers: Record) -> Iterator[RenderableType]:
    by = {"optimizer": "the optimizer's step", "lr": "lr times gradient", "none": "needs lr or optimizer"}
    title = f"What learns: norms; update ({by[layers['update_by']]}) over weights; effective rank of the gradient"
    columns = ["tensor", "gradient", "weights", "update/weights", "rank", "of"]
    shown = FittedTable(title, columns, optional=["of", "rank", "weights", "gradient"])
    rows, hidden = _chosen(layers["tensors"])
    for row in rows:
        numbers = (number(row[key]) for key in ("grad_norm", "weight_norm", "update_ratio", "effective_rank"))
        shown.add(clean(row["name"]), *numbers, str(row["full_rank"]) if row["full_rank"] else "-")
    yield shown
    yield from _hidden(hidden)
    if layers["activations"]:
        columns = ["activation", "kind", "dead units", "zero", "saturated"]
        shown = FittedTable("Activations", columns, left=["kind"], optional=["zero"])
        for row in layers["activations"][:MAX_TERMINAL_ROWS]:
            dead = f"{row['dead']} of {row['units']}" if "relu" in row["kind"] else "-"
            shares = (percent(row[key], 2) for key in ("zero_share", "saturated_share"))
            shown.add(clean(row["module"]) or "(the model)", row["kind"], dead, *shares)
        yield shown
        yield from _hidden(len(layers["activations"]) - MAX_TERMINAL_ROWS)


def _samples_text(samples: Record) -> Iterator[RenderableType]:
    yield Text(f"Single examples: {_num_examples(samples)}, by {samples['method']}", style="bold")
    scale = interval(samples["noise_scale"], samples["noise_scale_low"], samples["noise_scale_high"])
    yield Paragraph("  noise scale  ", f"{scale} examples" if samples["low"] > 0 else "unknown")
    yield Paragraph("  GSNR of one  ", _gsnr(samples, "low", "high"))
    osgr = interval(samples["osgr"], samples["osgr_low"], samples["osgr_high"])
    meaning = "share of a small step's gain on the training set that carries over to new data"
    yield Paragraph("  OSGR         ", f"{osgr} with {samples['train_size']:,} training examples: {meaning}")
    for key, (title, text) in EXAMPLE_LISTS.items():
        columns = ["example", "label", "loss", "above usual", "norm / median", "cosine"]
        shown = FittedTable(f"{title}. {text}", columns, optional=["norm / median", "cosine"])
        for row in samples[key][: 10 if key == "suspects" else 5]:
            numbers = (number(row[name]) for name in ("loss", "excess_loss", "norm_over_median"))
            shown.add(_example_name(row), clean(_class_of(row)), *numbers, number(row["cosine"], 2))
        yield shown


def _landscape_text(found: Record) -> Iterator[RenderableType]:
    losses, end = found["line"]["loss"], number(found["line"]["factor"][-1])
    yield Text(f"Loss along the {found['direction']}", style="bold")
    unit = "steps of the optimizer" if found["direction"] == "update" else f"times {number(found['unit'])}"
    ends = f"{number(losses[0], 4)} at 0 to {number(losses[-1], 4)} at {end} {unit}"
    yield Paragraph("  line       ", f"{sparkline(losses, len(losses))}  {ends}")
    settled = "" if found["converged"] else ", not converged"
    method = f"{found['method']}, {found['iterations']} products{settled}"
    top = number(found["top_eigenvalue"])
    yield Paragraph("  sharpness  ", f"largest eigenvalue of the Hessian {top} ({method})")
    edge = f"plain gradient descent is stable below lr {number(found['edge'])}"
    if found["sharpness_limit"] is not None:
        edge += f"; at lr {number(found['lr'])}, 2/lr is {number(found['sharpness_limit'])}"
    yield Paragraph("  edge       ", edge)


def _saliency_text(saliency: Record) -> Iterator[RenderableType]:
    explains = f"{clean(saliency['where'])}, {clean(saliency['explains'])}; eval mode"
    yield Text(f"Which inputs matter: {explains}", style="bold")
    for token in saliency["tokens"][:8]:
        yield Paragraph("  token  ", f"{clean(token['text'])}  {number(token['score'])}, seen {token['count']} times")
    for axis, values in saliency["profiles"].get("integrated_gradients", {}).items():
        if values and not isinstance(values[0], list):
            names = saliency["names"].get(axis, [])
            order = sorted(range(len(values)), key=lambda i: -_finite(values[i]))[:5]
            top = ", ".join(f"{clean(names[i]) if i < len(names) else i} ({number(values[i])})" for i in order)
            yield Paragraph(f"  {clean(axis):<9}", top)


def _robustness_text(robustness: Record) -> Iterator[RenderableType]:
    curves = robustness["curves"]
    has_classes = any(not math.isnan(value) for curve in curves.values() for value in curve["accuracy"])
    what = "Loss and accuracy" if has_classes else "Loss"
    title = f"{what} when {clean(robustness['where'])} change, by size in standard deviations; eval mode"
    shown = FittedTable(title, ["size", *curves])
    for i, size in enumerate(robustness["relative"]):
        cells = []
        for curve in curves.values():
            accuracy = curve["accuracy"][i]
            cells.append(number(curve["loss"][i]) + ("" if math.isnan(accuracy) else f"  {percent(accuracy, 2)}"))
        shown.add(number(size), *cells)
    yield shown


_TERMINAL = {
    "signal": _signal_text,
    "layers": _layers_text,
    "samples": _samples_text,
    "landscape": _landscape_text,
    "saliency": _saliency_text,
    "robustness": _robustness_text,
}


# -- the page ------------------------------------------------------------------------------------------------------


def probe_page(record: Record) -> str:
    """Returns a whole HTML document that opens from a file.

    Args:
        record: A probe's plain record, as `Probe.record()` or `Probe.to_dict()` returns it. Questions that were not
            asked are None or missing.
    """
    about = record.get("about") or {}
    asked = {key: found for key, found in _PAGE.items() if record.get(key)}
    sections = [
        tag("section", tag("h2", title, id=f"q-{key}"), render(record[key])) for key, (title, render) in asked.items()
    ]
    links = [tag("a", title, href=f"#q-{key}") for key, (title, _) in asked.items()]
    notes = [tag("li", str(note)) for note in record.get("notes") or []]
    name = f"Probe of {about.get('model', 'a model')}"
    return document(
        name,
        tag("h1", name),
        tag("p", _sentence(about), class_="dim"),
        _verdicts(record.get("verdict") or []),
        _about(about),
        folded(f"Notes ({len(notes)})", tag("ul", *notes), opened=len(notes) <= 3) if notes else None,
        tag("nav", *links, aria_label="Sections") if links else None,
        *sections,
    )


def _sentence(about: Record) -> str:
    parts = []
    if "num_parameters" in about:
        parts.append(f"{int(about['num_parameters']):,} parameters in {about.get('num_tensors', '?')} tensors")
    if "batches" in about:
        parts.append(f"{about['batches']} batches of {about.get('batch_size', '?')} examples")
    for key in ("task", "device", "mode"):
        if about.get(key) and about[key] != "unknown":
            parts.append(f"{about[key]} mode" if key == "mode" else str(about[key]))
    if about.get("seconds") is not None:
        parts.append(duration(as_float(about["seconds"])))
    return ", ".join(parts)


def _about(about: Record) -> Html | None:
    losses = as_floats(about.get("losses"))
    rows: list[tuple[str, str, str]] = []
    if about.get("loss") is not None:
        spread = f"{number(min(losses))} to {number(max(losses))} over batches" if losses else ""
        rows.append(("Loss", number(about["loss"]), spread))
    if about.get("optimizer"):
        rows.append(("Optimizer", str(about["optimizer"]), ""))
    if about.get("lr") is not None:
        rows.append(("Learning rate", number(about["lr"]), ""))
    if about.get("train_size") is not None:
        rows.append(("Training examples", f"{int(about['train_size']):,}", ""))
    return facts(rows)


def _verdicts(found: Sequence[Record]) -> Html:
    if not found:
        return tag("p", "Nothing stood out.", class_="fine")
    items = []
    for entry in found:
        severity = str(entry.get("severity", "info"))
        names = [str(name) for name in entry.get("names") or []]
        more = f", and {len(names) - 8} more" if len(names) > 8 else ""
        items.append(
            tag(
                "li",
                tag("span", SEVERITIES.get(severity, severity), class_="tag"),
                tag("b", entry.get("title", "")),
                tag("p", entry["detail"]) if entry.get("detail") else None,
                tag("p", ", ".join(names[:8]) + more, class_="names") if names else None,
                tag("p", f"Try: {str(entry['advice']).rstrip('.')}.", class_="dim") if entry.get("advice") else None,
                class_=severity if severity in SEVERITIES else "info",
            )
        )
    return tag("ul", *items, class_="verdict")


def _span(row: Record, low: str, high: str) -> str:
    ends = (as_float(row.get(low)), as_float(row.get(high)))
    return "" if all(math.isnan(end) for end in ends) else f"{number(ends[0])} to {number(ends[1])}"


def _numbers(row: Record, *keys: str) -> list[Part]:
    return [number(as_float(row.get(key))) for key in keys]


def _left(text: Part, **attributes: object) -> Html:
    return tag("span", text, class_="left", **attributes)


def _folded_table(heads: Sequence[Part], rows: Sequence[Sequence[Part]], what: str, limit: int = MAX_ROWS) -> Html:
    """Returns the first rows, and the others folded."""
    first = table(heads, rows[:limit])
    if len(rows) <= limit:
        return first
    return join([first, folded(f"{len(rows) - limit} more{what}", table(heads, rows[limit:]))])


def _verdict_cell(row: Record) -> Html:
    verdict = str(row.get("verdict", ""))
    word = tag("span", verdict, class_=f"word {VERDICT_CLASSES.get(verdict, '')}".strip())
    return _left(word, title=str(row.get("words") or verdict))


def _signal(signal: Record) -> Html:
    total, limits = signal.get("total") or {}, signal.get("thresholds") or {}
    rows = [
        (f"GSNR, batches of {signal.get('batch_size', '?')}", number(total.get("gsnr")), _span(total, "low", "high")),
        (
            "Noise scale",
            number(total.get("noise_scale"), missing="unknown"),
            f"{_span(total, 'noise_scale_low', 'noise_scale_high')} examples",
        ),
        ("Norm of the mean gradient", number(total.get("norm")), ""),
    ]
    for name, key, limit, text in (
        ("Vanishing", "vanishing_names", "vanishing", "norm under {}"),
        ("Exploding", "exploding_names", "exploding", "norm over {}"),
        ("Small for this model", "vanishing_relative_names", "relative_low", "under {} × the median"),
        ("Large for this model", "exploding_relative_names", "relative_high", "over {} × the median"),
    ):
        if key in limits and (limit.startswith("relative") or limits.get(limit) is not None):
            rows.append((name, str(len(limits[key] or [])), f"tensors, {text.format(number(limits.get(limit)))}"))
    text = (
        "GSNR is the squared mean of the gradient over its variance from batch to batch: above 1, a batch shows the "
        "direction more than its own noise. The line is the 95% interval, the dashed mark is 1."
    )
    layers, tensors = signal.get("layers") or [], signal.get("tensors") or []
    return join([facts(rows), tag("p", text, class_="dim"), _layer_signal(layers), _tensor_signal(tensors)])


def _gsnr_mark(row: Record, axis: Axis) -> Html:
    value, low, high = (as_float(row.get(key)) for key in ("gsnr", "gsnr_low", "gsnr_high"))
    return interval_mark(value, low, high, axis)


def _layer_signal(rows: Sequence[Record]) -> Html | None:
    if not rows:
        return None
    ends = [as_float(row.get(key)) for row in rows for key in ("gsnr", "gsnr_low", "gsnr_high")]
    axis = Axis.over([*(end for end in ends if math.isfinite(end) and end > 1e-4), 0.1, 10.0], 5, 115, logarithmic=True)
    cells = [
        [
            str(row.get("layer", "")) or "(model)",
            _verdict_cell(row),
            _left(_gsnr_mark(row, axis)),
            _gsnr(row),
            *_numbers(row, "norm", "cv"),
        ]
        for row in rows
    ]
    return _folded_table(
        ["Layer", _left("Verdict"), _left("GSNR"), "95% interval", "Norm", "Norm's CV"], cells, " layers"
    )


def _tensor_signal(rows: Sequence[Record]) -> Html | None:
    if not rows:
        return None
    heads: list[Part] = ["Tensor", _left("Verdict"), "Shape", "Norm", "CV", "GSNR", "Median", "Mean", "Below 1"]
    heads += ["Median, plug-in", "Mean, plug-in", "Below 1, plug-in"]
    cells = (
        [
            str(row.get("name", "")),
            _verdict_cell(row),
            "×".join(str(side) for side in row.get("shape") or []) or "scalar",
            *_numbers(row, "norm", "cv"),
            _gsnr(row),
            *_numbers(row, "median", "mean"),
            percent(row.get("below_one")),
            *_numbers(row, "plug_in_median", "plug_in_mean"),
            percent(row.get("plug_in_below_one")),
        ]
        for row in rows
    )
    text = (
        "GSNR is that of the whole tensor. Median, mean and the share below 1 are over single coordinates, debiased; "
        "the plug-in columns are mean² / (variance + 1e-8), as often computed, with its bias."
    )
    return folded(f"Every tensor ({len(rows)})", tag("p", text, class_="dim"), table(heads, cells))


def _layers(layers: Record) -> Html:
    rows = layers.get("tensors") or []
    by = {"optimizer": "the optimizer's next step", "lr": "learning rate times gradient"}.get(
        str(layers.get("update_by"))
    )
    ratios = [as_float(row.get("update_ratio")) for row in rows]
    largest = max((ratio for ratio in ratios if ratio > 0), default=math.nan)

    def rank(row: Record) -> Part:
        effective = as_float(row.get("effective_rank"))
        text = f"{number(effective)} of {row.get('full_rank', '?')}"
        return "-" if math.isnan(effective) else bar(as_float(row.get("rank_share")), 1.0, text)

    cells = [
        [
            str(row.get("name", "")),
            *_numbers(row, "grad_norm", "weight_norm", "update_norm"),
            bar(ratio, largest, number(ratio)) if by else "-",
            rank(row),
        ]
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    heads = ["Tensor", "Gradient", "Weight", "Update", "Update / weight", "Effective rank of the gradient"]
    update = f"the update is {by}" if by else "without a learning rate or an optimizer there is no update"
    parts: list[Part] = [tag("p", f"Norms of each tensor; {update}.", class_="dim")]
    parts.append(_folded_table(heads, cells, " tensors"))
    if layers.get("activations"):
        units = (
            [
                *(str(row.get(key, "-")) for key in ("module", "kind", "units", "dead")),
                bar(as_float(row.get("dead_share")), 1.0, percent(row.get("dead_share"))),
                *(percent(row.get(key)) for key in ("saturated_share", "zero_share")),
            ]
            for row in layers["activations"]
        )
        columns = ["Module", "Kind", "Units", "Dead", "Dead share", "Saturated", "Zeros"]
        parts += [tag("h3", "Activations"), table(columns, units)]
    return join(parts)


def _samples(samples: Record) -> Html:
    scale = number(samples.get("noise_scale"), missing="unknown")
    osgr = f"{_span(samples, 'osgr_low', 'osgr_high')} for {samples.get('train_size', '?')} training examples"
    rows = [
        ("GSNR of one example", number(samples.get("gsnr")), _span(samples, "low", "high")),
        ("Noise scale, examples", scale, _span(samples, "noise_scale_low", "noise_scale_high")),
        ("OSGR, first step", number(samples.get("osgr")), osgr),
    ]
    why = f": {samples['why']}" if samples.get("why") else ""
    text = (
        f"{_num_examples(samples)} examples, each with its own gradient ({samples.get('method', '?')}{why}). OSGR, the "
        "one-step generalization ratio, is the share of a small step's gain on the training set that carries over to "
        "new data."
    )
    counts = samples.get("histogram") or {}
    cosines = histogram(
        as_floats(counts.get("edges")),
        as_floats(counts.get("counts")),
        title="Agreement with the other examples",
        x_name="cosine with the mean gradient of the others",
        y_name="examples",
    )
    norms = sorted(as_floats(samples.get("norms")), reverse=True)
    ranked = line_chart(
        {"norm": ([float(at) for at in range(1, len(norms) + 1)], norms)},
        title="Gradient norms, largest first",
        x_name="rank of the example",
        y_name="norm",
        y_log=bool(norms) and norms[-1] > 0 and norms[0] > 20 * norms[-1],
    )
    charts = (cosines if counts.get("counts") else None, ranked if len(norms) > 1 else None)
    parts: list[Part] = [facts(rows), tag("p", text, class_="dim"), tag("div", *charts, class_="charts")]
    heads = ["Example", "Label", "Loss", "Above usual", "Norm / median", "Norm", "Cosine"]
    for key, (title, remark) in EXAMPLE_LISTS.items():
        if samples.get(key):
            keys = ("loss", "excess_loss", "norm_over_median", "norm", "cosine")
            cells = ([_example_name(row), _class_of(row), *_numbers(row, *keys)] for row in samples[key])
            parts += [tag("h3", title), tag("p", remark, class_="dim"), table(heads, cells)]
    return join(parts)


def _is_steep(values: Sequence[float]) -> bool:
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 30 * min(finite)


def _landscape(found: Record) -> Html:
    line = found.get("line") or {}
    steps, losses = as_floats(line.get("step")), as_floats(line.get("loss"))
    lr, edge, best = (as_float(found.get(key)) for key in ("lr", "edge", "best_step"))
    steep, is_update = _is_steep(losses), found.get("direction") == "update"
    marks = {"one step": 1.0} if is_update else {"lr": lr, "2 / top eigenvalue": edge}
    chart = line_chart(
        {"loss": (steps, losses)},
        title=f"Loss along the {'update' if is_update else 'gradient'}",
        x_name="multiples of the optimizer's step" if is_update else "step along the negative gradient",
        y_name="loss, logarithmic" if steep else "loss",
        y_log=steep,
        marks={**marks, "lowest": best},
    )
    limit, over = as_float(found.get("sharpness_limit")), as_float(found.get("lr_over_edge"))
    converged = "" if found.get("converged", True) else f"not converged in {found.get('iterations', '?')} iterations"
    rows = [("Top Hessian eigenvalue", number(found.get("top_eigenvalue")), converged)]
    if not math.isnan(limit):
        rows.append(("2 / learning rate", number(limit), "the sharpness that this rate can bear"))
    rows += [
        ("2 / top eigenvalue", number(edge), "largest stable rate of plain gradient descent"),
        ("Curvature along the line", number(found.get("curvature")), ""),
        ("Lowest loss at step", number(best), ""),
    ]
    if not math.isnan(over):
        rows.append(("Rate over the edge", number(over), "above 1, plain gradient descent diverges"))
    return join([facts(rows), tag("div", chart, class_="charts") if steps else None])


def _robustness(found: Record) -> Html:
    relative = as_floats(found.get("relative"))
    curves: Mapping[str, Record] = found.get("curves") or {}
    kinds = [kind for kind in ATTACKS if kind in curves] + [kind for kind in curves if kind not in ATTACKS]
    series = {key: {kind: as_floats(curves[kind].get(key)) for kind in kinds} for key in ("loss", "accuracy")}
    at_zero = {key: next((v[0] for v in values.values() if v), math.nan) for key, values in series.items()}
    drawn = {
        key: {ATTACKS.get(kind, kind): (relative[1:], v[1:]) for kind, v in values.items()}
        for key, values in series.items()
    }
    steep = _is_steep([value for _, values in drawn["loss"].values() for value in values])
    size = "size, in standard deviations of the data"
    unit = "logarithmic" if steep else ""
    charts = [line_chart(drawn["loss"], title="Loss", x_name=size, y_name=unit, x_log=True, y_log=steep)]
    has_classes = not math.isnan(at_zero["accuracy"])
    if has_classes:
        charts.append(
            line_chart(drawn["accuracy"], title="Accuracy", x_name=size, y_name="", x_log=True, y_range=(0.0, 1.0))
        )
    constants, half = found.get("lipschitz") or {}, found.get("half_at") or {}
    largest = f"of the output: median; largest {number(constants.get('largest'))}"
    rows = [("Loss, unchanged data", number(at_zero["loss"]), "")]
    rows += [("Accuracy, unchanged data", number(at_zero["accuracy"]), "")] if has_classes else []
    rows += [
        ("Local Lipschitz constant", number(constants.get("median")), largest),
        ("Slope of the loss", number(found.get("slope")), "under FGSM, per unit of size"),
    ]
    lost = "standard deviations; of the accuracy above that of the most common answer"
    for kind in kinds:
        if not math.isnan(as_float(half.get(kind))):
            rows.append((f"Half is lost, {ATTACKS.get(kind, kind)}", number(half[kind]), lost))
    what = "the vectors of its tokens" if found.get("where") == "embeddings" else "its inputs"
    text = (
        f"The model runs again, in eval mode, with {what} changed, each value by up to the size: by random signs, by "
        "the signs that raise the loss most at first (FGSM), and by several such steps (PGD). One standard deviation "
        f"of the data is {number(found.get('scale'))}; in a table every column has its own, and this is their median."
    )
    heads, columns = ["Standard deviations", "Size"], [relative, as_floats(found.get("sizes"))]
    for kind in kinds:
        for key in ("loss", "accuracy"):
            if any(not math.isnan(value) for value in series[key][kind]):
                heads.append(f"{ATTACKS.get(kind, kind)}, {key}")
                columns.append(series[key][kind])
    numbers = table(heads, [[number(value) for value in row] for row in zip(*columns, strict=False)])
    drawing = tag("div", *charts, class_="charts")
    return join([facts(rows), tag("p", text, class_="dim"), drawing, folded("The numbers", numbers)])


# -- which inputs matter -------------------------------------------------------------------------------------------


def _saliency(found: Record) -> Html:
    profiles: Mapping[str, Record] = found.get("profiles") or {}
    by_method = {method: profiles[method] for method in METHODS if method in profiles}
    names: Mapping[str, Sequence[str]] = found.get("names") or {}
    complete = found.get("completeness") or {}
    what = "the vectors of the tokens" if found.get("where") == "embeddings" else "the data"
    explains = str(found.get("explains", "the answer"))
    text = (
        f"How {explains} depends on {what} at “{found.get('place', 'input')}”, over {found.get('examples', '?')} "
        f"examples in eval mode. Integrated gradients distribute the answer: they sum to "
        f"{number(complete.get('found'))}, and the answer differs from that for zeros by "
        f"{number(complete.get('expected'))}."
    )
    parts: list[Part] = [tag("p", text, class_="dim")]
    for axis in next(iter(by_method.values()), {}):
        parts.append(_mean_images(by_method) if axis == "picture" else _profile(axis, by_method, names.get(axis) or []))
    parts.append(_by_class(found.get("by_class") or {}, names))
    parts.append(_tokens(found.get("tokens") or []))
    if found.get("shown"):
        key = f"Blue raises {explains}, red lowers it; orange is strength without a sign."
        parts += [tag("h3", "Some examples"), tag("p", key, class_="dim")]
        parts += [_example(example, names.get("feature") or []) for example in found["shown"]]
    return join(parts)


def _profile(axis: str, by_method: Mapping[str, Record], names: Sequence[str]) -> Html | None:
    """Returns a few entries as bars, many in a row (positions) as lines."""
    series = {method: as_floats(profile.get(axis)) for method, profile in by_method.items()}
    first = next(iter(series.values()), [])
    if len(first) < 2:
        return None
    if axis in ("position", "frame") or len(first) > 400:
        lines = {  # each over its own mean, because their units differ
            METHODS[method]: ([float(at) for at in range(len(values))], _over_mean(values))
            for method, values in series.items()
            if method in ("integrated_gradients", "gradient")
        }
        steep = max(max(values) for _, values in lines.values()) > 20
        unit = "over the mean, logarithmic" if steep else "over the mean"
        chart = line_chart(lines, title=f"By {axis}", x_name=axis, y_name=unit, y_log=steep)
        return tag("div", chart, class_="charts")
    largest = {method: max(map(_finite, values)) for method, values in series.items()}
    rows: list[list[Part]] = []
    for at in sorted(range(len(first)), key=lambda at: -_finite(first[at])):
        bars = (bar(values[at], largest[method], number(values[at])) for method, values in series.items())
        rows.append([str(names[at]) if at < len(names) else f"{axis} {at}", *bars])
    heads = [axis.capitalize(), *(METHODS[method] for method in series)]
    return join([tag("h3", f"By {axis}"), _folded_table(heads, rows, "", MAX_BARS)])


def _mean_images(by_method: Mapping[str, Record]) -> Html:
    figures = [
        _figure(
            image(heat(profile["picture"], signed=False), f"{METHODS[method]}, mean over examples"), METHODS[method]
        )
        for method, profile in by_method.items()
        if _is_image(profile.get("picture"))
    ]
    return join([tag("h3", "By place in the image, mean over examples"), tag("div", *figures, class_="pictures")])


def _by_class(by_class: Mapping[str, Record], names: Mapping[str, Sequence[str]]) -> Html | None:
    if len(by_class) < 2:
        return None
    title = tag("h3", "By class (integrated gradients)")
    figures = [
        _figure(image(heat(profile["picture"], signed=False), f"class {label}"), f"class {label}")
        for label, profile in by_class.items()
        if _is_image(profile.get("picture"))
    ]
    if figures:
        return join([title, tag("div", *figures, class_="pictures")])
    axis = next((axis for axis in ("feature", "channel") if axis in next(iter(by_class.values()))), None)
    if axis is None:
        return None
    rows: list[list[Part]] = []
    called = names.get(axis) or []
    for label, profile in by_class.items():
        scores = [_finite(score) for score in as_floats(profile.get(axis))]
        total = sum(scores) or 1.0
        best = sorted(range(len(scores)), key=lambda at: -scores[at])[:5]
        texts = [f"{called[at] if at < len(called) else at} ({percent(scores[at] / total, 2)})" for at in best]
        rows.append([str(label), _left(", ".join(texts))])
    return join([title, table(["Class", _left(f"{axis.capitalize()}s with the largest share")], rows)])


def _tokens(tokens: Sequence[Record]) -> Html | None:
    if not tokens:
        return None
    largest = max(as_float(token.get("score")) for token in tokens)
    rows = [
        [
            _visible(token.get("text", "")),
            str(token.get("count", "?")),
            bar(as_float(token.get("score")), largest, number(token.get("score"))),
        ]
        for token in tokens
    ]
    shown = _folded_table(["Token", "Seen", "Mean strength"], rows, "", MAX_BARS)
    return join([tag("h3", "By token (integrated gradients)"), shown])


def _example(example: Record, names: Sequence[str]) -> Html:
    title = f"Example {example.get('index', '?')}"
    if example.get("label") is not None:
        predicted = example.get("predicted")
        title += f", label {example['label']}"
        title += "" if predicted in (None, example["label"]) else f", predicted {predicted}"
    scores: Record = example.get("scores") or {}
    if "image" in example:
        body = _example_image(example["image"], scores)
    elif "texts" in example:
        body = _example_text([str(text) for text in example["texts"]], scores)
    else:
        body = _example_row(as_floats(example.get("values")), as_floats(scores.get("integrated_gradients")), names)
    return join([tag("h3", title), body])


def _example_image(pixels: Any, scores: Record) -> Html:
    figures = [_figure(image(photo(pixels), "the example"), "as given")]
    for method, text in METHODS.items():
        if _is_image(scores.get(method)):
            figures.append(_figure(image(heat(scores[method], signed=method in SIGNED), text), text))
    return tag("div", *figures, class_="pictures")


def _example_text(texts: Sequence[str], scores: Record) -> Html:
    lines = [
        join([tag("p", METHODS[method], class_="dim"), _colored(texts, as_floats(scores[method]), method in SIGNED)])
        for method in METHODS
        if method in scores
    ]
    return join([lines[0], folded("The other methods", *lines[1:])]) if lines else join([])


def _colored(texts: Sequence[str], scores: Sequence[float], signed: bool) -> Html:
    largest = max((abs(_finite(score)) for score in scores), default=0.0) or 1.0
    spans = []
    for text, score in zip(texts, scores, strict=False):
        kind = ("pro" if score >= 0 else "con") if signed else "strong"
        share = 0.6 * abs(_finite(score)) / largest  # never so strong that the text on it is unreadable
        spans.append(tag("span", _visible(text), class_=kind, style=f"--a:{share:.2f}", title=number(score)))
    # Characters follow each other; words, or numbers that stand for them, are a little apart.
    apart = bool(texts) and sum(map(len, texts)) > 1.5 * len(texts)
    return tag("div", *spans, class_="tokens apart" if apart else "tokens")


def _example_row(values: Sequence[float], scores: Sequence[float], names: Sequence[str]) -> Html:
    order = sorted(range(len(scores)), key=lambda at: -abs(_finite(scores[at])))[:8]
    largest = abs(_finite(scores[order[0]])) if order else 0.0
    spans = []
    for at in order:
        name = names[at] if at < len(names) else f"feature {at}"
        value = number(values[at]) if at < len(values) else "?"
        style = f"--a:{0.6 * abs(_finite(scores[at])) / (largest or 1.0):.2f}"
        kind = "pro" if scores[at] >= 0 else "con"
        spans.append(tag("span", f"{name} = {value}", class_=kind, style=style, title=number(scores[at])))
    return tag("div", *spans, class_="tokens apart")


def _figure(shown: Html, caption: str) -> Html:
    return tag("figure", shown, tag("figcaption", caption))


def _visible(text: object) -> str:
    """Returns a token with visible line ends and tabs; one of nothing but spaces with the sign for them."""
    shown = str(text).translate(WHITESPACE)
    return shown if shown.strip() else shown.replace(" ", "␣") or "␣"


def _is_image(values: Any) -> bool:
    return values is not None and np.ndim(values) == 2 and np.size(values) > 0


def _over_mean(values: Sequence[float]) -> list[float]:
    mean = sum(map(_finite, values)) / max(len(values), 1)
    return [value / mean if mean else value for value in values]


_PAGE = {
    "signal": ("Signal and noise", _signal),
    "layers": ("Layers", _layers),
    "saliency": ("Which inputs matter", _saliency),
    "robustness": ("Robustness", _robustness),
    "samples": ("One example at a time", _samples),
    "landscape": ("Loss along the update", _landscape),
}
