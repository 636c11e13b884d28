"""What gradvitals has to say about itself, as findings: a source it lacks, an error of its own, a full disk."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from gradvitals.errors import ClippedTwiceError, NoStepError, ObserveError, RunError
from gradvitals.types import Finding


def source_unavailable(source: str, reason: str, step: int) -> Finding:
    """A source of GSNR that this run cannot have."""
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
        step: When.
        spent: Share of the time that it took.
        budget: What was allowed.
        every: Steps from one per-tensor reading to the next.
        norm_every: Steps from one norm that the loop does not compute itself to the next.
    """
    title = f"Per-tensor readings come every {every} steps to stay within {100 * budget:.2g}% of the step's time"
    if norm_every > 1:
        title += f"; the gradient norm is read every {norm_every} steps, since the loop does not clip"
    return Finding(
        id="readings_thinned",
        severity="info",
        title=title,
        first_step=step,
        last_step=step,
        evidence={"overhead": spent, "budget": budget, "every": every, "norm_every": norm_every},
        causes=("monitoring took a larger share of the step than Config.overhead_budget allows",),
        cures=(
            "raise overhead_budget (1 turns it off), choose fewer metrics, or clip gradients: the norm is free then",
        ),
    )


def monitor_error(part: str, error: BaseException, step: int) -> Finding:
    """An error of ours; what it concerns stays silent from here on."""
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
        title=f"gradvitals stopped reading '{part}' after an error of its own: {error!r}",
        first_step=step,
        evidence={"about": part, "error": repr(error), "traceback": trace[-4000:]},
        causes=("a bug in gradvitals or a model it does not know; training is not affected",),
        cures=("please report it with the traceback that `gradvitals report --json` shows",),
    )


def clipped_twice(error: ClippedTwiceError, step: int) -> Finding:
    """The loop and the optimizer both clip."""
    return Finding(
        id="clipped_twice",
        severity="info",
        title=f"{error}",
        first_step=step,
        evidence={"seen": {"loop": error.loop, "optimizer": error.optimizer}},
        causes=("clip_grad_norm_ is called in the loop, and the optimizer was made with max_norm",),
        cures=(
            f"leave one of them out: the lower, {min(error.loop, error.optimizer):g}, is what rules now; which one "
            "suits the run, gradvitals advise says",
        ),
    )


def no_steps(error: NoStepError, step: int) -> Finding:
    """The loop goes on and the optimizer does not step."""
    return Finding(
        id="no_steps",
        severity="critical",
        title=f"{error}",
        first_step=step,
        evidence={"seen": {"batches": error.batches}, "expected": {"batches": 0}},
        causes=("the loop skips what is not finite, and everything is: the weights have become NaN or Inf",),
        cures=("stop, and go on from a checkpoint before the first batch that was given up; gv.Guard can do that",),
    )


def observe_ignored(error: ObserveError, step: int) -> Finding:
    """The loop has told what is no loss, or no number of samples."""
    return Finding(
        id="observe_ignored",
        severity="warning",
        title=f"{error}",
        first_step=step,
        last_step=step,
        evidence={"about": "observe"},
        causes=("monitor.observe was called with something else than the loss of the batch; that call is left aside",),
        cures=("call monitor.observe(loss), or monitor.observe(loss, batch_size=len(inputs)): later calls are heard",),
    )


def rule_error(rule: str, error: BaseException, step: int) -> Finding:
    """A rule failed and is left out from here on."""
    trace = "".join(traceback.format_exception(error))
    return Finding(
        id="monitor_error",
        severity="warning",
        title=f"the rule '{rule}' is left out after an error: {error!r}",
        first_step=step,
        evidence={"about": rule, "error": repr(error), "traceback": trace[-4000:]},
        causes=("a bug in the rule, your own or one of gradvitals; training is not affected",),
        cures=("`gradvitals report --json` shows the traceback; if the rule is not yours, please report it",),
    )


def training_stopped(error: BaseException, step: int, rank: int | None = None) -> Finding:
    """The training loop did not come to its end, on this rank where there are several."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return Finding(
            id="training_stopped",
            severity="info",
            title="training was stopped by hand",
            first_step=step,
            last_step=step,
            evidence={"error": repr(error)[:4000]},
            rank=rank,
        )
    causes, cures = _about_error(error)
    return Finding(
        id="training_stopped",
        severity="critical",
        title=f"training stopped with {_first_line(error)}",
        first_step=step,
        last_step=step,
        evidence={"error": repr(error)[:4000]},
        causes=causes,
        cures=(*cures, "start it again from its last checkpoint with watch(..., resume=True): the record goes on"),
        rank=rank,
    )


def _about_error(error: BaseException) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Why training may have stopped with an error, and what to do."""
    if "out of memory" in str(error).lower():
        return (
            ("the memory did not hold what the step needed: batch, activations, gradients, optimizer state",),
            ("make the batch smaller and accumulate gradients over more of them, or recompute activations",),
        )
    if "CUDA error" in str(error):
        return (
            ("a kernel failed, often one started earlier; an index out of range in labels or tokens is usual",),
            ("run it with CUDA_LAUNCH_BLOCKING=1: the traceback then names the call that failed",),
        )
    return (
        ("an exception of the training script, or of what it calls",),
        ("read the traceback in its output, and what was found before it stopped",),
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def store_error(error: BaseException, path: Path, step: int) -> Finding:
    """The run cannot be kept, for now."""
    if not isinstance(error, (OSError, RunError)):
        return monitor_error("store", error, step)
    return Finding(
        id="store_error",
        severity="warning",
        title=f"gradvitals cannot keep readings ({error}); training goes on",
        first_step=step,
        evidence={"error": repr(error), "path": str(path)},
        causes=("the disk is full, the folder cannot be written, or the file was damaged",),
        cures=("free space or pass another folder as run=...; writing is tried again meanwhile",),
    )


def sink_error(name: str, error: BaseException, step: int) -> Finding:
    """A sink or an alert failed; a sink is left out from here on."""
    trace = without_secrets("".join(traceback.format_exception(error)))
    reason = without_secrets(_first_line(error))
    return Finding(
        id="sink_error",
        severity="warning",
        title=f"{name} has failed: {reason}; training and the run's own record go on",
        first_step=step,
        last_step=step,
        evidence={"about": name, "error": without_secrets(repr(error))[:2000], "traceback": trace[-4000:]},
        causes=("the network or the service is down, a disk is full, or settings are wrong",),
        cures=("a sink gets nothing more in this run; later alerts are still tried", "the run's folder has everything"),
    )


def without_secrets(text: str) -> str:
    """The text without what an address may hold of names, passwords, keys and tokens.

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
        causes=("it takes longer for a step than training does",),
        cures=("the run's folder has everything",),
    )


def guard_error(error: BaseException, step: int) -> Finding:
    """An error of the Guard's; it has stopped guarding."""
    trace = "".join(traceback.format_exception(error))
    return Finding(
        id="guard_error",
        severity="warning",
        title=f"the Guard has stopped: {type(error).__name__}: {error}",
        first_step=step,
        last_step=step,
        evidence={"traceback": trace},
        causes=("an error inside gradvitals; training goes on without a Guard",),
        cures=("report it with the traceback",),
    )


def snapshot_error(problem: str, step: int) -> Finding:
    """A snapshot could not be written."""
    return Finding(
        id="snapshot_error",
        severity="warning",
        title=f"a snapshot could not be kept: {problem}",
        first_step=step,
        last_step=step,
        causes=("the folder is gone or full, or cannot be written",),
        cures=("make room; later snapshots go on being tried",),
    )


def guard_blind(seconds: float, step: int) -> Finding:
    """Findings do not reach the Guard any more."""
    return Finding(
        id="guard_error",
        severity="warning",
        title=f"the Guard goes on without findings: the diagnosis was over {seconds:g} s behind",
        first_step=step,
        last_step=step,
        causes=("the writer's thread has stopped, or the disk is very slow",),
        cures=("look for a store_error; norms and losses are still guarded",),
    )


def guard_absent(step: int) -> Finding:
    """An optimizer evaluates the loss itself."""
    return Finding(
        id="guard_error",
        severity="warning",
        title="the Guard does not see this optimizer's steps: they are made with a closure",
        first_step=step,
        last_step=step,
        causes=("gradients are computed inside optimizer.step(closure)",),
        cures=("call backward before optimizer.step(), without a closure",),
    )


def budget_not_obeyed(step: int) -> Finding:
    """Ranks cannot agree on a cadence of their own."""
    return Finding(
        id="source_unavailable",
        severity="info",
        title="overhead_budget is not obeyed with several ranks: all must read the same steps",
        first_step=step,
        last_step=step,
        evidence={"about": "overhead_budget"},
        cures=("set tensor_every",),
    )


def ranks_lost(error: BaseException, missing: Sequence[int], step: int) -> Finding:
    """Other ranks do not answer any more."""
    who = f"rank {', '.join(map(str, missing))} does not answer" if missing else "ranks cannot be compared"
    return Finding(
        id="ranks_lost",
        severity="critical",
        title=f"{who} any more",
        first_step=step,
        evidence={"missing": list(missing), "error": repr(error)[:2000]},
        causes=("a process died or hangs", "the network between hosts is down", "ranks make different steps"),
        cures=("look at the output of the missing rank",),
        rank=missing[0] if len(missing) == 1 else None,
    )


def error_on_rank(rank: int, step: int) -> Finding:
    """Gradvitals met an error on another rank."""
    return Finding(
        id="monitor_error",
        severity="warning",
        title=f"gradvitals has met an error of its own on rank {rank}; numbers may lack its part from here on",
        first_step=step,
        evidence={"about": f"rank {rank}"},
        causes=("a bug in gradvitals or a model it does not know; training is not affected",),
        cures=(f"look for 'gradvitals:' in what rank {rank} has written to stderr, and please report it",),
        rank=rank,
    )
