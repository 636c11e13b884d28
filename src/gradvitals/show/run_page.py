"""A run as one HTML file, to attach to an issue or to mail: it opens from disk, without network and without script."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np

from gradvitals.show.again import OnStep
from gradvitals.show.checkup import Checkup, examine
from gradvitals.show.curves import Span, read_curves, span_of
from gradvitals.show.document import document
from gradvitals.show.heat_picture import heat_picture
from gradvitals.show.heatmap import read_heatmaps
from gradvitals.show.html import Html, Part, join, tag
from gradvitals.show.run_findings import actions_section, findings_section, marks_of, other_section, verdict_banner
from gradvitals.show.run_tables import layers_table, ranks_table, settings_table, worst_tables
from gradvitals.show.summary import Summary, summarize
from gradvitals.show.svg import Axis
from gradvitals.show.terminal import STATES
from gradvitals.show.text import cut, duration, number
from gradvitals.show.timeline import WIDTH, timeline, x_axis
from gradvitals.store.reader import Run


def run_page(run: Run, *, on_step: OnStep | None = None) -> str:
    """The whole document.

    Args:
        run: The run, finished or being written.
        on_step: Called for each step that has to be judged first, in a run that was recorded without diagnosis.
    """
    summary = summarize(run)
    checkup = examine(run, on_step=on_step) if summary.last_step is not None else None
    name = cut(run.path.resolve().name or str(run.path), 120)
    sections = [(title, part) for title, part in _sections(run, summary, checkup) if part]
    links = [tag("a", title, href=f"#s{at}") for at, (title, _) in enumerate(sections)]
    return document(
        f"{name}: gradvitals report",
        tag("h1", name),
        tag("p", _sentence(summary), class_="dim"),
        verdict_banner(checkup.verdict) if checkup else tag("p", "No readings yet."),
        tag("nav", *links, aria_label="Sections") if links else None,
        *(tag("section", tag("h2", title, id=f"s{at}"), part) for at, (title, part) in enumerate(sections)),
        tag("footer", _footer(run)),
        styles=("page.css", "run_page.css"),
        script="run_page.js",
    )


def _sentence(summary: Summary) -> str:
    steps = f"step {summary.last_step:,}" if summary.last_step is not None else "no steps"
    ranks = f"{summary.num_ranks:,} ranks, " if summary.num_ranks > 1 else ""
    return (
        f"{STATES[summary.state][0].upper()}{STATES[summary.state][1:]}, {steps}, {duration(summary.seconds)}, {ranks}"
        f"{summary.num_parameters:,} parameters in {summary.num_tensors:,} tensors"
    )


def _footer(run: Run) -> str:
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return (
        f"Made by gradvitals {cut(str(run.meta.get('version', '')), 40)} on {now}. Times are in steps of the optimizer."
    )


def _sections(run: Run, summary: Summary, checkup: Checkup | None) -> Iterator[tuple[str, Part]]:
    span = span_of(run)
    if checkup is not None:
        yield "Findings", join([_judged_again(checkup), findings_section(checkup.verdict)])
        if checkup.actions:
            yield "What was done about it", actions_section(checkup.actions)
    if checkup is not None and span is not None:
        curves = list(read_curves(run, span))
        lanes = timeline(
            curves, span, marks=marks_of(checkup.verdict), actions=checkup.actions, batch_size=_batch_size(run)
        )
        yield "The run, step by step", lanes if curves else None
        yield "Layers over steps", _heatmaps(run, span)
    if summary.layers:
        yield f"Layers at step {summary.layers_step:,}", join([_gsnr_note(summary), layers_table(summary)])
    yield "Tensors that stand out", worst_tables(summary)
    if summary.num_ranks > 1:
        yield f"The {summary.num_ranks:,} ranks", ranks_table(run)
    if checkup is not None:
        yield "What else was looked at", join(other_section(checkup))
    yield "How it was recorded", join([settings_table(run.meta, summary), _dropped(summary)])


def _judged_again(checkup: Checkup) -> Html | None:
    return tag("p", "It was recorded without diagnosis and judged now.", class_="dim") if checkup.replayed else None


def _heatmaps(run: Run, span: Span) -> Html | None:
    pictures = [part for found in read_heatmaps(run, span) if (part := heat_picture(found)) is not None]
    if not pictures:
        return None
    xs = Axis(span.first, max(span.last, span.first + 1), 0.0, float(WIDTH))
    words = (
        "From the input, at the top, to the output. Colours are by the logarithm; a reading stands until the next one."
    )
    note = tag("p", words, class_="dim")
    return join(
        [note, tag("div", *pictures, x_axis(xs), class_="timeline", data_first=span.first, data_last=span.last)]
    )


def _gsnr_note(summary: Summary) -> Html | None:
    if not summary.gsnr_source:
        return None
    size = summary.gsnr_batch_size
    at = f" at batch size {number(size)}" if size is not None else ""
    doubt = f" Note: {summary.gsnr_doubt}." if summary.gsnr_doubt else ""
    return tag("p", f"GSNR from {summary.gsnr_source}{at}. A dashed line is at GSNR 1.{doubt}", class_="dim")


def _batch_size(run: Run) -> float | None:
    """Samples of one step, as the loop told them."""
    if "grad/norm" not in run.metrics("values"):
        return None
    _, sizes = run.batch_sizes("grad/norm")
    told = sizes[~np.isnan(sizes)]
    return float(told[-1]) if told.size else None


def _dropped(summary: Summary) -> Html | None:
    if not summary.dropped:
        return None
    words = f"{summary.dropped:,} readings were dropped because the disk could not keep up."
    return tag("p", words, class_="word warning")
