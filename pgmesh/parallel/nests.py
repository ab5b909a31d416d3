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
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    else:
        for each in _named_values(value).values():
            yield from tensors_in(each)


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
    if fields := _named_values(value):
        result = copy.copy(value)
        for name, each in fields.items():
            object.__setattr__(result, name, map_tensors(function, each))  # also if the dataclass is frozen
        return result
    if value is None or isinstance(value, (str, bytes, Number)):
        return value
    raise MethodError(
        "share cuts tensors in mappings, lists, tuples and dataclasses, and does not know the type "
        f"{type(value).__name__}.\n\n"
        "  together.share(tensor)   # each tensor alone; numpy: torch.from_numpy(array)"
    )


def _named_values(value: Any) -> Mapping[Any, Any]:
    """The values of a mapping by key, and of a dataclass by field; none of any other type."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return {}
