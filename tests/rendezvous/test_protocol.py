"""The connect protocol and the store of backends, in one process that plays all ranks over a store in memory."""

from __future__ import annotations

import base64
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st

from pgmesh import LifetimeError, MismatchError, MissingRanksError, WorldError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Append, CompareSet, Delete, Operation, Read, perform
from pgmesh.rendezvous.polling_store import SEPARATOR, PollingStore
from pgmesh.rendezvous.protocol import check_mesh, register_mesh
from pgmesh.rendezvous.records import Decision, Fingerprint
from pgmesh.rendezvous.statuses import PendingConnect, RankStatus, Statuses, circle_text, find_circle, status_key
from tests.support.memory_client import MADE, MemoryClient, arrival, attempt_of, fingerprint, participant_of

MISSING = Decision("missing", "rank 1 did not arrive").pack().encode()


# -- attempts ---------------------------------------------------------------------------------------------------------


def test_last_member_to_arrive_decides_with_addresses():
    client = MemoryClient(values={"group/0/arrivals": arrival(1, address="B"), "group/0/count": b"1"})
    attempt, ready = attempt_of(), []
    attempt.address = "A"
    participant_of(client, attempt, ready=ready.append).connect()
    assert attempt.decision == MADE
    assert attempt.decision.addresses == ("A", "B")
    assert ready == [attempt]
    assert [type(each).__name__ for each in client.operations] == ["Read", "Append", "Add", "Read", "CompareSet"]
    assert client.pauses == []


def test_decided_attempts_are_logged_and_skipped():
    values = {
        "group/0/decision": MISSING,
        "group/1/decision": MISSING,
        "group/2/arrivals": arrival(1),
        "group/2/count": b"1",
    }
    client, attempt, warnings = MemoryClient(values=values), attempt_of(), []
    participant_of(client, attempt, warn=warnings.append).connect()
    assert (attempt.decision, attempt.number, attempt.arrived_at) == (MADE, 2, [0, 1, 2])
    assert warnings == ["an earlier attempt to connect failed before rank 0 arrived: rank 1 did not arrive"] * 2
    assert client.clock == 0.0


def test_successful_attempt_is_skipped_without_a_warning():
    client, attempt, warnings = MemoryClient(values={"group/0/decision": MADE.pack().encode()}), attempt_of(), []
    participant_of(client, attempt, warn=warnings.append, deadline=0.1).connect()
    assert attempt.number == 1
    assert warnings == [text for text in warnings if "so far" in text]


def test_late_rank_gets_the_mismatch():
    decision = Decision("mismatch", "group tp is not the same on all ranks")
    client, attempt = MemoryClient(values={"group/0/decision": decision.pack().encode()}), attempt_of()
    participant_of(client, attempt).connect()
    assert (attempt.decision, attempt.number) == (decision, 0)
    assert isinstance(decision.error(), MismatchError)


def test_two_processes_of_a_rank_may_retry():
    values = {"group/0/arrivals": arrival(0, process="another"), "group/0/count": b"1"}
    client, attempt = MemoryClient(values=values), attempt_of()
    participant_of(client, attempt).connect()
    assert attempt.decision is not None
    assert attempt.decision.kind == "duplicate"
    assert not attempt.decision.is_permanent
    assert isinstance(attempt.decision.error(), MismatchError)
    assert "both another and process 0 connect as rank 0" in attempt.decision.text


def test_earlier_decision_is_taken_without_skipping():
    client, attempt = MemoryClient(values={"group/0/decision": MISSING}), attempt_of()
    participant_of(client, attempt, skip_decided=False).connect()
    assert (attempt.decision, attempt.number) == (Decision("missing", "rank 1 did not arrive"), 0)


def test_mismatch_of_the_mesh_ends_all_attempts():
    text = "mesh 'actor' is not the same on all ranks"
    client = MemoryClient(
        between=lambda: client.values.update({"m/mismatch": Decision("mismatch", text).pack().encode()})
    )
    attempts = [attempt_of(key=key) for key in ("one", "two")]
    with pytest.raises(MismatchError, match=text):
        participant_of(client, *attempts, mesh_mismatch_key="m/mismatch").connect()
    assert [each.decision.kind for each in attempts if each.decision] == ["mismatch"] * 2


def test_mismatch_published_by_a_backend_ends_attempt():
    decision = Decision("mismatch", "rank 2 has another timeout")
    client, attempt = MemoryClient(values={"group/mismatch": decision.pack().encode()}), attempt_of()
    participant_of(client, attempt).connect()
    assert attempt.decision == decision
    assert client.clock < 0.1


def test_interrupt_is_published_with_its_reason():
    def interrupt() -> None:
        raise KeyboardInterrupt

    client, attempt = MemoryClient(between=interrupt), attempt_of()
    with pytest.raises(KeyboardInterrupt):
        participant_of(client, attempt).connect()
    text = Decision.unpack("", client.values["group/0/decision"]).text
    assert "was cancelled because rank 0 stopped connecting at train.py:0: KeyboardInterrupt" in text


def test_store_error_publishes_no_decision():
    def fail() -> None:
        raise WorldError("the store is gone")

    client, attempt = MemoryClient(between=fail), attempt_of()
    with pytest.raises(WorldError, match="the store is gone"):
        participant_of(client, attempt).connect()
    assert attempt.decision is None
    assert "group/0/decision" not in client.values


def test_uncounted_arrival_of_silent_rank_counts():
    def between() -> None:
        if client.clock > 4.0:
            client.values["group/0/arrivals"] = arrival(0) + arrival(1)

    client, attempt = MemoryClient(values={status_key(1): RankStatus(1).pack().encode()}, between=between), attempt_of()
    participant_of(client, attempt, deadline=30.0).connect()
    assert attempt.decision == MADE
    assert 5.0 <= client.clock < 5.3


def test_deadline_error_states_missing_ranks_and_statuses():
    status = RankStatus(1, activity="saving a checkpoint").pack().encode()
    client, attempt, warnings = MemoryClient(values={status_key(1): status}), attempt_of(ranks=(0, 1, 2)), []
    participant_of(client, attempt, deadline=3.0, warn=warnings.append).connect()
    assert attempt.decision is not None
    assert isinstance(attempt.decision.error(), MissingRanksError)
    assert attempt.decision.text == (
        "group tp of mesh 'actor' (ranks 0, 1, 2): ranks 1, 2 did not arrive in 3 s.\n"
        "  rank 1: saving a checkpoint\n"
        "  rank 2: no status: it has not called connect yet, or cannot reach the store\n\n"
        "Rank 0 waited at train.py:0."
    )
    (warning,) = warnings
    assert "ranks 1, 2 did not arrive in 1 s so far." in warning
    assert 3.0 <= client.clock < 3.3


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
    client, attempt = MemoryClient(values=values), attempt_of(ranks=(0, 1, *late))
    participant_of(client, attempt, deadline=30.0).connect()
    assert attempt.decision is not None
    assert isinstance(attempt.decision.error(), MissingRanksError)
    assert client.clock < 5.3
    first, lost, *_ = attempt.decision.text.splitlines()
    assert first.endswith("did not arrive, and rank 1 was lost after it had arrived."), first
    assert lost == "  rank 1 has sent no heartbeat for at least 5 s; its last status: waiting"


def test_member_that_waits_is_not_taken_for_lost():
    def beat() -> None:
        client.values[status_key(1)] = RankStatus(1, int(client.clock)).pack().encode()

    client, attempt = MemoryClient(values={"group/0/arrivals": arrival(1)}, between=beat), attempt_of(ranks=(0, 1, 2))
    participant_of(client, attempt, deadline=20.0).connect()
    assert attempt.decision is not None
    assert "rank 2 did not arrive in 20 s.\n" in attempt.decision.text


def asked_by(rank: int, size: int, missing: int) -> set[int]:
    """The ranks whose listeners a rank asks while one member is missing. They all seem to have ended."""
    asked = set[int]()

    def has_ended(status: RankStatus, seconds: float) -> bool:
        asked.add(status.rank)
        return True

    others = [each for each in range(size) if each not in (rank, missing)]
    values = {status_key(each): RankStatus(each, 1, endpoint=("host", each)).pack().encode() for each in range(size)}
    values["group/0/arrivals"] = b"".join(map(arrival, others))
    client, attempt = MemoryClient(rank, values), attempt_of(rank, ranks=tuple(range(size)))
    participant = participant_of(client, attempt, rank=rank, statuses=Statuses(5.0, client.now, has_ended))
    participant.connect()
    assert attempt.decision is not None
    ended = f"rank {missing} has ended: its listener at host:{missing} refuses connections"
    assert (ended in attempt.decision.text) == bool(asked)
    assert client.clock < 0.5 or not asked
    return asked


def test_ended_member_is_named_before_any_silence():
    assert asked_by(0, 3, missing=2) == {1, 2}


def test_eight_members_ask_for_all_others():
    size, missing = 3 * timing.LIMITS.asking, 4
    assert [rank for rank in range(size) if rank != missing and missing in asked_by(rank, size, missing)] == [
        rank for rank in range(timing.LIMITS.asking + 1) if rank != missing
    ]


def test_last_member_deletes_keys_of_the_attempt():
    client, run = MemoryClient(), dist.HashStore()

    def leave(*operations: Operation) -> list[Any]:
        return [perform(run, operation) for operation in operations]

    members = [attempt_of(rank) for rank in range(2)]
    for rank, attempt in enumerate(members):
        leave(Append("group/0/arrivals", arrival(rank).decode()), CompareSet("group/0/decision", "made"))
        run.add("group/0/count", 1)
        attempt.arrived_at = [0]
    members[0].leave(leave)
    assert leave(Read("group/0/decision")) == [b"made"]
    members[1].leave(leave)
    assert leave(*(Read(f"group/0/{key}") for key in ("arrivals", "count", "decision", "left"))) == [None] * 4
    assert client.operations == []


@pytest.mark.parametrize(
    ("arrives_after", "first_pause", "inspects_after"), [(0.001, 0.002, 0.025), (0.1, 0.025, 0.1), (5.0, 0.05, 0.3)]
)
def test_slow_store_delays_reads_and_inspections(arrives_after, first_pause, inspects_after):
    inspections = []

    def note() -> None:
        if Read("group/mismatch") in client.operations:
            inspections.append(client.clock)

    client, attempt = MemoryClient(between=note), attempt_of()
    client.clock = arrives_after
    participant_of(client, attempt, deadline=20.0).connect()
    assert client.pauses[0] == pytest.approx(first_pause)
    assert inspects_after <= inspections[0] - arrives_after < inspects_after + 0.12


def test_retry_takes_success_of_its_earlier_attempt():
    """The store failed after this rank had arrived. The others connected, so it must not arrive at a later attempt."""
    values = {"group/0/decision": MADE.pack().encode(), "group/0/arrivals": arrival(0) + arrival(1)}
    attempt = attempt_of()
    attempt.sent_to.add(0)
    participant_of(MemoryClient(values=values), attempt).connect()
    assert (attempt.number, attempt.decision) == (0, MADE)


def test_unanswered_arrival_is_recorded_as_sent():
    class Late(MemoryClient):
        """A store that performs a batch, and whose answer is lost."""

        def run(self, *operations: Operation) -> list[Any]:
            super().run(*operations)
            raise WorldError("the store did not answer")

    client, attempt = Late(), attempt_of()
    with pytest.raises(WorldError):
        participant_of(client, attempt).connect()
    assert attempt.sent_to == {0}
    assert attempt.arrived_at == []


def test_double_arrival_leaves_the_attempt_twice():
    client = MemoryClient(values={"group/0/count": b"2"})
    attempt = attempt_of()
    attempt.arrived_at += [0, 0]
    left: list[Operation] = []
    attempt.leave(
        lambda *steps: [left.append(step) if isinstance(step, Delete) else client.run(step)[0] for step in steps]
    )
    assert len(left) == 1


def test_unread_status_is_not_called_absent():
    statuses = Statuses(5.0, lambda: 0.0)
    statuses.read(MemoryClient().run, [1])
    assert "rank 1: no status" in statuses.describe(1)
    assert statuses.describe(2) == "rank 2: its status was not read"


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


# -- circles ----------------------------------------------------------------------------------------------------------


def waits(group: str, missing: int, mesh: str = "mesh 'm'", name: str = "") -> PendingConnect:
    return PendingConnect(name or f"{group}/0", f"group {group}", mesh, "0, 1", "train.py:7", (missing,))


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


def test_rank_that_awaits_a_circle_is_outside():
    assert find_circle(3, {3: [waits("d", 0)], 0: [waits("a", 1)], 1: [waits("b", 0)]}) == []


def test_circle_text_shows_different_mesh_names():
    text = circle_text([(0, waits("tp", 1, "mesh 'a'", "a/0")), (1, waits("tp", 0, "mesh 'b'", "b/0"))])
    assert text.endswith(
        "These are different meshes: mesh 'a' on rank 0, mesh 'b' on rank 1. "
        "Create the mesh with the same name on every rank."
    )


def test_circle_text_explains_different_numbers_of_releases():
    text = circle_text([(0, waits("tp", 1, name="g/0")), (1, waits("tp", 0, name="g~1/0"))])
    assert text.endswith(
        "These are different groups with the same label: the ranks have created, closed or released them a different "
        "number of times. Create and close the same meshes in the same order on every rank."
    )


def test_circle_is_published_for_all_its_groups():
    """The decision of the first rank is published last, so that no rank arrives at an attempt that is about to fail."""
    status = RankStatus(1, pending=(waits("b", 2),)).pack().encode()
    other = RankStatus(2, pending=(waits("c", 0),)).pack().encode()
    client = MemoryClient(values={status_key(1): status, status_key(2): other})
    attempt = attempt_of(key="a", ranks=(0, 1))
    participant_of(client, attempt, deadline=3.0).connect()
    decided = [each.key for each in client.operations if isinstance(each, CompareSet)]
    assert decided == ["a/0/decision", "b/0/decision", "c/0/decision", "a/0/decision"]
    assert {Decision.unpack("", client.values[key]).kind for key in decided} == {"circle"}


# -- the store of backends --------------------------------------------------------------------------------------------


def run(store: dist.Store, *operations: Operation, seconds: float = 0.0) -> list[Any]:
    """Perform operations in the calling thread."""
    return [perform(store, operation) for operation in operations]


class DirectThread:
    """A store thread that performs operations in the calling thread."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.timeouts = store, list[float]()

    def run(self, *operations: Operation, seconds: float) -> list[Any]:
        self.timeouts.append(seconds)
        return run(self.store, *operations)

    def set_status(self, activity: str) -> None:
        pass

    def store_hint(self) -> str:
        return ""


def polling(
    store: dist.Store,
    mine: Fingerprint | None = None,
    *,
    ranks=(4, 6, 9),
    seconds=0.1,
    addresses=True,
    key_prefix=lambda: "group",
    **more: Any,
) -> PollingStore:
    thread: Any = DirectThread(store)
    return PollingStore(
        lambda: thread,
        key_prefix,
        mine or fingerprint(),
        ranks,
        timedelta(seconds=seconds),
        refusal_keys=lambda: ("group/mismatch", "mesh/mismatch"),
        addresses=addresses,
        **more,
    )


def test_later_ranks_compare_with_first_fingerprint():
    store = dist.HashStore()
    for rank in range(2):
        *_, first = run(store, *register_mesh("key", fingerprint(rank)))
        check_mesh(lambda *operations: run(store, *operations), "key", fingerprint(rank), first)
    odd = fingerprint(2, shape=[2], timeout=31.0, backend="gloo")
    *_, first = run(store, *register_mesh("key", odd))
    with pytest.raises(MismatchError) as caught:
        check_mesh(lambda *operations: run(store, *operations), "key", odd, first)
    assert str(caught.value) == (
        "group tp of mesh 'actor' is not the same on all ranks:\n"
        "  backend: none on ranks 0, 1, gloo on rank 2\n"
        "  timeout: 30.0 on ranks 0, 1, 31.0 on rank 2\n\n"
        "Fix it."
    )
    assert Decision.unpack("", run(store, Read("key/mismatch"))[0]).text == str(caught.value)


@pytest.mark.parametrize("foreign_value", [b"foreign", b"3 [1, 2]", b"\xff\xfe {}", b"7 {", b'0 "text"'])
def test_foreign_value_is_reported(foreign_value):
    assert "which pgmesh did not write" in (fingerprint().mismatch([foreign_value]) or "")


def test_address_is_published_once_its_rank_waits():
    store = dist.HashStore()
    one, two = polling(store, fingerprint(4)), polling(store, fingerprint(6))
    one.set("a/0", b"here")
    assert not store.check(["group/a/0"])
    two.set("a/1", b"there")
    threading.Timer(0.05, lambda: two.get("a/0")).start()
    assert one.get("a/1") == b"there"
    assert two.get("a/0") == b"here"
    assert run(store, Read("group/a/0"))[0] == fingerprint(4).encoded + SEPARATOR + b"here"


def test_reader_of_an_address_checks_its_fingerprint():
    store = dist.HashStore()
    one, two = polling(store, fingerprint(4)), polling(store, fingerprint(6, timeout=31.0))
    one.set("a/0", b"here")
    two.set("a/1", b"there")
    with pytest.raises(MissingRanksError):
        one.get("a/1")  # publishes the one, before the other arrived
    with pytest.raises(MismatchError, match=r"timeout: 30\.0 on rank 4, 31\.0 on rank 6"):
        two.get("a/0")
    assert two.refusal is not None
    assert "31.0 on rank 6" in two.refusal.text
    store.set("group/a/2", fingerprint(9).encoded.decode() + "\0")
    with pytest.raises(MismatchError):
        one.wait(["a/1", "a/2"])


def test_waiting_rank_looks_for_first_members_only():
    """The store thread asks, so the prefix of the keys, which it would ask itself for, must be known by then."""
    asked = []
    one = polling(dist.HashStore(), ranks=range(100), key_prefix=lambda: asked.append("for the prefix") or "group")
    one.set("a/0", b"here")
    assert one.unseen_addresses() == {}
    assert asked == []
    with pytest.raises(MissingRanksError):
        one.wait(["a/1"], timedelta(seconds=0.01))
    assert [*one.unseen_addresses()] == [*range(1, 32)]


def test_changed_timeout_bounds_store_operations():
    one = polling(dist.HashStore(), seconds=1800.0)
    one.new_timeout = timedelta(seconds=0.05)
    one.set("a/0", b"here")
    with pytest.raises(MissingRanksError):
        one.wait(["a/1"])
    assert max(one._thread().timeouts) <= 0.05 + timing.TIMING.report_missing


def test_addresses_of_two_network_interfaces_are_known():
    one = polling(dist.HashStore())
    for device in "ab":
        one.set(f"{device}/0", f"own {device}".encode())
        one.values[f"{device}/2"] = f"other {device}".encode()
    assert one.own_addresses() == [b"own a", b"own b"]
    assert one.member_addresses() == [(9, b"other a"), (9, b"other b")]


def test_missing_members_are_named_by_world_rank():
    store = dist.HashStore()
    one = polling(store)
    one.set("a/0", b"here")
    with pytest.raises(MissingRanksError) as caught:
        one.wait(["a/1"], timedelta(seconds=0.05))
    assert str(caught.value) == (
        "group tp of mesh 'actor': ranks 6, 9 did not reach the first collective in 0.05 s. "
        "The group's ranks are 4, 6, 9."
    )


def test_missing_first_member_is_named_as_writer():
    member = polling(dist.HashStore(), addresses=False)
    with pytest.raises(MissingRanksError, match=r"rank 4 did not reach the first collective in 0\.1 s"):
        member.get("id/0")
    with pytest.raises(MissingRanksError, match="rank that writes id/1:2 did not reach"):
        member.get("id/1:2")


def test_first_member_writes_at_once():
    store = dist.HashStore()
    first, other = polling(store, addresses=False), polling(store, addresses=False)
    first.set("id/0", b"unique")
    assert other.get("id/0") == b"unique"


def test_close_ends_a_wait():
    store = polling(dist.HashStore(), seconds=60)
    threading.Timer(0.05, store.close, ["was released on this rank while it waited"]).start()
    start = time.monotonic()
    with pytest.raises(LifetimeError, match="was released on this rank while it waited"):
        store.get("a/1")
    assert time.monotonic() - start < 30


def test_written_keys_are_recorded_for_deletion():
    store = dist.HashStore()
    one = polling(store)
    one.set("a/0", b"here")
    assert one.written == set()
    with pytest.raises(MissingRanksError):
        one.get("a/1")
    assert one.written == {"group/a/0"}


def test_closed_store_writes_nothing():
    store = dist.HashStore()
    one = polling(store)
    one.set("a/0", b"here")
    one.close("was released")
    with pytest.raises(LifetimeError):
        one.wait(["a/1"])
    assert not store.check(["group/a/0"])


def test_value_with_another_fingerprint_is_never_returned():
    store = dist.HashStore()
    store.set("group/a/1", (fingerprint(6, timeout=31.0).encoded + SEPARATOR + b"there").decode())
    one = polling(store)
    for _ in range(2):
        with pytest.raises(MismatchError):
            one.get("a/1")


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
        assert store._address_unpublished
        assert not store.values
