from __future__ import annotations

import math
from typing import Any

import numpy as np
import probed
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradvitals as gv
from gradvitals.errors import GradvitalsError
from gradvitals.probe.batches import Subject, form_of
from gradvitals.probe.gradients import trainable
from gradvitals.probe.per_example import PerExample
from gradvitals.probe.samples import cosines_with_the_others, osgr, samples_record


def reader_of(model: nn.Module, loss_fn: Any, memory: int = 1 << 28) -> PerExample:
    return PerExample(Subject(model, loss_fn, form_of(loss_fn), torch.device("cpu")), trainable(model), memory)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Peeking(nn.Module):
    """What vmap cannot do: it looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return 2 * y if y.sum().item() > 0 else y


def cases() -> dict[str, tuple[nn.Module, Any, Any]]:
    torch.manual_seed(3)
    x, y = next(iter(probed.classes()))
    pictures = torch.randn(8, 1, 6, 6)
    conv_bn = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    conv_bn(pictures)
    return {
        "mlp": (probed.mlp(), nn.CrossEntropyLoss(), (x, y)),
        "convolution": (probed.ConvNet(), nn.CrossEntropyLoss(), (pictures, y)),
        "attention, own loss": (probed.Blocks(), None, probed.tokens(1, 8)[0]),
        "model, batch": (probed.mlp(), lambda model, batch: model(batch[0]).square().sum(), (x, y)),
        "regression": (nn.Linear(6, 2), nn.MSELoss(), {"x": x, "y": torch.randn(8, 2)}),
        "batch norm": (conv_bn, nn.CrossEntropyLoss(), (pictures, y)),
        "recurrent": (Recurrent(), nn.CrossEntropyLoss(), (torch.randn(8, 5, 3), y % 2)),
        "peeking": (Peeking(), nn.CrossEntropyLoss(), (x, y)),
        "tied and frozen": (probed.everything().eval(), nn.CrossEntropyLoss(), (x, y)),
    }


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("memory", [1 << 28, 4000])
def test_gradients_of_single_examples_are_those_of_a_loop(name: str, memory: int) -> None:
    model, loss_fn, batch = cases()[name]
    reader = reader_of(model, loss_fn, memory)
    reader.freeze_batch_norm()
    found = list(reader.chunks(batch, 8))
    assert reader.method == ("loop" if name == "peeking" else "vmap"), reader.why
    assert len(found) == math.ceil(8 / reader.chunk)
    losses = torch.cat([part for part, _ in found])
    for i in range(8):
        loss = reader.subject.loss(reader.subject.take(batch, i, i + 1))
        assert float(losses[i]) == pytest.approx(float(loss.detach()), rel=1e-5)
        expected = torch.autograd.grad(loss, list(reader.parameters.values()))
        for place, one in enumerate(expected):
            rows = torch.cat([grads[place] for _, grads in found])
            torch.testing.assert_close(rows[i], one, rtol=1e-5, atol=1e-5 * max(1e-3, float(one.abs().max())))


def test_their_mean_is_the_gradient_of_the_batch() -> None:
    model, loss_fn, batch = cases()["mlp"]
    [(_, grads)] = reader_of(model, loss_fn).chunks(batch, 8)
    whole = torch.autograd.grad(loss_fn(model(batch[0]), batch[1]), list(model.parameters()))
    for rows, expected in zip(grads, whole, strict=True):
        torch.testing.assert_close(rows.mean(0), expected)


def probe_samples(model: nn.Module, batches: Any, loss_fn: Any, **settings: Any) -> dict[str, Any]:
    found = gv.probe(model, batches, loss_fn, len(batches), questions="samples", progress=False, **settings)
    assert found.samples is not None, found.notes
    return found.samples


def test_the_noise_scale_of_linear_regression_is_known() -> None:
    # x ~ N(0, I_d), no label noise, loss (w x - y)^2 / 2: the noise scale is d + 1, wherever w stands.
    d, generator = 5, torch.Generator().manual_seed(0)
    x = torch.randn(4000, d, generator=generator)
    model = nn.Linear(d, 1, bias=False)
    batches = [(part, part.sum(1, keepdim=True)) for part in x.split(500)]
    found = probe_samples(model, batches, lambda out, y: 0.5 * (out - y).square().mean(), examples=4000)
    assert found["noise_scale"] == pytest.approx(d + 1, rel=0.1)
    assert found["noise_scale_low"] < d + 1 < found["noise_scale_high"]
    assert found["gsnr"] == pytest.approx(1 / (d + 1), rel=0.1)
    assert found["train_size"] == 4000
    assert found["osgr"] == pytest.approx(1 / (1 + (d + 1) / 4000), rel=1e-3)


def test_osgr_is_liu_et_als_sum() -> None:
    rng = np.random.default_rng(0)
    mu, rho2, n = rng.normal(size=7), rng.uniform(0.5, 3, size=7), 50
    r = mu**2 / rho2
    weights = (mu**2 + rho2 / n) / (mu**2 + rho2 / n).sum()
    long = 1 - (weights / (r + 1 / n)).sum() / n
    assert osgr((mu**2).sum() / rho2.sum(), n) == pytest.approx(long, rel=1e-12)
    assert osgr(-0.1, 10) == 0.0
    assert osgr(math.inf, 10) == 1.0
    assert math.isnan(osgr(math.nan, 10))


def test_cosines_with_the_others_are_those_of_a_loop() -> None:
    grads = np.random.default_rng(1).normal(size=(9, 4)) + 0.3
    mean = grads.mean(0)
    found = cosines_with_the_others(np.linalg.norm(grads, axis=1), grads @ mean, float(np.linalg.norm(mean)))
    for i, g in enumerate(grads):
        others = np.delete(grads, i, axis=0).mean(0)
        assert found[i] == pytest.approx(g @ others / np.linalg.norm(g) / np.linalg.norm(others))


def test_wrong_labels_surface() -> None:
    torch.manual_seed(0)
    x = torch.randn(192, 6)
    right = (x[:, 0] > 0).long()
    wrong = torch.tensor([7, 40, 77, 150])
    y = right.clone()
    y[wrong] = 1 - y[wrong]
    model = nn.Linear(6, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), right).backward()
        optimizer.step()
    batches = list(zip(x.split(32), y.split(32), strict=True))
    found = gv.probe(model, batches, nn.CrossEntropyLoss(), 6, questions="samples", progress=False)
    named = [32 * one["batch"] + one["position"] for one in found.samples["largest"]]
    assert set(wrong.tolist()) <= set(named)
    assert all(found.samples["targets"][i] == int(y[i]) for i in range(192))


def test_small_chunks_and_a_second_pass_change_nothing() -> None:
    model, loader = probed.mlp(), list(probed.classes())
    whole = probe_samples(model, loader, nn.CrossEntropyLoss())
    subject = Subject(model, nn.CrossEntropyLoss(), "output, target", torch.device("cpu"))
    parted, notes = samples_record(subject, trainable(model), loader, memory_limit=8000)
    assert parted["chunk"] < whole["chunk"]
    assert parted["chunk"] < 8
    for key in ("norms", "cosines", "losses"):
        assert parted[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-5)
    assert parted["gsnr"] == pytest.approx(whole["gsnr"], rel=1e-4)
    assert notes == ["samples: the size of the training set is not known; OSGR is for the 48 examples seen"]


def test_only_so_many_examples() -> None:
    found = probe_samples(probed.mlp(), list(probed.classes()), nn.CrossEntropyLoss(), examples=11)
    assert found["examples"] == len(found["norms"]) == 11
    assert found["places"][-1] == [1, 2]
    assert sum(found["histogram"]["counts"]) == 11


def test_batch_norm_and_loops_are_said() -> None:
    model, loss_fn, batch = cases()["batch norm"]
    found = gv.probe(model, [batch], loss_fn, 1, questions="samples", progress=False)
    assert any("running statistics" in note for note in found.notes)
    model, loss_fn, batch = cases()["peeking"]
    found = gv.probe(model, [batch], loss_fn, 1, questions="samples", progress=False)
    assert found.samples["method"] == "loop"
    assert any("one example at a time" in note and "vmap" in note for note in found.notes)


def test_dropout_draws_for_every_example_and_the_same_in_both_passes() -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    x = torch.ones(8, 6)
    batches = [(x, torch.zeros(8, dtype=torch.long))]
    found = probe_samples(model, batches, nn.CrossEntropyLoss())
    assert len(set(found["norms"])) == 8
    subject = Subject(model, nn.CrossEntropyLoss(), "output, target", torch.device("cpu"))
    parted, _ = samples_record(subject, trainable(model), batches, memory_limit=1)
    assert all(-1 <= cosine <= 1 for cosine in parted["cosines"])


def test_one_example_has_nothing_to_be_compared_with() -> None:
    subject = Subject(probed.mlp(), nn.CrossEntropyLoss(), "output, target", torch.device("cpu"))
    with pytest.raises(GradvitalsError, match="expected 2 or more"):
        samples_record(subject, trainable(subject.model), [(torch.ones(1, 6), torch.zeros(1, dtype=torch.long))])
