"""The experiment on scale adaptation: its pieces have known answers, and all of it runs in small."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn import functional as F

from experiments.scale_adaptation import simulation
from experiments.scale_adaptation.__main__ import main
from experiments.scale_adaptation.adaptation import (
    Brownian,
    CureRow,
    Size,
    auc,
    balanced_accuracy,
    best_threshold,
    folds,
    gains,
    judge,
    measure_adaptation,
    roc,
)
from experiments.scale_adaptation.report import format_results, rank_correlation, summarise
from experiments.scale_adaptation.run import QUICK, Results, read_results, run_plan
from experiments.scale_adaptation.simulation import Case, simulate
from experiments.scale_adaptation.training import (
    Schedule,
    Shape,
    StackedLM,
    Texts,
    evaluate,
    losses_of,
    read_texts,
    train_stack,
)
from gradvitals.diagnose.rules.scale import NoiseWalk
from gradvitals.errors import GradvitalsError

TINY = Shape(width=8, num_layers=1, num_heads=2, context=8, scalars=True)
WINDOWS = torch.randint(256, (1, 3, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def texts() -> Texts:
    return read_texts(None, torch.device("cpu"))


# -- who adapts, by a number ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
def test_auc_is_the_share_of_pairs_in_order(rows: list[tuple[int, bool]]) -> None:
    scores, labels = np.array([float(s) for s, _ in rows]), np.array([label for _, label in rows])
    pairs = [(a > b) + (a == b) / 2 for a in scores[labels] for b in scores[~labels]]
    if not pairs:
        assert math.isnan(auc(scores, labels))
        return
    assert auc(scores, labels) == pytest.approx(np.mean(pairs))
    false, true = roc(scores, labels)
    assert np.trapezoid(true, false) == pytest.approx(np.mean(pairs))


def test_a_threshold_that_separates_is_found_and_holds_elsewhere() -> None:
    scores = np.array([1e-4, 1e-3, 0.1, 1.0] * 5)
    labels = scores > 0.01
    assert best_threshold(scores, labels) == pytest.approx(0.01)
    told = judge(scores, labels, folds(20, 5))
    assert (told.auc, told.accuracy, told.held_out_auc, told.held_out_accuracy) == (1, 1, 1, 1)
    upside_down = judge(-scores, labels, folds(20, 5))
    assert (upside_down.auc, upside_down.held_out_accuracy) == (1, 1)
    assert balanced_accuracy(scores, labels, math.inf) == 0.5


def test_a_number_that_says_nothing_is_not_better_than_chance_where_it_was_not_fitted() -> None:
    rng = np.random.default_rng(0)
    told = judge(rng.standard_normal(400), rng.random(400) < 0.5, folds(400, 5))
    assert told.held_out_auc == pytest.approx(0.5, abs=0.07)
    assert sorted(np.bincount(folds(11, 5)).tolist()) == [2, 2, 2, 2, 3]
    assert math.isnan(rank_correlation(np.ones(4), np.arange(4.0)))


# -- the simulation -------------------------------------------------------------------------------------------------


def case(shape: str = "matrix", **changes: str) -> Case:
    return replace(Case(shape=shape, optimizer="sgd", noise="iid", target="aligned"), **changes)  # type: ignore[arg-type]


def test_a_rank_correlation_does_not_hang_on_the_order_of_equal_values() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(3, size=90).astype(float), rng.integers(4, size=90).astype(float)
    other = rng.permutation(90)
    assert rank_correlation(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert rank_correlation(x[other], y[other]) == pytest.approx(rank_correlation(x, y), abs=1e-12)


def test_sgd_follows_as_far_as_the_formula_says() -> None:
    """Signal and noise add in the mean square: (c/(1+λ))² + σ² η/(2(1+λ) - η(1+λ)²)."""
    levels = (0.1, 1.0, 3.0, 10.0)
    lr, pull = simulation.LR["sgd"], 1 + simulation.DECAY
    for row in simulate(case(), seeds=1, steps=250, levels=levels):
        noise = row.noise_level**2 * lr / (2 * pull - lr * pull**2)
        squares = [(target / pull) ** 2 + noise for target in (2.0, 0.5)]
        assert row.elasticity == pytest.approx(math.log(squares[0] / squares[1]) / (2 * math.log(4)), abs=0.03)
        assert row.true_gsnr == pytest.approx((1 + 0.25) / 2 / row.noise_level**2)
        assert row.gsnr == pytest.approx(row.true_gsnr, rel=0.15, abs=5e-3)


def test_a_multiplier_follows_where_its_matrix_does_not() -> None:
    matrix, multiplier = (
        simulate(case(shape, optimizer="adamw"), seeds=1, steps=250, levels=(30.0,))[0]
        for shape in ("matrix", "multiplier")
    )
    assert matrix.elasticity < 0.35
    assert multiplier.elasticity > 0.8
    assert multiplier.radial_gsnr == pytest.approx(matrix.radial_gsnr)


# -- the stack ------------------------------------------------------------------------------------------------------


def by_hand(model: StackedLM, copy: int, windows: Tensor) -> Tensor:
    """One copy, written out with torch's own layers."""
    get = {name: model.stored(name)[copy] for name in model.names}
    tokens, d = windows[:, :-1], model.shape.width
    x = F.embedding(tokens, get["embed"]) + get["position"][: tokens.shape[1]]
    h = F.layer_norm(x, (d,), get["layer0.norm1"])
    heads = [F.linear(h, get[f"layer0.{part}"]).unflatten(-1, (2, d // 2)).transpose(1, 2) for part in "qkv"]
    mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
    x = x + get["layer0.attn_scale"] * F.linear(mixed, get["layer0.proj"], get["layer0.proj_bias"])
    h = F.layer_norm(x, (d,), get["layer0.norm2"])
    h = F.gelu(F.linear(h, get["layer0.up"], get["layer0.up_bias"]))
    x = x + get["layer0.mlp_scale"] * F.linear(h, get["layer0.down"], get["layer0.down_bias"])
    logits = F.linear(F.layer_norm(x, (d,), get["final_norm"]), get["head"])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def test_each_copy_is_the_model_written_out_and_has_its_own_gradient() -> None:
    model = StackedLM(TINY, [3, 4])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    losses = model(WINDOWS)
    grads = torch.autograd.grad(losses.sum(), list(model.parameters()))
    for copy in range(2):
        alone = by_hand(model, copy, WINDOWS[0])
        torch.testing.assert_close(losses[copy], alone)
        wanted = torch.autograd.grad(alone, list(model.parameters()))
        for mine, theirs in zip(grads, wanted, strict=True):
            torch.testing.assert_close(mine[copy], theirs[copy], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["scalar", "row", "column", "both"])
def test_multipliers_of_the_stack_are_those_of_the_package(kind: str) -> None:
    from gradvitals.multipliers import attach

    model = StackedLM(TINY, [0], kind=kind)  # type: ignore[arg-type]
    torch.testing.assert_close(model(WINDOWS), StackedLM(TINY, [0])(WINDOWS))
    assert not [name for name in model.multipliers if "embed" in name or "position" in name]
    assert ("head__row" in model.multipliers) is False
    layer = torch.nn.Linear(8, 32, bias=False)
    attach(layer, kind=kind)  # type: ignore[arg-type]
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(model.stored("layer0.up")[0])  # type: ignore[index,union-attr,operator]
        for name in model.multipliers:
            if name.startswith("layer0_up__"):
                getattr(model, name).uniform_(0.5, 2)
                part = getattr(layer.parametrizations.weight[0], name.split("__")[1])  # type: ignore[index,union-attr]
                part.copy_(getattr(model, name)[0].reshape(part.shape))
    torch.testing.assert_close(model.used("layer0.up")[0], layer.weight)


def test_training_a_stack_is_training_each_copy(texts: Texts) -> None:
    def trained(seeds: list[int], decays: Tensor | None) -> StackedLM:
        model = StackedLM(TINY, seeds)
        schedule = Schedule(lr=1e-2, decay=0.5, form="cosine")
        train_stack(model, texts.train, schedule, steps=12, batch=2, seed=1, decays=decays)
        return model

    together, alone = trained([0, 1], torch.tensor([0.5, 0.0])), trained([0], None)
    for name in alone.names:
        torch.testing.assert_close(together.stored(name)[0], alone.stored(name)[0], rtol=1e-4, atol=1e-5)
    losses = evaluate(together, texts.unseen, 5, chunk=2)
    assert losses.shape == (2,)
    generator = torch.Generator().manual_seed(10**6)
    windows = texts.unseen.windows(5, 8, generator)
    torch.testing.assert_close(losses, losses_of(together, windows[None]).detach())


# -- noise ----------------------------------------------------------------------------------------------------------


@given(st.sampled_from([0.02, 0.05]), st.sampled_from([0.2, 0.5]))
@settings(max_examples=4, deadline=None)
def test_adam_on_noise_has_the_size_of_the_formula(lr: float, decay: float) -> None:
    model = StackedLM(Shape(width=16, num_layers=1, context=8), [0])
    noise = Brownian(model, Schedule(lr=lr, decay=decay), seed=0)
    walk, starts = NoiseWalk(), noise.mean_squares()
    steps = round(2.5 / (lr * decay))
    for step in range(steps):
        rate = lr * min(1.0, (step + 1) / 20)
        noise.step(rate)
        walk.advance(step, rate, decay)
    sizes = np.array([model.stored(name)[0].numel() for name in model.names])
    found, wanted = (
        float(squares @ sizes / sizes.sum()) ** 0.5 for squares in (noise.mean_squares(), walk.expected(starts))
    )
    assert found == pytest.approx(wanted, rel=0.03)
    assert wanted == pytest.approx(math.sqrt(lr / (2 * decay)), rel=0.15)


# -- all of it ------------------------------------------------------------------------------------------------------

PLAN = replace(
    QUICK,
    sim_seeds=1,
    sim_steps=30,
    levels=(0.1, 1000.0),
    shape=TINY,
    size=Size(steps=40, batch=2, num_parts=3, every=5),
    cure_steps=15,
    windows=20,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    path = tmp_path_factory.mktemp("scale") / "scale.json"
    told: list[str] = []
    found = run_plan(PLAN, out=path, progress=lambda done, total, label: told.append(label))
    assert len(told) == 22 + 1 + 2
    return found, path


def test_every_tensor_is_asked(results: tuple[Results, Path]) -> None:
    rows = results[0].adaptation
    assert [row.tensor for row in rows] == list(TINY.tensors())
    assert {row.role for row in rows} == {"matrix", "vector", "scalar"}
    for row in rows:
        assert math.isfinite(row.elasticity + row.gsnr + row.radial_gsnr + row.norm_ratio)
        if row.role == "scalar":
            assert row.radial_gsnr == pytest.approx(row.gsnr, rel=1e-4, abs=1e-4)


def test_what_was_found_is_kept_and_read_again(results: tuple[Results, Path], tmp_path: Path) -> None:
    found, path = results
    again = read_results(path)
    assert json.dumps(again.to_json()) == json.dumps(found.to_json())
    path_of_part = tmp_path / "part.json"
    path_of_part.write_text(path.read_text("utf-8"), "utf-8")
    told: list[str] = []
    cure = replace(PLAN, parts=("cure",), arms=("none", "scalar", "row"))
    more = run_plan(cure, out=path_of_part, progress=lambda done, total, label: told.append(label))
    assert told == ["multipliers row, learning rate 0.01"]  # the others are in the file
    assert (more.simulation, more.adaptation) == (again.simulation, again.adaptation)
    assert more.cure[: len(found.cure)] == found.cure
    longer = run_plan(replace(cure, arms=("none",), cure_steps=16), out=path_of_part)
    assert {row.arm for row in longer.cure} == {"none"}  # of another length, nothing stays
    seeds = run_plan(replace(cure, arms=("row",), cure_steps=16, cure_seeds=3), out=path_of_part)
    assert {(row.arm, row.seed) for row in seeds.cure} == {("row", 0), ("row", 1), ("row", 2)}  # nor of other seeds
    broken = tmp_path / "broken.json"
    broken.write_text("{}", "utf-8")
    for wrong in (broken, tmp_path / "none.json"):
        with pytest.raises(GradvitalsError, match="expected what"):
            read_results(wrong)


def test_the_command_prints_and_draws_what_was_kept(results: tuple[Results, Path], tmp_path: Path) -> None:
    found, path = results
    text = format_results(found)
    assert all(word in text for word in ("radial GSNR", "multiplier", "held-out tensors", "nats a byte"))
    arguments = ["--reuse", str(path), "--figures", str(tmp_path / "figures")]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert set(data) == {*summarise(found), "figures"}
    assert len(data["figures"]) == 6
    for figure in data["figures"]:
        assert ElementTree.parse(figure).getroot().tag.endswith("svg")
    assert CliRunner().invoke(main, [*arguments, "--quick"]).exit_code == 2


def test_two_runs_of_one_seed_are_the_same(texts: Texts) -> None:
    def once() -> list[float]:
        rows = measure_adaptation("x", TINY, Schedule(lr=1e-2, decay=0.5), texts, Size(steps=10, batch=2, every=2))
        return [row.elasticity for row in rows]

    assert once() == once()


def test_gains_are_taken_seed_by_seed() -> None:
    rows = [CureRow(arm="none", lr=1.0, decay=0.1, seed=seed, loss=2.0 + seed) for seed in (0, 1)]
    rows += [CureRow(arm="scalar", lr=1.0, decay=0.1, seed=seed, loss=1.5 + 1.2 * seed) for seed in (0, 1)]
    none, scalar = gains(rows)
    assert (none.gain, none.error) == (0, 0)
    assert scalar.gain == pytest.approx(0.4)
    assert scalar.error == pytest.approx(0.1)
