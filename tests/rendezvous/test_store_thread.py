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
from pgmesh.rendezvous.store_thread import StoreThread, _JobQueue

LONG = 20.0


def test_a_wait_that_is_over_before_it_begins_ends_at_once():
    """In Python's SimpleQueue, up to 3.12, one such wait in some thousands never ends."""
    queue, done = _JobQueue(), threading.Event()

    def wait() -> None:
        for _ in range(30_000):
            queue.put(None)
            queue.take()
            queue.wait(1e-9)
            queue.wait(1e-9)
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    assert done.wait(LONG)


def test_an_error_of_a_job_is_not_kept(store_thread: StoreThread):
    class Held:
        """An object that a frame of the job refers to."""

    def steps() -> StoreProtocol[None]:
        held = Held()
        watched.append(weakref.ref(held))
        yield CompareSet("key", "value")
        raise ValueError("the last word")

    watched: list[weakref.ref[Held]] = []
    with pytest.raises(ValueError, match="the last word") as raised:
        store_thread.run(steps(), LONG)
    del raised
    gc.collect()
    assert watched[0]() is None


def test_a_long_job_does_not_delay_a_heartbeat():
    store = dist.HashStore()
    store_thread = StoreThread(store, "here", 0, 2)
    store_thread.period = 0.05
    store_thread.start_heartbeat()
    store_thread.run(once(Add("started")), LONG)
    heartbeats = []

    def steps() -> StoreProtocol[None]:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            yield Add("asked")
            heartbeats.append((yield Read(status_key(0))))

    store_thread.run(steps(), LONG)
    store_thread.stop()
    assert 5 < len(set(heartbeats)) <= 25


def test_thread_is_alive_is_not_used(store_thread: StoreThread):
    """Up to Python 3.12, Thread.is_alive may return False for good after Ctrl-C inside it."""
    with mock.patch.object(threading.Thread, "is_alive", return_value=False):
        store_thread.run(once(CompareSet("key", "value")), LONG)
    assert store_thread.run(once(Read("key")), LONG) == b"value"
