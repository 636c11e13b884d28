"""What was done to a run by a Guard or a schedule, in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradvitals.types import Action

SHOWN = 5
"""Actions that a report names one by one, the last ones."""

GUARD_KINDS = frozenset({"clip", "skip", "reset_momentum", "cut_lr", "restore_lr", "roll_back"})
"""What a Guard does; schedules keep their own actions in the same record."""

DONE = {
    "clip": "clipped {} gradient{}",
    "skip": "left {} step{} out",
    "reset_momentum": "reset momentum {} time{}",
    "cut_lr": "lowered the learning rate {} time{}",
    "roll_back": "rolled back {} time{}",
    "restore_lr": "gave the learning rate back {} time{}",
    "warmup_extended": "extended warmup {} time{}",
    "decay": "decayed the learning rate {} time{}",
}


def summarise(actions: Sequence[Action]) -> str:
    """A line for what was done, one for what was not, and one for what it cost."""
    done = Counter(action.kind for action in actions if action.taken)
    left = [action for action in actions if not action.taken]
    dry = Counter(action.kind for action in left if action.reason.startswith("dry run"))
    refused = Counter((action.kind, action.reason) for action in left if not action.reason.startswith("dry run"))
    who = "the Guard" if all(action.kind in GUARD_KINDS for action in actions) else "the Guard or a schedule"
    lines = [f"{who} {_phrase(done)}" if done else f"{who} did nothing"]
    if dry:
        lines.append(f"it would have, being on a dry run: {_phrase(dry)}")
    for (kind, reason), times in refused.items():
        often = f", {times} times" if times > 1 else ""
        lines.append(f"it did not {kind.replace('_', ' ')}: {reason}{often}")
    steps = sum(action.cost.get("steps", 0) for action in actions if action.taken)
    seconds = sum(action.cost.get("seconds", 0.0) for action in actions if action.taken)
    if done:
        spent = f" and {seconds:.2g} s" if seconds >= 0.1 else ""
        lines.append(f"cost: {steps} step{'' if steps == 1 else 's'} of training{spent}")
    return "\n  ".join(lines)


def _phrase(counts: Counter[str]) -> str:
    known = {kind: DONE.get(kind, kind.replace("_", " ") + ": {} time{}") for kind in (*DONE, *counts)}
    return ", ".join(
        text.format(counts[kind], "" if counts[kind] == 1 else "s") for kind, text in known.items() if counts[kind]
    )


def latest(actions: Sequence[Action]) -> list[str]:
    """The last actions that were taken, one line each; those that answer single steps only where there is room."""
    taken = [action for action in actions if action.taken]
    rare = [action for action in taken if action.kind not in ("clip", "skip")][-SHOWN:]
    often = [action for action in taken if action.kind in ("clip", "skip")]
    room = SHOWN - len(rare)
    shown = [*rare, *(often[-room:] if room else ())]
    return [str(action) for action in sorted(shown, key=lambda action: action.step)]
