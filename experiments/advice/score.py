"""From courses to the table: how much of the gap to the tuned reference each arm closes, and what made runs worse."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Panel, Trace, draw
from gradvitals.bench import markdown_table

Line = Mapping[str, Any]
"""A finished course, reference or trial of a sweep, as kept in the file."""

CLEAR = 0.05
"""Share of the reference's loss that a start must be worse by for its gap to count."""
WORSE = 0.05
"""Share of the loss before by which a round makes a run worse."""
CLOSED, WORSENED = 0.8, 0.03
"""The bars."""
ARMS = ("advice", "advice, best so far", "random", "finder")


def closed(start: float, loss: float, reference: float) -> float:
    """Returns the share of a start's gap to the reference that a loss closes: 1 at the reference, below 0 if worse.

    >>> closed(2.0, 1.25, 1.0), closed(2.0, 0.5, 1.0), closed(1.2, 3.0, 1.0)
    (0.75, 1.0, -1.0)
    """
    return max(-1.0, min(1.0, (start - loss) / (start - reference)))


def best_so_far(losses: Sequence[float]) -> list[float]:
    """Returns the lowest of each loss and those before it.

    >>> best_so_far([3.0, 1.0, 2.0])
    [3.0, 1.0, 1.0]
    """
    return [min(losses[: place + 1]) for place in range(len(losses))]


def summarize(lines: Iterable[Line]) -> dict[str, Any]:
    """Returns the scores of every arm, task and fault, and what made runs worse."""
    lines = list(lines)
    reference = {(one["task"], one["seed"]): one["loss"] for one in lines if one["kind"] == "reference"}
    courses = [one for one in lines if one["kind"] == "course"]
    started = {(one["task"], one["place"]): one["losses"][0] for one in courses if one["arm"] == "advice"}
    rows: list[dict[str, Any]] = []
    for one in courses:
        key, goal = (one["task"], one["place"]), reference.get((one["task"], one["seed"]))
        if goal is None or key not in started or started[key] < (1 + CLEAR) * goal:
            continue
        start = started[key]
        after = one["losses"][1:] if one["arm"] == "advice" else one["losses"]
        whose = {name: one[name] for name in ("task", "place", "fault", "arm")}
        kept = best_so_far([start, *after])[1:]
        if one["arm"] == "advice":
            rows.append({**whose, "closed": [closed(start, loss, goal) for loss in after]})
            rows.append({**whose, "arm": ARMS[1], "closed": [closed(start, loss, goal) for loss in kept]})
        else:
            rows.append({**whose, "closed": [closed(start, loss, goal) for loss in kept]})
    harm = [found for one in courses if one["arm"] == "advice" for found in _worse(one)]
    rounds = sum(len(one["applied"]) for one in courses if one["arm"] == "advice")
    return {
        "starts": len(started),
        "with_gap": len({(row["task"], row["place"]) for row in rows}),
        "rounds": rounds,
        "worse": len(harm),
        "harm": harm,
        "arms": {arm: _scores(row for row in rows if row["arm"] == arm) for arm in ARMS},
        "closed": {arm: sorted(row["closed"][-1] for row in rows if row["arm"] == arm) for arm in ARMS},
        "tasks": _grouped(rows, lambda row: row["task"]),
        "faults": _grouped(rows, lambda row: row["fault"]),
        "by": _by_word(courses),
        "reference": _references(lines),
    }


def _worse(course: Line) -> list[dict[str, Any]]:
    losses = course["losses"]
    return [
        {
            "task": course["task"],
            "fault": course["fault"],
            "round": place + 1,
            "ratio": losses[place + 1] / losses[place],
        }
        | {name: applied.get(name) for name in ("by", "change", "before")}
        for place, applied in enumerate(course["applied"])
        if losses[place + 1] > (1 + WORSE) * losses[place]
    ]


def _scores(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    rows = list(rows)
    shares = list(zip(*(row["closed"] for row in rows), strict=True))
    return {"count": len(rows)} | {
        name: [measure(share) for share in shares] for name, measure in (("median", statistics.median), ("mean", _mean))
    }


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _grouped(
    rows: Sequence[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], str]
) -> dict[str, dict[str, dict[str, Any]]]:
    groups = dict.fromkeys(key(row) for row in rows)
    return {
        group: {arm: _scores(row for row in rows if row["arm"] == arm and key(row) == group) for arm in ARMS}
        for group in groups
    }


def _by_word(courses: Iterable[Line]) -> list[dict[str, Any]]:
    """How often each finding or topic was followed, and the median of what the loss was multiplied by."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for one in courses:
        if one["arm"] == "advice":
            for place, applied in enumerate(one["applied"]):
                ratios[applied["by"]].append(one["losses"][place + 1] / one["losses"][place])
    return [
        {"by": by, "rounds": len(found), "median": statistics.median(found), "worst": max(found)}
        | {"worse": sum(ratio > 1 + WORSE for ratio in found)}
        for by, found in sorted(ratios.items(), key=lambda item: -len(item[1]))
    ]


def _references(lines: Sequence[Line]) -> list[dict[str, Any]]:
    tried = Counter(one["task"] for one in lines if one["kind"] == "sweep")
    found: dict[str, list[Line]] = defaultdict(list)
    for one in lines:
        if one["kind"] == "reference":
            found[one["task"]].append(one)
    names = ("lr", "batch_size", "max_norm", "warmup")
    return [
        {"task": task, "tried": tried[task], "loss": _mean(one["loss"] for one in some)}
        | {name: some[0]["settings"][name] for name in names}
        for task, some in found.items()
    ]


# -- the figure ------------------------------------------------------------------------------------------------------


def draw_figure(summary: Mapping[str, Any], path: Path) -> None:
    """Draw what each arm closes of the gap: after each training, and of every start in the end."""
    after = Panel(title="median start", x_name="trainings", y_name="gap closed (%)", y_marks=(100 * CLOSED,))
    starts = Panel(title="all starts, after 3 trainings", x_name="starts (%)", y_name="gap closed (%)")
    for color, (arm, shares) in enumerate(summary["closed"].items()):
        medians = [0.0, *(100 * share for share in summary["arms"][arm]["median"])]
        ranks = [100 * (rank + 0.5) / len(shares) for rank in range(len(shares))]
        after.traces.append(Trace(name=arm, x=range(len(medians)), y=medians, line=True, color=color))
        starts.traces.append(Trace(name=arm, x=ranks, y=[100 * share for share in shares], line=True, color=color))
    draw([after, starts], "Share of the gap to the tuned reference that runs close", path)


# -- the table -------------------------------------------------------------------------------------------------------


def _percent(values: Sequence[float]) -> list[str]:
    return [f"{100 * value:.0f}" for value in values] or ["-"] * 3


def format_summary(summary: Mapping[str, Any]) -> str:
    """Returns the tables as text."""
    advice, random = (summary["arms"][arm]["median"] for arm in ("advice", "random"))
    share = summary["worse"] / max(summary["rounds"], 1)
    last, other = (values[-1] if values else float("nan") for values in (advice, random))
    bars = [
        ["median share of the gap closed after three rounds", f"{100 * last:.0f} %", ">= 80 %", _yes(last >= CLOSED)],
        [
            f"rounds that made a run worse by over 5 %, of {summary['rounds']}",
            f"{100 * share:.1f} %",
            "<= 3 %",
            _yes(share <= WORSENED),
        ],
        ["random search, equal trainings", f"{100 * other:.0f} %", "less", _yes(last > other)],
    ]
    heads = ["after 1", "2", "3"]
    parts = [
        f"{summary['starts']} starts, {summary['with_gap']} of them over 5 % worse than the tuned reference",
        "The bars",
        _table(["", "is", "has to be", "reached"], bars),
        "Share of the gap closed in %, median (mean) over starts; random and finder: the best so far",
        _table(
            ["arm", "starts", *heads],
            [
                [arm, str(one["count"])]
                + [f"{a} ({b})" for a, b in zip(_percent(one["median"]), _percent(one["mean"]), strict=True)]
                for arm, one in summary["arms"].items()
            ],
        ),
    ]
    for name, title in (("tasks", "task"), ("faults", "fault")):
        parts += [
            f"By {title}: median share in % after 1, 2 and 3 rounds of the advice, and after 3 trainings of the others",
            _table(
                [title, "starts", *heads, "random", "finder"],
                [
                    [group, str(arms["advice"]["count"]), *_percent(arms["advice"]["median"])]
                    + [_percent(arms[arm]["median"])[-1] for arm in ("random", "finder")]
                    for group, arms in summary[name].items()
                ],
            ),
        ]
    parts += [
        "What was followed: rounds, and what the loss was multiplied by",
        _table(
            ["by", "rounds", "median", "worst", "worse by over 5 %"],
            [
                [one["by"], str(one["rounds"]), f"{one['median']:.2f}", f"{one['worst']:.2f}", str(one["worse"])]
                for one in summary["by"]
            ],
        ),
        "Rounds that made a run worse by over 5 %",
        _table(
            ["task", "fault", "round", "loss x", "by", "from", "to"],
            [
                [
                    one["task"],
                    one["fault"],
                    str(one["round"]),
                    f"{one['ratio']:.2f}",
                    one["by"],
                    _short(one["before"]),
                    _short(one["change"]),
                ]
                for one in summary["harm"]
            ],
        ),
        "The tuned references",
        _table(
            ["task", "trials", "learning rate", "batch", "clip", "warmup", "held-out loss"],
            [
                [
                    one["task"],
                    str(one["tried"]),
                    f"{one['lr']:.3g}",
                    str(one["batch_size"]),
                    str(one["max_norm"]),
                    str(one["warmup"]),
                    f"{one['loss']:.4f}",
                ]
                for one in summary["reference"]
            ],
        ),
    ]
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table([head, *rows])


def _yes(reached: bool) -> str:
    return "yes" if reached else "no"


def _short(values: Mapping[str, Any] | None) -> str:
    items = (values or {}).items()
    return ", ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in items)
