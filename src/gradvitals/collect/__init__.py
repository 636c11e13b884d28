"""Readings from a live run: when gradients are read, and what is read of them."""
