from __future__ import annotations

from collections import UserDict
from typing import Any

import probed
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradvitals as gv
from gradvitals.errors import ConfigError, GradvitalsError
from gradvitals.probe.data import Reading, Subject, answers_in, form_of, logits_of

X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
CPU = torch.device("cpu")


def subject(model: nn.Module, loss_fn: Any) -> Subject:
    return Subject(model, loss_fn, form_of(loss_fn), CPU)


def by_annotation(judge: nn.Module, x: Any) -> Tensor:
    return judge(x[0]).sum()


@pytest.mark.parametrize(
    ("loss_fn", "form"),
    [
        (None, "own"),
        (nn.CrossEntropyLoss(), "output, target"),
        (F.cross_entropy, "output, target"),
        (torch.dot, "output, target"),
        (lambda output: output, "output"),
        (lambda *both: both[0], "output, target"),
        (lambda net, batch: net(batch), "model, batch"),
        (by_annotation, "model, batch"),
    ],
)
def test_how_a_loss_wants_to_be_called(loss_fn: Any, form: str) -> None:
    assert form_of(loss_fn) == form


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y),
        [X, Y],
        probed.Pair(X, Y),
        probed.Item(X, Y),
        {"x": X, "y": Y},
        UserDict({"labels": Y, "features": X}),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_the_loss_of_batches_of_many_kinds(batch: Any) -> None:
    model = probed.mlp()
    one = subject(model, nn.CrossEntropyLoss())
    expected = F.cross_entropy(model(X), Y)
    assert torch.equal(one.loss(batch), expected)
    assert one.inputs(batch) is X
    assert one.target(batch) is Y
    assert one.size(batch) == 4
    part = one.take(batch, 1, 3)
    assert torch.equal(one.inputs(part), X[1:3])
    assert torch.equal(one.target(part), Y[1:3])


def test_a_single_tensor_is_its_own_target() -> None:
    model = nn.Linear(6, 6)
    assert torch.equal(subject(model, nn.MSELoss()).loss(X), F.mse_loss(model(X), X))
    assert torch.equal(subject(model, nn.MSELoss()).loss([X]), F.mse_loss(model(X), X))


def test_a_model_that_gives_its_own_loss() -> None:
    model, batch = probed.Blocks(), probed.tokens()[0]
    one = subject(model, None)
    assert torch.equal(one.loss(batch), model(**batch).loss)
    assert one.output(batch).shape == (4, 7, 11)
    assert one.task(batch) == "language"
    del batch["labels"]
    with pytest.raises(GradvitalsError, match="does the batch have 'labels'"):
        one.loss(batch)


def test_a_loss_of_torch_gets_logits_and_ones_own_gets_everything() -> None:
    model, batch = probed.Blocks(), {"input_ids": torch.ones(2, 3, dtype=torch.long), "target": torch.ones(2, 3, 11)}
    assert subject(model, nn.MSELoss()).loss(batch).dim() == 0
    assert subject(model, lambda output, target: (output.logits - target).mean()).loss(batch).dim() == 0


@pytest.mark.parametrize(
    ("target", "task"),
    [(Y, "classification"), (torch.randn(4, 3), "regression"), (torch.randn(5), "unknown"), (Y[None], "unknown")],
)
def test_the_task(target: Tensor, task: str) -> None:
    assert subject(probed.mlp(), nn.CrossEntropyLoss()).task((X, target)) == task


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (["a", "b"], "holds no tensor"),
        ({}, "holds no tensor"),
        (3, "holds no tensor"),
        ((torch.tensor(1.0), Y), "without dimensions"),
    ],
)
def test_a_batch_of_unknown_shape_is_told(batch: Any, words: str) -> None:
    with pytest.raises(GradvitalsError, match=words):
        gv.probe(probed.mlp(), [batch], nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"shape \(8,\); expected one number: average it"),
        (lambda output, target: 3.0, "the loss is float 3.0; expected a tensor"),
        (lambda output, target: output.detach().sum(), "does not depend on any parameter"),
    ],
)
def test_a_loss_that_is_not_one_number_is_told(loss_fn: Any, words: str) -> None:
    with pytest.raises(GradvitalsError, match=words):
        gv.probe(probed.mlp(), probed.classes(), loss_fn)


def test_the_answers_among_what_a_model_returns() -> None:
    loss, scores, ids = torch.tensor(0.5), torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
    for output in (scores, (loss, scores), [scores, loss], {"loss": loss, "logits": scores}, (ids, {"x": scores})):
        assert logits_of(output) is scores
        assert answers_in(output) is scores
    assert answers_in({"loss": loss, "score": scores}) is scores
    assert answers_in({"loss": loss}) is None
    for named in ({"loss": loss, "score": scores}, (loss,), None):
        with pytest.raises(GradvitalsError, match="expected a tensor"):
            logits_of(named)


def test_no_more_batches_are_read_than_asked_for() -> None:
    batches = iter([1, 2, 3])
    assert list(Reading(batches).first(2)) == [1, 2]
    assert next(batches) == 3


def test_a_compiled_model_is_looked_at_as_it_is_inside() -> None:
    model = probed.mlp()
    found = probed.ask(torch.compile(model, backend="eager"), n_batches=3, questions=["signal", "samples"])
    assert found.about["model"] == "Sequential"
    assert [row["name"] for row in found.signal["tensors"]] == [name for name, _ in model.named_parameters()]
    assert found.samples["method"] == "vmap"


def test_the_models_device_is_the_only_one() -> None:
    with pytest.raises(ConfigError, match=r"call model.to\('meta'\)"):
        gv.probe(probed.mlp(), probed.classes(), nn.CrossEntropyLoss(), device="meta")
