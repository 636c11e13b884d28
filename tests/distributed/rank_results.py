"""What the ranks have left of every job, for all tests of this folder: each job is run once."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from rank_launch import LIMIT, answers
from rank_scenarios import JOBS as TRAININGS
from rank_scenarios import SCENARIOS
from rank_troubles import TROUBLES
from rank_truth import Truth, merged
from warm_process import WarmProcess

JOBS = {world: [*TRAININGS[world], *TROUBLES[world]] for world in (2, 4)}
"""What the processes of each world do, in this order."""
LAUNCH = Path(__file__).with_name("rank_launch.py")


class Results:
    """What the ranks have left of every job, and the truth beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of = cache(self._of)
        self.truth = cache(self._truth)
        self._ranks: WarmProcess | None = None

    def _of(self, job: str) -> list[dict[str, Any]]:
        """What each rank has left of a job that none of them failed in; other jobs may still be running."""
        self._start()
        world = next(world for world, jobs in JOBS.items() if job in jobs)
        found = answers(self.folder / f"world{world}", world, JOBS[world].index(job))
        for rank, answer in enumerate(found):
            assert "error" not in answer, f"rank {rank} of '{job}':\n{answer['error']}"
        return found

    def _truth(self, name: str) -> Truth:
        return Truth(SCENARIOS[name], merged(self.of(name)))

    def _start(self) -> None:
        """The first to ask has all jobs run, for other test workers too."""
        try:
            (self.folder / "started").touch(exist_ok=False)
        except FileExistsError:
            return
        (self.folder / "jobs.json").write_text(json.dumps(JOBS), "utf-8")
        self._ranks = WarmProcess(LAUNCH, self.folder, log=self.folder / "log")

    def close(self, *, stop: bool) -> None:
        """Wait for the ranks, or end them where nobody else needs what they do."""
        if self._ranks is not None:
            if stop:
                (self.folder / "stop").touch()
            self._ranks.wait(LIMIT + 30)
