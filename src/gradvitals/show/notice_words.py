"""What is said about findings that no rule makes: how a run ended, and what gradvitals says about itself."""

from __future__ import annotations

from gradvitals.diagnose import Message
from gradvitals.types import Severity


def _words(name: str, pattern: str, causes: tuple[str, ...], cures: tuple[str, ...]) -> Message:
    return Message(
        name=name,
        pattern=pattern,
        title="",
        causes={str(at): text for at, text in enumerate(causes)},
        fixes={str(at): text for at, text in enumerate(cures)},
    )


NOTICE_WORDS: dict[str, tuple[Message, tuple[Severity, ...]]] = {
    "training_stopped": (
        _words(
            "Training stopped",
            "The training loop ended with an exception, or was stopped by hand. It is kept by the end of a `with` "
            "block, or when the program exits.",
            ("the error in its title; by hand is Ctrl-C or sys.exit",),
            ("look at what else was found shortly before: a NaN, a spike, a rank that was lost",),
        ),
        ("info", "critical"),
    ),
    "run_cut_off": (
        _words(
            "Run cut off",
            "The run was not closed, and its process has not been heard of for some seconds. Found when a run is "
            "looked at, since a process that is killed cannot say so.",
            (
                "the process was killed: out of memory, a scheduler's time limit, kill -9, or the machine went down",
                "the files were copied while it was running, or the disk is full and it cannot write any more",
            ),
            (
                "look at the end of its output, and in the log of the system or the scheduler for who killed it",
                "start it again from its last checkpoint with watch(..., resume=True): the record goes on",
            ),
        ),
        ("warning",),
    ),
    "ranks_lost": (
        _words(
            "Ranks lost",
            "Other ranks do not answer any more, so that what they saw is missing from here on.",
            ("a process died or hangs", "the network between hosts is down", "ranks make different steps"),
            ("look at the output of the missing rank", "under torchrun, let it start all ranks again"),
        ),
        ("critical",),
    ),
    "source_unavailable": (
        _words(
            "Source not available",
            "A source of GSNR, or another thing that was asked for, cannot be had in this run.",
            (
                "no micro-batches, one process, or an optimizer that keeps no averages of the kind Adam keeps",
                "overhead_budget with several ranks: all must read the same steps",
            ),
            ("nothing, where another source is there; else see docs/measuring.md for what each of them needs",),
        ),
        ("info",),
    ),
    "readings_thinned": (
        _words(
            "Readings thinned",
            "Monitoring took a larger share of the step than Config.overhead_budget allows, 3 % by default on a CPU, "
            "so that single tensors are read more rarely, or not every step is read.",
            ("the model has many small tensors, or its steps are very short",),
            ("raise overhead_budget, or choose fewer metrics; 1 is no limit",),
        ),
        ("info",),
    ),
    "monitor_error": (
        _words(
            "Error of gradvitals",
            "A part of gradvitals, or a rule, ended in an error and is left out from here on. Training goes on.",
            ("a bug in gradvitals or in a rule of your own", "a model or an optimizer it does not know"),
            ("`gradvitals report --json` shows the traceback; if the rule is not yours, please report it",),
        ),
        ("warning",),
    ),
    "observe_ignored": (
        _words(
            "Observed what is no loss",
            "Monitor.observe was given something else than a tensor or a number. That call is left aside, training "
            "goes on, and later calls are heard.",
            ("a text, a list or the whole output of a model was passed instead of its loss",),
            ("call monitor.observe(loss), or monitor.observe(loss, batch_size=len(inputs))",),
        ),
        ("warning",),
    ),
    "no_steps": (
        _words(
            "No steps",
            "The loop goes on and gives up every batch, so that the optimizer makes no steps any more.",
            ("the loop skips what is not finite, and everything is: the weights have become NaN or Inf",),
            ("stop, and go on from a checkpoint before the first batch that was given up; gv.Guard can do that",),
        ),
        ("critical",),
    ),
    "clipped_twice": (
        _words(
            "Clipped twice",
            "The loop clips gradients, and the optimizer, made with max_norm, clips them again. The lower limit rules.",
            ("clip_grad_norm_ is called in the loop, and the optimizer was made with max_norm",),
            (
                "leave one of them out: of two limits, the higher changes nothing; which one suits the run, "
                "`gradvitals advise` says",
            ),
        ),
        ("info",),
    ),
    "store_error": (
        _words(
            "Run cannot be kept",
            "Readings could not be written. Training goes on, and writing is tried again meanwhile.",
            ("the disk is full, the folder cannot be written, or the file was damaged",),
            ("free space, or pass another folder as run=...",),
        ),
        ("warning",),
    ),
    "sink_error": (
        _words(
            "Sink or alert failed",
            "A sink (TensorBoard, W&B and the like) or an alert failed, or was too slow for the run. Training goes on, "
            "and the run's own folder has everything.",
            (
                "the network or the service is down, a disk is full, or settings are wrong",
                "it takes longer than a step",
            ),
            ("look at the error in its title; a sink gets nothing more in this run, later alerts are still tried",),
        ),
        ("info", "warning"),
    ),
    "guard_error": (
        _words(
            "Guard stopped",
            "The Guard has stopped, goes on without findings, or does not see the steps of an optimizer.",
            (
                "an error inside gradvitals",
                "the diagnosis was far behind: the disk is very slow, or its thread has stopped",
                "gradients are computed inside optimizer.step(closure)",
            ),
            ("look for a store_error beside it", "call backward before optimizer.step(), without a closure"),
        ),
        ("warning",),
    ),
    "snapshot_error": (
        _words(
            "Snapshot not kept",
            "A snapshot of the Guard could not be written; later ones go on being tried.",
            ("the folder is gone or full, or cannot be written",),
            ("make room, or give the Guard another folder",),
        ),
        ("warning",),
    ),
}
"""By id, with the severities it can have."""
