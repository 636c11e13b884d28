"""Checks of a training run in a test, or in CI."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradvitals.report.verdict import Verdict
from gradvitals.store.reader import Run, open_run
from gradvitals.types import SEVERITIES, Severity

if TYPE_CHECKING:
    from gradvitals.monitor import Monitor


def assert_healthy(
    run: Run | Monitor | Verdict | str | os.PathLike[str],
    *,
    fail_on: Severity = "warning",
    min_steps: int = 1,
    ignore: tuple[str, ...] = (),
) -> Verdict:
    """Fail if a training run is not healthy, with the cause and the fix in the message.

    A folder stands for the run that this process was asked to keep there, even if a run that was there already sent it
    to another one; its Monitor need not be closed.

    Args:
        run: A run, its folder, a Monitor or a Verdict.
        fail_on: How serious a finding has to be now: ``"info"``, ``"warning"`` or ``"critical"``.
        min_steps: Fail too if fewer steps were recorded: a run that never trained has no findings.
        ignore: Ids of findings that do not count.

    Returns:
        The verdict.

    Raises:
        AssertionError: If it is not healthy.

    Example:
        >>> def test_training_is_healthy(tmp_path):
        ...     train(steps=200, run=tmp_path / "run")
        ...     gv.testing.assert_healthy(tmp_path / "run")
    """
    __tracebackhide__ = True  # pytest then shows the line of the test, and the message
    if fail_on not in SEVERITIES:
        raise ValueError(f"fail_on is {fail_on!r}; expected one of {', '.join(SEVERITIES)}")
    name, verdict = _verdict(run)
    serious = SEVERITIES.index(fail_on)
    found = [
        item for item in verdict.ranked if item.finding.id not in ignore and SEVERITIES.index(item.weight) >= serious
    ]
    if verdict.steps < min_steps:
        raise AssertionError(f"{name} has {verdict.steps} steps; expected {min_steps} or more")
    if found:
        listed = "\n".join(f"  {item.finding}" for item in found[1:6])
        more = f"\nAlso found:\n{listed}" if listed else ""
        raise AssertionError(f"{name} is not healthy.\n{verdict}{more}\nSee: gradvitals doctor {name}")
    return verdict


def _verdict(run: Any) -> tuple[str, Verdict]:
    if isinstance(run, Verdict):
        return "the run", run
    with ExitStack() as stack:
        if isinstance(run, (str, os.PathLike)):
            recording = sys.modules.get("gradvitals.monitor")  # loads torch, and only a test that trains has it
            run = stack.enter_context(open_run(recording.settled_run(Path(run)) if recording else run))
        return str(run.path if isinstance(run, Run) else run.run_path), run.verdict
