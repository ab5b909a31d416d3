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
from pgmesh.rendezvous.store_thread import StoreThread, _Mailbox, perform

LONG = 20.0


def call_of(heart: StoreThread, seconds: float) -> Any:
    """A call of connect, without a family."""
    call: Any = object.__new__(connecting._Call)
    call.heart, call.start, call.seconds, call.end = heart, time.monotonic(), seconds, time.monotonic() + seconds
    call.operations, call.hurried, call.warnings, call.warming, call.made = 0, False, [], [], {}
    return call


def party_of(call: Any, members: int) -> Participant:
    meeting = ConnectAttempt(
        "group/meeting.0", range(members), Fingerprint(0, {}, "group dp", ""), "group/options/refused"
    )
    return Participant(0, [meeting], 1, "train.py:7", "me", call.seconds, suspicion=LONG, warn=call.warnings.append)


def test_ctrl_c_as_a_question_is_handed_over_is_raised_and_told(heart: StoreThread):
    call, put, once = call_of(heart, LONG), _Mailbox.put, iter([True])
    party = party_of(call, 2)

    def interrupted(mailbox: Any, job: Any) -> None:
        put(mailbox, job)
        if threading.current_thread() is threading.main_thread() and next(once, False):
            raise KeyboardInterrupt

    with mock.patch.object(_Mailbox, "put", interrupted), pytest.raises(KeyboardInterrupt):
        call._drive(party.meet())
    end = Decision.unpack("", heart.ask(Read("group/meeting.0/end"), LONG))
    assert end.kind == "missing"
    assert "rank 0 stopped connecting at train.py:7: KeyboardInterrupt" in end.text


def test_what_is_interrupted_while_the_heart_is_inside_the_protocol_is_raised_as_it_is(heart: StoreThread):
    """As by Ctrl-C a second time: nothing can be raised inside steps that another thread runs at this moment."""
    call, inside, leave = call_of(heart, LONG), threading.Event(), threading.Event()

    def steps() -> StoreProtocol[None]:
        yield Read("x")
        inside.set()
        leave.wait(LONG)

    def interrupted(stretch: Any, seconds: float) -> Any:
        next(stretch)
        threading.Thread(target=next, args=(stretch, None), daemon=True).start()
        assert inside.wait(LONG)
        raise KeyboardInterrupt

    with mock.patch.object(heart, "run", interrupted), pytest.raises(KeyboardInterrupt):
        call._drive(steps())
    leave.set()


def test_a_slow_store_answers_many_questions_before_it_counts_as_silent(heart: StoreThread, monkeypatch):
    """Forty are asked after, at 30 ms each: longer than the store is given for one answer."""
    call = call_of(heart, 1.0)
    party = party_of(call, 40)
    monkeypatch.setattr(
        "pgmesh.rendezvous.store_thread.perform", lambda store, step: (time.sleep(0.03), perform(store, step))[1]
    )
    call._drive(party.meet())
    end = party.meetings[0].end
    assert end is not None
    assert end.kind == "missing"
    assert "ranks 1, 2, 3" in end.text


def test_a_warning_is_logged_by_the_thread_that_waits(heart: StoreThread, caplog):
    call = call_of(heart, 0.6)
    with caplog.at_level(logging.WARNING, "pgmesh"):
        call._drive(party_of(call, 2).meet())
    (record,) = caplog.records
    assert record.threadName == threading.current_thread().name
    assert "rank 1 did not come so far, in 0 s" in record.message


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_forked_off_while_the_heart_runs_steps_waits_for_nobody(heart: StoreThread):
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
        heart.run(steps(), LONG)
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
    meeting = ConnectAttempt("group/meeting.0", range(2), Fingerprint(0, {}, "group dp", ""))
    steps = Participant(0, [meeting], 1, "train.py:7", "me", LONG, suspicion=LONG)._wait()
    assert next(steps) == Pause(0.0)
    assert steps.send(came_after) == Read("group/meeting.0/end")
    assert steps.send(None) == Pause(looks_after)


@pytest.mark.parametrize(("came_after", "asks_after"), [(0.001, 0.025), (0.1, 0.1), (5.0, 0.3)])
def test_a_rank_that_was_slow_to_come_asks_why_as_much_later(came_after, asks_after):
    """As where the store is slow. It looks all the while."""
    meeting = ConnectAttempt("group/meeting.0", range(2), Fingerprint(0, {}, "group dp", ""))
    steps = Participant(0, [meeting], 1, "train.py:7", "me", LONG, suspicion=LONG)._wait()
    now, step = came_after, next(steps)
    while not isinstance(step, SetStatus):
        now += getattr(step, "seconds", 0.0)
        step = steps.send(None if isinstance(step, Read) else now)
    assert asks_after <= now - came_after < asks_after + 0.06
