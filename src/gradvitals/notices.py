"""Findings about the monitoring itself: a missing source, an internal error, a full disk."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from gradvitals.errors import ClippedTwiceError, NoStepError, ObserveError, RunError
from gradvitals.format import number
from gradvitals.types import Finding, Fix

ABOUT_MONITORING = (
    "source_unavailable",
    "readings_thinned",
    "monitor_error",
    "observe_ignored",
    "store_error",
    "guard_error",
    "snapshot_error",
    "sink_error",
)
"""Ids of findings about gradvitals, which say nothing about the training."""

NOT_AFFECTED = "A bug in gradvitals, or a model it does not support; training is not affected"


def source_unavailable(source: str, reason: str, step: int) -> Finding:
    """A GSNR source that this run cannot have."""
    return Finding(
        id="source_unavailable",
        severity="info",
        title=f"GSNR from {source} is not available: {reason}",
        first_step=step,
        last_step=step,
        evidence={"about": source},
    )


def is_said(notices: Sequence[Finding]) -> bool:
    """Whether the last notice is printed while training runs: all but notes."""
    return notices[-1].severity != "info"


def readings_thinned(step: int, *, spent: float, budget: float, every: int, norm_every: int) -> Finding:
    """Monitoring cost more than its budget, so that less is read from here on.

    Args:
        step: The present step.
        spent: Share of the time that it took.
        budget: What was allowed.
        every: Steps from one per-tensor reading to the next.
        norm_every: Steps from one norm that the loop does not compute itself to the next.
    """
    title = f"gradvitals reads tensors every {every} steps, to stay within {100 * budget:.2g}% of the step time"
    if norm_every > 1:
        title += f", and the gradient norm every {norm_every} steps, because the loop does not clip"
    return Finding(
        id="readings_thinned",
        severity="info",
        title=title,
        first_step=step,
        last_step=step,
        evidence={"overhead": spent, "budget": budget, "every": every, "norm_every": norm_every},
        causes=("Monitoring took a larger share of the step than Config.overhead_budget allows",),
        fixes=(
            (
                "Raise overhead_budget (1 removes the limit), choose fewer metrics, or clip gradients, which makes the "
                "norm free"
            ),
        ),
    )


def monitor_error(part: str, error: BaseException, step: int) -> Finding:
    """An internal error; the part it concerns stops."""
    if isinstance(error, ObserveError):
        return observe_ignored(error, step)
    if isinstance(error, NoStepError):
        return no_steps(error, step)
    if isinstance(error, ClippedTwiceError):
        return clipped_twice(error, step)
    trace = "".join(traceback.format_exception(error))
    return Finding(
        id="monitor_error",
        severity="warning",
        title=f"gradvitals stopped reading '{part}' after an internal error: {error!r}",
        first_step=step,
        evidence={"about": part, "error": repr(error), "traceback": trace[-4000:]},
        causes=(NOT_AFFECTED,),
        fixes=("Please report it with the traceback from `gradvitals report --json`",),
    )


def clipped_twice(error: ClippedTwiceError, step: int) -> Finding:
    """The loop and the optimizer both clip gradients."""
    return Finding(
        id="clipped_twice",
        severity="info",
        title=f"{error}",
        first_step=step,
        evidence={"seen": {"loop": error.loop, "optimizer": error.optimizer}},
        causes=("The loop calls clip_grad_norm_, and the optimizer has max_norm set",),
        fixes=(
            f"Remove one of them: the lower one, {min(error.loop, error.optimizer):g}, applies now; "
            "`gradvitals advise` reports which one suits the run",
        ),
    )


def optimizer_remade(kind: str, step: int) -> Finding:
    """The script makes a new optimizer for the same weights at every step.

    Args:
        kind: The class of the optimizer.
        step: The present step.
    """
    return Finding(
        id="optimizer_remade",
        severity="critical",
        title=f"The script creates a new {kind} for the same weights at nearly every step",
        first_step=0,
        found_step=step,
        causes=(f"The training loop calls {kind}(...): momentum and moments start from zero at every step",),
        fixes=(Fix("Create the optimizer once, before the training loop"),),
    )


def optimizers_overlap(kind: str, other: str, shared: int, step: int) -> Finding:
    """Two optimizers step the same weights in turn, and one of them holds all that the other has.

    Args:
        kind: The class of the one that holds more.
        other: The class of the other one.
        shared: Tensors that both hold.
        step: The present step.
    """
    return Finding(
        id="optimizers_overlap",
        severity="critical",
        title=f"Two optimizers step the same weights in turn: {shared} tensors are in both",
        first_step=0,
        found_step=step,
        evidence={"seen": {"shared": shared}, "expected": {"shared": 0}},
        causes=(
            f"One optimizer ({kind}) also holds the parameters of a model that another one ({other}) trains, as if a "
            "discriminator's optimizer held the generator: each undoes the other's steps",
        ),
        fixes=(
            Fix("Give each optimizer the parameters of its own model only", {}, "Adam(discriminator.parameters())"),
        ),
    )


def evaluated_in_training_mode(times: int, step: int) -> Finding:
    """The script evaluates the model without switching it to evaluation mode.

    Args:
        times: Evaluations.
        step: The present step.
    """
    evaluations = "one evaluation" if times == 1 else f"{times:,} evaluations"
    return Finding(
        id="evaluated_in_training_mode",
        severity="warning",
        title=f"The model is evaluated in training mode: model.eval() was not called in {evaluations}",
        first_step=0,
        found_step=step,
        evidence={"seen": {"evaluations": times}},
        causes=(
            "Under torch.no_grad(), the model still drops activations or normalizes by the statistics of the batch, so "
            "that validation looks worse than it is and depends on chance",
        ),
        fixes=(Fix("Call model.eval() before each evaluation, and model.train() after it", {}, "model.eval()"),),
    )


def plateau_mode(mode: str, first: float, last: float, step: int) -> Finding:
    """ReduceLROnPlateau lowers the learning rate because its metric improves.

    Args:
        mode: Its mode.
        first: The first metric.
        last: The last one.
        step: The present step.
    """
    right, moves = ("min", "falls") if mode == "max" else ("max", "rises")
    return Finding(
        id="plateau_mode",
        severity="warning",
        title=f"ReduceLROnPlateau lowers the learning rate although its metric {moves}: its mode is {mode!r}",
        first_step=0,
        found_step=step,
        evidence={"seen": {"first_metric": first, "last_metric": last}},
        causes=(
            f"With mode={mode!r} the scheduler takes every {'fall' if mode == 'max' else 'rise'} for a plateau; the "
            f"metric went from {number(first)} to {number(last)}",
        ),
        fixes=(
            Fix(
                f"Create it with mode={right!r}: 'min' for a loss, 'max' for an accuracy",
                {"scheduler_mode": right},
                f"scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode={right!r})",
            ),
        ),
    )


def no_steps(error: NoStepError, step: int) -> Finding:
    """The loop continues and the optimizer does not step."""
    return Finding(
        id="no_steps",
        severity="critical",
        title=f"{error}",
        first_step=step,
        evidence={"seen": {"batches": error.batches}, "expected": {"batches": 0}},
        causes=(
            "The loop skips batches that are NaN or infinite, and now all of them are: the weights are NaN or Inf",
        ),
        fixes=("Stop, and restore a checkpoint from before the first skipped batch; gv.Guard can do that",),
    )


def observe_ignored(error: ObserveError, step: int) -> Finding:
    """The loop passed something else than a loss, or a number of samples."""
    return Finding(
        id="observe_ignored",
        severity="warning",
        title=f"{error}",
        first_step=step,
        last_step=step,
        evidence={"about": "observe"},
        causes=("monitor.observe received something other than the loss of the batch; gradvitals ignored the call",),
        fixes=("Call monitor.observe(loss), or monitor.observe(loss, batch_size=len(inputs)); later calls count",),
    )


def rule_error(rule: str, error: BaseException, step: int) -> Finding:
    """A rule raised an error and is removed."""
    trace = "".join(traceback.format_exception(error))
    return Finding(
        id="monitor_error",
        severity="warning",
        title=f"The rule '{rule}' was turned off after an error: {error!r}",
        first_step=step,
        evidence={"about": rule, "error": repr(error), "traceback": trace[-4000:]},
        causes=("A bug in the rule, which may be yours or part of gradvitals; training is not affected",),
        fixes=("Run `gradvitals report --json` for the traceback; unless the rule is yours, please report it",),
    )


def training_stopped(error: BaseException, step: int, rank: int | None = None) -> Finding:
    """The training loop ended early, on this rank if there are several."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return Finding(
            id="training_stopped",
            severity="info",
            title="Training was stopped manually",
            first_step=step,
            last_step=step,
            evidence={"error": repr(error)[:4000]},
            rank=rank,
        )
    causes, fixes = _about_error(error)
    return Finding(
        id="training_stopped",
        severity="critical",
        title=f"Training stopped with {_first_line(error)}",
        first_step=step,
        last_step=step,
        evidence={"error": repr(error)[:4000], "reason": _first_line(error)},
        causes=causes,
        fixes=(*fixes, "Restart from the last checkpoint with watch(..., resume=True), which continues the record"),
        rank=rank,
    )


def _about_error(error: BaseException) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns why training may have stopped with an error, and what to do."""
    if "out of memory" in str(error).lower():
        return (
            ("The step needs more memory than there is, for batch, activations, gradients and optimizer state",),
            ("Use a smaller batch and accumulate gradients over more batches, or use activation checkpointing",),
        )
    if "CUDA error" in str(error):
        return (
            ("A CUDA kernel failed, often an earlier one; usually a label or token index is out of range",),
            ("Run with CUDA_LAUNCH_BLOCKING=1, so that the traceback names the call that failed",),
        )
    return (
        ("The training script, or code it calls, raised an exception",),
        ("Read the traceback in the script's output, and the findings from before the error",),
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def store_error(error: BaseException, path: Path, step: int) -> Finding:
    """The run cannot be written at present."""
    if not isinstance(error, (OSError, RunError)):
        return monitor_error("store", error, step)
    return Finding(
        id="store_error",
        severity="warning",
        title=f"gradvitals cannot write readings ({error}); training continues",
        first_step=step,
        evidence={"error": repr(error), "path": str(path)},
        causes=("The disk is full, the folder is not writable, or the file is damaged",),
        fixes=("Free space or pass another folder as run=...; gradvitals keeps trying",),
    )


def sink_error(name: str, error: BaseException, step: int) -> Finding:
    """A sink or an alert failed; a sink gets nothing more."""
    trace = without_secrets("".join(traceback.format_exception(error)))
    reason = without_secrets(_first_line(error))
    return Finding(
        id="sink_error",
        severity="warning",
        title=f"{name} failed: {reason}; training and the run's own record continue",
        first_step=step,
        last_step=step,
        evidence={"about": name, "error": without_secrets(repr(error))[:2000], "traceback": trace[-4000:]},
        causes=("The network or the service is down, a disk is full, or settings are wrong",),
        fixes=(
            "A failed sink stays off for this run; later alerts are still sent",
            "The run's own folder has everything",
        ),
    )


def without_secrets(text: str) -> str:
    """Returns the text without the names, passwords, keys and tokens that an address may hold.

    >>> without_secrets("no answer from https://bob:s3cret@host/api?token=abc, tried 3 times")
    'no answer from https://…@host/api?…, tried 3 times'
    """
    return re.sub(r"://[^/\s@'\"]+@", "://…@", re.sub(r"(://[^\s?'\"]*)\?[^\s,'\")]+", r"\1?…", text))


def sink_behind(name: str, dropped: int, step: int) -> Finding:
    """A sink was too slow for the run."""
    return Finding(
        id="sink_error",
        severity="info",
        title=f"{name} was too slow: {dropped:,} readings were not sent to it",
        first_step=step,
        last_step=step,
        evidence={"about": f"{name} behind", "dropped": dropped},
        causes=("The sink takes longer per step than training does",),
        fixes=("The run's own folder has everything",),
    )


def guard_error(error: BaseException, step: int) -> Finding:
    """An error in the Guard, which has stopped."""
    trace = "".join(traceback.format_exception(error))
    return Finding(
        id="guard_error",
        severity="warning",
        title=f"The Guard has stopped: {type(error).__name__}: {error}",
        first_step=step,
        last_step=step,
        evidence={"traceback": trace},
        causes=("An error inside gradvitals; training continues without a Guard",),
        fixes=("Please report it with the traceback",),
    )


def snapshot_error(problem: str, step: int) -> Finding:
    """A snapshot could not be written."""
    return Finding(
        id="snapshot_error",
        severity="warning",
        title=f"A snapshot could not be written: {problem}",
        first_step=step,
        last_step=step,
        causes=("The folder is missing, full or not writable",),
        fixes=("Free space; the Guard keeps trying",),
    )


def guard_gave_up(skipped: int, step: int) -> Finding:
    """The Guard cannot save the run."""
    return Finding(
        id="guard_error",
        severity="critical",
        title=f"The Guard gave up: {skipped} steps in a row were NaN or infinite, and no snapshot helps",
        first_step=step - skipped + 1,
        last_step=step,
        causes=("The weights were broken before the first step, or every batch makes the loss NaN",),
        fixes=("Stop the run, and look at the data and the loss of its first step",),
    )


def guard_absent(step: int) -> Finding:
    """An optimizer computes the loss in a closure."""
    return Finding(
        id="guard_error",
        severity="warning",
        title="The Guard does not see the steps of this optimizer, which use a closure",
        first_step=step,
        last_step=step,
        causes=("Gradients are computed inside optimizer.step(closure)",),
        fixes=("Call backward before optimizer.step(), without a closure",),
    )


def budget_not_obeyed(step: int) -> Finding:
    """Ranks must share one read schedule."""
    return Finding(
        id="source_unavailable",
        severity="info",
        title="overhead_budget has no effect with several ranks: all must read the same steps",
        first_step=step,
        last_step=step,
        evidence={"about": "overhead_budget"},
        fixes=("Set tensor_every",),
    )


def ranks_lost(error: BaseException, missing: Sequence[int], step: int) -> Finding:
    """Other ranks no longer answer."""
    who = f"Rank {', '.join(map(str, missing))} no longer answers" if missing else "Ranks can no longer be compared"
    return Finding(
        id="ranks_lost",
        severity="critical",
        title=who,
        first_step=step,
        evidence={"missing": list(missing), "error": repr(error)[:2000]},
        causes=("A process died or hangs", "The network between hosts is down", "Ranks take different steps"),
        fixes=("Look at the output of the missing rank",),
        rank=missing[0] if len(missing) == 1 else None,
    )


def rank_lr_differs(rank: int, lr: float, expected: float, step: int) -> Finding:
    """A rank trains at a different learning rate than the others."""
    return Finding(
        id="rank_lr_differs",
        severity="critical",
        title=f"Rank {rank} has the learning rate {number(lr)}, the others {number(expected)}",
        first_step=step,
        evidence={"rank": rank, "lr": lr, "expected": expected},
        causes=(
            "The rank builds its optimizer or schedule from different settings, or restored a different checkpoint",
        ),
        fixes=(f"Set the learning rate of rank {rank} to {number(expected)}, and build schedules alike on every rank",),
        rank=rank,
    )


def error_on_rank(rank: int, step: int) -> Finding:
    """An internal error on another rank."""
    return Finding(
        id="monitor_error",
        severity="warning",
        title=f"gradvitals had an internal error on rank {rank}; from now on its share may be missing from the numbers",
        first_step=step,
        evidence={"about": f"rank {rank}"},
        causes=(NOT_AFFECTED,),
        fixes=(f"Look for 'gradvitals:' in the stderr of rank {rank}, and please report it",),
        rank=rank,
    )
