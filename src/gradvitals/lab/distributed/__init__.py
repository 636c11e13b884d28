"""Faults of distributed runs: planted in real processes, and counted over thousands of virtual ones."""
