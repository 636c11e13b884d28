"""From readings to findings: what is wrong, where, since when, why probably, what to do. No torch."""

# Importing a family registers its rules; this is the order in which findings of one step are told.
from gradvitals.diagnose import (
    batch,
    clipping,
    gradients,
    loop,
    loss,
    nonfinite,
    precision,
    ranks,
    scale,
    schedule,
    signal,
    swings,
    updates,
)
from gradvitals.diagnose.engine import Diagnosis
from gradvitals.diagnose.explain import Words
from gradvitals.diagnose.facts import Facts
from gradvitals.diagnose.rule import RULES, Rule, Sign, build_rules, register
from gradvitals.diagnose.step import Step

FAMILIES = (
    loop,
    loss,
    nonfinite,
    gradients,
    swings,
    updates,
    signal,
    batch,
    scale,
    schedule,
    clipping,
    precision,
    ranks,
)

__all__ = ["FAMILIES", "RULES", "Diagnosis", "Facts", "Rule", "Sign", "Step", "Words", "build_rules", "register"]
