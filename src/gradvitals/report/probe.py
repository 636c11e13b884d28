"""A probe's record as tables for the terminal and as one HTML file, which opens from disk without network.

Both show the same content: facts, tables and drawings. Names come from outside: they are text, never markup.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from gradvitals.report.charts import Axis, bar, heat, histogram, image, interval_mark, line_chart, photo
from gradvitals.report.format import clean, duration, interval, number, percent, plural, sparkline
from gradvitals.report.markup import Html, Part, document, folded, join, table, tag
from gradvitals.report.terminal import FittedTable, Paragraph, grouped

Record = Mapping[str, Any]

SEVERITIES = {"critical": "bold red", "warning": "yellow", "info": "cyan", "fine": "green"}
VERDICTS = {
    "signal": ("fine", "green"),
    "nonfinite": ("critical", "bold red"),
    "exploding": ("critical", "red"),
    "vanishing": ("critical", "yellow"),
    "none": ("", "yellow"),
}
"""The class of each verdict on the page, and its style in the terminal."""
STANDING_OUT = ("nonfinite", "exploding", "none", "vanishing")
METHODS = {
    "integrated_gradients": "Integrated gradients",
    "gradient_x_input": "Gradient × input",
    "gradient": "Gradient",
    "smoothgrad": "SmoothGrad",
}
SIGNED = ("integrated_gradients", "gradient_x_input")
KINDS = {"noise": "Random noise", "fgsm": "FGSM", "pgd": "PGD"}
EXAMPLE_LISTS = {
    "suspects": ("Suspects", "The highest losses for their class: wrong labels come first here."),
    "largest": ("Largest gradients", "They decide most of a step."),
    "contrary": ("Most contrary", "They point away from the mean direction of the others; labels may be wrong here."),
}
"""The lists of single examples, in the order they are shown."""
VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥"})

TEXT_WIDTH = 110
MAX_ROWS = 40
"""Rows of a table in the terminal; with more, those that stand out come first."""
MAX_OPEN_ROWS = 24
"""Rows of a table on the page that are not folded."""
MAX_BARS = 20
MAX_NAMES = 8


# -- the content -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A cell with more than its text: markup on the page, a style in the terminal."""

    text: str
    html: Html
    style: str = ""


@dataclass(frozen=True)
class Facts:
    """Names, values and remarks."""

    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Note:
    """An explanation on the page."""

    text: str


@dataclass(frozen=True)
class Drawing:
    """Something for the page alone, with what the terminal shows in its place."""

    html: Html
    text: str = ""


@dataclass(frozen=True)
class Rows:
    """A table."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    left: Sequence[str] = ()
    """Columns of text, beside the first."""
    optional: Sequence[str] = ()
    """Columns that a narrow terminal drops, the last first."""
    extra: Sequence[str] = ()
    """Columns for the page alone."""
    folded: bool = False
    """Whether the page folds the whole table."""
    most: int = MAX_ROWS
    """Rows in the terminal."""
    open_rows: int = MAX_OPEN_ROWS
    """Rows on the page that are not folded."""
    verdicts: Sequence[str] = ()
    """The verdict of each row, by which the terminal chooses if there are too many."""


Block = Facts | Note | Drawing | Rows


def _numbers(row: Record, keys: str) -> list[str]:
    return [number(row[key]) for key in keys.split()]


def _span(row: Record, low: str, high: str) -> str:
    return "" if math.isnan(row[low]) and math.isnan(row[high]) else f"{number(row[low])} to {number(row[high])}"


def _gsnr(row: Record) -> str:
    """Returns a GSNR with its interval; only its upper end if the estimate is not above zero."""
    value, end = row["gsnr"], row["gsnr_high"]
    return f"below {number(end)}" if value <= 0 < end else interval(value, row["gsnr_low"], end)


def _bar(value: float, largest: float, text: str) -> Cell:
    return Cell(text, bar(value, largest, text))


def _verdict_cell(row: Record) -> Cell:
    verdict = row["verdict"]
    kind, style = VERDICTS.get(verdict, ("", ""))
    return Cell(verdict, tag("span", verdict, class_=f"word {kind}".strip(), title=row["words"]), style)


def _charts(*charts: Part, text: str = "") -> Drawing:
    return Drawing(tag("div", *charts, class_="charts"), text)


def _signal(signal: Record) -> Iterator[Block]:
    total, limits = signal["total"], signal["thresholds"]
    ends = f"{_span(total, 'noise_scale_low', 'noise_scale_high')} examples"
    facts = [
        (f"GSNR, batches of {signal['batch_size']}", number(total["gsnr"]), _span(total, "low", "high")),
        ("Noise scale", number(total["noise_scale"], missing="unknown"), ends),
        ("Norm of the mean gradient", number(total["norm"]), ""),
    ]
    for name, key, limit, text in (
        ("Vanishing", "vanishing_names", "vanishing", "norm under {}"),
        ("Exploding", "exploding_names", "exploding", "norm over {}"),
        ("Small for this model", "vanishing_relative_names", "relative_low", "under {} × the median"),
        ("Large for this model", "exploding_relative_names", "relative_high", "over {} × the median"),
    ):
        if limits[limit] is not None:
            facts.append((name, str(len(limits[key])), f"tensors, {text.format(number(limits[limit]))}"))
    yield Facts(facts)
    yield Note(
        "GSNR is the squared mean of the gradient over its variance from batch to batch: above 1, a batch shows the "
        "direction more than its own noise. The line is the 95% interval, the dashed mark is 1."
    )
    layers, tensors = signal["layers"], signal["tensors"]
    values = [row[key] for row in layers for key in ("gsnr", "gsnr_low", "gsnr_high")]
    axis = Axis.over([*(v for v in values if 1e-4 < v < math.inf), 0.1, 10.0], 5, 115, logarithmic=True)
    by_layer = [
        (
            row["layer"] or "(model)",
            _verdict_cell(row),
            Cell("", interval_mark(row["gsnr"], row["gsnr_low"], row["gsnr_high"], axis)),
            _gsnr(row),
            *_numbers(row, "norm cv"),
        )
        for row in layers
    ]
    heads = ("Layer", "Verdict", "GSNR", "95% interval", "Norm", "Norm's CV")
    yield Drawing(_html_table(Rows(heads, by_layer, left=("Verdict", "GSNR"))))
    note = (
        "GSNR is that of the whole tensor. Median, mean and the share below 1 are over single coordinates, debiased; "
        "the plug-in columns are mean² / (variance + 1e-8), as often computed, with its bias."
    )
    plug_in = ("Median, plug-in", "Mean, plug-in", "Below 1, plug-in")
    yield Note(note)
    yield Rows(
        ("Tensor", "Verdict", "GSNR", "CV", "Norm", "Median", "Below 1", "Mean", "Shape", *plug_in),
        [
            (
                row["name"],
                _verdict_cell(row),
                _gsnr(row),
                *_numbers(row, "cv norm median"),
                percent(row["below_one"]),
                number(row["mean"]),
                "×".join(map(str, row["shape"])) or "scalar",
                *_numbers(row, "plug_in_median plug_in_mean"),
                percent(row["plug_in_below_one"]),
            )
            for row in tensors
        ],
        title=f"Every tensor ({len(tensors)})",
        left=("Verdict",),
        optional=("CV", "Norm", "Median", "Below 1"),
        extra=("Mean", "Shape", *plug_in),
        folded=True,
        verdicts=[row["verdict"] for row in tensors],
    )


def _layers(layers: Record) -> Iterator[Block]:
    rows = layers["tensors"]
    update = {
        "optimizer": "the update is the optimizer's next step",
        "lr": "the update is learning rate times gradient",
        "none": "without a learning rate or an optimizer there is no update",
    }[layers["update_by"]]
    largest = max((row["update_ratio"] for row in rows if row["update_ratio"] > 0), default=math.nan)
    cells: list[Sequence[str | Cell]] = [
        (
            row["name"],
            "-" if math.isnan(row["update_ratio"]) else _bar(row["update_ratio"], largest, number(row["update_ratio"])),
            "-"
            if math.isnan(row["effective_rank"])
            else _bar(row["rank_share"], 1.0, f"{number(row['effective_rank'])} of {row['full_rank']}"),
            *_numbers(row, "grad_norm weight_norm update_norm"),
        )
        for row in rows
    ]
    yield Rows(
        ("Tensor", "Update / weight", "Effective rank", "Gradient", "Weight", "Update"),
        cells,
        title=f"Norms, and the effective rank of the gradient; {update}",
        optional=("Effective rank", "Gradient", "Weight", "Update"),
    )
    if layers["activations"]:
        units: list[Sequence[str | Cell]] = [
            (
                *(str(row[key]) for key in ("module", "kind", "units", "dead")),
                _bar(row["dead_share"], 1.0, percent(row["dead_share"])),
                *(percent(row[key]) for key in ("saturated_share", "zero_share")),
            )
            for row in layers["activations"]
        ]
        heads = ("Module", "Kind", "Units", "Dead", "Dead share", "Saturated", "Zeros")
        yield Rows(heads, units, title="Activations", left=("Kind",), optional=("Saturated", "Zeros", "Dead share"))


def _samples(samples: Record) -> Iterator[Block]:
    scale = number(samples["noise_scale"], missing="unknown")
    osgr = f"{_span(samples, 'osgr_low', 'osgr_high')} for {samples['train_size']} training examples"
    count, total = samples["examples"], samples["train_size"]
    counted = f"{count} of {total:,}" if total > count else f"{count}"
    yield Facts(
        [
            ("Examples", counted, f"by {samples['method']}"),
            ("GSNR of one example", number(samples["gsnr"]), _span(samples, "low", "high")),
            ("Noise scale, examples", scale, _span(samples, "noise_scale_low", "noise_scale_high")),
            ("OSGR, first step", number(samples["osgr"]), osgr),
        ]
    )
    why = f": {samples['why']}" if samples["why"] else ""
    yield Note(
        f"{counted} examples, each with its own gradient ({samples['method']}{why}). OSGR, the one-step generalization "
        "ratio, is the share of a small step's gain on the training set that carries over to new data."
    )
    cosines = histogram(
        samples["histogram"]["edges"],
        samples["histogram"]["counts"],
        title="Agreement with the other examples",
        x_name="cosine with the mean gradient of the others",
        y_name="examples",
    )
    norms = sorted((norm for norm in samples["norms"] if math.isfinite(norm)), reverse=True)
    ranked = line_chart(
        {"norm": ([float(at) for at in range(1, len(norms) + 1)], norms)},
        title="Gradient norms, largest first",
        x_name="rank of the example",
        y_name="norm",
        y_log=bool(norms) and 0 < norms[-1] < norms[0] / 20,
    )
    yield _charts(cosines, ranked)
    heads = ("Example", "Label", "Loss", "Above usual", "Norm / median", "Norm", "Cosine")
    for key, (title, remark) in EXAMPLE_LISTS.items():
        cells = []
        for row in samples[key]:
            place = f"batch {row['batch']}, place {row['position']}"
            name = place if row["dataset_index"] is None else str(row["dataset_index"])
            label = "-" if row["label"] is None else str(row["label"])
            cells.append((name, label, *_numbers(row, "loss excess_loss norm_over_median norm cosine")))
        optional = ("Norm / median", "Cosine", "Norm")
        yield Rows(heads, cells, title=f"{title}. {remark}", optional=optional, most=10 if key == "suspects" else 5)


def _is_steep(values: Sequence[float]) -> bool:
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 30 * min(finite)


def _landscape(found: Record) -> Iterator[Block]:
    losses, is_update = found["line"]["loss"], found["direction"] == "update"
    steep = _is_steep(losses)
    marks = {"one step": 1.0} if is_update else {"lr": found["lr"] or math.nan, "2 / top eigenvalue": found["edge"]}
    chart = line_chart(
        {"loss": (found["line"]["step"], losses)},
        title=f"Loss along the {found['direction']}",
        x_name="multiples of the optimizer's step" if is_update else "step along the negative gradient",
        y_name="loss, logarithmic" if steep else "loss",
        y_log=steep,
        marks={**marks, "lowest": found["best_step"]},
    )
    unconverged = "" if found["converged"] else ", not converged"
    products = f"{found['method']}, {plural(found['iterations'], 'product')}{unconverged}"
    rows = [("Top Hessian eigenvalue", number(found["top_eigenvalue"]), products)]
    if found["lr"]:
        rows.append(("2 / learning rate", number(found["sharpness_limit"]), "the sharpness that this rate can bear"))
    rows += [
        ("2 / top eigenvalue", number(found["edge"]), "largest stable rate of plain gradient descent"),
        ("Curvature along the line", number(found["curvature"]), ""),
        ("Lowest loss at step", number(found["best_step"]), ""),
    ]
    if found["lr"]:
        over = number(found["lr_over_edge"])
        rows.append(("Rate over the edge", over, "above 1, plain gradient descent diverges"))
    yield Facts(rows)
    ends = f"{number(losses[0], 4)} at 0 to {number(losses[-1], 4)} at {number(found['line']['step'][-1])}"
    yield _charts(chart, text=f"loss along the {found['direction']}  {sparkline(losses, len(losses))}  {ends}")


def _robustness(found: Record) -> Iterator[Block]:
    relative, curves = found["relative"], found["curves"]
    has_classes = not math.isnan(found["chance"])
    metrics = ("loss", "accuracy") if has_classes else ("loss",)
    drawn = {
        metric: {KINDS[kind]: (relative[1:], curve[metric][1:]) for kind, curve in curves.items()} for metric in metrics
    }
    steep = _is_steep([value for _, values in drawn["loss"].values() for value in values])
    size, unit = "size, in standard deviations of the data", "logarithmic" if steep else ""
    charts = [line_chart(drawn["loss"], title="Loss", x_name=size, y_name=unit, x_log=True, y_log=steep)]
    rows = [("Loss, unchanged data", number(curves["pgd"]["loss"][0]), "")]
    if has_classes:
        accuracies = drawn["accuracy"]
        charts.append(line_chart(accuracies, title="Accuracy", x_name=size, y_name="", x_log=True, y_range=(0.0, 1.0)))
        rows.append(("Accuracy, unchanged data", number(curves["pgd"]["accuracy"][0]), ""))
    constants = found["lipschitz"]
    largest = f"of the output: median; largest {number(constants['largest'])}"
    rows += [
        ("Local Lipschitz constant", number(constants["median"]), largest),
        ("Slope of the loss", number(found["slope"]), "under FGSM, per unit of size"),
    ]
    for kind, half in found["half_at"].items():
        if not math.isnan(half):
            lost = "standard deviations; of the accuracy above that of the most common answer"
            rows.append((f"Half is lost, {KINDS[kind]}", number(half), lost))
    yield Facts(rows)
    what = "the vectors of its tokens" if found["where"] == "embeddings" else "its inputs"
    yield Note(
        f"The model runs again, in eval mode, with {what} changed, each value by up to the size: by random signs, by "
        "the signs that raise the loss most at first (FGSM), and by several such steps (PGD). One standard deviation "
        f"of the data is {number(found['scale'])}; in a table every column has its own, and this is their median."
    )
    yield _charts(*charts)
    heads = ("Standard deviations", *(f"{KINDS[kind]}, {metric}" for metric in metrics for kind in curves), "Size")
    columns = [relative, *(curve[metric] for metric in metrics for curve in curves.values()), found["sizes"]]
    cells = [list(map(number, row)) for row in zip(*columns, strict=True)]
    title = f"{' and '.join(metrics).capitalize()} when {found['where']} change"
    yield Rows(heads, cells, title=title, optional=heads[2:], folded=True)


# -- which inputs matter ---------------------------------------------------------------------------------------------


def _saliency(found: Record) -> Iterator[Block]:
    profiles, names, complete = found["profiles"], found["names"], found["completeness"]
    explains = found["explains"]
    what = "the vectors of the tokens" if found["where"] == "embeddings" else "the data"
    yield Note(
        f"How {explains} depends on {what} at “{found['place']}”, over {found['examples']} examples in eval mode. "
        f"Integrated gradients distribute the answer: they sum to {number(complete['found'])}, and the answer differs "
        f"from that for zeros by {number(complete['expected'])}."
    )
    for axis in profiles["gradient"]:
        series = {METHODS[method]: profiles[method][axis] for method in METHODS}
        if axis == "picture":
            maps = _pictures({name: heat(picture, signed=False) for name, picture in series.items()})
            yield Drawing(join([tag("h3", "By place in the image, mean over examples"), maps]))
        elif len(series["Gradient"]) > 1:
            yield _profile(axis, series, names.get(axis, []))
    if len(found["by_class"]) > 1:
        yield from _by_class(found["by_class"], names)
    if found["tokens"]:
        largest = max(token["score"] for token in found["tokens"])
        rows = [
            (_visible(token["text"]), str(token["count"]), _bar(token["score"], largest, number(token["score"])))
            for token in found["tokens"]
        ]
        heads = ("Token", "Seen", "Mean strength")
        yield Rows(heads, rows, title="By token (integrated gradients)", most=MAX_NAMES, open_rows=MAX_BARS)
    if found["shown"]:
        remark = f"Blue raises {explains}, red lowers it; orange is strength without a sign."
        examples = (part for example in found["shown"] for part in _example(example, names.get("feature", [])))
        yield Drawing(join([tag("h3", "Some examples"), tag("p", remark, class_="dim"), *examples]))


def _profile(axis: str, series: Mapping[str, Sequence[float]], names: Sequence[str]) -> Block:
    """Returns a few entries as bars, many in a row (positions) as lines."""
    count = len(series["Gradient"])
    if axis in ("position", "frame") or count > 400:
        # Each over its own mean, because their units differ.
        lines = {}
        for name in ("Integrated gradients", "Gradient"):
            mean = sum(series[name]) / count
            lines[name] = (list(map(float, range(count))), [value / mean if mean else value for value in series[name]])
        steep = max(max(values) for _, values in lines.values()) > 20
        unit = "over the mean, logarithmic" if steep else "over the mean"
        return _charts(line_chart(lines, title=f"By {axis}", x_name=axis, y_name=unit, y_log=steep))
    rows: list[Sequence[str | Cell]] = []
    for at in sorted(range(count), key=lambda at: -series["Integrated gradients"][at]):
        bars = (_bar(values[at], max(values), number(values[at])) for values in series.values())
        rows.append((names[at] if at < len(names) else f"{axis} {at}", *bars))
    heads = (axis.capitalize(), *series)
    return Rows(heads, rows, title=f"By {axis}", optional=heads[2:], most=MAX_NAMES, open_rows=MAX_BARS)


def _by_class(by_class: Mapping[str, Record], names: Mapping[str, Sequence[str]]) -> Iterator[Block]:
    title, axes = "By class (integrated gradients)", next(iter(by_class.values()))
    axis = next((axis for axis in ("feature", "channel") if axis in axes), None)
    if "picture" in axes:
        maps = {f"class {name}": heat(found["picture"], signed=False) for name, found in by_class.items()}
        yield Drawing(join([tag("h3", title), _pictures(maps)]))
    elif axis is not None:
        called, rows = names.get(axis, []), []
        for label, profile in by_class.items():
            scores = profile[axis]
            total = sum(scores) or 1.0
            best = sorted(range(len(scores)), key=lambda at: -scores[at])[:5]
            texts = [f"{called[at] if at < len(called) else at} ({percent(scores[at] / total, 2)})" for at in best]
            rows.append((label, ", ".join(texts)))
        heads = ("Class", f"{axis.capitalize()}s with the largest share")
        yield Rows(heads, rows, title=title, left=heads[1:], optional=heads[1:])


def _example(example: Record, names: Sequence[str]) -> Iterator[Part]:
    title = f"Example {example['index']}"
    if example["label"] is not None:
        title += f", label {example['label']}"
        title += "" if example["predicted"] == example["label"] else f", predicted {example['predicted']}"
    yield tag("h3", title)
    scores = {method: example["scores"][method] for method in METHODS}
    if "image" in example:
        pictures = {"as given": photo(example["image"])}
        yield _pictures(pictures | {METHODS[method]: heat(s, signed=method in SIGNED) for method, s in scores.items()})
    elif "texts" in example:
        texts = [_visible(text) for text in example["texts"]]
        # Characters follow each other; words, or numbers that stand for them, are a little apart.
        apart = sum(map(len, texts)) > 1.5 * len(texts)
        heads = (tag("p", METHODS[method], class_="dim") for method in scores)
        tokens = (_colored(texts, scores[method], signed=method in SIGNED, apart=apart) for method in scores)
        first, *others = map(join, zip(heads, tokens, strict=True))
        yield first
        yield folded("The other methods", *others)
    else:
        found, values = scores["integrated_gradients"], example["values"]
        order = sorted(range(len(found)), key=lambda at: -abs(found[at]))[:8]
        texts = [f"{names[at] if at < len(names) else f'feature {at}'} = {number(values[at])}" for at in order]
        yield _colored(texts, [found[at] for at in order], signed=True, apart=True)


def _colored(texts: Sequence[str], scores: Sequence[float], *, signed: bool, apart: bool) -> Html:
    """Returns the texts with a background by their scores, never so strong that they are unreadable."""
    largest = max((abs(score) for score in scores), default=0.0) or 1.0
    spans = []
    for text, score in zip(texts, scores, strict=True):
        kind = ("pro" if score >= 0 else "con") if signed else "strong"
        spans.append(tag("span", text, class_=kind, style=f"--a:{0.6 * abs(score) / largest:.2f}", title=number(score)))
    return tag("div", *spans, class_="tokens apart" if apart else "tokens")


def _pictures(pictures: Mapping[str, Any]) -> Html:
    figures = (tag("figure", image(pixels, name), tag("figcaption", name)) for name, pixels in pictures.items())
    return tag("div", *figures, class_="pictures")


def _visible(text: str) -> str:
    """Returns a token with visible line ends and tabs; one of nothing but spaces with the sign for them."""
    shown = text.translate(VISIBLE)
    return shown if shown.strip() else shown.replace(" ", "␣") or "␣"


SECTIONS = {
    "signal": ("Signal and noise", _signal),
    "layers": ("Layers", _layers),
    "saliency": ("Which inputs matter", _saliency),
    "robustness": ("Robustness", _robustness),
    "samples": ("One example at a time", _samples),
    "landscape": ("Loss along the update", _landscape),
}


def _sentence(about: Record) -> str:
    task = "" if about["task"] == "unknown" else f", {about['task']} task"
    optimizer = f", {about['optimizer']}" if about["optimizer"] else ""
    lr = f", lr {number(about['lr'])}" if about["lr"] else ""
    batches = f"{about['batches']} batch{'es' if about['batches'] != 1 else ''} of {about['batch_size']} examples"
    return (
        f"{about['num_parameters']:,} parameters in {plural(about['num_tensors'], 'tensor')}{task}, {about['mode']} "
        f"mode on {about['device']}{optimizer}{lr}; {batches}, loss {number(about['loss'], 4)}, "
        f"{duration(about['seconds'])}"
    )


# -- the page --------------------------------------------------------------------------------------------------------


def probe_page(record: Record) -> str:
    """Returns a whole HTML document for the record of a probe."""
    notes = record["notes"]
    sections = {key: section for key, section in SECTIONS.items() if record[key]}
    links = [tag("a", title, href=f"#q-{key}") for key, (title, _) in sections.items()]
    name = f"Probe of {record['about']['model']}"
    listed = tag("ul", *(tag("li", note) for note in notes))
    parts = (
        tag("section", tag("h2", title, id=f"q-{key}"), *map(_html, content(record[key])))
        for key, (title, content) in sections.items()
    )
    return document(
        name,
        tag("h1", name),
        tag("p", _sentence(record["about"]), class_="dim"),
        tag("ul", *map(_html_verdict, record["verdict"]), class_="verdict"),
        folded(f"Notes ({len(notes)})", listed, opened=len(notes) <= 3) if notes else None,
        tag("nav", *links, aria_label="Sections"),
        *parts,
    )


def _html_verdict(item: Record) -> Html:
    names = item["names"]
    more = f", and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return tag(
        "li",
        tag("span", item["severity"].capitalize(), class_="tag"),
        tag("b", item["title"]),
        tag("p", item["detail"]) if item["detail"] else None,
        tag("p", ", ".join(names[:MAX_NAMES]) + more, class_="names") if names else None,
        tag("p", f"Try: {item['advice']}.", class_="dim") if item["advice"] else None,
        class_=item["severity"],
    )


def _html(block: Block) -> Html:
    if isinstance(block, Drawing):
        return block.html
    if isinstance(block, Note):
        return tag("p", block.text, class_="dim")
    if isinstance(block, Facts):
        boxes = (
            tag("div", tag("dt", name), tag("dd", value, tag("small", remark) if remark else None))
            for name, value, remark in block.rows
        )
        return tag("dl", *boxes, class_="facts")
    if block.folded:
        return folded(block.title, _html_table(block))
    return join([tag("h3", block.title), _html_table(block)])


def _html_table(block: Rows) -> Html:
    """Returns the first rows of a table, and the others folded."""

    def cell(head: str, content: str | Cell) -> Part:
        part = content.html if isinstance(content, Cell) else content
        return tag("span", part, class_="left") if head in block.left else part

    heads = [cell(head, head) for head in block.heads]
    rows = [[cell(*pair) for pair in zip(block.heads, row, strict=True)] for row in block.rows]
    rest = rows[block.open_rows :]
    more = None if block.folded or not rest else folded(f"{len(rest)} more", table(heads, rest))
    return join([table(heads, rows if block.folded else rows[: block.open_rows]), more])


# -- the terminal ----------------------------------------------------------------------------------------------------


def probe_text(record: Record, width: int = TEXT_WIDTH) -> str:
    """Returns everything a probe found as plain text."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, markup=False, emoji=False, highlight=False, color_system=None)
    console.print(render_probe(record))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


@grouped
def render_probe(record: Record) -> Iterator[RenderableType]:
    """Returns the same, ready for `rich.console.Console.print`."""
    about = record["about"]
    yield Text(clean(about["model"]), style="bold").append(f"  {clean(_sentence(about))}", style="not bold")
    yield Text()
    for found in record["verdict"]:
        text = Text(clean(found["title"]))
        if found["detail"]:
            text.append(f"  {clean(found['detail'])}", style="dim")
        if found["advice"] and found["severity"] != "fine":
            text.append(f"  Try: {clean(found['advice'])}.")
        yield Paragraph(f"  {found['severity']:<9}", text, SEVERITIES[found["severity"]])
    for note in record["notes"]:
        yield Paragraph("  note     ", Text(clean(note), style="dim"), "dim")
    for question, (title, content) in SECTIONS.items():
        if record[question]:
            yield from (Text(), Text(title, style="bold"))
            for block in content(record[question]):
                yield from _in_terminal(block)


def _in_terminal(block: Block) -> Iterator[RenderableType]:
    if isinstance(block, Facts):
        width = max(len(name) for name, _, _ in block.rows) + 4
        for name, value, remark in block.rows:
            yield Paragraph(f"  {name}".ljust(width), f"{value}  {clean(remark)}")
    elif isinstance(block, Drawing) and block.text:
        yield Paragraph("  ", block.text)
    elif isinstance(block, Rows):
        kept = [place for place, head in enumerate(block.heads) if head not in block.extra]
        shown = FittedTable(block.title, [block.heads[at] for at in kept], left=block.left, optional=block.optional)
        for at in _chosen(block):
            cells = [block.rows[at][place] for place in kept]
            shown.add(*(Text(cell.text, cell.style) if isinstance(cell, Cell) else cell for cell in cells))
        yield shown
        if len(block.rows) > block.most:
            yield Text(f"  and {len(block.rows) - block.most} more, in --json and in the page", style="dim")


def _chosen(block: Rows) -> Iterable[int]:
    """Returns the rows to show, in order, with those that stand out."""

    def weight(at: int) -> int:
        verdict = block.verdicts[at] if block.verdicts else ""
        return STANDING_OUT.index(verdict) if verdict in STANDING_OUT else len(STANDING_OUT)

    return sorted(sorted(range(len(block.rows)), key=weight)[: block.most])
