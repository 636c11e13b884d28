"""Experiments behind the claims in `docs/results`. Run one with `python -m experiments.NAME`."""
