"""What the ranks have left of every job, for all tests of this folder: each job is run once."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

from rank_launch import answers, run_jobs
from rank_scenarios import JOBS as TRAININGS
from rank_scenarios import SCENARIOS
from rank_troubles import TROUBLES
from rank_truth import Truth, merged

JOBS = {world: [*TRAININGS[world], *TROUBLES[world]] for world in (2, 4)}
"""What the processes of each world do, in this order."""


class Results:
    """What the ranks have left of every job, and the truth beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of = cache(self._of)
        self.truth = cache(self._truth)

    def _of(self, job: str) -> list[dict[str, Any]]:
        """What each rank has left of a job that none of them failed in."""
        world = next(world for world, jobs in JOBS.items() if job in jobs)
        found = answers(self._world(world), world, JOBS[world].index(job))
        for rank, answer in enumerate(found):
            assert "error" not in answer, f"rank {rank} of '{job}':\n{answer['error']}"
        return found

    def _truth(self, name: str) -> Truth:
        return Truth(SCENARIOS[name], merged(self.of(name)))

    def _world(self, world: int) -> Path:
        """The folder of all jobs of one world; the first to ask has them run, for other test workers too."""
        folder = self.folder / f"world{world}"
        ended = folder / "ended"
        try:
            folder.mkdir()
        except FileExistsError:
            while not ended.exists():
                time.sleep(0.05)
            return folder
        try:
            run_jobs(folder, world, JOBS[world])
        finally:
            ended.touch()
        return folder
