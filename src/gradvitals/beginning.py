"""How a run begins: where it is kept, from which step on, and with which other ranks."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from gradvitals.config import Config
from gradvitals.judge import Judge
from gradvitals.measure.ranks.holdings import Card, data_dimensions, data_ranks, fingerprint, settings_of, take_stock
from gradvitals.measure.ranks.roster import Meeting, Roster, call_meeting, meet, own_version
from gradvitals.measure.rows import Rows
from gradvitals.store import free_run_path, next_step, run_meta
from gradvitals.types import json_ready


@dataclass(frozen=True)
class Beginning:
    """The same on all ranks, but for `leads`."""

    path: Path
    resume: bool
    first_step: int
    roster: Roster | None
    leads: bool
    """Whether this rank keeps the run, judges it and speaks."""
    asked: Path
    """The path that was asked for."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return 1 if self.roster is None else self.roster.world


def begin(
    rows: Rows, config: Config, *, run: str | Path | None, resume: bool, group: Any, batch_size: float | None
) -> Beginning:
    """Find out where a run goes on or begins; with several ranks, together with them."""
    path = Path(run or Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    if not _has_others(group):
        resume = resume or _is_restarted(path)
        return Beginning(path, resume, next_step(path) if resume else 0, None, True, path)
    meeting = call_meeting(group, config.rank_timeout)
    roster = join(meeting, rows, config, group, batch_size)
    # The first rank keeps the run: where that is, and how far it is, only its disk may know.
    if meeting.rank == 0:
        resume = resume or _is_restarted(path)
        kept_at = path if resume else free_run_path(path)
        meeting.tell("run", json.dumps([str(kept_at), resume, next_step(path) if resume else 0]))
    meeting.wait(["run"], "tell where the run is kept")
    where, goes_on, first_step = json.loads(meeting.told(["run"])[0])
    return Beginning(Path(where), goes_on, first_step, roster, meeting.rank == 0, path)


def describe(config: Config, start: Beginning, judge: Judge | None, autocast: str | None) -> dict[str, Any]:
    """What is kept about a run that begins."""
    meta: dict[str, Any] = {"config": json_ready(asdict(config)), "extra": json_ready(dict(config.extra))}
    meta["torch"] = torch.__version__
    if start.roster is not None:
        meta["ranks"] = start.roster.world
    if (job := elastic_id()) is not None:
        meta["elastic_id"] = job
    if judge is not None:
        if autocast is not None:
            judge.note_autocast(autocast)
        meta["facts"] = judge.diagnosis.info.to_json()
    return meta


def join(meeting: Meeting, rows: Rows, config: Config, group: Any, batch_size: float | None) -> Roster:
    """Meet the other ranks with what this one holds, and give its rows their weights."""
    dims = data_dimensions(rows.model)
    stock, shards, empty = take_stock(rows.layout, rows.slots, list(rows.windows), rows.parameters, dims)
    stepped = {id(p) for optimizer in rows.optimizers for g in optimizer.param_groups for p in g["params"]}
    card = Card(
        version=own_version(),
        settings=settings_of(config, batch_size is not None),
        stock=fingerprint(stock.to_json()),
        shards=shards,
        empty=empty,
        data_ranks=tuple(sorted(data_ranks(rows.parameters, dims))),
        idle=tuple(row for row, parameter in enumerate(rows.parameters) if id(parameter) not in stepped),
        stage=config.pipeline_stage,
    )
    roster = meet(meeting, card, stock, group)
    rows.weights = roster.weights.tolist()
    rows.change_weights = np.where(roster.is_current, roster.weights, 0.0).tolist()
    return roster


def _has_others(group: Any) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size(group) > 1


def _is_restarted(path: Path) -> bool:
    """Whether torchrun has started this process again, for the run that is there."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return False
    return run_meta(path).get("elastic_id") == elastic_id()


def elastic_id() -> str | None:
    """What torchrun calls this job; the same after a restart."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    return "/".join([run, os.environ.get("MASTER_ADDR", ""), os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")])
