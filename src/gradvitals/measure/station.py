"""One optimizer's part of a run: what is read of its parameters, and where it is in the current step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from gradvitals.config import Config
from gradvitals.errors import ClippedTwiceError
from gradvitals.measure import stats
from gradvitals.measure.changes import Changes
from gradvitals.measure.clock import Clock
from gradvitals.measure.collecting import Collectors
from gradvitals.measure.factors import FactorSums
from gradvitals.measure.microbatch import add_heads
from gradvitals.measure.moments import MomentSums, unavailable_reason
from gradvitals.measure.packet import Known, Packet
from gradvitals.measure.passes import LARGEST, NONFINITE, NONZERO, NORM, Passes
from gradvitals.measure.rawstep import Arrival, RawStep, StationStep
from gradvitals.measure.rows import Rows
from gradvitals.measure.sentinel import Sentinel
from gradvitals.measure.updates import UpdateNorms
from gradvitals.measure.views import HeadView
from gradvitals.measure.vitals import VitalSums


class Station:
    """One optimizer: its rows, the instruments that read them, and where it is in the current step."""

    def __init__(self, index: int, optimizer: torch.optim.Optimizer, config: Config, *, reduced: bool = False) -> None:
        self.index = index
        self.optimizer = optimizer
        self.config = config
        self.sentinel = Sentinel(self._give_up)
        self.updates = UpdateNorms()
        self.changes = Changes()
        self.vitals = VitalSums(optimizer, config.metrics)
        self._passes = Passes()
        self.moments: MomentSums | None = None
        if "gsnr" in config.metrics and "adam" in config.sources and unavailable_reason(optimizer) is None:
            self.moments = MomentSums(optimizer)
        self.collectors = Collectors(config, reduced=reduced)
        self.factors: FactorSums | None = None
        self.on_given_up: Callable[[Station, int, bool], None] = lambda station, passes, surely: None
        self.parameters: list[nn.Parameter] = []
        self._row_set: set[int] = set()
        self._one_device = True
        self._held: list[int] = []
        self._members: list[int] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.expects_clip = False
        self.clips_by_hand = False
        self.in_scaler_step = False
        self._told_twice = False
        self.settled = False
        """Whether a whole step has shown where the sentinel is best placed."""
        self.begin([])

    def begin(self, rows: list[int]) -> StationStep:
        """A new step begins."""
        self.step = StationStep(rows=rows)
        self.reading: Packet | None = None
        self.read_at = -1
        self.clipped = self.stepped = self.windowed = self.arrived = False
        self.loops_limit: float | None = None
        """What the loop has clipped these gradients to."""
        self.leaves = False
        """Whether the reading is left to the optimizer, which sees the gradients in its step anyway."""
        return self.step

    @property
    def rows(self) -> list[int]:
        """The rows this optimizer is in charge of."""
        return self.step.rows

    def assign(self, rows: list[int], watched: Rows, clock: Clock, on_error: Callable[[str, Exception], None]) -> None:
        """Take charge of these rows."""
        self._on_error = on_error
        self._members = self._current_members()
        parameters = [watched.parameters[row] for row in rows]
        same = rows == self.rows and all(a is b for a, b in zip(parameters, self.parameters, strict=True))
        if same:
            return
        self.step.rows, self.parameters = rows, parameters
        self._row_set = set(rows)
        self._one_device = len({parameter.device for parameter in parameters}) <= 1
        self._held = [row for row in rows if watched.tensor(row).numel()]  # a shard may be empty
        dense = [row for row in self._held if row not in watched.looked_up]
        weights = [watched.weight(row) for row in dense]
        self.changes.follow(dense, [watched.parameters[row] for row in dense], weights)
        self.collectors.assign(rows, watched, clock, on_error)
        self.vitals.follow(self._held, [watched.parameters[row] for row in self._held], watched.heads)
        if self.factors is None and "vrgd/mean" in self.config.metrics:
            self.factors = FactorSums(self.optimizer, partial(on_error, "vrgd/mean"))
        self.follow_first(watched.arrivals, watched)

    def follow_first(self, arrivals: Sequence[int], watched: Rows) -> None:
        """Set the sentinel on the parameter that backward reaches first, or is likely to."""
        mine = set(self.rows)
        reached = [watched.parameters[row] for row in arrivals if row in mine]
        trainable = [parameter for parameter in self.parameters if parameter.requires_grad]
        for parameter in (*reached[:1], *trainable[-1:]):
            self.sentinel.follow(parameter)
            return

    def _give_up(self, passes: int, surely: bool) -> None:
        self.collectors.restart()
        if surely:  # what was clipped is gone
            self.clipped = self.step.clipped = False
        self.on_given_up(self, passes, surely)

    def _current_members(self) -> list[int]:
        return [id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]]

    def has_changed(self) -> bool:
        """Whether the optimizer has other parameters than when its rows were assigned."""
        return self._current_members() != self._members

    def is_due(self) -> bool:
        """Whether its gradients are still to be read: not for this step yet, or it steps once more."""
        return self.stepped or not self.arrived

    def is_fresh(self) -> bool:
        """Whether it has gradients of the current step to read."""
        return not self.stepped and self.sentinel.backwards > 0

    def is_stale(self, observes: int) -> bool:
        """Whether a reading must be taken (again): none yet, or another backward has run since."""
        if self.reading is None or self.leaves:
            return True
        if not self.settled:  # a backward may have passed the sentinel by
            return not self.clipped and not self.sentinel.altered()
        uncounted = self.sentinel.backwards == 0 and observes > 1
        return not self.clipped and (self.read_at != self.sentinel.backwards or uncounted)

    def note_scale(self, assumed: torch.amp.GradScaler | None) -> None:
        """Put the loss scale in force into the reading; note whether gradients still carry it."""
        scaler = self.scaler or assumed
        if scaler is None or scaler._scale is None:
            self.step.stage = "clipped" if self.clipped or self.sentinel.altered() else "raw"
            return
        self.step.scaled = self._still_scaled(scaler)
        self.step.stage = "clipped" if self.clipped else "unscaled"
        assert self.reading is not None
        # The scaler changes its scale in place, and may do so before the packet leaves.
        self.reading.add(f"scale{self.index}", scaler._scale.detach().clone())

    def forget_reading(self, passes: int) -> Known:
        """Its gradients are gone. Returns their norms after so many passes, if read, and not made by a loss scale."""
        reading, self.reading = self.reading or Packet(), None
        whole = not self.leaves and self.read_at == passes and not reading.named(f"scale{self.index}")
        return reading.named("norm") if whole else []

    def arrival(self, draft: RawStep, watched: Rows) -> Arrival | None:
        """What it is about to step with; None where its gradients were not read."""
        if self.reading is None:
            return None
        scales = self.reading.named(f"scale{self.index}") if self.step.scaled and not self.step.ignore_scale else []
        return Arrival(
            norms=self.reading.named("norm"),
            parameters=watched.parameters,
            scale=scales[0][1][0] if scales else None,
            losses=draft.observed.losses,
            clipped=self.clipped or self.clips_by_hand,
            by_hand=self.clips_by_hand,
            max_norm=draft.max_norm if self.clipped else None,
        )

    def _still_scaled(self, scaler: torch.amp.GradScaler) -> bool:
        state = scaler._per_optimizer_states[id(self.optimizer)]
        return bool(state["stage"].name == "READY")

    def instruments(
        self,
        watched: Rows,
        norms: dict[int, Tensor],
        joined: Tensor | None = None,
        *,
        full: bool,
        detail: bool,
        count_nonfinite: bool,
        may_leave: bool = False,
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """What there is to take of the gradients right now, each by its name and independent of the others.

        Args:
            watched: All rows.
            norms: Norms already known by row, e.g. from clipping; they are not computed again.
            joined: The same, in that order, in one tensor.
            full: Whether to take more than the norms.
            detail: Whether to take the costly metrics too.
            count_nonfinite: Whether to count NaN and infinite elements, which takes a pass of its own.
            may_leave: Whether the numbers may come as late as after the step, from an optimizer that tells them.
        """
        self.leaves = may_leave and not norms and not self.clips_by_hand and self.vitals.expected
        self.reading, self.read_at = Packet(), self.sentinel.backwards
        self.sentinel.note_read()
        packet = self.reading
        reused = [row for row in self._held if row in norms and row not in watched.aside]
        if joined is not None and len(reused) == len(norms) == len(joined):
            packet.add("norm", joined, list(norms))
        elif self._one_device:
            packet.add_each("norm", [norms[row] for row in reused], reused)
        else:
            for group_rows, group in stats.by_device_and_dtype(reused, [norms[row] for row in reused]):
                packet.add_each("norm", group, group_rows)
        if len(reused) == len(self._held) and not full and not count_nonfinite:
            return
        rows = [row for row in self._held if row not in watched.aside]
        if self.leaves:
            stepped = set(self._members)
            rows = [row for row in rows if id(watched.parameters[row]) not in stepped]
        yield from self._instruments_of(rows, watched, norms, full=full, detail=detail, count_nonfinite=count_nonfinite)

    def instruments_of_sums(
        self, rows: Sequence[int], watched: Rows, *, full: bool, detail: bool, count_nonfinite: bool
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """The same for rows that had to be summed over ranks first; they belong to the same reading."""
        return self._instruments_of(rows, watched, {}, full=full, detail=detail, count_nonfinite=count_nonfinite)

    def _instruments_of(
        self,
        wanted: Sequence[int],
        watched: Rows,
        norms: dict[int, Tensor],
        *,
        full: bool,
        detail: bool,
        count_nonfinite: bool,
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        packet, wants = self.reading, self.config.metrics
        found = [(row, grad) for row in wanted if (grad := watched.gradient(row)) is not None]
        rows, grads = [row for row, _ in found], [grad for _, grad in found]
        if not rows or packet is None:
            return
        heads = watched.heads if full and self.collectors.has_micro_batches else {}
        asked = {LARGEST: "max"} if detail and "grad/max" in wants else {}
        asked |= {NONZERO: "nonzero"} if detail and "grad/zero_fraction" in wants else {}
        asked |= {NONFINITE: "nonfinite"} if count_nonfinite and "grad/nonfinite" in wants else {}
        yield "kernels", lambda: found.__setitem__(slice(None), self._read_by_kernels(asked, found, norms, heads))
        rows, grads = [row for row, _ in found], [grad for _, grad in found]
        if detail and "radial_gsnr" in wants:
            every = [row for row in wanted if watched.gradient(row) is not None]
            yield "radial_gsnr", lambda: self._add_norms(packet, "weight_before", every, watched)
        if not rows:
            return
        own = [(row, grad) for row, grad in zip(rows, grads, strict=True) if row not in norms]
        if own:
            own_rows, own_grads = [row for row, _ in own], [grad for _, grad in own]
            yield "norm", lambda: stats.add_norms(packet, "norm", own_rows, own_grads)
        if heads:
            yield "heads", lambda: add_heads(packet, "heads", watched.heads, rows, grads)
        if detail and "grad/max" in wants:
            yield "grad/max", lambda: stats.add_largest(packet, "max", rows, grads)
        if detail and "grad/zero_fraction" in wants:
            yield "grad/zero_fraction", lambda: stats.add_nonzero_counts(packet, "nonzero", rows, grads)
        if count_nonfinite and "grad/nonfinite" in wants:
            yield "grad/nonfinite", lambda: stats.add_nonfinite_counts(packet, "nonfinite", rows, grads)

    def _read_by_kernels(
        self,
        asked: dict[int, str],
        found: list[tuple[int, Tensor]],
        norms: dict[int, Tensor],
        heads: Mapping[int, HeadView],
    ) -> list[tuple[int, Tensor]]:
        """Read everything at once where there are kernels for it; returns what is left to torch."""
        packet = self.reading
        assert packet is not None
        left = []
        for known in (False, True):  # the norms of some may be known, from clipping
            some = [(row, grad) for row, grad in found if (row in norms) == known]
            names = asked if known else {NORM: "norm"} | asked
            if not names:
                some = [(row, grad) for row, grad in some if row in heads]
            rows, grads = [row for row, _ in some], [grad for _, grad in some]
            unread = self._passes.read(packet, names, rows, grads, heads=heads, name_of_heads="heads")
            left += [some[p] for p in unread]
        return left

    def _add_norms(self, packet: Packet, name: str, rows: Sequence[int], watched: Rows) -> None:
        """The norms of weights."""
        weights = [watched.tensor(row) for row in rows]
        left = self._passes.read(packet, {NORM: name}, rows, weights)
        if left:
            stats.add_norms(packet, name, [rows[p] for p in left], [weights[p] for p in left])

    def push_windows(
        self, watched: Rows, packet: Packet, assumed: torch.amp.GradScaler | None
    ) -> dict[int, int | None]:
        """Add this step's gradients to the sliding windows, which put their sums into the packet.

        Returns:
            For each row that went into a window: the steps in a block where the window is complete, or None.
        """
        self.windowed = True
        scaler = self.scaler or assumed
        scale = scaler._scale if scaler is not None and self._still_scaled(scaler) else None
        pushed: dict[int, int | None] = {}
        for row, window in watched.windows.items():
            grad = watched.gradient(row) if row in self._row_set else None
            if grad is not None:
                pushed[row] = window.push(grad, scale, packet)
        return pushed

    def spoil_windows(self, watched: Rows) -> None:
        """What went into the windows was not the whole gradient of the step."""
        for row, window in watched.windows.items():
            if row in self._row_set:
                window.spoil()

    def before_update(self, draft: RawStep, watched: Rows) -> None:
        """Remember what the optimizer's step is about to change."""
        if draft.full and self.factors is not None and self.factors.available:
            self.factors.listen(draft.packet, self.rows, self.parameters)
        self.vitals.begin()
        if self.vitals.available and self.vitals.max_norm is not None:  # what the moments get is clipped
            draft.max_norm, self.step.clipped = self._lower_limit(self.vitals.max_norm), True
        if "update/norm" in self.config.metrics:
            self.changes.begin()
            if draft.full and not self.vitals.expected:
                self.updates.before(self._held, [watched.tensor(row) for row in self._held])

    def _lower_limit(self, own: float) -> float:
        """The norm that gradients end up with at most: the loop may have clipped them before the optimizer does."""
        loops = self.loops_limit
        if loops is None or not 0 < loops < math.inf:
            return own
        if not self._told_twice:
            self._told_twice = True
            self._on_error("clip", ClippedTwiceError(loops, own))
        return min(loops, own)

    def instruments_after(self, draft: RawStep, watched: Rows) -> Iterator[tuple[str, Callable[[], object]]]:
        """What there is to take right after the optimizer's step, each by its name."""
        if self.factors is not None:
            yield "vrgd/mean", self.factors.stop
        if "update/norm" in self.config.metrics:
            yield "changes", lambda: self._read_changes(draft)
        told: set[int] = set()
        if self.vitals.available:
            yield "vitals", lambda: told.update(self._take_vitals(draft, watched))
        if told and draft.full:
            yield "weights", lambda: self._read_other_weights(draft, watched, told)
            if self.moments is not None and draft.detail and "gsnr/median" in self.config.metrics:
                yield "medians", lambda: self._read_medians(draft, told)
        elif draft.full:
            if self.moments is not None:
                yield "moments", lambda: self._read_moments(draft)
            yield "update", lambda: self._read_weights(draft, watched)

    def _take_vitals(self, draft: RawStep, watched: Rows) -> set[int]:
        rows = self.vitals.take(draft, self.reading if self.leaves else None, moments=self.moments is not None)
        missing = [row for row in self._held if row not in rows] if self.leaves and not rows else []
        found = [(row, grad) for row in missing if (grad := watched.gradient(row)) is not None]
        if found and self.reading is not None:  # the step was made by other means than the one before
            stats.add_norms(self.reading, "norm", [row for row, _ in found], [grad for _, grad in found])
        return rows

    def _read_other_weights(self, draft: RawStep, watched: Rows, told: set[int]) -> None:
        others = [row for row in self._held if row not in told]
        if others and {"weight/norm", "update/norm"} & set(self.config.metrics):
            self._add_norms(draft.packet, "weight", others, watched)

    def _read_changes(self, draft: RawStep) -> None:
        self.changes.add(draft.packet)
        draft.sampled.append(self.changes.lengths)

    def _read_moments(self, draft: RawStep) -> None:
        assert self.moments is not None
        below_one = draft.detail and "gsnr/below_one_fraction" in self.config.metrics
        parameters = [p for row, p in zip(self.rows, self.parameters, strict=True) if row in set(self._held)]
        median = draft.detail and "gsnr/median" in self.config.metrics
        draft.betas |= self.moments.add(draft.packet, self._held, parameters, below_one=below_one, median=median)

    def _read_medians(self, draft: RawStep, told: set[int]) -> None:
        assert self.moments is not None
        of = dict(zip(self.rows, self.parameters, strict=True))
        rows = [row for row in self._held if row in told]
        self.moments.add_medians(draft.packet, rows, [of[row] for row in rows])

    @torch.no_grad()
    def _read_weights(self, draft: RawStep, watched: Rows) -> None:
        wants, weights = self.config.metrics, [watched.tensor(row) for row in self._held]
        if weights and {"weight/norm", "update/norm"} & set(wants):
            self._add_norms(draft.packet, "weight", self._held, watched)
        if "update/norm" in wants:
            draft.fractions |= self.updates.after(draft.packet, weights)

    def close(self) -> None:
        """Take all hooks away."""
        self.sentinel.unhook()
        self.vitals.stop()
        self.collectors.stop()
        if self.factors is not None:
            self.factors.stop()
