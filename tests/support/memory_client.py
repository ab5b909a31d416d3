"""A ``Client`` over a store in memory, on a clock that only pauses move. It takes text as a store does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pgmesh.connect.decisions import Decision
from pgmesh.connect.group_rounds import ConnectJudge, GroupRound
from pgmesh.connect.rounds import Arrival, Rounds
from pgmesh.groups.naming import Fingerprint
from pgmesh.liveness.operations import Delete, Operation, Read, perform
from pgmesh.liveness.statuses import RankStatus, Statuses, status_key
from tests.support.board import MemoryStore, key_of

MADE = Decision("made")


class MemoryClient:
    """The store and the clock of one rank's call.

    Args:
        rank: the rank, for its status.
        values: the contents of the store.
        between: called in each pause, as another rank would act meanwhile.
    """

    def __init__(
        self, rank: int = 0, values: dict[str, bytes] | None = None, between: Callable[[], None] = lambda: None
    ) -> None:
        self.rank, self.values, self.between = rank, {} if values is None else values, between
        self.written: set[str] = set()
        self.operations: list[Operation] = []
        self.clock, self.seconds, self.pace = 0.0, 1.0, 1.0

    def run(self, *operations: Operation) -> list[Any]:
        return [self._perform(operation) for operation in operations]

    def now(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += max(seconds, 0.001)
        self.between()

    def set_pending(self, pending: dict[str, str]) -> None:
        self.values[status_key(self.rank)] = RankStatus(pending=pending).pack().encode()

    def _perform(self, operation: Operation) -> Any:
        self.operations.append(operation)
        if not isinstance(operation, (Read, Delete)):
            self.written.add(key_of(operation))
        return perform(MemoryStore(self.values), operation)


def fingerprint(rank: int = 0, **fields: object) -> Fingerprint:
    return Fingerprint(rank, fields or {"shape": [2], "timeout": 30.0}, "group tp of mesh 'actor'", "Fix it.")


def round_of(rank: int = 0, key: str = "group", ranks: tuple[int, ...] = (0, 1), **fields: object) -> GroupRound:
    return GroupRound(key, ranks, "group tp", "mesh 'actor'", fingerprint(rank, **fields))


def judge_of(client: Any, rank: int = 0, deadline: float = 1.0, **more: Any) -> ConnectJudge:
    client.seconds = deadline
    more = {"statuses": Statuses(5.0, client.now), "process": f"process {rank}", **more}
    return ConnectJudge(rank, client, f"train.py:{rank}", **more)


def rounds_of(client: Any, *rounds: GroupRound, deadline: float = 1.0, **more: Any) -> Rounds[GroupRound, Decision]:
    """The rounds of a call of ``connect``, before they run."""
    return Rounds(rounds, judge_of(client, deadline=deadline, **more))


def arrival(rank: int, *, process: str = "", mesh: str = "", group: str | None = None) -> bytes:
    """The record of a rank's arrival, as one line.

    Args:
        group: its fingerprint of the group; that of ``round_of`` if None.
    """
    mine = fingerprint(rank).encoded.decode() if group is None else group
    return Arrival(rank, process or f"process {rank}", mine, mesh).pack().encode()
