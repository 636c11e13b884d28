"""Lets accidents happen to small real training runs and counts who recovers."""
