"""Many training runs: several processes at once, and finished runs as lines of a file that an interruption spares."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

import torch

from gradvitals.errors import GradvitalsError
from gradvitals.types import json_ready

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_all(job: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Iterator[tuple[int, Result]]:
    """Yields the place and the result of each item, as they finish. One worker runs them in this process.

    Each worker has one torch thread: small models gain nothing from more, and sums over threads differ between runs.
    """
    if workers <= 1 or len(items) <= 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from ((place, job(item)) for place, item in enumerate(items))
        finally:
            torch.set_num_threads(threads)
        return
    # Spawned, not forked: a fork of a process in which torch has threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        places: dict[Future[Result], int] = {pool.submit(job, item): place for place, item in enumerate(items)}
        try:
            for future in as_completed(places):
                yield places[future], future.result()
        except BrokenProcessPool:
            raise GradvitalsError("a worker process was killed, perhaps for want of memory; try --workers 1") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def read_lines(path: Path, parse: Callable[[dict[str, Any]], Result], command: str) -> list[Result]:
    """Returns the records of a file, none if it does not exist. A last line that was cut short is skipped.

    Args:
        path: One JSON object per line.
        parse: Makes a record of an object.
        command: What writes such files, for the error.

    Raises:
        GradvitalsError: if another line cannot be read.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    found = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break was cut
        try:
            found.append(parse(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise GradvitalsError(
                f"{path}, line {number}, is no finished run ({error}); expected what `{command}` writes with --out: "
                "delete that line, or name another file"
            ) from None
    return found


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record. The rest of a line that was cut short is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        end = file.seek(0, 2)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
                file.seek(0, 2)
        file.write(json.dumps(json_ready(record), allow_nan=False).encode() + b"\n")
