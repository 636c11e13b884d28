"""The paper's linear-regression demo: does VR-SGD reach in 50 steps what SGD reaches in 100?

Ten weights W_i = i are learnt from y = W·x, from w = 0, in 100 steps. The paper (Jiang et al., 2023) does not say
where x comes from, which learning rate either arm had, or how the batch of 2048 of its sensitivity test was divided. So
all of that is tried: inputs that are centred (standard normal) and inputs that are not (uniform on [0, 1]), learning
rates up to where training diverges, several batches, k and gamma.

There is no noise in y, so every arm that converges goes to a loss of zero, and what is compared is how fast. With
D = w - W and inputs of covariance I, a sample's gradient has mean D and covariance DD' + |D|²I, and SGD's expected
squared error shrinks each step by (1 - lr)² + lr² (d + 1) / batch: at the best learning rate, close to 1, the batch of
2048 is solved to two digits a step. Factors of at most 1 can only help where a step is too long.

What comes out: as printed, VR-SGD does it only within a percent of the learning rate at which SGD diverges. Without the
cap at 1, and with inputs that are not centred, it does: there SGD is held back by one stiff direction, in which all
weights move together and which feels the mean of the factors, 1; while in the others the weights that are farthest off
have factors above 1. No noise is needed for that.

Sweeps run many learning rates and seeds at once, with the factors of `gradvitals.functional`. `train` is the same with
the optimizer, in an ordinary loop, and gives the same curve.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from gradvitals.bench import markdown_table
from gradvitals.functional import vrgd_scale_from_variance
from gradvitals.report.format import sparkline

Inputs = Literal["normal", "uniform"]

DIMENSION = 10
STEPS = 100
RULES = ("sgd", "vr", "uncapped")
"""Plain SGD; the paper's rule as printed, clipped to [gamma, 1]; and the same without the cap at 1."""

LEARNING_RATES: dict[Inputs, tuple[float, ...]] = {
    "normal": (0.001, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.2, 1.5, 1.8, 1.9, 1.95, 1.96, 1.97, 1.975, 1.98),
    "uniform": (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.74, 0.76, 0.8, 0.85, 0.9, 1.0, 1.1),
}
GAMMAS = (0.0, 0.02, 0.04, 0.1, 0.2, 0.5, 0.8, 1.0)
PARTS = (8, 32, 128, 512)
BATCHES = (16, 64, 256, 2048)
FRACTIONS = (0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
"""Learning rates as shares of the one at which SGD's expected error stops falling."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What the paper leaves open, chosen."""

    inputs: Inputs = "normal"
    batch: int = 2048
    k: int = 32
    """Parts of the batch, each with its own gradient."""
    seeds: int = 4
    steps: int = STEPS

    def __post_init__(self) -> None:
        if self.inputs not in LEARNING_RATES:
            raise ValueError(f"inputs is {self.inputs!r}; expected 'normal' or 'uniform'")
        if self.k < 2 or self.batch % self.k:
            raise ValueError(
                f"a batch of {self.batch} does not divide into {self.k} parts; expected 2 or more that fit"
            )

    @property
    def hessian(self) -> Tensor:
        """E xx': the identity, or for uniform inputs I/12 with 1/4 added everywhere, as their mean is 1/2."""
        eye = torch.eye(DIMENSION, dtype=torch.float64)
        return eye if self.inputs == "normal" else eye / 12 + 0.25

    @property
    def stability_limit(self) -> float:
        """The learning rate at which SGD's expected error stops falling: for normal inputs 2 / (1 + (d + 1) / batch).

        For uniform inputs 2 over the largest eigenvalue of the Hessian, the noise left aside.
        """
        if self.inputs == "normal":
            return 2 / (1 + (DIMENSION + 1) / self.batch)
        return float(2 / torch.linalg.eigvalsh(self.hessian).max())

    def draw(self, generator: torch.Generator) -> Tensor:
        """The inputs of one step, `[k, batch / k, d]`."""
        shape = (self.k, self.batch // self.k, DIMENSION)
        draw = torch.randn if self.inputs == "normal" else torch.rand
        return draw(shape, generator=generator, dtype=torch.float64)


def truth() -> Tensor:
    """W."""
    return torch.arange(1, DIMENSION + 1, dtype=torch.float64)


def uncapped(mean: Tensor, variance: Tensor, num_parts: int, gamma: float) -> Tensor:
    """The paper's factor with a floor but no cap, so that an element with more signal than average speeds up."""
    ratio = mean.square() / variance
    return (ratio / ratio.mean(-1, keepdim=True)).clamp(min=gamma)


def _factors(rule: str, mean: Tensor, variance: Tensor, num_parts: int, gamma: float) -> Tensor:
    if rule == "sgd":
        return torch.ones_like(mean)
    if rule == "uncapped":
        return uncapped(mean, variance, num_parts, gamma)
    rows = (-1, mean.shape[-1])
    return vrgd_scale_from_variance(mean.reshape(rows), variance.reshape(rows), gamma, by_row=True).view_as(mean)


def simulate(
    problem: Problem, lrs: Sequence[float], *, rules: Sequence[str] = RULES, gammas: Sequence[float] = (0.1,)
) -> Tensor:
    """The expected loss of a fresh sample at each step, in float64: `[rules, gammas, lrs, seeds, steps + 1]`.

    Seed s meets the same data under every rule, gamma and learning rate.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in range(problem.seeds)]
    shape = (len(rules), len(gammas), len(lrs), problem.seeds, DIMENSION)
    error = (-truth()).expand(shape).clone()
    rates = torch.tensor(lrs, dtype=torch.float64)[:, None, None]
    losses = [_loss(error, problem)]
    for _ in range(problem.steps):
        # A part's gradient is X'X D / n: the inputs are needed only as that matrix.
        inputs = torch.stack([problem.draw(generator) for generator in generators])
        second_moments = inputs.mT @ inputs / inputs.shape[-2]
        parts = torch.einsum("skij,rglsj->krglsi", second_moments, error)
        mean, variance = parts.mean(0), parts.var(0, correction=0)
        for i, rule in enumerate(rules):
            for j, gamma in enumerate(gammas):
                factors = _factors(rule, mean[i, j], variance[i, j], problem.k, gamma)
                error[i, j] -= rates * factors * mean[i, j]
        losses.append(_loss(error, problem))
    return torch.stack(losses, dim=-1)


def _loss(error: Tensor, problem: Problem) -> Tensor:
    return torch.einsum("...i,ij,...j->...", error, problem.hessian, error) / 2


def train(problem: Problem, rule: str, lr: float, *, gamma: float = 0.1, seed: int = 0) -> list[float]:
    """One run with the real optimizer and autograd: the curve that `simulate` gives for this seed."""
    from gradvitals.optim import VRSGD

    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(DIMENSION, dtype=torch.float64, requires_grad=True)
    optimizer: torch.optim.Optimizer
    if rule == "sgd":
        optimizer = torch.optim.SGD([weights], lr=lr)
    else:
        scale = uncapped if rule == "uncapped" else "paper"
        optimizer = VRSGD([weights], lr=lr, gamma=gamma, k=problem.k, scale=scale)
    wanted = truth()
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that so few parts as some of these are too few
        for _ in range(problem.steps):
            losses.append(float(_loss(weights.detach() - wanted, problem)))
            for part in problem.draw(generator):
                loss = (part @ weights - part @ wanted).square().mean() / 2
                (loss / problem.k).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, float(_loss(weights.detach() - wanted, problem))]


# -- the whole demo -------------------------------------------------------------------------------------------------


def run_regression(problem: Problem | None = None) -> dict[str, Any]:
    """Everything: equal learning rates, each arm's best, gamma, k and batch; plain values, ready for JSON."""
    problem = problem or Problem()
    found = {inputs: _by_learning_rate(replace(problem, inputs=inputs)) for inputs in LEARNING_RATES}
    return {
        "dimension": DIMENSION,
        "batch": problem.batch,
        "k": problem.k,
        "seeds": problem.seeds,
        "steps": problem.steps,
        "gamma": 0.1,
        "inputs": found,
        "batches": _by_batch(replace(problem, inputs="normal")),
    }


def _by_learning_rate(problem: Problem) -> dict[str, Any]:
    lrs = LEARNING_RATES[problem.inputs]
    logs = _log_losses(problem, lrs)[:, 0]
    goal = logs[0, :, -1].min()
    return {
        "stability_limit": problem.stability_limit,
        "learning_rates": [
            {
                "lr": lr,
                **{
                    rule: {"log10_loss": _log10(logs[i, j, -1]), "steps": steps_to(logs[i, j], logs[0, j, -1])}
                    for i, rule in enumerate(RULES)
                },
            }
            for j, lr in enumerate(lrs)
        ],
        "best": {
            rule: {
                **_best(logs[i], lrs, goal),
                "curve": [_log10(value) for value in logs[i, logs[i, :, -1].argmin()]],
            }
            for i, rule in enumerate(RULES)
        },
        "gammas": _by_gamma(problem, goal),
        "parts": _by_parts(problem, goal),
    }


def _by_gamma(problem: Problem, goal: Tensor) -> list[dict[str, Any]]:
    lrs = LEARNING_RATES[problem.inputs]
    logs = _log_losses(problem, lrs, rules=RULES[1:], gammas=GAMMAS)
    return [
        {"value": gamma, **{rule: _best(logs[i, j], lrs, goal) for i, rule in enumerate(RULES[1:])}}
        for j, gamma in enumerate(GAMMAS)
    ]


def _by_parts(problem: Problem, goal: Tensor) -> list[dict[str, Any]]:
    lrs = LEARNING_RATES[problem.inputs]
    found = []
    for k in PARTS:
        if problem.batch % k == 0:
            logs = _log_losses(replace(problem, k=k), lrs, rules=RULES[1:])[:, 0]
            found.append({"value": k, **{rule: _best(logs[i], lrs, goal) for i, rule in enumerate(RULES[1:])}})
    return found


def _by_batch(problem: Problem) -> list[dict[str, Any]]:
    """At each batch: each arm's best, and the lowest learning rate at which VR-SGD needs half of SGD's steps."""
    found = []
    for batch in BATCHES:
        here = replace(problem, batch=batch, k=8)
        lrs = [fraction * here.stability_limit for fraction in FRACTIONS]
        logs = _log_losses(here, lrs, rules=("sgd", "vr"))[:, 0]
        half = (
            share
            for share, sgd, vr in zip(FRACTIONS, logs[0], logs[1], strict=True)
            if (steps := steps_to(vr, sgd[-1])) is not None and steps <= problem.steps / 2
        )
        found.append(
            {
                "batch": batch,
                "k": 8,
                "stability_limit": here.stability_limit,
                "sgd": _best(logs[0], lrs, logs[0, :, -1].min()),
                "vr": _best(logs[1], lrs, logs[0, :, -1].min()),
                "half_the_steps_from": next(half, None),
            }
        )
    return found


def _log_losses(problem: Problem, lrs: Sequence[float], **options: Any) -> Tensor:
    """Logarithm of the geometric mean over seeds, `[rules, gammas, lrs, steps + 1]`; inf where it diverged."""
    return simulate(problem, lrs, **options).log().mean(-2).nan_to_num(nan=torch.inf)


def _best(logs: Tensor, lrs: Sequence[float], goal: Tensor) -> dict[str, Any]:
    """The best learning rate of `[lrs, steps + 1]`, and after how many steps it has reached the goal."""
    place = int(logs[:, -1].argmin())
    return {"lr": lrs[place], "log10_loss": _log10(logs[place, -1]), "steps": steps_to(logs[place], goal)}


def steps_to(curve: Tensor, goal: Tensor) -> int | None:
    """The first step at which the curve is at the goal or below; None if it never is."""
    reached = (curve <= goal).nonzero()
    return int(reached[0]) if len(reached) else None


def _log10(value: Tensor) -> float:
    return float(value / torch.tensor(10.0).log())


# -- in words -------------------------------------------------------------------------------------------------------

LABELS = {"sgd": "SGD", "vr": "VR-SGD", "uncapped": "without cap"}


def format_regression(result: dict[str, Any]) -> str:
    """The result as text: what was chosen, then tables and curves for each kind of inputs, and other batches."""
    steps = result["steps"]
    lines = [
        f"{result['dimension']} weights W_i = i from 0, y = W·x, {steps} steps, batch {result['batch']} in k = "
        f"{result['k']} parts, gamma {result['gamma']}; geometric means over {result['seeds']} seeds",
        f"loss: after {steps} steps; steps: until the loss is what SGD's is after {steps} at the same learning rate "
        "(0: SGD diverged)",
        "VR-SGD: factors clipped to [gamma, 1], as the paper has it. Without cap: clipped from below only.",
        "",
        *_answers(result),
    ]
    for inputs, found in result["inputs"].items():
        kind = "standard normal" if inputs == "normal" else "uniform on [0, 1]"
        lines += ["", f"x {kind}; SGD is stable below lr {found['stability_limit']:.4g}", ""]
        lines += [_learning_rate_table(found["learning_rates"]), "", *_best_lines(found["best"])]
        for name, label in (("gammas", "gamma"), ("parts", "k")):
            lines += ["", f"each {label} at its best learning rate; steps as above", ""]
            lines += [_value_table(label, found[name])]
    return "\n".join([*lines, "", "x standard normal, k = 8, other batches", "", _batch_table(result["batches"])])


def _answers(result: dict[str, Any]) -> list[str]:
    """Where half the steps do what all of them did for SGD, which is what the paper claims."""
    lines = []
    for inputs, found in result["inputs"].items():
        for rule in RULES[1:]:
            rows = [row for row in found["learning_rates"] if row[rule]["steps"] is not None]
            halved = [row["lr"] for row in rows if 0 < row[rule]["steps"] <= 0.55 * result["steps"]]
            where = f"at lr {', '.join(f'{lr:g}' for lr in halved)}" if halved else "at no learning rate"
            limit = f"; SGD diverges from {found['stability_limit']:.4g} on" if halved else ""
            lines.append(f"x {inputs}, {LABELS[rule]}: SGD's loss in about half the steps {where}{limit}")
    return lines


def _learning_rate_table(found: list[dict[str, Any]]) -> str:
    rows = [["lr", "SGD, loss", "VR-SGD, loss", "steps", "without cap, loss", "steps"]]
    for row in found:
        cells = [f"{row['lr']:g}", _loss_text(row["sgd"])]
        for rule in RULES[1:]:
            cells += [_loss_text(row[rule]), _steps_text(row[rule]["steps"])]
        rows.append(cells)
    return markdown_table(rows)


def _best_lines(best: dict[str, Any]) -> list[str]:
    """One line a rule, all on one scale."""
    columns = range(0, len(next(iter(best.values()))["curve"]), 2)
    points = [found["curve"][column] for found in best.values() for column in columns]
    drawn = sparkline(points, width=len(points))
    lines = ["each at its best learning rate, and the steps until its loss is SGD's last:"]
    for place, (rule, found) in enumerate(best.items()):
        curve = drawn[place * len(columns) : (place + 1) * len(columns)]
        steps = "" if rule == "sgd" else f", steps: {_steps_text(found['steps'])}"
        lines.append(f"  {LABELS[rule]:<12} {curve} {_loss_text(found)} at lr {found['lr']:g}{steps}")
    return lines


def _value_table(label: str, found: list[dict[str, Any]]) -> str:
    rows = [[label, "VR-SGD, best loss", "lr", "steps", "without cap, best loss", "lr", "steps"]]
    for row in found:
        best = [row[rule] for rule in RULES[1:]]
        cells = [text for one in best for text in (_loss_text(one), f"{one['lr']:g}", _steps_text(one["steps"]))]
        rows.append([f"{row['value']:g}", *cells])
    return markdown_table(rows)


def _batch_table(found: list[dict[str, Any]]) -> str:
    rows = [["batch", "SGD, best loss", "lr", "VR-SGD, best loss", "lr", "half of SGD's steps at the same lr"]]
    for row in found:
        cells = [text for rule in ("sgd", "vr") for text in (_loss_text(row[rule]), f"{row[rule]['lr']:.3g}")]
        share = row["half_the_steps_from"]
        rows.append([str(row["batch"]), *cells, "never" if share is None else f"from {share:g} of the stable limit"])
    return markdown_table(rows)


def _loss_text(found: dict[str, Any]) -> str:
    return f"1e{found['log10_loss']:+.1f}"


def _steps_text(steps: int | None) -> str:
    return "never" if steps is None else str(steps)
