# ruff: noqa: D102, D103 - the name of a case says what it is
"""The cases: one function each, that trains with the bug or without it and returns a test error (lower is better).

Cases of StackOverflow posts come from the benchmark of DeepFD (ICSE 2022): what was wrong and what fixed it, translated
to PyTorch and to synthetic data of the same kind and scale. The others are mistakes of today's training loops.
The accepted causes were written down with the case, before any rule was tried on it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.real_bugs.data import (
    binary,
    cnn,
    curve,
    images,
    mixed_units,
    mlp,
    regression,
    sentences,
    sequences,
    tabular,
    text,
    xor,
)
from benchmarks.real_bugs.loop import Knobs, adam, batches, fit, sgd, unexplained, wrong, wrong_binary

Train = Callable[[bool, Knobs], float]


@dataclass(frozen=True)
class Case:
    """A bug and its fix."""

    name: str
    labels: tuple[str, ...]
    """Causes that are right, of `judge.CAUSES`."""
    train: Train
    post: str
    half: str
    """``tune`` if rules were tuned on it, ``held`` if not, ``blind`` if its author had not read the rules."""


CASES: dict[str, Case] = {}


def case(*labels: str, post: str = "", half: str = "") -> Callable[[Train], Train]:
    """Register a case. Halves alternate in the order of the file, unless the case says its own."""

    def add(train: Train) -> Train:
        name = train.__name__
        CASES[name] = Case(name, labels, train, post, half or ("held" if len(CASES) % 2 else "tune"))
        return train

    return add


cross_entropy, mse, mae, bce, bce_logits = (
    functional.cross_entropy,
    functional.mse_loss,
    functional.l1_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)


def one_hot(y: Tensor, classes: int) -> Tensor:
    """Returns classes as rows of 0 and 1."""
    return functional.one_hot(y, classes).float()


def keras_cross_entropy(p: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of probabilities, as Keras computes it."""
    return -(one_hot(y, p.shape[1]) * p.clamp(1e-7, 1 - 1e-7).log()).sum(1).mean()


# -- from StackOverflow ----------------------------------------------------------------------------------------------


@case("no_nonlinearity", "loss_mismatch", "lr_high", post="48385830")
def linear_mse_on_classes(bug: bool, k: Knobs) -> float:
    train, test = images()
    hidden = (nn.Flatten(), *mlp(100, 30, 6, act=None if bug else nn.Sigmoid))
    model = nn.Sequential(*hidden)
    loss = (lambda p, y: mse(p, one_hot(y, 6))) if bug else cross_entropy
    fit(model, sgd(model, k, 3.0 if bug else 0.5), loss, train, k, steps=500)
    return wrong(model, test)


@case("lr_low", "too_early", post="44164749")
def few_epochs_at_a_low_rate(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = mlp(8, 32, 32, 4)
    fit(model, sgd(model, k, 0.003 if bug else 0.2), cross_entropy, train, k, steps=200 if bug else 600)
    return wrong(model, test)


@case("lr_low", "too_early", post="31556268")
def xor_stopped_early(bug: bool, k: Knobs) -> float:
    data = xor()
    model = nn.Sequential(*mlp(2, 8, 1, act=nn.Sigmoid), nn.Sigmoid())
    fit(model, sgd(model, k, 0.3 if bug else 2.0, 0.11), mse, data, k, steps=200 if bug else 2000, batch=4)
    with torch.no_grad():
        return float(mse(model(data[0]), data[1]))


@case("output_activation", "targets_range", post="48251943")
def relu_output_for_signed_targets(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = regression()
    y, test_y = torch.tanh(y), torch.tanh(test_y)
    model = nn.Sequential(*mlp(8, 32, 1), nn.ReLU() if bug else nn.Tanh())
    fit(model, adam(model, k, 3e-3), mse, (x, y), k, steps=500)
    return unexplained(model, (test_x, test_y))


@case("output_activation", "loss_mismatch", post="38648195")
def softmax_and_mse_on_binary_labels(bug: bool, k: Knobs) -> float:
    train, test = binary()
    model = nn.Sequential(*mlp(8, 16, 1), nn.Softmax(dim=1) if bug else nn.Sigmoid())
    fit(model, adam(model, k, 3e-3), mse if bug else bce, train, k, steps=500)
    return wrong_binary(model, test)


@case("output_activation", post="31880720")
def softmax_of_one_unit(bug: bool, k: Knobs) -> float:
    train, test = binary(4)
    model = nn.Sequential(*mlp(4, 12, 8, 1), nn.Softmax(dim=1) if bug else nn.Sigmoid())
    fit(model, adam(model, k, 3e-3), bce, train, k, steps=400 if bug else 600)
    return wrong_binary(model, test)


@case("inputs_scale", "output_activation", post="39525358")
def unscaled_columns_without_sigmoid(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = binary()
    if bug:
        x, test_x = k.scaled("inputs", mixed_units(x), mixed_units(test_x))
    model = mlp(8, 16, 1) if bug else nn.Sequential(*mlp(8, 16, 1), nn.Sigmoid())

    def loss(p: Tensor, y: Tensor) -> Tensor:
        p = p.clamp(1e-7, 1 - 1e-7)
        return -(y * p.log() + (1 - y) * (1 - p).log()).mean()

    fit(model, adam(model, k, 1e-3 if bug else 5e-3), loss, (x, y), k, steps=500)
    return wrong_binary(model, (test_x, test_y))


@case("lr_high", "targets_scale", post="48934338")
def large_values_diverge(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = regression(4)
    x, y, test_x, test_y = 3 * x, 20 * y + 60, 3 * test_x, 20 * test_y + 60
    y, test_y = k.scaled("targets", y, test_y)
    model = mlp(4, 32, 1)
    fit(model, sgd(model, k, 0.1 if bug else 2e-4, 0.0), mse, (x, y), k, steps=600)
    return unexplained(model, (test_x, test_y))


@case("inputs_scale", post="47724077")
def mixed_units_under_adam(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = tabular(3)
    if bug:
        x, test_x = k.scaled("inputs", mixed_units(x), mixed_units(test_x))
    model = mlp(8, 32, 3)
    fit(model, adam(model, k, 2e-3), cross_entropy, (x, y), k, steps=500)
    return wrong(model, (test_x, test_y))


@case("inputs_scale", "targets_scale", post="52800582")
def curve_in_the_thousands(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = curve()
    if bug:
        x, test_x = k.scaled("inputs", 3000 + 2000 * x, 3000 + 2000 * test_x)
        y, test_y = k.scaled("targets", 5000 * y, 5000 * test_y)
    model = mlp(1, 32, 32, 1)
    fit(model, adam(model, k, 5e-3), mse, (x, y), k, steps=600)
    return unexplained(model, (test_x, test_y))


@case("loss_mismatch", "output_activation", "outputs_count", post="50079585")
def one_sigmoid_for_three_classes(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = tabular(3)
    if bug:
        model = nn.Sequential(*mlp(8, 24, 1), nn.Sigmoid())

        def loss(p: Tensor, y: Tensor) -> Tensor:
            p, y = p.clamp(1e-7, 1 - 1e-7), y.float()[:, None]
            return -(y * p.log() + (1 - y) * (1 - p).log()).mean()

        fit(model, adam(model, k, 3e-3), loss, (x, y), k, steps=500)
        with torch.no_grad():
            return float(((model(test_x)[:, 0] * 2).round().long() != test_y).float().mean())
    model = mlp(8, 24, 3)
    fit(model, adam(model, k, 3e-3), cross_entropy, (x, y), k, steps=500)
    return wrong(model, (test_x, test_y))


@case("output_activation", "loss_mismatch", post="45337371")
def softmax_for_independent_labels(bug: bool, k: Knobs) -> float:
    x = torch.randn(1600, 8)
    y = (torch.tanh(x @ torch.randn(8, 5)) + 0.2 > 0).float()
    model = nn.Sequential(*mlp(8, 32, 5), nn.Softmax(dim=1) if bug else nn.Sigmoid())
    fit(model, adam(model, k, 3e-3), bce, (x[:1000], y[:1000]), k, steps=500)
    with torch.no_grad():
        return float(((model(x[1000:]) > 0.5) != (y[1000:] > 0.5)).float().mean())


@case("inputs_scale", post="44066044")
def unscaled_columns_in_regression(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = regression()
    if bug:
        x, test_x = k.scaled("inputs", mixed_units(x), mixed_units(test_x))
    model = mlp(8, 32, 16, 1)
    fit(model, adam(model, k, 2e-3), mse, (x, y), k, steps=600)
    return unexplained(model, (test_x, test_y))


@case("output_activation", post="45337371b")
def relu_before_cross_entropy(bug: bool, k: Knobs) -> float:
    train, test = images(10, noise=0.35)
    model = nn.Sequential(*cnn(10), nn.ReLU()) if bug else cnn(10)
    fit(model, sgd(model, k, 0.1, 0.9), cross_entropy, train, k, steps=400)
    return wrong(model, test)


@case("loss_mismatch", "lr_low", "too_early", post="45442843")
def mae_with_rmsprop_stalls(bug: bool, k: Knobs) -> float:
    train, test = regression()
    model = mlp(8, 32, 1)
    lr = k("lr", 1e-4 if bug else 5e-3)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=lr) if bug else torch.optim.Adam(model.parameters(), lr=lr)
    fit(model, optimizer, mae if bug else mse, train, k, steps=400)
    return unexplained(model, test)


@case("loss_mismatch", "outputs_count", "output_activation", post="58609115")
def cross_entropy_on_one_unit(bug: bool, k: Knobs) -> float:
    (x, y), test = binary()
    model = mlp(8, 16, 1)
    if bug:
        fit(model, adam(model, k, 3e-3), cross_entropy, (x, y), k, steps=400)
    else:
        fit(model, adam(model, k, 3e-3), bce_logits, (x, y), k, steps=400)
    return wrong_binary(model, test, 0.0)


@case("lr_low", "too_early", post="56380303")
def deep_cnn_with_sgd_defaults(bug: bool, k: Knobs) -> float:
    train, test = images(6)
    layers: list[nn.Module] = [nn.Conv2d(1, 12, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(12, 12, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(108, 6))
    optimizer = sgd(model, k, 0.001) if bug else adam(model, k, 3e-3)
    fit(model, optimizer, cross_entropy, train, k, steps=300)
    return wrong(model, test)


@case("lr_high", post="58237726")
def cnn_rate_too_high_adam(bug: bool, k: Knobs) -> float:
    train, test = images(6)
    model = cnn(6)
    fit(model, adam(model, k, 0.1 if bug else 2e-3), cross_entropy, train, k, steps=400)
    return wrong(model, test)


@case("lr_high", post="37624102")
def cnn_momentum_jumps(bug: bool, k: Knobs) -> float:
    train, test = images(6)
    model = cnn(6, 12)
    fit(model, sgd(model, k, 0.8 if bug else 0.03, 0.9), cross_entropy, train, k, steps=400)
    return wrong(model, test)


@case("batch_small", "loss_mismatch", "too_early", post="41600519")
def single_samples_and_bce_on_numbers(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = regression()
    y, test_y = torch.sigmoid(2 * y), torch.sigmoid(2 * test_y)
    model = nn.Sequential(*mlp(8, 24, 1), nn.Sigmoid())
    optimizer = sgd(model, k, 0.01) if bug else adam(model, k, 5e-3)
    fit(model, optimizer, bce if bug else mse, (x, y), k, steps=400 if bug else 600, batch=1 if bug else 32)
    return unexplained(model, (test_x, test_y))


class Recurrent(nn.Module):
    """An LSTM or RNN and a linear layer on its last state."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.RNN] = nn.LSTM, hidden: int = 24, inputs: int = 1) -> None:
        super().__init__()
        self.rnn = kind(inputs, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]


@case("lr_low", "too_early", post="41977498")
def sequence_with_rmsprop_defaults(bug: bool, k: Knobs) -> float:
    train, test = sequences()
    model = Recurrent()
    lr = k("lr", 2e-4 if bug else 0.01)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=lr) if bug else torch.optim.Adam(model.parameters(), lr=lr)
    fit(model, optimizer, mse, train, k, steps=200 if bug else 500)
    return unexplained(model, test)


@case("lr_low", "too_early", post="44998910")
def linear_regression_too_slow(bug: bool, k: Knobs) -> float:
    x = torch.randn(1000, 4)
    y = x @ torch.tensor([[2.0], [-3.0], [1.0], [0.5]]) + 4 + 0.1 * torch.randn(1000, 1)
    model = nn.Linear(4, 1)
    fit(model, sgd(model, k, 5e-4 if bug else 0.03), mse, (x[:800], y[:800]), k, steps=300)
    return unexplained(model, (x[800:], y[800:]))


@case("inputs_scale", "targets_scale", "lr_high", post="46642627")
def raw_prices_to_nan(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = regression(4)
    if bug:
        x, test_x = k.scaled("inputs", 50 * x + 900, 50 * test_x + 900)
        y, test_y = k.scaled("targets", 80 * y + 1000, 80 * test_y + 1000)
    model = mlp(4, 24, 1)
    fit(model, sgd(model, k, 0.01) if bug else adam(model, k, 5e-3), mse, (x, y), k, steps=400)
    return unexplained(model, (test_x, test_y))


@case("inputs_scale", "targets_scale", post="47932589")
def raw_ranges_in_and_out(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = regression(4)
    if bug:
        x, test_x = k.scaled("inputs", 300 * x + 500, 300 * test_x + 500)
        y, test_y = k.scaled("targets", 400 * y + 2000, 400 * test_y + 2000)
    model = mlp(4, 32, 1, act=nn.Tanh)
    fit(model, adam(model, k, 5e-3), mse, (x, y), k, steps=500)
    return unexplained(model, (test_x, test_y))


@case("too_early", "lr_low", post="37213388")
def two_epochs(bug: bool, k: Knobs) -> float:
    train, test = images(10, noise=0.35)
    model = cnn(10)
    fit(model, adam(model, k, 3e-4), cross_entropy, train, k, steps=100 if bug else 900)
    return wrong(model, test)


@case("lr_high", post="FacialKeypoints")
def adam_at_a_tenth_on_image_regression(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = images(6)
    where = torch.randn(6, 4)
    model = cnn(4, 8)
    fit(model, adam(model, k, 0.1 if bug else 2e-3), mse, (x, where[y]), k, steps=400)
    return unexplained(model, (test_x, where[test_y]))


@case("memorizing", post="MovieReviews")
def memorizes_reviews(bug: bool, k: Knobs) -> float:
    train, test = sentences(300, 20, 900, 150)
    drop = k("dropout", 0.0 if bug else 0.6)
    model = nn.Sequential(
        nn.EmbeddingBag(300, 64), nn.Dropout(drop), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(drop), nn.Linear(64, 2)
    )
    optimizer = adam(model, k, 5e-3, 0.0 if bug else 0.3)
    steps = 400 if bug else 60
    fit(model, optimizer, nn.CrossEntropyLoss(), train, k, steps=steps, batch=16, validate=test)
    with torch.no_grad():
        return float(cross_entropy(model.eval()(test[0]), test[1]))


@case("dead_units", post="Traffic signs")
def relu_bottleneck_kills_inputs(bug: bool, k: Knobs) -> float:
    train, test = images(8)
    first = nn.Conv2d(1, 3, 1)
    with torch.no_grad():
        first.bias.fill_(-1.2 if bug else 0.0)  # type: ignore[union-attr]
    model = nn.Sequential(first, nn.ReLU() if bug else nn.ELU(), nn.Flatten(), *mlp(300, 32, 8))
    fit(model, adam(model, k, 1e-3), cross_entropy, train, k, steps=400)
    return wrong(model, test)


# -- mistakes of today's loops ---------------------------------------------------------------------------------------


@case("double_softmax", "output_activation", "loss_mismatch")
def softmax_before_cross_entropy(bug: bool, k: Knobs) -> float:
    train, test = images(10, noise=0.4)
    model = nn.Sequential(*cnn(10), nn.Softmax(dim=1)) if bug else cnn(10)
    fit(model, sgd(model, k, 0.05), cross_entropy, train, k, steps=400)
    return wrong(model, test)


@case("double_sigmoid", "output_activation", "loss_mismatch")
def sigmoid_before_bce_with_logits(bug: bool, k: Knobs) -> float:
    train, test = binary()
    model = nn.Sequential(*mlp(8, 24, 1), nn.Sigmoid()) if bug else mlp(8, 24, 1)
    fit(model, sgd(model, k, 0.1), bce_logits, train, k, steps=400)
    with torch.no_grad():
        p = model(test[0]) if bug else model(test[0]).sigmoid()
        return float(bce(p, test[1]))


class TwoPart(nn.Module):
    """An encoder and a head."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.encoder = mlp(8, 24, 24, act=nn.Tanh)
        self.head = nn.Linear(24, 4)
        self.detached = detached

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).tanh()
        return self.head(z.detach() if self.detached else z)  # type: ignore[no-any-return]


@case("no_gradient")
def detached_branch(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = TwoPart(detached=bug)
    fit(model, adam(model, k, 3e-3), cross_entropy, train, k, steps=400)
    return wrong(model, test)


@case("not_in_optimizer", "no_gradient", "unchanged")
def head_replaced_after_the_optimizer(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = TwoPart()
    optimizer = adam(model, k, 3e-3)
    model.encoder = mlp(8, 24, 24, act=nn.Tanh)
    if not bug:
        optimizer = adam(model, k, 3e-3)
    fit(model, optimizer, cross_entropy, train, k, steps=400)
    return wrong(model, test)


@case("not_in_optimizer", "unchanged")
def encoder_missing_from_param_groups(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = TwoPart()
    fit(model, adam(model.head if bug else model, k, 3e-3), cross_entropy, train, k, steps=400)
    return wrong(model, test)


@case("stale_gradients")
def zero_grad_forgotten(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = mlp(8, 32, 4)
    optimizer, source = sgd(model, k, 0.05), batches(train, 32)
    for _ in range(400):
        x, y = next(source)
        if not bug:
            optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return wrong(model, test)


@case("zeroed_before_step", "no_gradient", "unchanged")
def zero_grad_between_backward_and_step(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = mlp(8, 32, 4)
    optimizer, source = adam(model, k, 3e-3), batches(train, 32)
    for _ in range(300):
        x, y = next(source)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if bug:
            optimizer.zero_grad()
        optimizer.step()
    return wrong(model, test)


@case("lr_high", "loss_scale")
def accumulation_without_dividing(bug: bool, k: Knobs) -> float:
    train, test = regression()
    model = mlp(8, 64, 64, 1)
    optimizer, source = sgd(model, k, 0.1, 0.9), batches(train, 8)
    for _ in range(300):
        optimizer.zero_grad()
        for _ in range(16):
            x, y = next(source)
            loss = mse(model(x), y)
            (loss if bug else loss / 16).backward()
        optimizer.step()
    return unexplained(model, test)


@case("lr_high")
def adam_at_100_times(bug: bool, k: Knobs) -> float:
    train, test = tabular(5, 16, 2200)
    model = mlp(16, 128, 128, 5)
    fit(model, adam(model, k, 0.1 if bug else 1e-3), cross_entropy, train, k, steps=600, batch=64)
    return wrong(model, test)


@case("lr_high")
def sgd_at_30_times(bug: bool, k: Knobs) -> float:
    train, test = tabular(5, 16)
    model = mlp(16, 64, 64, 5)
    fit(model, sgd(model, k, 3.0 if bug else 0.1, 0.9 if bug else 0.0), cross_entropy, train, k, steps=400)
    return wrong(model, test)


@case("lr_low", "too_early")
def adam_100_times_too_low(bug: bool, k: Knobs) -> float:
    train, test = images(6)
    model = cnn(6)
    fit(model, adam(model, k, 1e-5 if bug else 2e-3), cross_entropy, train, k, steps=400)
    return wrong(model, test)


class Transformer(nn.Module):
    """A small language model, normalized after each layer."""

    def __init__(self, vocabulary: int = 24, width: int = 32, layers: int = 4, pre: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=pre)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.embedding(x) + self.position[: x.shape[1]]
        return self.out(self.blocks(h, mask=mask, is_causal=True))  # type: ignore[no-any-return]


def language_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy over all positions."""
    return cross_entropy(logits.flatten(0, 1), y.flatten())


@case("warmup", "lr_high")
def transformer_without_warmup(bug: bool, k: Knobs) -> float:
    tokens = text()
    data, test = (tokens[:500, :-1], tokens[:500, 1:]), (tokens[500:, :-1], tokens[500:, 1:])
    model = Transformer(layers=6)
    optimizer = adam(model, k, 1e-2)
    warm = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: 1.0 if bug else 0.3 * min((s + 1) / 80, 1.0) * max(0.05, 1 - s / 300)
    )
    fit(model, optimizer, language_loss, data, k, steps=300, schedule=warm)
    with torch.no_grad():
        return float(language_loss(model.eval()(test[0]), test[1]))


@case("schedule_zero", "lr_low")
def cosine_ends_too_soon(bug: bool, k: Knobs) -> float:
    train, test = images(8, noise=0.35)
    model = cnn(8)
    optimizer = sgd(model, k, 0.05)
    length = 50 if bug else 600
    cosine = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * min(s / length, 1))))
    fit(model, optimizer, cross_entropy, train, k, steps=600, schedule=cosine)
    return wrong(model, test)


@case("dropout")
def dropout_of_nine_tenths(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    drop = k("dropout", 0.9 if bug else 0.1)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Dropout(drop), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(drop), nn.Linear(32, 4)
    )
    fit(model, adam(model, k, 3e-3), cross_entropy, train, k, steps=500)
    return wrong(model, test)


@case("dead_units", "initialization")
def dead_relus_from_the_start(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = mlp(8, 64, 64, 4)
    if bug:
        for layer in (model[0], model[2]):
            nn.init.normal_(layer.weight, std=0.05)  # type: ignore[arg-type]
            nn.init.constant_(layer.bias, -1.0)  # type: ignore[arg-type]
    fit(model, adam(model, k, 1e-3), cross_entropy, train, k, steps=400)
    return wrong(model, test)


@case("initialization", "dead_units", "lr_high")
def initialization_at_ten_times(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = mlp(8, 64, 64, 4)
    if bug:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(10)
    fit(model, adam(model, k, 1e-3), cross_entropy, train, k, steps=400)
    return wrong(model, test)


@case("vanishing")
def sigmoid_stack_of_twelve(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = mlp(8, *[24] * 12, 4, act=nn.Sigmoid if bug else nn.ReLU)
    fit(model, adam(model, k, 2e-3), cross_entropy, train, k, steps=500)
    return wrong(model, test)


@case("labels_mismatch")
def labels_shuffled_against_inputs(bug: bool, k: Knobs) -> float:
    (x, y), test = tabular(4, 8, 4600)
    x, y = torch.cat([x, test[0][:3000]]), torch.cat([y, test[1][:3000]])
    if bug:
        y = y[torch.randperm(len(y))]
    model = mlp(8, 24, 4)
    fit(model, adam(model, k, 3e-3), cross_entropy, (x, y), k, steps=500)
    return wrong(model, (test[0][3000:], test[1][3000:]))


@case("inputs_scale")
def inputs_from_0_to_255(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = images(8, noise=0.35)
    if bug:
        x, test_x = k.scaled("inputs", (255 * x).round(), (255 * test_x).round())
    model = cnn(8)
    fit(model, sgd(model, k, 0.05, 0.9), cross_entropy, (x, y), k, steps=400)
    return wrong(model, (test_x, test_y))


@case("nan_in_data")
def one_nan_sample(bug: bool, k: Knobs) -> float:
    (x, y), test = tabular(4)
    if bug:
        x = x.clone()
        x[637, 3] = math.nan
    model = mlp(8, 32, 4)
    fit(model, adam(model, k, 3e-3), cross_entropy, (x, y), k, steps=300)
    return wrong(model, test)


@case("log_of_zero")
def log_of_zero_in_the_loss(bug: bool, k: Knobs) -> float:
    train, test = binary()
    model = nn.Sequential(*mlp(8, 64, 1), nn.Sigmoid())

    def loss(p: Tensor, y: Tensor) -> Tensor:
        p = p if bug else p.clamp(1e-6, 1 - 1e-6)
        return -(y * p.log() + (1 - y) * (1 - p).log()).mean()

    fit(model, adam(model, k, 0.05), loss, (3 * train[0], train[1]), k, steps=800)
    return wrong_binary(model, (3 * test[0], test[1]))


@case("nan_in_data", "zero_std")
def division_by_a_std_of_zero(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = tabular(4)
    x[:, 5], test_x[:, 5] = 1.0, 1.0
    std = x.std(0) if bug else x.std(0).clamp_min(1e-6)
    x, test_x = (x - x.mean(0)) / std, (test_x - x.mean(0)) / std
    model = mlp(8, 32, 4)
    fit(model, adam(model, k, 3e-3), cross_entropy, (x, y), k, steps=200)
    return wrong(model, (test_x, test_y))


@case("explosion", "clipping", "lr_high", "initialization")
def exploding_rnn_without_clipping(bug: bool, k: Knobs) -> float:
    train, test = sequences(30)
    model = Recurrent(nn.RNN, 32)
    model.rnn.nonlinearity = "tanh"
    with torch.no_grad():
        weight = dict(model.rnn.named_parameters())["weight_hh_l0"]
        nn.init.orthogonal_(weight).mul_(1.6)
    fit(model, sgd(model, k, 0.05, 0.9), mse, train, k, steps=400, clip=None if bug else 0.5)
    return unexplained(model, test)


@case("float16")
def float16_weights(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = tabular(4)
    kind = torch.float16 if bug else torch.float32
    model = mlp(8, 32, 4).to(kind)
    fit(model, adam(model, k, 3e-3), cross_entropy, (x.to(kind), y), k, steps=300)
    return wrong(model, (test_x.to(kind), test_y))


@case("rounding", "unchanged", "lr_low")
def bfloat16_updates_round_to_nothing(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = tabular(4)
    kind = torch.bfloat16 if bug else torch.float32
    model = mlp(8, 64, 64, 4).to(kind)
    fit(model, adam(model, k, 2e-4), cross_entropy, (x.to(kind), y), k, steps=1500)
    return wrong(model, (test_x.to(kind), test_y))


@case("batch_norm_small", "batch_small")
def batch_norm_with_two_samples(bug: bool, k: Knobs) -> float:
    (x, y), test = tabular(4)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    fit(model, adam(model, k, 3e-3), cross_entropy, (x, y), k, steps=500, batch=2 if bug else 32)
    return wrong(model, test)


@case("momentum", "lr_high")
def momentum_of_0_999(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = mlp(8, 32, 4)
    fit(model, sgd(model, k, 0.05, 0.999 if bug else 0.9), cross_entropy, train, k, steps=500)
    return wrong(model, test)


@case("weight_decay")
def weight_decay_of_one(bug: bool, k: Knobs) -> float:
    train, test = images(6)
    model = cnn(6)
    fit(model, sgd(model, k, 0.05, 0.9, 1.0 if bug else 1e-4), cross_entropy, train, k, steps=400)
    return wrong(model, test)


@case("frozen")
def frozen_and_never_thawed(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = TwoPart()
    for parameter in model.encoder.parameters():
        parameter.requires_grad_(not bug)
    fit(model, adam(model, k, 3e-3), cross_entropy, train, k, steps=400)
    return wrong(model, test)


@case("same_batch")
def same_batch_every_step(bug: bool, k: Knobs) -> float:
    train, test = images(8, noise=0.35)
    model = cnn(8)
    optimizer, source = adam(model, k, 2e-3), batches(train, 32)
    for _ in range(300):
        x, y = (train[0][:32], train[1][:32]) if bug else next(source)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return wrong(model, test)


@case("wrong_model", "no_gradient", "unchanged", "not_in_optimizer")
def copy_trained_instead_of_the_model(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = mlp(8, 32, 4)
    trained = copy.deepcopy(model)
    optimizer = adam(trained if bug else model, k, 3e-3)
    source = batches(train, 32)
    for _ in range(300):
        x, y = next(source)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        if bug:
            for own, other in zip(trained.parameters(), model.parameters(), strict=True):
                own.grad = torch.zeros_like(own) if own.grad is None else own.grad
                del other
        optimizer.step()
    return wrong(model, test)


@case("broadcast", "loss_mismatch")
def targets_broadcast_against_outputs(bug: bool, k: Knobs) -> float:
    (x, y), test = regression()
    model = mlp(8, 32, 1)
    fit(model, adam(model, k, 3e-3), lambda p, y: (p - y).square().mean(), (x, y[:, 0] if bug else y), k, steps=400)
    return unexplained(model, test)


@case("sorted_data")
def samples_sorted_by_class(bug: bool, k: Knobs) -> float:
    (x, y), test = tabular(4)
    order = y.argsort()
    model = mlp(8, 32, 4)
    fit(model, sgd(model, k, 0.1, 0.9), cross_entropy, (x[order], y[order]), k, steps=440, shuffle=not bug)
    return wrong(model, test)


@case("sigmoid_for_regression", "output_activation", "targets_range", "targets_scale")
def sigmoid_output_for_regression(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = regression()
    model = nn.Sequential(*mlp(8, 32, 1), nn.Sigmoid()) if bug else mlp(8, 32, 1)
    fit(model, adam(model, k, 3e-3), mse, (x, 3 * y + 5), k, steps=500)
    return unexplained(model, (test_x, 3 * test_y + 5))


@case("eval_mode")
def left_in_eval_mode(bug: bool, k: Knobs) -> float:
    train, test = images(8, noise=0.4)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 64),
        nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8),
    )  # fmt: skip
    if bug:
        model.eval()
    fit(model, sgd(model, k, 0.02), cross_entropy, (10 * train[0], train[1]), k, steps=300)
    return wrong(model, (10 * test[0], test[1]))


# -- mistakes that the graph of the loss shows ------------------------------------------------------------------------


class Tagger(nn.Module):
    """Scores for every token of a sequence."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 24)
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.out = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embedding(x))[0])  # type: ignore[no-any-return]


@torch.no_grad()
def wrong_tags(model: nn.Module, x: Tensor, y: Tensor, counted: Tensor | None = None) -> float:
    """Returns the share of the counted tags that are wrong."""
    missed = model.eval()(x).argmax(-1) != y
    return float((missed if counted is None else missed[counted]).float().mean())


@case("no_graph", "no_gradient", half="tune")
def loss_of_the_argmax(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = mlp(8, 32, 4)

    def loss_fn(p: Tensor, y: Tensor) -> Tensor:
        return mse(p.argmax(1).float(), y.float()).requires_grad_() if bug else cross_entropy(p, y)

    fit(model, adam(model, k, 3e-3), loss_fn, train, k, steps=300)
    return wrong(model, test)


@case("reshaped", half="tune")
def view_instead_of_transpose(bug: bool, k: Knobs) -> float:
    tokens, model = text(), Tagger(5)
    tags = tokens % 5

    def loss_fn(p: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(p.view(len(p), 5, -1) if bug else p.transpose(1, 2), y)

    fit(model, adam(model, k, 5e-3), loss_fn, (tokens[:500], tags[:500]), k, steps=300)
    return wrong_tags(model, tokens[500:], tags[500:])


@case("padding", half="tune")
def padding_counts_as_a_class(bug: bool, k: Knobs) -> float:
    tokens, model = text(23, 60), Tagger(6)
    real = torch.arange(61) < torch.randint(3, 9, (len(tokens), 1))
    tokens = (tokens + 1) * real
    tags = (1 + (tokens + tokens.roll(1, 1)) % 5) * real

    def loss_fn(p: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(p.flatten(0, 1), y.flatten(), ignore_index=-100 if bug else 0)

    fit(model, adam(model, k, 5e-3), loss_fn, (tokens[:500], tags[:500]), k, steps=150)
    return wrong_tags(model, tokens[500:], tags[500:], real[500:])


@case("copied_targets", half="tune")
def targets_are_not_shifted(bug: bool, k: Knobs) -> float:
    tokens, model = text(), Tagger(24)
    data = (tokens[:500, :-1], tokens[:500, :-1] if bug else tokens[:500, 1:])
    fit(model, adam(model, k, 5e-3), language_loss, data, k, steps=300)
    return wrong_tags(model, tokens[500:, :-1], tokens[500:, 1:])


@case("wrong_sign", half="tune")
def minus_before_the_error(bug: bool, k: Knobs) -> float:
    train, test = regression()
    model = mlp(8, 32, 1)
    fit(model, adam(model, k, 3e-3), lambda p, y: -mse(p, y) if bug else mse(p, y), train, k, steps=300)
    return unexplained(model, test)


class Distance(nn.Module):
    """The distance of two samples after a shared encoder."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.encoder, self.epsilon = mlp(8, 32, 8), epsilon

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.encoder(x[:, :8]), self.encoder(x[:, 8:])
        return ((a - b).square().sum(1, keepdim=True) + self.epsilon).sqrt()  # type: ignore[no-any-return]


@case("root_of_zero", half="tune")
def root_of_zero_in_a_distance(bug: bool, k: Knobs) -> float:
    (x, y), (test_x, test_y) = regression()
    pairs, far = torch.cat([x, x.roll(1, 0)], 1), (y - y.roll(1, 0)).abs()
    pairs[700, 8:], far[700] = x[700], 0.0  # a sample that is paired with itself
    model = Distance(0.0 if bug else 1e-6)
    fit(model, adam(model, k, 3e-3), mse, (pairs, far), k, steps=300)
    return unexplained(model, (torch.cat([test_x, test_x.roll(1, 0)], 1), (test_y - test_y.roll(1, 0)).abs()))


# -- written before the rules were read ------------------------------------------------------------------------------


@case("double_softmax", half="blind")
def softmax_and_one_hot_into_cross_entropy(bug: bool, k: Knobs) -> float:
    (x, y), test = images()
    model = nn.Sequential(nn.Flatten(), *mlp(100, 50, 6, act=nn.Sigmoid))
    end = nn.Softmax(1) if bug else nn.Identity()
    full = nn.Sequential(model, end)
    fit(full, sgd(full, k, 0.1), cross_entropy, (x, one_hot(y, 6)), k, steps=360)
    return wrong(full, test)


@case("loss_mismatch", "output_activation", half="blind")
def kl_divergence_of_probabilities(bug: bool, k: Knobs) -> float:
    (x, y), test = tabular(5)
    model = nn.Sequential(*mlp(8, 32, 5), nn.Softmax(1) if bug else nn.LogSoftmax(1))
    shares = 0.9 * one_hot(y, 5) + 0.02
    fit(model, adam(model, k, 3e-3), lambda p, y: functional.kl_div(p, y, reduction="batchmean"), (x, shares), k)
    return wrong(model, test)


@case("loss_mismatch", "targets_range", half="blind")
def labels_of_minus_one_under_bce(bug: bool, k: Knobs) -> float:
    (x, y), test = binary()
    model = mlp(8, 32, 1)
    fit(model, adam(model, k, 0.01), bce_logits, (x, 2 * y - 1 if bug else y), k, steps=600)
    return wrong_binary(model, test, 0.0)


class Reader(nn.Module):
    """A recurrent layer over sequences, and a linear one on one of its time steps."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], at: int, batch_first: bool) -> None:
        super().__init__()
        self.rnn, self.out, self.at = kind(1, 32, batch_first=batch_first), nn.Linear(32, 1), at

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, self.at])  # type: ignore[no-any-return]


@case("time_first", half="blind")
def batch_first_forgotten(bug: bool, k: Knobs) -> float:
    train, test = sequences()
    model = Reader(nn.LSTM, -1, batch_first=not bug)
    fit(model, adam(model, k, 5e-3), mse, train, k, steps=300)
    return unexplained(model, test)


@case("time_first", half="blind")
def first_time_step_is_read(bug: bool, k: Knobs) -> float:
    train, test = sequences()
    model = Reader(nn.GRU, 0 if bug else -1, batch_first=True)
    fit(model, adam(model, k, 5e-3), mse, train, k, steps=300)
    return unexplained(model, test)


@case("schedule_zero", half="blind")
def scheduler_stepped_for_every_batch(bug: bool, k: Knobs) -> float:
    train, test = images()
    model = cnn()
    optimizer = sgd(model, k, 0.02, 0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5 if bug else 5 * 31, 0.5)
    fit(model, optimizer, cross_entropy, train, k, steps=400, schedule=schedule)
    return wrong(model, test)


@case("clipping", half="blind")
def clipped_to_a_thousandth(bug: bool, k: Knobs) -> float:
    train, test = sequences()
    model = Reader(nn.GRU, -1, batch_first=True)
    fit(model, sgd(model, k, 0.1, 0.9), mse, train, k, steps=400, clip=1e-3 if bug else 1.0)
    return unexplained(model, test)


@case("hidden_softmax", half="blind")
def softmax_between_layers(bug: bool, k: Knobs) -> float:
    train, test = images()
    act = nn.Softmax(1) if bug else nn.ReLU()
    model = nn.Sequential(nn.Flatten(), nn.Linear(100, 64), act, nn.Linear(64, 64), act, nn.Linear(64, 6))
    fit(model, sgd(model, k, 0.1, 0.9), cross_entropy, train, k, steps=250)
    return wrong(model, test)


@case("too_early", "lr_low", half="blind")
def one_step_per_epoch(bug: bool, k: Knobs) -> float:
    train, test = tabular(5)
    model = mlp(8, 64, 5)
    size = 1000 if bug else 32
    fit(model, sgd(model, k, 0.1), cross_entropy, train, k, steps=30 * (1000 // size), batch=size)
    return wrong(model, test)


@case("log_of_zero", half="blind")
def log_of_zero_after_a_squeeze(bug: bool, k: Knobs) -> float:
    (x, _), (test_x, _) = binary()
    y, model = (x[:, :1] > 0).float(), nn.Sequential(*mlp(8, 32, 1), nn.Sigmoid())

    def loss_fn(p: Tensor, y: Tensor) -> Tensor:
        p = p.squeeze(1) if bug else p.squeeze(1).clamp(1e-6, 1 - 1e-6)
        return -(y[:, 0] * p.log() + (1 - y[:, 0]) * (1 - p).log()).mean()

    fit(model, adam(model, k, 0.03), loss_fn, (3 * x, y), k, steps=600)
    return wrong_binary(model, (3 * test_x, (test_x[:, :1] > 0).float()))


@case("initialization", half="blind")
def every_weight_zero(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    model = mlp(8, 32, 32, 4)
    for weight in model.parameters() if bug else ():
        nn.init.zeros_(weight)
    fit(model, sgd(model, k, 0.1), cross_entropy, train, k, steps=600)
    return wrong(model, test)


@case("capacity", half="blind")
def two_hidden_units(bug: bool, k: Knobs) -> float:
    train, test = tabular(4)
    units = 2 if bug else 64
    model = mlp(8, units, units, 4)
    fit(model, adam(model, k, 0.01), cross_entropy, train, k, steps=600)
    return wrong(model, test)


@case("penalty", half="blind")
def penalty_as_large_as_the_error(bug: bool, k: Knobs) -> float:
    train, test = regression()
    model = mlp(8, 64, 1, act=nn.Tanh)

    def loss_fn(p: Tensor, y: Tensor) -> Tensor:
        squares = torch.stack([weight.square().sum() for weight in model.parameters()])
        return mse(p, y) + (1.0 if bug else 1e-5) * squares.sum()

    fit(model, adam(model, k, 5e-3), loss_fn, train, k, steps=600)
    return unexplained(model, test)


@case("lr_high", half="tune")
def language_model_at_100_times(bug: bool, k: Knobs) -> float:
    tokens = text()
    data, test = (tokens[:500, :-1], tokens[:500, 1:]), (tokens[500:, :-1], tokens[500:, 1:])
    model = Transformer(layers=2, pre=True)
    fit(model, adam(model, k, 0.3 if bug else 3e-3, 0.1), language_loss, data, k, steps=300, clip=1.0)
    with torch.no_grad():
        return float(language_loss(model.eval()(test[0]), test[1]))
