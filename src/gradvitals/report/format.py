"""Numbers, durations, names, findings and actions as short text that is safe to print."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gradvitals import format
from gradvitals.format import clean as clean
from gradvitals.types import Action, Finding, FloatArray

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*%#"


def number(value: Any, digits: int = 3, *, missing: str = "-") -> str:
    """Returns a number in a few characters; `missing` for NaN and for what is not a number.

    JSON keeps NaN and infinity as strings, so these count as numbers too.

    >>> number(0.012345), number(234567.8), number(12000), number(float("nan")), number("inf")
    ('0.0123', '234,568', '12,000', '-', 'Inf')
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    value = as_float(value)
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return format.number(value, digits, missing=missing)


def interval(value: float, low: float, high: float) -> str:
    """Returns a value and its 95% interval.

    >>> interval(1.5, 1.0, 2.0)
    '1.5 (1 to 2)'
    """
    if math.isnan(value) or (math.isnan(low) and math.isnan(high)):
        return number(value)
    return f"{number(value)} ({number(low)} to {number(high)})"


def percent(share: float, digits: int = 3) -> str:
    """Returns a share as a percentage.

    >>> percent(0.125), percent(float("nan"))
    ('12.5%', '-')
    """
    return "-" if math.isnan(share) else format.percent(share, digits)


def duration(seconds: float) -> str:
    """Returns a length of time in its two largest units.

    >>> duration(3.21), duration(75), duration(7380)
    ('3.2 s', '1 min 15 s', '2 h 3 min')
    """
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def ago(seconds: float) -> str:
    """Returns how long ago something was, in its largest unit.

    >>> ago(20), ago(3700), ago(200_000)
    ('20 s', '1 h', '2 d')
    """
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def plural(count: int, noun: str) -> str:
    """Returns a count and its noun.

    >>> plural(1, "step"), plural(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def cut(text: str, limit: int = 120) -> str:
    """Returns the text in at most `limit` characters, without its middle if it is longer.

    >>> cut("blocks.0.attn.qkv.weight", 13)
    'blocks…weight'
    """
    if len(text) <= limit:
        return text
    kept = limit - 1
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"


def in_sentence(name: str) -> str:
    """Returns a name within a sentence: lowercase, except for words such as GSNR and NaN.

    >>> in_sentence("NaN in the data"), in_sentence("Loss spike")
    ('NaN in the data', 'loss spike')
    """
    first = name.partition(" ")[0]
    return name if first != first.capitalize() else name[:1].lower() + name[1:]


def capitalized(text: str) -> str:
    """Returns the text with a capital first letter and the rest as it is."""
    return text[:1].upper() + text[1:]


def fix_snippet(fix: str | None) -> str:
    """Returns the lines to paste of a fix; empty if it has none."""
    return str(getattr(fix, "snippet", None) or "")


def as_float(value: Any) -> float:
    """Returns a number from a JSON record: "nan" and "inf" are strings there, and what is no number becomes NaN.

    >>> as_float("inf"), as_float(None), as_float("three")
    (inf, nan, nan)
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def sparkline(values: Sequence[float] | FloatArray, width: int, *, robust: bool = False, blocks: str = BLOCKS) -> str:
    """Returns a series as at most `width` characters that keep its spikes.

    Each character stands for one value or, if there are more values than characters, for the value of its share that
    lies farthest from the median. A positive series that spans more than a factor of ten is drawn by its logarithm.
    NaN leaves a gap; infinity shows as ``!``.

    Args:
        values: The series, in order.
        width: The most characters to use.
        robust: Scale to the middle 96% of the values, so that one spike does not flatten the rest.
        blocks: Characters from low to high.

    >>> sparkline([1, 2, 3, 4, 5, 6, 7, 8], width=8)
    '▁▂▃▄▅▆▇█'
    >>> sparkline([0, 0, 0, 9, 0, 0, 0, 0], width=4)
    '▁█▁▁'
    >>> sparkline([1, 10, 100, 1000], width=4)
    '▁▃▆█'
    """
    series = np.asarray(values, dtype=np.float64)
    if width < 1 or series.size == 0:
        return ""
    finite = series[np.isfinite(series)]
    if finite.size and finite.min() > 0 and finite.max() > 10 * finite.min():
        series = np.log(series, where=np.isfinite(series), out=series.copy())
        finite = series[np.isfinite(series)]
    median = float(np.median(finite)) if finite.size else 0.0
    low, high = 0.0, 0.0
    if finite.size:
        low, high = np.quantile(finite, [0.02, 0.98]) if robust else (finite.min(), finite.max())

    def character(part: FloatArray) -> str:
        if np.isinf(part).any():
            return "!"
        present = part[~np.isnan(part)]
        if not present.size:
            return " "
        point = float(present[np.abs(present - median).argmax()])
        if high <= low:
            return blocks[len(blocks) // 2 - 1] if point == low else blocks[-1] if point > high else blocks[0]
        share = min(max((point - low) / (high - low), 0.0), 1.0)
        return blocks[min(int(share * len(blocks)), len(blocks) - 1)]

    return "".join(character(part) for part in np.array_split(series, min(width, series.size)))


# -- findings and actions --------------------------------------------------------------------------------------------

TITLE = 320
"""Characters of a title that are shown: it may hold names, and these may have any length."""
NAMED_TENSORS = 4
VALUE = 60
"""Characters of one value of the evidence."""

SELF_EXPLANATORY = ("loss", "norm", "ratio", "lr", "gsnr", "noise_scale", "batch_size", "weight_decay")
"""Numbers of the evidence that are shown even without an expected value."""
NEEDS_EXPECTED = ("ratio",)
"""Those of them that mean nothing without one."""
MADE_NAN = ("loss", "norm")
"""Those of them that training itself may make NaN; otherwise NaN means that the number was not known."""
NONFINITE = ("nonfinite", "loss_nonfinite", "")
"""Findings that a later NaN belongs to: in others, that step was not read."""
LOSS_SPREAD = "spread of recorded losses over their mean"
NORM_SPREAD = "spread of the norm's logarithm"
NAMES = {
    "z": "standard deviations from normal",
    "gradient_z": "standard deviations of the gradient from normal",
    "cosine": "mean cosine of consecutive updates",
    "cv": "spread of the norm over its mean",
    "dead": "share of dead units",
    "fell": "fall of the loss",
    "growth": "growth of the weight norm",
    "lr_first": "first learning rate",
    "taken": "share of the weights taken per step",
    "val": "validation loss",
    "norm": "gradient norm",
    "lr": "learning rate",
    "gsnr": "GSNR",
}
"""Full names of numbers that the evidence names in short."""
NAMES_IN: Mapping[str, Mapping[str, str]] = {
    "update_ratio": {"ratio": "update over weight norm"},
    "lr_too_high": {"ratio": "update over weight norm"},
    "update_spike": {"ratio": "update over its baseline"},
    "explosion": {"ratio": "norm over its baseline", "sensitivity": "loss change of a random step"},
    "vanishing": {"share": "weakest layer over the strongest"},
}
"""Names of numbers in the findings of one rule."""

LIMIT = re.compile(r"(under|below|over|above) ([-+.,\deE]+)(%?)")
"""Matches the words for a healthy number with one limit."""

GUARD_KINDS = frozenset({"clip", "skip", "trial", "roll_back", "hold_lr"})
"""The actions of a Guard; schedules keep their own actions in the same record."""
DONE = {
    "clip": "clipped {} gradient{}",
    "skip": "skipped {} step{}",
    "trial": "compared with a snapshot {} time{}, in vain",
    "roll_back": "rolled back {} time{}",
    "hold_lr": "held the learning rate {} time{}",
    "warmup_extended": "extended warmup {} time{}",
    "decay": "decayed the learning rate {} time{}",
}
FIRST = {"skip": "skipped step", "roll_back": "rolled back at step"}
"""What a dry run would have done, followed by the number of the step."""
LATEST_ACTIONS = 5


def where(finding: Finding, limit: int = NAMED_TENSORS) -> str:
    """Returns the tensors by name, how many more there are, and the rank if it is of one."""
    text = format.listed(map(cut, finding.tensors), limit if len(finding.tensors) > limit + 1 else limit + 1)
    return text if finding.rank is None else f"{text} (rank {finding.rank})"


def evidence(content: Mapping[str, Any], finding_id: str = "") -> Iterator[str]:
    """Yields the numbers that were seen, each beside what was expected."""
    seen, expected = content.get("seen"), content.get("expected")
    if not isinstance(seen, Mapping):
        return
    normal: Mapping[str, Any] = expected if isinstance(expected, Mapping) else {}
    swings = {"swing": NORM_SPREAD, "loss_swing": LOSS_SPREAD} if "loss_swing" in seen else {"swing": LOSS_SPREAD}
    names = NAMES | swings | dict(NAMES_IN.get(finding_id, {}))
    compared = [name for name in seen if name in normal and not _is_healthy(seen[name], normal[name])]
    yield from (_compared(names.get(str(name), str(name)), seen[name], normal[name]) for name in compared)
    others = _known({name: value for name, value in seen.items() if name not in (*compared, *NEEDS_EXPECTED)}, names)
    if others:
        yield others
    latest = content.get("latest")
    if isinstance(latest, Mapping):
        shown = {name for name in latest if name in normal or name not in NEEDS_EXPECTED}
        new = {name: latest[name] for name in latest if name in shown and latest[name] != seen.get(name)}
        if finding_id not in NONFINITE:
            new = {name: value for name, value in new.items() if not math.isnan(as_float(value))}
        news = _known(new, names)
        if news:
            yield f"at step {latest.get('step')}: {news}"


def _known(seen: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Returns the numbers whose names say what they are; the others are for titles and fixes."""
    shown = []
    for name in SELF_EXPLANATORY:
        value = seen.get(name)
        is_number = isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")
        if is_number and (name in MADE_NAN or not math.isnan(as_float(value))):
            shown.append(f"{labels.get(name, name).replace('_', ' ')} {_value(value)}")
    return ", ".join(shown)


def _is_healthy(value: Any, expected: Any) -> bool:
    """Whether a number that a rule looked at is on the healthy side of its limit: another one made it fire.

    >>> _is_healthy(0.0104, "under 0.0107"), _is_healthy(0.2, "under 10%"), _is_healthy(3.0, "a finite number")
    (True, False, False)
    """
    limit = LIMIT.fullmatch(expected) if isinstance(expected, str) else None
    if limit is None:
        return False
    edge = as_float(limit[2].replace(",", "")) / (100 if limit[3] else 1)
    shown = as_float(number(value).replace(",", ""))  # of what rounds to the limit, a reader cannot tell
    return shown <= edge if limit[1] in ("under", "below") else shown >= edge


def _compared(name: str, value: Any, expected: Any) -> str:
    if name == "share" and expected == 0 and math.isfinite(as_float(value)):
        return f"{percent(as_float(value))} of their numbers, normally none"
    text = f"{name.replace('_', ' ')} {_value(value)}"
    is_number = isinstance(expected, (int, float))
    if is_number and math.isnan(expected):
        return text
    return f"{text}, normally {_value(expected)}" if is_number else f"{text} (healthy: {_value(expected)})"


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        text = ", ".join(map(_value, value))
    elif isinstance(value, Mapping):
        text = ", ".join(f"{key} {_value(part)}" for key, part in value.items())
    elif isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        text = value
    else:
        text = str(value) if isinstance(value, bool) or value is None else number(value, missing="NaN")
    return text if len(text) <= VALUE else text[: VALUE - 3] + "..."


def summarize_actions(actions: Sequence[Action]) -> str:
    """Returns a line for what was done, one for what was not, and one for what it cost."""
    done = Counter(action.kind for action in actions if action.taken)
    others = [action for action in actions if not action.taken]
    dry = [action for action in others if action.reason.startswith("dry run")]
    refused = Counter((action.kind, action.reason) for action in others if not action.reason.startswith("dry run"))
    who = "the Guard" if all(action.kind in GUARD_KINDS for action in actions) else "the Guard or a schedule"
    lines = [f"{who} {_counted(done)}" if done else f"{who} did nothing"]
    if dry:
        lines.append(f"dry run, it would have {_would_have(dry)}")
    for (kind, reason), times in refused.items():
        often = f", {times} times" if times > 1 else ""
        lines.append(f"it did not {kind.replace('_', ' ')}: {reason}{often}")
    steps = sum(action.cost.get("steps", 0) for action in actions if action.taken)
    seconds = sum(action.cost.get("seconds", 0.0) for action in actions if action.taken)
    if done:
        spent = f" and {number(seconds, 2)} s" if seconds >= 0.1 else ""
        lines.append(f"cost: {steps} step{'' if steps == 1 else 's'} of training{spent}")
    return "\n  ".join(lines)


def _would_have(dry: Sequence[Action]) -> str:
    """What a dry run would have done first. Acting would have changed all later steps, so the rest are only alarms."""
    in_order = sorted(dry, key=lambda action: action.step)
    back = next((action for action in in_order if action.kind == "roll_back"), None)
    # What else was to be done at the step of the rollback is part of it.
    in_order = [action for action in in_order if back is None or action is back or action.step != back.step]
    num_clips = next((place for place, action in enumerate(in_order) if action.kind != "clip"), len(in_order))
    first: dict[str, Action] = {}
    for action in in_order[num_clips:]:
        if action.kind != "clip" and "roll_back" not in first:
            first.setdefault(action.kind, action)
    done = [_counted(Counter(clip=num_clips))] if num_clips else []
    done += [f"{FIRST.get(kind, kind)} {action.step:,}" for kind, action in first.items()]
    later = len(in_order) - num_clips - len(first)
    rest = f"; {later:,} later alarm{'' if later == 1 else 's'} may follow from the same cause" if later else ""
    return ", then ".join(done) + rest


def _counted(counts: Counter[str]) -> str:
    known = {kind: DONE.get(kind, kind.replace("_", " ") + ": {} time{}") for kind in (*DONE, *counts)}
    return ", ".join(
        text.format(counts[kind], "" if counts[kind] == 1 else "s") for kind, text in known.items() if counts[kind]
    )


def latest_actions(actions: Sequence[Action]) -> list[str]:
    """Returns the last actions that were taken, a line each; clips and skips only if there is room."""
    taken = [action for action in actions if action.taken]
    rare = [action for action in taken if action.kind not in ("clip", "skip")][-LATEST_ACTIONS:]
    frequent = [action for action in taken if action.kind in ("clip", "skip")]
    room = LATEST_ACTIONS - len(rare)
    shown = [*rare, *(frequent[-room:] if room else ())]
    return [str(action) for action in sorted(shown, key=lambda action: action.step)]
