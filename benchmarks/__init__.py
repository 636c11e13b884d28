"""Benchmarks of gradvitals: what it costs, finds and recovers from. Run one with `python -m benchmarks.NAME`."""
