"""The operations on the world's store, as data: a store of torch performs them, and a model of one can too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Union

from pgmesh._util import stores


class Append(NamedTuple):
    """Append to the value of a key."""

    key: str
    value: str


class Add(NamedTuple):
    """Add 1 to a counter. The answer is its new value."""

    key: str


class Read(NamedTuple):
    """Read a key. The answer is its value, or None."""

    key: str


class CompareSet(NamedTuple):
    """Set a key if it is missing. The answer is the value that it has afterwards."""

    key: str
    value: str


class Set(NamedTuple):
    """Set a key, whatever its value is. The store sends no answer."""

    key: str
    value: str


class Delete(NamedTuple):
    """Delete keys."""

    keys: tuple[str, ...]


Operation = Union[Append, Add, Read, CompareSet, Set, Delete]

Run = Callable[..., list[Any]]
"""Performs the operations that it is called with on the world's store, and returns their answers."""


def perform(store: Any, operation: Operation) -> Any:
    """Perform one operation on a store of torch. None of them waits for a key."""
    if isinstance(operation, Read):
        return stores.read(store, operation.key)
    if isinstance(operation, CompareSet):
        return store.compare_set(operation.key, "", operation.value)
    if isinstance(operation, Add):
        return store.add(operation.key, 1)
    if isinstance(operation, Append):
        return store.append(operation.key, operation.value)
    if isinstance(operation, Set):
        return store.set(operation.key, operation.value)
    return [store.delete_key(key) for key in operation.keys]
