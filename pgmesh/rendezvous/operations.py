"""The operations on the world's store, as data that one thread performs, and a model of the store can perform too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, Union

Result = TypeVar("Result")

ABSENT = "?"
"""``compare_set(key, ABSENT, ABSENT)`` reads a key without waiting. It returns ``ABSENT`` if the key is missing."""


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


class Delete(NamedTuple):
    """Delete keys."""

    keys: tuple[str, ...]


class Replace(NamedTuple):
    """Replace the value of a key if it is the expected one. The answer is the value after it."""

    key: str
    expected: bytes
    value: bytes


class Raw(NamedTuple):
    """Any other method of torch's ``Store``, by its name."""

    operation: str
    arguments: tuple[Any, ...]


Operation = Union[Append, Add, Read, CompareSet, Replace, Delete, Raw]

Run = Callable[..., list[Any]]
"""Performs the operations that it is called with on the world's store, and returns their answers."""


def perform(store: Any, operation: Operation) -> Any:
    """Perform one operation on a store of torch."""
    if isinstance(operation, Read):
        value = store.compare_set(operation.key, ABSENT, ABSENT)
        return None if value == ABSENT.encode() else value
    if isinstance(operation, CompareSet):
        return store.compare_set(operation.key, "", operation.value)
    if isinstance(operation, Replace):
        return store.compare_set(operation.key, operation.expected, operation.value)
    if isinstance(operation, Add):
        return store.add(operation.key, 1)
    if isinstance(operation, Append):
        return store.append(operation.key, operation.value)
    if isinstance(operation, Delete):
        return [store.delete_key(key) for key in operation.keys]
    return getattr(store, operation.operation)(*operation.arguments)


class Board:
    """The way of this process's operations to the store.

    Every operation passes through ``WorldStore.board``. Tests put another one there, to observe operations and to
    inject faults.
    """

    def request(self, operations: Sequence[Operation], ask: Callable[[], Result]) -> Result:
        """Request a batch, in the caller's thread: ``ask`` hands it to the store thread and returns the answers."""
        return ask()

    def perform(self, store: Any, operation: Operation) -> Any:
        """Perform one operation on a store of torch, in the store thread."""
        return perform(store, operation)


def can_be_repeated(operation: Operation) -> bool:
    """True if an operation may be performed again when its answer was lost.

    Readers ignore a repeated arrival. After a repeated ``Add`` to the count of arrivals, a rank may read the arrivals
    before the last one is there, and reads them again later. The number of ranks that leave does not reach that count,
    so the attempt's keys stay. A repeated ``Replace`` finds its own value, or a later one.
    """
    if isinstance(operation, Add):
        return not operation.key.endswith("/left")
    return not isinstance(operation, Raw) or operation.operation in ("set", "check", "get")
