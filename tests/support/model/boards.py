"""Mutants of both protocols: boards that treat decisions wrongly, and statuses that find the wrong losses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pgmesh.liveness.operations import CompareSet, Operation, Set
from pgmesh.liveness.statuses import Statuses
from tests.support.board import Board, FaultyBoard


class MutantBoard(FaultyBoard):
    """A board around another one."""

    def __init__(self, board: Board) -> None:
        super().__init__(board=board)


class Stubborn(MutantBoard):
    """A rank believes that its own decision is in the store. It ignores one that is there."""

    def perform(self, store: Any, operation: Operation) -> Any:
        if not isinstance(operation, CompareSet) or not operation.key.endswith("/decision"):
            return super().perform(store, operation)
        super().perform(store, self.instead_of(operation))
        return operation.value.encode()

    def instead_of(self, operation: CompareSet) -> Operation:
        return operation


class Overwriting(Stubborn):
    """It overwrites a decision that is there."""

    def instead_of(self, operation: CompareSet) -> Operation:
        return Set(operation.key, operation.value)


class AllLost(Statuses):
    """Each rank counts as lost."""

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        return dict.fromkeys(ranks, "it counts as lost")


class NoneLost(Statuses):
    """No rank counts as lost."""

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        return {}
