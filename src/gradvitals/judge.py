"""The diagnosis of a run while it goes on: what it is told about the run, and what it says aloud."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradvitals.config import Config
from gradvitals.diagnose import Diagnosis, RunInfo
from gradvitals.types import SEVERITIES, Finding, Layout, Reading, Severity


class Judge:
    """Shows the readings of a live run to the rules and tells findings when they open, get worse and close."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        config: Config,
        world_size: int,
        on_error: Callable[[str, Exception], None],
        breath: Callable[[], None] | None = None,
    ) -> None:
        self._quiet = config.quiet
        self._told: dict[tuple[Any, ...], Severity] = {}  # of what is open
        self.failed = False
        """Whether it has met an error of its own, and looks no more."""
        self.judged = -1
        """The last step it has judged."""
        self.opened: deque[tuple[int, Finding]] = deque(maxlen=100)
        """The last findings that opened or got worse, each with the step that showed it, for a Guard to take."""
        info = replace(facts_of(optimizers), world_size=world_size)
        self.diagnosis = Diagnosis(info=info, settings=config.rules, on_error=on_error)

    @property
    def findings(self) -> list[Finding]:
        """Everything found so far."""
        return self.diagnosis.findings

    def read(self, readings: Sequence[Reading], layout: Layout) -> list[Finding]:
        """Judge one step; returns the findings that are new or have changed."""
        self.diagnosis.describe(layout)
        changed = self.diagnosis.read(readings)
        for finding in changed:
            self._tell(finding, readings[0].step)
        self.judged = readings[0].step
        return changed

    def _tell(self, finding: Finding, step: int) -> None:
        episode = _episode(finding)
        told = self._told.get(episode)
        if finding.last_step is not None:
            if self._told.pop(episode, None) is not None:
                say(f"over since step {finding.last_step + 1}: {finding.title} ({finding.id})", self._quiet)
        elif finding.severity != "info" and (told is None or _worse(finding.severity, told)):
            self._told[episode] = finding.severity
            self.opened.append((step, finding))
            cure = f"; fix: {finding.fixes[0]}" if finding.fixes else ""
            say(f"{finding}{cure}", self._quiet)

    def start_over(self) -> list[Finding]:
        """The run was rolled back: judge it anew. Called on the thread that judges."""
        self.opened.clear()
        closed = self.diagnosis.start_over()
        self._told.clear()
        return closed

    def finish(self) -> list[Finding]:
        """The run is over: what was not seen any more at its end closes."""
        return self.diagnosis.finish()

    def note_autocast(self, dtype: str) -> None:
        """The forward pass was seen to run in lower precision."""
        if self.diagnosis.info.autocast != dtype:
            self.diagnosis.info = replace(self.diagnosis.info, autocast=dtype)

    def state_dict(self) -> dict[str, Any]:
        """What the rules remember."""
        opened = [[step, finding.to_json()] for step, finding in list(self.opened)]
        return {**self.diagnosis.state_dict(), "judged": self.judged, "opened": opened}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what the rules remembered."""
        self.diagnosis.load_state_dict(state)
        self.judged = int(state.get("judged", -1))
        self.opened.clear()
        self.opened.extend((step, Finding.from_json(finding)) for step, finding in state.get("opened", ()))
        known = [finding for finding in self.findings if finding.last_step is None and finding.severity != "info"]
        self._told = {_episode(finding): finding.severity for finding in known}


def _episode(finding: Finding) -> tuple[Any, ...]:
    return finding.id, finding.first_step, finding.found_step


def facts_of(optimizers: Sequence[torch.optim.Optimizer]) -> RunInfo:
    """What the first optimizer tells about a run."""
    group = optimizers[0].param_groups[0]
    betas: Any = group.get("betas") or ()
    plain = len(betas) >= 2 and all(isinstance(beta, float) for beta in betas)
    return RunInfo(
        optimizer=type(optimizers[0]).__name__,
        betas=(betas[0], betas[1]) if plain else None,
        momentum=_number(group.get("momentum")),
        weight_decay=_number(group.get("weight_decay")),
        eps=_number(group.get("eps")),
    )


def say(line: str, quiet: bool) -> None:
    """Tell the user, unless they asked for silence."""
    if not quiet:
        print(f"gradvitals: {line}", file=sys.stderr)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _worse(severity: Severity, than: Severity) -> bool:
    return SEVERITIES.index(severity) > SEVERITIES.index(than)
