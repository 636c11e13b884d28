"""A probe as one HTML file: no network, no script; pictures are inline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradvitals.show.document import document
from gradvitals.show.html import Html, Part, folded, join, table, tag
from gradvitals.show.probe_gradients import layers_section, signal_section
from gradvitals.show.probe_inputs import robustness_section, saliency_section
from gradvitals.show.probe_words import LISTS, examined, example_name, label_of
from gradvitals.show.svg import histogram, line_chart
from gradvitals.show.text import duration, number
from gradvitals.show.values import as_float, as_floats, facts, known, span

_SEVERITY = {"critical": "Critical", "warning": "Warning", "info": "Info", "fine": "Fine"}


def probe_page(record: Mapping[str, Any]) -> str:
    """The whole document.

    Args:
        record: a probe's plain record, as `Probe.record()` or `Probe.to_json()` gives it. Questions that were not asked
            are None or not there.

    Returns:
        HTML that opens from a file, in light and dark, on a phone and on paper.
    """
    about = record.get("about") or {}
    makers = {
        "signal": ("Signal and noise", signal_section),
        "layers": ("Layers", layers_section),
        "saliency": ("Which inputs matter", saliency_section),
        "robustness": ("Robustness", robustness_section),
        "samples": ("One example at a time", _samples),
        "landscape": ("Loss along the update", _landscape),
    }
    asked = {key: found for key, found in makers.items() if record.get(key)}
    sections = [
        tag("section", tag("h2", title, id=f"q-{key}"), maker(record[key])) for key, (title, maker) in asked.items()
    ]
    links = [tag("a", title, href=f"#q-{key}") for key, (title, _) in asked.items()]
    name = f"Probe of {about.get('model', 'a model')}"
    return document(
        name,
        tag("h1", name),
        tag("p", _sentence(about), class_="dim"),
        _verdict(record.get("verdict") or []),
        _about(about),
        _notes(record.get("notes") or []),
        tag("nav", *links, aria_label="Sections") if links else None,
        *sections,
    )


def _sentence(about: Mapping[str, Any]) -> str:
    words = []
    if "num_parameters" in about:
        words.append(f"{int(about['num_parameters']):,} parameters in {about.get('num_tensors', '?')} tensors")
    if "batches" in about:
        words.append(f"{about['batches']} batches of {about.get('batch_size', '?')} examples")
    for key in ("task", "device", "mode"):
        if about.get(key) and about[key] != "unknown":
            words.append(f"{about[key]} mode" if key == "mode" else str(about[key]))
    if about.get("seconds") is not None:
        words.append(duration(as_float(about["seconds"])))
    return ", ".join(words)


def _about(about: Mapping[str, Any]) -> Html | None:
    losses = as_floats(about.get("losses"))
    rows: list[tuple[str, str, str]] = []
    if about.get("loss") is not None:
        span = f"{number(min(losses))} to {number(max(losses))} over batches" if losses else ""
        rows.append(("Loss", number(as_float(about["loss"])), span))
    if about.get("optimizer"):
        rows.append(("Optimizer", str(about["optimizer"]), ""))
    if about.get("lr") is not None:
        rows.append(("Learning rate", number(as_float(about["lr"])), ""))
    if about.get("train_size") is not None:
        rows.append(("Training examples", f"{int(about['train_size']):,}", ""))
    return facts(rows)


def _verdict(found: Sequence[Mapping[str, Any]]) -> Html:
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
                tag("span", _SEVERITY.get(severity, severity), class_="tag"),
                tag("b", entry.get("title", "")),
                tag("p", entry["detail"]) if entry.get("detail") else None,
                tag("p", ", ".join(names[:8]) + more, class_="names") if names else None,
                tag("p", f"Try: {str(entry['advice']).rstrip('.')}.", class_="dim") if entry.get("advice") else None,
                class_=severity if severity in _SEVERITY else "info",
            )
        )
    return tag("ul", *items, class_="verdict")


def _notes(notes: Sequence[Any]) -> Html | None:
    if not notes:
        return None
    return folded(f"Notes ({len(notes)})", tag("ul", *(tag("li", str(note)) for note in notes)), opened=len(notes) <= 3)


def _samples(samples: Mapping[str, Any]) -> Html:
    head = facts(
        [
            ("GSNR of one example", number(as_float(samples.get("gsnr"))), span(samples, "low", "high")),
            (
                "Noise scale, examples",
                known(samples.get("noise_scale")),
                span(samples, "noise_scale_low", "noise_scale_high"),
            ),
            (
                "OSGR, first step",
                number(as_float(samples.get("osgr"))),
                f"{span(samples, 'osgr_low', 'osgr_high')} for {samples.get('train_size', '?')} training examples",
            ),
        ]
    )
    why = str(samples.get("why") or "")
    method = f"{samples.get('method', '?')}{': ' + why if why else ''}"
    how = (
        f"{examined(samples)} examples, each with its own gradient ({method}). OSGR, the one-step generalization "
        "ratio, is the share of a small step's gain on the training set that new data would have too."
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
    return join(
        [
            head,
            tag("p", how, class_="dim"),
            tag("div", cosines if counts.get("counts") else None, ranked if len(norms) > 1 else None, class_="charts"),
            *(_examples(title, words, samples.get(key)) for key, (title, words) in LISTS.items()),
        ]
    )


def _examples(title: str, words: str, rows: Sequence[Mapping[str, Any]] | None) -> Html | None:
    if not rows:
        return None
    heads = ["Example", "Label", "Loss", "Above usual", "Norm / median", "Norm", "Cosine"]
    shown = ("loss", "excess_loss", "norm_over_median", "norm", "cosine")
    cells: Iterable[list[Part]] = (
        [example_name(row), label_of(row), *(number(as_float(row.get(key))) for key in shown)] for row in rows
    )
    return join([tag("h3", title), tag("p", words, class_="dim"), table(heads, cells)])


def _landscape(found: Mapping[str, Any]) -> Html:
    line = found.get("line") or {}
    steps, losses = as_floats(line.get("step")), as_floats(line.get("loss"))
    lr, edge, best = (as_float(found.get(key)) for key in ("lr", "edge", "best_step"))
    finite = [loss for loss in losses if math.isfinite(loss)]
    steep = bool(finite) and min(finite) > 0 and max(finite) > 30 * min(finite)
    along = "update" if found.get("direction") == "update" else "gradient"
    chart = line_chart(
        {"loss": (steps, losses)},
        title=f"Loss along the {along}",
        x_name="multiples of the optimizer's step" if along == "update" else "step along the negative gradient",
        y_name="loss, by its logarithm" if steep else "loss",
        y_log=steep,
        marks={**({"one step": 1.0} if along == "update" else {"lr": lr, "2 / top eigenvalue": edge}), "lowest": best},
    )
    limit = as_float(found.get("sharpness_limit"))
    over = as_float(found.get("lr_over_edge"))
    certain = "" if found.get("converged", True) else f"not converged in {found.get('iterations', '?')} iterations"
    rows = [
        ("Top Hessian eigenvalue", number(as_float(found.get("top_eigenvalue"))), certain),
        ("2 / top eigenvalue", number(edge), "largest stable rate of plain gradient descent"),
        ("Curvature along the line", number(as_float(found.get("curvature"))), ""),
        ("Lowest loss at step", number(best), ""),
    ]
    if not math.isnan(limit):
        rows.insert(1, ("2 / learning rate", number(limit), "sharpness that this rate can bear"))
    if not math.isnan(over):
        rows.append(("Rate over the edge", number(over), "above 1, plain gradient descent would swing out"))
    return join([facts(rows), tag("div", chart, class_="charts") if steps else None])
