"""A thread that speaks with the world's store for this process: it asks with a deadline, and it beats.

The store's own client waits without end, holds a lock and is deaf to Ctrl-C while it does. So this thread alone asks,
and who wants something waits for it in Python, for so long and no longer. Once there is somebody to tell, the thread
tells the others that this process lives, and what it does; once they count on it, it takes a connection of its own for
that, so that no wait of torch's holds up a beat.
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
from pgmesh.rendezvous.polling_store import ABSENT, once, perform, underlying
from pgmesh.rendezvous.protocol import (
    MOST_ASKED,
    UNSTEADY,
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

BEAT = 1.0
"""Seconds between two beats, in a world of up to ``CROWD`` ranks; in a larger one so many times more that the store
hears no more beats than from that one."""

CROWD = 1024

STILL = "Groups that were connected go on working; nothing new can be connected without it."

LEFT = "this process has left it"

SUSPICION = 5.0
"""Beats that have to fail before a rank counts as lost."""

GLANCE = 0.5
"""Seconds after which one who waits sees whether there still is somebody who asks."""

WORLD = "pgmesh.world"
"""The key that holds the name of the world on this store. All other keys of that world begin with its name."""

REPLACED = "+"
"""Ends the name of a world that replaced another on the same store before all its ranks had left that one."""

OVER = "over"
"""In place of a name: the last rank of that world is about to delete the key, and no rank sets a name meanwhile."""

LEAVING = 1.0
"""Seconds after which a rank that was about to delete the name of its world counts as dead."""

left_worlds: set[str] = set()
"""The names of the worlds that this process has left."""


def who() -> str:
    """This process, to tell it from another that takes itself for the same rank."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def enter_world(store: Any, left: Collection[str]) -> str:
    """Return the name of the world on a store, which no other world on it has. The first rank to ask sets it.

    On an unused store, all ranks get one name. On a used store, ranks that left the same worlds get one name, and all
    ranks do once everybody has left.

    Args:
        store: the world's, with the prefix that it was given.
        left: the worlds that this process has left.
    """
    new, patience = secrets.token_hex(4), time.monotonic() + LEAVING
    while True:
        name = store.compare_set(WORLD, "", new).decode()
        if name == OVER and time.monotonic() < patience:
            time.sleep(0.005)  # the last rank of that world is about to delete this
        elif name == OVER or name in left:
            if store.compare_set(WORLD, name, new + REPLACED).decode() == new + REPLACED:
                name = new + REPLACED
                break  # else another rank was faster, or the key was deleted: look again
        else:
            break
    store.add(f"{WORLD}.{name}.entered", 1)
    return str(name)


def leave_world(store: Any, name: str) -> bool:
    """Leave a world, and return whether this was the last rank to do so. The last one deletes the world's name."""
    entered, gone = f"{WORLD}.{name}.entered", f"{WORLD}.{name}.left"
    left = str(store.add(gone, 1))
    if store.compare_set(entered, ABSENT, ABSENT).decode() != left:  # this reads it; add(entered, 0) would make it anew
        return False
    for key in (entered, gone):
        store.delete_key(key)
    if store.compare_set(WORLD, name, OVER).decode() == OVER:
        store.delete_key(WORLD)
    return True


class _ReadName(NamedTuple):
    """Read which world is on the store now."""


class _Job:
    """What a thread wants to have done, and what came of it."""

    __slots__ = ("answer", "done", "error", "given_up", "inside", "steps")

    def __init__(self, steps: StoreProtocol[Any]) -> None:
        self.steps = steps
        self.answer: Any = None
        self.error: BaseException | None = None
        self.given_up = False
        self.inside = False  # whether the thread runs the steps at this moment
        self.done = threading.Lock()  # held until it is
        self.done.acquire()


class _Mailbox:
    """Jobs for the thread, which waits for them with a deadline; None is the last.

    Not Python's own: up to 3.12, ``SimpleQueue.get`` takes a timeout that is over before it waits for one without end.
    """

    def __init__(self) -> None:
        self._jobs: deque[_Job | None] = deque()
        self._bell = threading.Lock()  # released when there is something
        self._bell.acquire()

    def put(self, job: _Job | None) -> None:
        self._jobs.append(job)
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def wait(self, seconds: float) -> None:
        """Wait until something may have come, for so long and no longer."""
        if not self._jobs:
            self._bell.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))

    def take(self) -> _Job | None:
        """What came first.

        Raises:
            IndexError: there is nothing.
        """
        return self._jobs.popleft()


class StoreThread:
    """The thread of one process in one world.

    Args:
        store: the world's store.
        where: the store's host and port, for messages.
        rank: this process's.
        world_size: of how many.
        left: the worlds that this process has left; this one is added when it is left.
    """

    def __init__(self, store: Any, where: str, rank: int, world_size: int, left: set[str] | None = None) -> None:
        self._shared, self._where, self._rank, self._world_size = store, where, rank, world_size
        self._left = left_worlds if left is None else left
        self.pace = max(1.0, world_size / CROWD)
        self.period = BEAT * self.pace
        self._jobs = _Mailbox()
        self._paused: list[tuple[float, int, _Job]] = []  # a heap: when each is due
        self._count = itertools.count()
        self._beat_due = math.inf
        self._beating, self._counted_on, self._beats = False, False, UNSTEADY
        self._doing = ""
        self._waits: dict[int, tuple[PendingConnect, ...]] = {}  # by thread
        self._store: Any = None  # the world's, or a connection of its own, as this world's part of it
        self._own: Any = None  # such a connection, once it is there
        self.steady = False  # whether no wait of torch's can hold up a beat any more
        self._name = ""  # the world's
        self._gone = ""  # what the store failed with, once it did
        self._stopped = self._ended = False
        self._process = os.getpid()  # a fork has no such thread
        self._asked_at = math.inf  # when the store was asked what it has not answered
        self._thread = threading.Thread(target=self._run, name="pgmesh-store", daemon=True)
        self._thread.start()

    @property
    def suspicion(self) -> float:
        """Seconds without a beat after which a rank counts as lost."""
        return SUSPICION * self.period

    @property
    def silent(self) -> bool:
        """Whether the store owes an answer for long."""
        return time.monotonic() - self._asked_at > 1.0

    # -- for the threads that want something --------------------------------------------------------------------

    def run(self, steps: StoreProtocol[T], seconds: float) -> T:
        """What a protocol comes to, or what it raises. It is driven by the heart: its pauses hold up nobody else.

        Raises:
            WorldError: it was not done in so many seconds, or the store is gone.
        """
        start, waited, job = time.monotonic(), 0.0, _Job(steps)
        if not self._is_there():
            raise self._lost(LEFT)
        try:
            self._jobs.put(job)
            while not job.done.acquire(timeout=min(max(0.0, seconds - waited), GLANCE)):
                waited = time.monotonic() - start
                if not self._is_there():
                    raise self._lost(LEFT)
                if waited >= seconds:
                    raise WorldError(f"the store at {self._where} gave no answer for {waited:.1f} s. {STILL}")
        finally:
            job.given_up = True  # what was not asked by now is not asked later, when nobody counts on it
            while job.inside and self._is_there():  # from here on, the steps are the caller's again
                time.sleep(0)
        if job.error is None:
            result: T = job.answer
            return result
        try:
            raise job.error
        finally:
            del job  # else the error keeps this frame, and this frame the error

    def _is_there(self) -> bool:
        """Whether the thread lives, in this process. Ctrl-C in ``Thread.is_alive`` would make it say no, up to 3.12."""
        return not self._ended and os.getpid() == self._process

    def ask(self, step: Step, seconds: float) -> Any:
        """The answer of the store.

        Raises:
            WorldError: there was none in so many seconds, or the store is gone.
        """
        if isinstance(step, SetStatus):
            self._waits[threading.get_ident()] = step.waits
        return self.run(once(step), seconds)

    def doubt(self) -> str:
        """Return why ranks may not find each other on this store, with the call that helps; "" if nothing is known."""
        try:
            name = self.run(once(cast(Step, _ReadName())), 1.0)
        except WorldError:
            return ""
        if name == self._name and not name.endswith(REPLACED):
            return ""
        return (
            f"\n\nThe store at {self._where} served another world too. Ranks that were in it and ranks that were not "
            "use different keys. Give each world a store or a prefix of its own:\n\n"
            "  dist.init_process_group(..., store=dist.PrefixStore('attempt-2', store))"
        )

    def beat(self) -> None:
        """From here on, tell the others that this process lives, so that they may count on it."""
        self._speak()
        if not self._counted_on:
            self._counted_on = True
            threading.Thread(target=self._take_own, name="pgmesh-connection", daemon=True).start()

    def _speak(self) -> None:
        if not self._beating:
            self._beating = True
            self.post(once(SetStatus(())))

    def hush(self) -> None:
        """The thread that calls waits for nobody any more; the next beat says so."""
        self._waits.pop(threading.get_ident(), None)

    def say(self, doing: str) -> None:
        """Tell the others what this process does; "" for nothing that concerns them. Waits for nothing.

        It takes no connection for that: while ranks wait in a first collective, others connect to the store, and a
        server that looks up the name of each that comes answers nobody meanwhile.
        """
        self._doing = doing
        self._speak()
        self.post(once(SetStatus(())))

    def stop(self, gone: str = "") -> None:
        """Tell the others why this process tells no more, leave the world, and end the thread."""
        self._doing, self._stopped = gone, True
        self._jobs.put(None)
        self._thread.join(0.5)
        if self._name:
            self._left.add(self._name)

    def post(self, steps: StoreProtocol[Any]) -> None:
        """Have a protocol run in its turn, before the thread ends. Waits for nothing and raises nothing."""
        self._jobs.put(_Job(steps))

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._ended = True
            self._shared = self._store = self._own = None  # a mesh that outlives the world holds no connection

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            self._advance(job)
            del job  # else its error lives, with every frame that it passed, until something else is asked
        with contextlib.suppress(Exception):
            if self._beating:
                self._perform(SetStatus(()))
            if self._name and not self._gone and leave_world(self._shared, self._name):
                perform(self._store, Delete(tuple(map(status_key, range(self._world_size)))))
        for left in [job for *_, job in self._paused]:
            self._end(left, error=self._lost(LEFT))

    def _next(self) -> _Job | None:
        """What is to be done next; None for nothing any more."""
        while True:
            now = time.monotonic()
            if self._paused and self._paused[0][0] <= now:
                return heapq.heappop(self._paused)[2]
            if self._beat_due <= now:
                return _Job(once(SetStatus(())))
            due = min(self._beat_due, self._paused[0][0] if self._paused else math.inf)
            with contextlib.suppress(IndexError):
                return self._jobs.take()
            self._jobs.wait(due - now)

    def _advance(self, job: _Job) -> None:
        """Go on with a job until it pauses or is done."""
        send, answer = job.steps.send, None
        job.inside = True
        while not job.given_up:
            try:
                step = send(answer)
            except StopIteration as stop:
                return self._end(job, answer=stop.value)
            except BaseException as error:
                return self._end(job, error=error)
            job.inside = False
            if isinstance(step, Pause):
                due = time.monotonic() + step.seconds
                return heapq.heappush(self._paused, (due, next(self._count), job))
            if self._beat_due <= time.monotonic():  # it does not wait for the end of a long job
                with contextlib.suppress(WorldError):
                    self._perform(SetStatus(()))
            try:
                send, answer = job.steps.send, self._perform(step)
            except Exception as error:
                send, answer = job.steps.throw, error
            job.inside = True
        with contextlib.suppress(Exception):
            job.steps.close()
        job.inside = False
        return None

    def _end(self, job: _Job, *, answer: Any = None, error: BaseException | None = None) -> None:
        job.answer, job.error, job.inside = answer, error, False
        job.done.release()

    def _perform(self, step: Step) -> Any:
        if isinstance(step, SetStatus):
            self._beat_due = time.monotonic() + self.period
        if self._gone:  # torch would tell of it at length each time that it is asked again
            raise self._lost(self._gone)
        self._asked_at = time.monotonic()
        try:
            if self._own is not None:
                self._store, self._own = self._part_of(self._own), None
            self._store = self._store or self._part_of(underlying(self._shared))
            if isinstance(step, _ReadName):
                return self._shared.compare_set(WORLD, ABSENT, ABSENT).decode()
            return self._tell() if isinstance(step, SetStatus) else perform(self._store, step)
        except RuntimeError as error:
            if isinstance(error, PgmeshError):
                raise
            self._gone = str(error).splitlines()[0].rstrip(".")
            raise self._lost(self._gone) from error
        finally:
            self._asked_at = math.inf
            if self._gone:
                self._beat_due = math.inf

    def _lost(self, what: str) -> WorldError:
        return WorldError(f"the store at {self._where} is gone: {what}. {STILL}")

    def _part_of(self, store: Any) -> Any:
        """This world's part of a store: its keys begin with the world's name."""
        self._name = self._name or enter_world(self._shared, self._left)
        return dist.PrefixStore(f"pgmesh.{self._name}", store)

    def _take_own(self) -> None:
        """Take a connection of one's own, where the store has such.

        That may take seconds, since torch looks up the names of hosts; ``clone`` would hold the lock of the shared
        one for as long.
        """
        store = underlying(self._shared)
        if isinstance(store, dist.TCPStore):
            with contextlib.suppress(RuntimeError):
                own = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
                self._own = None if self._ended else own
        self.steady = True

    def _tell(self) -> None:
        self._beats += self.steady
        waits = tuple(wait for waits in self._waits.values() for wait in waits)
        gone = self._doing if self._stopped else ""
        record = RankStatus(self._rank, self._beats, "" if gone else self._doing, waits[:MOST_ASKED], alone(), gone)
        self._store.set(status_key(self._rank), record.pack())


def alone() -> bool:
    """Whether no other thread of this process could still come to a meeting: those that serve are daemons."""
    return not any(
        thread is not threading.main_thread() and thread.is_alive() and not thread.daemon
        for thread in threading.enumerate()
    )
