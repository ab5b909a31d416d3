"""The connect protocol and the store of backends, in one process that plays all ranks over a store in memory."""

from __future__ import annotations

import base64
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st

from pgmesh import LifetimeError, MismatchError, MissingRanksError, WorldError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.circles import circle_text, find_circle, search_circle
from pgmesh.rendezvous.gloo_store import GlooStore
from pgmesh.rendezvous.group_rounds import GroupRound
from pgmesh.rendezvous.operations import Operation, Read, perform
from pgmesh.rendezvous.polling_store import SEPARATOR, PollingStore
from pgmesh.rendezvous.records import Decision, Fingerprint
from pgmesh.rendezvous.refusals import RefusalKeys, Refusals
from pgmesh.rendezvous.statuses import PendingConnect, RankStatus, Record, Statuses, status_key
from tests.support.memory_client import MADE, MemoryClient, arrival, fingerprint, round_of, rounds_of

# -- attempts ---------------------------------------------------------------------------------------------------------


def test_interrupt_is_published_with_its_reason():
    def interrupt() -> None:
        raise KeyboardInterrupt

    client, each = MemoryClient(between=interrupt), round_of()
    with pytest.raises(KeyboardInterrupt):
        rounds_of(client, each).run()
    text = Decision.unpack("", client.values["group/0/decision"]).text
    assert "was cancelled because rank 0 stopped connecting at train.py:0: KeyboardInterrupt" in text


def test_error_reaches_the_attempt_that_others_are_at():
    """The others have given up attempt 0, of which this rank knows nothing, and wait at attempt 1."""
    failed = Decision("missing", "rank 0 did not arrive").pack().encode()
    client = MemoryClient(values={"group/0/decision": failed, "group/1/arrivals": arrival(1)})
    rounds_of(client, round_of()).cancel(OSError("no descriptor is left"))
    assert client.values["group/0/decision"] == failed
    assert "no descriptor is left" in Decision.unpack("", client.values["group/1/decision"]).text


def test_error_of_all_members_takes_one_attempt():
    """None of them arrives; later all release the group, and no key stays."""
    values = dict[str, bytes]()
    rounds = [round_of() for _ in range(3)]
    for rank, each in enumerate(rounds):
        rounds_of(MemoryClient(rank, values), each).cancel(OSError("no descriptor is left"))
    assert [each.number for each in rounds] == [0, 0, 0]
    for rank, each in enumerate(rounds):
        each.leave(MemoryClient(rank, values).run)
    assert not values


def test_release_waits_for_two_answers_of_the_store():
    """However many attempts failed: the caller waits up to 1 s for each."""
    client, each, requests = MemoryClient(), round_of(ranks=(0,)), list[int]()
    for _ in range(3):
        rounds_of(client, each).cancel(OSError("no descriptor is left"))
        before, each = each, round_of(ranks=(0,))
        each.continue_after(before)

    def run(*operations: Operation) -> list[Any]:
        requests.append(len(operations))
        return client.run(*operations)

    each.leave(run)
    assert not client.values
    assert len(requests) == 2


def test_error_reaches_all_groups_beside_a_made_one():
    """The group was made, and released by another thread before its first collective."""

    def released(made: GroupRound) -> None:
        raise LifetimeError("it was released")

    client = MemoryClient(values={"group/0/decision": MADE.pack().encode()})
    made, other = round_of(), round_of(key="other")
    made.has_sent = True
    rounds_of(client, made, other, ready=released).cancel(OSError("no descriptor is left"))
    assert made.is_made()
    assert "no descriptor is left" in Decision.unpack("", client.values["other/0/decision"]).text


@pytest.mark.fault("a member dies after it arrived, while another is late")
@pytest.mark.parametrize("late", [range(2, 4), range(2, 60)])
def test_member_that_dies_after_it_arrived_is_named(late: range):
    """A rank that has not begun is waited for. The one that died is named before the many that are late."""
    values = {
        "group/0/arrivals": arrival(1),
        status_key(1): RankStatus(1, activity="waiting").pack().encode(),
        status_key(late[-1]): RankStatus(late[-1], exited="its process has exited").pack().encode(),
    }
    if len(late) == 2:
        del values[status_key(late[-1])]
    client, each = MemoryClient(values=values), round_of(ranks=(0, 1, *late))
    rounds_of(client, each, deadline=30.0).run()
    assert each.decision is not None
    assert isinstance(each.decision.error(), MissingRanksError)
    assert client.clock < 5.3
    first, lost, *_ = each.decision.text.splitlines()
    assert first.endswith("did not arrive, and rank 1 was lost after it had arrived."), first
    assert lost == "  rank 1 has sent no heartbeat for at least 5 s; its last status: waiting"


def test_retry_takes_success_of_its_earlier_attempt():
    """The store failed as this rank arrived. The others connected, so it must not arrive at a later attempt."""

    def run(*operations: Operation) -> list[Any]:
        MemoryClient.run(client, *operations)
        raise WorldError("the store did not answer")

    client, each = MemoryClient(), round_of()
    client.run = run  # type: ignore[method-assign]
    with pytest.raises(WorldError):
        rounds_of(client, each).run()
    retry = round_of()
    retry.continue_after(each)
    rounds_of(MemoryClient(values={**client.values, "group/0/decision": MADE.pack().encode()}), retry).run()
    assert (retry.number, retry.decision) == (0, MADE)


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


# -- circles ----------------------------------------------------------------------------------------------------------


def waits(group: str, missing: int) -> PendingConnect:
    return PendingConnect(f"{group}/0", f"group {group}", "mesh 'm'", "0, 1", "train.py:7", (missing,))


def test_circle_text_begins_at_the_lowest_rank():
    pending = {2: [waits("c", 5), waits("d", 0)], 0: [waits("a", 1)], 1: [waits("b", 2)], 5: []}
    circle = find_circle(2, pending)
    assert circle == [(2, waits("d", 0)), (0, waits("a", 1)), (1, waits("b", 2))]
    assert circle_text(circle) == (
        "ranks 0, 1, 2 wait for each other:\n"
        "  rank 0 connects group a of mesh 'm' (ranks 0, 1) at train.py:7, and waits for rank 1\n"
        "  rank 1 connects group b of mesh 'm' (ranks 0, 1) at train.py:7, and waits for rank 2\n"
        "  rank 2 connects group d of mesh 'm' (ranks 0, 1) at train.py:7, and waits for rank 0\n\n"
        "Connect the groups in one call on every rank, as in mesh.connect('dp', 'tp'), or in the same order."
    )


def test_circle_behind_the_first_32_ranks_is_found():
    """Rank 0 waits for 40 ranks, of which the last waits for rank 0."""
    mine, its = waits("a", 1)._replace(missing=tuple(range(1, 41))), waits("b", 0)
    client = MemoryClient(values={status_key(40): RankStatus(40, 1, pending=(its,)).pack().encode()})
    assert search_circle(client.run, Statuses(5.0, lambda: 0.0), 0, [mine]) == [(0, mine), (40, its)]


def test_rank_that_awaits_a_circle_is_outside():
    assert find_circle(3, {3: [waits("d", 0)], 0: [waits("a", 1)], 1: [waits("b", 0)]}) == []


# -- the store of backends --------------------------------------------------------------------------------------------


class DirectThread:
    """A store thread that performs operations in the calling thread."""

    def __init__(self, store: dist.Store, pace: float = 1.0) -> None:
        self.store, self.pace = store, pace
        self.seconds: list[float] = []  # the timeout of each request

    def run(self, *operations: Operation, seconds: float) -> list[Any]:
        self.seconds.append(seconds)
        return [perform(self.store, operation) for operation in operations]

    def set_status(self, activity: str) -> None:
        pass

    def store_hint(self) -> str:
        return ""


def polling(
    store: dist.Store | DirectThread,
    mine: Fingerprint | None = None,
    *,
    ranks: tuple[int, ...] = (4, 6, 9),
    kind: type[PollingStore] = GlooStore,
) -> Any:
    thread: Any = DirectThread(store) if isinstance(store, dist.Store) else store
    return kind(
        lambda: thread,
        lambda seconds: "group",
        mine or fingerprint(),
        ranks,
        timedelta(seconds=0.1),
        refusals=Refusals(lambda: RefusalKeys("group/mismatch", "mesh/mismatch")),
    )


def test_address_is_published_once_its_rank_waits():
    store = dist.HashStore()
    one, two = polling(store, fingerprint(4)), polling(store, fingerprint(6))
    one.set("a/0", b"here")
    assert not store.check(["group/a/0"])
    two.set("a/1", b"there")
    threading.Timer(0.05, lambda: two.get("a/0")).start()
    assert one.get("a/1") == b"there"
    assert two.get("a/0") == b"here"
    assert perform(store, Read("group/a/0")) == fingerprint(4).encoded + SEPARATOR + b"here"


def test_operation_has_what_is_left_of_the_wait():
    """So a store that hangs just before the deadline fails the wait a second after it."""
    thread: Any = DirectThread(dist.HashStore())
    one = polling(thread)
    one.set("a/0", b"here")
    with pytest.raises(MissingRanksError):
        one.get("a/1")
    seconds = thread.seconds
    assert 1.0 == seconds[-1] < seconds[0] <= 1.1
    assert seconds == sorted(seconds, reverse=True)


def test_wait_with_timeout_zero_reads_once():
    member = polling(dist.HashStore(), kind=PollingStore)
    with pytest.raises(MissingRanksError, match="did not reach the first collective in 0 s"):
        member.wait(["id/0"], timedelta(0))


def test_waiting_rank_reads_less_often_in_large_world(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    counts = []
    for pace in (1.0, 8.0):
        member = polling(DirectThread(dist.HashStore(), pace))
        with pytest.raises(MissingRanksError):
            member.wait(["a/1"], timedelta(minutes=10))
        counts.append(member.operations)
    assert counts[0] == pytest.approx(3 * 600 / timing.TIMING.longest_pause, rel=0.01)
    assert counts[1] == pytest.approx(counts[0] / 8, rel=0.01)


def test_reader_of_an_address_checks_its_fingerprint():
    store = dist.HashStore()
    one, two = polling(store, fingerprint(4)), polling(store, fingerprint(6, timeout=31.0))
    one.set("a/0", b"here")
    two.set("a/1", b"there")
    with pytest.raises(MissingRanksError):
        one.get("a/1")  # publishes the one, before the other arrived
    with pytest.raises(MismatchError, match=r"timeout: 30\.0 on rank 4, 31\.0 on rank 6"):
        two.get("a/0")
    assert "31.0 on rank 6" in two.find_refusal(1.0).text
    store.set("group/a/2", fingerprint(9).encoded.decode() + "\0")
    with pytest.raises(MismatchError):
        one.wait(["a/1", "a/2"])


def test_addresses_of_two_network_interfaces_are_known():
    one = polling(dist.HashStore())
    for device in "ab":
        one.set(f"{device}/0", f"own {device}".encode())
        one.values[f"{device}/2"] = f"other {device}".encode()
    assert [*one.own.values()] == [b"own a", b"own b"]
    assert one.known_addresses() == [(9, b"other a"), (9, b"other b")]


def test_missing_first_member_is_named_as_writer():
    member = polling(dist.HashStore(), kind=PollingStore)
    with pytest.raises(MissingRanksError, match=r"rank 4 did not reach the first collective in 0\.1 s"):
        member.get("id/0")
    with pytest.raises(MissingRanksError, match="rank that writes id/1:2 did not reach"):
        member.get("id/1:2")


def test_closed_store_performs_no_operation():
    store = dist.HashStore()
    one = polling(store, kind=PollingStore)
    one.close("the group was released")
    writes = lambda: one.set("a", b"1"), lambda: one.add("a", 1), lambda: one.compare_set("a", "", "1")
    for operation in (*writes, lambda: one.check(["a"]), lambda: one.wait(["a"])):
        with pytest.raises(LifetimeError, match="the group was released"):
            operation()
    assert not store.check(["group/a"])


def test_first_member_writes_at_once():
    store = dist.HashStore()
    first, other = polling(store, kind=PollingStore), polling(store, kind=PollingStore)
    first.set("id/0", b"unique")
    assert other.get("id/0") == b"unique"


@given(st.lists(st.text("Az09+/=,", max_size=12) | st.just("AAAA"), max_size=3))
def test_either_all_addresses_are_used_or_none(encoded):
    store = polling(dist.HashStore(), ranks=(4, 6))
    store.set("gloo/cpu/0", b"here")
    store.set_addresses(encoded)
    try:
        decoded = [[base64.b64decode(each, validate=True) for each in text.split(",")] for text in encoded]
    except ValueError:
        decoded = []
    if [len(values) for values in decoded] == [1, 1] and all(map(all, decoded)):
        assert [store.get("gloo/cpu/0"), store.get("gloo/cpu/1")] == [values[0] for values in decoded]
        assert store.operations == 0
    else:
        assert not store.values
        store.set("gloo/cpu/0", b"here")
        assert store.operations == 0  # its own address is published later, with the first read


def test_abort_counts_after_mismatch():
    published = {"group/mismatch": Decision("mismatch", "options differ").pack().encode()}

    def read(*reads: Read) -> list[Any]:
        return [published.get(each.key) for each in reads]

    refusals = Refusals(lambda: RefusalKeys("group/mismatch", "mesh/mismatch"))
    assert refusals.read(read).kind == "mismatch"
    published["mesh/mismatch"] = Decision("aborted", "mesh 'train' was aborted by rank 1").pack().encode()
    assert refusals.read(read).text == "mesh 'train' was aborted by rank 1"


def test_abort_is_remembered_once_the_store_is_gone(monkeypatch: pytest.MonkeyPatch):
    thread = DirectThread(dist.HashStore())
    thread.store.set("mesh/mismatch", Decision("aborted", "mesh 'train' was aborted by rank 1").pack())
    member = polling(thread)
    with pytest.raises(LifetimeError, match="aborted by rank 1"):
        member.get("a/1")
    monkeypatch.setattr(thread, "run", mock.Mock(side_effect=WorldError("connection refused")))
    assert member.find_refusal(0.5).kind == "aborted"


def test_ended_rank_stays_ended_while_another_thread_reads(monkeypatch: pytest.MonkeyPatch):
    """The other thread, which sends the heartbeats, is about to replace the record."""
    statuses = Statuses(5.0, lambda: 0.0, lambda status, seconds, wait: True)
    run = MemoryClient(values={status_key(1): RankStatus(1, 3, endpoint=("127.0.0.1", 4000)).pack().encode()}).run
    statuses.read(run, [1])
    after, finder = Record.after, threading.Thread(target=statuses.find_ended, args=(run, [1]))

    def after_a_while(*arguments: Any) -> Record:
        monkeypatch.setattr(Record, "after", after)
        record = after(*arguments)
        finder.start()
        finder.join(0.1)
        return record

    monkeypatch.setattr(Record, "after", after_a_while)
    statuses.read(run, [1])
    finder.join()
    assert [*statuses.lost([1])] == [1]


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
