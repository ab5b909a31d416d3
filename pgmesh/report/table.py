"""The table of ``mesh.report()`` and of ``pgmesh report``: a row for each rank, and the ranks that are behind."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pgmesh._util.formatting import count_of, name_ranks
from pgmesh.liveness import timing
from pgmesh.liveness.counters import GroupCounter, counters_key, unpack_counters
from pgmesh.liveness.operations import Read, Run
from pgmesh.liveness.statuses import RankStatus, Record, Statuses

State = Literal["runs", "ended", "silent", "left", ""]

_MISSED_PERIODS = 1.5
"""A heartbeat is late after this many periods."""

_WAITING_PERIODS = 2
"""A rank that has not moved for so many periods waits, and the others have had the time to report their operations."""

_POINT_TO_POINT = (".send", ".recv", ".isend", ".irecv", "_isend_irecv")

_NO_STATUS = (
    "no status: it has called none of connect, report, abort_when_lost, shrink and stand_by, "
    "and joined without PGMESH_REPORT=1"
)


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
    text: str = _NO_STATUS


@dataclass(frozen=True)
class Report:
    """Where each rank is. ``str`` gives a table.

    Args:
        title: the mesh or the world.
        rows: by rank.
        behind: for each group in which members have entered more operations than others, a sentence about it.
        trouble: the reason for missing rows; "" for none.
    """

    title: str
    rows: Mapping[int, Row]
    behind: tuple[str, ...] = ()
    trouble: str = ""

    def __str__(self) -> str:
        cells = [("rank", "host", "PID", "state", "for", "where")]
        for row in self.rows.values():
            known = (row.host, f"{row.pid}", row.state, f"{row.seconds} s") if row.state else ("-", "-", "-", "-")
            cells.append((f"{row.rank}", *known, row.text))
        widths = [max(map(len, column)) for column in zip(*cells)][:-1]
        lines = ["  ".join([*map(str.ljust, line, widths), line[-1]]) for line in cells]
        return "\n".join([self.title, *(lines if self.rows else ()), *self.behind, *filter(None, [self.trouble])])


def make_report(
    title: str, statuses: Statuses, run: Run, ranks: Iterable[int], period: float, seconds: float
) -> Report:
    """Read the statuses of ranks, and make a report of them.

    Args:
        statuses: what is known of the ranks.
        run: performs operations on the store.
        period: seconds between two heartbeats.
        seconds: the longest wait for a late heartbeat, or for a status of a rank that has none.
    """
    ranks, read, end = list(ranks), list[int](), time.monotonic() + seconds
    while len(read) < len(ranks) and (not read or time.monotonic() < end):
        some = ranks[len(read) : len(read) + timing.LIMITS.statuses]
        statuses.read(run, some)
        read += some
    trouble = f"{name_ranks(ranks[len(read) :])} could not be read in {seconds:g} s" if len(read) < len(ranks) else ""
    late, heard = read, {rank: statuses.record(rank).heard for rank in read}
    while True:
        statuses.find_ended(run, late, all_of_them=True)
        lost = statuses.lost(late)
        late = [rank for rank in late if rank not in lost and _is_late(statuses.record(rank), heard[rank], period)]
        if not late or time.monotonic() > end:
            break
        time.sleep(timing.TIMING.longest_pause)
        statuses.read(run, late[: timing.LIMITS.statuses])
    rows = {rank: _row(rank, statuses.record(rank), statuses.lost_after, is_late=rank in late) for rank in read}
    found = {rank: status for rank in read if (status := statuses.record(rank).status)}
    texts = run(*(Read(counters_key(rank)) for rank in found))
    counters = {rank: unpack_counters(text) for rank, text in zip(found, texts)}
    return Report(title, rows, tuple(find_behind(found, counters, period)), trouble)


def _is_late(record: Record, heard: object, period: float) -> bool:
    """True for a rank without a status, and for one whose last heartbeat is old and has been the same since ``heard``.

    The clocks of two hosts differ, so a heartbeat that seems old may be new.
    """
    if record.status is None:
        return True
    is_fresh = 0 <= time.time() - record.status.sent < _MISSED_PERIODS * period
    return record.heard == heard and not is_fresh


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
    waits = "; ".join(filter(None, [*map(str, status.pending), status.activity]))
    return Row(rank, status.host, status.pid, "runs", status.place.seconds, waits or f"{status.place}")


# -- ranks that are behind --------------------------------------------------------------------------------------------


def find_behind(
    statuses: Mapping[int, RankStatus], counters: Mapping[int, Sequence[GroupCounter]], period: float
) -> Iterator[str]:
    """For each group in which a member waits and others have entered fewer operations, a sentence with the numbers.

    Sends and receives count too, so a group in which a member is in one of these is left out.
    """
    for group in {each.name: each for own in counters.values() for each in own}.values():
        counts = {
            rank: sum(each.operations for each in own if each.name == group.name)
            for rank, own in counters.items()
            if rank in group.ranks or any(each.name == group.name for each in own)
        }
        most, places = max(counts.values()), {rank: statuses[rank].place for rank in counts}
        first = [rank for rank in counts if counts[rank] == most]
        behind = [f"rank {rank} with {counts[rank]}" for rank in counts if counts[rank] < most]
        waits = any(places[rank].seconds >= _WAITING_PERIODS * period for rank in first)
        uses_pairs = any(
            each.group == group.label and each.called.endswith(_POINT_TO_POINT) for each in places.values()
        )
        if behind and waits and not uses_pairs:
            yield (
                f"{group.label}: {name_ranks(first)} entered {count_of(most, 'operation')}; behind: "
                + ", ".join(behind[: timing.LIMITS.named])
            )
