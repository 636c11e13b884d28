"""Experiments as commands: small, real training runs to look at and to measure with."""
