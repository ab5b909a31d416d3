"""Tensors in a nest of mappings, lists, tuples and dataclasses: a batch, or the arguments of a module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

from torch import Tensor

from pgmesh.errors import MethodError


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in a nest, in order. Values of other types are skipped."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value):
        yield from tensors_in(_fields(value))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A copy of a nest, with ``function`` applied to each tensor. Numbers, strings and None stay as they are.

    Raises:
        MethodError: the nest has a value of another type, in which tensors would be missed.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(function, each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # a named tuple has _fields
    if is_dataclass(value):
        result = copy.copy(value)
        for name, each in _fields(value).items():
            object.__setattr__(result, name, map_tensors(function, each))  # also if it is frozen
        return result
    if value is None or isinstance(value, (str, bytes, Number)):
        return value
    raise MethodError(
        "share cuts tensors in mappings, lists, tuples and dataclasses, and does not know the type "
        f"{type(value).__name__}.\n\n"
        "  together.share(tensor)   # each tensor alone; numpy: torch.from_numpy(array)"
    )


def is_dataclass(value: object) -> bool:
    """Return True for an instance of a dataclass, and False for the class itself."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
