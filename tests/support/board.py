"""The board of tests: it observes the operations on the store, and injects faults before or after any of them.

Every operation of ``connect``, of the liveness thread and of ``elastic`` goes through ``operations.perform``, in whose
place ``faults`` puts a board. A model checker passes its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

from pgmesh.errors import MissingRanksError
from pgmesh.liveness import operations
from pgmesh.liveness.operations import Delete, Operation

Act = Callable[[], object]
"""A fault: it raises, sleeps, waits, sends a signal, sets a flag."""


def key_of(operation: Operation) -> str:
    """The key of an operation; "" for one on several keys."""
    return "" if isinstance(operation, Delete) else operation.key


@dataclass
class Fault:
    """Acts before and after some operations, all of them by default, but not at the first ``skip`` ones.

    Args:
        times: number of operations with the acts; later ones have none.
    """

    at: Callable[[Operation], bool] = lambda operation: True
    before: Act = lambda: None
    after: Act = lambda: None
    skip: int = 0
    times: float = float("inf")

    def strikes(self, operation: Operation) -> bool:
        """True if the acts are due at this operation."""
        if not self.at(operation):
            return False
        due = self.skip <= 0 < self.times
        self.times -= self.skip <= 0
        self.skip -= 1
        return due


_perform = operations.perform


class Board:
    """Performs operations on a store of torch."""

    def perform(self, store: Any, operation: Operation) -> Any:
        return _perform(store, operation)


class FaultyBoard(Board):
    """A board with faults, around another one. It records the operations."""

    def __init__(self, *faults: Fault, board: Board | None = None) -> None:
        self.faults, self.board = faults, board or Board()
        self.performed: list[Operation] = []
        self.requested: list[Operation] = []  # without those of the liveness thread

    def perform(self, store: Any, operation: Operation) -> Any:
        self.performed.append(operation)
        if threading.current_thread().name != "pgmesh-liveness":
            self.requested.append(operation)
        due = [fault for fault in self.faults if fault.strikes(operation)]
        for fault in due:
            fault.before()
        answer = self.board.perform(store, operation)
        for fault in due:
            fault.after()
        return answer


@contextlib.contextmanager
def faults(*each: Fault) -> Iterator[FaultyBoard]:
    """Inject faults into all operations of this process on the store."""
    board = FaultyBoard(*each)
    with mock.patch.object(operations, "perform", board.perform):
        yield board


def raises(error: BaseException) -> Act:
    def act() -> None:
        raise error

    return act


# -- the first collective, which is dist.all_reduce -------------------------------------------------------------------


@contextlib.contextmanager
def at_all_reduce(before: Act = lambda: None, after: Act = lambda: None) -> Iterator[None]:
    """Act before and after this process enters an all-reduce, as the first collective of a group is."""
    enter = dist.all_reduce

    def all_reduce(*arguments: Any, **more: Any) -> Any:
        before()
        work = enter(*arguments, **more)
        after()
        return work

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield


@contextlib.contextmanager
def losing_all_reduces(before: Act = lambda: None) -> Iterator[None]:
    """All-reduces end on the other members and fail on this process, after ``before`` was called."""
    enter = dist.all_reduce

    class Lost:
        def __init__(self, work: Any) -> None:
            self._work = work

        def is_completed(self) -> bool:
            return bool(self._work.is_completed())

        def wait(self) -> None:
            before()
            raise MissingRanksError("a collective was lost by design")

    with mock.patch.object(dist, "all_reduce", lambda *arguments, **more: Lost(enter(*arguments, **more))):
        yield


# -- a store in memory ------------------------------------------------------------------------------------------------


class MemoryStore:
    """The operations of torch's stores on a dict, for ``Board.perform``. It never waits."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def append(self, key: str, value: str) -> None:
        self.values[key] = self.values.get(key, b"") + value.encode()

    def add(self, key: str, amount: int) -> int:
        count = int(self.values.get(key, b"0")) + amount
        self.values[key] = b"%d" % count
        return count

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        before, after = (text if isinstance(text, bytes) else text.encode() for text in (expected, desired))
        if self.values.get(key, b"") != before:
            return self.values.get(key, after)
        self.values[key] = after
        return after

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None
