"""Which inputs matter: models whose answer can be shared out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradvitals.errors import GradvitalsError
from gradvitals.probe.data import Names, Subject, form_of
from gradvitals.probe.opening import Opening
from gradvitals.probe.saliency import explained, integrated_gradients, saliency_record, smoothgrad


def total(output: Tensor) -> Tensor:
    return output.sum()


def mean(output: Tensor) -> Tensor:
    return output.mean()


def subject(model: nn.Module, loss_fn: Any = total) -> Subject:
    return Subject(model, loss_fn, form_of(loss_fn), torch.device("cpu"))


def saliency(model: nn.Module, loss_fn: Any, *batch: Tensor, names: Names | None = None) -> Any:
    record = saliency_record(subject(model, loss_fn), batch, names or Names())
    json.dumps(record)  # every field is plain
    return SimpleNamespace(**record)


class Formula(nn.Module):
    """A model that is a formula."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x)


class Words(nn.Module):
    """Tokens to classes: the mean of embeddings, and positions looked up first to be in the way."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(8, 4)
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        spots = self.places(torch.arange(ids.shape[1]))
        return self.head((self.table(ids) + spots).mean(dim=1))


def opened(formula: Callable[[Tensor], Tensor], x: Tensor) -> Opening:
    return Opening(subject(Formula(formula)), (x,))


def score_of(opening: Opening) -> Any:
    return explained(opening.run(opening.values), opening)[0]


def test_a_linear_model_gives_its_weights_by_every_method() -> None:
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    x = torch.tensor([[3.0, 1.0, -4.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    model = Formula(lambda x: x @ weights + 7)
    found = saliency(model, total, x)
    assert found.explains == "the output"
    np.testing.assert_allclose(found.profiles["gradient"]["feature"], [1, 2, 0.5], rtol=1e-6)
    np.testing.assert_allclose(found.profiles["smoothgrad"]["feature"], [1, 2, 0.5], rtol=1e-6)
    for method in ("gradient_x_input", "integrated_gradients"):
        np.testing.assert_allclose(found.profiles[method]["feature"], [2, 2, 1.25], rtol=1e-6)
        np.testing.assert_allclose(found.shown[0]["scores"][method], [3, -2, -2], rtol=1e-6)
    assert found.completeness["expected"] == pytest.approx(-1 - 0.5)  # without the 7, which is in the baseline too
    assert found.completeness["error"] < 1e-12


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_the_integral_is_exact_for_polynomials(degree: int) -> None:
    x = torch.tensor([[1.5, -0.5]], dtype=torch.float64)
    opening = opened(lambda x: (x**degree).sum(dim=1), x)
    parts, sums = integrated_gradients(opening, score_of(opening), points=3)
    torch.testing.assert_close(parts, x**degree, rtol=1e-12, atol=0)  # each its own power, by hand
    assert sums["error"] < 1e-12


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), smooth=st.booleans())
def test_integrated_gradients_sum_to_the_change_of_the_answer(seed: int, smooth: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    last = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    bend = torch.tanh if smooth else torch.relu
    wanted = torch.tensor([0, 1, 2, 0])
    model = Formula(lambda x: bend(x @ first + 0.3) @ last)
    opening = Opening(subject(model, nn.CrossEntropyLoss()), (x, wanted))
    answer = score_of(opening)
    parts, sums = integrated_gradients(opening, answer, points=40)
    with torch.no_grad():
        change = answer(opening.run(x)) - answer(opening.run(torch.zeros_like(x)))
    # A unit that bends on the way is off by its slope over at most the distance of two points, below 2 / steps.
    slopes = ((x @ first).abs() * last.T[wanted].abs()).sum(dim=1)
    allowed = torch.full_like(slopes, 1e-6) if smooth else slopes * 2 / 40
    assert bool(((parts.sum(dim=1) - change).abs() <= allowed).all())
    assert sums["expected"] == pytest.approx(float(change.sum()))


def test_smoothgrad_of_a_square_is_its_gradient_since_noise_comes_in_pairs() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float64)
    opening = opened(lambda x: (x**2).sum(dim=1), x)
    torch.testing.assert_close(smoothgrad(opening, score_of(opening), pairs=1), 2 * x)


def test_each_class_has_the_inputs_that_make_it() -> None:
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]]))
    x, y = torch.ones(6, 4), torch.tensor([0, 1, 0, 1, 1, 1])
    names = Names(features=["age", "town", "<b>pay</b>", "id"], classes=["no", "yes"])
    found = saliency(model, nn.CrossEntropyLoss(), x, y, names=names)
    assert found.explains == "the score of the label's class"
    np.testing.assert_allclose(found.by_class["no"]["feature"], [1, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found.by_class["yes"]["feature"], [0, 0, 2, 0], rtol=1e-6)
    assert found.names["feature"] == ["age", "town", "<b>pay</b>", "id"]
    assert [(shown["label"], shown["predicted"]) for shown in found.shown[:2]] == [("no", "yes"), ("yes", "yes")]
    (verdict,) = found.verdict
    assert verdict["names"] == ["town", "id"]
    assert verdict["severity"] == "warning"


def test_an_image_has_channels_and_a_picture() -> None:
    def corner(x: Tensor) -> Tensor:
        return 3 * x[:, 1, 2, 5] + x[:, 0, 0, 0]

    model = Formula(corner)
    x = torch.ones(2, 3, 8, 6)
    found = saliency(model, mean, x)
    np.testing.assert_allclose(found.profiles["gradient"]["channel"], np.array([1, 3, 0]) / 48, rtol=1e-6)
    picture = np.array(found.profiles["integrated_gradients"]["picture"])
    assert picture.shape == (8, 6)
    assert picture[2, 5] == pytest.approx(1.0)  # 3 over 3 channels
    assert np.count_nonzero(picture) == 2
    assert np.shape(found.shown[0]["image"]) == (3, 8, 6)
    assert found.shown[0]["scores"]["gradient"][2][5] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("model", "axes"), [(nn.Conv1d(3, 2, 1), {"channel", "position"}), (nn.Linear(5, 2), {"position", "feature"})]
)
def test_sequences_of_numbers_have_two_axes(model: nn.Module, axes: set[str]) -> None:
    x = torch.randn(2, 3, 5)
    found = saliency(model, lambda output: output.square().mean(), x)
    assert set(found.profiles["gradient"]) == axes
    assert found.explains == "the loss"


def test_tokens_are_explained_through_their_embedding() -> None:
    torch.manual_seed(0)
    model = Words()
    ids, y = torch.tensor([[1, 2, 3], [1, 1, 4]]), torch.tensor([0, 2])
    found = saliency(model, nn.CrossEntropyLoss(), ids, y, names=Names(tokens=list("abcdefghij")))
    assert (found.where, found.place) == ("embeddings", "table")  # and not the positions, which were looked up first
    expected = (model.table(ids) * model.head.weight[y][:, None, :]).sum(
        dim=-1
    ) / 3  # the answer is linear in the vectors
    for row, shown in enumerate(found.shown):
        np.testing.assert_allclose(shown["scores"]["integrated_gradients"], expected[row].detach(), rtol=1e-4)
        np.testing.assert_allclose(shown["scores"]["gradient"], model.head.weight[y[row]].norm().item() / 3, rtol=1e-4)
    assert found.shown[0]["texts"] == ["b", "c", "d"]
    by_text = {token["text"]: token for token in found.tokens}
    assert by_text["b"]["count"] == 3
    seen = expected[ids == 1].abs().mean().item()
    assert by_text["b"]["score"] == pytest.approx(seen, rel=1e-4)
    assert found.completeness["error"] < 1e-5


class Answer(NamedTuple):
    loss: Tensor
    logits: Tensor


def test_models_that_return_records_are_read_by_their_logits() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor, labels: Tensor) -> Answer:
            logits = self.head(x)
            return Answer(loss=cross_entropy(logits, labels), logits=logits)

    model, x, y = Model(), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    found = saliency(model, lambda model, batch: model(batch[0], labels=batch[1]).loss, x, y)
    np.testing.assert_allclose(
        found.profiles["gradient"]["feature"], model.head.weight.detach().abs().mean(dim=0), rtol=1e-5
    )


def test_recurrent_models_have_an_answer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0][:, -1].sum(dim=1)

    model, x = Net(), torch.randn(2, 5, 3)
    found = saliency(model, mean, x)
    assert found.profiles["gradient"]["position"].index(max(found.profiles["gradient"]["position"])) == 4


@pytest.mark.parametrize(
    ("model", "x", "words"),
    [
        (Formula(lambda x: x.float().mean()), torch.ones(2, 3, dtype=torch.int64), "no torch.nn.Embedding"),
        (Formula(lambda x: x.detach().mean()), torch.ones(2, 3), "detach"),
        (Formula(lambda x: x), torch.ones(2, 3), r"shape \(2, 3\); expected one number"),
    ],
)
def test_what_cannot_be_done_is_said(model: nn.Module, x: Tensor, words: str) -> None:
    with pytest.raises(GradvitalsError, match=words):
        saliency(model, lambda output: output, x)


def test_a_loss_that_goes_around_the_model_is_said() -> None:
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    with pytest.raises(GradvitalsError, match="did not call the model itself"):
        saliency(model, lambda model, batch: model.forward(batch[0]).mean(), x)


def test_inputs_that_reach_nothing_are_critical() -> None:
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    (verdict,) = saliency(model, nn.CrossEntropyLoss(), x, y).verdict
    assert verdict["severity"] == "critical"


class Next(nn.Module):
    """A language model: each answer from the tokens so far, by a running sum."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 7, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).cumsum(dim=1))


def by_hand(model: Next, ids: Tensor, place: int, token: int) -> float:
    scores = model(ids).log_softmax(-1)[0, place, token] - model.head(torch.zeros(4).double()).log_softmax(-1)[token]
    return scores.item()


def test_a_language_model_is_explained_by_its_last_token() -> None:
    model, ids = Next(), torch.tensor([[1, 2, 3, 4]])
    given = torch.tensor([[2, 3, 4, -100]])  # the last place has no target, so nothing after it can matter
    found = saliency(model, lambda output, y: cross_entropy(output.flatten(0, 1), y.flatten()), ids, given)
    assert found.explains == "the log-probability of the last token"
    assert found.shown[0]["scores"]["integrated_gradients"][3] == 0
    assert found.completeness["expected"] == pytest.approx(by_hand(model, ids, 2, 4))
    assert found.completeness["error"] < 1e-6


def test_labels_that_are_the_tokens_themselves_are_those_of_the_next_place() -> None:
    model, ids = Next(), torch.tensor([[1, 2, 3, 4]])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    found = saliency(model, loss, ids, ids)
    assert found.completeness["expected"] == pytest.approx(by_hand(model, ids, 2, 4))


def test_a_compiled_model_is_asked_without_its_compiled_code() -> None:
    torch.manual_seed(0)
    model = Words()
    ids, y = torch.tensor([[1, 2, 3], [1, 1, 4]]), torch.tensor([0, 2])
    plain = saliency(model, nn.CrossEntropyLoss(), ids, y)
    compiled = torch.compile(model, backend="eager")
    compiled(ids)  # compiled before there was any hook
    found = saliency(compiled, nn.CrossEntropyLoss(), ids, y)
    np.testing.assert_allclose(found.profiles["gradient"]["position"], plain.profiles["gradient"]["position"])


def test_coordinates_of_an_embedding_that_cancel_do_not_hide_an_error() -> None:
    """Each token's two coordinates are 50 and -49: a wrong sum is small beside them, and large beside the sum shown."""

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(3, 2)
            with torch.no_grad():
                self.embed.weight.copy_(torch.tensor([[50.0, -49.0]]).expand(3, 2))

        def forward(self, ids: Tensor) -> Tensor:
            return torch.tanh(2 * self.embed(ids).sum(dim=(1, 2)))

    opening = Opening(subject(Steep()), (torch.tensor([[0, 1, 2]]),))
    assert opening.kind == "embeddings"
    parts, sums = integrated_gradients(opening, score_of(opening), points=2)
    assert sums["expected"] == pytest.approx(math.tanh(6.0))
    assert float(parts.double().sum()) == pytest.approx(math.tanh(6.0), rel=0.02)
