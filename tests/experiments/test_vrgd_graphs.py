"""Passes that are recorded once and replayed train exactly as passes that run: simulated on a CPU, and on a GPU."""

from __future__ import annotations

import gc
import lzma
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.vrgd import __main__ as commands
from experiments.vrgd import cifar, clicks, loop, text
from experiments.vrgd.__main__ import main
from experiments.vrgd.cifar import SIDE, Images, make_resnet
from experiments.vrgd.loop import WARM_UP, GraphedPasses, make_recorder
from experiments.vrgd.trial import Trial, make_optimizer, warmup_cosine
from gradvitals import optim
from gradvitals.demo import CharLMConfig, shakespeare
from gradvitals.optim.vrgd import VarianceReduced

CPU = torch.device("cpu")
NUM_STEPS = 6
K = 6


def make_trial(arm: str, optimizer: str = "momentum", **changes: Any) -> Trial:
    options: dict[str, Any] = {"task": "test", "model": "resnet8-w4", "batch": 24, "lr": 0.02, "seed": 0, "k": K}
    return Trial(**(options | {"arm": arm, "optimizer": optimizer} | changes))


class Simulated:
    """Stands for a CUDA graph.

    Recording does nothing to numbers, but hooks are called. Replaying computes into the same memory, and calls none.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.buffers = list(model.buffers())
        self.optimizer = optimizer
        self.done: list[str] = []

    def run(self, passes: Callable[[], Tensor]) -> Tensor:
        self.done.append("run")
        return passes()

    def record(self, passes: Callable[[], Tensor]) -> Tensor:
        self.done.append("record")
        assert all(parameter.grad is None for parameter in self.parameters)
        before = [buffer.clone() for buffer in self.buffers]
        self.passes, self.loss = passes, passes()
        self.grads = [parameter.grad for parameter in self.parameters]
        for tensor in (self.loss, *self.grads):
            tensor.fill_(torch.nan)  # memory that nothing was written to yet
        for buffer, old in zip(self.buffers, before, strict=True):
            buffer.copy_(old)
        return self.loss

    def replay(self) -> None:
        self.done.append("replay")
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            assert parameter.grad is grad
            grad.zero_()  # the first micro-batch writes
        self.loss.copy_(self.passes())
        if isinstance(self.optimizer, VarianceReduced):
            parts = self.optimizer._parts
            for entry, _, _, norm in parts._captured:
                if norm is not None:
                    norm.copy_(entry.norm)
            parts.forget()


# -- passes of a network with batch norm ----------------------------------------------------------------------------


def trained(
    trial: Trial, device: torch.device = CPU, *, with_graphs: bool, compiled: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, and weights and running averages after some steps with a learning rate that changes."""
    torch.manual_seed(0)
    model = make_resnet(trial.model).to(device)
    if compiled:
        model.compile_blocks()
    optimizer = make_optimizer(trial, model.named_parameters(), NUM_STEPS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, NUM_STEPS, 0.3))
    generator = torch.Generator().manual_seed(1)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels, label_smoothing=0.1)

    with pytest.MonkeyPatch.context() as patch:
        simulated = Simulated(model, optimizer)
        if device == CPU and with_graphs:
            patch.setattr(loop, "make_recorder", lambda device: simulated)
        losses = []
        with closing(GraphedPasses(loss, optimizer, trial.k, device=device, graphs=with_graphs)) as passes:
            for _ in range(NUM_STEPS):
                images = torch.randn(trial.batch, 3, 16, 16, generator=generator)
                labels = torch.randint(10, (trial.batch,), generator=generator)
                found = passes(images.to(device, memory_format=torch.channels_last), labels.to(device))
                losses.append(found.clone())
                optimizer.step()
                scheduler.step()
                with torch.no_grad():
                    model.eval()(images[:2].to(device))
                    model.train()
    if device == CPU and with_graphs:
        assert simulated.done == ["run"] * WARM_UP + ["record"] + ["replay"] * (NUM_STEPS - WARM_UP)
    return losses, [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "lamb"])
@pytest.mark.parametrize("arm", ["base", "vr", "mean"])
def test_replayed_passes_train_exactly_as_passes_that_run(arm: str, optimizer: str) -> None:
    trial = make_trial(arm, optimizer)
    (losses, state), (other_losses, other_state) = (trained(trial, with_graphs=on) for on in (False, True))
    for one, other in zip([*losses, *state], [*other_losses, *other_state], strict=True):
        assert torch.equal(one, other)
    assert all(torch.isfinite(tensor).all() for tensor in state)


@pytest.mark.parametrize("arm", ["vr-layer", "wiener-row", "shuffled-fixed"])
def test_other_arms_too(arm: str) -> None:
    for one, other in zip(*(trained(make_trial(arm), with_graphs=on)[1] for on in (False, True)), strict=True):
        assert torch.equal(one, other)


def test_arms_differ() -> None:
    base, other = (trained(make_trial(arm), with_graphs=True)[1] for arm in ("base", "vr"))
    assert not torch.equal(base[0], other[0])


def test_there_is_no_graph_on_a_cpu() -> None:
    assert make_recorder(CPU) is None


# -- a few numbers that can be checked by hand ----------------------------------------------------------------------


def one_weight() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.zeros(1))
    return weight, torch.optim.SGD([weight], lr=1.0)


def test_gradient_and_loss_are_means_over_the_batch_and_do_not_add_up() -> None:
    weight, optimizer = one_weight()
    passes = GraphedPasses(lambda x, y: ((weight + x) * y).mean(), optimizer, 2, device=CPU)
    for _ in range(2):
        loss = passes(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 1.0, 2.0, 2.0]))
        assert float(loss) == 4.25
        assert weight.grad is not None
        assert weight.grad.tolist() == [1.5]


def test_what_a_graph_reads_stays_in_its_place() -> None:
    weight, optimizer = one_weight()
    places = []

    def loss(x: Tensor) -> Tensor:
        places.append(x.data_ptr())
        return (weight * x).mean()

    passes = GraphedPasses(loss, optimizer, 2, device=CPU)
    for value in range(3):
        given = torch.full((4,), float(value))
        passes(given)
        assert given.data_ptr() not in places
    assert len(set(places)) == 2


def test_a_closed_graph_is_gone() -> None:
    weight, optimizer = one_weight()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_recorder", lambda device: Simulated(nn.Module(), optimizer))
        passes = GraphedPasses(lambda x: (weight * x).mean(), optimizer, 1, device=CPU)
    recorder, batch = weakref.ref(passes._recorder), torch.ones(2)
    for _ in range(5):
        passes(batch)
    assert weight.grad is not None
    passes.close()
    assert recorder() is None
    assert weight.grad is None


# -- the tasks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, tasks get simulated graphs."""
    made: dict[str, Any] = {}

    def keep(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def keeping(*args: Any, **options: Any) -> Any:
            made[name] = make(*args, **options)
            return made[name]

        return keeping

    def start() -> None:
        monkeypatch.setattr(cifar, "make_resnet", keep("model", make_resnet))
        for module in (cifar, loop):
            monkeypatch.setattr(module, "make_optimizer", keep("optimizer", make_optimizer))
        monkeypatch.setattr(
            loop, "make_recorder", lambda device: Simulated(made.get("model", nn.Module()), made["optimizer"])
        )

    return start


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (30, SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
    some = Images(pixels, torch.arange(30) % 10)
    monkeypatch.setattr(cifar, "_data", lambda folder, device: cifar._Data(some, some))


def train_images(trial: Trial, **options: Any) -> dict[str, float]:
    settings = cifar.CifarSettings(precision="float32")
    return cifar.train_cifar(trial, data=Path("nowhere"), settings=settings, **options)


def numbers(result: dict[str, float]) -> dict[str, float]:
    """All but times."""
    return {name: value for name, value in result.items() if "second" not in name}


@pytest.mark.parametrize("arm", ["base", "vr"])
def test_images(arm: str, images: None, simulate: Callable[[], None]) -> None:
    trial = make_trial(arm, batch=12, epochs=4)
    expected = numbers(train_images(trial))
    simulate()
    assert numbers(train_images(trial, graphs=False)) == expected
    assert numbers(train_images(trial)) == expected
    assert expected["steps"] == 8


@pytest.mark.parametrize("arm", ["base", "vr"])
def test_text(arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulate: Callable[[], None]) -> None:
    tiny = CharLMConfig(vocab_size=256, context=16, d_model=16, n_layer=1, n_head=2)
    monkeypatch.setitem(text.MODELS, "tiny", tiny)
    monkeypatch.setattr(text, "EVAL_WINDOWS", 32)
    monkeypatch.setattr(text, "CURVE_WINDOWS", 16)
    for name in (text.TRAIN_FILE, text.VALID_FILE):
        (tmp_path / name).write_bytes(lzma.compress(shakespeare().encode()[:5000], preset=0))
    trial = make_trial(arm, "lamb", model="tiny", epochs=8)
    expected = numbers(text.train_text(trial, data=tmp_path))
    simulate()
    assert numbers(text.train_text(trial, data=tmp_path)) == expected


@pytest.mark.parametrize("arm", ["base", "vr"])
def test_clicks(arm: str, monkeypatch: pytest.MonkeyPatch, simulate: Callable[[], None]) -> None:
    world = clicks.World(CPU, field_sizes=(40, 5))
    samples = world.draw(500, torch.Generator().manual_seed(0))
    monkeypatch.setattr(clicks, "_world", lambda device: world)
    monkeypatch.setattr(clicks, "_test_samples", lambda device: samples)
    trial = make_trial(arm, "sgd", model="dlrm-small", epochs=8)
    expected = numbers(clicks.train_clicks(trial))
    simulate()
    assert numbers(clicks.train_clicks(trial)) == expected


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("arm", ["base", "vr"])
def test_a_trial_leaves_no_cycle_that_holds_its_memory(
    arm: str, images: None, no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[nn.Module]] = []

    def keep(name: str) -> nn.Module:
        model = make_resnet(name)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(cifar, "make_resnet", keep)
    train_images(make_trial(arm, batch=12, epochs=1))
    assert models[0]() is None


def test_commands_pass_the_option_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[bool] = []

    def train(trial: Trial, *, graphs: bool, **options: Any) -> dict[str, float]:
        given.append(graphs)
        return {"score": 1.0, "loss": 1.0, "chance": 0.0, "seconds": 1.0}

    for name in ("train_cifar", "train_text", "train_clicks"):
        monkeypatch.setattr(commands, name, train)
    monkeypatch.setattr(commands, "ceiling", lambda device: 1.0)
    short = ["--span", "0", "--reach", "0", "--refine", "0", "--seeds", "0", "--arm", "base", "--device", "cpu"]
    for command in (["cifar", "--data", str(tmp_path)], ["text", "--data", str(tmp_path)], ["clicks"]):
        for option in ([], ["--no-graphs"]):
            done = CliRunner().invoke(main, [*command, *short, *option])
            assert done.exit_code == 0, done.output
    assert given == [True, False] * 3


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions that are the same each time, so that what is left to differ is what is looked for."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["momentum", "lamb"])
@pytest.mark.parametrize("arm", ["base", "vr", "mean", "wiener-row"])
def test_a_gpu_replays_what_it_would_run(arm: str, optimizer: str, exact: None) -> None:
    trial = make_trial(arm, optimizer)
    place = torch.device("cuda", torch.cuda.current_device())
    (losses, state), (other_losses, other_state) = (trained(trial, place, with_graphs=on) for on in (False, True))
    torch.testing.assert_close(losses, other_losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, other_state, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_gpu_records_any_task() -> None:
    place = torch.device("cuda", torch.cuda.current_device())
    tiny = CharLMConfig(vocab_size=256, context=16, d_model=64, n_layer=1, n_head=2)
    content = text.Text(shakespeare().encode(), place)
    world = clicks.World(place, field_sizes=(400, 50))
    for make, draw, loss in (
        (
            lambda: text.CharLM(tiny),
            lambda generator: (content.windows(24, 16, generator),),
            lambda model: lambda windows: text.window_loss(model, windows),
        ),
        (
            lambda: clicks.SmallDLRM((400, 50)),
            lambda generator: world.draw(24 * 512, generator).observed,
            lambda model: lambda *observed: clicks._loss(model, *observed),
        ),
    ):
        found = []
        for with_graphs in (False, True):
            torch.manual_seed(0)
            model = make().to(place)
            optimizer = optim.VRSGD(model.parameters(), lr=0.05)
            generator = torch.Generator(place).manual_seed(0)
            with closing(GraphedPasses(loss(model), optimizer, K, device=place, graphs=with_graphs)) as passes:
                for _ in range(NUM_STEPS):
                    total = passes(*draw(generator)).clone()
                    optimizer.step()
            found.append(total)
        torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-2)
