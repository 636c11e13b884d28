"""Clicks from a known truth, a small DLRM that learns them in one pass, and its AUC beside the best there can be.

A click has 8 categories, whose ids are as unevenly frequent as words are (from 10 ids to 10,000, the i-th with
probability in proportion to 1/i^1.05), and 8 numbers. Its probability is a factorisation machine's: an effect of every
id, products of hidden vectors of every pair of categories, and of the numbers; a quarter are clicked. Everything is
drawn on the device as it is needed, so no sample is seen twice, and the AUC of the true probabilities is the ceiling.

An id that none of a step's samples has gets a gradient of zero. It has no variance, keeps the factor 1 and does not
enter the mean of r. An id that is in one of the k parts alone has r = 1 / (k - 1), whatever its gradient is:
`factors_by_frequency` shows where that puts rare ids beside frequent ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.vrgd.loop import Course, check_parts, train_steps
from experiments.vrgd.trial import Result, Trial
from gradvitals.bench import markdown_table
from gradvitals.errors import GradvitalsError
from gradvitals.functional import vrgd_scale_from_variance
from gradvitals.report.format import number

MODEL = "dlrm-small"
FIELD_SIZES = (10_000, 3_000, 1_000, 300, 100, 30, 10, 10)
NUM_DENSE = 8
EXPONENT = 1.05
CLICK_RATE = 0.25
WORLD_SEED = 2309
"""One truth for all trials: seeds differ in the samples drawn and in the first weights."""

TEST_SAMPLES = 2**19
TEST_SEED = 10**6
CURVE_SAMPLES = 2**17
CHUNK = 2**16

START_LR = {"sgd": 4.0, "momentum": 0.8, "adam": 0.01, "adamw": 0.01, "lamb": 0.04, "lars": 16.0}
"""Where a sweep begins at a batch of `START_BATCH`."""
START_BATCH = 16_384


@dataclass(frozen=True)
class Samples:
    """Some clicks."""

    ids: Tensor
    """`[samples, fields]`."""
    dense: Tensor
    """`[samples, NUM_DENSE]`."""
    clicked: Tensor
    """0 or 1, as floats."""
    probability: Tensor
    """The true one."""

    def __len__(self) -> int:
        return len(self.clicked)

    def parts(self, num_parts: int) -> list[Samples]:
        """The same in equal parts."""
        return [Samples(*some) for some in zip(*(column.chunk(num_parts) for column in self._columns), strict=True)]

    def first(self, number: int) -> Samples:
        """The first of them."""
        return Samples(*(column[:number] for column in self._columns))

    @property
    def observed(self) -> tuple[Tensor, Tensor, Tensor]:
        """All but the true probability."""
        return self.ids, self.dense, self.clicked

    @property
    def _columns(self) -> tuple[Tensor, ...]:
        return self.ids, self.dense, self.clicked, self.probability


class World:
    """The truth: how frequent every id is, and what makes people click."""

    def __init__(self, device: torch.device, *, field_sizes: tuple[int, ...] = FIELD_SIZES, rank: int = 4) -> None:
        self.device = device
        self.field_sizes = field_sizes
        generator = torch.Generator().manual_seed(WORLD_SEED)

        def normal(*shape: int, spread: float) -> Tensor:
            return (spread * torch.randn(shape, generator=generator)).to(device)

        effects = [normal(size, 1, spread=0.35) for size in field_sizes]
        hidden = [normal(size, rank, spread=0.35) for size in field_sizes]
        self._of_ids = torch.cat([torch.cat(effects), torch.cat(hidden)], dim=1)
        self._starts = _starts(field_sizes).to(device)
        self._dense_effect = normal(NUM_DENSE, spread=0.2)
        self._dense_hidden = normal(NUM_DENSE, rank, spread=0.15)
        self._cumulative = torch.stack([_cumulative(size, max(field_sizes)) for size in field_sizes]).to(device)
        self._last = torch.tensor(field_sizes, device=device) - 1
        self._bias = 0.0
        self._bias = self._find_bias()

    def draw(self, num_samples: int, generator: torch.Generator) -> Samples:
        """Fresh samples."""
        uniform = torch.rand(len(self.field_sizes), num_samples, generator=generator, device=self.device)
        dense = torch.randn(num_samples, NUM_DENSE, generator=generator, device=self.device)
        ids = torch.minimum(torch.searchsorted(self._cumulative, uniform).T, self._last).contiguous()
        probability = torch.sigmoid(self._logit(ids, dense))
        return Samples(ids, dense, torch.bernoulli(probability, generator=generator), probability)

    def _logit(self, ids: Tensor, dense: Tensor) -> Tensor:
        of_ids = self._of_ids[ids + self._starts]
        effects, vectors = of_ids[..., 0], of_ids[..., 1:]
        hidden = dense @ self._dense_hidden
        squares = hidden.square() + vectors.square().sum(1)
        products = ((hidden + vectors.sum(1)).square() - squares).sum(1) / 2  # of all pairs
        return self._bias + dense @ self._dense_effect + effects.sum(1) + products

    def _find_bias(self) -> float:
        """Bisect for the bias with which a quarter are clicked."""
        low, high = -20.0, 20.0
        for _ in range(30):
            self._bias = (low + high) / 2
            generator = torch.Generator(self.device).manual_seed(WORLD_SEED)
            rate = float(self.draw(CHUNK, generator).probability.mean())
            low, high = (self._bias, high) if rate < CLICK_RATE else (low, self._bias)
        return (low + high) / 2


def _cumulative(size: int, width: int) -> Tensor:
    """Of the ids of a field, filled up to a width with what no number drawn from [0, 1) reaches."""
    weights = torch.arange(1, size + 1, dtype=torch.float64) ** -EXPONENT
    return F.pad((weights.cumsum(0) / weights.sum()).float(), (0, width - size), value=2.0)


def _starts(field_sizes: tuple[int, ...]) -> Tensor:
    """Where the ids of each field begin, if all are numbered in one go."""
    sizes = torch.tensor(field_sizes)
    return sizes.cumsum(0) - sizes


class SmallDLRM(nn.Module):
    """Embeddings and the output of an MLP on the numbers, their products in pairs, and an MLP on those."""

    pairs: Tensor
    starts: Tensor

    def __init__(self, field_sizes: tuple[int, ...] = FIELD_SIZES, *, width: int = 16) -> None:
        super().__init__()
        embeddings = [nn.Embedding(size, width) for size in field_sizes]
        for embedding in embeddings:
            # DLRM begins with less in large tables, from which SGD does not get away in some hundred steps.
            nn.init.normal_(embedding.weight, std=0.1)
        self.tables = nn.ModuleList(embeddings)
        num_vectors = len(field_sizes) + 1
        self.bottom = _mlp(NUM_DENSE, 64, width)
        self.top = _mlp(width + num_vectors * (num_vectors - 1) // 2, 64, 32, 1)
        first, second = torch.tril_indices(num_vectors, num_vectors, -1).unbind(0)
        self.register_buffer("pairs", num_vectors * first + second, persistent=False)
        self.register_buffer("starts", _starts(field_sizes), persistent=False)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """The logit of a click."""
        bottom = self.bottom(dense)
        # In one go: torch's gradient of an embedding is slow for few ids, and eight times as slow for eight tables.
        embedded = F.embedding(ids + self.starts, torch.cat(list(self.tables.parameters())))
        vectors = torch.cat([bottom.unsqueeze(1), embedded], dim=1)
        products = (vectors @ vectors.mT).flatten(1).index_select(1, self.pairs)
        logit: Tensor = self.top(torch.cat([bottom, products], dim=1))
        return logit.squeeze(1)


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def auc(score: Tensor, clicked: Tensor) -> float:
    """The share of pairs of a clicked and an unclicked sample in which the clicked one has the higher score.

    Exact, from ranks; a pair with equal scores counts half. Nan where there is no such pair.
    """
    ordered, order = score.double().sort()
    _, place, counts = ordered.unique_consecutive(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1).double() / 2)[place]  # the mean rank of all that are equal
    positive = clicked[order].double()
    num_positive = positive.sum()
    num_negative = len(positive) - num_positive
    above = (ranks * positive).sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


def train_clicks(trial: Trial, *, device: str = "cpu", graphs: bool = True) -> Result:
    """Train one trial, on fresh samples that are seen once.

    Args:
        trial: What to train: `epochs` is in steps.
        device: Where.
        graphs: On a GPU, replay the passes of a step as one CUDA graph; see `graphs`.

    Returns:
        ``score``: the AUC on samples that no trial trains on; nan where the run diverged. ``ceiling``: that of the true
        probabilities. ``score@n``: the score after n steps, on fewer samples. ``loss``: mean of the last tenth of the
        steps, on samples that were just drawn; ``test_loss`` on the others.
    """
    model, course = fit(trial, torch.device(device), graphs=graphs)
    test = _test_samples(torch.device(device))
    logits = _logits(model, test)
    last = course.losses[-max(1, len(course.losses) // 10) :]
    result = {
        "score": math.nan if course.diverged else auc(logits, test.clicked),
        "loss": sum(last) / len(last),
        "test_loss": float(F.binary_cross_entropy_with_logits(logits, test.clicked)),
        "ceiling": ceiling(device),
        "chance": 0.5,
        "seconds": course.seconds,
        "steps": float(len(course.losses)),
    }
    return result | {f"score@{step}": score for step, score in course.curve.items()}


def ceiling(device: str) -> float:
    """The AUC of the true probabilities, on the samples that scores are measured on."""
    test = _test_samples(torch.device(device))
    return auc(test.probability, test.clicked)


def fit(trial: Trial, device: torch.device, *, graphs: bool = True) -> tuple[SmallDLRM, Course]:
    """The trained model, and how its training went."""
    if trial.model != MODEL:
        raise GradvitalsError(f"there is no model {trial.model!r}; expected {MODEL}")
    check_parts(trial)
    world, test = _world(device), _test_samples(device).first(CURVE_SAMPLES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)
        model = SmallDLRM(world.field_sizes)
    model = model.to(device)
    generator = torch.Generator(device).manual_seed(trial.seed)
    course = train_steps(
        trial,
        model,
        max(1, round(trial.epochs)),
        draw=lambda: world.draw(trial.batch, generator).observed,
        loss=lambda *observed: _loss(model, *observed),
        look=lambda: auc(_logits(model, test), test.clicked),
        graphs=graphs,
    )
    return model, course


def _loss(model: nn.Module, ids: Tensor, dense: Tensor, clicked: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(ids, dense), clicked)


@torch.no_grad()
def _logits(model: nn.Module, samples: Samples) -> Tensor:
    parts = samples.parts(max(1, len(samples) // CHUNK))
    return torch.cat([model(part.ids, part.dense) for part in parts])


@cache
def _world(device: torch.device) -> World:
    return World(device)


@cache
def _test_samples(device: torch.device) -> Samples:
    return _world(device).draw(TEST_SAMPLES, torch.Generator(device).manual_seed(TEST_SEED))


# -- what becomes of rare ids ---------------------------------------------------------------------------------------


def factors_by_frequency(trial: Trial, *, device: str = "cpu") -> list[dict[str, float]]:
    """Train, then look at one more step: the paper's factors of embeddings by how many of the k parts have their id.

    Returns:
        A row for each number of parts, from 0 to k, that some id was in: the share of all ids, their mean r, the same
        over the mean r of their table, and their mean factor.
    """
    place = torch.device(device)
    model, _ = fit(trial, place)
    generator = torch.Generator(place).manual_seed(TEST_SEED + 1)
    parts = _world(place).draw(trial.batch, generator).parts(trial.k)
    tables = list(model.tables.parameters())
    gradients = [torch.autograd.grad(_loss(model, *part.observed), tables) for part in parts]
    columns: dict[str, list[Tensor]] = {"seen": [], "r": [], "relative_r": [], "factor": []}
    for column, table in enumerate(zip(*gradients, strict=True)):
        stacked = torch.stack(table)
        mean, variance = stacked.mean(0), stacked.var(0, correction=0)
        ratio = torch.where(variance > 0, mean.square() / variance, torch.nan)
        columns["seen"].append(torch.stack([_is_there(part.ids[:, column], len(mean)) for part in parts]).sum(0))
        columns["r"].append(ratio.nanmean(1))
        columns["relative_r"].append((ratio / ratio.nanmean()).nanmean(1))
        columns["factor"].append(vrgd_scale_from_variance(mean, variance, trial.gamma).mean(1))
    seen, *values = (torch.cat(pieces) for pieces in columns.values())
    rows = []
    for count in range(trial.k + 1):
        those = seen == count
        if those.any():
            row = {"parts": float(count), "share_of_ids": float(those.double().mean())}
            means = [float(value[those].nanmean()) for value in values]
            rows.append(row | dict(zip(list(columns)[1:], means, strict=True)))
    return rows


def _is_there(ids: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.long, device=ids.device).index_fill_(0, ids, 1)


def format_factors(trial: Trial, rows: Sequence[Mapping[str, float]]) -> str:
    """The rows of `factors_by_frequency` as a Markdown table."""
    table = [["parts with the id", "share of ids", "r", "r / mean r", "factor"]]
    for row in rows:
        cells = [number(row[name]) for name in ("share_of_ids", "r", "relative_r", "factor")]
        table.append([f"{row['parts']:.0f} of {trial.k}", *cells])
    return f"embeddings after {trial.epochs:g} steps of {trial.batch}, gamma {trial.gamma}\n\n{markdown_table(table)}"
