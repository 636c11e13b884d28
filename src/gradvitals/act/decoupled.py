"""Decoupled momentum: more of it for groups of parameters with much signal, less for those with little, or the reverse.

After DeepKD (arXiv 2505.15133), which raises momentum by a fixed amount for the parts of a loss whose GSNR is high and
lowers it for the others. There the parts are known by hand; here groups are ranked by their measured GSNR.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from gradvitals.act.counted_gsnr import AT_ONE_POINT
from gradvitals.act.inbox import record
from gradvitals.act.lr_factor import optimizer_of
from gradvitals.act.together import Together
from gradvitals.errors import ConfigError, GradvitalsError
from gradvitals.collect.parameters import COMPILED_PREFIX, layer_of
from gradvitals.monitor import Monitor
from gradvitals.store import open_run
from gradvitals.types import Action, Source

INTERVAL = ("gsnr", "gsnr_low", "gsnr_high")


class GroupSignal(NamedTuple):
    """The GSNR of one group of parameters; nan where it is not known."""

    value: float
    low: float
    high: float


def decoupled_momentum(
    optimizer: torch.optim.Optimizer,
    signal: Monitor | Sequence[float],
    *,
    delta: float = 0.075,
    direction: Literal[1, -1] = 1,
    bounds: tuple[float, float] = (0.01, 0.99),
    source: Source | None = None,
) -> DecoupledMomentum:
    """Set the momentum of every parameter group by the rank of its GSNR.

    The group with the highest GSNR gets its momentum plus `delta`, that with the lowest its momentum minus `delta`, the
    others stand between them in equal steps. Momentum is `momentum` of SGD, or the first of Adam's `betas`.

    Note that SGD's steps grow with its momentum, by 1/(1 - momentum): from 0.9 to 0.975 they are four times as long.

    Args:
        optimizer: Whose groups. It needs two or more; `split_by_layer` makes them.
        signal: A Monitor, whose newest readings are used, or the GSNR of every group.
        delta: How far momentum goes up or down at most.
        direction: 1 raises it where GSNR is high, as DeepKD does. -1 raises it where GSNR is low: more averaging
            where there is more noise, which is what the GSNR manual asks for.
        bounds: Momentum stays within these, which lie between 0 and 1.
        source: Source of the Monitor's GSNR. None: micro-batches or ranks.

    Returns:
        What was done. `update` ranks again by newer readings, `undo` puts back what was there before.

    Example:
        >>> import torch
        >>> a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        >>> optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b]}, {"params": [c]}], lr=0.1, momentum=0.9)
        >>> done = decoupled_momentum(optimizer, [0.1, 3.0, 0.2])
        >>> [round(group["momentum"], 3) for group in optimizer.param_groups]
        [0.825, 0.975, 0.9]
        >>> done.undo()
        >>> [group["momentum"] for group in optimizer.param_groups]
        [0.9, 0.9, 0.9]
    """
    return DecoupledMomentum(optimizer, signal, delta=delta, direction=direction, bounds=bounds, source=source)


class DecoupledMomentum:
    """Momentum by the rank of GSNR on one optimizer. Made by `decoupled_momentum`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        signal: Monitor | Sequence[float],
        *,
        delta: float,
        direction: Literal[1, -1],
        bounds: tuple[float, float],
        source: Source | None,
    ) -> None:
        self.optimizer = optimizer_of(optimizer, "decoupled_momentum")
        _check(self.optimizer, delta, direction, bounds)
        self.actions: list[Action] = []
        """What was done so far, oldest first."""
        self._shift = direction * delta
        self._bounds = bounds
        self._sources = AT_ONE_POINT if source is None else (source,)
        self._monitor = signal if isinstance(signal, Monitor) else None
        self._before = [_momentum_setting(group) for group in self.optimizer.param_groups]
        self.update(None if isinstance(signal, Monitor) else signal)
        _IN_FORCE.add(self.optimizer)

    @property
    def momentum(self) -> list[float]:
        """The momentum of every group, as it is now."""
        return [_momentum(group) for group in self.optimizer.param_groups]

    def update(self, values: Sequence[float] | None = None) -> None:
        """Rank again: by the GSNR of every group, or by the Monitor's newest readings."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._before):
            raise ConfigError(
                f"the optimizer has {len(groups)} groups now and had {len(self._before)}; undo and begin anew"
            )
        signals, step = self._given(values) if values is not None else self._measured()
        labels = [_label(index, group) for index, group in enumerate(groups)]
        places = _places([signal.value for signal in signals])
        reason = self._why_not(signals, labels)
        before, base = self.momentum, [_momentum(setting) for setting in self._before]
        if not reason:
            low, high = self._bounds
            for group, own, place in zip(groups, base, places, strict=True):
                _set_momentum(group, min(max(own + self._shift * place, low), high) if place else own)
            where = "high" if self._shift > 0 else "low"
            reason = f"momentum by rank of GSNR, up to {abs(self._shift):g} more where it is {where} and less where not"
        told = {"momentum": dict(zip(labels, before, strict=True))}
        after: dict[str, Any] = {"momentum": dict(zip(labels, self.momentum, strict=True))}
        after |= {"gsnr": {label: signal.value for label, signal in zip(labels, signals, strict=True)}}
        self._keep(self._action(reason, told, after, step, taken=self.momentum != before))

    def undo(self) -> None:
        """Give every group the momentum it had, exactly."""
        before = {"momentum": self.momentum}
        for group, setting in zip(self.optimizer.param_groups, self._before, strict=True):
            group.update(setting)
        _IN_FORCE.discard(self.optimizer)
        after = {"momentum": self.momentum}
        self._keep(self._action("momentum as it was before", before, after, self._now(), taken=True))

    def _action(self, reason: str, before: dict[str, Any], after: dict[str, Any], step: int, *, taken: bool) -> Action:
        finding = "sparse_feature_noise"
        return Action(
            kind="momentum", step=step, finding=finding, taken=taken, before=before, after=after, reason=reason
        )

    def _now(self) -> int:
        return self._monitor.step if self._monitor is not None else 0

    def _keep(self, action: Action) -> None:
        self.actions.append(action)
        if self._monitor is not None:
            record(self._monitor, [action])

    def _why_not(self, signals: Sequence[GroupSignal], labels: Sequence[str]) -> str:
        """Why groups cannot be told apart; empty where they can."""
        known = [(signal, label) for signal, label in zip(signals, labels, strict=True) if math.isfinite(signal.value)]
        if len(known) < 2:
            return f"a GSNR is known of {len(known)} groups; two are needed to rank them"
        (least, weak), (most, strong) = (pick(known, key=lambda one: one[0].value) for pick in (min, max))
        if most.low > least.high or (math.isnan(most.low) and most.value > least.value):
            return ""
        highest = f"{strong} has a GSNR of {most.value:.3g}, at least {most.low:.3g}"
        return f"the groups cannot be told apart: {highest}, and {weak} {least.value:.3g}, at most {least.high:.3g}"

    def _given(self, values: Sequence[float]) -> tuple[list[GroupSignal], int]:
        count = len(self.optimizer.param_groups)
        if len(values) != count:
            raise ConfigError(f"got {len(values)} values of GSNR for {count} groups; expected one for each group")
        return [GroupSignal(float(value), math.nan, math.nan) for value in values], self._now()

    def _measured(self) -> tuple[list[GroupSignal], int]:
        """The newest GSNR of every group: of its layer, where it holds one whole, else the median of its tensors."""
        if self._monitor is None:
            raise ConfigError("update needs the GSNR of every group: there is no Monitor to ask")
        self._monitor.flush()
        together = Together(self._monitor)
        # The first rank alone keeps a run; its readings are of the tensors of all ranks.
        told = together.gathered(self._newest() if together.leads else None)[0]
        if isinstance(told, GradvitalsError):
            raise told
        tables, layers, step = told
        ranks, rows = self._monitor.ranks, self._monitor.recorder.table
        layout = rows.layout if ranks is None else ranks.layout
        own = range(len(rows.parameters)) if ranks is None else ranks.rows.tolist()
        number = {id(parameter): row for row, parameter in zip(own, rows.parameters, strict=False)}
        whole: dict[str, set[int]] = {}
        for info in layout.tensors:
            whole.setdefault(info.layer, set()).add(info.index)
        signals = []
        for group in self.optimizer.param_groups:
            mine = {number[id(parameter)] for parameter in group["params"] if id(parameter) in number}
            layer = next((name for name, all_rows in whole.items() if all_rows == mine and name in layers), None)
            read = [row for row in sorted(mine) if row < tables["tensors"].shape[1]]
            found = tables["tensors"][:, read] if layer is None else tables["layers"][:, [layers[layer]]]
            found = found[:, np.isfinite(found).all(0)]  # a value without an interval says too little
            signals.append(GroupSignal(*(_median(row) for row in found)))
        return signals, step

    def _newest(self) -> tuple[dict[str, Any], dict[str, int], int] | GradvitalsError:
        """The newest GSNR of all tensors and layers, the layers' numbers and the step; or why there is none."""
        try:
            return self._stored()
        except GradvitalsError as error:
            return error

    def _stored(self) -> tuple[dict[str, Any], dict[str, int], int]:
        assert self._monitor is not None
        with open_run(self._monitor.run_path) as run:
            source = next((found for found in self._sources if found in run.sources("gsnr", "tensors")), None)
            if source is None:
                raise ConfigError(
                    f"the run has no GSNR from {' or '.join(self._sources)} yet; accumulate gradients over two or more "
                    "micro-batches, or pass the GSNR of every group"
                )
            tables = {kind: _tables(run, kind, source) for kind in ("tensors", "layers")}
            layers = {name: index for index, name in enumerate(run.layers)}
            return tables, layers, run.table("gsnr", source=source)[0]


_IN_FORCE: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def split_by_layer(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Split every group of an optimizer by the layers of a model, in place, with the settings it had.

    Call it before a scheduler is built, which counts the groups, and before `watch`.

    Returns:
        The layer of every group.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> split_by_layer(optimizer, model)
        ['0', '1']
    """
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            "the optimizer has a scheduler already, which counts its groups; split them before it is built"
        )
    layer = {id(p): layer_of(name.replace(COMPILED_PREFIX, "")) for name, p in model.named_parameters()}
    split: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        positions: dict[str, list[int]] = {}
        for index, parameter in enumerate(group["params"]):
            positions.setdefault(layer.get(id(parameter), "other"), []).append(index)
        lists = [key for key in ("params", "param_names") if key in group]
        for name, indices in positions.items():
            split.append({**group, **{key: [group[key][i] for i in indices] for key in lists}, "layer": name})
    optimizer.param_groups[:] = split
    return [group["layer"] for group in split]


def _check(optimizer: torch.optim.Optimizer, delta: float, direction: int, bounds: tuple[float, float]) -> None:
    if optimizer in _IN_FORCE:
        raise ConfigError("this optimizer has decoupled momentum already; use its update() to rank again, or undo()")
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta!r}; expected a number between 0 and 1, such as 0.075")
    if direction not in (1, -1):
        raise ConfigError(f"direction is {direction!r}; expected 1 (more for high GSNR) or -1 (more for low GSNR)")
    if not 0 < bounds[0] < bounds[1] < 1:
        raise ConfigError(f"bounds are {bounds!r}; expected two numbers between 0 and 1, the lower first")
    groups = optimizer.param_groups
    if len(groups) < 2:
        raise ConfigError(
            f"the optimizer has {len(groups)} group of parameters, and momentum belongs to a group; "
            "make one for each layer with split_by_layer(optimizer, model) before you build a scheduler"
        )
    for index, group in enumerate(groups):
        setting = _momentum_setting(group)
        if not setting or not isinstance(_raw(setting), float | int) or not 0 < _raw(setting) < 1:
            raise ConfigError(
                f"group {index} of {type(optimizer).__name__} has no momentum to shift ({setting or 'no setting'}); "
                "expected momentum, or the first of betas, as a number between 0 and 1"
            )


def _momentum_setting(group: Mapping[str, Any]) -> dict[str, Any]:
    name = "betas" if "betas" in group else "momentum"
    return {name: group[name]} if name in group else {}


def _raw(setting: Mapping[str, Any]) -> Any:
    return setting["betas"][0] if "betas" in setting else setting["momentum"]


def _momentum(setting: Mapping[str, Any]) -> float:
    return float(_raw(setting))


def _set_momentum(group: dict[str, Any], value: float) -> None:
    if "betas" in group:
        group["betas"] = (value, *group["betas"][1:])
    else:
        group["momentum"] = value


def _places(values: Sequence[float]) -> list[float]:
    """Where each value stands among the known ones, from -1 (lowest) to 1 (highest); 0 where it is not known.

    >>> _places([5.0, 1.0, math.nan, 5.0, 2.0])
    [0.6666666666666667, -1.0, 0.0, 0.6666666666666667, -0.33333333333333337]
    """
    known = np.array([value for value in values if math.isfinite(value)])
    if len(known) < 2:
        return [0.0] * len(values)
    rank = [((known < value).sum() + (known <= value).sum() - 1) / 2 for value in values]
    return [float(2 * r / (len(known) - 1) - 1) if math.isfinite(v) else 0.0 for r, v in zip(rank, values, strict=True)]


def _tables(run: Any, kind: str, source: str) -> Any:
    return np.stack([run.table(metric, kind=kind, source=source)[1] for metric in INTERVAL])


def _median(values: Any) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _label(index: int, group: Mapping[str, Any]) -> str:
    name = group.get("layer", group.get("name"))
    return f"group {index}" if name is None else f"group {index} ({name})"
