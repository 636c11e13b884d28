"""Ways to deliver a finding: a webhook of Slack, Discord or anything that takes JSON, and a program of the user's."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from gradvitals.alerts.alert import Alert, AlertError, Message
from gradvitals.errors import ConfigError, expect

Kind = Literal["auto", "slack", "discord", "json"]

LONGEST_WAIT = 30.0
"""Seconds that a server may ask to be left alone before a retry."""
SUPPRESS_EMBEDS = 4
"""Discord's flag for a message without previews of links."""


class Webhook(Alert):
    """Posts every message to a URL. The URL is a secret: it is never kept with the run and never printed.

    Args:
        url: Where to post, http or https.
        kind: The form of the message: Slack's (which Mattermost takes too), Discord's, or plain JSON; "auto" goes by
            the URL's host.
        timeout: Seconds to wait for an answer.
        retries: How often to try again where the server does not answer or says that it is at fault.
        backoff: Seconds before the first retry; each further one waits four times as long.
        limits: `severity`, `every`, `per_hour` and `send_resolved` of `Alert`.
    """

    in_worker = True

    def __init__(
        self,
        url: str,
        kind: Kind = "auto",
        *,
        timeout: float = 10.0,
        retries: int = 2,
        backoff: float = 1.0,
        **limits: Any,
    ) -> None:
        super().__init__(**limits)
        host, place = _host_and_place(url)
        expect(kind in ("auto", "slack", "discord", "json"), "kind", kind, "'auto', 'slack', 'discord' or 'json'")
        expect(timeout > 0, "timeout", timeout, "a number of seconds above 0")
        expect(retries >= 0, "retries", retries, "0 or more")
        expect(backoff >= 0, "backoff", backoff, "a number of seconds, 0 or more")
        known = {"slack.com": "slack", "discord.com": "discord", "discordapp.com": "discord"}
        guessed = (name for domain, name in known.items() if f".{host}".endswith(f".{domain}"))
        self.kind = next(guessed, "json") if kind == "auto" else kind
        self.name = f"Webhook({place})"
        self._place = place
        self._url = url
        self._timeout = timeout
        self._retries = retries
        self._backoff = backoff

    def __repr__(self) -> str:
        return f"<Webhook {self.kind} to {self._place}>"

    def send(self, message: Message) -> None:
        """Post it; try again if that may help."""
        body = json.dumps(PAYLOADS[self.kind](message), allow_nan=False, default=str).encode()
        delay = self._backoff
        for left in range(self._retries, -1, -1):
            problem, wait = self._post(body)
            if problem is None:
                return
            if wait is None or left == 0:
                raise AlertError(f"{self._place} {problem}")
            time.sleep(max(delay, min(wait, LONGEST_WAIT)))
            delay *= 4

    def _post(self, body: bytes) -> tuple[str | None, float | None]:
        """Returns what went wrong, if anything, and how long to wait before a retry; None if a retry is of no use."""
        headers = {"Content-Type": "application/json", "User-Agent": "gradvitals"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        # Errors of urllib may hold the URL, so only their kind is reported.
        try:
            with _OPENER.open(request, timeout=self._timeout):
                return None, None
        except HTTPError as error:
            error.close()
            again = error.code in (408, 429) or error.code >= 500
            return f"answered with status {error.code}", _seconds(error.headers.get("Retry-After")) if again else None
        except TimeoutError:
            return f"did not answer within {self._timeout:g} s", 0.0
        except URLError as error:
            timed_out = isinstance(error.reason, TimeoutError)
            problem = f"did not answer within {self._timeout:g} s" if timed_out else "could not be reached"
            return f"{problem} ({type(error.reason).__name__})", 0.0
        except (OSError, HTTPException) as error:
            return f"broke the connection ({type(error).__name__})", 0.0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A message is for the URL that was given, and for no other."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Do not follow."""
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def for_slack(message: Message) -> dict[str, Any]:
    """A message that Slack shows as it is: no mention, no formatting, no preview of a link."""
    text = message.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": _without_mentions(text), "mrkdwn": False, "unfurl_links": False, "unfurl_media": False}


def for_discord(message: Message) -> dict[str, Any]:
    """A message that Discord shows as it is."""
    text = _without_mentions(re.sub(r"([\\*_~`|>\[\]#<])", r"\\\1", message.text))
    return {"content": text[:2000], "allowed_mentions": {"parse": []}, "flags": SUPPRESS_EMBEDS}


def for_json(message: Message) -> dict[str, Any]:
    """Everything there is to say."""
    return message.to_json()


PAYLOADS = {"slack": for_slack, "discord": for_discord, "json": for_json}


def _without_mentions(text: str) -> str:
    """The text with nothing that calls people: a space of no width after every @."""
    return text.replace("@", "@\u200b")


def _host_and_place(url: str) -> tuple[str, str]:
    """Returns the host, and what of the URL is no secret: the host, with the port if the URL has one."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and re.fullmatch(r"[!-~]+", url) is not None
        port = parts.port
    except (ValueError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ConfigError("that is not a URL to post to; expected one such as https://hooks.slack.com/services/...")
    host = str(parts.hostname)
    shown = f"[{host}]" if ":" in host else host
    return host, shown if port is None else f"{shown}:{port}"


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0.0))
    except ValueError:
        return 0.0


# -- commands --------------------------------------------------------------------------------------------------------


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
