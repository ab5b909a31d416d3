"""``connect`` and the store thread: operations run on the thread, and errors and signals end the wait on both sides."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any
from unittest import mock

import pytest

from pgmesh import WorldError
from pgmesh.connect import connecting
from pgmesh.rendezvous.protocol import (
    ConnectAttempt,
    Decision,
    Fingerprint,
    Participant,
    Pause,
    Read,
    SetStatus,
    StoreProtocol,
)
from pgmesh.rendezvous.store_thread import StoreThread, _JobQueue, perform

LONG = 20.0


def call_of(store_thread: StoreThread, seconds: float) -> Any:
    """A call of connect without groups."""
    call: Any = object.__new__(connecting._Call)
    call.store_thread, call.start, call.seconds = store_thread, time.monotonic(), seconds
    call.deadline = call.start + seconds
    call.operations, call.interrupted, call.warnings, call.collectives, call.records = 0, False, [], [], {}
    return call


def participant_of(call: Any, members: int) -> Participant:
    attempt = ConnectAttempt(
        "group/attempt.0", range(members), Fingerprint(0, {}, "group dp", ""), "group/options/mismatch"
    )
    return Participant(0, [attempt], 1, "train.py:7", "me", call.seconds, lost_after=LONG, warn=call.warnings.append)


def test_ctrl_c_while_a_job_is_queued_is_raised_and_published(store_thread: StoreThread):
    call, put, once = call_of(store_thread, LONG), _JobQueue.put, iter([True])
    participant = participant_of(call, 2)

    def interrupted(queue: Any, job: Any) -> None:
        put(queue, job)
        if threading.current_thread() is threading.main_thread() and next(once, False):
            raise KeyboardInterrupt

    with mock.patch.object(_JobQueue, "put", interrupted), pytest.raises(KeyboardInterrupt):
        call._drive(participant.connect())
    decision = Decision.unpack("", store_thread.ask(Read("group/attempt.0/decision"), LONG))
    assert decision.kind == "missing"
    assert "rank 0 stopped connecting at train.py:7: KeyboardInterrupt" in decision.text


def test_an_interrupt_while_the_store_thread_runs_the_protocol_is_raised_unchanged(store_thread: StoreThread):
    """As by Ctrl-C a second time: nothing can be raised inside steps that another thread runs at this moment."""
    call, inside, leave = call_of(store_thread, LONG), threading.Event(), threading.Event()

    def steps() -> StoreProtocol[None]:
        yield Read("x")
        inside.set()
        leave.wait(LONG)

    def interrupted(batch: Any, seconds: float) -> Any:
        next(batch)
        threading.Thread(target=next, args=(batch, None), daemon=True).start()
        assert inside.wait(LONG)
        raise KeyboardInterrupt

    with mock.patch.object(store_thread, "run", interrupted), pytest.raises(KeyboardInterrupt):
        call._drive(steps())
    leave.set()


def test_a_slow_store_answers_many_questions_before_it_counts_as_silent(store_thread: StoreThread, monkeypatch):
    """Forty are asked after, at 30 ms each: longer than the store is given for one answer."""
    call = call_of(store_thread, 1.0)
    participant = participant_of(call, 40)
    monkeypatch.setattr(
        "pgmesh.rendezvous.store_thread.perform", lambda store, step: (time.sleep(0.03), perform(store, step))[1]
    )
    call._drive(participant.connect())
    decision = participant.attempts[0].decision
    assert decision is not None
    assert decision.kind == "missing"
    assert "ranks 1, 2, 3" in decision.text


def test_a_warning_is_logged_by_the_thread_that_waits(store_thread: StoreThread, caplog):
    call = call_of(store_thread, 0.6)
    with caplog.at_level(logging.WARNING, "pgmesh"):
        call._drive(participant_of(call, 2).connect())
    (record,) = caplog.records
    assert record.threadName == threading.current_thread().name
    assert "rank 1 did not arrive in 0 s so far" in record.message


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_forked_off_while_the_store_thread_runs_steps_waits_for_nobody(store_thread: StoreThread):
    children: list[int] = []
    parent = os.getpid()
    before = signal.signal(signal.SIGUSR1, lambda *_: children.append(os.fork()))

    def steps() -> StoreProtocol[None]:
        yield Read("x")
        os.kill(parent, signal.SIGUSR1)
        end = time.monotonic() + LONG
        while not children and time.monotonic() < end:
            time.sleep(0.001)
        yield Read("y")

    try:
        store_thread.run(steps(), LONG)
    except WorldError:
        os._exit(7 if os.getpid() != parent else 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
        if os.getpid() != parent:
            os._exit(1)
    end = time.monotonic() + LONG
    while (ended := os.waitpid(children[0], os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(children[0], signal.SIGKILL)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 7


@pytest.mark.parametrize(("came_after", "looks_after"), [(0.001, 0.002), (0.04, 0.01), (5.0, 0.05)])
def test_a_rank_that_was_slow_to_come_looks_as_much_later(came_after, looks_after):
    attempt = ConnectAttempt("group/attempt.0", range(2), Fingerprint(0, {}, "group dp", ""))
    steps = Participant(0, [attempt], 1, "train.py:7", "me", LONG, lost_after=LONG)._wait_for_decisions()
    assert next(steps) == Pause(0.0)
    assert steps.send(came_after) == Read("group/attempt.0/decision")
    assert steps.send(None) == Pause(looks_after)


@pytest.mark.parametrize(("came_after", "asks_after"), [(0.001, 0.025), (0.1, 0.1), (5.0, 0.3)])
def test_a_rank_that_was_slow_to_come_asks_why_as_much_later(came_after, asks_after):
    """As where the store is slow. It looks all the while."""
    attempt = ConnectAttempt("group/attempt.0", range(2), Fingerprint(0, {}, "group dp", ""))
    steps = Participant(0, [attempt], 1, "train.py:7", "me", LONG, lost_after=LONG)._wait_for_decisions()
    now, step = came_after, next(steps)
    while not isinstance(step, SetStatus):
        now += getattr(step, "seconds", 0.0)
        step = steps.send(None if isinstance(step, Read) else now)
    assert asks_after <= now - came_after < asks_after + 0.06
