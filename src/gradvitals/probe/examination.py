"""`gv.probe`: examine a model and its data offline."""

from __future__ import annotations

import importlib
import inspect
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.distributed.shards import unwrapped
from gradvitals.errors import ConfigError, GradvitalsError, expect
from gradvitals.format import listed
from gradvitals.probe.data import Names, Reading, Subject, check_arguments, form_of, names_of
from gradvitals.probe.gradients import Stream, gradients, signal_record, trainable
from gradvitals.probe.landscape import landscape_record
from gradvitals.probe.layers import Activations, layers_record, planned_update
from gradvitals.probe.opening import eval_mode
from gradvitals.probe.robustness import robustness_record
from gradvitals.probe.saliency import saliency_record
from gradvitals.probe.samples import samples_record
from gradvitals.probe.state import same_buffers, same_randomness, untouched
from gradvitals.probe.verdict import verdicts
from gradvitals.types import json_ready

QUESTIONS = ("signal", "layers", "samples", "landscape", "saliency", "robustness")
"""In the order in which they are answered."""

Answer = dict[str, Any] | None
Progress = Callable[[int, int, str], object]
"""Called with the parts done, their number and a label."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The results of an examination. Every field is plain: numbers, strings, lists and dicts.

    A question that was not asked, or could not be answered, is None; `notes` says why. docs/probe.md has every field.
    """

    about: dict[str, Any]
    """The model, the data and how they were examined."""
    verdict: list[dict[str, Any]]
    """Conclusions from the answers, worst first."""
    notes: list[str]
    """Differences from the request."""
    signal: Answer = None
    layers: Answer = None
    samples: Answer = None
    landscape: Answer = None
    saliency: Answer = None
    robustness: Answer = None

    def record(self) -> dict[str, Any]:
        """Returns all fields as one dict."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def to_dict(self) -> dict[str, Any]:
        """Returns the same for strict JSON: numbers that JSON cannot hold become 'nan', 'inf' and '-inf'."""
        ready: dict[str, Any] = json_ready(self.record())
        return ready

    def save_html(self, path: str | Path) -> Path:
        """Write a self-contained HTML page. Returns its path."""
        from gradvitals.report.probe import probe_page

        target = Path(path)
        target.write_text(probe_page(self.record()), encoding="utf-8")
        return target

    def __str__(self) -> str:
        """Returns the tables of the terminal, without colors."""
        from gradvitals.report.probe import probe_text

        return probe_text(self.record())


def probe(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: Callable[..., Any] | None = None,
    n_batches: int = 10,
    *,
    lr: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    questions: Sequence[str] | str = QUESTIONS,
    device: str | torch.device | None = None,
    examples: int = 256,
    memory_mb: int = 512,
    names: Names | None = None,
    progress: Progress | bool = True,
) -> Probe:
    """Examine a model and its data: before, between or after training.

    The model is left exactly as it was: parameters, gradients, running statistics, random numbers, flags, hooks. It
    runs in its current mode; call `model.eval()` before, to examine it without dropout.

    Args:
        model: The model; `torch.compile` and DDP wrappers are removed.
        loader: A DataLoader, or anything that yields batches: a tensor, (inputs, target), a mapping of tensors, a
            named tuple, a dataclass. An iterator is used up as far as it was read.
        loss_fn: ``loss_fn(output, target)``; ``loss_fn(model, batch)`` if its first argument is called `model`; None
            if the model returns its loss itself, as Hugging Face models do.
        n_batches: Batches to take gradients of; more make GSNR more certain.
        lr: Learning rate, for thresholds and the size of a step. Defaults to the optimizer's.
        optimizer: The optimizer, to examine its next step. A copy makes the step.
        questions: Which to ask: ``signal``, ``layers``, ``samples``, ``landscape``, ``saliency``, ``robustness``.
        device: Where batches are moved to; the model has to be there already. Defaults to the model's.
        examples: Examples whose own gradients are examined.
        memory_mb: Megabytes that the gradients of single examples may take at once.
        names: Names of features, classes and tokens, for saliency. Defaults to those that model and loader carry.
        progress: True for a bar in a terminal, False for none, or a function that is called with the parts done,
            their number and a label.

    Returns:
        The answers.

    Raises:
        ConfigError: when a setting is out of range.
        GradvitalsError: when there is no batch, a batch holds no tensor, or the loss is not one number.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> _ = torch.manual_seed(0)
        >>> data = TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
        >>> found = probe(nn.Linear(3, 1), DataLoader(data, 8), nn.MSELoss(), questions="signal", progress=False)
        >>> found.about["batches"], [row["name"] for row in found.signal["tensors"]]
        (8, ['weight', 'bias'])
    """
    asked = [questions] if isinstance(questions, str) else list(questions)
    unknown = [question for question in asked if question not in QUESTIONS]
    expect(bool(asked) and not unknown, "questions", questions, f"some of {', '.join(QUESTIONS)}")
    expect(isinstance(n_batches, int) and n_batches >= 1, "n_batches", n_batches, "a whole number of 1 or above")
    expect(isinstance(examples, int) and examples >= 2, "examples", examples, "a whole number of 2 or above")
    expect(memory_mb > 0, "memory_mb", memory_mb, "a positive number of megabytes")
    number = lr is None or (isinstance(lr, (int, float)) and lr > 0 and math.isfinite(lr))
    expect(number, "lr", lr, "a positive learning rate as a number, or None")
    check_arguments(model, loader)
    model = unwrapped(model)
    parameters = trainable(model)
    notes: list[str] = []
    if optimizer is not None:
        notes += _missing_parameters(optimizer, parameters)
        planned = max((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), default=0.0)
        if lr is None and planned > 0:
            lr = planned
        elif lr is None:
            notes.append(
                "the optimizer's learning rate is 0 now, as at the start of a warm-up: no thresholds by the learning "
                "rate and no size of a step; pass the planned rate as lr="
            )
    subject = Subject(model, loss_fn, form_of(loss_fn), _device(next(iter(parameters.values())).device, device))
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        untouched(model),
        untouched(loss_fn) if isinstance(loss_fn, nn.Module) else nullcontext(),
        _progress_bar(progress) as report,
    ):
        asking = _Examination(subject, parameters, asked, loader, n_batches, examples, lr, optimizer, report, notes)
        asking.read()
        return asking.answer(memory_mb, names or names_of(model, loader))


@dataclass
class _Examination:
    """One pass over the batches, then one question after the other."""

    subject: Subject
    parameters: dict[str, nn.Parameter]
    asked: list[str]
    loader: Iterable[Any]
    n_batches: int
    examples: int
    lr: float | None
    optimizer: torch.optim.Optimizer | None
    progress: Progress
    notes: list[str]
    losses: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    """The first batches, for questions about examples."""
    done: int = 0
    """Batches read and questions answered."""

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        steps = self.optimizer is not None and any(group.get("lr", 0.0) > 0 for group in self.optimizer.param_groups)
        self.stepping = self.optimizer if steps else None
        """The optimizer, if its step changes anything."""
        self.activations, self.reading = Activations(self.subject.model), Reading(self.loader)
        self.stream = Stream(list(self.parameters.values()), self.n_batches)

    def read(self) -> None:
        """Take the gradients of all batches."""
        parameters = list(self.parameters.values())
        wants_gradients = bool({"signal", "layers"} & set(self.asked))
        watching = self.activations.watching if "layers" in self.asked else nullcontext
        # Closed now, so that the loader's generators are restored now and not later.
        with closing(self.reading.first(self.n_batches)) as batches:
            for number, raw in enumerate(batches, 1):
                batch = self.subject.move(raw)
                if sum(self.sizes) < self.examples:
                    self.kept.append(raw)
                self.sizes.append(self.subject.size(batch))
                with same_buffers(self.subject.model):  # every batch meets the statistics of the model as given
                    with watching(), torch.set_grad_enabled(wants_gradients):
                        loss = self.subject.loss(batch)
                    if wants_gradients:
                        self.stream.add(gradients(loss, parameters))
                self.losses.append(float(loss.detach()))
                self._advance(f"batch {number}")
        found = len(self.losses)
        if not found:
            raise GradvitalsError("the loader gave no batch; expected at least one: is it an iterator already used up?")
        if found < self.n_batches:
            self.notes.append(f"{found} of {self.n_batches} batches: the loader had no more")
        if found == 1:
            self.notes.append("one batch has no spread: GSNR needs two or more, and ten make it more certain")
        if len(set(self.sizes)) > 1:
            self.notes.append(
                f"batches have {min(self.sizes)} to {max(self.sizes)} examples and weigh the same; "
                "GSNR stands for the median size"
            )

    def answer(self, memory_mb: int, names: Names) -> Probe:
        """Answer all questions."""
        subject, tick = self.subject, self._tick
        first = subject.move(self.kept[0])
        size = round(statistics.median(self.sizes))
        try:
            train_size = len(self.loader.dataset)  # type: ignore[attr-defined]
        except Exception:  # no data set, or one without a length
            train_size = None
        with untouched(subject.model):
            averaging = loss_averaging(subject, first)
        parameters = list(self.parameters.values())
        ways: dict[str, Callable[[], Any]] = {
            "signal": lambda: signal_record(list(self.parameters), self.stream, size, self.lr),
            "layers": self._layers,
            "samples": lambda: samples_record(
                subject,
                self.parameters,
                self.kept,
                most=self.examples,
                memory_limit=memory_mb << 20,
                train_size=train_size,
                indices=self.reading.of,
                label=names.label,
                tick=tick,
            ),
            "landscape": lambda: landscape_record(
                subject, parameters, first, lr=self.lr, optimizer=self.stepping, tick=tick
            ),
            "saliency": lambda: saliency_record(subject, first, names, tick),
            "robustness": lambda: robustness_record(subject, first, tick),
        }
        answers = {question: self._ask(question, ways[question]) for question in QUESTIONS if question in self.asked}
        if answers.get("samples") and self.reading.indices is None and not isinstance(self.loader, (list, tuple)):
            self.notes.append(
                "samples: the loader does not reveal places in a data set; batch and position are those of this time"
            )
        if averaging["kind"] == "weighted":
            self.notes.append(
                f"the batch loss weighs its examples ({averaging['numbers']}), as a mean over tokens or class weights "
                "do; the answers on single examples weigh them the same"
            )
        about = {
            **self._about(first, size, train_size),
            "averaging": averaging["kind"],
            "questions": [question for question in answers if answers[question] is not None],
            "seconds": time.perf_counter() - self.started,
        }
        found = verdicts({"about": about, **answers}, averaging)
        return Probe(about=about, verdict=found, notes=self.notes, **answers)

    def _tick(self, label: str) -> None:
        self.progress(self.done, self.n_batches + len(self.asked), label)

    def _advance(self, label: str) -> None:
        self.done += 1
        self._tick(label)

    def _ask(self, question: str, way: Callable[[], Any]) -> Any:
        """Answer one question. An error becomes a note, and the other questions are still answered."""
        try:
            # Each question starts with the model as it was given.
            with untouched(self.subject.model):
                answer = way()
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            self.notes.append(f"{question}: no answer: {text[:300]}")
            answer = None
        self._advance(question)
        if isinstance(answer, tuple):
            answer, notes = answer
            self.notes += notes
        return answer

    def _layers(self) -> dict[str, Any]:
        updates, mean = None, self.stream.mean
        if not self.stream.count:
            mean = [torch.full_like(one, math.nan) for one in mean]
        elif self.stepping is not None:
            try:
                updates = planned_update(self.stepping, list(self.parameters.values()), mean)
            except Exception as error:
                self.notes.append(f"layers: the optimizer's step could not be made on a copy: {error}")
        self.notes += self.activations.notes
        return layers_record(self.parameters, mean, updates, self.lr, self.activations.records())

    def _about(self, batch: Any, size: int, train_size: int | None) -> dict[str, Any]:
        model = self.subject.model
        flags = {module.training for module in model.modules()}
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        try:
            with untouched(model):
                task = self.subject.task(batch)
        except Exception:  # only some questions need the output
            task = "unknown"
        return {
            "model": type(model).__name__,
            "num_parameters": sum(p.numel() for p in self.parameters.values()),
            "num_tensors": len(self.parameters),
            "task": task,
            "device": str(self.subject.device),
            "mode": "mixed" if len(flags) > 1 else "train" if True in flags else "eval",
            "lr": self.lr,
            "optimizer": type(self.optimizer).__name__ if self.optimizer is not None else None,
            "batches": len(self.losses),
            "batches_asked": self.n_batches,
            "batch_size": size,
            "examples": sum(self.sizes),
            "train_size": train_size,
            "loss": statistics.fmean(finite) if finite else math.nan,
            "losses": self.losses,
        }


AVERAGED_EXAMPLES = 4
HALF_TOLERANCE, TOLERANCE = 0.03, 3e-3
"""Relative tolerance in half precision and otherwise: a batch sums in another order than its examples."""


def loss_averaging(subject: Subject, batch: Any) -> dict[str, str]:
    """Compare the loss of a few examples together with their losses one by one, in eval mode.

    Returns:
        `kind` (``mean``, ``sum``, ``weighted``, ``other``, or ``unknown`` for a single example or a loss that needs
        several or draws random numbers), `numbers` (both losses in words) and `shapes` (of output and target).
    """
    unknown = {"kind": "unknown", "numbers": "", "shapes": ""}
    count = min(AVERAGED_EXAMPLES, subject.size(batch))
    if count < 2:
        return unknown
    some = subject.take(batch, 0, count)

    def loss(batch: Any, seed: int) -> float:
        with same_randomness(seed):
            return float(subject.loss(batch))

    try:
        with torch.no_grad(), eval_mode(subject.model):
            together, again = loss(some, 0), loss(some, 1)
            singles = [loss(subject.take(batch, i, i + 1), 0) for i in range(count)]
    except Exception:  # the model may need more than one example; only the whole batch matters
        return unknown
    mean = math.fsum(singles) / count
    if together != again or not math.isfinite(mean + together):
        return unknown
    half = any(p.is_floating_point() and p.element_size() < 4 for p in subject.model.parameters())
    half = half or torch.is_autocast_enabled(subject.device.type)
    near = (HALF_TOLERANCE if half else TOLERANCE) * max(abs(mean), abs(together), 1e-6)
    shapes = ""
    if abs(together - mean) <= near:
        kind = "mean"
    elif abs(together - count * mean) <= near * count:
        kind = "sum"
    else:
        shapes, broadcast = _shapes(subject, batch)
        within = min(singles) - near <= together <= max(singles) + near
        kind = "weighted" if within and not broadcast else "other"
    numbers = f"{together:.4g} for {count} together, {mean:.4g} on average"
    return {"kind": kind, "numbers": numbers, "shapes": shapes}


def _shapes(subject: Subject, batch: Any) -> tuple[str, bool]:
    """Returns the shapes of output and target in words, and whether the loss broadcasts one against the other."""
    try:
        with torch.no_grad(), eval_mode(subject.model):
            output, target = subject.output(batch), subject.target(batch)
    except Exception:  # only the loss can call the model
        return "the output is not available on its own", False
    broadcast = False
    if subject.splits and isinstance(target, Tensor):
        broadcast = target.is_floating_point() and output.shape != target.shape
    return f"output {tuple(output.shape)}, target {tuple(getattr(target, 'shape', ()))}", broadcast


def _missing_parameters(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Returns a note on parameters that the optimizer does not step.

    Raises:
        ConfigError: when it trains none of them.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in parameters.items() if id(p) not in held]
    if len(missing) == len(parameters):
        raise ConfigError(
            f"optimizer is {type(optimizer).__name__} of {len(held)} tensors, none of them this model's; expected the "
            "one made with this model's parameters, after they were last replaced"
        )
    if not missing:
        return []
    return [f"the optimizer leaves out {listed(missing, 2)}: nothing trains them"]


def _device(home: torch.device, wanted: str | torch.device | None) -> torch.device:
    """Returns the device for batches: the model's."""
    place = home if wanted is None else torch.device(wanted)
    if place.type != home.type or (place.index is not None and place.index != (home.index or 0)):
        raise ConfigError(f"device is {place} and the model is on {home}; expected the same: call model.to('{place}')")
    return home


@contextmanager
def _progress_bar(progress: Progress | bool) -> Iterator[Progress]:
    """Use the given function, or else a bar if stderr is a terminal."""
    if callable(progress):
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not progress or not console.is_terminal:
        yield lambda done, total, label: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting")
        yield lambda done, total, label: bar.update(task, completed=done, total=total, description=label)


PLACES = ("model", "loader", "loss_fn", "optimizer")
WANTED = "(model, loader), (model, loader, loss), (model, loader, loss, optimizer) or a dict of arguments of gv.probe"


def made_by(path: str, device: str | None = None) -> dict[str, Any]:
    """Returns the arguments of `gv.probe` that a factory function makes; finds modules in the current folder too.

    Args:
        path: ``package.module:function``.
        device: ``cpu``, ``cuda`` or ``auto`` to move the model there.

    Raises:
        GradvitalsError: when there is no such function, or it returns something else.
    """
    made = _function(path)()
    if isinstance(made, Mapping):
        arguments = {str(key): value for key, value in made.items()}
    elif isinstance(made, (tuple, list)) and 2 <= len(made) <= len(PLACES):
        arguments = dict(zip(PLACES, made, strict=False))
    else:
        raise GradvitalsError(f"{path} returned {type(made).__name__}; expected {WANTED}")
    if not isinstance(arguments.get("model"), nn.Module) or "loader" not in arguments:
        got = type(arguments.get("model")).__name__
        raise GradvitalsError(f"{path} returned a model of type {got}; expected {WANTED}, with a torch.nn.Module first")
    known = list(inspect.signature(probe).parameters)
    unknown = [key for key in arguments if key not in known]
    if unknown:
        raise GradvitalsError(
            f"{path} returned a dict with the key {unknown[0]!r}; expected some of {', '.join(known)}"
        )
    if device is not None:
        arguments["model"].to(pick_device(device))
    return arguments


def _function(path: str) -> Any:
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise GradvitalsError(f"the factory is {path!r}; expected package.module:function, e.g. train:make_probe")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise GradvitalsError(f"the factory is {path!r}; expected the module without .py: {dotted}:{name}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise GradvitalsError(
            f"there is no module {error.name!r} to import {path!r} from; expected it in {here} or installed"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise GradvitalsError(f"{module_name} has no function {name!r}; expected one that returns {WANTED}")
    needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise GradvitalsError(
            f"{path} takes {', '.join(needed)}; expected a function without arguments that returns {WANTED}"
        )
    return function


def pick_device(name: str) -> str:
    """Returns ``cpu`` or ``cuda``; ``auto`` is a GPU if there is one.

    Raises:
        GradvitalsError: if a GPU is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise GradvitalsError("device is cuda and torch finds no GPU here; expected cpu or auto")
    return ("cuda" if has_gpu else "cpu") if name == "auto" else name
