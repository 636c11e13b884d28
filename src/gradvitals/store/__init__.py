"""The run store: one SQLite file a run, written off the training thread, read without torch."""

from gradvitals.store.background import THREAD_NAME, BackgroundWriter, call_weakly
from gradvitals.store.catalog import UnknownNameError
from gradvitals.store.continuing import next_step, run_id, run_meta
from gradvitals.store.downsample import min_max_buckets
from gradvitals.store.reader import Run, open_run
from gradvitals.store.schema import SCHEMA_VERSION
from gradvitals.store.writer import RunWriter, free_run_path

__all__ = [
    "SCHEMA_VERSION",
    "THREAD_NAME",
    "BackgroundWriter",
    "Run",
    "RunWriter",
    "UnknownNameError",
    "call_weakly",
    "free_run_path",
    "min_max_buckets",
    "next_step",
    "open_run",
    "run_id",
    "run_meta",
]
