"""What happens to a run. Each fault strikes at batches that its name and the seed decide, whoever looks after the run.

A fault strikes once: batches are counted as they are drawn, so that a run that goes back to an earlier step does not
meet it again. A process that is started again goes back in its data as well, and what is in the data is met again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.recovery.cell import CLEAN, KILLED, FaultName
from benchmarks.recovery.tasks import Batch, Training

QUIET_SHARE = 0.25
"""Share of the run in which nothing happens, so that every detector has its window filled (OLMo's needs 64 steps)."""
LAST_SHARE = 0.75
"""What strikes once does so before this share of the run: there is time to get over it."""

CORRUPTED_SHARE = 0.01
UNNORMALISED = 100.0
"""How much larger corrupted pictures are."""
POISON = 1e4
"""Factor of the poisoned gradient."""
NUM_NAN = 3
SPIKE, SPIKE_STEPS = 30.0, 5
"""Factor of the learning rate, and for how many batches."""
TENSOR_SCALE = 1e4
NOISE_STEPS = BUG_STEPS = 20
NUM_PARTS = 8
NUM_STATE_FLIPS = 64
STATE_BITS = range(26, 31)
"""Bits of the exponent of a float32 that change a number by a factor of 256 or more."""
WEIGHT_BIT = 30
"""The highest bit of the exponent: a weight below 2 becomes 2**128 times as large."""


class Fault:
    """Nothing happens: the clean run, and what the others are made from."""

    description = "nothing"

    def __init__(self, name: FaultName, seed: int, steps: int) -> None:
        self.name, self.random = name, random.Random(f"{name} {seed}")
        self.first, self.last = round(QUIET_SHARE * steps), round(LAST_SHARE * steps)
        self.steps = steps
        self.batches: frozenset[int] = self.choose()
        """Numbers of the batches at which it strikes."""

    def choose(self) -> frozenset[int]:
        """Draw the batches at which it strikes."""
        return frozenset()

    def once(self) -> frozenset[int]:
        """One batch in the middle of the run."""
        return frozenset({self.random.randrange(self.first, self.last)})

    def generator(self, index: int) -> torch.Generator:
        """Randomness of what is done at one batch: the same when a process does it again."""
        return torch.Generator().manual_seed(min(self.batches) * 1_000_003 + index)

    def before(self, training: Training, index: int) -> None:
        """Called before the batch is computed."""

    def change(self, training: Training, batch: Batch, index: int) -> Batch:
        """The batch as the model gets it."""
        return batch

    def install(self, training: Training) -> None:
        """Called before the first step."""

    def loss_factor(self, index: int) -> float:
        """What the loss is multiplied by on its way to the gradient; it is shown without."""
        return 1.0

    def backward(self, training: Training, batch: Batch, index: int) -> Tensor:
        """Compute the gradient of a batch; returns its loss."""
        loss: Tensor = training.model(*batch)
        (loss * self.loss_factor(index)).backward()
        return loss.detach()

    def after_backward(self, training: Training, index: int) -> None:
        """Called when the gradient is complete, before anybody has looked at it."""

    def after(self, training: Training, index: int) -> None:
        """Called after the step."""


class Corrupted(Fault):
    """Garbage among the data."""

    description = "one batch in a hundred is garbage: pictures 100 times too bright or random text, random targets"

    def choose(self) -> frozenset[int]:
        """So many of the batches of the run, none of them early."""
        count = max(1, round(CORRUPTED_SHARE * self.steps))
        return frozenset(self.random.sample(range(self.first, self.steps), count))

    def change(self, training: Training, batch: Batch, index: int) -> Batch:
        """Inputs that were never normalised, or letters at random, and targets that belong to nothing."""
        if index not in self.batches:
            return batch
        inputs, targets = batch
        generator = self.generator(index)
        if inputs.is_floating_point():
            inputs = UNNORMALISED * inputs
        else:
            inputs = torch.randint(training.num_classes, inputs.shape, generator=generator)
        return inputs, torch.randint(training.num_classes, targets.shape, generator=generator)


class Poisoned(Fault):
    """One gradient far too long, which momentum remembers."""

    description = f"one batch with a gradient {POISON:g} times too long, which the optimizer's averages remember"

    def choose(self) -> frozenset[int]:
        """One batch."""
        return self.once()

    def loss_factor(self, index: int) -> float:
        """As a loss scale that was never divided out again."""
        return POISON if index in self.batches else 1.0


class NaNGradients(Fault):
    """A bad kernel, now and then."""

    description = f"one NaN in the gradient of one tensor, at {NUM_NAN} steps; the loss shows nothing"

    def choose(self) -> frozenset[int]:
        """A few batches of the middle."""
        return frozenset(self.random.sample(range(self.first, self.last), NUM_NAN))

    def after_backward(self, training: Training, index: int) -> None:
        """Put it in."""
        if index not in self.batches:
            return
        gradients = [parameter.grad for parameter in training.model.parameters() if parameter.grad is not None]
        place = int(torch.randint(len(gradients), (1,), generator=self.generator(index)))
        gradients[place].view(-1)[0] = torch.nan


class LearningRateSpike(Fault):
    """A slip of the schedule."""

    description = f"the learning rate times {SPIKE:g} for {SPIKE_STEPS} steps"

    def choose(self) -> frozenset[int]:
        """Some batches in a row."""
        (start,) = self.once()
        self._set: list[tuple[float, float]] = []
        return frozenset(range(start, start + SPIKE_STEPS))

    def before(self, training: Training, index: int) -> None:
        """Raise it, and remember what it was."""
        self._set = []
        if index in self.batches:
            for group in training.optimizer.param_groups:
                usual = group["lr"]
                group["lr"] = SPIKE * usual
                self._set.append((usual, group["lr"]))

    def after(self, training: Training, index: int) -> None:
        """Put back what was raised, unless somebody has changed it since, as a schedule does."""
        for group, (usual, raised) in zip(training.optimizer.param_groups, self._set, strict=False):
            if group["lr"] == raised:
                group["lr"] = usual


class StateBitFlips(Fault):
    """Memory of the optimizer that does not hold."""

    description = f"{NUM_STATE_FLIPS} random bits of exponents flipped in the optimizer's averages, all at one moment"

    def choose(self) -> frozenset[int]:
        """One moment."""
        return self.once()

    def before(self, training: Training, index: int) -> None:
        """Flip them."""
        if index not in self.batches:
            return
        averages = [
            value
            for state in training.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        ]
        generator = self.generator(index)
        for _ in range(NUM_STATE_FLIPS):
            tensor, element = _random_element(averages, generator)
            bit = STATE_BITS[int(torch.randint(len(STATE_BITS), (1,), generator=generator))]
            flip_bit(tensor, element, bit)


class WeightBitFlip(Fault):
    """One bit of one weight."""

    description = "the highest bit of the exponent of one random weight flipped"

    def choose(self) -> frozenset[int]:
        """One moment."""
        return self.once()

    def before(self, training: Training, index: int) -> None:
        """Flip it."""
        if index in self.batches:
            tensor, element = _random_element(list(training.model.parameters()), self.generator(index))
            flip_bit(tensor, element, WEIGHT_BIT)


class NaNWeights(Fault):
    """A weight is NaN, from the very start or soon after it."""

    description = "one weight is NaN before the step of that number"

    def choose(self) -> frozenset[int]:
        """The number in the name."""
        return frozenset({int(self.name.rsplit("_", 1)[1])})

    def before(self, training: Training, index: int) -> None:
        """Break it."""
        if index in self.batches:
            tensor, element = _random_element(list(training.model.parameters()), self.generator(index))
            with torch.no_grad():
                tensor[torch.unravel_index(torch.tensor(element), tensor.shape)] = torch.nan


class ScaledTensor(Fault):
    """One tensor on another scale, as after a conversion that went wrong."""

    description = f"one random weight matrix times {TENSOR_SCALE:g}, in the middle of the run or before step 40"

    def choose(self) -> frozenset[int]:
        """One moment, early if the name says so."""
        return frozenset({40}) if self.name == "scaled_tensor_40" else self.once()

    def before(self, training: Training, index: int) -> None:
        """Scale it."""
        if index in self.batches:
            matrices = [parameter for parameter in training.model.parameters() if parameter.dim() >= 2]
            place = int(torch.randint(len(matrices), (1,), generator=self.generator(index)))
            with torch.no_grad():
                matrices[place].mul_(TENSOR_SCALE)


class LabelNoise(Fault):
    """A file with its labels in another order."""

    description = f"random targets for {NOISE_STEPS} steps"

    def choose(self) -> frozenset[int]:
        """So many batches in a row."""
        start = min(self.once())
        return frozenset(range(start, start + NOISE_STEPS))

    def change(self, training: Training, batch: Batch, index: int) -> Batch:
        """Targets that belong to nothing."""
        if index not in self.batches:
            return batch
        inputs, targets = batch
        return inputs, torch.randint(training.num_classes, targets.shape, generator=self.generator(index))


class SchedulerBug(Fault):
    """A schedule that is wrong at some of its own steps: it is met again after a rollback."""

    description = f"the schedule's own rate is {SPIKE:g} times too high for {BUG_STEPS} of its steps"

    def choose(self) -> frozenset[int]:
        """Ticks of the schedule."""
        start = min(self.once())
        return frozenset(range(start, start + BUG_STEPS))

    def install(self, training: Training) -> None:
        """Change the schedule."""
        right = training.scheduler.lr_lambdas[0]
        wrong: list[Any] = [lambda tick: right(tick) * (SPIKE if tick in self.batches else 1.0)]
        training.scheduler.lr_lambdas = wrong * len(training.scheduler.lr_lambdas)


class BadOptimizerState(Fault):
    """Optimizer state that does not belong to the weights, as after a resume from a damaged checkpoint."""

    description = "second moments a million times too small, or momentum a thousand times too large"

    def choose(self) -> frozenset[int]:
        """One moment."""
        return self.once()

    def before(self, training: Training, index: int) -> None:
        """Scale the state."""
        if index in self.batches:
            for state in training.optimizer.state.values():
                if "exp_avg_sq" in state:
                    state["exp_avg_sq"].mul_(1e-6)
                elif "momentum_buffer" in state:
                    state["momentum_buffer"].mul_(1e3)


class NaNMicroBatch(Fault):
    """Gradient accumulation with one bad part."""

    description = f"at one step the batch comes as {NUM_PARTS} micro-batches, and the loss of one of them is NaN"

    def choose(self) -> frozenset[int]:
        """One batch."""
        return self.once()

    def backward(self, training: Training, batch: Batch, index: int) -> Tensor:
        """Accumulate the gradient at that step."""
        if index not in self.batches:
            return super().backward(training, batch, index)
        losses = []
        for number, part in enumerate(zip(*(one.chunk(NUM_PARTS) for one in batch), strict=True)):
            loss = training.model(*part) * (torch.nan if number == NUM_PARTS // 2 else 1.0)
            (loss / NUM_PARTS).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()


class Killed(Fault):
    """The process dies; see `killed`. The run itself is clean."""

    description = "the process is killed at a random step and started again with the same command"

    def choose(self) -> frozenset[int]:
        """One moment."""
        return self.once()


KINDS: dict[FaultName, type[Fault]] = {
    CLEAN: Fault,
    "corrupted": Corrupted,
    "poisoned": Poisoned,
    "nan_gradients": NaNGradients,
    "lr_spike": LearningRateSpike,
    "state_bit_flips": StateBitFlips,
    "weight_bit_flip": WeightBitFlip,
    **dict.fromkeys(("nan_weights_0", "nan_weights_1", "nan_weights_5", "nan_weights_30"), NaNWeights),
    **dict.fromkeys(("scaled_tensor_40", "scaled_tensor"), ScaledTensor),
    "label_noise": LabelNoise,
    "scheduler_bug": SchedulerBug,
    "bad_optimizer_state": BadOptimizerState,
    "nan_micro_batch": NaNMicroBatch,
    KILLED: Killed,
}


def plant(name: FaultName, seed: int, steps: int) -> Fault:
    """A fault, its batches chosen."""
    return KINDS[name](name, seed, steps)


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of one number of a float32 tensor, in place.

    Args:
        tensor: Any shape and memory layout.
        element: Counted in the order of `tensor.flatten()`.
        bit: 0 for the lowest of the mantissa, 23 to 30 for the exponent, 31 for the sign.
    """
    place = torch.unravel_index(torch.tensor(element), tensor.shape)
    with torch.no_grad():
        number = tensor[place].reshape(1).view(torch.int32)
        mask = torch.tensor([1 << bit if bit < 31 else -(1 << 31)], dtype=torch.int32)
        tensor[place] = (number ^ mask).view(torch.float32)[0]


def _random_element(tensors: Iterable[Tensor], generator: torch.Generator) -> tuple[Tensor, int]:
    """Each number of all tensors is as likely as any other."""
    known = list(tensors)
    place = int(torch.randint(sum(tensor.numel() for tensor in known), (1,), generator=generator))
    for tensor in known:
        if place < tensor.numel():
            return tensor, place
        place -= tensor.numel()
    raise AssertionError("a place beyond the last tensor")
