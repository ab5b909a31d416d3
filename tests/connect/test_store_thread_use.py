"""``connect`` and the store thread: operations run on the thread, and errors and signals end the wait on both sides."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import Any

import pytest

from pgmesh.rendezvous import timing
from pgmesh.rendezvous.client import CallClient
from pgmesh.rendezvous.group_rounds import GroupRound
from pgmesh.rendezvous.records import Decision
from pgmesh.rendezvous.rounds import Rounds
from pgmesh.rendezvous.statuses import Statuses
from pgmesh.rendezvous.store_thread import StoreThread
from tests.support.board import Fault, FaultyBoard, faults, raises, slow_store
from tests.support.memory_client import round_of, rounds_of

LONG = 20.0


def rounds(client: CallClient, members: int) -> Rounds[GroupRound, Decision]:
    """Rank 0 of a group, before its call."""
    more: dict[str, Any] = {"deadline": client.deadline - client.start, "statuses": Statuses(LONG, client.now)}
    return rounds_of(client, round_of(ranks=tuple(range(members))), **more)


def stopped_store(stopped: threading.Event) -> contextlib.AbstractContextManager[FaultyBoard]:
    """A store that answers nothing until an event."""
    return faults(Fault(before=lambda: stopped.wait(LONG)))


def test_second_interrupt_is_raised_at_once(store_thread: StoreThread):
    client = CallClient(store_thread, LONG)
    start = time.monotonic()
    with faults(Fault(before=raises(KeyboardInterrupt()), in_caller=True)), pytest.raises(KeyboardInterrupt):
        rounds(client, 2).run()
    assert client.interrupted
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
