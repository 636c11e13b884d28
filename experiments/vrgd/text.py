"""A small transformer learns books, byte by byte, with large batches.

The text lies on the device as bytes and windows are cut out of it there, so that nothing but training takes time. The
score is minus the loss on books that it did not see, in nats a byte, over the same windows for every trial.
"""

from __future__ import annotations

import lzma
import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.vrgd.loop import check_parts, train_steps
from experiments.vrgd.trial import Result, Trial
from gradvitals.demo import CharLM, CharLMConfig
from gradvitals.errors import GradvitalsError

TRAIN_FILE = "books_train.txt.xz"
VALID_FILE = "books_valid.txt.xz"
VOCAB_SIZE = 256

MODELS = {
    "gpt-tiny": CharLMConfig(vocab_size=VOCAB_SIZE, context=64, d_model=64, n_layer=2, n_head=2),
    "gpt-mini": CharLMConfig(vocab_size=VOCAB_SIZE, context=128, d_model=192, n_layer=4, n_head=3),
    "gpt-small": CharLMConfig(vocab_size=VOCAB_SIZE, context=128, d_model=256, n_layer=6, n_head=4),
}
"""The first is for trying things on a CPU; the others have 2 and 5 million parameters.

A comparison needs many trials more than it needs a large model. The second has tensors of all the kinds that the third
has, and a trial of it takes two thirds of the kernels and less than half of the arithmetic.
"""

START_LR = {"sgd": 0.5, "momentum": 0.05, "adam": 1e-3, "adamw": 1e-3, "lamb": 8e-3, "lars": 4.0}
"""Where a sweep begins at a batch of `START_BATCH` sequences."""
START_BATCH = 512

EVAL_WINDOWS = 4096
CURVE_WINDOWS = 512
EVAL_CHUNK = 512
EVAL_SEED = 10**6


class Text:
    """Bytes on a device, and random windows of them."""

    def __init__(self, content: bytes, device: torch.device) -> None:
        self.bytes = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)

    def windows(self, number: int, context: int, generator: torch.Generator) -> Tensor:
        """`[number, context + 1]`: each window holds its inputs and, one byte on, its targets."""
        device = self.bytes.device
        starts = torch.randint(len(self.bytes) - context, (number, 1), generator=generator, device=device)
        return self.bytes[starts + torch.arange(context + 1, device=device)].long()


def read_text(path: Path, device: torch.device) -> Text:
    """The unpacked bytes of a file.

    Raises:
        GradvitalsError: when it is not there, or not xz, or too short to cut windows from.
    """
    if not path.exists():
        raise GradvitalsError(
            f"{path} is not there; expected {TRAIN_FILE} and {VALID_FILE} in the folder of --data: plain text of any "
            f"kind, packed with xz (e.g. cat *.txt | xz > {path.name}), some megabytes, different in the two"
        )
    try:
        content = lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise GradvitalsError(f"{path} could not be unpacked ({error}); expected text packed with xz") from None
    longest = max(config.context for config in MODELS.values())
    if len(content) <= longest:
        raise GradvitalsError(f"{path} has {len(content)} bytes; expected more than one window of {longest}")
    return Text(content, device)


@cache
def _text(path: Path, device: torch.device) -> Text:
    """Read once in each process."""
    return read_text(path, device)


def train_text(trial: Trial, *, data: Path, device: str = "cpu", compiled: bool = False, graphs: bool = True) -> Result:
    """Train one trial.

    Args:
        trial: What to train: `batch` is in sequences, `epochs` in steps, `model` one of `MODELS`.
        data: Folder with `TRAIN_FILE` and `VALID_FILE`.
        device: Where. On a GPU the arithmetic is bf16 (autocast, float32 weights), on a CPU float32.
        compiled: Compile the model. It takes as long as some trials; with many in one process it pays off.
        graphs: On a GPU, replay the passes of a step as one CUDA graph; see `graphs`.

    Returns:
        ``score``: minus the loss on unseen books; ``train_score``: the same on the books it learnt from, of which it
        has seen a part, once. ``score@n``: after n steps, over fewer windows. Nan where the run diverged.

    Raises:
        GradvitalsError: when the data is not there, or the model is not known, or the batch does not divide.
    """
    if trial.model not in MODELS:
        raise GradvitalsError(f"there is no model {trial.model!r}; expected one of {', '.join(MODELS)}")
    check_parts(trial)
    place = torch.device(device)
    text, unseen = _text(data / TRAIN_FILE, place), _text(data / VALID_FILE, place)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)
        model = CharLM(MODELS[trial.model])
    model = model.to(place)
    if compiled:
        model.compile(dynamic=False)
    context = model.config.context
    generator = torch.Generator(place).manual_seed(trial.seed)
    course = train_steps(
        trial,
        model,
        max(1, round(trial.epochs)),
        draw=lambda: (text.windows(trial.batch, context, generator),),
        loss=lambda windows: window_loss(model, windows),
        look=lambda: -evaluate(model, unseen, CURVE_WINDOWS),
        graphs=graphs,
    )
    done = len(course.losses)
    train_loss, unseen_loss = (float(evaluate(model, some, EVAL_WINDOWS)) for some in (text, unseen))
    result = {
        "score": math.nan if course.diverged else -unseen_loss,
        "train_score": math.nan if course.diverged else -train_loss,
        "loss": train_loss,
        "chance": -math.log(VOCAB_SIZE),
        "seconds": course.seconds,
        "bytes_per_second": done * trial.batch * context / course.seconds,
        "steps": float(done),
    }
    return result | {f"score@{step}": score for step, score in course.curve.items()}


def window_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean loss of the bytes of some windows, in nats."""
    on_gpu = windows.device.type == "cuda"
    # A cast that outlived its pass would not be made again when a graph is replayed.
    with torch.autocast(windows.device.type, dtype=torch.bfloat16, enabled=on_gpu, cache_enabled=False):
        loss: Tensor = model(windows[:, :-1], windows[:, 1:])
    return loss


@torch.no_grad()
def evaluate(model: CharLM, text: Text, num_windows: int) -> Tensor:
    """Mean loss over windows of a text, the same ones each time, as a number that is still on the device."""
    generator = torch.Generator(text.bytes.device).manual_seed(EVAL_SEED)
    windows = text.windows(num_windows, model.config.context, generator)
    losses = [window_loss(model, some) * len(some) for some in windows.split(EVAL_CHUNK)]
    return torch.stack(losses).sum() / num_windows
