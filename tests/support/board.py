"""The board of tests: it observes the operations on the store, and injects faults before or after any of them.

``FaultyBoard`` passes operations on to another board: that of a process, or the one of a model checker.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union
from unittest import mock

import torch.distributed as dist

from pgmesh.errors import MissingRanksError
from pgmesh.rendezvous.operations import Board, CompareSet, Delete, Operation, Raw, Result
from pgmesh.rendezvous.world_store import WorldStore

Act = Callable[[], object]
"""A fault: it raises, sleeps, waits, sends a signal, sets a flag."""


def writes(*ends: str) -> Callable[[Operation], bool]:
    """True for a CompareSet of a key that ends in one of these."""
    return lambda operation: isinstance(operation, CompareSet) and operation.key.endswith(ends)


def key_of(operation: Operation) -> str:
    """The key of an operation; "" for one on several keys."""
    if isinstance(operation, Delete):
        return ""
    if isinstance(operation, Raw):
        return str(operation.arguments[0]) if operation.arguments else ""
    return operation.key


@dataclass
class Fault:
    """Acts before and after operations.

    Args:
        at: the operation, or True for those meant. Default: all.
        before, after: the acts.
        skip: number of such operations without the acts.
        times: number of such operations with them; later ones have none.
        in_caller: the acts are those of the thread that waits for the answers, before and after the whole batch.
            Default: those of the store thread.
    """

    at: Union[Operation, Callable[[Operation], bool]] = lambda operation: True
    before: Act = lambda: None
    after: Act = lambda: None
    skip: int = 0
    times: float = float("inf")
    in_caller: bool = False

    def strikes(self, operations: Sequence[Operation]) -> bool:
        """True if the acts are due at one of these operations."""
        at = self.at
        due = False
        for operation in operations:
            if at(operation) if callable(at) else at == operation:
                due |= self.skip <= 0 < self.times
                self.times -= self.skip <= 0
                self.skip -= 1
        return due


class FaultyBoard(Board):
    """A board with faults, which records the operations.

    Args:
        faults: the faults.
        board: the board that performs the operations.
    """

    def __init__(self, *faults: Fault, board: Board | None = None) -> None:
        self.faults, self.board = faults, board or Board()
        self.requested: list[Operation] = []
        self.performed: list[Operation] = []

    def request(self, operations: Sequence[Operation], ask: Callable[[], Result]) -> Result:
        self.requested += operations
        with self._faults(operations, in_caller=True):
            return self.board.request(operations, ask)

    def perform(self, store: Any, operation: Operation) -> Any:
        self.performed.append(operation)
        with self._faults((operation,), in_caller=False):
            return self.board.perform(store, operation)

    @contextlib.contextmanager
    def _faults(self, operations: Sequence[Operation], *, in_caller: bool) -> Iterator[None]:
        due = [each for each in self.faults if each.in_caller == in_caller and each.strikes(operations)]
        for fault in due:
            fault.before()
        yield
        for fault in due:
            fault.after()


@contextlib.contextmanager
def use_board(board: Board) -> Iterator[Any]:
    """Let all store threads of this process use a board."""
    with mock.patch.object(WorldStore, "board", board):
        yield board


def faults(*each: Fault) -> contextlib.AbstractContextManager[FaultyBoard]:
    """Inject faults into all operations of this process on the store."""
    return use_board(FaultyBoard(*each))


def slow_store(seconds: float) -> contextlib.AbstractContextManager[FaultyBoard]:
    """A store that needs some seconds for each answer."""
    return faults(Fault(before=lambda: time.sleep(seconds)))


def raises(error: BaseException) -> Callable[..., Any]:

    def act(*_: Any, **__: Any) -> None:
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
    """All-reduces end on the other members and fail on this process.

    Args:
        before: called before each fails.
    """
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


class CountedStore:
    """A store that acts before some of its operations.

    Args:
        numbers: those operations, counted from 1.
        operation: only operations of this name are counted; "" for all.
    """

    def __init__(self, store: Any, numbers: Sequence[int], act: Act, operation: str = "") -> None:
        self.store, self.numbers, self.act, self.operation, self.count = store, numbers, act, operation, 0

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            self.count += self.operation in ("", operation)
            assert self.count < 100, f"{operation} is asked without end"
            if self.count in self.numbers and self.operation in ("", operation):
                self.act()
            return getattr(self.store, operation)(*arguments)

        return ask
