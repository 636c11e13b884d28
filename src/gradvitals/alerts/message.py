"""Message: one finding in words that are safe to send anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradvitals.types import Finding

LONGEST = 1800
"""Characters of a message's text; Discord takes 2,000."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What an alert has to say."""

    finding: Finding
    run: str
    """Name of the run's folder."""
    over: bool = False
    """Whether the finding was sent before and is over now."""
    held_back: int = 0
    """Messages that were not sent since the last one, because there were too many."""

    @property
    def title(self) -> str:
        """One line: the run, how bad, and what."""
        state = "resolved" if self.over else self.finding.severity
        return plain(f"{self.run}: [{state}] {self.finding.title}")[:300]

    @property
    def text(self) -> str:
        """A few lines: the title, where, since when, and what to do."""
        finding = self.finding
        lines = [self.title]
        if self.over:
            lines.append(f"steps {finding.first_step} to {finding.last_step} ({finding.id})")
        else:
            names = ", ".join(finding.tensors[:3]) + (" and more" if len(finding.tensors) > 3 else "")
            where = f" in {names}" if names else ""
            rank = f" on rank {finding.rank}" if finding.rank is not None else ""
            lines.append(f"since step {finding.first_step}{where}{rank} ({finding.id})")
            lines += [f"fix: {fix}" for fix in finding.fixes[:1]]
        if self.held_back:
            lines.append(f"{self.held_back} more were not sent, because there were too many")
        return "\n".join(plain(line) for line in lines)[:LONGEST]

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON values, but errors and tracebacks: they may quote anything, and are in the run."""
        finding = self.finding.to_json()
        private = ("error", "traceback")
        finding["evidence"] = {key: value for key, value in finding["evidence"].items() if key not in private}
        about = {"run": self.run, "severity": self.finding.severity, "over": self.over, "held_back": self.held_back}
        return {"text": self.text, "title": self.title, **about, "finding": finding}


def plain(text: str) -> str:
    r"""The text without line breaks, control characters and the invisible: one line that says what it shows.

    >>> plain("a\nb\x1b[31m")
    'a\\nb\\x1b[31m'
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
