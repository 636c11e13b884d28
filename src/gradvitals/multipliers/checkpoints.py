"""State dicts with multipliers and without, made to fit each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gradvitals.multipliers.parametrization import multiplied


def plain_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of the merged model from one with multipliers, for a model that has none.

    Args:
        state: From ``model.state_dict()``; one without multipliers is returned as it is.

    Example:
        >>> import gradvitals as gv
        >>> model = nn.Linear(3, 4)
        >>> gv.multipliers.attach(model, kind="row")
        ('weight',)
        >>> sorted(gv.multipliers.plain_state_dict(model.state_dict()))
        ['bias', 'weight']
    """
    plain = dict(state)
    for key in state:
        found = re.fullmatch(r"((?:.*\.)?)parametrizations\.(\w+)\.original", key)
        if found:
            _fold(plain, found[1], found[2])
    return plain


def fit_checkpoint(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any, attribute: str, **__: Any) -> None:
    """Before a module loads: a weight saved plain, or with other multipliers, becomes one with these, at 1."""
    multiplier: nn.Module = module.parametrizations[attribute][0]  # type: ignore[assignment,index]
    held = f"{prefix}parametrizations.{attribute}."
    mine = {f"{held}0.{name}" for name, _ in multiplier.named_parameters()}
    if {key for key in state if key.startswith(f"{held}0.")} == mine:
        return
    if f"{held}original" in state:
        _fold(state, prefix, attribute)
    if f"{prefix}{attribute}" in state:
        state[f"{held}original"] = state.pop(f"{prefix}{attribute}")
        for name, parameter in multiplier.named_parameters():
            state[f"{held}0.{name}"] = torch.ones_like(parameter)


def _fold(state: dict[str, Any], prefix: str, attribute: str) -> None:
    """Replace a weight and its multipliers by their product, in a state dict."""
    held = f"{prefix}parametrizations.{attribute}."
    parts = {name: state[f"{held}0.{name}"] for name in ("scale", "row", "column") if f"{held}0.{name}" in state}
    if not parts:
        return  # a parametrization of someone else's
    for name in parts:
        del state[f"{held}0.{name}"]
    state[f"{prefix}{attribute}"] = multiplied(state.pop(f"{held}original"), parts)
