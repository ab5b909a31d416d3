"""Statuses: their form in the store, what follows from them, and which ranks are lost; and operations on stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st

from pgmesh.liveness.operations import Add, Append, CompareSet, Delete, Operation, Read, Set, perform
from pgmesh.liveness.statuses import Place, RankStatus, Statuses, status_key
from tests.support.board import MemoryStore
from tests.support.memory_client import MemoryClient

WAITS = "connecting group tp of mesh 'actor' (ranks 0, 1) at train.py:9, waiting for ranks 0, 7"
PLACE = Place("train.py:31", "step", "torch.distributed.all_reduce", "group dp of mesh 'actor'", 12)
ENDPOINT = ("127.0.0.1", 4000)
FULL = RankStatus(8, "host7", 4711, {"train.0/0": WAITS}, PLACE, endpoint=ENDPOINT, sent=1000.5)
LEFT = "has left the world: its process has exited"


@given(st.text(max_size=12), st.text(max_size=12))
def test_packed_status_is_read_unchanged(host: str, text: str):
    for status in RankStatus(host=host, pending={"a": text}), FULL:
        assert RankStatus.unpack(status.pack().encode()) == status


def test_lone_surrogate_is_read_as_question_mark():
    """A file name may have one, and so a place."""
    found = RankStatus.unpack(RankStatus(place=Place("caf\udce9.py:3")).pack().encode())
    assert found is not None
    assert found.place.line == "caf?.py:3"


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (FULL, WAITS),
        (RankStatus(exited=LEFT), LEFT),
        (
            RankStatus(place=PLACE),
            "at train.py:31 in step: torch.distributed.all_reduce, group dp of mesh 'actor', for 12 s",
        ),
        (RankStatus(place=Place("a.py:2", "load")), "at a.py:2 in load, for 0 s"),
        (RankStatus(), "its thread has ended, for 0 s"),
    ],
)
def test_status_text_says_what_rank_does(status: RankStatus, text: str):
    assert str(status) == text


class Reader:
    """Statuses over a store in memory, with a clock that the test moves.

    Args:
        has_ended: the answer of each listener.
    """

    def __init__(self, has_ended: bool = False) -> None:
        self.client, self.clock, self.answer = MemoryClient(0), 0.0, has_ended
        self.asked: list[tuple[int, float]] = []  # the ranks whose listeners were asked, and how long
        self.statuses = Statuses(5.0, lambda: self.clock, self._has_ended)

    def _has_ended(self, status: RankStatus, seconds: float, wait: float) -> bool:
        self.asked.append((status.pid, wait))
        self.clock += wait if status.host == "unreachable" else 0.0
        return self.answer

    def write(self, heartbeat: int, rank: int = 1, **more: Any) -> None:
        status = RankStatus(pid=rank, endpoint=ENDPOINT, place=PLACE, sent=float(heartbeat), **more)
        self.client.values[status_key(rank)] = status.pack().encode()

    def read(self, heartbeat: int, after: float = 0.0, **more: Any) -> None:
        """Read a status of rank 1, some seconds later."""
        self.clock += after
        self.write(heartbeat, **more)
        self.statuses.read(self.client.run, [1])

    def ask(self, *ranks: int) -> dict[int, str]:
        return self.statuses.find_lost(self.client.run, ranks)

    @property
    def lost(self) -> dict[int, str]:
        return self.statuses.lost([1, 2])


def test_rank_without_status_is_not_lost():
    reader = Reader()
    for reader.clock in (0.0, 100.0):
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
    reader.read(3)
    assert reader.lost == {}


def test_silence_of_whole_periods_is_one():
    """Of two looks five periods apart, the first counts after its read, and the second before it."""
    reader, times = Reader(), iter([0.0, 0.0003, 5.0, 5.0003])
    reader.statuses.now = lambda: next(times)
    reader.read(1)
    assert not reader.lost
    reader.read(1)
    assert reader.lost[1].startswith("rank 1 has sent no heartbeat for at least 5 s")


def test_refusing_listener_means_that_rank_has_ended():
    reader = Reader(has_ended=True)
    reader.write(1)
    assert reader.ask(2, 1) == {1: "rank 1 has ended: its listener at 127.0.0.1:4000 refuses connections"}
    reader.read(2)  # a new process may have the port of one that has ended
    assert reader.lost == {}


def test_reason_published_before_the_end_is_read():
    reader = Reader()
    reader.write(1)
    reader.statuses.has_ended = lambda *_: not reader.write(2, exited=LEFT)
    assert reader.ask(1) == {1: f"rank 1 {LEFT}"}


def test_unreachable_rank_ends_the_questions():
    """Each would otherwise take half a second."""
    reader = Reader()
    for rank, host in enumerate(("here", "unreachable", "here")):
        reader.write(1, rank, host=host)
    assert reader.ask(0, 1, 2) == {}
    assert reader.asked == [(0, 0.5), (1, 0.5)]


def test_almost_lost_rank_waits_shortly_for_its_listener():
    """A host that does not answer would otherwise postpone the loss by half a second."""
    reader = Reader()
    reader.read(3)
    reader.clock = 4.75
    reader.ask(1)
    assert reader.asked == [(1, 0.25)]


STEPS: list[tuple[Operation, Any]] = [
    (Read("a"), None),
    (Add("count"), 1),
    (Add("count"), 2),
    (Read("count"), b"2"),
    (CompareSet("a", "first"), b"first"),
    (CompareSet("a", "second"), b"first"),
    (Read("a"), b"first"),
    (Set("a", "fourth"), None),
    (Read("a"), b"fourth"),
    (Delete(("a", "count")), [True, True]),
    (Read("a"), None),
]
"""Operations in this order, each with its answer."""


def tcp_store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


STORES = {
    "TCPStore": lambda folder: tcp_store(),
    "HashStore": lambda folder: dist.HashStore(),
    "FileStore": lambda folder: dist.FileStore(str(folder / "store"), 1),
    "PrefixStore": lambda folder: dist.PrefixStore("prefix", tcp_store()),
    "memory": lambda folder: MemoryStore({}),
}


@pytest.mark.parametrize("name", STORES)
def test_perform_returns_answer_of_store(name: str, tmp_path: Path):
    store, steps = STORES[name](tmp_path), [*STEPS]
    if name != "FileStore":  # which cannot append
        steps += [(Append("lines", "a\n"), None), (Append("lines", "b\n"), None), (Read("lines"), b"a\nb\n")]
    assert [perform(store, operation) for operation, _ in steps] == [answer for _, answer in steps]
