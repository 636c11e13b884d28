"""A probe's record as one HTML file, which opens from disk without network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradvitals.report.charts import Axis, bar, heat, histogram, image, interval_mark, line_chart, photo
from gradvitals.report.format import duration, number, percent
from gradvitals.report.markup import Html, Part, document, facts, folded, join, table, tag
from gradvitals.report.probe_terminal import EXAMPLE_LISTS, counted_examples, example_label, example_name, gsnr_text

Record = Mapping[str, Any]
Fact = tuple[str, str, str]

SEVERITIES = {"critical": "Critical", "warning": "Warning", "info": "Info", "fine": "Fine"}
VERDICT_CLASSES = {"signal": "fine", "vanishing": "critical", "exploding": "critical", "nonfinite": "critical"}
METHODS = {
    "integrated_gradients": "Integrated gradients",
    "gradient_x_input": "Gradient × input",
    "gradient": "Gradient",
    "smoothgrad": "SmoothGrad",
}
SIGNED = ("integrated_gradients", "gradient_x_input")
KINDS = {"noise": "Random noise", "fgsm": "FGSM", "pgd": "PGD"}
VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥"})

MAX_ROWS = 24
"""Rows of a table that are not folded."""
MAX_BARS = 20
MAX_NAMES = 8


def probe_page(record: Record) -> str:
    """Returns a whole HTML document for the record of a probe."""
    about, notes = record["about"], record["notes"]
    sections = {key: section for key, section in SECTIONS.items() if record[key]}
    links = [tag("a", title, href=f"#q-{key}") for key, (title, _) in sections.items()]
    name = f"Probe of {about['model']}"
    return document(
        name,
        tag("h1", name),
        tag("p", _sentence(about), class_="dim"),
        tag("ul", *map(_verdict, record["verdict"]), class_="verdict"),
        facts(_about(about)),
        folded(f"Notes ({len(notes)})", tag("ul", *(tag("li", note) for note in notes)), opened=len(notes) <= 3)
        if notes
        else None,
        tag("nav", *links, aria_label="Sections"),
        *(
            tag("section", tag("h2", title, id=f"q-{key}"), *render(record[key]))
            for key, (title, render) in sections.items()
        ),
    )


def _sentence(about: Record) -> str:
    task = "" if about["task"] == "unknown" else f", {about['task']}"
    return (
        f"{about['num_parameters']:,} parameters in {about['num_tensors']} tensors, {about['batches']} batches of "
        f"{about['batch_size']} examples{task}, {about['device']}, {about['mode']} mode, {duration(about['seconds'])}"
    )


def _about(about: Record) -> Iterator[Fact]:
    losses = [loss for loss in about["losses"] if math.isfinite(loss)] or [math.nan]
    yield "Loss", number(about["loss"]), f"{number(min(losses))} to {number(max(losses))} over batches"
    if about["optimizer"]:
        yield "Optimizer", about["optimizer"], ""
    if about["lr"] is not None:
        yield "Learning rate", number(about["lr"]), ""
    if about["train_size"] is not None:
        yield "Training examples", number(about["train_size"]), ""


def _verdict(item: Record) -> Html:
    names = item["names"]
    more = f", and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return tag(
        "li",
        tag("span", SEVERITIES[item["severity"]], class_="tag"),
        tag("b", item["title"]),
        tag("p", item["detail"]) if item["detail"] else None,
        tag("p", ", ".join(names[:MAX_NAMES]) + more, class_="names") if names else None,
        tag("p", f"Try: {item['advice']}.", class_="dim") if item["advice"] else None,
        class_=item["severity"],
    )


def _note(text: str) -> Html:
    return tag("p", text, class_="dim")


def _span(row: Record, low: str, high: str) -> str:
    return "" if math.isnan(row[low]) and math.isnan(row[high]) else f"{number(row[low])} to {number(row[high])}"


def _numbers(row: Record, *keys: str) -> list[str]:
    return [number(row[key]) for key in keys]


def _left(content: Part, **attributes: object) -> Html:
    return tag("span", content, class_="left", **attributes)


def _long_table(heads: Sequence[Part], rows: Sequence[Sequence[Part]], what: str, limit: int = MAX_ROWS) -> Html:
    """Returns the first rows, and the others folded."""
    first = table(heads, rows[:limit])
    if len(rows) <= limit:
        return first
    return join([first, folded(f"{len(rows) - limit} more{what}", table(heads, rows[limit:]))])


def _charts(*charts: Part) -> Html:
    return tag("div", *charts, class_="charts")


# -- signal, layers, samples, landscape, robustness ----------------------------------------------------------------


def _signal(signal: Record) -> Iterator[Part]:
    total, limits = signal["total"], signal["thresholds"]
    ends = f"{_span(total, 'noise_scale_low', 'noise_scale_high')} examples"
    rows = [
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
            rows.append((name, str(len(limits[key])), f"tensors, {text.format(number(limits[limit]))}"))
    yield facts(rows)
    yield _note(
        "GSNR is the squared mean of the gradient over its variance from batch to batch: above 1, a batch shows the "
        "direction more than its own noise. The line is the 95% interval, the dashed mark is 1."
    )
    layers, tensors = signal["layers"], signal["tensors"]
    values = [row[key] for row in layers for key in ("gsnr", "gsnr_low", "gsnr_high")]
    axis = Axis.over([*(v for v in values if 1e-4 < v < math.inf), 0.1, 10.0], 5, 115, logarithmic=True)
    by_layer: list[list[Part]] = [
        [
            row["layer"] or "(model)",
            _verdict_cell(row),
            _left(interval_mark(row["gsnr"], row["gsnr_low"], row["gsnr_high"], axis)),
            gsnr_text(row),
            *_numbers(row, "norm", "cv"),
        ]
        for row in layers
    ]
    yield _long_table(
        ["Layer", _left("Verdict"), _left("GSNR"), "95% interval", "Norm", "Norm's CV"], by_layer, " layers"
    )
    by_tensor: list[list[Part]] = [
        [
            row["name"],
            _verdict_cell(row),
            "×".join(map(str, row["shape"])) or "scalar",
            *_numbers(row, "norm", "cv"),
            gsnr_text(row),
            *_numbers(row, "median", "mean"),
            percent(row["below_one"]),
            *_numbers(row, "plug_in_median", "plug_in_mean"),
            percent(row["plug_in_below_one"]),
        ]
        for row in tensors
    ]
    heads = ["Tensor", _left("Verdict"), "Shape", "Norm", "CV", "GSNR", "Median", "Mean", "Below 1"]
    heads += ["Median, plug-in", "Mean, plug-in", "Below 1, plug-in"]
    text = (
        "GSNR is that of the whole tensor. Median, mean and the share below 1 are over single coordinates, debiased; "
        "the plug-in columns are mean² / (variance + 1e-8), as often computed, with its bias."
    )
    yield folded(f"Every tensor ({len(tensors)})", _note(text), table(heads, by_tensor))


def _verdict_cell(row: Record) -> Html:
    verdict = row["verdict"]
    word = tag("span", verdict, class_=f"word {VERDICT_CLASSES.get(verdict, '')}".strip())
    return _left(word, title=row["words"])


def _layers(layers: Record) -> Iterator[Part]:
    rows = layers["tensors"]
    update = {
        "optimizer": "the update is the optimizer's next step",
        "lr": "the update is learning rate times gradient",
        "none": "without a learning rate or an optimizer there is no update",
    }[layers["update_by"]]
    yield _note(f"Norms of each tensor; {update}.")
    largest = max((row["update_ratio"] for row in rows if row["update_ratio"] > 0), default=math.nan)
    cells: list[list[Part]] = [
        [
            row["name"],
            *_numbers(row, "grad_norm", "weight_norm", "update_norm"),
            "-" if math.isnan(row["update_ratio"]) else bar(row["update_ratio"], largest, number(row["update_ratio"])),
            "-"
            if math.isnan(row["effective_rank"])
            else bar(row["rank_share"], 1.0, f"{number(row['effective_rank'])} of {row['full_rank']}"),
        ]
        for row in rows
    ]
    heads = ["Tensor", "Gradient", "Weight", "Update", "Update / weight", "Effective rank of the gradient"]
    yield _long_table(heads, cells, " tensors")
    if layers["activations"]:
        units = (
            [
                *(str(row[key]) for key in ("module", "kind", "units", "dead")),
                bar(row["dead_share"], 1.0, percent(row["dead_share"])),
                *(percent(row[key]) for key in ("saturated_share", "zero_share")),
            ]
            for row in layers["activations"]
        )
        yield tag("h3", "Activations")
        yield table(["Module", "Kind", "Units", "Dead", "Dead share", "Saturated", "Zeros"], units)


def _samples(samples: Record) -> Iterator[Part]:
    scale = number(samples["noise_scale"], missing="unknown")
    osgr = f"{_span(samples, 'osgr_low', 'osgr_high')} for {samples['train_size']} training examples"
    yield facts(
        [
            ("GSNR of one example", number(samples["gsnr"]), _span(samples, "low", "high")),
            ("Noise scale, examples", scale, _span(samples, "noise_scale_low", "noise_scale_high")),
            ("OSGR, first step", number(samples["osgr"]), osgr),
        ]
    )
    why = f": {samples['why']}" if samples["why"] else ""
    yield _note(
        f"{counted_examples(samples)} examples, each with its own gradient ({samples['method']}{why}). OSGR, the "
        "one-step generalization ratio, is the share of a small step's gain on the training set that carries over to "
        "new data."
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
    for key, (title, remark) in EXAMPLE_LISTS.items():
        keys = ("loss", "excess_loss", "norm_over_median", "norm", "cosine")
        cells = ([example_name(row), example_label(row), *_numbers(row, *keys)] for row in samples[key])
        yield tag("h3", title)
        yield _note(remark)
        yield table(["Example", "Label", "Loss", "Above usual", "Norm / median", "Norm", "Cosine"], cells)


def _is_steep(values: Sequence[float]) -> bool:
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 30 * min(finite)


def _landscape(found: Record) -> Iterator[Part]:
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
    converged = "" if found["converged"] else f"not converged in {found['iterations']} iterations"
    rows = [("Top Hessian eigenvalue", number(found["top_eigenvalue"]), converged)]
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
    yield facts(rows)
    yield _charts(chart)


def _robustness(found: Record) -> Iterator[Part]:
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
    lost = "standard deviations; of the accuracy above that of the most common answer"
    for kind, half in found["half_at"].items():
        if not math.isnan(half):
            rows.append((f"Half is lost, {KINDS[kind]}", number(half), lost))
    yield facts(rows)
    what = "the vectors of its tokens" if found["where"] == "embeddings" else "its inputs"
    yield _note(
        f"The model runs again, in eval mode, with {what} changed, each value by up to the size: by random signs, by "
        "the signs that raise the loss most at first (FGSM), and by several such steps (PGD). One standard deviation "
        f"of the data is {number(found['scale'])}; in a table every column has its own, and this is their median."
    )
    yield _charts(*charts)
    heads = ["Standard deviations", "Size"]
    heads += [f"{KINDS[kind]}, {metric}" for kind in curves for metric in metrics]
    columns = [relative, found["sizes"], *(curve[metric] for curve in curves.values() for metric in metrics)]
    yield folded("The numbers", table(heads, [map(number, row) for row in zip(*columns, strict=True)]))


# -- which inputs matter -------------------------------------------------------------------------------------------


def _saliency(found: Record) -> Iterator[Part]:
    profiles, names, complete = found["profiles"], found["names"], found["completeness"]
    explains = found["explains"]
    what = "the vectors of the tokens" if found["where"] == "embeddings" else "the data"
    yield _note(
        f"How {explains} depends on {what} at “{found['place']}”, over {found['examples']} examples in eval mode. "
        f"Integrated gradients distribute the answer: they sum to {number(complete['found'])}, and the answer differs "
        f"from that for zeros by {number(complete['expected'])}."
    )
    for axis in profiles["gradient"]:
        series = {METHODS[method]: profiles[method][axis] for method in METHODS}
        if axis == "picture":
            yield tag("h3", "By place in the image, mean over examples")
            yield _pictures({name: heat(picture, signed=False) for name, picture in series.items()})
        elif len(series["Gradient"]) > 1:
            yield from _profile(axis, series, names.get(axis, []))
    if len(found["by_class"]) > 1:
        yield from _by_class(found["by_class"], names)
    if found["tokens"]:
        largest = max(token["score"] for token in found["tokens"])
        rows: list[list[Part]] = [
            [_visible(token["text"]), str(token["count"]), bar(token["score"], largest, number(token["score"]))]
            for token in found["tokens"]
        ]
        yield tag("h3", "By token (integrated gradients)")
        yield _long_table(["Token", "Seen", "Mean strength"], rows, "", MAX_BARS)
    if found["shown"]:
        yield tag("h3", "Some examples")
        yield _note(f"Blue raises {explains}, red lowers it; orange is strength without a sign.")
        for example in found["shown"]:
            yield from _example(example, names.get("feature", []))


def _profile(axis: str, series: Mapping[str, Sequence[float]], names: Sequence[str]) -> Iterator[Part]:
    """Yields a few entries as bars, many in a row (positions) as lines."""
    count = len(series["Gradient"])
    if axis in ("position", "frame") or count > 400:
        # Each over its own mean, because their units differ.
        lines = {
            name: ([float(at) for at in range(count)], _over_mean(series[name]))
            for name in ("Integrated gradients", "Gradient")
        }
        steep = max(max(values) for _, values in lines.values()) > 20
        unit = "over the mean, logarithmic" if steep else "over the mean"
        yield _charts(line_chart(lines, title=f"By {axis}", x_name=axis, y_name=unit, y_log=steep))
        return
    rows: list[list[Part]] = []
    for at in sorted(range(count), key=lambda at: -series["Integrated gradients"][at]):
        bars = (bar(values[at], max(values), number(values[at])) for values in series.values())
        rows.append([names[at] if at < len(names) else f"{axis} {at}", *bars])
    yield tag("h3", f"By {axis}")
    yield _long_table([axis.capitalize(), *series], rows, "", MAX_BARS)


def _over_mean(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [value / mean if mean else value for value in values]


def _by_class(by_class: Mapping[str, Record], names: Mapping[str, Sequence[str]]) -> Iterator[Part]:
    title, axes = tag("h3", "By class (integrated gradients)"), next(iter(by_class.values()))
    axis = next((axis for axis in ("feature", "channel") if axis in axes), None)
    if "picture" in axes:
        yield title
        yield _pictures({f"class {name}": heat(found["picture"], signed=False) for name, found in by_class.items()})
    elif axis is not None:
        called, rows = names.get(axis, []), []
        for label, profile in by_class.items():
            scores = profile[axis]
            total = sum(scores) or 1.0
            best = sorted(range(len(scores)), key=lambda at: -scores[at])[:5]
            texts = [f"{called[at] if at < len(called) else at} ({percent(scores[at] / total, 2)})" for at in best]
            rows.append([label, _left(", ".join(texts))])
        yield title
        yield table(["Class", _left(f"{axis.capitalize()}s with the largest share")], rows)


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
        first, *others = (
            join([_note(METHODS[method]), _colored(texts, values, signed=method in SIGNED, apart=apart)])
            for method, values in scores.items()
        )
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
