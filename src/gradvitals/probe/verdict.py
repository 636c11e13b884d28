"""What the answers mean, in words, the worst first. Plain records in, plain records out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

Record = dict[str, Any]

ORDER = ("critical", "warning", "info", "fine")
DEAD, FEW_DEAD = 0.5, 0.1
SATURATED = 0.5
BIG_UPDATE = 0.1
"""Share of a tensor's weights that one step may change."""

LARGE = 2.0
"""An example stands out whose gradient points against the others and is so many times the root mean square norm."""

ADAPTIVE = ("Adam", "RMSprop", "Adagrad", "Adadelta", "Lion", "Muon", "LAMB", "Adafactor", "NAdam")


def verdicts(record: Record) -> list[Record]:
    """Everything there is to say about a probe's record, sorted."""
    found = [
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
    """One line of the verdict."""
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
        yield item(
            "critical",
            "signal",
            f"the loss is not finite in {len(bad)} of {len(about['losses'])} batches",
            f"batches {', '.join(bad[:8])}",
            advice="look at these batches, then at divisions and logarithms in the loss",
        )


def _signal(signal: Record, about: Record) -> Iterator[Record]:
    rows, limits = signal["tensors"], signal["thresholds"]
    nonfinite = [row["name"] for row in rows if row["nonfinite"]]
    if nonfinite:
        yield item("critical", "signal", "gradients that are NaN or infinite", f"{_many(nonfinite)}", nonfinite)
    exploding = limits["exploding_names"] or limits["exploding_relative_names"]
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
    if vanishing:
        # A bias that a batch norm follows is taken out again by it: its gradient is rounding, as it should be.
        only_biases = all(name.endswith("bias") for name in vanishing)
        cures = "residual connections, normalisation, activations that do not saturate, another initialisation"
        yield item(
            "info" if only_biases else "warning",
            "signal",
            f"gradients vanish in {_many(vanishing)}",
            _limit_words(limits, "vanishing", "below"),
            vanishing,
            "nothing, where a batch norm follows: it takes a bias out again" if only_biases else cures,
        )
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
        yield item("fine", "layers", "no dead units, no saturated activations, no step out of proportion")


def _samples(samples: Record, about: Record) -> Iterator[Record]:
    usual = math.sqrt(math.fsum(norm**2 for norm in samples["norms"]) / samples["examples"])
    rows = zip(samples["norms"], samples["cosines"], samples["places"], strict=True)
    odd = sorted((cosine, place) for norm, cosine, place in rows if norm > LARGE * usual and cosine < 0)
    if odd:
        places = ", ".join(f"{position} of batch {batch}" for _, (batch, position) in odd[:4])
        yield item(
            "info",
            "samples",
            f"{len(odd)} of {samples['examples']} examples pull hard against the others",
            f"gradients {LARGE:g} times the usual and against the mean of the others: {places}",
            advice="look at these first: labels may be wrong",
        )
    detail = f"OSGR {samples['osgr']:.3g} for {samples['train_size']} examples"
    if samples["low"] > 0:
        told = f"noise scale {samples['noise_scale']:.3g} examples"
        yield item("fine", "samples", f"{told}, from the gradients of {samples['examples']} examples", detail)
    else:
        yield item("info", "samples", "no signal could be told from the noise of single examples", detail)


def _landscape(landscape: Record, about: Record) -> Iterator[Record]:
    over, lr = landscape["lr_over_edge"], landscape["lr"]
    adaptive = any(name.lower() in (about["optimizer"] or "").lower() for name in ADAPTIVE)
    sharp = f"largest eigenvalue {landscape['top_eigenvalue']:.3g}, 2/lr is {2 / lr:.3g}" if lr else ""
    if over is not None and over > 1 and not adaptive:
        yield item(
            "warning",
            "landscape",
            f"the learning rate is {over:.3g} times what plain gradient descent can bear here",
            sharp,
            advice=f"below {landscape['edge']:.3g}, or warmup; training often hovers at this edge, so 1 is no alarm",
        )
    losses, factors = landscape["line"]["loss"], landscape["line"]["factor"]
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
    elif planned:
        detail = f"the lowest on the line is at {landscape['best_step'] / landscape['unit']:.3g} steps"
        yield item("fine", "landscape", f"one step lowers its batch's loss, {losses[0]:.4g} to {at_one:.4g}", detail)
    else:
        yield item(
            "fine", "landscape", f"plain gradient descent is stable below a learning rate of {landscape['edge']:.3g}"
        )


def _module(row: Record) -> str:
    return row["module"] or "the model"


def _many(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
