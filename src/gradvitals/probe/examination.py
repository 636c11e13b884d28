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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.errors import ConfigError, GradvitalsError, expect
from gradvitals.probe.data import (
    Names,
    Reading,
    Subject,
    check_loader,
    check_model,
    form_of,
    names_of,
    task_of,
    unwrapped,
)
from gradvitals.probe.gradients import Gradients, Stream, signal_record, trainable
from gradvitals.probe.landscape import landscape_record
from gradvitals.probe.layers import Activations, layers_record, planned_update
from gradvitals.probe.perturb import at_rest
from gradvitals.probe.robustness import examine_robustness
from gradvitals.probe.saliency import examine_saliency
from gradvitals.probe.samples import samples_record
from gradvitals.probe.state import same_buffers, same_randomness, untouched
from gradvitals.probe.verdict import item, verdicts
from gradvitals.types import json_ready

EXAMPLES = 4
TOLERANCE = {True: 0.03, False: 3e-3}
"""Relative tolerance, by whether half precision is used: a batch sums in another order than its examples."""


def averaging_of(subject: Subject, batch: Any) -> dict[str, Any]:
    """Compare the loss of a few examples together with their losses one by one, in eval mode.

    Returns:
        `kind` (``mean``, ``sum``, ``weighted``, ``other``, or ``unknown`` if undetermined: a single example, a
        loss that needs several or draws random numbers), and the two losses as `together` and `mean_of_singles`.
    """
    count = min(EXAMPLES, subject.size(batch))
    nothing = {"kind": "unknown", "together": math.nan, "mean_of_singles": math.nan}
    if count < 2:
        return nothing
    some = subject.take(batch, 0, count)
    try:
        with torch.no_grad(), at_rest(subject.model):
            together, again = (_loss(subject, some, seed) for seed in (0, 1))
            singles = [_loss(subject, subject.take(batch, i, i + 1), 0) for i in range(count)]
    except Exception:  # the model may need more than one example; only the whole batch matters
        return nothing
    mean = math.fsum(singles) / count
    if together != again or not math.isfinite(mean + together):
        return nothing
    near = TOLERANCE[_is_half(subject)] * max(abs(mean), abs(together), 1e-6)
    if abs(together - mean) <= near:
        kind = "mean"
    elif abs(together - count * mean) <= near * count:
        kind = "sum"
    else:
        within = min(singles) - near <= together <= max(singles) + near
        kind = "weighted" if within and not _is_broadcast(subject, some) else "other"
    return {"kind": kind, "together": together, "mean_of_singles": mean, "examples": count}


def _is_half(subject: Subject) -> bool:
    narrow = any(p.is_floating_point() and p.element_size() < 4 for p in subject.model.parameters())
    return narrow or torch.is_autocast_enabled(subject.device.type)


def _is_broadcast(subject: Subject, batch: Any) -> bool:
    """Whether output and a floating-point target differ in shape, so that broadcasting compares each with all."""
    target = subject.target(batch)
    if not subject.splits or not isinstance(target, Tensor) or not target.is_floating_point():
        return False
    with torch.no_grad(), at_rest(subject.model):
        return subject.output(batch).shape != target.shape


def verdict_of(found: dict[str, Any], shapes: str) -> list[dict[str, Any]]:
    """Returns a warning if the loss is not a mean."""
    numbers = f"{found['together']:.4g} for {found.get('examples')} together, {found['mean_of_singles']:.4g} on average"
    if found["kind"] == "sum":
        title = "the batch loss is the sum of its examples' losses, not the mean"
        advice = "reduction='mean': with a sum, gradients, steps and the edge of stability grow with the batch"
        return [item("warning", "loss", title, numbers, (), advice)]
    if found["kind"] == "other":
        title = "the batch loss is not the mean of its examples' losses"
        advice = (
            "look at the shapes of output and target, one may be broadcast; where examples are compared with each "
            "other, as in a contrastive loss, what is said of single examples does not hold"
        )
        return [item("warning", "loss", title, f"{numbers}; {shapes}", (), advice)]
    return []


def note_of(found: dict[str, Any]) -> list[str]:
    """Returns a note if examples have different weights, as sequences of different length do."""
    if found["kind"] != "weighted":
        return []
    return [
        f"the batch loss weighs its examples ({found['together']:.4g} together, {found['mean_of_singles']:.4g} on "
        "average), as a mean over tokens or weights of classes do; what is said of single examples weighs them the same"
    ]


def _loss(subject: Subject, batch: Any, seed: int) -> float:
    with same_randomness(seed):
        return float(subject.loss(batch))


AT_REST = (
    "the optimizer's learning rate is 0 now, as at the start of a warm-up: no thresholds by the learning rate and no "
    "size of a step; give lr= the rate that is planned"
)


def learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """Returns the largest learning rate of all groups; None if all are 0."""
    largest = max((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), default=0.0)
    return largest if largest > 0 else None


def notes_on_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Returns notes on parameters that the optimizer does not step.

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
    more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
    return [f"the optimizer leaves out {', '.join(missing[:2])}{more}: nothing trains them"]


Progress = Callable[[int, int, str], object]


class ProgressReport:
    """Counts finished parts and reports progress."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def step(self, label: str) -> None:
        """One part is done."""
        self.done = min(self.done + 1, self.total)
        self.report(label)

    def report(self, label: str) -> None:
        """Report what happens within a part."""
        self.progress(self.done, self.total, label)


@contextmanager
def reporting(progress: Progress | bool, total: int) -> Iterator[ProgressReport]:
    """Use the given function, or else a progress bar if stderr is a terminal."""
    if callable(progress):
        yield ProgressReport(progress, total)
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not progress or not console.is_terminal:
        yield ProgressReport(lambda done, total, label: None, total)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield ProgressReport(lambda done, total, label: bar.update(task, completed=done, description=label), total)


QUESTIONS = ("signal", "layers", "samples", "landscape", "saliency", "robustness")
"""In the order in which they are answered."""

Answer = dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The results of an examination. Every field is plain: numbers, strings, lists and dicts.

    A question that was not asked, or could not be answered, is None; `notes` says why. docs/probe.md has every field.
    """

    about: dict[str, Any]
    """The model, the data and how they were examined."""
    verdict: list[dict[str, Any]]
    """What the answers mean, worst first."""
    notes: list[str]
    """What differs from the request."""
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
        """Write a self-contained HTML page.

        Returns:
            Where it was written.
        """
        from gradvitals.report.probe_report import probe_page

        target = Path(path)
        target.write_text(probe_page(self.record()), encoding="utf-8")
        return target

    def __str__(self) -> str:
        """Returns the tables of the terminal, without colors."""
        from gradvitals.report.probe_report import probe_text

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
    progress: Callable[[int, int, str], object] | bool = True,
) -> Probe:
    """Examine a model and its data: before, between or after training.

    The model is left exactly as it was: parameters, gradients, running statistics, random numbers, flags, hooks. It is
    looked at in the mode it is in; call `model.eval()` before, to look at it without dropout.

    Args:
        model: The model; one inside `torch.compile` or DDP is looked at as it is inside.
        loader: A DataLoader, or anything that gives batches: a tensor, (inputs, target), a mapping of tensors, a named
            tuple, a dataclass. An iterator is used up as far as it was read.
        loss_fn: ``loss_fn(output, target)``; ``loss_fn(model, batch)`` where its first argument is called `model`; None
            where the model gives its loss itself, as those of Hugging Face do.
        n_batches: Batches to take gradients of; GSNR is better known with more.
        lr: Learning rate, for thresholds and the size of a step. Taken from the optimizer where that is given.
        optimizer: To see the step it would make; the step is made by a copy.
        questions: Which to ask: ``signal``, ``layers``, ``samples``, ``landscape``, ``saliency``, ``robustness``.
        device: Where batches are moved to; the model has to be there already. By default the model's.
        examples: Examples whose own gradients are looked at.
        memory_mb: Megabytes that the gradients of single examples may take at once.
        names: What features, classes and tokens are called, for saliency; by default what model and loader tell.
        progress: True for a bar where stderr is a terminal, False for none, or a function that is called with how much
            is done, how much there is, and what is going on.

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
    model = unwrapped(check_model(model))
    check_loader(loader)
    parameters = trainable(model)
    notes = []
    if optimizer is not None:
        notes = notes_on_optimizer(optimizer, parameters)
        lr = learning_rate(optimizer) if lr is None else lr
        notes += [AT_REST] if lr is None else []
    subject = Subject(model, loss_fn, form_of(loss_fn), _place(next(iter(parameters.values())).device, device))
    steps = n_batches + len(asked)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        untouched(model),
        untouched(loss_fn) if isinstance(loss_fn, nn.Module) else nullcontext(),
        reporting(progress, steps) as report,
    ):
        examination = _Examination(subject, parameters, asked, lr, optimizer, report, names, notes)
        return examination.run(loader, n_batches, examples, memory_mb)


class _Examination:
    def __init__(
        self,
        subject: Subject,
        parameters: dict[str, nn.Parameter],
        asked: list[str],
        lr: float | None,
        optimizer: torch.optim.Optimizer | None,
        report: ProgressReport,
        names: Names | None,
        notes: list[str],
    ) -> None:
        self.subject, self.parameters, self.asked = subject, parameters, asked
        self.lr, self.optimizer, self.progress, self.names = lr, optimizer, report, names
        self.notes = notes
        self.stepping = optimizer if optimizer is not None and learning_rate(optimizer) else None
        """The optimizer, if its step changes anything."""
        self.losses: list[float] = []
        self.sizes: list[int] = []
        self.kept: list[Any] = []
        """The first batches, for questions about examples."""
        self.activations = Activations(subject.model)

    def run(self, loader: Iterable[Any], n_batches: int, examples: int, memory_mb: int) -> Probe:
        """Answer all questions."""
        started = time.perf_counter()
        stream = Stream(list(self.parameters.values()), n_batches)
        self.reading = Reading(loader)
        self._stream(n_batches, examples, stream)
        first = self.subject.move(self.kept[0])
        self.subject = replace(self.subject, task=self._task(first))
        size = round(statistics.median(self.sizes))
        dataset = getattr(loader, "dataset", None)
        train_size = _length(dataset)
        with untouched(self.subject.model):
            averaging = averaging_of(self.subject, first)
        self.notes += note_of(averaging)
        names = self.names or names_of(self.subject.model, loader)
        ways: dict[str, Callable[[], Any]] = {
            "signal": lambda: signal_record(list(self.parameters), stream, size, self.lr),
            "layers": lambda: self._layers(stream),
            "samples": lambda: samples_record(
                self.subject,
                self.parameters,
                self.kept,
                most=examples,
                memory_limit=memory_mb << 20,
                train_size=train_size,
                indices=self.reading.of,
                label=names.label,
                tick=self.progress.report,
            ),
            "landscape": lambda: landscape_record(
                self.subject,
                list(self.parameters.values()),
                first,
                lr=self.lr,
                optimizer=self.stepping,
                tick=self.progress.report,
            ),
            "saliency": lambda: examine_saliency(self.subject, first, tick=self.progress.report, names=names),
            "robustness": lambda: examine_robustness(self.subject, first, tick=self.progress.report),
        }
        answers = {question: self._answer(question, ways[question]) for question in QUESTIONS if question in self.asked}
        if answers.get("samples") and self.reading.indices is None and not isinstance(loader, (list, tuple)):
            self.notes.append(
                "samples: the loader tells no places in a data set; batch and position are those of this time"
            )
        about = self._about(n_batches, size, train_size, [q for q in answers if answers[q] is not None])
        about["seconds"] = time.perf_counter() - started
        shapes = self._shapes(first) if averaging["kind"] == "other" else ""
        about["averaging"] = averaging["kind"]
        found = verdicts({"about": about, **answers}, verdict_of(averaging, shapes))
        return Probe(about=about, verdict=found, notes=self.notes, **answers)

    def _stream(self, n_batches: int, examples: int, stream: Stream) -> None:
        """One pass over the batches."""
        wants_gradients = bool({"signal", "layers"} & set(self.asked))
        watch = self.activations.watching if "layers" in self.asked else nullcontext
        gradients = Gradients(list(self.parameters.values()))
        # Closed now, so that the loader's generators are restored now and not later.
        with closing(self.reading.first(n_batches)) as batches:
            for number, raw in enumerate(batches, 1):
                batch = self.subject.move(raw)
                if sum(self.sizes) < examples:
                    self.kept.append(raw)
                self.sizes.append(self.subject.size(batch))
                with same_buffers(self.subject.model):  # every batch meets the statistics of the model as given
                    with watch(), torch.set_grad_enabled(wants_gradients):
                        loss = self.subject.loss(batch)
                    if wants_gradients:
                        stream.add(gradients(loss))
                self.losses.append(float(loss.detach()))
                self.progress.step(f"batch {number}")
        self._note_on_batches(n_batches)

    def _note_on_batches(self, n_batches: int) -> None:
        found = len(self.losses)
        if not found:
            raise GradvitalsError("the loader gave no batch; expected at least one: is it an iterator already used up?")
        if found < n_batches:
            self.notes.append(f"{found} of {n_batches} batches: the loader had no more")
        if found == 1:
            self.notes.append("one batch has no spread: GSNR needs two or more, and is better known with ten")
        if len(set(self.sizes)) > 1:
            self.notes.append(
                f"batches have {min(self.sizes)} to {max(self.sizes)} examples and weigh the same; "
                "GSNR stands for the median size"
            )

    def _shapes(self, batch: Any) -> str:
        """Returns the shapes of output and target, if both are tensors."""
        try:
            with untouched(self.subject.model), torch.no_grad():
                output, target = self.subject.output(batch), self.subject.target(batch)
        except Exception:  # only the loss can call the model
            return "an output that cannot be had by itself"
        return f"output {tuple(output.shape)}, target {tuple(getattr(target, 'shape', ()))}"

    def _task(self, batch: Any) -> str:
        try:
            with untouched(self.subject.model):
                return task_of(self.subject, batch)
        except Exception:  # only some questions need the output
            return "unknown"

    def _answer(self, question: str, way: Callable[[], Any]) -> Any:
        """Answer one question. An error becomes a note, and the other questions are still answered."""
        try:
            # Each question starts with the model as it was given.
            with untouched(self.subject.model):
                answer = way()
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            self.notes.append(f"{question}: no answer: {text[:300]}")
            answer = None
        self.progress.step(question)
        if isinstance(answer, tuple):
            answer, notes = answer
            self.notes += notes
        return answer

    def _layers(self, stream: Stream) -> dict[str, Any]:
        updates = None
        if self.stepping is not None and stream.count:
            try:
                updates = planned_update(self.stepping, list(self.parameters.values()), stream.mean)
            except Exception as error:
                self.notes.append(f"layers: the optimizer's step could not be made on a copy: {error}")
        self.notes += self.activations.notes
        mean = stream.mean if stream.count else [torch.full_like(one, math.nan) for one in stream.mean]
        return layers_record(self.parameters, mean, updates, self.lr, self.activations.records())

    def _about(self, asked: int, size: int, train_size: int | None, answered: list[str]) -> dict[str, Any]:
        flags = {module.training for module in self.subject.model.modules()}
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        return {
            "model": type(self.subject.model).__name__,
            "num_parameters": sum(p.numel() for p in self.parameters.values()),
            "num_tensors": len(self.parameters),
            "task": self.subject.task,
            "device": str(self.subject.device),
            "mode": "mixed" if len(flags) > 1 else "train" if True in flags else "eval",
            "lr": self.lr,
            "optimizer": type(self.optimizer).__name__ if self.optimizer is not None else None,
            "batches": len(self.losses),
            "batches_asked": asked,
            "batch_size": size,
            "examples": sum(self.sizes),
            "train_size": train_size,
            "loss": statistics.fmean(finite) if finite else math.nan,
            "losses": self.losses,
            "questions": answered,
        }


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # no length
        return None


def _place(home: torch.device, wanted: str | torch.device | None) -> torch.device:
    """Returns the device for batches."""
    if wanted is None:
        return home
    place = torch.device(wanted)
    if place.type != home.type or (place.index is not None and place.index != (home.index or 0)):
        raise ConfigError(f"device is {place} and the model is on {home}; expected the same: call model.to('{place}')")
    return home


PLACES = ("model", "loader", "loss_fn", "optimizer")
WANTED = "(model, loader), (model, loader, loss), (model, loader, loss, optimizer) or a dict of arguments of gv.probe"


def made_by(path: str, device: str | None = None) -> dict[str, Any]:
    """Returns the arguments of `probe` that a factory function makes.

    Args:
        path: ``package.module:function``; modules in the current folder are found too.
        device: ``cpu``, ``cuda`` or ``auto`` to move the model there.

    Raises:
        GradvitalsError: when there is no such function, or it returns something else.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
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
        for p in _parameters(function)
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise GradvitalsError(
            f"{path} takes {', '.join(needed)}; expected a function without arguments, that returns {WANTED}"
        )
    arguments = _arguments(path, function())
    if device is not None:
        arguments["model"].to(_device(device))
    return arguments


def _arguments(path: str, made: Any) -> dict[str, Any]:
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
    return arguments


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not written in Python
        return []


def _device(name: str) -> str:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise GradvitalsError("device is cuda and torch finds no GPU here; expected cpu or auto")
    return ("cuda" if has_gpu else "cpu") if name == "auto" else name
