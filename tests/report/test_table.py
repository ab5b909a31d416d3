"""The table of a report: the state of each rank, and the ranks that are behind in a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pgmesh.liveness.places import GroupCounter
from pgmesh.liveness.statuses import Place, RankStatus, Statuses, status_key
from pgmesh.report.table import Report, Row, find_behind, make_report
from tests.support.memory_client import MemoryClient

PERIOD = 0.1
PLACE = Place("train.py:31", "step", "torch.distributed.all_reduce", "group dp of mesh 'train'", 12)
EXITED = "has left the world: its process has exited"
DP = "group dp of mesh 'train'"
WAITS = "connecting group tp of mesh 'train' (ranks 0, 1) at train.py:9, waiting for rank 1"


def status(rank: int, sent: float = 0.0, **more: Any) -> RankStatus:
    """A status that was sent some seconds ago."""
    given: dict[str, Any] = {"place": PLACE, "endpoint": ("127.0.0.1", 4000 + rank), **more}
    return RankStatus(8, f"host{rank}", 4000 + rank, sent=time.time() - sent, **given)


def report_of(
    *statuses: RankStatus, ended: tuple[int, ...] = (), between: Callable[[MemoryClient], object] = lambda client: None
) -> Report:
    client = MemoryClient(0, {status_key(each.pid - 4000): each.pack().encode() for each in statuses})

    def run(*operations: Any) -> list[Any]:
        answers = client.run(*operations)
        between(client)
        return answers

    known = Statuses(5 * PERIOD, time.monotonic, lambda status, *_: status.pid - 4000 in ended)
    return make_report("mesh 'train'", known, run, range(2), PERIOD)


def test_running_rank_is_where_its_thread_is():
    report = report_of(status(0), status(1, pending={"train.0/0": WAITS}))
    assert report.rows == {
        0: Row(0, "host0", 4000, "runs", 12, f"{PLACE}"),
        1: Row(1, "host1", 4001, "runs", 12, WAITS),
    }
    assert f"{report}" == (
        "mesh 'train'\n"
        "rank  host   PID   state  for   where\n"
        "0     host0  4000  runs   12 s  at train.py:31 in step: torch.distributed.all_reduce, "
        "group dp of mesh 'train'\n"
        f"1     host1  4001  runs   12 s  {WAITS}"
    )


@pytest.mark.parametrize(
    ("ago", "exited", "ended", "state", "text"),
    [
        (3.0, "", (1,), "ended", f"has ended: its listener at 127.0.0.1:4001 refuses connections; was {PLACE}"),
        (9.5, "", (), "silent", f"its last heartbeat was 9 s ago by its clock; was {PLACE}"),
        (9.5, EXITED, (), "left", EXITED),
    ],
)
def test_rank_that_does_not_run_has_its_reason(ago: float, exited: str, ended: tuple[int, ...], state: str, text: str):
    row = report_of(status(0), status(1, ago, exited=exited), ended=ended).rows[1]
    assert (row.state, row.seconds, row.text) == (state, int(ago), text)


def test_rank_without_status_says_how_to_get_one():
    report = report_of(status(0))
    assert report.rows[1] == Row(1)
    assert "PGMESH_REPORT=1" in report.rows[1].text
    assert f"{report}".endswith(f"1     -      -     -      -     {report.rows[1].text}")


@pytest.mark.parametrize(
    ("first", "sent"),
    [([], 0.0), ([status(1, -1000.0)], -1001.0), ([status(1, 1000.0)], 999.0)],
    ids=["no status at first", "a clock ahead", "a clock behind"],
)
def test_rank_that_beats_meanwhile_runs(first: list[RankStatus], sent: float):
    def beat(client: MemoryClient) -> None:
        client.values[status_key(1)] = status(1, sent).pack().encode()

    assert report_of(status(0), *first, between=beat).rows[1].state == "runs"


def behind(counts: Mapping[int, int | None], places: Mapping[int, Place] = {}) -> list[str]:
    """What is said of ranks that have entered so many operations in a group of ranks 0 to 3; None: not made."""
    statuses = {rank: status(rank, place=places.get(rank, PLACE)) for rank in counts}
    counters = {
        rank: () if count is None else (GroupCounter("train.0/dp", DP, [0, 1, 2, 3], count),)
        for rank, count in counts.items()
    }
    return [*find_behind(statuses, counters, 1.0)]


@pytest.mark.parametrize(
    ("counts", "places", "said"),
    [
        ({0: 17, 1: 17, 2: 16, 3: 17}, {}, "ranks 0, 1, 3 entered 17 operations; behind: rank 2 with 16"),
        ({0: 1, 1: None, 2: 1}, {}, "ranks 0, 2 entered 1 operation; behind: rank 1 with 0"),
        ({0: 1, 2: 1, 4: None}, {}, ""),  # rank 4 is no member, and rank 1 has no status
        ({0: 17, 1: 17}, {}, ""),
        ({}, {}, ""),
        ({0: 17, 1: 16}, {0: PLACE._replace(seconds=1)}, ""),  # they move: the statuses are of different moments
    ],
)
def test_rank_with_fewer_operations_is_behind(counts: Mapping[int, int | None], places: Mapping[int, Place], said: str):
    assert behind(counts, places) == ([f"{DP}: {said}"] if said else [])


@pytest.mark.parametrize("call", ["recv", "isend", "batch_isend_irecv"])
def test_group_of_point_to_point_call_is_omitted(call: str):
    assert behind({0: 17, 1: 16}, {1: PLACE._replace(called=f"torch.distributed.{call}")}) == []
    assert behind({0: 17, 1: 16}, {1: PLACE._replace(called=f"torch.distributed.{call}", group="another")}) != []
