"""From readings to findings: what is wrong, where, since when, the likely cause, the fix. No torch."""

from gradvitals.diagnose import rules
from gradvitals.diagnose.engine import Diagnosis
from gradvitals.diagnose.message import Message, Observation
from gradvitals.diagnose.rule import FAMILIES, RULES, Rule, build_rules, check_settings, register
from gradvitals.diagnose.step import RunInfo, Step

__all__ = [
    "FAMILIES",
    "RULES",
    "Diagnosis",
    "Message",
    "Observation",
    "Rule",
    "RunInfo",
    "Step",
    "build_rules",
    "check_settings",
    "register",
    "rules",
]
