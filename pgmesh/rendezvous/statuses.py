"""The statuses that ranks publish with their heartbeats, and the lost ranks that are found from them.

``Statuses`` is what a process, or one call, knows of the other ranks of its world.

A status is a record in the store under ``pgmesh/status/<rank>``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pgmesh._util.formatting import name_ranks
from pgmesh._util.listeners import ANSWER_SECONDS
from pgmesh.rendezvous.operations import Read, Run
from pgmesh.rendezvous.records import foreign_value, pack, unpack

_LATEST = 1e11
"""The latest time of a status in seconds since 1970. pgmesh wrote no later one, and some cannot be printed."""


LEFT_WORLD = "has left the world"
"""``RankStatus.exited`` of a rank that destroyed its process group. Its process may live on, in another world."""


def status_key(rank: int) -> str:
    """The store key of a rank's status."""
    return f"pgmesh/status/{rank}"


class PendingConnect(NamedTuple):
    """One group that a rank waits for in ``connect``.

    Args:
        name: prefix of the attempt's store keys.
        group: the group, such as "group dp".
        mesh: its mesh, such as "mesh 'actor'".
        ranks: its members, such as "0, 2".
        call_site: the line of code, such as "train.py:12".
        missing: the members that had not arrived when the rank last read the arrivals.
    """

    name: str
    group: str
    mesh: str
    ranks: str
    call_site: str
    missing: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.group} of {self.mesh} (ranks {self.ranks})"

    def __str__(self) -> str:
        return f"connecting {self.label} at {self.call_site}, waiting for {name_ranks(self.missing)}"


class RunningCollective(NamedTuple):
    """A collective that a rank has entered and that is not done, from torch's flight recorder.

    Args:
        name: the group's name in torch.
        label: the group in messages, such as "group dp of mesh 'actor'".
        operation: the collective, such as "all_reduce".
        number: its number among the collectives of the group, from 1.
        seconds: time since the rank entered it.
    """

    name: str
    label: str
    operation: str
    number: int
    seconds: int

    def __str__(self) -> str:
        return f"in {self.operation} (collective {self.number}) of {self.label} for {self.seconds} s"


@dataclass(frozen=True)
class RankStatus:
    """The status that a rank last published.

    Args:
        heartbeat: a counter that grows while the process lives.
        activity: description of the activity that other ranks may wait for; "" for none.
        pending: the groups that the rank connects and that are undecided.
        running: the collectives that the rank has been in for longer than a heartbeat.
        exited: reason for the end of the heartbeats, if the rank has left.
        endpoint: host and port of a listener that is open while the process lives; [] without one.
        sent: the time, in seconds since 1970 on the clock of the rank's host.
    """

    rank: int
    heartbeat: int = 0
    activity: str = ""
    pending: tuple[PendingConnect, ...] = ()
    running: tuple[RunningCollective, ...] = ()
    exited: str = ""
    endpoint: tuple[str, int] | tuple[()] = ()
    sent: float = 0.0

    def pack(self) -> str:
        return pack(**vars(self))

    @classmethod
    def unpack(cls, rank: int, text: bytes | None) -> RankStatus | None:
        """Decode the status of a rank; None for no status or a foreign value."""
        plain = {"rank": int, "heartbeat": int, "activity": str, "exited": str, "sent": float}
        record = unpack(text or b"", pending=list, running=list, endpoint=list, **plain)
        if record is None or record["rank"] != rank or not 0.0 <= record["sent"] <= _LATEST:  # NaN is none of these
            return None
        pending = [_typed(PendingConnect, each, (str, str, str, str, str, list)) for each in record["pending"]]
        running = [_typed(RunningCollective, each, (str, str, str, int, int)) for each in record["running"]]
        endpoint = record["endpoint"]
        if None in pending or None in running or not _is_endpoint(endpoint):
            return None
        waits = [wait._replace(missing=tuple(each for each in wait.missing if type(each) is int)) for wait in pending]
        return cls(
            **{name: record[name] for name in plain},
            pending=tuple(waits),
            running=tuple(running),
            endpoint=tuple(endpoint),
        )

    def __str__(self) -> str:
        lines = [*map(str, self.pending), self.activity, *map(str, self.running)]
        return self.exited or "; ".join(filter(None, lines)) or "not in connect"


def _typed(kind: Any, values: object, types: tuple[type, ...]) -> Any:
    """A named tuple of these values; None unless they have these types."""
    return kind(*values) if isinstance(values, list) and tuple(map(type, values)) == types else None


def _is_endpoint(values: list[Any]) -> bool:
    """True for a host and a port, or for neither."""
    return not values or ([*map(type, values)] == [str, int] and 0 <= values[1] < 1 << 16)


# -- what this process knows of one rank ------------------------------------------------------------------------------


READ_SECONDS = 0.02
"""The longest time that a read of a status takes on a store that is not busy, in seconds. ``Record.silence`` is too
short by up to this time, so it is added. Without it, a rank would be found lost one heartbeat too late."""


class Record(NamedTuple):
    """The knowledge of one rank, and what follows from it:

        its status       its listener       its last heartbeat          so the rank
        none             any                any                         may not have begun
        has ``exited``   any                any                         is lost: it left the world
        other            is known to        any                         is lost: its process has ended
                         refuse
        other            other              read ``lost_after`` ago     is lost: it is silent
        other            other              read later                  lives

    Args:
        status: the last one; None if the last read found none.
        foreign: message about the value that was read in its place; None for none.
        heard: the last heartbeat, and when it was first read; None before the first one.
        silence: seconds from the first read of the last heartbeat to the start of the latest read.
        ended: the listener that is known to refuse; None for none.
    """

    status: RankStatus | None = None
    foreign: str | None = None
    heard: tuple[int, float] | None = None
    silence: float = 0.0
    ended: object = None

    def after(self, status: RankStatus | None, foreign: str | None, began: float, now: float) -> Record:
        """The record after a read that found a status, a foreign value or nothing."""
        before = self.status
        if status is None:
            return self._replace(status=None, foreign=foreign)
        # A new process of the rank counts its heartbeats from the beginning, and may have the port of another one.
        if before is None or self.heard is None or (before.heartbeat, before.sent) != (status.heartbeat, status.sent):
            return Record(status, heard=(status.heartbeat, now))
        return self._replace(status=status, silence=began - self.heard[1])

    @property
    def text(self) -> str | None:
        """The status as text, or the foreign value in its place; None for neither."""
        return self.foreign if self.status is None else str(self.status)

    def loss(self, lost_after: float) -> str:
        """How it is known that the rank is lost, to follow its name; "" if it is not. See the table."""
        status, seconds = self.status, self.silence + READ_SECONDS
        if status is None:
            return ""
        if status.exited:
            return f": {status}"
        if status.endpoint == self.ended:
            return f" has ended: its listener at {':'.join(map(str, status.endpoint))} refuses connections"
        if seconds >= lost_after:
            return f" has sent no heartbeat for at least {int(seconds)} s; its last status: {status}"
        return ""


# -- what it knows of all ---------------------------------------------------------------------------------------------


class Statuses:
    """The last status of other ranks, each with the time when its heartbeat was first read.

    The store thread and a caller of ``shrink`` may use one object at the same time.

    Args:
        lost_after: seconds without a new heartbeat after which a rank counts as lost.
        now: the clock, in seconds: ``AnswerClock.answered_seconds``, or the one of a model.
        has_ended: True if the process with this status has ended. Its heartbeat has not changed for the first seconds,
            and an answer is awaited for the second ones.
    """

    def __init__(
        self,
        lost_after: float,
        now: Callable[[], float],
        has_ended: Callable[[RankStatus, float, float], bool] = lambda status, seconds, wait: False,
    ) -> None:
        self.lost_after, self.now, self._has_ended = lost_after, now, has_ended
        self.records: dict[int, Record] = {}  # by rank that was read
        self._lock = threading.Lock()  # guards the change of a record

    def read(self, run: Run, ranks: Iterable[int]) -> None:
        """Read the statuses of some ranks.

        Args:
            run: performs operations on the store.
        """
        ranks, began = list(ranks), self.now()
        texts = run(*(Read(status_key(rank)) for rank in ranks))
        now = self.now()
        for rank, text in zip(ranks, texts):
            status = RankStatus.unpack(rank, text)
            foreign = None if status or text is None else foreign_value(status_key(rank), text)
            with self._lock:
                self.records[rank] = self.record(rank).after(status, foreign, began, now)

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

        It waits for ``ANSWER_SECONDS``, or less if the rank becomes lost before, since its silence then says enough.

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
            wait, asked = min(ANSWER_SECONDS, limit - record.silence), self.now()
            if self._has_ended(record.status, record.silence, wait):
                self._note_end(run, rank, record.status)
            elif not all_of_them or self.now() - asked >= wait:
                return

    def _note_end(self, run: Run, rank: int, status: RankStatus) -> None:
        """Note that the process with this status has ended, and read a reason that it has published since then."""
        with self._lock:
            self.records[rank] = self.record(rank)._replace(ended=status.endpoint)
        self.read(run, [rank])

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

    def has_entered(self, rank: int, collective: RunningCollective) -> bool:
        """True if a rank has reported that it is in this collective of this rank, or in a later one of its group."""
        status = self.record(rank).status
        running = () if status is None else status.running
        return any(each.name == collective.name and each.number >= collective.number for each in running)

    def describe(self, rank: int, lost_after: float | None = None) -> str:
        """The last status of a rank for a message; how it is known to be lost, if it is."""
        if rank not in self.records:
            return f"rank {rank}: its status was not read"
        record = self.record(rank)
        no_status = "no status: it has not called connect yet, has left the world, or cannot reach the store"
        return f"rank {rank}{record.loss(self.limit(lost_after)) or f': {record.text or no_status}'}"

    def next_inspection(self, period: float) -> float:
        """Seconds until the next inspection: a period, or less if a silent rank becomes lost before."""
        heard = [each.heard[1] for each in [*self.records.values()] if each.heard is not None]
        losses = (at + self.lost_after - self.now() for at in heard)
        return min([period, *(each for each in losses if each > 0)])
