"""The statuses that ranks publish with their heartbeats, and the lost ranks that are found from them.

``Statuses`` is what a process, or one call, knows of the other ranks of its world.

A status is a record in the store under ``pgmesh/status/<rank>``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pgmesh.liveness import timing
from pgmesh.liveness.operations import Read, Run
from pgmesh.liveness.records import pack, unpack

STATUS_KEYS = "pgmesh/status/"

NO_STATUS = (
    "no status: it has called none of connect, report, abort_when_lost, shrink and stand_by, and joined without "
    "PGMESH_REPORT=1, or it cannot reach the store"
)


def status_key(rank: int) -> str:
    """The store key of a rank's status."""
    return f"{STATUS_KEYS}{rank}"


class Place(NamedTuple):
    """Where a rank's thread was at a heartbeat.

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
        heartbeat: a counter that grows while the process lives.
        world_size: the number of ranks of its world.
        host, pid: the process.
        pending: what the rank waits for in ``connect``: by the prefix of an attempt's store keys, text.
        place: where its thread is.
        exited: reason for the end of the heartbeats, if the rank has left.
        endpoint: host and port of a listener that is open while the process lives; () without one.
        sent: the time, in seconds since 1970 on the clock of the rank's host.
    """

    rank: int
    heartbeat: int = 0
    world_size: int = 0
    host: str = ""
    pid: int = 0
    pending: Mapping[str, str] = field(default_factory=dict)
    place: Place = NOWHERE
    exited: str = ""
    endpoint: tuple[str, int] | tuple[()] = ()
    sent: float = 0.0

    def pack(self) -> str:
        return pack(**vars(self))

    @classmethod
    def unpack(cls, rank: int, text: bytes | None) -> RankStatus | None:
        """Decode the status of a rank; None for no status, and for a value that pgmesh did not write."""
        record = unpack(text or b"", rank=int, heartbeat=int, pending=dict, place=list, endpoint=list)
        if record is None or record["rank"] != rank:
            return None
        with contextlib.suppress(TypeError):  # it has other fields
            nested = {"place": Place(*record["place"]), "endpoint": tuple(record["endpoint"])}
            return cls(**{**record, **nested})
        return None

    @property
    def waits(self) -> str:
        """What it waits for in ``connect``; "" for nothing."""
        return "; ".join(self.pending.values())

    def __str__(self) -> str:
        return self.exited or self.waits or f"{self.place}, for {self.place.seconds} s"


# -- what this process knows of the other ranks ------------------------------------------------------------------------


READ_SECONDS = 0.02
"""The longest time that a read of a status takes on a store that is not busy, in seconds. ``Record.silence`` is too
short by up to this time, so it is added. Without it, a rank would be found lost one heartbeat too late."""


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
        heard: the last heartbeat, and when it was first read; None before the first one.
        silence: seconds from the first read of the last heartbeat to the start of the latest read.
        ended: the listener that has refused a connection; None for none.
    """

    status: RankStatus | None = None
    heard: tuple[int, float] | None = None
    silence: float = 0.0
    ended: object = None

    def after(self, status: RankStatus | None, began: float, now: float) -> Record:
        """The record after a read that found a status or nothing."""
        before = self.status
        if status is None:
            return self
        # A new process of the rank counts its heartbeats from the beginning, and may have the port of another one.
        if before is None or self.heard is None or (before.heartbeat, before.sent) != (status.heartbeat, status.sent):
            return Record(status, heard=(status.heartbeat, now))
        return self._replace(status=status, silence=began - self.heard[1])

    def loss(self, lost_after: float) -> str:
        """How it is known that the rank is lost, to follow its name; "" if it is not. See the table."""
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
    """The last status of other ranks, each with the time when its heartbeat was first read.

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
            self.records[rank] = self.record(rank).after(RankStatus.unpack(rank, text), began, now)

    def record(self, rank: int) -> Record:
        """What is known of a rank; an empty record before it was read."""
        return self.records.get(rank, Record())

    def find_ended(
        self, run: Run, ranks: Iterable[int], lost_after: float | None = None, *, all_of_them: bool = False
    ) -> None:
        """Ask the listeners of some ranks in turn, up to the first process that still runs: the caller waits for it.

            a rank                              then
            has no status, or is lost           is not asked
            has a listener that refuses         has ended; the next rank is asked
            has one that answers                still runs; the next rank is asked only with ``all_of_them``
            has one that does not, in time      the others are not asked

        It waits for ``Timing.answer``, or less if the rank becomes lost before, since its silence then says enough.

        Args:
            run: performs operations on the store.
            lost_after: as in the class, for this call.
            all_of_them: ask the others too.
        """
        limit = self.limit(lost_after)
        for rank in ranks:
            record = self.record(rank)
            if record.status is None or record.loss(limit):
                continue
            wait, asked = min(timing.TIMING.answer, limit - record.silence), self.now()
            if self.has_ended(record.status, record.silence, wait):
                self.records[rank] = self.record(rank)._replace(ended=record.status.endpoint)
                self.read(run, [rank])  # which may have published a reason since then
            elif not all_of_them or self.now() - asked >= wait:
                return

    def lost(self, ranks: Iterable[int], lost_after: float | None = None) -> dict[int, str]:
        """The ranks that are lost, each with the message of ``describe``.

        Args:
            lost_after: as in the class, for this call.
        """
        limit = self.limit(lost_after)
        return {rank: f"rank {rank}{loss}" for rank in ranks if (loss := self.record(rank).loss(limit))}

    def limit(self, lost_after: float | None) -> float:
        """Seconds of silence after which a rank is lost: those given, or the default."""
        return self.lost_after if lost_after is None else lost_after

    def describe(self, rank: int, lost_after: float | None = None) -> str:
        """The last status of a rank for a message; how it is known to be lost, if it is."""
        if rank not in self.records:
            return f"rank {rank}: its status was not read"
        record = self.record(rank)
        return f"rank {rank}{record.loss(self.limit(lost_after)) or f': {record.status or NO_STATUS}'}"
