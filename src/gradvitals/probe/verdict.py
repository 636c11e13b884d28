"""Conclusions from a probe's answers, worst first. Takes and returns plain records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from gradvitals.format import listed

Record = dict[str, Any]

ORDER = ("critical", "warning", "info", "fine")
DEAD, FEW_DEAD = 0.5, 0.1
SATURATED = 0.5
BIG_UPDATE = 0.1
"""Healthy limit for the change of a tensor in one step, relative to its norm."""

ADAPTIVE = ("adam", "rmsprop", "adagrad", "adadelta", "lion", "muon", "lamb", "adafactor")


def item(
    severity: str, question: str, title: str, detail: str = "", names: Iterable[str] = (), advice: str = ""
) -> Record:
    """Returns one line of the verdict."""
    return {
        "severity": severity,
        "question": question,
        "title": title,
        "detail": detail,
        "names": list(names),
        "advice": advice,
    }


def verdicts(record: Record, averaging: dict[str, str]) -> list[Record]:
    """Returns the verdict on a probe's record and on how its loss averages, worst first."""
    found = list(_loss(record["about"], averaging))
    for question, judge in {
        "signal": _signal,
        "layers": _layers,
        "samples": _samples,
        "landscape": _landscape,
        "saliency": _own_verdict,
        "robustness": _own_verdict,
    }.items():
        if record.get(question):
            found += judge(record[question], record["about"])
    return sorted(found, key=lambda item: ORDER.index(item["severity"]))


def _own_verdict(answer: Record, about: Record) -> Iterator[Record]:
    yield from answer["verdict"]


def _loss(about: Record, averaging: dict[str, str]) -> Iterator[Record]:
    if averaging["kind"] == "sum":
        title = "the batch loss is the sum of its examples' losses, not the mean"
        advice = "reduction='mean': with a sum, gradients, steps and the edge of stability grow with the batch"
        yield item("warning", "loss", title, averaging["numbers"], (), advice)
    elif averaging["kind"] == "other":
        title = "the batch loss is not the mean of its examples' losses"
        advice = (
            "look at the shapes of output and target, one may be broadcast; where examples are compared with each "
            "other, as in a contrastive loss, ignore the answers on single examples"
        )
        yield item("warning", "loss", title, f"{averaging['numbers']}; {averaging['shapes']}", (), advice)
    bad = [str(i) for i, loss in enumerate(about["losses"]) if not math.isfinite(loss)]
    if bad:
        title = f"the loss is not finite in {len(bad)} of {len(about['losses'])} batches"
        detail = f"{'batch' if len(bad) == 1 else 'batches'} number {listed(bad)}, counted from 0"
        advice = "look at these batches, then at divisions and logarithms in the loss"
        yield item("critical", "signal", title, detail, (), advice)


def _signal(signal: Record, about: Record) -> Iterator[Record]:
    rows, limits = signal["tensors"], signal["thresholds"]

    def beyond(kind: str) -> list[str]:
        return list(dict.fromkeys(limits[f"{kind}_names"] + limits[f"{kind}_relative_names"]))

    def limit(kind: str, side: str, relative: str) -> str:
        words = f"root mean square {side} {limits[relative]:g} of the median tensor's"
        by_lr = limits[kind]
        return words if by_lr is None else f"norm {side} {by_lr:.3g} (by the learning rate), or {words}"

    if nonfinite := [row["name"] for row in rows if row["nonfinite"]]:
        yield item("critical", "signal", "gradients that are NaN or infinite", listed(nonfinite, 2), nonfinite)
    if exploding := beyond("exploding"):
        detail = limit("exploding", "above", "relative_high")
        advice = "clip gradients, lower the learning rate, normalize activations"
        yield item("warning", "signal", f"gradients explode in {listed(exploding, 2)}", detail, exploding, advice)
    none = [row["name"] for row in rows if row["verdict"] == "none"]
    if none:
        advice = "check that the loss depends on it: a detach, a dead unit before it, an unused part"
        yield item("warning", "signal", f"no gradient reaches {listed(none, 2)}", "zero in every batch", none, advice)
    vanishing = [name for name in beyond("vanishing") if name not in none]
    # If a normalization or a softmax cancels a parameter, its gradient is only rounding, as it should be.
    for cancels, severity, advice in (
        (False, "warning", "residual connections, normalization, activations that do not saturate, another start"),
        (True, "info", "nothing, if the next layer cancels it: a batch norm, the softmax of attention"),
    ):
        names = [name for name in vanishing if _may_cancel(name) is cancels]
        if names:
            detail = limit("vanishing", "below", "relative_low")
            yield item(severity, "signal", f"gradients vanish in {listed(names, 2)}", detail, names, advice)
    if unsteady := [row["name"] for row in rows if row["cv"] > 1]:
        title = f"the gradient norm jumps between batches in {listed(unsteady, 2)}"
        advice = "larger batches, clipping, a look at the batches with the largest norm"
        yield item("warning", "signal", title, "its standard deviation is larger than its mean", unsteady, advice)
    total, size = signal["total"], signal["batch_size"]
    gsnr, start, end = total["gsnr"], total["low"], total["high"]
    if math.isnan(gsnr) or math.isnan(start):
        yield item("info", "signal", "too few batches to tell signal from noise", "two or more are needed")
    elif start <= 0:
        title = f"{len(rows[0]['norms'])} batches of {size} show no signal above their noise"
        advice = "more batches, larger batches; near the end of training this is normal"
        yield item("info", "signal", title, f"GSNR {gsnr:.3g} (95 %: {start:.3g} to {end:.3g})", (), advice)
    else:
        stronger = "signal is stronger than noise" if gsnr >= 1 else "noise is stronger than signal"
        scale = f"{total['noise_scale']:.3g} examples"
        detail = (
            f"95 %: {start:.3g} to {end:.3g}; noise scale {scale} "
            f"({total['noise_scale_low']:.3g} to {total['noise_scale_high']:.3g})"
        )
        yield item("fine", "signal", f"GSNR {gsnr:.3g} at a batch of {size}: {stronger}", detail)


def _may_cancel(name: str) -> bool:
    """Whether a tensor is a bias or a scale, which a later layer may cancel."""
    multiplier = ".parametrizations." in f".{name}" and name.endswith((".row", ".column", ".scale"))
    return multiplier or name.endswith("bias")


def _layers(layers: Record, about: Record) -> Iterator[Record]:
    rows = layers["activations"]
    fine = True
    for low, high, severity in ((DEAD, 2.0, "warning"), (FEW_DEAD, DEAD, "info")):
        if dead := [row for row in rows if low <= row["dead_share"] < high]:
            fine, names = False, [_module(row) for row in dead]
            worst = max(dead, key=lambda row: row["dead_share"])
            detail = f"{worst['dead']} of {worst['units']} in {_module(worst)} were zero for every example"
            advice = "a lower learning rate, LeakyReLU or GELU, another initialization of the biases"
            yield item(severity, "layers", f"dead units in {listed(names, 2)}", detail, names, advice)
    if saturated := [row for row in rows if row["saturated_share"] > SATURATED]:
        fine, names = False, [_module(row) for row in saturated]
        worst = max(saturated, key=lambda row: row["saturated_share"])
        share = f"{100 * worst['saturated_share']:.0f} %"
        detail = f"{share} of the {worst['kind']} outputs of {_module(worst)} are at an end of the range"
        advice = "smaller weights, normalized inputs, an activation that does not saturate"
        yield item("warning", "layers", f"saturated activations in {listed(names, 2)}", detail, names, advice)
    big = [row for row in layers["tensors"] if row["update_ratio"] > BIG_UPDATE and row["weight_norm"] > 0]
    if big:
        fine, names = False, [row["name"] for row in big]
        detail = f"up to {100 * max(row['update_ratio'] for row in big):.3g} % of the weights' norm"
        advice = "a lower learning rate, or warmup; ignore new biases that start at zero"
        title = f"one step changes {listed(names, 2)} by more than {100 * BIG_UPDATE:.0f} %"
        yield item("warning", "layers", title, detail, names, advice)
    if fine:
        units = sum(row["units"] for row in rows if "relu" in row["kind"])
        dead_units = sum(row["dead"] for row in rows)
        highest = max((row["saturated_share"] for row in rows if row["saturated_share"] > 0), default=0.0)
        words = [
            f"few dead units ({dead_units} of {units})" if dead_units else "no dead units",
            f"little saturation (at most {100 * highest:.0f} %)" if highest >= 0.005 else "no saturated activations",
            "no step out of proportion",
        ]
        yield item("fine", "layers", ", ".join(words))


def _samples(samples: Record, about: Record) -> Iterator[Record]:
    broken = [i for i, norm in enumerate(samples["norms"]) if not math.isfinite(norm + samples["losses"][i])]
    count = samples["examples"]
    if broken:
        title = f"loss or gradient of {len(broken)} of {count} examples is not finite"
        advice = "look at these examples: missing values, empty inputs, numbers out of range"
        yield item("critical", "samples", title, _examples(samples, broken), (), advice)
    odd = samples["standing_out"]
    if odd:
        title = f"{len(odd)} of {count} examples {'stands' if len(odd) == 1 else 'stand'} out: labels may be wrong"
        among = "their class" if any(target is not None for target in samples["targets"]) else "the others"
        detail = f"a loss far above that of {among} and a large gradient: {_examples(samples, odd)}"
        advice = "look at these first; after long training some examples stand out because they are hard"
        yield item("info", "samples", title, detail, (), advice)
    detail = f"OSGR {samples['osgr']:.3g} for {samples['train_size']} examples"
    if samples["low"] > 0:
        title = f"noise scale {samples['noise_scale']:.3g} examples, from the gradients of {count} examples"
        yield item("fine", "samples", title, detail)
    elif not broken:
        yield item("info", "samples", "single examples show no signal above their noise", detail)


def _examples(samples: Record, which: list[int]) -> str:
    """Returns names of single examples: their index in the data set or in the batches read."""
    indices, places = samples["dataset_indices"], samples["places"]
    if all(indices[i] is not None for i in which):
        return f"number {listed([indices[i] for i in which], 4)} of the data set"
    return listed([f"place {places[i][1]} of batch {places[i][0]}" for i in which], 4)


def _landscape(landscape: Record, about: Record) -> Iterator[Record]:
    over, lr = landscape["lr_over_edge"], landscape["lr"]
    losses, factors = landscape["line"]["loss"], landscape["line"]["factor"]
    adaptive = any(name in (about["optimizer"] or "").lower() for name in ADAPTIVE)
    if over is not None and over > 1 and not adaptive:
        unsettled = "" if landscape["converged"] else ", not converged"
        title = f"the learning rate is {over:.3g} times the largest that is stable for plain gradient descent here"
        detail = f"largest eigenvalue {landscape['top_eigenvalue']:.3g}{unsettled}, 2/lr is {2 / lr:.3g}"
        advice = f"below {landscape['edge']:.3g}, or warmup; training often hovers at this edge, so 1 is no alarm"
        yield item("warning", "landscape", title, detail, (), advice)
    if not math.isfinite(losses[0]):
        yield item("critical", "landscape", "the loss of the first batch is not finite: nothing to follow")
        return
    at_one = losses[factors.index(1.0)]
    if lr is None and landscape["direction"] != "update":
        if math.isfinite(landscape["edge"]):
            title = f"plain gradient descent is stable below a learning rate of {landscape['edge']:.3g}"
            detail = "" if landscape["converged"] else "the eigenvalue has not converged: the edge may be lower"
            yield item("fine", "landscape", title, detail)
    elif at_one == losses[0]:
        yield item("info", "landscape", "one step does not change the loss of its batch", f"{losses[0]:.4g}")
    elif at_one < losses[0]:
        best = landscape["best_step"] / landscape["unit"]
        beyond = " or beyond, where the line ends" if best == factors[-1] else ""
        title = f"one step lowers its batch's loss, {losses[0]:.4g} to {at_one:.4g}"
        yield item("fine", "landscape", title, f"the lowest on the line is at {best:.3g} steps{beyond}")
    else:
        title, detail = "one step raises the loss of its own batch", f"from {losses[0]:.4g} to {at_one:.4g}"
        yield item("warning", "landscape", title, detail, (), "a lower learning rate")


def _module(row: Record) -> str:
    return row["module"] or "the model"
