"""How batches are read from a loader: which of its examples were seen, and what is no loader at all."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gradvitals.errors import ConfigError

WANTED = "expected a DataLoader or another iterable of batches"


def check_model(model: Any) -> nn.Module:
    """The model, if it is one.

    Raises:
        ConfigError: when it is none.
    """
    if not isinstance(model, nn.Module):
        order = "probe(model, loader, loss_fn)"
        raise ConfigError(f"model is {type(model).__name__}; expected a torch.nn.Module first, as in {order}")
    return model


def check_loader(loader: Any) -> None:
    """Tell what is one example after the other, or one batch, from a loader of batches.

    Raises:
        ConfigError: when it is no loader; it says how to make one.
    """
    kind = type(loader).__name__
    if isinstance(loader, Tensor):
        raise ConfigError(f"loader is a tensor of shape {tuple(loader.shape)}; {WANTED}: x.split(32)")
    if isinstance(loader, Mapping):
        raise ConfigError(f"loader is a mapping with the keys {list(loader)[:8]!r}; {WANTED}: for one batch [batch]")
    # Data sets of Hugging Face are none of torch's and are not imported for this.
    of_rows = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if of_rows or (type(loader).__module__.startswith("datasets.") and hasattr(loader, "__getitem__")):
        raise ConfigError(
            f"loader is {kind}, a data set of single examples; {WANTED}: DataLoader(dataset, batch_size=32)"
        )
    if isinstance(loader, tuple) and len(loader) > 1 and all(isinstance(part, Tensor) for part in loader):
        first = loader[0]
        if any(part.dtype != first.dtype or part.shape[1:] != first.shape[1:] for part in loader):
            shapes = ", ".join(str(tuple(part.shape)) for part in loader)
            raise ConfigError(
                f"loader is a tuple of tensors of shapes {shapes}, which is one batch; {WANTED}: [(x, y)], or "
                "DataLoader(TensorDataset(x, y), batch_size=32)"
            )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ConfigError(f"loader is {kind}; {WANTED}")


class Reading:
    """Reads the first batches of a loader and, where that can be known, notes which examples they hold.

    Args:
        loader: Is not changed; its own generators are put back after reading.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.indices: list[list[int]] | None = None
        """For each batch read, the places of its examples in the data set; None where the loader does not tell."""

    def first(self, n_batches: int) -> Generator[Any]:
        """At most so many batches."""
        loader = self._noting()
        sampler = getattr(self.loader, "sampler", None)
        holders = (self.loader, sampler, getattr(getattr(self.loader, "batch_sampler", None), "sampler", None))
        generators = [g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)]
        states = [(generator, generator.get_state()) for generator in generators]
        try:
            if n_batches > 0:
                for number, batch in enumerate(loader, 1):
                    yield batch
                    if number == n_batches:
                        break
        finally:
            for generator, state in states:
                generator.set_state(state)

    def of(self, batch: int, size: int) -> list[int | None]:
        """Places in the data set of the examples of one batch; None for each where they are not known."""
        known = self.indices[batch] if self.indices is not None and batch < len(self.indices) else []
        return [*known] if len(known) == size else [None] * size

    def _noting(self) -> Iterable[Any]:
        """The loader, or a copy of it that notes what its sampler says."""
        loader = self.loader
        if (
            not isinstance(loader, DataLoader)
            or type(loader).__iter__ is not DataLoader.__iter__
            or isinstance(loader.dataset, IterableDataset)
            or loader.batch_sampler is None
            or not getattr(loader, "in_order", True)
        ):
            return loader
        self.indices = []
        twin = copy.copy(loader)
        # Around the loader's own setter, which forbids this; workers that are kept for the loader stay with it.
        vars(twin).update(batch_sampler=_Noting(loader.batch_sampler, self.indices), _iterator=None)
        return twin


class _Noting:
    """A batch sampler that writes down what it gives."""

    def __init__(self, inner: Any, seen: list[list[int]]) -> None:
        self.inner, self.seen = inner, seen

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            known = isinstance(batch, (list, tuple)) and all(isinstance(i, int) for i in batch)
            self.seen.append(list(batch) if known else [])
            yield batch

    def __len__(self) -> int:
        return len(self.inner)
