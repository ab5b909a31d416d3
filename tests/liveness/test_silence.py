"""Silence and loss of ranks, as several looks at their statuses find it."""

from __future__ import annotations

from pgmesh.liveness.statuses import RankStatus, Statuses, status_key
from tests.support.memory_client import MemoryClient


def test_unread_status_is_not_called_absent():
    statuses = Statuses(5.0, lambda: 0.0)
    statuses.read(MemoryClient().run, [1])
    assert "rank 1: no status" in statuses.describe(1)
    assert statuses.describe(2) == "rank 2: its status was not read"


def test_silence_of_whole_periods_is_one():
    """Of two looks five periods apart, the first counts after its read, and the second before it."""
    times = iter([0.0, 0.0003, 5.0, 5.0003])
    statuses = Statuses(5.0, lambda: next(times))
    run = MemoryClient(values={status_key(1): RankStatus(1, 3).pack().encode()}).run
    statuses.read(run, [1])
    assert not statuses.lost([1])
    statuses.read(run, [1])
    assert statuses.lost([1])[1].startswith("rank 1 has sent no heartbeat for at least 5 s")


def test_new_process_with_same_heartbeat_is_not_silent():
    clock, values = [0.0], dict[str, bytes]()
    statuses = Statuses(5.0, lambda: clock[0])
    for clock[0], sent in ((0.0, 100.0), (30.0, 129.0)):
        values[status_key(1)] = RankStatus(1, 3, sent=sent).pack().encode()
        statuses.read(MemoryClient(values=values).run, [1])
        assert not statuses.lost([1])
    clock[0] = 36.0
    statuses.read(MemoryClient(values=values).run, [1])
    assert [*statuses.lost([1])] == [1]


def test_deleted_status_is_no_new_heartbeat():
    """Callers that compare the last heartbeat take no deletion of the key for a sign of life."""
    values, statuses = {status_key(1): RankStatus(1, 3).pack().encode()}, Statuses(5.0, lambda: 7.0)
    statuses.read(MemoryClient(values=values).run, [1])
    del values[status_key(1)]
    statuses.read(MemoryClient(values=values).run, [1])
    assert statuses.record(1).status is None
    assert statuses.record(1).heard == (3, 7.0)
    assert not statuses.lost([1])


def test_new_heartbeat_shows_that_a_rank_lives():
    """A new process may have the port of one that has ended."""
    values = dict[str, bytes]()
    statuses = Statuses(5.0, lambda: 0.0, lambda status, seconds, wait: True)
    seen = []
    for heartbeat in (3, 3, 4):
        values[status_key(1)] = RankStatus(1, heartbeat, endpoint=("127.0.0.1", 4000)).pack().encode()
        run = MemoryClient(values=values).run
        statuses.read(run, [1])
        seen.append([*statuses.lost([1])])
        if heartbeat == 3:
            statuses.find_ended(run, [1])
    assert seen == [[], [1], []]


def test_almost_lost_rank_waits_shortly_for_its_listener():
    """Each ask of a host that does not answer would otherwise postpone the loss by half a second."""
    clock, waits = [0.0], list[float]()
    statuses = Statuses(5.0, lambda: clock[0], lambda status, seconds, wait: waits.append(wait) or False)
    run = MemoryClient(values={status_key(1): RankStatus(1, 3, endpoint=("10.0.0.2", 4000)).pack().encode()}).run
    for clock[0] in (0.0, 4.75, 6.0):
        statuses.read(run, [1])
        statuses.find_ended(run, [1])
    statuses.find_ended(run, [1], 6.25)  # the limit of a call
    assert waits == [0.5, 0.25, 0.25]
