"""The parts of a probe's page that are about gradients: signal and noise, and which areas of the model learn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradvitals.show.html import Html, Part, folded, join, table, tag
from gradvitals.show.probe_words import gsnr_words
from gradvitals.show.svg import Axis, bar, interval_mark
from gradvitals.show.text import number
from gradvitals.show.values import as_float, facts, known, percent, span

_WORDS = {
    "signal": "fine",
    "vanishing": "critical",
    "exploding": "critical",
    "nonfinite": "critical",
}
_MOST_ROWS = 24


def signal_section(signal: Mapping[str, Any]) -> Html:
    """Signal, noise, vanishing and exploding gradients."""
    total = signal.get("total") or {}
    size = signal.get("batch_size", "?")
    limits = signal.get("thresholds") or {}
    head = facts(
        [
            (f"GSNR, batches of {size}", number(as_float(total.get("gsnr"))), span(total, "low", "high")),
            (
                "Noise scale",
                known(total.get("noise_scale")),
                f"{span(total, 'noise_scale_low', 'noise_scale_high')} examples",
            ),
            ("Norm of the mean gradient", number(as_float(total.get("norm"))), ""),
            *(
                (words, str(len(limits.get(key) or [])), f"tensors, {mark.format(number(as_float(limits.get(which))))}")
                for words, key, which, mark in (
                    ("Vanishing", "vanishing_names", "vanishing", "norm under {}"),
                    ("Exploding", "exploding_names", "exploding", "norm over {}"),
                    ("Small for this model", "vanishing_relative_names", "relative_low", "under {} × the median"),
                    ("Large for this model", "exploding_relative_names", "relative_high", "over {} × the median"),
                )
                if key in limits and (which.startswith("relative") or limits.get(which) is not None)
            ),
        ]
    )
    words = (
        "GSNR is the squared mean of the gradient over its variance from batch to batch: above 1, a batch shows the "
        "direction more than its own noise. The line is the 95 % interval, the dashed mark is 1."
    )
    layers = signal.get("layers") or []
    return join(
        [head, tag("p", words, class_="dim"), _gsnr_table(layers, "layer"), _tensor_table(signal.get("tensors") or [])]
    )


def _gsnr_table(rows: Sequence[Mapping[str, Any]], name: str) -> Html | None:
    if not rows:
        return None
    ends = [as_float(row.get(key)) for row in rows for key in ("gsnr", "gsnr_low", "gsnr_high")]
    above = [end for end in ends if math.isfinite(end) and end > 1e-4]
    axis = Axis.over([*above, 0.1, 10.0], 5, 115, logarithmic=True)

    def cells(row: Mapping[str, Any]) -> list[Part]:
        value, low, high = (as_float(row.get(key)) for key in ("gsnr", "gsnr_low", "gsnr_high"))
        return [
            str(row.get(name, "")) or "(model)",
            _word(row),
            tag("span", interval_mark(value, low, high, axis), class_="left"),
            gsnr_words(value, low, high),
            number(as_float(row.get("norm"))),
            number(as_float(row.get("cv"))),
        ]

    heads = [
        name.capitalize(),
        tag("span", "Verdict", class_="left"),
        tag("span", "GSNR", class_="left"),
        "95 % interval",
        "Norm",
        "Norm's CV",
    ]
    return _long_table(heads, [cells(row) for row in rows], "layers")


def _tensor_table(rows: Sequence[Mapping[str, Any]]) -> Html | None:
    if not rows:
        return None
    heads = [
        "Tensor",
        tag("span", "Verdict", class_="left"),
        "Shape",
        "Norm",
        "CV",
        "GSNR",
        "Median",
        "Mean",
        "Below 1",
        "Median, plug-in",
        "Mean, plug-in",
        "Below 1, plug-in",
    ]

    def cells(row: Mapping[str, Any]) -> list[Part]:
        value, low, high = (as_float(row.get(key)) for key in ("gsnr", "gsnr_low", "gsnr_high"))
        shape = "×".join(str(side) for side in row.get("shape") or []) or "scalar"
        return [
            str(row.get("name", "")),
            _word(row),
            shape,
            *(number(as_float(row.get(key))) for key in ("norm", "cv")),
            gsnr_words(value, low, high),
            *(number(as_float(row.get(key))) for key in ("median", "mean")),
            percent(row.get("below_one")),
            *(number(as_float(row.get(key))) for key in ("plug_in_median", "plug_in_mean")),
            percent(row.get("plug_in_below_one")),
        ]

    why = (
        "GSNR is the tensor's as a whole. Median, mean and the share below 1 are over single coordinates, debiased; "
        "the plug-in columns are mean² / (variance + 1e-8), as often computed, with its bias."
    )
    return folded(
        f"Every tensor ({len(rows)})", tag("p", why, class_="dim"), table(heads, [cells(row) for row in rows])
    )


def layers_section(layers: Mapping[str, Any]) -> Html:
    """Norms, updates, ranks and activations."""
    rows = layers.get("tensors") or []
    shares = {"optimizer": "the optimizer's next step", "lr": "learning rate times gradient"}
    by = shares.get(str(layers.get("update_by")))
    most = max(
        (as_float(row.get("update_ratio")) for row in rows if as_float(row.get("update_ratio")) > 0), default=math.nan
    )

    def cells(row: Mapping[str, Any]) -> list[Part]:
        ratio, rank = as_float(row.get("update_ratio")), as_float(row.get("rank_share"))
        effective = as_float(row.get("effective_rank"))
        return [
            str(row.get("name", "")),
            *(number(as_float(row.get(key))) for key in ("grad_norm", "weight_norm", "update_norm")),
            bar(ratio, most, number(ratio)) if by else "-",
            "-" if math.isnan(effective) else bar(rank, 1.0, f"{number(effective)} of {row.get('full_rank', '?')}"),
        ]

    heads = ["Tensor", "Gradient", "Weight", "Update", "Update / weight", "Effective rank of the gradient"]
    words = (
        f"Norms of each tensor; the update is {by}."
        if by
        else "Norms of each tensor; without a learning rate or an optimizer there is no update."
    )
    return join(
        [
            tag("p", words, class_="dim"),
            _long_table(heads, [cells(row) for row in rows], "tensors"),
            _activations(layers.get("activations") or []),
        ]
    )


def _activations(rows: Sequence[Mapping[str, Any]]) -> Html | None:
    if not rows:
        return None
    heads = ["Module", "Kind", "Units", "Dead", "Dead share", "Saturated", "Zeros"]
    cells: Iterable[list[Part]] = (
        [
            str(row.get("module", "")),
            str(row.get("kind", "")),
            *(str(row.get(key, "-")) for key in ("units", "dead")),
            bar(as_float(row.get("dead_share")), 1.0, percent(row.get("dead_share"))),
            percent(row.get("saturated_share")),
            percent(row.get("zero_share")),
        ]
        for row in rows
    )
    return join([tag("h3", "Activations"), table(heads, cells)])


def _long_table(heads: Sequence[Part], rows: Sequence[Sequence[Part]], what: str) -> Html:
    """The first rows, and the others to be unfolded."""
    first = table(heads, rows[:_MOST_ROWS])
    if len(rows) <= _MOST_ROWS:
        return first
    return join([first, folded(f"{len(rows) - _MOST_ROWS} more {what}", table(heads, rows[_MOST_ROWS:]))])


def _word(row: Mapping[str, Any]) -> Html:
    verdict = str(row.get("verdict", ""))
    words = str(row.get("words") or verdict)
    return tag(
        "span", tag("span", verdict, class_=f"word {_WORDS.get(verdict, '')}".strip()), class_="left", title=words
    )
