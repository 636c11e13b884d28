"""Alerts: messages about new findings, limited in number, sent without delaying training."""

from __future__ import annotations

import os
import shlex

from gradvitals.alerts.alert import Alert, Message
from gradvitals.alerts.ways import Command, Webhook
from gradvitals.errors import ConfigError

__all__ = ["Alert", "Command", "Message", "Webhook", "as_alert", "from_text"]

WAYS = "https://..., slack:https://..., discord:https://..., command:PROGRAM ARGUMENTS, or env:NAME"


def from_text(text: str) -> Alert:
    """The alert that a text names.

    ``env:NAME`` takes the text from the environment, so that a secret URL is on no command line.

    Raises:
        ConfigError: If there is no such alert. The text itself is not repeated: it may hold a secret.

    Example:
        >>> from_text("https://hooks.slack.com/services/T0/B0/secret")
        <Webhook slack to hooks.slack.com>
    """
    kind, _, rest = text.strip().partition(":")
    if kind == "env":
        found = os.environ.get(rest)
        if not found or found.startswith("env:"):
            raise ConfigError(f"the environment variable {rest!r} does not hold an alert; expected {WAYS}")
        return from_text(found)
    if kind in ("http", "https"):
        return Webhook(text.strip())
    if kind == "slack":
        return Webhook(rest, kind="slack")
    if kind == "discord":
        return Webhook(rest, kind="discord")
    if kind == "command" and rest.strip():
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise ConfigError(f"the words of that command cannot be told apart ({error})") from None
        return Command(words)
    raise ConfigError(f"that is not an alert; expected {WAYS}")


def as_alert(given: object) -> Alert:
    """An alert as it is, or the one that a text names."""
    if isinstance(given, str):
        return from_text(given)
    if not isinstance(given, Alert):
        what = given if isinstance(given, type) else type(given)
        raise TypeError(f"a {what.__name__} is not an alert; expected a gradvitals.alerts.Alert, or {WAYS}")
    return given
