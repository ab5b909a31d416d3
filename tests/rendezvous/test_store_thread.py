"""The store thread: it performs batches, goes on after a late answer, and opens a broken connection again."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from pgmesh import WorldError, launch
from pgmesh.rendezvous import processes, timing
from pgmesh.rendezvous.batches import Batch
from pgmesh.rendezvous.client import CallClient
from pgmesh.rendezvous.group_rounds import GroupRound
from pgmesh.rendezvous.operations import (
    Add,
    Append,
    CompareSet,
    Delete,
    Raw,
    Read,
    Replace,
    Run,
    perform,
)
from pgmesh.rendezvous.processes import Claim, claim_rank, process_key, process_label
from pgmesh.rendezvous.records import Decision
from pgmesh.rendezvous.rounds import Rounds
from pgmesh.rendezvous.statuses import LEFT_WORLD, PendingConnect, RankStatus, Statuses, status_key
from pgmesh.rendezvous.store_thread import StoreThread
from pgmesh.rendezvous.world_name import Entry, leave_world, name_on
from pgmesh.rendezvous.world_store import WorldStore
from tests.support.board import CountedStore, Fault, FaultyBoard, faults, raises, slow_store
from tests.support.faults import wait_until
from tests.support.memory_client import enter_world, round_of, rounds_of
from tests.support.proxy import Proxy

LONG = 20.0


def status_of(store: dist.Store, rank: int = 0) -> RankStatus | None:
    """The status of a rank, read from the store itself."""
    prefixed = dist.PrefixStore(f"pgmesh.{name_on(store)}", store)
    return RankStatus.unpack(rank, perform(prefixed, Read(status_key(rank))))


# -- batches ----------------------------------------------------------------------------------------------------------


def test_batch_returns_the_answers_in_order(store_thread: StoreThread):
    sets = Read("key"), CompareSet("key", "a"), CompareSet("key", "b")
    assert store_thread.run(*sets, seconds=LONG) == [None, b"a", b"a"]
    assert store_thread.run(Add("count"), Add("count"), Read("count"), seconds=LONG) == [1, 2, b"2"]
    assert store_thread.run(Append("list", "a"), Append("list", "b"), Read("list"), seconds=LONG)[2] == b"ab"
    assert store_thread.run(Delete(("key", "no key")), Read("key"), seconds=LONG) == [[True, False], None]


def test_stop_waits_for_a_busy_thread(store_thread: StoreThread):
    busy = threading.Event()

    def be_busy(perform: Any) -> Any:
        busy.set()
        time.sleep(1.0)
        return ()

    store_thread.heartbeat.look = be_busy
    store_thread.start_heartbeat()
    assert busy.wait(LONG)
    store_thread.stop()
    assert not store_thread._thread.is_alive()


def closed_port(host: str) -> tuple[str, int]:
    with socket.create_server((host, 0)) as server:
        return host, server.getsockname()[1]


def test_process_of_a_closed_listener_has_ended(store_thread: StoreThread):
    """On another host, a heartbeat must be missing too."""
    listeners, period = store_thread.store.listeners, store_thread.store.period
    listeners.open("127.0.0.1")
    here, there = (RankStatus(1, endpoint=closed_port(host)) for host in ("127.0.0.1", "127.0.0.2"))
    assert listeners.has_ended(here, 0.0)
    assert [listeners.has_ended(there, seconds) for seconds in (period, 2 * period)] == [False, True]
    assert not listeners.has_ended(RankStatus(1), LONG)


def test_timeout_skips_the_rest_of_a_batch(store_thread: StoreThread):
    answered = threading.Event()
    with faults(Fault(Add("slow"), before=lambda: answered.wait(LONG))):
        with pytest.raises(WorldError, match=r"the store at nowhere did not answer for 0\.1 s"):
            store_thread.run(Add("slow"), Add("after"), seconds=0.1)
        answered.set()
        assert store_thread.run(Read("slow"), Read("after"), seconds=LONG) == [b"1", None]


def test_world_entered_after_the_stop_is_left():
    """The thread takes a heartbeat that was due before it learns that the process leaves."""
    entered = set[str]()
    store = WorldStore(dist.HashStore(), "here", 0, 2, entered)
    store.server.leaving = True
    store.open()
    store.leave()
    assert len(entered) == 1


def test_half_entered_world_is_entered_again():
    """The store failed after it gave the world's name. The process's own key is missing, but the store is the same."""
    thread = StoreThread(WorldStore(dist.HashStore(), "here", 0, 2, set()))
    label = CompareSet(process_key(0), process_label())
    with faults(Fault(label, before=raises(RuntimeError("the connection was reset")), times=1)):
        assert thread.run(Read("key"), seconds=LONG) == [None]
    assert thread.run(Read(process_key(0)), seconds=LONG) == [process_label().encode()]
    thread.stop()


def failing(store: dist.Store, *numbers: int) -> CountedStore:
    """A store whose nth operations fail before they are performed."""
    return CountedStore(store, numbers, raises(RuntimeError("the connection was reset")))


@pytest.mark.parametrize("numbers", [(1,), (2,), (3,), (3, 4, 5)])
def test_failed_entry_counts_its_process_once(numbers: tuple[int, ...]):
    """It sets the name, counts itself, and reads the name again. Counted twice, it would leave the name behind."""
    store = dist.HashStore()
    unreliable, entry = failing(store, *numbers), Entry(set())
    for _ in numbers:
        with pytest.raises(RuntimeError):
            entry.enter(unreliable)
    assert leave_world(store, entry.enter(unreliable))
    assert store.num_keys() == 0


def test_failed_entry_is_uncounted_in_ended_world():
    store = dist.HashStore()
    entry, first = Entry(set()), enter_world(store, set())
    with pytest.raises(RuntimeError):
        entry.enter(failing(store, 3))
    second = enter_world(store, {first})
    assert entry.enter(store) == second
    assert leave_world(store, first)
    assert not leave_world(store, second)
    assert leave_world(store, second)
    assert store.num_keys() == 0


def test_batch_done_before_the_end_is_answered(store_thread: StoreThread, monkeypatch: pytest.MonkeyPatch):
    """The caller begins to wait after the thread has ended."""
    put = store_thread._queue.put

    def put_and_stop(batch: Batch | None) -> None:
        put(batch)
        if batch is not None:
            store_thread.stop()

    monkeypatch.setattr(store_thread._queue, "put", put_and_stop)
    assert store_thread.run(CompareSet("key", "value"), seconds=LONG) == [b"value"]


def test_failed_task_is_repeated_before_the_next_heartbeat(store_thread: StoreThread):
    """Another thread holds a lock at the first attempt. No heartbeat is due."""
    attempts = itertools.count(1)

    def task(run: Run) -> str:
        if next(attempts) == 1:
            raise WorldError("no answer for 0 s")
        return "done"

    assert store_thread.insist(task, seconds=LONG) == "done"


def test_task_is_performed_before_the_thread_ends():
    store = dist.HashStore()
    enter_world(store, set())  # another rank, so that the keys are not deleted at the end
    thread = StoreThread(WorldStore(store, "here", 0, 2, set()))
    thread.run(Read("key"), seconds=LONG)
    name = name_on(store)
    thread.insist(lambda run: str(run(CompareSet("key", "value"))), seconds=0.0)
    thread.stop()
    assert perform(dist.PrefixStore(f"pgmesh.{name}", store), Read("key")) == b"value"
    with pytest.raises(WorldError, match="this process has left the world"):
        thread.run(Read("key"), seconds=LONG)


def test_failing_task_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "TIMING", timing.TIMING._replace(insist=0.2))
    thread = StoreThread(WorldStore(dist.HashStore(), "here", 0, 2, set()))
    attempts = itertools.count(1)

    def task(run: Run) -> str:
        next(attempts)
        raise WorldError("connection refused")

    there = weakref.ref(task)
    assert thread.insist(task, seconds=0.0) is None
    del task
    wait_until(lambda: there() is None, "the end of the task")
    assert next(attempts) > 2
    thread.stop()


def test_ended_world_deletes_its_keys_one_by_one():
    """Each is an answer of the store. ``stop`` waits half a second for an answer."""
    store = dist.HashStore()
    thread = StoreThread(WorldStore(store, "here", 0, 3, set()))
    thread.run(*[CompareSet(f"key {number}", "value") for number in range(9)], seconds=LONG)
    with faults() as board:
        thread.stop()
    assert {len(each.keys) for each in board.performed if isinstance(each, Delete)} == {1}
    assert store.num_keys() == (0 if hasattr(store, "list_keys") else 9)


# -- heartbeats -------------------------------------------------------------------------------------------------------


def test_long_batch_does_not_delay_a_heartbeat():
    thread = StoreThread(WorldStore(dist.HashStore(), "here", 0, 2, set()))
    thread.store.period = 0.05
    thread.start_heartbeat()
    thread.run(Add("started"), seconds=LONG)
    with slow_store(0.005):
        start = time.monotonic()
        heartbeats = thread.run(*[Read(status_key(0))] * 200, seconds=LONG)
        seconds = time.monotonic() - start
    thread.stop()
    assert 5 < len(set(heartbeats)) <= seconds / 0.05 + 2


def test_pending_groups_are_published_for_each_thread():
    store = dist.HashStore()
    enter_world(store, set())  # another rank, so that the keys are not deleted at the end
    thread = StoreThread(WorldStore(store, "here", 0, 2, set()))
    thread.store.period = LONG
    waits = [PendingConnect(f"g/{i}", "group tp", "mesh 'm'", "0, 1", "train.py:7", (1,)) for i in range(2)]
    thread.set_pending((waits[0],))
    other = threading.Thread(target=thread.set_pending, args=((waits[1],),))
    other.start()
    other.join()
    wait_until(lambda: (status := status_of(store)) is not None and sorted(status.pending) == waits, "both groups")
    thread.set_pending(())
    wait_until(
        lambda: (status := status_of(store)) is not None and status.pending == (waits[1],), "the second group alone"
    )
    thread.stop("the test is over")
    status = status_of(store)
    assert status is not None
    assert status.exited == "the test is over"


# -- connections ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def store_behind_proxy() -> Iterator[tuple[launch.StoreProcess, Proxy, StoreThread]]:
    """A store, a proxy in front of it, and a store thread that connects through the proxy."""
    with launch.StoreProcess() as store:
        proxy = Proxy(store.port)
        client = dist.TCPStore("127.0.0.1", proxy.port, is_master=False, timeout=timedelta(seconds=LONG))
        thread = StoreThread(WorldStore(client, "the proxy", 0, 2, set()))
        thread.start_heartbeat()
        thread.run(CompareSet("key", "value"), seconds=LONG)
        try:
            yield store, proxy, thread
        finally:
            thread.stop()
            proxy.close()


def test_wait_inside_torch_delays_no_later_operation():
    with launch.StoreProcess() as store:
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=LONG))
        thread = StoreThread(WorldStore(client, "the store", 0, 2, set()))
        thread.run(CompareSet("key", "value"), seconds=LONG)

        waiting = threading.Thread(target=client.wait, args=(["a key"], timedelta(seconds=LONG)))
        waiting.start()
        time.sleep(0.1)
        assert thread.store_hint() == ""  # the name of the world can be read through torch's client alone
        assert thread.run(Read("key"), seconds=LONG) == [b"value"]
        assert waiting.is_alive()
        dist.TCPStore("127.0.0.1", store.port, is_master=False).set("a key", "")
        waiting.join()
        thread.stop()


def test_unrepeatable_operation_fails_once_after_a_cut():
    with store_behind_proxy() as (_, proxy, thread):
        proxy.cut()
        with pytest.raises(WorldError, match="the store at the proxy failed"):
            thread.run(Raw("add", ("backend", 1)), seconds=LONG)
        assert thread.run(Read("key"), seconds=LONG) == [b"value"]


def test_new_store_at_same_address_is_an_error():
    with store_behind_proxy() as (_, proxy, thread), launch.StoreProcess() as new:
        proxy.target = new.port
        proxy.cut()
        for _ in range(2):
            with pytest.raises(WorldError, match="another store answers there now, without the keys of this world"):
                thread.run(Read("key"), seconds=LONG)


def test_lost_store_fails_at_once_and_may_return():
    with store_behind_proxy() as (_, proxy, thread):
        proxy.close()
        start = time.monotonic()
        with pytest.raises(WorldError, match=r"the store at the proxy failed: .*refused"):
            thread.run(Read("key"), seconds=LONG)
        assert time.monotonic() - start < timing.TIMING.late_answer
        proxy.listen()
        assert thread.run(Read("key"), seconds=LONG) == [b"value"]


def test_store_that_ends_during_connection_fails_at_once():
    with store_behind_proxy() as (_, proxy, thread):
        proxy.end()
        start = time.monotonic()
        for _ in range(2):  # torch's client still tries
            with pytest.raises(WorldError, match="the store at the proxy failed: connection refused"):
                thread.run(Read("key"), seconds=LONG)
        assert time.monotonic() - start < 2.0 < timing.TIMING.late_answer
        proxy.ends = False
        proxy.listen()  # or the thread would still try at the end of a process, which aborts
        assert thread.run(Read("key"), seconds=LONG) == [b"value"]


def test_missing_listener_is_no_failure_of_the_store(monkeypatch: pytest.MonkeyPatch):
    with launch.StoreProcess() as store:
        thread = StoreThread(WorldStore(dist.TCPStore("127.0.0.1", store.port, is_master=False), "here", 0, 2, set()))
        with monkeypatch.context() as full:
            full.setattr(socket, "create_server", raises(OSError(24, "Too many open files")))
            with pytest.raises(WorldError, match=r"^this process cannot listen at 127\.0\.0\.1: .*Too many open files"):
                thread.run(Read("key"), seconds=LONG)
        assert thread.run(Read("key"), seconds=LONG) == [None]
        thread.stop()


def test_store_error_without_text_is_named(store_thread: StoreThread):
    unnamed = Fault(Add("count"), before=raises(RuntimeError("")))
    with faults(unnamed), pytest.raises(WorldError, match=r"nowhere failed: RuntimeError\. Connected"):
        store_thread.run(Add("count"), seconds=LONG)


def test_error_at_one_heartbeat_stops_no_later_look(store_thread: StoreThread):
    looks: list[int] = []

    def look(perform: Any) -> tuple[()]:
        looks.append(len(looks))
        if len(looks) == 1:
            raise KeyError("a race")
        return ()

    store_thread.heartbeat.look = look
    for number in (1, 2):
        store_thread.set_status(f"step {number}")
        wait_until(lambda number=number: len(looks) >= number, f"look {number}")


def test_slow_look_follows_heartbeat_and_delays_no_batch():
    store = dist.HashStore()
    thread = StoreThread(WorldStore(store, "here", 0, 2, set()))
    thread.store.period = 0.05
    looks: list[int] = []  # the heartbeat in the store at each look

    def look(perform: Any) -> tuple[()]:
        status = status_of(store)
        looks.append(status.heartbeat if status else 0)
        time.sleep(0.1)
        return ()

    thread.heartbeat.look = look
    try:
        thread.start_heartbeat()
        with slow_store(0.005):
            thread.run(*[Read("key")] * 40, seconds=LONG)
        assert looks == [*range(1, len(looks) + 1)]
        assert len(looks) < 15, "a look between each two operations"
    finally:
        thread.stop()


# ---- a process claims its rank ----


def test_one_of_two_new_processes_has_the_rank(monkeypatch: pytest.MonkeyPatch):
    """The second one comes while the first one waits for the process before them."""
    store, second, beats = dist.HashStore(), list[Claim](), itertools.count(1)
    store.set(process_key(0), "old")

    def claim(me: str, meanwhile: Callable[[], object]) -> Claim:
        def run(*operations: Any) -> list[Any]:
            answers = [perform(store, operation) for operation in operations]
            meanwhile()
            return answers

        monkeypatch.setattr(processes, "process_label", lambda: me)
        made = Claim()
        claim_rank(run, 0, 1, Statuses(0.5, time.monotonic), made)
        return made

    def second_claims() -> None:
        if not second:
            second.append(claim("second", lambda: None))
        store.set(status_key(0), RankStatus(0, next(beats)).pack())  # of the second one

    assert claim("first", second_claims) == Claim(same_rank="second")
    assert second == [Claim(replaces_process=True)]
    assert store.get(process_key(0)) == b"second"


@pytest.mark.parametrize(
    ("exited", "expected"),
    [("its process has exited", Claim(same_rank="old")), (LEFT_WORLD, Claim(replaces_process=True))],
)
def test_claim_after_another_rank_left(exited: str, expected: Claim):
    """The earlier process of rank 0 sends heartbeats. If rank 1 has left the world, the store serves another one."""
    store, beats, claim = dist.HashStore(), itertools.count(1), Claim()
    store.set(process_key(0), "old")
    store.set(status_key(1), RankStatus(1, 9, exited=exited).pack())

    def run(*operations: Any) -> list[Any]:
        store.set(status_key(0), RankStatus(0, next(beats)).pack())
        return [perform(store, operation) for operation in operations]

    claim_rank(run, 0, 2, Statuses(0.5, time.monotonic), claim)
    assert claim == expected


def test_changed_host_name_is_same_process(monkeypatch: pytest.MonkeyPatch):
    before = process_label()
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed-by-dhcp")
    assert process_label() == before


@pytest.mark.parametrize("lost", [1, 2])
def test_claim_with_lost_answers_shows_the_predecessor(lost: int):
    """After the second, the operation fails. The next one finds this process's own label in the store."""
    store = dist.HashStore()
    prefixed = dist.PrefixStore(f"pgmesh.{enter_world(store, set())}", store)
    prefixed.set(process_key(0), "process 1 on another host/x")
    mine = WorldStore(store, "here", 0, 2, set())
    mine.period = 0.05
    replacing = Replace(process_key(0), b"process 1 on another host/x", process_label().encode())
    claiming, reset = CompareSet(process_key(0), process_label()), raises(RuntimeError("the connection was reset"))
    with faults(Fault(replacing, after=reset, times=1), Fault(claiming, after=reset, skip=1, times=lost - 1)):
        with contextlib.nullcontext() if lost == 1 else pytest.raises(WorldError, match="the connection was reset"):
            mine.perform(Read("key"))
        mine.perform(Read("key"))
    assert mine.claim.replaces_process


def test_claim_uses_up_no_repeat_of_the_operation():
    claim, reset = CompareSet(process_key(0), process_label()), raises(RuntimeError("the connection was reset"))
    read, add = Read("key"), Raw("add", ("count", 1))
    for operation, answer in ((read, None), (add, 1)):
        lost = Fault(claim, after=reset, times=1), Fault(read, before=reset, times=1)
        with faults(*lost):
            assert WorldStore(dist.HashStore(), "here", 0, 2, set()).perform(operation) == answer


# ---- a call of connect and the store thread: errors and signals end the wait on both sides ----


def rounds(client: CallClient, members: int) -> Rounds[GroupRound, Decision]:
    """Rank 0 of a group, before its call."""
    more: dict[str, Any] = {"deadline": client.deadline - client.start, "statuses": Statuses(LONG, client.now)}
    return rounds_of(client, round_of(ranks=tuple(range(members))), **more)


def stopped_store(stopped: threading.Event) -> contextlib.AbstractContextManager[FaultyBoard]:
    """A store that answers nothing until an event."""
    return faults(Fault(before=lambda: stopped.wait(LONG)))


def test_watching_earlier_process_is_no_store_silence():
    """A new process watches the heartbeats of the one that had its rank for two periods, in its first operation."""
    store = dist.HashStore()
    prefixed = dist.PrefixStore(f"pgmesh.{enter_world(store, set())}", store)
    prefixed.set(process_key(0), "process 1 on another host/x")
    prefixed.set(status_key(0), RankStatus(0, 7).pack())
    thread = StoreThread(WorldStore(store, "nowhere", 0, 2, set()))
    try:
        assert thread.run(Read("key"), seconds=0.7 * thread.store.period) == [None]
        assert thread.store.claim.replaces_process
    finally:
        thread.stop()


def test_wait_behind_slow_batch_is_no_store_silence(store_thread: StoreThread):
    """The store answers another thread for 2 s, four times the timeout of this one."""
    begun = threading.Event()
    batch = threading.Thread(target=lambda: store_thread.run(*[Add("count")] * 40, seconds=LONG))
    with faults(Fault(Add("count"), before=lambda: time.sleep(0.05), after=begun.set)):
        batch.start()
        assert begun.wait(LONG)
        assert store_thread.run(Read("count"), seconds=0.5) == [b"40"]
    batch.join()


def test_clock_of_silence_counts_each_answer(monkeypatch: pytest.MonkeyPatch):
    """A heartbeat that takes long, with answers of the store meanwhile, is no pause of the store."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = WorldStore(dist.HashStore(), "here", 0, 2, set())
    store.perform(Read("key"))
    for pause in (0.9, 0.9, 0.9, 30.0):  # three slow looks within few heartbeats, and a pause
        now += pause * store.period
        store.perform(Read("key"))
    assert store.clock.answered_seconds() == pytest.approx(3.7 * store.period)


def test_second_interrupt_is_raised_at_once(store_thread: StoreThread):
    client = CallClient(store_thread, LONG)
    start = time.monotonic()
    with faults(Fault(before=raises(KeyboardInterrupt()), in_caller=True)), pytest.raises(KeyboardInterrupt):
        rounds(client, 2).run()
    assert client.ending
    assert time.monotonic() - start < LONG / 2


def test_interrupt_waits_briefly_for_a_stopped_store(store_thread: StoreThread):
    client, stopped = CallClient(store_thread, LONG), threading.Event()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        start = time.monotonic()
        with stopped_store(stopped), pytest.raises(KeyboardInterrupt):
            rounds(client, 2).run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stopped.set()
    assert time.monotonic() - start < LONG / 2
    assert client.timeout() == timing.TIMING.interrupted_answer


def test_slow_store_is_not_reported_as_silent(store_thread: StoreThread):
    """Forty ranks are missing, and each of their statuses takes 30 ms: longer than the time for one answer."""
    client = CallClient(store_thread, 1.0)
    waiting = rounds(client, 40)
    with slow_store(0.03):
        waiting.run()
    decision = waiting.rounds[0].decision
    assert decision is not None
    assert decision.kind == "missing"
    assert "ranks 1, 2, 3" in decision.text
