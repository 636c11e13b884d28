"""The run store: one SQLite file a run, written off the training thread, read without torch."""

from gradvitals.store.background import THREAD_NAME, BackgroundWriter
from gradvitals.store.catalog import UnknownNameError
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
    "free_run_path",
    "min_max_buckets",
    "open_run",
]
