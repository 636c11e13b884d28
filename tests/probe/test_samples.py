from __future__ import annotations

import math
from typing import Any

import numpy as np
import probed
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradvitals as gv
from gradvitals.errors import GradvitalsError
from gradvitals.probe.data import Subject, form_of
from gradvitals.probe.gradients import trainable
from gradvitals.probe.samples import (
    PerExample,
    cosines_with_the_others,
    excess_losses,
    osgr,
    samples_record,
    standing_out,
)


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
    model.apply(lambda module: module.eval() if isinstance(module, nn.BatchNorm2d) else module)
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


def probe_samples(model: nn.Module, batches: Any, loss_fn: Any, **settings: Any) -> dict[str, Any]:
    found = probed.ask(model, batches, loss_fn, len(batches), questions="samples", **settings)
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
    units = grads / np.linalg.norm(grads, axis=1, keepdims=True)
    found = cosines_with_the_others(units @ units.sum(0), float(np.linalg.norm(units.sum(0))))
    for i, unit in enumerate(units):
        others = np.delete(units, i, axis=0).mean(0)
        assert found[i] == pytest.approx(unit @ others / np.linalg.norm(others))


def mislabelled(seed: int, shuffle: bool = False) -> tuple[gv.probe.Probe, set[int]]:
    """A model trained on labels of which some are wrong, examined."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, 10, generator=generator) * 1.5
    right = torch.randint(4, (320,), generator=generator)
    x = centres[right] + torch.randn(320, 10, generator=generator)
    wrong = torch.randperm(320, generator=generator)[:16]
    y = right.clone()
    y[wrong] = (y[wrong] + torch.randint(1, 4, (16,), generator=generator)) % 4
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(120):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=shuffle)
    found = probed.ask(model, loader, examples=320, questions="samples")
    return found, set(wrong.tolist())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_wrong_labels_are_the_first_suspects(seed: int) -> None:
    found, wrong = mislabelled(seed, shuffle=True)
    named = [one["dataset_index"] for one in found.samples["suspects"]]
    assert sum(index in wrong for index in named) >= 9
    flagged = {found.samples["dataset_indices"][i] for i in found.samples["standing_out"]}
    assert len(flagged & wrong) >= 13
    assert len(flagged - wrong) <= len(flagged & wrong)
    [told] = [item for item in found.verdict if "stand out" in item["title"]]
    assert told["title"].startswith(f"{len(flagged)} of 320 examples")
    assert f"and {len(flagged) - 4} more" in told["detail"]


def test_a_class_that_is_not_learnt_is_not_suspect() -> None:
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(100, generator=generator).tolist() + (4 + torch.rand(20, generator=generator)).tolist()
    targets: list[int | None] = [0] * 100 + [1] * 20
    losses[7] = 3.5
    assert int(np.argmax(excess_losses(losses, targets))) == 7
    assert int(np.argmax(losses)) >= 100


def test_an_example_that_is_nearly_right_does_not_stand_out_beside_one_that_is_wrong() -> None:
    # A model that has learnt nearly all: a loss of 0.3 is far out among losses of 0.01, and the answer is right.
    losses, norms = np.full(100, 0.01) + np.linspace(0, 1e-3, 100), np.full(100, 1.0)
    losses[[3, 4]], norms[[3, 4]] = [6.0, 0.3], [20.0, 5.0]
    assert np.flatnonzero(standing_out(excess_losses(losses, [None] * 100), norms)).tolist() == [3]


def test_examples_are_named_by_their_place_in_the_data_set() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 6)
    for workers in (0, 1):
        loader = DataLoader(
            TensorDataset(x, torch.arange(40) % 3), 8, shuffle=True, generator=generator, num_workers=workers
        )
        before = generator.get_state()
        found = probe_samples(probed.mlp(), loader, nn.CrossEntropyLoss())
        assert torch.equal(generator.get_state(), before)
        assert sorted(found["dataset_indices"]) == list(range(40))
        for one in found["largest"]:
            assert one["target"] == one["dataset_index"] % 3
            loss = F.cross_entropy(probed.mlp()(x[one["dataset_index"]][None]), torch.tensor([one["target"]]))
            assert one["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)


def test_classes_have_their_names() -> None:
    found = probed.ask(n_batches=3, questions="samples", names=gv.probe.Names(classes=["cat", "dog", "cow"]))
    assert {one["label"] for one in found.samples["suspects"]} <= {"cat", "dog", "cow"}
    assert any(name in str(found) for name in ("cat", "dog", "cow"))


def test_one_example_that_is_not_finite_is_named() -> None:
    x = torch.randn(16, 6)
    x[9, 2] = math.nan
    loader = DataLoader(TensorDataset(x, torch.arange(16) % 3), 4)
    found = probed.ask(probed.mlp(), loader, questions="samples")
    told = [item for item in found.verdict if item["question"] == "samples"]
    assert told[0]["severity"] == "critical"
    assert told[0]["detail"] == "number 9 of the data set"
    assert math.isfinite(found.samples["suspects"][1]["norm_over_median"])


def test_a_tensor_that_is_not_of_examples_stays_whole_in_every_chunk() -> None:
    # Class weights of 3 beside chunks of 3 examples.
    weights = torch.tensor([1.0, 2.0, 3.0])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * batch["w"].sum()).mean()

    batch = {"x": torch.randn(8, 6), "y": torch.arange(8) % 3, "w": weights}
    reader = reader_of(probed.mlp(), loss)
    reader.chunk = 3
    found = torch.cat([losses for losses, _ in reader.chunks(batch, 8)])
    assert reader.method == "vmap"
    expected = 6 * F.cross_entropy(probed.mlp()(batch["x"]), batch["y"], reduction="none")
    torch.testing.assert_close(found, expected.detach())


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


def test_batch_norm_and_loops_are_said() -> None:
    model, loss_fn, batch = cases()["batch norm"]
    found = probed.ask(model, [batch], loss_fn, 1, questions="samples")
    assert any("running statistics" in note for note in found.notes)
    model, loss_fn, batch = cases()["peeking"]
    found = probed.ask(model, [batch], loss_fn, 1, questions="samples")
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


def test_a_loader_that_tells_no_places_is_a_note() -> None:
    found = probed.ask(probed.mlp(), iter(probed.classes()), n_batches=3, questions="samples")
    assert found.samples["suspects"][0]["dataset_index"] is None
    assert any("does not reveal places in a data set" in note for note in found.notes)
    assert "batch 0, place" in str(found)
