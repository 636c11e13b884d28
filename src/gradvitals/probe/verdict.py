"""What the answers mean, worst first. Plain records in, plain records out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

Record = dict[str, Any]

ORDER = ("critical", "warning", "info", "fine")
DEAD, FEW_DEAD = 0.5, 0.1
SATURATED = 0.5
BIG_UPDATE = 0.1
"""Healthy limit for the change of a tensor in one step, relative to its norm."""

ADAPTIVE = ("Adam", "RMSprop", "Adagrad", "Adadelta", "Lion", "Muon", "LAMB", "Adafactor", "NAdam")


def verdicts(record: Record, beside: Iterable[Record] = ()) -> list[Record]:
    """Returns the verdict on a probe's record, merged with further items, worst first."""
    found = [
        *beside,
        *_loss(record["about"]),
        *_of(record, "signal", _signal),
        *_of(record, "layers", _layers),
        *_of(record, "samples", _samples),
        *_of(record, "landscape", _landscape),
    ]
    for question in ("saliency", "robustness"):
        found += (record.get(question) or {}).get("verdict", [])
    return sorted(found, key=lambda item: ORDER.index(item["severity"]))


def item(severity: str, question: str, title: str, detail: str = "", names: Any = (), advice: str = "") -> Record:
    """Returns one line of the verdict."""
    return {
        "severity": severity,
        "question": question,
        "title": title,
        "detail": detail,
        "names": list(names),
        "advice": advice,
    }


def _of(record: Record, question: str, judge: Any) -> Iterator[Record]:
    if record.get(question):
        yield from judge(record[question], record["about"])


def _loss(about: Record) -> Iterator[Record]:
    bad = [str(i) for i, loss in enumerate(about["losses"]) if not math.isfinite(loss)]
    if bad:
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        yield item(
            "critical",
            "signal",
            f"the loss is not finite in {len(bad)} of {len(about['losses'])} batches",
            f"{'batch' if len(bad) == 1 else 'batches'} number {', '.join(bad[:8])}{more}, counted from 0",
            advice="look at these batches, then at divisions and logarithms in the loss",
        )


def _signal(signal: Record, about: Record) -> Iterator[Record]:
    rows, limits = signal["tensors"], signal["thresholds"]
    nonfinite = [row["name"] for row in rows if row["nonfinite"]]
    if nonfinite:
        yield item("critical", "signal", "gradients that are NaN or infinite", f"{_many(nonfinite)}", nonfinite)
    exploding = dict.fromkeys(limits["exploding_names"] + limits["exploding_relative_names"])
    if exploding:
        yield item(
            "warning",
            "signal",
            f"gradients explode in {_many(exploding)}",
            _limit_words(limits, "exploding", "above"),
            exploding,
            "clip gradients, lower the learning rate, normalise activations",
        )
    none = [row["name"] for row in rows if row["verdict"] == "none"]
    if none:
        yield item(
            "warning",
            "signal",
            f"no gradient reaches {_many(none)}",
            "zero in every batch",
            none,
            "check that the loss depends on it: a detach, a dead unit before it, a part that is not used",
        )
    vanishing = dict.fromkeys(
        n for n in limits["vanishing_names"] + limits["vanishing_relative_names"] if n not in none
    )
    # If a normalization or a softmax cancels a parameter, its gradient is only rounding, as it should be.
    for cancels, severity, advice in (
        (False, "warning", "residual connections, normalisation, activations that do not saturate, another start"),
        (True, "info", "nothing, where what follows takes it out again: a batch norm, the softmax of attention"),
    ):
        names = [name for name in vanishing if _may_cancel(name) is cancels]
        if names:
            title, detail = f"gradients vanish in {_many(names)}", _limit_words(limits, "vanishing", "below")
            yield item(severity, "signal", title, detail, names, advice)
    unsteady = [row["name"] for row in rows if row["cv"] > 1]
    if unsteady:
        yield item(
            "warning",
            "signal",
            f"the gradient norm jumps between batches in {_many(unsteady)}",
            "its standard deviation is larger than its mean",
            unsteady,
            "larger batches, clipping, a look at the batches with the largest norm",
        )
    yield _total(signal)


def _may_cancel(name: str) -> bool:
    """Whether a tensor is a bias or a scale, which a later layer may cancel."""
    multiplier = ".parametrizations." in f".{name}" and name.endswith((".row", ".column", ".scale"))
    return multiplier or name.endswith("bias")


def _total(signal: Record) -> Record:
    total, size = signal["total"], signal["batch_size"]
    value, low, scale = total["gsnr"], total["low"], total["noise_scale"]
    if math.isnan(value) or math.isnan(low):
        return item("info", "signal", "too few batches to tell signal from noise", "two or more are needed")
    if low <= 0:
        return item(
            "info",
            "signal",
            f"no signal could be told from the noise of {len(signal['tensors'][0]['norms'])} batches of {size}",
            f"GSNR {value:.3g} (95 %: {low:.3g} to {total['high']:.3g})",
            advice="more batches, larger batches; near the end of training this is to be expected",
        )
    ends = f"{total['noise_scale_low']:.3g} to {total['noise_scale_high']:.3g}"
    detail = f"95 %: {low:.3g} to {total['high']:.3g}; noise scale {scale:.3g} examples ({ends})"
    stronger = "the signal is the stronger" if value >= 1 else "noise is the stronger"
    return item("fine", "signal", f"GSNR {value:.3g} at a batch of {size}: {stronger}", detail)


def _limit_words(limits: Record, kind: str, side: str) -> str:
    absolute = limits[kind]
    low_high = limits["relative_low" if kind == "vanishing" else "relative_high"]
    relative = f"root mean square {side} {low_high:g} of the median tensor's"
    return relative if absolute is None else f"norm {side} {absolute:.3g} (by the learning rate), or {relative}"


def _layers(layers: Record, about: Record) -> Iterator[Record]:
    shown = False
    for low, high, severity in ((DEAD, 2.0, "warning"), (FEW_DEAD, DEAD, "info")):
        dead = [row for row in layers["activations"] if low <= row["dead_share"] < high]
        if dead:
            shown = True
            worst = max(dead, key=lambda row: row["dead_share"])
            yield item(
                severity,
                "layers",
                f"dead units in {_many([_module(row) for row in dead])}",
                f"{worst['dead']} of {worst['units']} in {_module(worst)} were zero for every example",
                [_module(row) for row in dead],
                "a lower learning rate, LeakyReLU or GELU, another initialisation of the biases",
            )
    saturated = [row for row in layers["activations"] if row["saturated_share"] > SATURATED]
    if saturated:
        shown = True
        worst = max(saturated, key=lambda row: row["saturated_share"])
        yield item(
            "warning",
            "layers",
            f"saturated activations in {_many([_module(row) for row in saturated])}",
            f"{100 * worst['saturated_share']:.0f} % of the {worst['kind']} outputs of {_module(worst)} are at an end",
            [_module(row) for row in saturated],
            "smaller weights, normalised inputs, an activation that does not saturate",
        )
    big = [row["name"] for row in layers["tensors"] if row["update_ratio"] > BIG_UPDATE and row["weight_norm"] > 0]
    if big and layers["update_by"] != "none":
        shown = True
        worst = max(row["update_ratio"] for row in layers["tensors"] if row["name"] in big)
        yield item(
            "warning",
            "layers",
            f"one step changes {_many(big)} by more than {100 * BIG_UPDATE:.0f} %",
            f"up to {100 * worst:.3g} % of the weights' norm",
            big,
            "a lower learning rate, or warmup; new biases that start at zero are no cause for worry",
        )
    if not shown:
        yield item("fine", "layers", _quiet(layers))


def _quiet(layers: Record) -> str:
    """Returns a line on dead units and saturation that are too few to matter."""
    units = sum(row["units"] for row in layers["activations"] if "relu" in row["kind"])
    dead = sum(row["dead"] for row in layers["activations"])
    share = max((row["saturated_share"] for row in layers["activations"] if row["saturated_share"] > 0), default=0.0)
    words = [
        f"few dead units ({dead} of {units})" if dead else "no dead units",
        f"little saturation (at most {100 * share:.0f} %)" if share >= 0.005 else "no saturated activations",
    ]
    return ", ".join([*words, "no step out of proportion"])


def _samples(samples: Record, about: Record) -> Iterator[Record]:
    broken = [i for i, norm in enumerate(samples["norms"]) if not math.isfinite(norm + samples["losses"][i])]
    if broken:
        yield item(
            "critical",
            "samples",
            f"loss or gradient of {len(broken)} of {samples['examples']} examples is not finite",
            _examples(samples, broken),
            advice="look at these examples: missing values, empty inputs, numbers out of range",
        )
    odd = samples["standing_out"]
    if odd:
        stand = "stands" if len(odd) == 1 else "stand"
        among = "their class" if any(target is not None for target in samples["targets"]) else "the others"
        yield item(
            "info",
            "samples",
            f"{len(odd)} of {samples['examples']} examples {stand} out: labels may be wrong",
            f"a loss far above that of {among} and a large gradient: {_examples(samples, odd)}",
            advice="look at these first; after long training some examples stand out that are only hard",
        )
    detail = f"OSGR {samples['osgr']:.3g} for {samples['train_size']} examples"
    if samples["low"] > 0:
        told = f"noise scale {samples['noise_scale']:.3g} examples"
        yield item("fine", "samples", f"{told}, from the gradients of {samples['examples']} examples", detail)
    elif not broken:
        yield item("info", "samples", "no signal could be told from the noise of single examples", detail)


def _examples(samples: Record, which: list[int], most: int = 4) -> str:
    """Returns names of single examples: their index in the data set or in the batches read."""
    indices, places = samples["dataset_indices"], samples["places"]
    more = f" and {len(which) - most} more" if len(which) > most else ""
    if all(indices[i] is not None for i in which):
        return f"number {', '.join(str(indices[i]) for i in which[:most])}{more} of the data set"
    return ", ".join(f"place {places[i][1]} of batch {places[i][0]}" for i in which[:most]) + more


def _landscape(landscape: Record, about: Record) -> Iterator[Record]:
    over, lr = landscape["lr_over_edge"], landscape["lr"]
    losses, factors = landscape["line"]["loss"], landscape["line"]["factor"]
    adaptive = any(name.lower() in (about["optimizer"] or "").lower() for name in ADAPTIVE)
    unsettled = "" if landscape["converged"] else ", not settled"
    sharp = f"largest eigenvalue {landscape['top_eigenvalue']:.3g}{unsettled}, 2/lr is {2 / lr:.3g}" if lr else ""
    if over is not None and over > 1 and not adaptive:
        yield item(
            "warning",
            "landscape",
            f"the learning rate is {over:.3g} times what plain gradient descent can bear here",
            sharp,
            advice=f"below {landscape['edge']:.3g}, or warmup; training often hovers at this edge, so 1 is no alarm",
        )
    if not math.isfinite(losses[0]):
        yield item("critical", "landscape", "the loss of the first batch is not finite: nothing to follow")
        return
    at_one = losses[factors.index(1.0)]
    planned = lr is not None or landscape["direction"] == "update"
    if planned and not at_one <= losses[0]:
        yield item(
            "warning",
            "landscape",
            "one step raises the loss of its own batch",
            f"from {losses[0]:.4g} to {at_one:.4g}",
            advice="a lower learning rate",
        )
    elif planned and at_one == losses[0]:
        yield item("info", "landscape", "one step leaves the loss of its batch as it is", f"{losses[0]:.4g}")
    elif planned:
        best = landscape["best_step"] / landscape["unit"]
        beyond = " or beyond, where the line ends" if best == factors[-1] else ""
        detail = f"the lowest on the line is at {best:.3g} steps{beyond}"
        yield item("fine", "landscape", f"one step lowers its batch's loss, {losses[0]:.4g} to {at_one:.4g}", detail)
    elif math.isfinite(landscape["edge"]):
        yield item(
            "fine",
            "landscape",
            f"plain gradient descent is stable below a learning rate of {landscape['edge']:.3g}",
            "the eigenvalue has not settled: the edge may be lower" if unsettled else "",
        )


def _module(row: Record) -> str:
    return row["module"] or "the model"


def _many(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
