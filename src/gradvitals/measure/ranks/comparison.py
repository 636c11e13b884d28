"""What an audit's fingerprints become once all ranks have sent theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import distributed as dist

from gradvitals.measure.landed import StepSums
from gradvitals.measure.ranks.audit import SAMPLES
from gradvitals.measure.ranks.prints import digest, fold, grad_print, row_salt, split
from gradvitals.measure.ranks.roster import Roster
from gradvitals.measure.ranks.verdict import Memory, Seen, Suspect, audit_numbers, tensor_mismatch
from gradvitals.measure.sums import Floats

Prints = NDArray[np.uint64]

MAX_WITNESSES = 6
"""Ranks whose checksums are compared tensor by tensor, once they are known to differ."""


class Comparison:
    """Packs this rank's fingerprints into slots of its own, and judges those of all ranks."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.memory = Memory()
        names = [info.name for info in roster.layout.tensors]
        self._salts = np.array([row_salt(name) for name in names], dtype=np.uint64)
        self._own_kinds = roster.kinds[roster.rows]
        self.num_kinds = len(roster.replica_sets)

    def pack(self, step: StepSums) -> Floats:
        """This rank's numbers, in its slots; those of all others are 0."""
        roster, prints = self.roster, step.prints
        of_rank = np.zeros((roster.world, 2 + 2 * SAMPLES + 4 * self.num_kinds))
        mine = of_rank[roster.rank]
        mine[0:2] = _halves(prints, "rng", 1)[:, 0]
        mine[2 : 2 + 2 * SAMPLES] = _halves(prints, "sample", SAMPLES).reshape(-1)
        for place, what in ((0, "check"), (2, "state")):
            digests = self._digests(step, what)
            for kind in range(self.num_kinds):
                chosen = self._own_kinds == kind
                salts = self._salts[roster.rows][chosen]
                low, high = split(np.array([fold(digests[chosen], salts)]))
                mine[2 + 2 * SAMPLES + 4 * kind + place :][:2] = low[0], high[0]
        of_worker = np.zeros((roster.num_data, 4))
        parts = step.rows.get("parts")
        if parts is not None and parts.present.any():
            squares = np.where(parts.present, parts.values * roster.part_weights, 0.0)
            low, high = split(np.array([grad_print(np.where(parts.present, parts.values, 0.0))]))
            of_worker[roster.data_index[roster.rank]] = squares.sum(), 1.0, low[0], high[0]
        return np.concatenate([of_rank.reshape(-1), of_worker.reshape(-1)])

    def _digests(self, step: StepSums, what: str) -> Prints:
        """One a row of this rank; 0 where there is none."""
        low, high = (step.prints.get(f"{what}_{half}") for half in ("lo", "hi"))
        if low is None or high is None:
            return np.zeros(len(self.roster.rows), dtype=np.uint64)
        # What some ranks step for others is not the same everywhere until it has been sent to them.
        return np.where(self.roster.is_shared_out[self.roster.rows], np.uint64(0), digest(low, high))

    def unpack(self, vector: Floats, own: StepSums, step: StepSums, reduce: Callable[..., Floats]) -> None:
        """Put into a step what the fingerprints of all ranks say. Where copies differ, a second round finds where."""
        roster = self.roster
        width = 2 + 2 * SAMPLES + 4 * self.num_kinds
        of_rank = vector[: roster.world * width].reshape(roster.world, width)
        of_worker = vector[roster.world * width :].reshape(roster.num_data, 4)
        samples = of_rank[:, 2 : 2 + 2 * SAMPLES].reshape(roster.world, 2, SAMPLES)
        checks = of_rank[:, 2 + 2 * SAMPLES :].reshape(roster.world, self.num_kinds, 2, 2)
        # Gradients of single pipeline stages are of different tensors.
        comparable = roster.num_sources == roster.num_data
        with np.errstate(invalid="ignore"):
            norms = np.where((of_worker[:, 1] > 0) & comparable, np.sqrt(of_worker[:, 0]), np.nan)
        seen = Seen(
            norms=norms,
            data_index=roster.data_index,
            rng_prints=digest(of_rank[:, 0], of_rank[:, 1]),
            sample_prints=digest(samples[:, 0], samples[:, 1]),
            grad_prints=np.where(comparable, digest(of_worker[:, 2], of_worker[:, 3]), 0).astype(np.uint64),
            param_digest=digest(checks[:, :, 0, 0], checks[:, :, 0, 1]).T,
            state_digest=digest(checks[:, :, 1, 0], checks[:, :, 1, 1]).T,
            replica_set=roster.replica_sets,
        )
        verdict = audit_numbers(seen, self.memory)
        step.told |= verdict.values
        step.ranks |= verdict.ranks
        if verdict.suspects:
            mismatch = self._where(verdict.suspects, own, reduce)
            step.told["ranks/checksum_mismatch"] = float((mismatch > 0).sum())
            step.told_tensors["ranks/checksum_mismatch"] = mismatch

    def _where(self, suspects: tuple[Suspect, ...], own: StepSums, reduce: Callable[..., Floats]) -> Floats:
        """Fetch the checksums of single tensors from ranks that differ, and from some that do not."""
        roster = self.roster
        mismatch = np.zeros(len(roster.kinds))
        for suspect in suspects:
            rows = np.flatnonzero(roster.kinds == suspect.place)
            agreeing = [rank for rank in suspect.ranks if rank not in suspect.odd]
            witnesses = sorted([*suspect.odd[: MAX_WITNESSES - 2], *agreeing[:2]])
            sent = np.zeros((len(witnesses), 4, len(rows)))
            if roster.rank in witnesses:
                chosen = self._own_kinds == suspect.place
                for place, what in ((0, "check"), (2, "state")):
                    low, high = split(self._digests(own, what)[chosen])
                    sent[witnesses.index(roster.rank), place : place + 2] = low, high
            got = reduce(sent.reshape(-1), dist.ReduceOp.SUM, "checksums of tensors", [own]).reshape(sent.shape)
            sets = np.full((len(rows), len(witnesses)), suspect.replica_set)
            differing = tensor_mismatch(digest(got[:, 0], got[:, 1]).T, digest(got[:, 2], got[:, 3]).T, sets)
            mismatch[rows] = np.maximum(mismatch[rows], differing)
        return mismatch


def _halves(prints: dict[str, Floats], name: str, count: int) -> Floats:
    """Both halves of some fingerprints, zeros where there are fewer."""
    halves = np.zeros((2, count))
    for place, half in enumerate(("lo", "hi")):
        found: Any = prints.get(f"{name}_{half}", ())
        halves[place, : len(found)] = found
    return halves
