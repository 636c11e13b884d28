"""Where data enter a model, and what things are called."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gradvitals.probe.data import Names, names_of
from gradvitals.probe.perturb import Opening, Sample, at_rest


def test_a_table_that_is_used_twice_is_changed_only_for_the_data() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return (self.table(torch.zeros_like(ids)) * 10 + self.table(ids)).sum(dim=(1, 2))

    model, ids = Twice(), torch.tensor([[3, 4]])
    opening = Opening(model, Sample(loss=lambda: model(ids).mean()))
    assert opening.values.equal(model.table(ids))
    assert opening.run(torch.zeros(1, 2, 2)).loss.item() == pytest.approx(20 * model.table.weight[0].sum().item())


@dataclass
class Record:
    x: Tensor
    weight: float


class Pair(NamedTuple):
    mask: Tensor
    x: Tensor


def test_data_are_found_in_any_batch() -> None:
    x = torch.ones(2, 3)

    def through(call: Callable[[nn.Module], Tensor], inner: Callable[..., Tensor]) -> Opening:
        class Model(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Tensor:
                return inner(*args, **kwargs)

        model = Model()
        return Opening(model, Sample(loss=lambda: call(model).sum()))

    mask = torch.zeros(2, 3)
    found = [
        through(lambda model: model(attention_mask=mask, pixel_values=x), lambda **batch: batch["pixel_values"]),
        through(lambda model: model({"mask": mask, "x": x}), lambda batch: batch["x"]),
        through(lambda model: model(UserDict(x=x)), lambda batch: batch["x"]),
        through(lambda model: model(Record(x, 2.0)), lambda batch: batch.x),
        through(lambda model: model([Pair(mask, x)]), lambda batch: batch[0].x),
    ]
    assert [opening.name for opening in found] == ["pixel_values", "x", "x", "x", "x"]
    for opening in found:
        assert opening.run(x * 5).loss.item() == 30
        assert opening.run().loss.item() == 6
    assert x.eq(1).all()


def test_flags_come_back_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())

    def fail() -> None:
        with at_rest(model):
            assert not model[1].training
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert model.training
    assert model[1].training


def test_names_are_found_where_custom_has_them() -> None:
    class Tokenizer:
        def convert_ids_to_tokens(self, number: int) -> str:
            return f"<{number}>"

    def namespace(**fields: Any) -> Any:
        return type("Thing", (), fields)()

    loader = namespace(dataset=namespace(classes=["a", "b"]), collate_fn=namespace(tokenizer=Tokenizer()))
    names = names_of(nn.Linear(1, 1), loader)
    assert (names.label(1), names.token(5)) == ("b", "<5>")
    model = namespace(config=namespace(id2label={0: "no", 1: "yes"}))
    assert names_of(model, [1, 2]).classes == ["no", "yes"]
    assert not names_of(None, namespace(dataset=namespace(classes=7))).classes
    assert Names(tokens={1: "x"}).token(1) == "x"
    assert Names(tokens=["x"]).token(3) == "3"
