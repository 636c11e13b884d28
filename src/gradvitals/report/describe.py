"""Findings and actions in a few words: where, on what evidence, what was done."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradvitals.report.format import as_float, cut, number, percent
from gradvitals.types import Action, Finding

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
"""What numbers are called whose names in the evidence are short."""
NAMES_IN: Mapping[str, Mapping[str, str]] = {
    "update_ratio": {"ratio": "update over weight norm"},
    "lr_too_high": {"ratio": "update over weight norm"},
    "update_spike": {"ratio": "update over its baseline"},
    "explosion": {"ratio": "norm over its baseline", "sensitivity": "loss change of a random step"},
    "vanishing": {"share": "weakest layer over the strongest"},
}
"""What a number is called in the findings of one rule."""

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
LATEST_ACTIONS = 5


def where(finding: Finding, limit: int = NAMED_TENSORS) -> str:
    """Returns the tensors by name, how many more there are, and the rank if it is of one."""
    names = [cut(name) for name in finding.tensors[: limit if len(finding.tensors) > limit + 1 else limit + 1]]
    rest = len(finding.tensors) - len(names)
    text = ", ".join(names) + (f" and {rest:,} more" if rest else "")
    return text if finding.rank is None else f"{text} (rank {finding.rank})"


def evidence(content: Mapping[str, Any], finding_id: str = "") -> Iterator[str]:
    """Yields the numbers that were seen, each beside what was expected."""
    seen, expected = content.get("seen"), content.get("expected")
    if not isinstance(seen, Mapping):
        return
    normal: Mapping[str, Any] = expected if isinstance(expected, Mapping) else {}
    swings = {"swing": NORM_SPREAD, "loss_swing": LOSS_SPREAD} if "loss_swing" in seen else {"swing": LOSS_SPREAD}
    names = NAMES | swings | dict(NAMES_IN.get(finding_id, {}))
    yield from (_compared(names.get(str(name), str(name)), seen[name], normal[name]) for name in seen if name in normal)
    others = _known({name: value for name, value in seen.items() if name not in (*normal, *NEEDS_EXPECTED)}, names)
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
    names = [name for name in SELF_EXPLANATORY if name in seen and _is_shown(name, seen[name])]
    return ", ".join(f"{labels.get(name, name).replace('_', ' ')} {_value(seen[name])}" for name in names)


def _is_shown(name: str, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")
    return is_number and (name in MADE_NAN or not math.isnan(as_float(value)))


def _compared(name: str, value: Any, expected: Any) -> str:
    if name == "share" and expected == 0 and math.isfinite(as_float(value)):
        return f"{percent(as_float(value))} of their numbers, normally none"
    text = f"{name.replace('_', ' ')} {_value(value)}"
    is_number = isinstance(expected, (int, float))
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
    dry = Counter(action.kind for action in others if action.reason.startswith("dry run"))
    refused = Counter((action.kind, action.reason) for action in others if not action.reason.startswith("dry run"))
    who = "the Guard" if all(action.kind in GUARD_KINDS for action in actions) else "the Guard or a schedule"
    lines = [f"{who} {_counted(done)}" if done else f"{who} did nothing"]
    if dry:
        lines.append(f"dry run, it would have: {_counted(dry)}")
    for (kind, reason), times in refused.items():
        often = f", {times} times" if times > 1 else ""
        lines.append(f"it did not {kind.replace('_', ' ')}: {reason}{often}")
    steps = sum(action.cost.get("steps", 0) for action in actions if action.taken)
    seconds = sum(action.cost.get("seconds", 0.0) for action in actions if action.taken)
    if done:
        spent = f" and {number(seconds, 2)} s" if seconds >= 0.1 else ""
        lines.append(f"cost: {steps} step{'' if steps == 1 else 's'} of training{spent}")
    return "\n  ".join(lines)


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
