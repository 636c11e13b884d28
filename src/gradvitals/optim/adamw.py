"""AdamW in one pass over its tensors, clipping included, which also measures the step's vitals at no extra cost."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.utils.hooks import RemovableHandle

from gradvitals import kernels
from gradvitals.kernels.tables import ALIGNMENT, Addresses, Chunks, upload


@dataclass(frozen=True)
class Vitals:
    """The measurements of one step for the parameters of one group, device and dtype."""

    parameters: Sequence[Tensor]
    numbers: Mapping[str, Tensor]
    """One number per parameter under each name, in float64 on the device.

    Gradients as in ``.grad``: ``square`` (their norm), ``largest``, ``nonzero``, ``nonfinite``, the inner products
    ``along_weight`` and ``along_momentum``. Norms of weights before the step (``weight_before``) and after it
    (``weight``). Squared norms of the ``update`` and of ``momentum_before``. The norm of the ``first`` moment and the
    sum of the ``second``. Counts of coordinates that are ``alive`` (second moment above 0) and ``below_one`` in GSNR.
    The ``step``.
    """
    slices: Mapping[Tensor, Tensor]
    """Norms of the requested equal slices of gradients."""
    betas: tuple[float, float]
    max_norm: float | None


VitalsHook = Callable[[Vitals], object]
FactorsHook = Callable[[Sequence[Tensor], Sequence[Tensor], float], object]
"""Called with some parameters, the variance-reducing factors for their elements, and gamma."""


# -- the step by kernels ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaling:
    """How a variance-reduced step scales its gradients."""

    noise_of: Callable[[Tensor], Tensor]
    """Returns the summed squared deviations of a parameter's parts."""
    report: FactorsHook | None
    """Receives some parameters, their factors, and gamma; None if no hook is registered."""


def new_factor_weights(states: Sequence[Mapping[str, Any]], beta3: float) -> list[float]:
    """Return the weight of the new factors in each parameter's moving average.

    With weights (1 - beta) / (1 - beta^t), the average is always bias-corrected: it equals a moving average that
    starts at zero, divided by 1 - beta^t.
    """
    steps = [state.get("factor_step", 0) + 1 for state in states]
    by_step = {step: (1 - beta3) / (1 - beta3**step) for step in set(steps)}
    return [by_step[step] for step in steps]


def empty_factors(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return a float32 tensor for each gradient, laid out like it, in one allocation. Gradients have no gaps."""
    starts, first = [], 0
    for grad in grads:
        starts.append(first)
        first += -(-grad.numel() // ALIGNMENT) * ALIGNMENT
    flat = torch.empty(first, dtype=torch.float32, device=grads[0].device)
    return [flat.as_strided(grad.shape, grad.stride(), start) for grad, start in zip(grads, starts, strict=True)]


class Batch:
    """Parameters of one group, device and dtype, with their state, and what scales their gradients."""

    def __init__(
        self,
        index: int,
        group: Mapping[str, Any],
        entries: Sequence[tuple[Tensor, dict[str, Any]]],
        slices: Mapping[Tensor, int],
        scaling: Scaling | None,
    ) -> None:
        self.group = index
        self.parameters = [parameter for parameter, _ in entries]
        self.states = [state for _, state in entries]
        self.device = self.parameters[0].device
        self.dtypes = (self.parameters[0].dtype, _grad(self.parameters[0]).dtype, self.states[0]["exp_avg"].dtype)
        for state in self.states:
            state["step"] = torch.as_tensor(state["step"]).to(self.device, torch.float32, non_blocking=True)
        self.noises = None if scaling is None else [scaling.noise_of(parameter) for parameter in self.parameters]
        self.averaged = scaling is not None and bool(group["beta3"])
        for state in self.states if self.averaged else ():
            if "factor_avg" not in state:  # the first factors become the average, with a weight of 1
                state["factor_avg"] = torch.zeros_like(state["exp_avg"], dtype=self.dtypes[1])
            state.setdefault("factor_step", 0)
        names = ("exp_avg", "exp_avg_sq", "step", *(("factor_avg",) if self.averaged else ()))
        self.kept = {name: [state[name] for state in self.states] for name in names}  # the tensors of the state
        self.strides = [parameter.stride() for parameter in self.parameters]
        wanted = {place: slices[p] for place, p in enumerate(self.parameters) if p in slices}
        self.chunks = Chunks([p.numel() for p in self.parameters], self.device, _kernels("adam").SPAN, wanted)
        self.slices: dict[Tensor, slice] = {}
        start = len(self.parameters)
        for place, number in self.chunks.slices.items():
            self.slices[self.parameters[place]] = slice(start, start + number)
            start += number
        self.addresses = {name: Addresses() for name in ("weights", "grads", "noises", "factors", *names)}
        self._weights: tuple[list[float], Tensor | None] = ([], None)

    def matches(
        self, grads: Sequence[Tensor], state: Mapping[Tensor, dict[str, Any]], group: Mapping[str, Any], scaling: Any
    ) -> bool:
        """Return whether state and gradients are still the same; a loaded checkpoint or a reset replaces them."""
        if [grad.stride() for grad in grads] != self.strides or {grad.dtype for grad in grads} != {self.dtypes[1]}:
            return False
        if any([state[p] is not own for p, own in zip(self.parameters, self.states, strict=True)]):
            return False
        for name, tensors in self.kept.items():
            if any([own.get(name) is not tensor for own, tensor in zip(self.states, tensors, strict=True)]):
                return False
        if scaling is None or self.noises is None:
            return scaling is None and self.noises is None
        same = all([scaling.noise_of(p) is noise for p, noise in zip(self.parameters, self.noises, strict=True)])
        return same and self.averaged == bool(group["beta3"])

    def factor_weights(self, beta3: float) -> Tensor:
        """Return the weights of the new factors in their averages, uploaded only if they changed."""
        weights = new_factor_weights(self.states, beta3)
        known, uploaded = self._weights
        if uploaded is None or weights != known:
            uploaded = upload(torch.tensor(weights, dtype=torch.float32), self.device)
            self._weights = (weights, uploaded)
        return uploaded


class FusedStep:
    """Makes the steps of one AdamW by kernels: groups parameters, keeps address tables, and launches.

    A variance-reduced step takes two passes instead of one, because a tensor's mean ratio must come first.
    """

    def __init__(self, optimizer: Any, needs: str) -> None:
        self.optimizer, self.needs = optimizer, needs  # `needs` is the module of kernels to give up if a step fails
        self.scaling: Scaling | None = None  # for the step in progress; None if it is AdamW's own
        self.total_norm: Tensor | None = None
        self.has_started = False  # whether the step in progress has changed some weights
        self._batches: list[Batch] = []
        self._members: list[list[int]] = []
        self._slices: Mapping[Tensor, int] = {}
        self._grads: list[list[Tensor]] = []
        self._readers: dict[tuple[torch.device, torch.dtype], Any] = {}
        self._reachable: tuple[list[int], bool] = ([], False)

    def is_possible(self) -> bool:
        """Return whether settings and parameters allow a step by kernels, and leave the choice to us."""
        groups = self.optimizer.param_groups
        known = [len(group["params"]) for group in groups]
        if self._reachable[0] != known:
            every = [p for group in groups for p in group["params"]]
            self._reachable = (known, bool(every) and all(kernels.usable(p) for p in every))
        if not self._reachable[1] or kernels.ready(self.needs) is None:
            return False
        for group in groups:
            plain = not (group["amsgrad"] or group["differentiable"] or group["foreach"] is not None)
            if not plain or any(isinstance(beta, Tensor) for beta in group["betas"]):
                return False
        return True

    def collect(self, slices: Mapping[Tensor, int]) -> bool:
        """Collect the gradients. Return whether kernels can make the step with them."""
        self.has_started = False
        groups = self.optimizer.param_groups
        present = [[p for p in group["params"] if p.grad is not None] for group in groups]
        members = [list(map(id, some)) for some in present]
        if members == self._members and slices == self._slices and self._all_match():
            return True
        self._members = []
        if not self._lay_out(present, slices):
            return False
        self._members, self._slices = members, dict(slices)
        return self._all_match()

    def _all_match(self) -> bool:
        self._grads = [[_grad(p) for p in batch.parameters] for batch in self._batches]
        state, groups = self.optimizer.state, self.optimizer.param_groups
        pairs = zip(self._batches, self._grads, strict=True)
        return all(batch.matches(grads, state, groups[batch.group], self.scaling) for batch, grads in pairs)

    def _lay_out(self, present: Sequence[Sequence[Tensor]], slices: Mapping[Tensor, int]) -> bool:
        """Put parameters that are alike into batches. Return whether kernels can read all of them."""
        groups = self.optimizer.param_groups
        alike: dict[tuple[Any, ...], list[tuple[Tensor, dict[str, Any]]]] = {}
        for index, parameters in enumerate(present):
            self.optimizer._lists_of(groups[index])
            for parameter in parameters:
                grad, state = _grad(parameter), self.optimizer.state[parameter]
                moments = (state["exp_avg"], state["exp_avg_sq"])
                tensors: list[Tensor] = [parameter, grad, *moments]
                more: tuple[Any, ...] = ()
                if self.scaling is not None:
                    noise, average = self.scaling.noise_of(parameter), state.get("factor_avg")
                    tensors += [noise] if average is None else [noise, average]
                    if average is not None and average.dtype != grad.dtype:
                        return False
                    # An unaligned tensor must not keep the others from wide loads.
                    more = (noise.dtype, noise.data_ptr() % ALIGNMENT == 0)
                if not all(kernels.usable(t) and t.stride() == parameter.stride() for t in tensors):
                    return False
                if moments[0].dtype != moments[1].dtype or not parameter.numel():
                    return False
                kind = (index, parameter.device, parameter.dtype, grad.dtype, moments[0].dtype, *more)
                alike.setdefault(kind, []).append((parameter, state))
        self._batches = [
            Batch(kind[0], groups[kind[0]], entries, slices, self.scaling) for kind, entries in alike.items()
        ]
        return True

    def step(self, *, vitals: bool) -> list[Vitals]:
        """Make the step with the collected gradients, and return its vitals if wanted."""
        self.total_norm = None
        squares = self._squares() if self.optimizer.max_norm is not None and self._batches else None
        measured = []
        for batch, grads in zip(self._batches, self._grads, strict=True):
            with torch.cuda.device(batch.device if batch.device.type == "cuda" else -1):
                measured += self._step_batch(batch, grads, squares, vitals)
        self._grads = []
        return measured

    def _squares(self) -> Tensor:
        """Return the squared norm of every gradient, in one pass per device and dtype."""
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for batch, grads in zip(self._batches, self._grads, strict=True):
            alike.setdefault((batch.device, batch.dtypes[1]), []).extend(grads)
        found = [
            self._readers.setdefault(kind, _kernels("reductions").Reader()).read(grads, norms=False)[0]
            for kind, grads in alike.items()
        ]
        return found[0] if len(found) == 1 else torch.cat([part.to(found[0].device) for part in found])

    def _step_batch(self, batch: Batch, grads: Sequence[Tensor], squares: Tensor | None, vitals: bool) -> list[Vitals]:
        optimizer, adam, at, kept = self.optimizer, _kernels("adam"), batch.addresses, batch.kept
        group, max_norm = optimizer.param_groups[batch.group], optimizer.max_norm
        device = batch.device
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.device != device:
            lr = float(lr)
        beta1, beta2 = map(float, group["betas"])
        rule = adam.Rule(lr, beta1, beta2, group["eps"], group["weight_decay"], group["maximize"])
        amp = {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}
        amp = {name: None if tensor is None else tensor.to(device) for name, tensor in amp.items()}
        squares = None if squares is None else squares.to(device)

        def table(name: str, tensors: Sequence[Tensor]) -> Tensor:
            return at[name].table(tensors)

        addresses = {"weights": table("weights", batch.parameters), "grads": table("grads", grads)}
        addresses |= {name: table(name, kept[name]) for name in ("exp_avg", "exp_avg_sq")}
        used = list(addresses)
        reduction, factors = None, []
        if batch.noises is not None and self.scaling is not None:
            factors = empty_factors(grads) if self.scaling.report is not None else []
            noises, dtype = table("noises", batch.noises), batch.noises[0].dtype
            aligned = at["grads"].aligned and at["noises"].aligned
            reduction = adam.Reduction(
                ratios=_kernels("vrgd").sum_ratios(
                    batch.chunks, addresses["grads"], noises, dtype=grads[0].dtype, noise_dtype=dtype, aligned=aligned
                ),
                weights=batch.factor_weights(group["beta3"]),
                noises=noises,
                averages=table("factor_avg", kept["factor_avg"]) if batch.averaged else None,
                factors=table("factors", factors) if factors else None,
                noise_dtype=dtype,
                gamma=group["gamma"],
            )
            used += ["noises", *(["factor_avg"] if batch.averaged else []), *(["factors"] if factors else [])]
        more = {**amp, "reduction": reduction}
        steps = table("step", kept["step"])
        prepared = adam.prepare(steps, len(kept["step"]), rule, squares=squares, max_norm=max_norm, **more)
        tables = adam.Tables(*addresses.values(), dtypes=batch.dtypes, aligned=all(at[name].aligned for name in used))
        stochastic = optimizer.stochastic_rounding and batch.dtypes[0] == torch.bfloat16
        seed = torch.initial_seed() % 2**31 + 7919 * batch.group if stochastic else None
        try:
            sums = adam.update(batch.chunks, tables, rule, prepared, vitals=vitals, seed=seed, **more)
        except Exception:
            if not self.has_started:
                torch._foreach_sub_(kept["step"], 1.0)
            raise
        self.has_started = True
        for state in batch.states if batch.averaged else ():
            state["factor_step"] += 1
        if self.scaling is not None and self.scaling.report is not None:
            self.scaling.report(batch.parameters, factors, group["gamma"])
        if squares is not None and self.total_norm is None:
            self.total_norm = prepared.norm[0]
        if sums is None:
            return []
        numbers = _kernels("reductions").finish(batch.chunks, sums, maxima=adam.MAXIMA, roots=adam.ROOTS)
        whole = numbers[:, : len(batch.parameters)]
        return [
            Vitals(
                parameters=batch.parameters,
                numbers={**dict(zip(adam.VITALS, whole, strict=True)), "step": prepared.steps},
                slices={parameter: numbers[0][part] for parameter, part in batch.slices.items()},
                betas=(beta1, beta2),
                max_norm=max_norm,
            )
        ]


def _kernels(name: str) -> Any:
    """Return a module of kernels that is known to be available."""
    return kernels.ready(name)


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


# -- the optimizer ---------------------------------------------------------------------------------------------------

ASKS_FOR_AMSGRAD = "amsgrad" in inspect.signature(torch.optim.AdamW._init_group).parameters  # until torch 2.6


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, in one pass on NVIDIA GPUs with Triton, and torch's own step everywhere else.

    Arguments, state and state dicts are those of `torch.optim.AdamW`, and results agree up to rounding. With `foreach`
    set, with `amsgrad` or with `differentiable`, the step is torch's own. `torch.compile` does not compile it.

    Under `gv.watch` the step also returns norms, extremes and counts of gradients, weights, moments and updates, so
    the monitor need not read them again.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decays of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Shrinks the weights directly.
        amsgrad: As in `torch.optim.AdamW`. It uses torch's step.
        maximize: Maximize the objective.
        foreach: True or False use torch's step.
        capturable: As in torch; the step by kernels can always be captured in a CUDA graph.
        differentiable: As in torch. It uses torch's step.
        fused: Use torch's fused step if kernels cannot make the step.
        max_norm: Clip the norm of all gradients to this inside the step, without changing ``.grad``. The result is that
            of `torch.nn.utils.clip_grad_norm_` before the step, and `total_norm` is what it would return.
        stochastic_rounding: Round bfloat16 weights up or down at random, so that small updates are not lost.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = AdamW([weight], lr=0.5, weight_decay=0.0, max_norm=1.0)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.data, round(float(optimizer.total_norm), 4)
        (tensor([2.5000, 3.5000]), 10.0)
    """

    _kernels = "adam"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_norm: float | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm > 0):
            raise ValueError(f"max_norm is {max_norm!r}; expected a norm above 0, e.g. 1.0, or None")
        self._start_fused(max_norm, stochastic_rounding)
        ways: dict[str, Any] = dict(foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **ways)

    def _start_fused(self, max_norm: float | None, stochastic_rounding: bool) -> None:
        self.max_norm = max_norm
        """The norm to clip all gradients to; it may change at any time."""
        self.stochastic_rounding = stochastic_rounding
        self.total_norm: Tensor | None = None
        """The norm of all gradients in the last step before clipping, on their device; None without `max_norm`."""
        self.reports_vitals = False
        """Whether the last step ran by kernels; the next one then most likely calls the vitals hooks."""
        self._fused = FusedStep(self, self._kernels)
        self._vitals_hooks: OrderedDict[int, VitalsHook] = OrderedDict()
        self._slices: dict[int, Mapping[Tensor, int]] = {}
        self._clip_factor: Tensor | None = None

    def register_vitals_hook(self, hook: VitalsHook, slices: Mapping[Tensor, int] | None = None) -> RemovableHandle:
        """Call a function after each step that runs by kernels, with what the step measured.

        Args:
            hook: Called with `Vitals` for each group, device and dtype of parameters.
            slices: Parameters to measure in this many equal slices too, e.g. attention heads.
        """
        handle = RemovableHandle(self._vitals_hooks)
        self._vitals_hooks[handle.id] = hook
        self._slices[handle.id] = dict(slices or {})
        return handle

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler leaves unscaling and skipping to the step."""
        return all(group["fused"] for group in self.param_groups) or self._fused.is_possible()

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignore the value: torch sets it if `fused` is given."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_step()
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _make_step(self) -> None:
        self.reports_vitals = self._step_by_kernels()
        if not self.reports_vitals:
            self._step_by_torch()

    def _step_by_kernels(self) -> bool:
        try:
            live = {key: slices for key, slices in self._slices.items() if key in self._vitals_hooks}
            wanted = {parameter: number for slices in live.values() for parameter, number in slices.items()}
            if not self._fused.is_possible() or not self._fused.collect(wanted):
                return False
            measured = self._fused.step(vitals=bool(self._vitals_hooks))
        except Exception as error:
            if self._fused.has_started:  # torch cannot finish a half-made step
                raise
            kernels.give_up(self._fused.needs, error, f"{type(self).__name__} continues with torch's step")
            return False
        self.total_norm = self._fused.total_norm
        for vitals in measured:
            for hook in list(self._vitals_hooks.values()):
                hook(vitals)
        return True

    def _step_by_torch(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not grads or self._unscale_or_skip(grads):
            return
        self.total_norm = self._clip_factor = None
        if self.max_norm is not None:
            self.total_norm = _total_norm(grads)
            self._clip_factor = (self.max_norm / (self.total_norm + 1e-6)).clamp(max=1.0)
        if self.stochastic_rounding and any(grad.dtype == torch.bfloat16 for grad in grads):
            _step_in_float32(self, self._clip_factor)
            return
        step: Any = torch.optim.AdamW.step
        if getattr(step, "hooked", False):  # torch wraps `step` of every class it has seen, and ours already is
            step = step.__wrapped__
        step(self)

    def _unscale_or_skip(self, grads: Sequence[Tensor]) -> bool:
        """Do what a GradScaler left to the step, if torch's step does not. Return whether to skip the step."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is None or all(group["fused"] for group in self.param_groups):
            return False
        self.found_inf = self.grad_scale = None  # torch's other steps reject these
        if bool(found):
            return True
        if scale is not None:
            for grad in grads:
                grad.div_(scale.to(grad.device))
        return False

    def _init_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *states: Any) -> Any:
        has_complex = super()._init_group(group, params, grads, *states)  # type: ignore[no-untyped-call]
        if self._clip_factor is not None:
            grads[:] = [grad * self._clip_factor.to(grad.device, grad.dtype) for grad in grads]
        return has_complex

    def _lists_of(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """Return parameters with gradients, their gradients, state tensors and steps. Creates missing state."""
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        more = (group["amsgrad"],) if ASKS_FOR_AMSGRAD else ()
        self._init_group(group, *lists[:2], *more, *lists[2:])
        return lists

    def __repr__(self) -> str:
        """Return torch's description, with the settings that hold for all groups."""
        text = super().__repr__()
        own = {"max_norm": self.max_norm, "stochastic_rounding": self.stochastic_rounding or None}
        lines = "".join(f"{name}: {value}\n" for name, value in own.items() if value is not None)
        return f"{text.removesuffix(')')}{lines})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; it gets its own hooks and tables."""
        return super().__getstate__() | {"max_norm": self.max_norm, "stochastic_rounding": self.stochastic_rounding}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, or take over a loaded state."""
        if "_fused" not in self.__dict__:
            self._start_fused(state.get("max_norm"), state.get("stochastic_rounding", False))
        super().__setstate__(state)  # type: ignore[no-untyped-call]


def _total_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients as `torch.nn.utils.get_total_norm` does, which a Monitor would intercept."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    norms = [norm.to(grads[0].device) for some in alike.values() for norm in torch._foreach_norm(some)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _step_in_float32(optimizer: Any, clip_factor: Tensor | None) -> None:
    """Make one AdamW step of all groups by torch, in float32 for bfloat16 parameters, with stochastic rounding."""
    for group in optimizer.param_groups:
        optimizer._clip_factor = None  # clip below, in float32
        params, *lists = optimizer._lists_of(group)
        optimizer._clip_factor = clip_factor
        wide = [
            [tensor.float() if tensor.dtype == torch.bfloat16 else tensor for tensor in column]
            for column in (params, *lists[:4])
        ]
        if clip_factor is not None:
            wide[1] = [grad * clip_factor.to(grad.device, grad.dtype) for grad in wide[1]]
        names = ("foreach", "capturable", "amsgrad", "lr", "weight_decay", "eps", "maximize")
        beta1, beta2 = group["betas"]
        settings = {name: group[name] for name in names}
        adamw(wide[0], wide[1], wide[2], wide[3], wide[4], lists[4], beta1=beta1, beta2=beta2, **settings)
        for parameter, new in zip(params, wide[0], strict=True):
            if new is not parameter:
                parameter.copy_(_rounded(new))
        for column, results in zip(lists[1:4], wide[2:], strict=True):
            for state, new in zip(column, results, strict=True):
                if new is not state:
                    state.copy_(new)


def _rounded(values: Tensor) -> Tensor:
    """Round to bfloat16, up or down with probabilities that make the mean exact."""
    bits = values.view(torch.int32)
    noise = torch.randint_like(bits, 1 << 16)
    kept = torch.where(values.isfinite(), bits + noise, bits) & -(1 << 16)
    return kept.view(torch.float32).to(torch.bfloat16)
