"""Findings that no rule makes: how a run ended, and what gradvitals reports about itself."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradvitals.errors import ClippedTwiceError, NoStepError, ObserveError, RunError
from gradvitals.format import number
from gradvitals.types import Finding, Fix, Severity


@dataclass(frozen=True)
class Notice:
    """One kind of finding that no rule makes."""

    name: str
    severities: tuple[Severity, ...]
    """The first is the usual one."""
    pattern: str
    """When it is reported."""
    causes: tuple[str, ...]
    """Likely causes, the commonest first."""
    fixes: tuple[str, ...]
    """Fixes, the first to try first."""
    is_own: bool = True
    """Whether it is about gradvitals, so that it says nothing about the training."""


# fmt: off
NOTICES: dict[str, Notice] = {
    "training_stopped": Notice("Training stopped", ("critical", "info"),
        "The training loop ended with an exception or was stopped manually. Recorded when a `with` block ends or the "
        "program exits.",
        ("The training script, or code it calls, raised an exception",),
        (
            "Read the traceback in the script's output, and the findings from before the error",
            "Restart from the last checkpoint with watch(..., resume=True), which continues the record",
        ), is_own=False),
    "run_cut_off": Notice("Run cut off", ("warning",),
        "The run was not closed, and its process is gone. Found when the run is read, because a killed process "
        "cannot report it.",
        (
            "The process was killed: out of memory, a scheduler's time limit, kill -9, or the machine went down",
            "The files were copied while the run was active, or the disk is full and nothing more can be written",
        ),
        (
            "Check the end of its output and the log of the system or scheduler for what killed it",
            "Restart from the last checkpoint with watch(..., resume=True), which continues the record",
        ), is_own=False),
    "ranks_lost": Notice("Ranks lost", ("critical",),
        "Other ranks stopped responding, so their readings are missing from then on.",
        ("A process died or hangs", "The network between hosts is down", "Ranks take different steps"),
        ("Look at the output of the missing rank", "Under torchrun, let it restart all ranks"), is_own=False),
    "source_unavailable": Notice("Source not available", ("info",),
        "A source of GSNR, or another measurement that was requested, is not available in this run.",
        (
            "No micro-batches, one process, or an optimizer without Adam-like moments",
            "overhead_budget with several ranks: all must read the same steps",
        ),
        (
            "No action needed if another source is available; otherwise see the documentation for what each source "
            "needs",
        )),
    "readings_thinned": Notice("Readings thinned", ("info",),
        "Readings exceeded Config.overhead_budget (0.5% of the training time by default), so gradvitals reads tensors "
        "less often.",
        ("The model has many small tensors, or steps are very short",),
        (
            "Raise overhead_budget (1 removes the limit), choose fewer metrics, or clip gradients, which makes the "
            "norm free",
        )),
    "monitor_error": Notice("Internal error", ("warning",),
        "A part of gradvitals, or a rule, raised an error and is disabled from then on. Training continues.",
        ("A bug in gradvitals or in one of your own rules, or a model it does not support; training is not affected",),
        ("Run `gradvitals report --json` for the traceback; unless the rule is yours, please report it",)),
    "observe_ignored": Notice("Observed value is not a loss", ("warning",),
        "Monitor.observe received something other than a tensor or a number. gradvitals ignores that call; training "
        "continues, and later calls count.",
        ("The loop passed a string, a list or a whole model output instead of the loss of the batch",),
        ("Call monitor.observe(loss), or monitor.observe(loss, batch_size=len(inputs)); later calls count",)),
    "no_steps": Notice("No steps", ("critical",),
        "The loop continues but skips every batch, so the optimizer takes no more steps.",
        ("The loop skips batches that are NaN or infinite, and now all of them are: the weights are NaN or Inf",),
        ("Stop, and restore a checkpoint from before the first skipped batch; gv.Guard can do that",), is_own=False),
    "optimizer_remade": Notice("Optimizer created at every step", ("critical",),
        "The script creates a new optimizer for the same weights at nearly every step. `gradvitals run` then stops "
        "watching them.",
        ("The optimizer is created inside the training loop, so momentum and moments start from zero every time",),
        ("Create the optimizer once, before the training loop",), is_own=False),
    "optimizers_overlap": Notice("Two optimizers, same weights", ("critical",),
        "Two optimizers step the same weights in turn, and one of them holds all that the other has.",
        (
            "An optimizer was built from the parameters of another model too, as if a discriminator's optimizer held "
            "the generator: each undoes the other's steps",
        ),
        ("Give each optimizer the parameters of its own model only",), is_own=False),
    "evaluated_in_training_mode": Notice("Evaluated in training mode", ("warning",),
        "The script calls the model under torch.no_grad() while dropout or batch norm are in training mode, not at "
        "every step, and never calls model.eval(). Found when the run is closed.",
        (
            "Under torch.no_grad(), the model still drops activations or normalizes by the statistics of the batch, so "
            "that validation looks worse than it is and depends on chance",
        ),
        ("Call model.eval() before each evaluation, and model.train() after it",), is_own=False),
    "plateau_mode": Notice("ReduceLROnPlateau in the wrong mode", ("warning",),
        "ReduceLROnPlateau lowered the learning rate twice or more because its metric improved. Found when the run is "
        "closed.",
        ("mode='max' takes every fall of a loss for a plateau, and mode='min' every rise of an accuracy",),
        ("Create it with mode='min' for a loss, and mode='max' for an accuracy",), is_own=False),
    "clipped_twice": Notice("Clipped twice", ("info",),
        "The loop clips gradients, and an optimizer with max_norm clips them again. The lower limit wins.",
        ("The loop calls clip_grad_norm_, and the optimizer has max_norm set",),
        ("Remove one of them: the higher limit changes nothing; `gradvitals advise` suggests a limit",), is_own=False),
    "store_error": Notice("Run cannot be written", ("warning",),
        "gradvitals could not write readings. Training continues, and gradvitals keeps trying.",
        ("The disk is full, the folder is not writable, or the file is damaged",),
        ("Free space or pass another folder as run=...; gradvitals keeps trying",)),
    "sink_error": Notice("Sink or alert failed", ("warning", "info"),
        "A sink (TensorBoard, W&B and the like) or an alert failed, or was too slow for the run. Training continues, "
        "and the run's own folder has everything.",
        (
            "The network or the service is down, a disk is full, or settings are wrong",
            "The sink takes longer per step than training does",
        ),
        (
            "A failed sink stays off for this run; later alerts are still sent",
            "The run's own folder has everything",
        )),
    "rank_lr_differs": Notice("Learning rates differ", ("critical",),
        "A rank uses a different learning rate than the first one.",
        ("The rank builds its optimizer or schedule from different settings, or restored a different checkpoint",),
        ("Build the optimizer and the schedule the same way on every rank",), is_own=False),
    "guard_error": Notice("Guard stopped", ("warning", "critical"),
        "The Guard stopped, gave up on a run, or does not see the steps of an optimizer.",
        (
            "An error inside gradvitals; training continues without a Guard",
            "The weights were broken before the first step, or every batch makes the loss NaN",
            "Gradients are computed inside optimizer.step(closure)",
        ),
        (
            "Please report an error with its traceback",
            "Stop the run, and look at the data and the loss of its first step",
            "Call backward before optimizer.step(), without a closure",
        )),
    "snapshot_error": Notice("Snapshot not saved", ("warning",),
        "The Guard could not write a snapshot; it keeps trying.",
        ("The folder is missing, full or not writable",),
        ("Free space, or give the Guard another folder; it keeps trying",)),
}
# fmt: on
ABOUT_MONITORING = tuple(name for name, notice in NOTICES.items() if notice.is_own)
"""Ids of findings about gradvitals, which say nothing about the training."""


def made(
    name: str,
    title: str,
    step: int,
    *,
    severity: Severity | None = None,
    over: bool = False,
    causes: Sequence[str] = (),
    fixes: Sequence[str] = (),
    **more: Any,
) -> Finding:
    """Returns the finding of a notice: resolved at once if it is `over`, with its own causes and fixes unless given."""
    notice = NOTICES[name]
    return Finding(
        id=name,
        severity=severity or notice.severities[0],
        title=title,
        first_step=step,
        last_step=step if over else None,
        causes=tuple(causes) or notice.causes,
        fixes=tuple(fixes) or notice.fixes,
        **more,
    )


def is_said(notices: Sequence[Finding]) -> bool:
    """Whether the last notice is printed while training runs: all but notes."""
    return notices[-1].severity != "info"


# -- how a run ended, and what the loop does -----------------------------------------------------------------------


def training_stopped(error: BaseException, step: int, rank: int | None = None) -> Finding:
    """The training loop ended early, on this rank if there are several."""
    known: dict[str, Any] = {"over": True, "rank": rank, "evidence": {"error": repr(error)[:4000]}}
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        stopped = made("training_stopped", "Training was stopped manually", step, severity="info", **known)
        return replace(stopped, causes=(), fixes=())
    known["evidence"]["reason"] = _first_line(error)
    if "out of memory" in str(error).lower():
        cause = "The step needs more memory than there is, for batch, activations, gradients and optimizer state"
        fix = "Use a smaller batch and accumulate gradients over more batches, or use activation checkpointing"
    elif "CUDA error" in str(error):
        cause = "A CUDA kernel failed, often an earlier one; usually a label or token index is out of range"
        fix = "Run with CUDA_LAUNCH_BLOCKING=1, so that the traceback names the call that failed"
    else:
        return made("training_stopped", f"Training stopped with {_first_line(error)}", step, **known)
    known |= {"causes": [cause], "fixes": [fix, NOTICES["training_stopped"].fixes[-1]]}
    return made("training_stopped", f"Training stopped with {_first_line(error)}", step, **known)


def ranks_lost(error: BaseException, missing: Sequence[int], step: int) -> Finding:
    """Other ranks no longer answer."""
    who = f"Rank {', '.join(map(str, missing))} no longer answers" if missing else "Ranks can no longer be compared"
    evidence = {"missing": list(missing), "error": repr(error)[:2000]}
    return made("ranks_lost", who, step, evidence=evidence, rank=missing[0] if len(missing) == 1 else None)


def no_steps(error: NoStepError, step: int) -> Finding:
    """The loop continues and the optimizer does not step."""
    return made("no_steps", str(error), step, evidence={"seen": {"batches": error.batches}, "expected": {"batches": 0}})


def optimizer_remade(kind: str, step: int) -> Finding:
    """The script makes a new optimizer of some class for the same weights at every step."""
    title = f"The script creates a new {kind} for the same weights at nearly every step"
    causes = [f"The training loop calls {kind}(...): momentum and moments start from zero at every step"]
    return made("optimizer_remade", title, 0, found_step=step, causes=causes)


def optimizers_overlap(kind: str, other: str, shared: int, step: int) -> Finding:
    """Optimizers of two classes step the same tensors in turn, and the first holds all that the other has."""
    title = f"Two optimizers step the same weights in turn: {shared} tensors are in both"
    cause = (
        f"One optimizer ({kind}) also holds the parameters of a model that another one ({other}) trains, as if a "
        "discriminator's optimizer held the generator: each undoes the other's steps"
    )
    fix = Fix(NOTICES["optimizers_overlap"].fixes[0], {}, "Adam(discriminator.parameters())")
    evidence = {"seen": {"shared": shared}, "expected": {"shared": 0}}
    return made("optimizers_overlap", title, 0, found_step=step, evidence=evidence, causes=[cause], fixes=[fix])


def evaluated_in_training_mode(times: int, step: int) -> Finding:
    """The script evaluates the model without switching it to evaluation mode."""
    evaluations = "one evaluation" if times == 1 else f"{times:,} evaluations"
    title = f"The model is evaluated in training mode: model.eval() was not called in {evaluations}"
    fix = Fix(NOTICES["evaluated_in_training_mode"].fixes[0], {}, "model.eval()")
    evidence = {"seen": {"evaluations": times}}
    return made("evaluated_in_training_mode", title, 0, found_step=step, evidence=evidence, fixes=[fix])


def plateau_mode(mode: str, first: float, last: float, step: int) -> Finding:
    """ReduceLROnPlateau lowers the learning rate because its metric, given first and last, improves."""
    right, moves, taken = ("min", "falls", "fall") if mode == "max" else ("max", "rises", "rise")
    title = f"ReduceLROnPlateau lowers the learning rate although its metric {moves}: its mode is {mode!r}"
    cause = f"With mode={mode!r} the scheduler takes every {taken} for a plateau; the metric went from "
    fix = Fix(
        f"Create it with mode={right!r}: 'min' for a loss, 'max' for an accuracy",
        {"scheduler_mode": right},
        f"scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode={right!r})",
    )
    evidence = {"seen": {"first_metric": first, "last_metric": last}}
    causes = [f"{cause}{number(first)} to {number(last)}"]
    return made("plateau_mode", title, 0, found_step=step, evidence=evidence, causes=causes, fixes=[fix])


def clipped_twice(error: ClippedTwiceError, step: int) -> Finding:
    """The loop and the optimizer both clip gradients."""
    fix = (
        f"Remove one of them: the lower one, {min(error.loop, error.optimizer):g}, applies now; "
        "`gradvitals advise` reports which one suits the run"
    )
    evidence = {"seen": {"loop": error.loop, "optimizer": error.optimizer}}
    return made("clipped_twice", str(error), step, evidence=evidence, fixes=[fix])


def rank_lr_differs(rank: int, lr: float, expected: float, step: int) -> Finding:
    """A rank trains at a different learning rate than the others."""
    title = f"Rank {rank} has the learning rate {number(lr)}, the others {number(expected)}"
    fix = f"Set the learning rate of rank {rank} to {number(expected)}, and build schedules alike on every rank"
    evidence = {"rank": rank, "lr": lr, "expected": expected}
    return made("rank_lr_differs", title, step, evidence=evidence, fixes=[fix], rank=rank)


# -- about gradvitals ------------------------------------------------------------------------------------------------


def source_unavailable(source: str, reason: str, step: int) -> Finding:
    """A GSNR source that this run cannot have."""
    title = f"GSNR from {source} is not available: {reason}"
    unavailable = made("source_unavailable", title, step, over=True, evidence={"about": source})
    return replace(unavailable, causes=(), fixes=())  # the title has both


def budget_not_obeyed(step: int) -> Finding:
    """Ranks must share one read schedule."""
    title = "overhead_budget has no effect with several ranks: all must read the same steps"
    evidence = {"about": "overhead_budget"}
    return made("source_unavailable", title, step, over=True, evidence=evidence, fixes=["Set tensor_every"])


def readings_thinned(step: int, *, spent: float, budget: float, every: int, norm_every: int) -> Finding:
    """Monitoring cost more than its budget, so that less is read from here on.

    Args:
        step: The present step.
        spent: Share of the time that it took.
        budget: What was allowed.
        every: Steps from one per-tensor reading to the next.
        norm_every: Steps from one norm that the loop does not compute itself to the next.
    """
    title = f"gradvitals reads tensors every {every:,} steps, to stay within {100 * budget:.2g}% of the step time"
    if norm_every > 1:
        title += f", and the gradient norm every {norm_every:,} steps, because the loop does not clip"
    evidence = {"overhead": spent, "budget": budget, "every": every, "norm_every": norm_every}
    return made("readings_thinned", title, step, over=True, evidence=evidence)


def monitor_error(part: str, error: BaseException, step: int) -> Finding:
    """An internal error; the part it concerns stops."""
    if isinstance(error, ObserveError):
        return observe_ignored(error, step)
    if isinstance(error, NoStepError):
        return no_steps(error, step)
    if isinstance(error, ClippedTwiceError):
        return clipped_twice(error, step)
    title = f"gradvitals stopped reading '{part}' after an internal error: {error!r}"
    return made("monitor_error", title, step, evidence=_traced(part, error))


def rule_error(rule: str, error: BaseException, step: int) -> Finding:
    """A rule raised an error and is removed."""
    title = f"The rule '{rule}' was turned off after an error: {error!r}"
    return made("monitor_error", title, step, evidence=_traced(rule, error))


def error_on_rank(rank: int, step: int) -> Finding:
    """An internal error on another rank."""
    title = f"gradvitals had an internal error on rank {rank}; from now on its share may be missing from the numbers"
    fix = f"Look for 'gradvitals:' in the stderr of rank {rank}, and please report it"
    return made("monitor_error", title, step, evidence={"about": f"rank {rank}"}, fixes=[fix], rank=rank)


def observe_ignored(error: ObserveError, step: int) -> Finding:
    """The loop passed something else than a loss, or a number of samples."""
    return made("observe_ignored", str(error), step, over=True, evidence={"about": "observe"})


def store_error(error: BaseException, path: Path, step: int) -> Finding:
    """The run cannot be written at present."""
    if not isinstance(error, (OSError, RunError)):
        return monitor_error("store", error, step)
    title = f"gradvitals cannot write readings ({error}); training continues"
    return made("store_error", title, step, evidence={"error": repr(error), "path": str(path)})


def sink_error(name: str, error: BaseException, step: int) -> Finding:
    """A sink or an alert failed; a sink gets nothing more."""
    title = f"{name} failed: {without_secrets(_first_line(error))}; training and the run's own record continue"
    causes = NOTICES["sink_error"].causes[:1]
    return made("sink_error", title, step, over=True, evidence=_traced(name, error), causes=causes)


def sink_behind(name: str, dropped: int, step: int) -> Finding:
    """A sink was too slow for the run."""
    title = f"{name} was too slow: {dropped:,} readings were not sent to it"
    evidence = {"about": f"{name} behind", "dropped": dropped}
    notice = NOTICES["sink_error"]
    texts = {"causes": notice.causes[1:], "fixes": notice.fixes[1:]}
    return made("sink_error", title, step, severity="info", over=True, evidence=evidence, **texts)


def guard_error(error: BaseException, step: int) -> Finding:
    """An error in the Guard, which has stopped."""
    title = f"The Guard has stopped: {type(error).__name__}: {error}"
    return _of_guard(0, title, step, evidence={"traceback": "".join(traceback.format_exception(error))})


def guard_gave_up(skipped: int, step: int) -> Finding:
    """The Guard cannot save the run."""
    title = f"The Guard gave up: {skipped} steps in a row were NaN or infinite, and no snapshot helps"
    return replace(_of_guard(1, title, step, severity="critical"), first_step=step - skipped + 1)


def guard_absent(step: int) -> Finding:
    """An optimizer computes the loss in a closure."""
    return _of_guard(2, "The Guard does not see the steps of this optimizer, which use a closure", step)


def _of_guard(at: int, title: str, step: int, **more: Any) -> Finding:
    """Returns a finding about the Guard, with one cause and fix of its notice."""
    notice = NOTICES["guard_error"]
    return made("guard_error", title, step, over=True, causes=[notice.causes[at]], fixes=[notice.fixes[at]], **more)


def snapshot_error(problem: str, step: int) -> Finding:
    """A snapshot could not be written."""
    return made("snapshot_error", f"A snapshot could not be written: {problem}", step, over=True)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def _traced(about: str, error: BaseException) -> dict[str, str]:
    error_text, trace = without_secrets(repr(error)), without_secrets("".join(traceback.format_exception(error)))
    return {"about": about, "error": error_text[:2000], "traceback": trace[-4000:]}


def without_secrets(text: str) -> str:
    """Returns the text without the names, passwords, keys and tokens that an address may hold.

    >>> without_secrets("no answer from https://bob:s3cret@host/api?token=abc, tried 3 times")
    'no answer from https://…@host/api?…, tried 3 times'
    """
    return re.sub(r"://[^/\s@'\"]+@", "://…@", re.sub(r"(://[^\s?'\"]*)\?[^\s,'\")]+", r"\1?…", text))
