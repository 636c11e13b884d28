"""What features, classes and tokens are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Names:
    """What things are called in the answers: the features of a table, classes, and the token behind each number.

    Example:
        >>> names = Names(classes=["cat", "dog"], tokens={7: "seven"}.get)
        >>> names.label(1), names.label(2), names.token(7)
        ('dog', '2', 'seven')
    """

    features: Sequence[str] = ()
    classes: Sequence[str] = ()
    tokens: Callable[[int], str | None] | Sequence[str] | Mapping[int, str] | None = None
    """A list, a dictionary or a function from a number to its text, such as a tokenizer's `convert_ids_to_tokens`."""

    def label(self, number: int) -> str:
        """Name of a class; its number where it has none."""
        return str(self.classes[number]) if 0 <= number < len(self.classes) else str(number)

    def token(self, number: int) -> str:
        """Text of a token; its number where it has none."""
        text: object = None
        if isinstance(self.tokens, Mapping):
            text = self.tokens.get(number)
        elif callable(self.tokens):
            text = self.tokens(number)
        elif self.tokens is not None and 0 <= number < len(self.tokens):
            text = self.tokens[number]
        return str(number) if text is None else str(text)


def names_of(model: Any, loader: Any) -> Names:
    """The names that a data set, a tokenizer or a model carry with them, where they follow the usual customs.

    Classes are the `classes` of the data set, as torchvision has them, or the `id2label` of the model's `config`, as
    Hugging Face has them. Tokens are those of a `tokenizer` of the loader's `collate_fn`, of the data set or of the
    model. Features are the `feature_names` of the data set.

    Args:
        model: the model.
        loader: gives the batches.

    Returns:
        What was found; anything that does not follow the customs is left out.
    """
    dataset = getattr(loader, "dataset", None)
    classes = _texts(getattr(dataset, "classes", None))
    id2label = getattr(getattr(model, "config", None), "id2label", None)
    if not classes and isinstance(id2label, Mapping):
        classes = _texts([id2label.get(number) for number in range(len(id2label))])
    holders = (getattr(loader, "collate_fn", None), dataset, model)
    tokenizer = next((found for holder in holders if (found := getattr(holder, "tokenizer", None)) is not None), None)
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    return Names(
        features=_texts(getattr(dataset, "feature_names", None)),
        classes=classes,
        tokens=convert if callable(convert) else None,
    )


def _texts(found: Any) -> list[str]:
    return list(found) if isinstance(found, (list, tuple)) and all(isinstance(item, str) for item in found) else []
