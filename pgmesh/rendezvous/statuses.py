"""The statuses that ranks publish with their heartbeats, and the lost ranks that are found from them.

``Statuses`` is what a process, or one call, knows of the other ranks of its world.

A status is a record in the store under ``pgmesh/status/<rank>``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pgmesh._util.formatting import name_ranks
from pgmesh._util.listeners import ANSWER_SECONDS
from pgmesh.rendezvous.operations import Read, Run
from pgmesh.rendezvous.records import foreign_value, pack, unpack


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
        texts = {"activity": str, "exited": str}
        lists = {"pending": list, "running": list, "endpoint": list}
        record = unpack(text or b"", rank=int, heartbeat=int, sent=float, **texts, **lists)
        if record is None or record["rank"] != rank:
            return None
        pending = [_typed(PendingConnect, each, (str, str, str, str, str, list)) for each in record["pending"]]
        running = [_typed(RunningCollective, each, (str, str, str, int, int)) for each in record["running"]]
        endpoint = record["endpoint"]
        if None in pending or None in running or [*map(type, endpoint)] not in ([], [str, int]):
            return None
        if not math.isfinite(record["sent"]):
            return None
        waits = [wait._replace(missing=tuple(each for each in wait.missing if type(each) is int)) for wait in pending]
        return cls(
            rank,
            record["heartbeat"],
            record["activity"],
            tuple(waits),
            tuple(running),
            record["exited"],
            tuple(endpoint),
            record["sent"],
        )

    def __str__(self) -> str:
        lines = [*map(str, self.pending), self.activity, *map(str, self.running)]
        return self.exited or "; ".join(filter(None, lines)) or "not in connect"


def _typed(kind: Any, values: object, types: tuple[type, ...]) -> Any:
    """A named tuple of these values; None unless they have these types."""
    return kind(*values) if isinstance(values, list) and tuple(map(type, values)) == types else None


# -- lost ranks -------------------------------------------------------------------------------------------------------


READ_SECONDS = 0.02
"""The longest time that a read of a status takes on a store that is not busy, in seconds. A silence is measured too
short by up to this time, which is added back: otherwise a silence of five heartbeats would be noticed at the sixth."""


class Statuses:
    """The last status of other ranks, each with the time when its heartbeat was first read.

    A rank is lost if its status says that it left, if its heartbeat has not changed for a while, or if its process has
    ended.

    Args:
        lost_after: seconds without a new heartbeat after which a rank counts as lost.
        now: the clock, in seconds: ``WorldStore.answered_seconds``, or the one of a model.
        has_ended: True if the process with this status has ended. Its heartbeat has not changed for these seconds.
    """

    def __init__(
        self,
        lost_after: float,
        now: Callable[[], float],
        has_ended: Callable[[RankStatus, float], bool] = lambda status, seconds: False,
    ) -> None:
        self.lost_after, self.now, self._has_ended = lost_after, now, has_ended
        self.ended: dict[int, object] = {}  # by rank: the listener of a process that has ended
        self.heard: dict[int, tuple[int, float]] = {}  # by rank: its last heartbeat, and when it was first read
        self._read_at: dict[int, float] = {}  # by rank: the begin of the last read of its status
        self._last: dict[int, RankStatus] = {}
        self._without: dict[int, str | None] = {}  # by rank that was read and has no status: the foreign value, if any

    def read(self, run: Run, ranks: Iterable[int]) -> None:
        """Read the statuses of some ranks.

        Args:
            run: performs operations on the store.
        """
        ranks, began = list(ranks), self.now()
        texts = run(*(Read(status_key(rank)) for rank in ranks)) if ranks else ()
        now = self.now()
        for rank, text in zip(ranks, texts):
            status = RankStatus.unpack(rank, text)
            if status is None:
                self._last.pop(rank, None)
                self._without[rank] = None if text is None else foreign_value(status_key(rank), text)
                continue
            before = self._last.get(rank)
            # A new process of the rank counts its heartbeats from the beginning, and may have the port of another one.
            if before is None or (before.heartbeat, before.sent) != (status.heartbeat, status.sent):
                self.heard[rank] = (status.heartbeat, now)
                self.ended.pop(rank, None)
            self._read_at[rank] = began
            self._last[rank] = status  # last: other threads look here first

    def get(self, rank: int) -> RankStatus | None:
        """The last status of a rank; None if it has none."""
        return self._last.get(rank)

    def text(self, rank: int) -> str | None:
        """The last status of a rank as text, or the foreign value in its place; None if it has none."""
        status = self._last.get(rank)
        return self._without.get(rank) if status is None else str(status)

    def find_ended(self, run: Run, ranks: Iterable[int], *, all_of_them: bool = False) -> None:
        """Ask the listeners of some ranks, up to the first process that has not ended: the caller waits for that one.

        Args:
            run: performs operations on the store.
            all_of_them: ask the others too. A host that does not answer costs ``ANSWER_SECONDS``, so it is the last.
        """
        start = self.now()
        for rank in ranks:
            status = self._last.get(rank)
            if status is None or status.exited or self.ended.get(rank) == status.endpoint:
                continue
            if self._has_ended(status, self._silence(rank)):
                self.ended[rank] = status.endpoint
                self.read(run, [rank])  # it may have published a reason since the last read
            elif not all_of_them or self.now() - start >= ANSWER_SECONDS:
                return

    def lost(self, ranks: Iterable[int], lost_after: float | None = None) -> dict[int, str]:
        """The ranks that are lost, each with the message of ``describe``.

        Args:
            lost_after: as in the class, for this call.
        """
        known = [status for rank in ranks if (status := self._last.get(rank)) is not None]
        return {each.rank: self.describe(each.rank, lost_after) for each in known if self._is_lost(each, lost_after)}

    def _is_lost(self, status: RankStatus, lost_after: float | None) -> bool:
        return bool(status.exited) or self._is_ended(status) or self._is_silent(status.rank, lost_after)

    def _is_ended(self, status: RankStatus) -> bool:
        return bool(status.endpoint) and self.ended.get(status.rank) == status.endpoint

    def _is_silent(self, rank: int, lost_after: float | None) -> bool:
        return self._silence(rank) + READ_SECONDS >= self.limit(lost_after)

    def limit(self, lost_after: float | None) -> float:
        """Seconds of silence after which a rank is lost: those given, or the default."""
        return self.lost_after if lost_after is None else lost_after

    def _silence(self, rank: int) -> float:
        """Seconds from the answer with the last heartbeat to the last read. A slow answer is no silence."""
        return max(0.0, self._read_at[rank] - self.heard[rank][1])

    def has_entered(self, rank: int, collective: RunningCollective) -> bool:
        """True if a rank has reported that it is in this collective of this rank, or in a later one of its group."""
        status = self.get(rank)
        running = () if status is None else status.running
        return any(each.name == collective.name and each.number >= collective.number for each in running)

    def describe(self, rank: int, lost_after: float | None = None) -> str:
        """The last status of a rank for a message; how it is known to be lost, if it is."""
        status = self._last.get(rank)
        if status is None:
            without = self._without.get(rank, "its status was not read")
            return f"rank {rank}: {without or 'no status: it has not called connect yet, or cannot reach the store'}"
        if self._is_ended(status) and not status.exited:
            return f"rank {rank} has ended: its listener at {':'.join(map(str, status.endpoint))} refuses connections"
        if status.exited or not self._is_silent(rank, lost_after):
            return f"rank {rank}: {status}"
        seconds = int(self._silence(rank) + READ_SECONDS)
        return f"rank {rank} has sent no heartbeat for at least {seconds} s; its last status: {status}"

    def next_inspection(self, period: float) -> float:
        """Seconds until the next inspection: a period, or less if a silent rank becomes lost before."""
        now = self.now()
        losses = (heard + self.lost_after - now for _, heard in self.heard.values())
        return min([period, *(each for each in losses if each > 0)])
