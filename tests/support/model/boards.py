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


class _Decides(MutantBoard):
    """A board on which a rank believes that its own decision is in the store."""

    def perform(self, store: Any, operation: Operation) -> Any:
        if not isinstance(operation, CompareSet) or not operation.key.endswith("/decision"):
            return super().perform(store, operation)
        self.decide(store, operation)
        return operation.value.encode()

    def decide(self, store: Any, operation: CompareSet) -> None:
        raise NotImplementedError


class Overwriting(_Decides):
    """It overwrites a decision that is there."""

    def decide(self, store: Any, operation: CompareSet) -> None:
        super(_Decides, self).perform(store, Set(operation.key, operation.value))


class Stubborn(_Decides):
    """It ignores a decision that is there."""

    def decide(self, store: Any, operation: CompareSet) -> None:
        super(_Decides, self).perform(store, operation)


class AllLost(Statuses):
    """Each rank counts as lost."""

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        return dict.fromkeys(ranks, "it counts as lost")


class NoneLost(Statuses):
    """No rank counts as lost."""

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        return {}
