"""The store thread: it goes on after a late answer, and keeps no reference to finished requests."""

import gc
import threading
import time
import weakref
from unittest import mock

import pytest
import torch.distributed as dist

from pgmesh.rendezvous.polling_store import once
from pgmesh.rendezvous.protocol import Add, CompareSet, Read, StoreProtocol, status_key
from pgmesh.rendezvous.store_thread import StoreThread, _Mailbox

LONG = 20.0


def test_a_wait_that_is_over_before_it_begins_ends_at_once():
    """Of Python's SimpleQueue, up to 3.12, one such wait in some thousands has no end."""
    mailbox, done = _Mailbox(), threading.Event()

    def wait() -> None:
        for _ in range(30_000):
            mailbox.put(None)
            mailbox.take()
            mailbox.wait(1e-9)  # as it rings still
            mailbox.wait(1e-9)
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    assert done.wait(LONG)


def test_what_a_question_raised_is_not_kept(heart: StoreThread):
    class Held:
        """Something that a frame of the question holds."""

    def steps() -> StoreProtocol[None]:
        held = Held()
        watched.append(weakref.ref(held))
        yield CompareSet("key", "value")
        raise ValueError("the last word")

    watched: list[weakref.ref[Held]] = []
    with pytest.raises(ValueError, match="the last word") as raised:
        heart.run(steps(), LONG)
    del raised
    gc.collect()
    assert watched[0]() is None


def test_a_long_job_does_not_hold_up_a_beat():
    store = dist.HashStore()
    heart = StoreThread(store, "here", 0, 2)
    heart.period = 0.05
    heart.beat()
    heart.run(once(Add("started")), LONG)
    beats = []

    def steps() -> StoreProtocol[None]:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            yield Add("asked")
            beats.append((yield Read(status_key(0))))

    heart.run(steps(), LONG)
    heart.stop()
    assert 5 < len(set(beats)) <= 25


def test_whether_the_thread_lives_is_not_asked_of_python(heart: StoreThread):
    """Up to 3.12, Ctrl-C inside Thread.is_alive has it say no of a living thread, for good."""
    with mock.patch.object(threading.Thread, "is_alive", return_value=False):
        heart.run(once(CompareSet("key", "value")), LONG)
    assert heart.run(once(Read("key")), LONG) == b"value"
