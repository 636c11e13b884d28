"""The parts of a probe's page that are about its inputs: what matters in them, and what changes of them do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradvitals.show.html import Html, Part, folded, join, table, tag
from gradvitals.show.pictures import heat, photo, picture
from gradvitals.show.svg import bar, line_chart
from gradvitals.show.text import number
from gradvitals.show.values import as_float, as_floats, facts

_METHODS = {
    "integrated_gradients": "Integrated gradients",
    "gradient_x_input": "Gradient × input",
    "gradient": "Gradient",
    "smoothgrad": "SmoothGrad",
}
_SIGNED = ("integrated_gradients", "gradient_x_input")
_KINDS = {"noise": "Random noise", "fgsm": "FGSM", "pgd": "PGD"}
_MOST_BARS = 20
_MOST_TOKENS = 20
_SPACES = str.maketrans({"\n": "⏎", "\t": "⇥"})


def saliency_section(found: Mapping[str, Any]) -> Html:
    """Which inputs matter: bars by feature, pictures, coloured words."""
    profiles: Mapping[str, Mapping[str, Any]] = found.get("profiles") or {}
    methods = [method for method in _METHODS if method in profiles]
    names: Mapping[str, Sequence[str]] = found.get("names") or {}
    axes = list(profiles[methods[0]]) if methods else []
    complete = found.get("completeness") or {}
    what = "the vectors of the tokens" if found.get("where") == "embeddings" else "the data"
    words = (
        f"How {found.get('explains', 'the answer')} depends on {what} at “{found.get('place', 'input')}”, "
        f"over {found.get('examples', '?')} examples in eval mode. Integrated gradients share the answer out: they sum "
        f"to {number(as_float(complete.get('found')))} where the answer differs from that for zeros by "
        f"{number(as_float(complete.get('expected')))}."
    )
    parts: list[Part] = [tag("p", words, class_="dim")]
    by_method = {method: profiles[method] for method in methods}
    for axis in axes:
        if axis == "picture":
            parts.append(_mean_pictures(by_method))
        else:
            parts.append(_profile(axis, by_method, names.get(axis) or []))
    parts.append(_by_class(found.get("by_class") or {}, names))
    parts.append(_tokens(found.get("tokens") or []))
    parts.append(_shown(found.get("shown") or [], names, str(found.get("explains", "the answer"))))
    return join(parts)


def robustness_section(found: Mapping[str, Any]) -> Html:
    """What changes of the data do to loss and accuracy."""
    relative = as_floats(found.get("relative"))
    curves: Mapping[str, Mapping[str, Any]] = found.get("curves") or {}
    kinds = [kind for kind in _KINDS if kind in curves] + [kind for kind in curves if kind not in _KINDS]
    loss = {_KINDS.get(kind, kind): (relative[1:], as_floats(curves[kind].get("loss"))[1:]) for kind in kinds}
    right = {_KINDS.get(kind, kind): (relative[1:], as_floats(curves[kind].get("accuracy"))[1:]) for kind in kinds}
    first = curves[kinds[0]] if kinds else {}
    clean_loss, clean_right = (next(iter(as_floats(first.get(key))), math.nan) for key in ("loss", "accuracy"))
    seen = [value for _, values in loss.values() for value in values if math.isfinite(value)]
    steep = bool(seen) and min(seen) > 0 and max(seen) > 30 * min(seen)
    size = "size, in standard deviations of the data"
    charts = [
        line_chart(
            loss, title="Loss", x_name=size, y_name="by its logarithm" if steep else "", x_log=True, y_log=steep
        ),
        None
        if math.isnan(clean_right)
        else line_chart(right, title="Accuracy", x_name=size, y_name="", x_log=True, y_range=(0.0, 1.0)),
    ]
    constants = found.get("lipschitz") or {}
    half = found.get("half_at") or {}
    rows = [
        ("Loss, data as they are", number(clean_loss), ""),
        ("Accuracy, data as they are", number(clean_right), "") if not math.isnan(clean_right) else None,
        (
            "Local Lipschitz constant",
            number(as_float(constants.get("median"))),
            f"of the output: median; largest {number(as_float(constants.get('largest')))}",
        ),
        ("Slope of the loss", number(as_float(found.get("slope"))), "under FGSM, for each unit of size"),
        *(
            (
                f"Half is lost, {_KINDS.get(kind, kind)}",
                number(as_float(half[kind])),
                "standard deviations; of the accuracy above that of the commonest answer",
            )
            for kind in kinds
            if kind in half and not math.isnan(as_float(half[kind]))
        ),
    ]
    where = "the vectors of its tokens" if found.get("where") == "embeddings" else "its inputs"
    words = (
        f"The model is asked again, in eval mode, with {where} changed, each value by up to the size: by random signs, "
        "by the signs that raise the loss most at first (FGSM), and by several such steps (PGD). "
        f"One standard deviation of the data is {number(as_float(found.get('scale')))}; in a table every column "
        "has its own, and this is their median."
    )
    return join(
        [
            facts([row for row in rows if row is not None]),
            tag("p", words, class_="dim"),
            tag("div", *charts, class_="charts"),
            folded("The numbers", _curve_table(relative, as_floats(found.get("sizes")), curves, kinds)),
        ]
    )


def _curve_table(
    relative: list[float], sizes: list[float], curves: Mapping[str, Mapping[str, Any]], kinds: Sequence[str]
) -> Html:
    heads: list[Part] = ["Standard deviations", "Size"]
    columns: list[list[float]] = []
    for kind in kinds:
        for key in ("loss", "accuracy"):
            values = as_floats(curves[kind].get(key))
            if any(not math.isnan(value) for value in values):
                heads.append(f"{_KINDS.get(kind, kind)}, {key}")
                columns.append(values)
    rows = [
        [number(step), number(size), *(number(column[at]) for column in columns)]
        for at, (step, size) in enumerate(zip(relative, sizes, strict=False))
    ]
    return table(heads, rows)


def _profile(axis: str, by_method: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Html | None:
    """A few entries as bars, many in a row (positions) as lines."""
    series = {method: as_floats(profile.get(axis)) for method, profile in by_method.items()}
    first = next(iter(series.values()), [])
    if len(first) < 2:
        return None
    if axis in ("position", "frame") or len(first) > 400:
        # Each by its own mean, since they are in different units.
        lines = {
            _METHODS[method]: ([float(at) for at in range(len(values))], _over_mean(values))
            for method, values in series.items()
            if method in ("integrated_gradients", "gradient")
        }
        steep = max(max(values) for _, values in lines.values()) > 20
        unit = "over the mean, by the logarithm" if steep else "over the mean"
        chart = line_chart(lines, title=f"By {axis}", x_name=axis, y_name=unit, y_log=steep)
        return tag("div", chart, class_="charts")
    order = sorted(range(len(first)), key=lambda at: -_finite(first[at]))
    tops = {method: max(map(_finite, values)) for method, values in series.items()}

    def cells(at: int) -> list[Part]:
        bars = [bar(values[at], tops[method], number(values[at])) for method, values in series.items()]
        return [str(names[at]) if at < len(names) else f"{axis} {at}", *bars]

    heads = [axis.capitalize(), *(_METHODS[method] for method in series)]
    shown = table(heads, [cells(at) for at in order[:_MOST_BARS]])
    rest = order[_MOST_BARS:]
    more = folded(f"{len(rest)} more", table(heads, [cells(at) for at in rest])) if rest else None
    return join([tag("h3", f"By {axis}"), shown, more])


def _mean_pictures(by_method: Mapping[str, Mapping[str, Any]]) -> Html:
    figures = [
        _figure(
            picture(heat(profile["picture"], signed=False), f"{_METHODS[method]}, mean over examples"), _METHODS[method]
        )
        for method, profile in by_method.items()
        if _is_picture(profile.get("picture"))
    ]
    return join([tag("h3", "By place in the picture, mean over examples"), tag("div", *figures, class_="pictures")])


def _by_class(by_class: Mapping[str, Mapping[str, Any]], names: Mapping[str, Sequence[str]]) -> Html | None:
    if len(by_class) < 2:
        return None
    pictures = [
        _figure(picture(heat(profile["picture"], signed=False), f"class {label}"), f"class {label}")
        for label, profile in by_class.items()
        if _is_picture(profile.get("picture"))
    ]
    title = tag("h3", "By class (integrated gradients)")
    if pictures:
        return join([title, tag("div", *pictures, class_="pictures")])
    axis = next((axis for axis in ("feature", "channel") if axis in next(iter(by_class.values()))), None)
    if axis is None:
        return None
    rows: list[list[Part]] = []
    for label, profile in by_class.items():
        scores = as_floats(profile.get(axis))
        total = sum(map(_finite, scores)) or 1.0
        called = names.get(axis) or []
        best = sorted(range(len(scores)), key=lambda at: -_finite(scores[at]))[:5]
        words = [f"{called[at] if at < len(called) else at} ({100 * _finite(scores[at]) / total:.0f} %)" for at in best]
        rows.append([str(label), tag("span", ", ".join(words), class_="left")])
    return join(
        [title, table(["Class", tag("span", f"{axis.capitalize()}s with the largest share", class_="left")], rows)]
    )


def _tokens(tokens: Sequence[Mapping[str, Any]]) -> Html | None:
    if not tokens:
        return None
    most = max(as_float(token.get("score")) for token in tokens)
    rows: list[list[Part]] = [
        [
            _visible(token.get("text", "")),
            str(token.get("count", "?")),
            bar(as_float(token.get("score")), most, number(as_float(token.get("score")))),
        ]
        for token in tokens
    ]
    heads = ["Token", "Seen", "Mean strength"]
    rest = rows[_MOST_TOKENS:]
    more = folded(f"{len(rest)} more", table(heads, rest)) if rest else None
    return join([tag("h3", "By token (integrated gradients)"), table(heads, rows[:_MOST_TOKENS]), more])


def _shown(shown: Sequence[Mapping[str, Any]], names: Mapping[str, Sequence[str]], explains: str) -> Html | None:
    if not shown:
        return None
    parts: list[Part] = [tag("h3", "Some examples")]
    key = f"Blue raises {explains}, red lowers it; orange is strength without a sign."
    parts.append(tag("p", key, class_="dim"))
    for example in shown:
        title = f"Example {example.get('index', '?')}"
        if example.get("label") is not None:
            title += f", label {example['label']}"
            same = example.get("predicted") in (None, example["label"])
            title += "" if same else f", taken for {example['predicted']}"
        scores: Mapping[str, Any] = example.get("scores") or {}
        if "image" in example:
            body = _image(example["image"], scores)
        elif "texts" in example:
            body = _text_lines([str(text) for text in example["texts"]], scores)
        else:
            body = _row(as_floats(example.get("values")), scores, names.get("feature") or [])
        parts.append(join([tag("h3", title), body]))
    return join(parts)


def _image(image: Any, scores: Mapping[str, Any]) -> Html:
    figures = [_figure(picture(photo(image), "the example"), "as given")]
    for method, words in _METHODS.items():
        if _is_picture(scores.get(method)):
            pixels = heat(scores[method], signed=method in _SIGNED)
            figures.append(_figure(picture(pixels, words), words))
    return tag("div", *figures, class_="pictures")


def _text_lines(texts: Sequence[str], scores: Mapping[str, Any]) -> Html:
    methods = [method for method in _METHODS if method in scores]
    lines = [_coloured(texts, as_floats(scores[method]), method in _SIGNED) for method in methods]
    if not lines:
        return join([])
    others = [
        join([tag("p", _METHODS[method], class_="dim"), line])
        for method, line in zip(methods[1:], lines[1:], strict=True)
    ]
    return join([tag("p", _METHODS[methods[0]], class_="dim"), lines[0], folded("By the other methods", *others)])


def _coloured(texts: Sequence[str], scores: Sequence[float], signed: bool) -> Html:
    most = max((abs(_finite(score)) for score in scores), default=0.0) or 1.0
    spans = []
    for text, score in zip(texts, scores, strict=False):
        share = abs(_finite(score)) / most
        kind = ("pro" if score >= 0 else "con") if signed else "strong"
        # Never so strong that the word on it could not be read.
        spans.append(tag("span", _visible(text), class_=kind, style=f"--a:{0.6 * share:.2f}", title=number(score)))
    # Characters are set as they run; words, or numbers that stand for them, a little apart.
    apart = bool(texts) and sum(map(len, texts)) > 1.5 * len(texts)
    return tag("div", *spans, class_="tokens apart" if apart else "tokens")


def _row(values: Sequence[float], scores: Mapping[str, Any], names: Sequence[str]) -> Html:
    parts = as_floats(scores.get("integrated_gradients"))
    order = sorted(range(len(parts)), key=lambda at: -abs(_finite(parts[at])))[:8]
    words = [
        tag(
            "span",
            f"{names[at] if at < len(names) else f'feature {at}'} = {number(values[at]) if at < len(values) else '?'}",
            class_="pro" if parts[at] >= 0 else "con",
            style=f"--a:{0.6 * abs(_finite(parts[at])) / (abs(_finite(parts[order[0]])) or 1.0):.2f}",
            title=number(parts[at]),
        )
        for at in order
    ]
    return tag("div", *words, class_="tokens apart")


def _figure(shown: Html, words: str) -> Html:
    return tag("figure", shown, tag("figcaption", words))


def _visible(text: object) -> str:
    """A token with its line ends and tabs to be seen; one that is nothing but spaces as the sign for them."""
    words = str(text).translate(_SPACES)
    return words if words.strip() else words.replace(" ", "␣") or "␣"


def _is_picture(values: Any) -> bool:
    return values is not None and np.ndim(values) == 2 and np.size(values) > 0


def _over_mean(values: Sequence[float]) -> list[float]:
    mean = sum(map(_finite, values)) / max(len(values), 1)
    return [value / mean if mean else value for value in values]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
