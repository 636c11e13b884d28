"""Alerts: who is told a finding when it opens, at a pace a person can bear, and never while training waits."""

from gradvitals.alerts.alert import Alert
from gradvitals.alerts.command import Command
from gradvitals.alerts.message import Message
from gradvitals.alerts.texts import as_alert, from_text
from gradvitals.alerts.webhook import Webhook

__all__ = ["Alert", "Command", "Message", "Webhook", "as_alert", "from_text"]
