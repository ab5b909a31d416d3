"""Statuses: their form in the store, what follows from them, and which ranks are taken for lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pgmesh.liveness import timing
from pgmesh.liveness.records import VERSION, foreign_value, pack, unpack
from pgmesh.liveness.statuses import PendingConnect, Place, RankStatus, Statuses, status_key
from tests.support.memory_client import MemoryClient

WAITS = PendingConnect("train.0/0", "group tp", "mesh 'actor'", "0, 1", "train.py:9", (0, 7))
PLACE = Place("train.py:31", "step", "torch.distributed.all_reduce", "group dp of mesh 'actor'", 12)
FULL = RankStatus(
    1,
    heartbeat=3,
    world_size=8,
    host="host7",
    pid=4711,
    activity="standing by for mesh 'actor'",
    pending=(WAITS,),
    place=PLACE,
    endpoint=("10.0.0.1", 4000),
    sent=1000.5,
)


def foreign_texts() -> list[bytes]:
    record = json.loads(FULL.pack())
    others: list[dict[str, Any]] = [
        {**record, "v": VERSION - 1},
        {**record, "rank": 2},
        {**record, "rank": "1"},
        {**record, "more": 1},
        {**record, "place": ["train.py:31"] * 9},
        {**record, "pending": [["too", "few"]]},
        {**record, "host": "x" * timing.LIMITS.record_chars},
        {name: value for name, value in record.items() if name != "heartbeat"},
    ]
    return [b"", b"nonsense", b"\xff\xfe", b"null", b"[" * 2000, *(json.dumps(each).encode() for each in others)]


@pytest.mark.parametrize("text", foreign_texts(), ids=lambda text: repr(text[:20]))
def test_unpack_returns_none_for_foreign_value(text: bytes):
    assert RankStatus.unpack(1, text) is None


@given(st.text(max_size=12), st.integers(0, 9), st.text(max_size=12))
def test_packed_status_is_read_unchanged(activity: str, rank: int, line: str):
    status = RankStatus(rank, 7, activity=activity, pending=(WAITS._replace(call_site=line),), place=PLACE)
    assert RankStatus.unpack(rank, status.pack().encode()) == status


def test_status_with_all_fields_is_read_unchanged():
    assert RankStatus.unpack(1, FULL.pack().encode()) == FULL
    assert RankStatus.unpack(1, None) is None


def test_lone_surrogate_is_read_as_question_mark():
    """A file name may have one, and so an error or the activity of a rank that names it."""
    found = RankStatus.unpack(1, RankStatus(1, activity="reads caf\udce9.txt").pack().encode())
    assert found is not None
    assert found.activity == "reads caf?.txt"


def test_unpack_evaluates_no_text():
    assert unpack("__import__('os').abort()") is None
    assert unpack(pack(rank=1), rank=int) == {"rank": 1, "v": VERSION}
    assert foreign_value("a/b", b"x" * 100) == f"the store's key a/b holds {b'x' * 80!r}..., which pgmesh did not write"


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (FULL, f"{WAITS}; standing by for mesh 'actor'"),
        (
            RankStatus(1, exited="has left the world: its process has exited"),
            "has left the world: its process has exited",
        ),
        (RankStatus(1, place=PLACE), f"{PLACE}, for 12 s"),
        (RankStatus(1, place=Place("a.py:2", "load")), "at a.py:2 in load, for 0 s"),
        (RankStatus(1), "its thread has ended, for 0 s"),
    ],
)
def test_status_text_says_what_rank_does(status: RankStatus, text: str):
    assert str(status) == text


def test_place_text_names_function_and_group():
    assert f"{PLACE}" == "at train.py:31 in step: torch.distributed.all_reduce, group dp of mesh 'actor'"


# -- which ranks are lost ----------------------------------------------------------------------------------------------


class Reader:
    """Statuses over a store in memory, with a clock that the test moves."""

    def __init__(self, has_ended: Callable[[RankStatus, float, float], bool] = lambda *_: False) -> None:
        self.client, self.clock = MemoryClient(0), 0.0
        self.statuses = Statuses(5.0, lambda: self.clock, has_ended)

    def read(self, heartbeat: int, after: float = 0.0, **more: Any) -> None:
        """Read a status of rank 1, some seconds later."""
        self.clock += after
        status = RankStatus(1, heartbeat, endpoint=("127.0.0.1", 4000), place=PLACE, **more)
        self.client.values[status_key(1)] = status.pack().encode()
        self.statuses.read(self.client.run, [1])

    @property
    def lost(self) -> dict[int, str]:
        return self.statuses.lost([1, 2])


def test_rank_without_status_is_not_lost():
    reader = Reader()
    reader.statuses.read(reader.client.run, [1])
    reader.clock = 100.0
    reader.statuses.read(reader.client.run, [1])
    assert reader.lost == {}
    assert reader.statuses.describe(1).startswith("rank 1: no status: it has called none of connect, report")
    assert reader.statuses.describe(2) == "rank 2: its status was not read"


def test_rank_is_lost_after_seconds_without_heartbeat():
    reader = Reader()
    reader.read(1)
    reader.read(1, 4.9)
    assert reader.lost == {}
    reader.read(2, 4.0)
    reader.read(2, 4.9)
    assert reader.lost == {}
    reader.read(2, 0.1)
    assert reader.lost == {1: f"rank 1 has sent no heartbeat for at least 5 s; its last status: {PLACE}, for 12 s"}
    assert reader.statuses.lost([1], 6.0) == {}
    reader.read(3)
    assert reader.lost == {}


def test_rank_that_left_is_lost_at_once():
    reader = Reader()
    reader.read(1, exited="has left the world: its process has exited")
    assert reader.lost == {1: "rank 1 has left the world: its process has exited"}


def test_refusing_listener_means_that_rank_has_ended():
    reader = Reader(lambda *_: True)
    reader.read(1)
    reader.statuses.find_ended(reader.client.run, [2, 1])
    assert reader.lost == {1: "rank 1 has ended: its listener at 127.0.0.1:4000 refuses connections"}
    reader.read(1, sent=7.0)  # a new process of the rank
    assert reader.lost == {}


def test_reason_published_before_the_end_is_read():
    def has_ended(*_: object) -> bool:
        text = RankStatus(1, 2, exited="has left the world: it was destroyed", endpoint=("127.0.0.1", 4000)).pack()
        reader.client.values[status_key(1)] = text.encode()
        return True

    reader = Reader(has_ended)
    reader.read(1)
    reader.statuses.find_ended(reader.client.run, [1])
    assert reader.lost == {1: "rank 1 has left the world: it was destroyed"}


def test_find_ended_stops_at_first_running_rank():
    asked: list[int] = []
    statuses = Statuses(5.0, lambda: 0.0, lambda status, *_: bool(asked.append(status.rank)))
    client = MemoryClient(0, {status_key(rank): RankStatus(rank).pack().encode() for rank in range(3)})
    statuses.read(client.run, range(3))
    statuses.find_ended(client.run, range(3))
    assert asked == [0]
    statuses.find_ended(client.run, range(3), all_of_them=True)
    assert asked == [0, 0, 1, 2]


def test_next_inspection_is_due_when_rank_becomes_lost():
    reader = Reader()
    assert reader.statuses.next_inspection(0.2) == 0.2
    reader.read(1)
    reader.clock = 4.9
    assert reader.statuses.next_inspection(0.2) == pytest.approx(0.1)
