"""A ResNet on CIFAR-10: k micro-batches a step in every arm, warm-up, cosine decay to 0, label smoothing.

Batch norm sees the micro-batch, in the base arm too. Nothing inside an epoch waits for the device, but for the clock
around an evaluation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from gradvitals.errors import GradvitalsError
from gradvitals.lab.vrgd.arms import make_optimizer, warmup_cosine
from gradvitals.lab.vrgd.graphs import WARM_UP, GraphedPasses
from gradvitals.lab.vrgd.groups import scaled_start_lr
from gradvitals.lab.vrgd.images import Augmented, Images, Normalise, load_cifar10
from gradvitals.lab.vrgd.resnet import ResNet, make_resnet
from gradvitals.lab.vrgd.trial import Result, Trial

NUM_CLASSES = 10
CURVE_POINTS = 6
TRAIN_EVAL_IMAGES = 10_000
EVAL_BATCH = 2_000
START_LR = {"sgd": 3.2, "momentum": 0.8, "adam": 3.2e-3, "adamw": 3.2e-3, "lamb": 1.28e-2, "lars": 12.8}
"""Where a sweep begins at `START_BATCH`: in the middle of what it is likely to need."""
START_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class CifarSettings:
    """What all trials of a comparison share, and their results depend on."""

    warmup: float = 0.15
    """Share of the steps over which the learning rate rises."""
    smoothing: float = 0.1
    """Of the labels."""
    precision: str = "bf16"
    """bf16 (autocast, float32 weights) or float32."""

    def as_dict(self) -> dict[str, float | str]:
        """For `records.Settings`."""
        return asdict(self)


def start_lr(optimizer: str, batch: int) -> float:
    """Where a sweep begins."""
    return scaled_start_lr(START_LR, START_BATCH, optimizer, batch)


@dataclass(frozen=True)
class _Data:
    train: Images
    test: Images


@cache
def _data(folder: Path, device: torch.device) -> _Data:
    """Read once in each process."""
    train, test = load_cifar10(folder)
    return _Data(train.to(device), test.to(device))


def train_cifar(
    trial: Trial,
    *,
    data: Path,
    device: str = "cpu",
    settings: CifarSettings | None = None,
    compiled: bool = False,
    graphs: bool = True,
) -> Result:
    """Train one trial.

    Args:
        trial: What to train.
        data: Folder that holds ``cifar10``.
        device: Where.
        settings: See `CifarSettings`.
        compiled: Compile the blocks of the network for training; evaluation runs as it is.
        graphs: On a GPU, replay the passes of a step as one CUDA graph; see `graphs`.

    Returns:
        ``score`` and ``train_score``: accuracy in % of the test images and of the first 10,000 training images, the
        latter as they are. ``loss``: mean over the last epoch, smoothed labels included. ``score@e``: the score after
        e epochs. ``images_per_second``: of training alone, without the first steps, in which passes are compiled and
        captured. Scores are nan where the run diverged, which is looked for at the end of each epoch.

    Raises:
        GradvitalsError: when the data is not there or the batch does not fit it.
    """
    settings = settings or CifarSettings()
    where = torch.device(device)
    if where.type == "cuda":
        torch.backends.cudnn.benchmark = True
    images = _data(data, where)
    _check(trial, len(images.train))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)
        model = make_resnet(trial.model)
    model = model.to(where)
    if compiled:
        model.compile_blocks()
    return _Training(trial, model, images, settings, where, graphs=graphs).run()


def _check(trial: Trial, num_images: int) -> None:
    if trial.batch > num_images:
        raise GradvitalsError(f"batch is {trial.batch} and there are {num_images} training images; expected no more")
    if trial.batch % trial.k:
        raise GradvitalsError(f"batch is {trial.batch}; expected a multiple of k, which is {trial.k}")


class _Training:
    def __init__(
        self,
        trial: Trial,
        model: ResNet,
        data: _Data,
        settings: CifarSettings,
        device: torch.device,
        *,
        graphs: bool,
    ) -> None:
        self.trial = trial
        self.model = model
        self.data = data
        self.settings = settings
        self.device = device
        self.graphs = graphs
        self.steps_per_epoch = len(data.train) // trial.batch
        self.num_steps = max(1, round(trial.epochs * self.steps_per_epoch))
        self.optimizer = make_optimizer(trial, model.named_parameters(), self.num_steps)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, partial(warmup_cosine, num_steps=self.num_steps, warmup=settings.warmup)
        )
        self.normalise = Normalise(device, torch.bfloat16 if settings.precision == "bf16" else torch.float32)
        self.batches = Augmented(data.train, self.normalise, trial.seed)
        self.losses = torch.full((self.num_steps,), math.nan, device=device)
        self.clock = _Clock(device)

    def run(self) -> Result:
        start = time.perf_counter()
        untimed = min(WARM_UP + 1, self.num_steps - 1)
        evaluate_after = {round(self.num_steps * point / CURVE_POINTS) - 1 for point in range(1, CURVE_POINTS + 1)}
        curve: dict[int, Tensor] = {}
        done = 0
        self.model.train()
        with closing(
            GraphedPasses(self._loss, self.optimizer, self.trial.k, device=self.device, graphs=self.graphs)
        ) as passes:
            for step in range(self.num_steps):
                place = step % self.steps_per_epoch
                if step and place == 0:
                    if not self._is_finite(step):
                        break
                    self.batches.start_epoch()
                if step == untimed:
                    self.clock.restart()
                self.losses[step] = passes(*self.batches.batch(place * self.trial.batch, self.trial.batch))
                self.optimizer.step()
                self.scheduler.step()
                done = step + 1
                if step in evaluate_after:
                    with self.clock.stopped():
                        curve[done] = self._accuracy(self.data.test)
            training_seconds = self.clock.read()
            diverged = not self._is_finite(done)
        train_score = None if diverged else self._accuracy(self.data.train, TRAIN_EVAL_IMAGES)
        result = {
            "score": math.nan if diverged else float(curve[done]),
            "train_score": math.nan if train_score is None else float(train_score),
            "loss": float(self.losses[max(0, done - self.steps_per_epoch) : done].mean()),
            "chance": 100 / NUM_CLASSES,
            "seconds": time.perf_counter() - start,
            "images_per_second": max(0, done - untimed) * self.trial.batch / training_seconds,
            "steps": float(done),
        }
        return result | {f"score@{step / self.steps_per_epoch:.4g}": float(score) for step, score in curve.items()}

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with self._autocast():
            logits = self.model(images)
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.settings.smoothing)

    @torch.no_grad()
    def _accuracy(self, images: Images, limit: int | None = None) -> Tensor:
        """In %, as a number that is still on the device."""
        self.model.eval()
        pixels, labels = images.pixels[:limit], images.labels[:limit]
        correct = torch.zeros((), device=self.device)
        for some, truth in zip(pixels.split(EVAL_BATCH), labels.split(EVAL_BATCH), strict=True):
            with self._autocast():
                logits = self.model(self.normalise(some))
            correct += (logits.argmax(1) == truth).sum()
        self.model.train()
        return 100 * correct / len(labels)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.settings.precision == "bf16":
            # A cast that outlived its pass would not be made again when a graph is replayed.
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        return nullcontext()

    def _is_finite(self, steps: int) -> bool:
        """Whether no loss so far was nan or infinite. Waits for the device."""
        return bool(torch.isfinite(self.losses[:steps]).all())


class _Clock:
    """Seconds of work on a device. Waits for it when it is read, started or stopped."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stopped = 0.0
        self._start = self._now()

    def restart(self) -> None:
        self._stopped, self._start = 0.0, self._now()

    def read(self) -> float:
        return self._now() - self._start - self._stopped

    @contextmanager
    def stopped(self) -> Iterator[None]:
        before = self._now()
        yield
        self._stopped += self._now() - before

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
