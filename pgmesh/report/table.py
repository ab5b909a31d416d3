"""The table of ``mesh.report()`` and of ``pgmesh report``: a row for each rank, and the ranks that are behind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pgmesh._util.formatting import count_of, name_ranks
from pgmesh.liveness import timing
from pgmesh.liveness.operations import Read, Run
from pgmesh.liveness.places import GroupCounter, counters_key, unpack_counters
from pgmesh.liveness.statuses import NO_STATUS, RankStatus, Record, Statuses

State = Literal["runs", "ended", "silent", "left", ""]

_MISSED_PERIODS = 1.5
"""A heartbeat is old after this many periods."""

_WAIT_PERIODS = 1.6
"""The wait for ranks whose last heartbeat is old: longer than until the listener of another host is believed."""

_LONGEST_WAIT = 2.0
"""The longest such wait in seconds."""

_WAITING_PERIODS = 2
"""A rank that has not moved for so many periods waits, and the others have had the time to report their operations."""

_POINT_TO_POINT = (".send", ".recv", ".isend", ".irecv", "_isend_irecv")


@dataclass(frozen=True)
class Row:
    """One rank.

    Args:
        host, pid: its process; "" and 0 if it has no status.
        state: "runs"; "ended": its process has; "silent": it sends no heartbeats; "left" the world; "" if not known.
        seconds: for how long it has been where it is, if it runs; otherwise the time since its last heartbeat.
        text: where it is, or was, and how its state is known.
    """

    rank: int
    host: str = ""
    pid: int = 0
    state: State = ""
    seconds: int = 0
    text: str = NO_STATUS


@dataclass(frozen=True)
class Report:
    """The place of each rank. ``str`` gives a table.

    Args:
        title: the mesh or the world.
        rows: by rank.
        behind: for each group in which members have entered more operations than others, a sentence about it.
    """

    title: str
    rows: Mapping[int, Row]
    behind: tuple[str, ...] = ()

    def __str__(self) -> str:
        cells = [("rank", "host", "PID", "state", "for", "where")]
        for row in self.rows.values():
            known = (row.host, f"{row.pid}", row.state, f"{row.seconds} s") if row.state else ("-", "-", "-", "-")
            cells.append((f"{row.rank}", *known, row.text))
        widths = [max(map(len, column)) for column in zip(*cells)][:-1]
        lines = ["  ".join([*map(str.ljust, line, widths), line[-1]]) for line in cells]
        return "\n".join([self.title, *lines, *self.behind])


def make_report(title: str, statuses: Statuses, run: Run, ranks: Sequence[int], period: float) -> Report:
    """Read the statuses of ranks, and make a report of them. It waits once if a heartbeat is old or missing.

    Args:
        statuses: what is known of the ranks.
        run: performs operations on the store.
        period: seconds between two heartbeats.
    """
    statuses.read(run, ranks)
    first = {rank: statuses.record(rank).since for rank in ranks}
    old = [rank for rank in ranks if not _is_fresh(statuses.record(rank).status, period)]
    if old:
        time.sleep(min(_WAIT_PERIODS * period, _LONGEST_WAIT))
    statuses.find_lost(run, ranks)
    late = [rank for rank in old if statuses.record(rank).since == first[rank]]
    found = {rank: record.status for rank in ranks if (record := statuses.record(rank)).status}
    counters = dict(zip(found, map(unpack_counters, run(*map(Read, map(counters_key, found))))))
    rows = {rank: _row(rank, statuses.record(rank), statuses.lost_after, is_late=rank in late) for rank in ranks}
    return Report(title, rows, tuple(find_behind(found, counters, period)))


def _is_fresh(status: RankStatus | None, period: float) -> bool:
    """True if the last heartbeat is new. The clocks of two hosts differ, so one that seems old may be new too."""
    return status is not None and 0 <= time.time() - status.sent < _MISSED_PERIODS * period


def _row(rank: int, record: Record, lost_after: float, *, is_late: bool) -> Row:
    status, loss = record.status, record.loss(lost_after)
    if status is None:
        return Row(rank)
    age = max(0, int(time.time() - status.sent))
    if status.exited:
        return Row(rank, status.host, status.pid, "left", age, status.exited)
    if loss or (is_late and age >= lost_after):
        state: State = "ended" if status.endpoint == record.ended else "silent"
        how = loss.strip().partition(";")[0] or f"its last heartbeat was {age} s ago by its clock"
        return Row(rank, status.host, status.pid, state, age, f"{how}; was {status.place}")
    return Row(rank, status.host, status.pid, "runs", status.place.seconds, status.waits or f"{status.place}")


def find_behind(
    statuses: Mapping[int, RankStatus], counters: Mapping[int, Sequence[GroupCounter]], period: float
) -> Iterator[str]:
    """For each group in which a member waits and others have entered fewer operations, a sentence with the numbers.

    Sends and receives count too, so a group in which a member is in one of these is left out.
    """
    entered = {rank: {each.name: each.operations for each in own} for rank, own in counters.items()}
    for group in {each.name: each for own in counters.values() for each in own}.values():
        members = [rank for rank, own in entered.items() if group.name in own or rank in group.ranks]
        counts = {rank: entered[rank].get(group.name, 0) for rank in members}
        most, places = max(counts.values()), {rank: statuses[rank].place for rank in members}
        first = [rank for rank in members if counts[rank] == most]
        behind = [f"rank {rank} with {counts[rank]}" for rank in members if counts[rank] < most]
        waits = any(places[rank].seconds >= _WAITING_PERIODS * period for rank in first)
        in_pairs = any(at.group == group.label and at.called.endswith(_POINT_TO_POINT) for at in places.values())
        if behind and waits and not in_pairs:
            numbers = f"{name_ranks(first)} entered {count_of(most, 'operation')}"
            yield f"{group.label}: {numbers}; behind: {', '.join(behind[: timing.MOST_NAMED])}"
