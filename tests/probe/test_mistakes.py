"""What is given wrongly is told in words, and not taken for something else."""

from __future__ import annotations

import math
from typing import Any

import probed
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradvitals as gv
from gradvitals.errors import ConfigError, GradvitalsError

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def ask(loader: Any, loss_fn: Any = None, model: nn.Module | None = None, **settings: Any) -> gv.probe.Probe:
    model = model or probed.mlp()
    return gv.probe(model, loader, loss_fn, **{"questions": "signal", "progress": False, **settings})


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (TensorDataset(X, Y), r"TensorDataset, a data set of single examples; .* DataLoader\(dataset"),
        ((X, Y), r"shapes \(8, 6\), \(8,\), which is one batch; .* \[\(x, y\)\]"),
        (X, r"a tensor of shape \(8, 6\); .* x.split"),
        ({"x": X, "y": Y}, r"a mapping with the keys .* \[batch\]"),
    ],
)
def test_what_is_no_loader(loader: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ask(loader, nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((["hello", "bye"], torch.tensor([0, 1])), "holds no tensor to feed the model with"),
        ((X[0], Y[0]), r"inputs have shape \(6,\) and the target \(\)"),
        ((torch.randn(5, 8, 6), Y), r"inputs have shape \(5, 8, 6\) and the target \(8,\); .*batch_first"),
        ((X[:0], Y[:0]), "holds no examples"),
    ],
)
def test_what_is_no_batch(batch: Any, words: str) -> None:
    with pytest.raises(GradvitalsError, match=words):
        ask([batch], nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (nn.CrossEntropyLoss, r"the class CrossEntropyLoss; expected an instance: CrossEntropyLoss\(\)"),
        (lambda out, x, y: F.cross_entropy(out, y), "loss_fn takes out, x, y; expected"),
        (lambda: 0, "loss_fn takes no arguments; expected"),
        (lambda batch: F.cross_entropy(batch[0], batch[1]), r"would get the model's output; expected loss_fn\(model,"),
    ],
)
def test_a_loss_that_cannot_be_called_like_that(loss_fn: Any, words: str) -> None:
    with pytest.raises(GradvitalsError, match=words):
        ask([(X, Y)], loss_fn)


@pytest.mark.parametrize("loss_fn", [lambda m, b: F.cross_entropy(m(b[0]), b[1]), lambda y, out: F.nll_loss(out, y)])
def test_an_error_of_the_loss_says_how_it_was_called(loss_fn: Any) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the loss raises
        ask([(X, Y)], loss_fn)
    [note] = caught.value.__notes__
    assert note.startswith("gradvitals called loss_fn(output, target) with output: a tensor of shape (8, 3), float32")
    assert "target: a tensor of shape (8,), int64" in note
    assert "first argument is called model" in note


def test_an_error_of_the_model_names_types_and_a_loss_that_is_none() -> None:
    with pytest.raises(RuntimeError) as caught:
        ask([(X.double(), Y)], nn.CrossEntropyLoss())
    assert "(8, 6), float64" in caught.value.__notes__[0]
    with pytest.raises(TypeError) as other:
        ask([(X, Y)])
    assert any("loss_fn is None" in note for note in other.value.__notes__)


def test_model_and_loader_the_wrong_way_round() -> None:
    with pytest.raises(ConfigError, match=r"model is list; expected a torch.nn.Module first"):
        gv.probe([(X, Y)], probed.mlp(), nn.CrossEntropyLoss())


def test_complex_parameters() -> None:
    with pytest.raises(GradvitalsError, match="weight is complex"):
        ask([(X, Y)], nn.CrossEntropyLoss(), nn.Linear(6, 3, dtype=torch.complex64))


def averaging(model: nn.Module, batch: Any, loss_fn: Any) -> tuple[str, list[str]]:
    found = ask([batch, batch], loss_fn, model)
    return found.about["averaging"], [item["title"] for item in found.verdict if item["question"] == "loss"]


def test_a_loss_that_is_a_sum_is_said() -> None:
    kind, told = averaging(probed.mlp(), (X, Y), nn.CrossEntropyLoss(reduction="sum"))
    assert kind == "sum"
    assert told == ["the batch loss is the sum of its examples' losses, not the mean"]


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")  # torch's own word on what is tested
def test_a_target_that_is_broadcast_is_said() -> None:
    model = nn.Linear(6, 1)
    nn.init.ones_(model.weight)
    batch = (X, X.sum(1) + 0.1)  # nearly right for each example, and far off between examples
    assert averaging(model, batch, nn.MSELoss()) == (
        "other",
        ["the batch loss is not the mean of its examples' losses"],
    )
    assert "output (8, 1), target (8,)" in ask([batch] * 2, nn.MSELoss(), model).verdict[0]["detail"]
    own = averaging(model, batch, lambda output, target: F.mse_loss(output.squeeze(1), target))
    assert own == ("mean", [])


def test_a_mean_over_examples_is_fine_also_with_batch_norm_and_dropout() -> None:
    assert averaging(probed.everything(), (X, Y), nn.CrossEntropyLoss()) == ("mean", [])


def test_a_loss_with_weights_is_a_note() -> None:
    weights = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 10.0, 1.0]))
    found = ask([(3 * X, Y)] * 2, weights)
    assert found.about["averaging"] == "weighted"
    assert any("weighs its examples" in note for note in found.notes)


def test_a_loss_that_draws_or_needs_several_examples_is_not_judged() -> None:
    assert averaging(probed.mlp(), (X, Y), lambda out, y: (out * torch.randn_like(out)).mean())[0] == "unknown"

    def of_several(out: Tensor, y: Tensor) -> Tensor:
        if len(out) < 2:
            raise ValueError("more")
        return out.mean()

    assert averaging(probed.mlp(), (X, Y), of_several)[0] == "unknown"


def test_the_optimizer_of_another_model() -> None:
    other = torch.optim.SGD(probed.mlp().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="SGD of 6 tensors, none of them this model's"):
        ask([(X, Y)], nn.CrossEntropyLoss(), optimizer=other)


def test_parameters_that_the_optimizer_leaves_out_are_a_note() -> None:
    model = probed.mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    found = ask([(X, Y)], nn.CrossEntropyLoss(), model, optimizer=optimizer)
    assert "the optimizer leaves out 2.weight, 2.bias and 2 more: nothing trains them" in found.notes


def test_an_optimizer_at_the_start_of_its_warm_up() -> None:
    model = probed.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    found = ask(probed.classes(), nn.CrossEntropyLoss(), model, optimizer=optimizer, questions=["layers", "landscape"])
    assert found.about["lr"] is None
    assert any("learning rate is 0 now" in note for note in found.notes)
    assert found.landscape["direction"] == "gradient"
    assert found.layers["update_by"] == "none"


def test_a_sparse_embedding() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids).mean(1))

    batches = [(torch.randint(9, (8, 5)), Y) for _ in range(3)]
    found = ask(batches, nn.CrossEntropyLoss(), Words(), questions=["signal", "samples", "landscape"])
    assert found.about["questions"] == ["signal", "samples", "landscape"], found.notes
    assert math.isfinite(found.samples["norms"][0])


def test_what_a_module_and_a_loss_write_down_is_put_back() -> None:
    class Noting(nn.Linear):
        seen: Any = None
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen = super().forward(x)
            return self.seen

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.norm(output), target)

    model, loss = Noting(6, 3), Loss()
    kept = model(X)
    state = {name: value.clone() for name, value in loss.state_dict().items()}
    ask([(X, Y)] * 3, loss, model, questions=["signal", "samples"])
    assert model.seen is kept
    assert model.calls == 1
    assert all(torch.equal(value, state[name]) for name, value in loss.state_dict().items())


def test_generators_are_put_back_when_the_error_is_raised_and_not_later() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(X, Y), 2, shuffle=True, generator=generator)
    before = generator.get_state()
    with pytest.raises(ZeroDivisionError):
        ask(loader, lambda output, target: output.sum() / (1 // 0))
    assert torch.equal(generator.get_state(), before)
