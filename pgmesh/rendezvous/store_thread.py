"""The background thread that performs this process's operations on the world's store, and its heartbeat.

torch's own store client waits without a timeout, holds a lock and ignores Ctrl-C meanwhile. So only this thread uses
the client, and callers wait for its answers in Python with a timeout. The thread publishes this process's status and,
once connected, a heartbeat at regular intervals. It then uses a connection of its own, so that no wait inside torch
can delay a heartbeat.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from pgmesh.errors import PgmeshError, WorldError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.polling_store import ABSENT, once, perform, underlying
from pgmesh.rendezvous.protocol import (
    UNRELIABLE,
    Delete,
    Pause,
    PendingConnect,
    RankStatus,
    SetStatus,
    Step,
    StoreProtocol,
    status_key,
)

T = TypeVar("T")

_AFTER_FAILURE = "Connected groups continue to work. No group can be connected without the store."

_WORLD_LEFT = "this process has left it"

WORLD_KEY = "pgmesh.world"
"""The key that holds the name of the world on this store. All other keys of that world begin with its name."""

REPLACED = "+"
"""Last character of the name of a world that replaced another on the same store before all its ranks had left."""

OVER = "over"
"""Value of ``WORLD_KEY`` while the last rank of a world is about to delete it. No rank sets a name meanwhile."""

left_worlds: set[str] = set()
"""The names of the worlds that this process has left."""


def process_label() -> str:
    """Description of this process. It reveals two processes that have the same rank."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def enter_world(store: Any, left_worlds: Collection[str]) -> str:
    """Return the unique name of the world on a store. The first rank that calls sets it.

    On an unused store, all ranks get the same name. On a used store, ranks that left the same worlds get the same
    name, and so do all ranks once all have left.

    Args:
        store: the world's store, with the prefix of the world.
        left_worlds: the names of the worlds that this process has left.
    """
    new, deadline = secrets.token_hex(4), time.monotonic() + timing.TIMING.world_end
    while True:
        name = store.compare_set(WORLD_KEY, "", new).decode()
        if name == OVER and time.monotonic() < deadline:
            time.sleep(0.005)  # until the last rank of that world has deleted the key
        elif name == OVER or name in left_worlds:
            if store.compare_set(WORLD_KEY, name, new + REPLACED).decode() == new + REPLACED:
                name = new + REPLACED
                break  # otherwise another rank was faster, or the key was deleted: read again
        else:
            break
    store.add(f"{WORLD_KEY}.{name}.entered", 1)
    return str(name)


def leave_world(store: Any, name: str) -> bool:
    """Leave a world. The last rank to leave deletes the world's name and gets True."""
    entered, left = f"{WORLD_KEY}.{name}.entered", f"{WORLD_KEY}.{name}.left"
    count = str(store.add(left, 1))
    if store.compare_set(entered, ABSENT, ABSENT).decode() != count:  # a read; add(entered, 0) would create it
        return False
    for key in (entered, left):
        store.delete_key(key)
    if store.compare_set(WORLD_KEY, name, OVER).decode() == OVER:
        store.delete_key(WORLD_KEY)
    return True


class _ReadName(NamedTuple):
    """Read the name of the world that is on the store now."""


class _Job:
    """A protocol that a caller wants to have run, and its result."""

    __slots__ = ("answer", "cancelled", "done", "error", "running", "steps")

    def __init__(self, steps: StoreProtocol[Any]) -> None:
        self.steps = steps
        self.answer: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.running = False  # whether the thread is inside the protocol's code
        self.done = threading.Lock()  # held until the job is done
        self.done.acquire()


class _JobQueue:
    """A queue of jobs with a timeout. None is the last item.

    Up to Python 3.12, ``SimpleQueue.get`` may wait forever if its timeout has expired before it begins to wait.
    """

    def __init__(self) -> None:
        self._jobs: deque[_Job | None] = deque()
        self._signal = threading.Lock()  # released when there is a job
        self._signal.acquire()

    def put(self, job: _Job | None) -> None:
        self._jobs.append(job)
        with contextlib.suppress(RuntimeError):  # already released
            self._signal.release()

    def wait(self, seconds: float) -> None:
        """Wait for a job with a timeout. The queue may still be empty afterwards."""
        if not self._jobs:
            self._signal.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))

    def take(self) -> _Job | None:
        """Remove and return the oldest job.

        Raises:
            IndexError: the queue is empty.
        """
        return self._jobs.popleft()


class StoreThread:
    """The store thread of one process in one world.

    Args:
        store: the world's store.
        address: the store's host and port, for messages.
        rank: this process's rank in the world.
        world_size: the number of ranks.
        left: the names of the worlds that this process has left. This one is added at ``stop``.
    """

    def __init__(self, store: Any, address: str, rank: int, world_size: int, left: set[str] | None = None) -> None:
        self._shared, self._address, self._rank, self._world_size = store, address, rank, world_size
        self._left_worlds = left_worlds if left is None else left
        self.pace = max(1.0, world_size / timing.LIMITS.full_rate_ranks)
        self.period = timing.TIMING.heartbeat * self.pace
        self._jobs = _JobQueue()
        self._paused_jobs: list[tuple[float, int, _Job]] = []  # a heap by due time
        self._count = itertools.count()
        self._heartbeat_due = math.inf
        self._publishing, self._connection_requested, self._heartbeats = False, False, UNRELIABLE
        self._activity = ""
        self._pending: dict[int, tuple[PendingConnect, ...]] = {}  # by thread
        self._store: Any = None  # the shared store or the own connection, with this world's prefix
        self._own_connection: Any = None  # set by another thread until ``_store`` takes it over
        self.steady_heartbeats = False  # no wait inside torch can delay a heartbeat any more
        self._name = ""  # of the world
        self._store_failure = ""  # the error of the store, once it failed
        self._stopped = self._ended = False
        self._process = os.getpid()  # a forked child has no such thread
        self._operation_start = math.inf  # of an operation that the store has not answered
        self._thread = threading.Thread(target=self._run, name="pgmesh-store", daemon=True)
        self._thread.start()

    @property
    def lost_after(self) -> float:
        """Seconds without a heartbeat after which a rank counts as lost."""
        return timing.TIMING.missed_heartbeats * self.period

    @property
    def stalled(self) -> bool:
        """True if the store has not answered for a second."""
        return time.monotonic() - self._operation_start > 1.0

    # -- called by other threads --------------------------------------------------------------------------------

    def run(self, steps: StoreProtocol[T], seconds: float) -> T:
        """Run a protocol on the store thread, and return its result or raise its error. Its pauses block no other job.

        Raises:
            WorldError: it has not finished after ``seconds``, or the store has failed.
        """
        start, waited, job = time.monotonic(), 0.0, _Job(steps)
        if not self._is_running():
            raise self._store_error(_WORLD_LEFT)
        try:
            self._jobs.put(job)
            while not job.done.acquire(timeout=min(max(0.0, seconds - waited), timing.TIMING.thread_check)):
                waited = time.monotonic() - start
                if not self._is_running():
                    raise self._store_error(_WORLD_LEFT)
                if waited >= seconds:
                    raise WorldError(
                        f"the store at {self._address} did not answer for {waited:.1f} s. {_AFTER_FAILURE}"
                    )
        finally:
            job.cancelled = True  # the thread performs no more of its steps
            while job.running and self._is_running():  # afterwards the protocol belongs to the caller
                time.sleep(0)
        if job.error is None:
            result: T = job.answer
            return result
        try:
            raise job.error
        finally:
            del job  # else the error and this frame keep each other alive

    def _is_running(self) -> bool:
        """True if the thread runs in this process.

        Up to Python 3.12, ``Thread.is_alive`` may return False for good after Ctrl-C inside it.
        """
        return not self._ended and os.getpid() == self._process

    def ask(self, step: Step, seconds: float) -> Any:
        """Perform one step, and return the store's answer.

        Raises:
            WorldError: there is no answer after ``seconds``, or the store has failed.
        """
        if isinstance(step, SetStatus):
            self._pending[threading.get_ident()] = step.pending
        return self.run(once(step), seconds)

    def store_hint(self) -> str:
        """Return a reason why ranks may not find each other on this store, with a fix; "" for none."""
        try:
            name = self.run(once(cast(Step, _ReadName())), 1.0)
        except WorldError:
            return ""
        if name == self._name and not name.endswith(REPLACED):
            return ""
        return (
            f"\n\nThe store at {self._address} has served another world too. Ranks that were in it use other keys than "
            "ranks that were not. Give each world a separate store or prefix:\n\n"
            "  dist.init_process_group(..., store=dist.PrefixStore('attempt-2', store))"
        )

    def start_heartbeat(self) -> None:
        """Start the heartbeat of this process, and open a connection for it."""
        self._publish_soon()
        if not self._connection_requested:
            self._connection_requested = True
            threading.Thread(target=self._open_connection, name="pgmesh-connection", daemon=True).start()

    def _publish_soon(self) -> None:
        if not self._publishing:
            self._publishing = True
            self.post(once(SetStatus(())))

    def clear_status(self) -> None:
        """Remove the pending groups of the calling thread from the status, with the next heartbeat."""
        self._pending.pop(threading.get_ident(), None)

    def set_status(self, activity: str) -> None:
        """Publish the activity of this process; "" for none. Returns at once.

        It opens no connection. A server that looks up the host name of each new client answers no other rank
        meanwhile, and the others may be in a first collective.
        """
        self._activity = activity
        self._publish_soon()
        self.post(once(SetStatus(())))

    def stop(self, reason: str = "") -> None:
        """Publish the reason for the end of the heartbeats, leave the world, and end the thread."""
        self._activity, self._stopped = reason, True
        self._jobs.put(None)
        self._thread.join(0.5)
        if self._name:
            self._left_worlds.add(self._name)

    def post(self, steps: StoreProtocol[Any]) -> None:
        """Run a protocol later, before the thread ends. Returns at once and never raises."""
        self._jobs.put(_Job(steps))

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._ended = True
            # A mesh that outlives the world would keep the connection open.
            self._shared = self._store = self._own_connection = None

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            self._advance(job)
            del job  # else its error and all frames of it live until the next job
        with contextlib.suppress(Exception):
            if self._publishing:
                self._perform(SetStatus(()))
            if self._name and not self._store_failure and leave_world(self._shared, self._name):
                perform(self._store, Delete(tuple(map(status_key, range(self._world_size)))))
        for job in [job for *_, job in self._paused_jobs]:
            self._finish(job, error=self._store_error(_WORLD_LEFT))

    def _next(self) -> _Job | None:
        """The next job; None at the end."""
        while True:
            now = time.monotonic()
            if self._paused_jobs and self._paused_jobs[0][0] <= now:
                return heapq.heappop(self._paused_jobs)[2]
            if self._heartbeat_due <= now:
                return _Job(once(SetStatus(())))
            due = min(self._heartbeat_due, self._paused_jobs[0][0] if self._paused_jobs else math.inf)
            with contextlib.suppress(IndexError):
                return self._jobs.take()
            self._jobs.wait(due - now)

    def _advance(self, job: _Job) -> None:
        """Continue a job until it pauses or is done."""
        send, answer = job.steps.send, None
        job.running = True
        while not job.cancelled:
            try:
                step = send(answer)
            except StopIteration as stop:
                return self._finish(job, answer=stop.value)
            except BaseException as error:
                return self._finish(job, error=error)
            job.running = False
            if isinstance(step, Pause):
                due = time.monotonic() + step.seconds
                return heapq.heappush(self._paused_jobs, (due, next(self._count), job))
            if self._heartbeat_due <= time.monotonic():  # a long job must not delay it
                with contextlib.suppress(WorldError):
                    self._perform(SetStatus(()))
            try:
                send, answer = job.steps.send, self._perform(step)
            except Exception as error:
                send, answer = job.steps.throw, error
            job.running = True
        with contextlib.suppress(Exception):
            job.steps.close()
        job.running = False
        return None

    def _finish(self, job: _Job, *, answer: Any = None, error: BaseException | None = None) -> None:
        job.answer, job.error, job.running = answer, error, False
        job.done.release()

    def _perform(self, step: Step) -> Any:
        if isinstance(step, SetStatus):
            self._heartbeat_due = time.monotonic() + self.period
        if self._store_failure:  # torch logs each use of a failed store at length
            raise self._store_error(self._store_failure)
        self._operation_start = time.monotonic()
        try:
            if self._own_connection is not None:
                self._store, self._own_connection = self._prefixed(self._own_connection), None
            self._store = self._store or self._prefixed(underlying(self._shared))
            if isinstance(step, _ReadName):
                return self._shared.compare_set(WORLD_KEY, ABSENT, ABSENT).decode()
            return self._publish_status() if isinstance(step, SetStatus) else perform(self._store, step)
        except RuntimeError as error:
            if isinstance(error, PgmeshError):
                raise
            self._store_failure = str(error).splitlines()[0].rstrip(".")
            raise self._store_error(self._store_failure) from error
        finally:
            self._operation_start = math.inf
            if self._store_failure:
                self._heartbeat_due = math.inf

    def _store_error(self, reason: str) -> WorldError:
        return WorldError(f"the store at {self._address} failed: {reason}. {_AFTER_FAILURE}")

    def _prefixed(self, store: Any) -> Any:
        """A store with this world's prefix."""
        self._name = self._name or enter_world(self._shared, self._left_worlds)
        return dist.PrefixStore(f"pgmesh.{self._name}", store)

    def _open_connection(self) -> None:
        """Open a second connection to a TCPStore.

        That may take seconds, since torch looks up host names. ``clone`` would hold the lock of the shared client
        meanwhile.
        """
        store = underlying(self._shared)
        if isinstance(store, dist.TCPStore):
            with contextlib.suppress(RuntimeError):
                connection = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
                self._own_connection = None if self._ended else connection
        self.steady_heartbeats = True

    def _publish_status(self) -> None:
        self._heartbeats += self.steady_heartbeats
        pending = tuple(wait for pending in self._pending.values() for wait in pending)
        reason = self._activity if self._stopped else ""
        record = RankStatus(
            self._rank,
            self._heartbeats,
            "" if reason else self._activity,
            pending[: timing.LIMITS.statuses],
            is_single_threaded(),
            reason,
        )
        self._store.set(status_key(self._rank), record.pack())


def is_single_threaded() -> bool:
    """True if no other thread of this process can connect a group. Daemon threads are taken for helper threads."""
    return not any(
        thread is not threading.main_thread() and thread.is_alive() and not thread.daemon
        for thread in threading.enumerate()
    )
