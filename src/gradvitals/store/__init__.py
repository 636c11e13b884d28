"""The run store: one SQLite file per run, written by the worker, read without torch."""

from gradvitals.store.catalog import UnknownNameError
from gradvitals.store.reader import Run, min_max_buckets, next_step, open_run, run_meta
from gradvitals.store.schema import SCHEMA_VERSION
from gradvitals.store.writer import RunWriter, free_run_path

__all__ = [
    "SCHEMA_VERSION",
    "Run",
    "RunWriter",
    "UnknownNameError",
    "free_run_path",
    "min_max_buckets",
    "next_step",
    "open_run",
    "run_meta",
]
