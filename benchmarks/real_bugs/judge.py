"""What `gradvitals doctor` says about a case, and whether it is right."""

from __future__ import annotations

import gc
import io
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.real_bugs.cases import CASES
from benchmarks.real_bugs.controls import CONTROLS
from benchmarks.real_bugs.loop import Knobs
from gradvitals.integrations.zero_code.program import Settings
from gradvitals.integrations.zero_code.watcher import Hooks, Watcher
from gradvitals.report.report import Report
from gradvitals.report.terminal import render_doctor
from gradvitals.store.reader import open_run

CAUSES = {
    "lr_high": r"learning rate.{0,40}(too high|too large|higher than|stability)|loss was summed",
    "lr_low": r"learning rate.{0,60}(too low|so small|too small|too slow)|steps are too (short|small)",
    "too_early": r"still (falling|improving)|stopped (too )?early|stopped while",
    "inputs_scale": r"inputs?\b.{0,80}(standardi[sz]ed|0 to 255|scale|units|raw|far from 0)",
    "targets_scale": r"targets?\b.{0,80}(standardi[sz]ed|scale|large values|raw|far from 0)",
    "targets_range": r"targets?\b.{0,80}(range|outside|between|negative|cannot reach)",
    "output_activation": r"softmax|sigmoid|relu.{0,40}(output|last)|(output|last).{0,40}relu|clamp|probabilit",
    "loss_mismatch": r"(loss|mse|cross.entropy|bce).{0,90}(expects|meant|suits|made for|classes|probabilit|targets)",
    "no_nonlinearity": r"(no|without an?) (activation|nonlinear)",
    "outputs_count": r"(one|single|\d+) output|outputs? for",
    "dead_units": r"dead|units? .{0,20}(are|is) off|off for every",
    "initialization": r"initiali[sz]|weights.{0,30}(too large|start)|start.{0,20}same weights",
    "vanishing": r"each layer passes on less|vanish|sigmoid or tanh",
    "no_gradient": r"detach|not used in the forward|no gradient",
    "not_in_optimizer": r"not (given to|in) the optimizer|optimizer does not have|param_groups",
    "unchanged": r"not given to the optimizer|optimizer does not have|did not change|do(es)? not (move|change)",
    "stale_gradients": r"zero_grad\(\).{0,30}(missing|not called)|not zeroed",
    "zeroed_before_step": r"zero(ed|_grad).{0,60}(before|between)",
    "loss_scale": r"(summed|multiplied).{0,60}(averag|divid)|without dividing|not divided",
    "warmup": r"warmup|first steps were too (long|large)",
    "schedule_zero": r"schedule|learning rate (is 0|fell|reached)",
    "dropout": r"dropout",
    "labels_mismatch": r"inputs and targets (may |do )?not (match|belong)|shuffled|labels? .{0,30}match",
    "nan_in_data": r"(input|batch|data|sample)s?\b.{0,40}(nan|not finite|infinite)",
    "log_of_zero": r"log of (zero|0)|log\(0\)",
    "zero_std": r"constant column|std.{0,20}(zero|0)",
    "explosion": r"recurren|explod",
    "clipping": r"clip",
    "float16": r"float16",
    "rounding": r"bfloat16|rounds?|(distance|gap) between two",
    "batch_small": r"batch( size)? of \d|single samples?|small batch",
    "batch_norm_small": r"batch ?norm",
    "momentum": r"momentum of|momentum",
    "weight_decay": r"weight decay",
    "frozen": r"requires_grad is False|frozen",
    "same_batch": r"same (small )?(batch|samples)",
    "wrong_model": r"(another|a copy|other|different) .{0,30}model|copy of",
    "broadcast": r"broadcast",
    "sorted_data": r"sorted|not shuffled|one class per batch",
    "double_softmax": r"softmax",
    "double_sigmoid": r"sigmoid",
    "sigmoid_for_regression": r"sigmoid",
    "eval_mode": r"eval",
    "no_graph": r"no graph|argmax",
    "reshaped": r"reshape|view|transpose",
    "padding": r"padding",
    "copied_targets": r"targets? (is|are) the inputs?|equals the input|one (place|position) ahead",
    "wrong_sign": r"minus|wrong sign|sign is wrong",
    "root_of_zero": r"root|norm of zero",
    "time_first": r"time steps?|batch_first",
    "hidden_softmax": r"softmax",
    "capacity": r"(few|too small|narrow).{0,30}(units|layer|model)",
    "penalty": r"penalty|regulari[sz]|weight decay",
    "memorizing": r"memori[sz]|overfit|validation",
}
"""What the title and the first cause of the leading finding say if they name the right cause."""


EARLY = "still_falling"


@dataclass
class Outcome:
    """What was said about one run."""

    name: str
    kind: str
    """buggy, fixed, followed or control."""
    seed: int
    error: float
    level: str = "healthy"
    finding: str = ""
    cause: str = ""
    fix: str = ""
    change: Mapping[str, Any] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    """Title and first cause of every finding that counts."""
    lines: int = 0
    text: str = ""
    as_note: bool = False
    """Whether it was found as a note: that a run stopped early, which only its owner can call a mistake."""
    applied: bool = False
    """Whether the case has a knob for the change that was to be applied."""


def is_right(outcome: Outcome, *, any_of: bool = False) -> bool:
    """Returns whether the first cause is one of those accepted, or any of those printed."""
    said = [outcome.cause, *outcome.causes] if any_of else [outcome.cause]
    patterns = [CAUSES[label] for label in CASES[outcome.name].labels]
    return any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns for text in said if text)


def watched(train: Callable[[], float | None]) -> tuple[float, list[Report], list[Any]]:
    """Trains under the hooks of `gradvitals run`; returns what it returns, and the report on every run it made."""
    folder = tempfile.mkdtemp(prefix="real_bugs")
    watcher = Watcher(Settings(run=Path(folder) / "run", program="case.py", quiet=True))
    hooks = Hooks(watcher)
    hooks.install()
    try:
        with redirect_stderr(io.StringIO()):
            result = train()
    finally:
        hooks.remove()
        watcher.close(None)
    runs = [open_run(path) for path in watcher.runs]
    return float(result or 0.0), [Report(run) for run in runs], runs


def outcome_of(item: tuple[str, str, int, Mapping[str, Any]]) -> Outcome:
    """Trains one version of a case, or a control, and judges what `doctor` says about it."""
    name, kind, seed, change = item
    torch.manual_seed(1000 * seed + 17)
    knobs = Knobs(change)
    if kind == "control":
        error, reports, runs = watched(CONTROLS[name])
    elif kind == "followed":  # only its error counts
        error = CASES[name].train(True, knobs)
        return Outcome(name, kind, seed, error, applied=bool(knobs.used))
    else:
        error, reports, runs = watched(lambda: CASES[name].train(kind == "buggy", knobs))
    found = Outcome(name, kind, seed, error)
    order = ("healthy", "attention", "unhealthy")
    labels = CASES[name].labels if kind == "buggy" else ()
    for report in reports:
        verdict, said = report.verdict, report.to_json()
        console = Console(file=io.StringIO(), width=100)
        console.print(render_doctor(report))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        found.lines, found.text = max(found.lines, len(text.rstrip().splitlines())), found.text + text
        counted = [one for one in said["findings"] if one["weight"] != "info"]
        found.causes += [f"{one['title']}. {one['causes'][0]}" for one in counted if one["causes"]]
        if order.index(verdict.level) > order.index(found.level):
            fix = verdict.fix
            title = verdict.worst.finding.title if verdict.worst else ""
            found.level, found.cause, found.fix = verdict.level, f"{title}. {verdict.cause}", str(fix or "")
            found.change = dict(getattr(fix, "change", None) or {})
            found.finding = verdict.worst.finding.id if verdict.worst else ""
        note = next((one.finding for one in verdict.ranked if one.finding.id == EARLY and one.is_open), None)
        if verdict.level == found.level == "healthy" and note is not None and "too_early" in labels:
            found.as_note, found.finding = True, EARLY
            found.cause, found.fix = f"{note.title}. {note.causes[0]}", str(note.fixes[0])
            found.change = dict(getattr(note.fixes[0], "change", {}))
            found.causes.append(found.cause)
    for run in runs:
        run.close()
    gc.collect()
    return found


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Returns an outcome as plain values."""
    return asdict(outcome)
