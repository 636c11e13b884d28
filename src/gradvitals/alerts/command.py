"""Command: findings handed to a program of the user's, such as one that sends mail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from gradvitals.alerts.alert import Alert, AlertError, Message
from gradvitals.errors import ConfigError, expect


class Command(Alert):
    """Runs a program for every message: the message as JSON on its standard input, and in environment variables.

    The variables are ``GRADVITALS_TITLE``, ``GRADVITALS_TEXT``, ``GRADVITALS_ID``, ``GRADVITALS_SEVERITY``,
    ``GRADVITALS_RUN``, ``GRADVITALS_STEP`` and ``GRADVITALS_RESOLVED`` (1 or 0). No shell reads the command: its words
    are the program and its arguments.

    Args:
        command: The program and its arguments.
        timeout: Seconds after which it is ended, with what it has started.
        limits: `severity`, `every`, `per_hour` and `send_resolved` of `Alert`.

    Example:
        >>> Command(["sh", "-c", 'printf "%s" "$GRADVITALS_TEXT" | mail -s "$GRADVITALS_TITLE" me@example.org'])
        <Command sh>
    """

    in_worker = True

    def __init__(self, command: Sequence[str], *, timeout: float = 30.0, **limits: Any) -> None:
        super().__init__(**limits)
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise ConfigError("a command is a list of words: expected one such as ['notify', '--loud']")
        expect(timeout > 0, "timeout", timeout, "a number of seconds above 0")
        if shutil.which(command[0]) is None:
            raise ConfigError(f"there is no program {command[0]!r} here; expected one that can be run")
        self._command = list(command)
        self._timeout = timeout
        self.name = f"Command({command[0]})"

    def __repr__(self) -> str:
        return f"<Command {self._command[0]}>"

    def send(self, message: Message) -> None:
        """Run it and wait for its end."""
        finding = message.finding
        variables = {
            "TITLE": message.title,
            "TEXT": message.text,
            "ID": finding.id,
            "SEVERITY": finding.severity,
            "RUN": message.run,
            "STEP": finding.first_step,
            "RESOLVED": int(message.resolved),
        }
        content = json.dumps(message.to_json(), allow_nan=False, default=str).encode()
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **{f"GRADVITALS_{name}": str(value) for name, value in variables.items()}},
            start_new_session=True,
        )
        try:
            process.communicate(content, timeout=self._timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            raise AlertError(f"{self._command[0]} had not ended after {self._timeout:g} s, and was ended") from None
        if process.returncode != 0:
            raise AlertError(f"{self._command[0]} ended with status {process.returncode}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and what it has started: both are in a session of their own."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.communicate()
