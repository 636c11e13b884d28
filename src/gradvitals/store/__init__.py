"""The run store: one SQLite file a run, written off the training thread, read without torch."""

from gradvitals.store.catalog import UnknownNameError
from gradvitals.store.continuing import next_step, run_id, run_meta
from gradvitals.store.downsample import min_max_buckets
from gradvitals.store.reader import Run, open_run
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
    "run_id",
    "run_meta",
]
