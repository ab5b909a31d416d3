"""The statuses that ranks publish with their heartbeats, and the lost ranks that are found from them.

``Statuses`` is what a process, or one call, knows of the other ranks of its world.

A status is a record in the store under ``pgmesh/status/<rank>``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pgmesh.liveness.operations import Read, Run
from pgmesh.liveness.records import pack

STATUS_KEYS = "pgmesh/status/"

NO_STATUS = (
    "no status: it has called none of connect, report, abort_when_lost, shrink and stand_by, and joined without "
    "PGMESH_REPORT=1, or it cannot reach the store"
)


def status_key(rank: int) -> str:
    """The store key of a rank's status."""
    return f"{STATUS_KEYS}{rank}"


class Place(NamedTuple):
    """The place of a rank's thread at a heartbeat.

    Args:
        line: file and line of the program's own code, such as "train.py:31".
        function: the function there.
        called: the function of torch or pgmesh that it has called there; "" for none.
        group: the group that this function has, such as "group dp of mesh 'actor'"; "" for none.
        seconds: the time for which every heartbeat has found the same, and no operation entered meanwhile.
    """

    line: str = ""
    function: str = ""
    called: str = ""
    group: str = ""
    seconds: int = 0

    def __str__(self) -> str:
        called = ", ".join(filter(None, [self.called, self.group]))
        where = f"at {self.line} in {self.function}" if self.line else "its thread has ended"
        return f"{where}: {called}" if called else where


NOWHERE = Place()


@dataclass(frozen=True)
class RankStatus:
    """The status that a rank last published.

    Args:
        world_size: the number of ranks of its world.
        host, pid: the process.
        pending: what the rank waits for in ``connect``: by the prefix of an attempt's store keys, text.
        place: where its thread is.
        exited: reason for the end of the heartbeats, if the rank has left.
        endpoint: host and port of a listener that is open while the process lives; () without one.
        sent: the time, in seconds since 1970 on the clock of the rank's host. Each heartbeat has another one.
        process: the name of the process, as in its arrivals.
    """

    world_size: int = 0
    host: str = ""
    pid: int = 0
    pending: Mapping[str, str] = field(default_factory=dict)
    place: Place = NOWHERE
    exited: str = ""
    endpoint: tuple[str, int] | tuple[()] = ()
    sent: float = 0.0
    process: str = ""

    def pack(self) -> str:
        return pack(**vars(self))

    @classmethod
    def unpack(cls, text: bytes | None) -> RankStatus | None:
        """Decode a status; None for no status."""
        if text is None:
            return None
        record = json.loads(text)
        return cls(**{**record, "place": Place(*record["place"]), "endpoint": tuple(record["endpoint"])})

    @property
    def waits(self) -> str:
        """The groups that it waits for in ``connect``; "" for nothing."""
        return "; ".join(self.pending.values())

    def __str__(self) -> str:
        return self.exited or self.waits or f"{self.place}, for {self.place.seconds} s"


# -- what this process knows of the other ranks ------------------------------------------------------------------------


READ_SECONDS = 0.02
"""The longest time that a read of a status takes on a store that is not busy, in seconds. ``Record.silence`` is too
short by up to this time, so it is added. Without it, a rank would be found lost one heartbeat too late."""


_ANSWER_SECONDS = 0.5
"""The timeout for one connection to the listener of another process."""


class Record(NamedTuple):
    """The knowledge of one rank, and what follows from it:

        its status       its listener       its last heartbeat          so the rank
        none             any                any                         may not have begun
        has ``exited``   any                any                         is lost: it left the world
        other            has refused        any                         is lost: its process has ended
        other            other              read ``lost_after`` ago     is lost: it is silent
        other            other              read later                  lives

    Args:
        status: the last one; None before one was found.
        since: when it was first read.
        silence: seconds from then to the start of the latest read.
        ended: the listener that has refused a connection; None for none.
    """

    status: RankStatus | None = None
    since: float = 0.0
    silence: float = 0.0
    ended: object = None

    def after(self, status: RankStatus | None, began: float, now: float) -> Record:
        """The record after a read that found a status or nothing."""
        if status is None:
            return self
        if self.status is None or self.status.sent != status.sent:  # a new process may have the port of another one
            return Record(status, since=now)
        return self._replace(status=status, silence=began - self.since)

    @property
    def has_ended(self) -> bool:
        """True if the rank has left, or its process has ended."""
        return self.status is not None and (self.status.exited != "" or self.status.endpoint == self.ended)

    def loss(self, lost_after: float) -> str:
        """The evidence that the rank is lost, to follow its name; "" if it is not. See the table."""
        status, seconds = self.status, self.silence + READ_SECONDS
        if status is None:
            return ""
        if status.exited:
            return f" {status}"
        if status.endpoint == self.ended:
            return f" has ended: its listener at {':'.join(map(str, status.endpoint))} refuses connections"
        if seconds >= lost_after:
            return f" has sent no heartbeat for at least {int(seconds)} s; its last status: {status}"
        return ""


@dataclass(eq=False)
class Statuses:
    """The last status of other ranks, each with the time when it was first read.

    The liveness thread and a caller of ``shrink`` may use one object at the same time.

    Args:
        lost_after: seconds without a new heartbeat after which a rank counts as lost.
        now: the clock, in seconds: ``Liveness.answered_seconds``, or the one of a model.
        has_ended: True if the process with this status has ended. Its heartbeat has not changed for the first seconds,
            and an answer is awaited for the second ones.
        records: what is known, by rank that was read.
    """

    lost_after: float
    now: Callable[[], float]
    has_ended: Callable[[RankStatus, float, float], bool] = field(default=lambda status, seconds, wait: False)
    records: dict[int, Record] = field(default_factory=dict, init=False)

    def read(self, run: Run, ranks: Iterable[int]) -> None:
        """Read the statuses of some ranks.

        Args:
            run: performs operations on the store.
        """
        ranks, began = list(ranks), self.now()
        texts = run(*(Read(status_key(rank)) for rank in ranks))
        now = self.now()
        for rank, text in zip(ranks, texts):
            self.records[rank] = self.record(rank).after(RankStatus.unpack(text), began, now)

    def record(self, rank: int) -> Record:
        """The record of a rank; an empty record before it was read."""
        return self.records.get(rank, Record())

    def find_lost(self, run: Run, ranks: Collection[int]) -> dict[int, str]:
        """Read the statuses of some ranks, and ask their listeners; return those that are lost, as ``lost`` does.

            a rank                              then
            has no status, or is lost           is not asked
            has a listener that refuses         has ended
            has one that answers                still runs
            has one that does not, in time      the ranks after it are not asked

        It waits for half a second, or less if the rank becomes lost before, since its silence then says enough.

        Args:
            run: performs operations on the store.
        """
        self.read(run, ranks)
        for rank in ranks:
            record = self.record(rank)
            if record.status is None or record.loss(self.lost_after):
                continue
            wait, asked = min(_ANSWER_SECONDS, self.lost_after - record.silence), self.now()
            if self.has_ended(record.status, record.silence, wait):
                self.records[rank] = self.record(rank)._replace(ended=record.status.endpoint)
                self.read(run, [rank])  # which may have published a reason since then
            elif self.now() - asked >= wait:
                break
        return self.lost(ranks)

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """The ranks that are lost, each with the message of ``describe``."""
        return {rank: f"rank {rank}{loss}" for rank in ranks if (loss := self.record(rank).loss(self.lost_after))}

    def describe(self, rank: int) -> str:
        """The last status of a rank for a message; how it is known to be lost, if it is."""
        if rank not in self.records:
            return f"rank {rank}: its status was not read"
        record = self.record(rank)
        return f"rank {rank}{record.loss(self.lost_after) or f': {record.status or NO_STATUS}'}"
