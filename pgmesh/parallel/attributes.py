"""Functions that modules keep in attributes, such as attention or ``mix``, so that a method can replace them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn


class Kept(NamedTuple):
    """A function, or a ``functools.partial`` of it, in an attribute of a submodule."""

    name: str
    """The name of the submodule in the module."""
    layer: nn.Module
    """The submodule."""
    attribute: str
    value: Any
    """The function or the partial."""


def find_function(module: nn.Module, function: Callable[..., Any]) -> list[Kept]:
    """All places in a module where a function is kept."""
    return [
        Kept(name, layer, attribute, value)
        for name, layer in module.named_modules()
        for attribute, value in vars(layer).items()
        if (value.func if isinstance(value, partial) else value) is function
    ]


def replace_function(module: nn.Module, function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Replace a function by another in all places of a module. A partial keeps its arguments."""
    for kept in find_function(module, function):
        value = kept.value
        new = partial(other, *value.args, **value.keywords) if isinstance(value, partial) else other
        setattr(kept.layer, kept.attribute, new)
