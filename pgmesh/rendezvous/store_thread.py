"""The background thread that performs this process's operations on the world's store, and its heartbeat.

A call into torch's store client may block for minutes with its lock held, and Python handles no signal meanwhile. So
pgmesh calls it only in this thread. A caller hands it a batch of operations, and waits for the answers in Python with
a timeout.

The first operation opens a connection of the thread's own, so that a wait inside torch does not delay a heartbeat. A
connection that breaks is opened again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pgmesh._util.listeners import Listener, is_loopback, refuses
from pgmesh._util.sockets import ending_when_cut
from pgmesh.errors import MismatchError, PgmeshError, WorldError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.batches import Batch, Queue
from pgmesh.rendezvous.operations import Board, Delete, Operation, Raw, Read, can_be_repeated
from pgmesh.rendezvous.statuses import PendingConnect, RankStatus, RunningCollective, status_key
from pgmesh.rendezvous.world_name import REPLACED, current_world, enter_world, leave_world, left_worlds

log = logging.getLogger("pgmesh")

_AFTER_FAILURE = "Connected groups continue to work. No group can be connected without the store."

_CUT = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
"""Errors of a network that is cut."""

_MISSED_PERIODS = 1.5
"""A heartbeat is missing after this many periods."""

_TOKEN = secrets.token_hex(4)  # process numbers repeat, for example in containers


def process_id() -> str:
    """A short word that only this process has."""
    return f"{os.getpid()}/{_TOKEN}"


def process_label() -> str:
    """Description of this process. It reveals two processes that have the same rank."""
    return f"process {os.getpid()} on {socket.gethostname()}/{_TOKEN}"


def process_key(rank: int) -> str:
    """The store key of the description of the process that has this rank."""
    return f"pgmesh/process/{rank}"


def meshes_key(rank: int) -> str:
    """The store key of the numbers of the meshes that a rank has registered."""
    return f"pgmesh/meshes/{rank}"


def underlying(store: Any) -> Any:
    """The store inside any ``PrefixStore`` wrappers."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def warn_from_store_thread(text: str) -> None:
    """Log a warning in another thread, since a log handler may block and the store thread sends the heartbeats."""
    threading.Thread(target=log.warning, args=("%s", text), name="pgmesh-warning", daemon=True).start()


class StoreThread:
    """The store thread of one process in one world.

    Args:
        store: the world's store.
        address: the store's host and port, for messages.
        rank: this process's rank in the world.
        world_size: the number of ranks.
        left: the names of the worlds that this process has left. ``stop`` adds the name of this world.
    """

    board = Board()

    def __init__(
        self,
        store: Any,
        address: str,
        rank: int,
        world_size: int,
        left: set[str] | None = None,
    ) -> None:
        self._torch_store, self._address, self._rank, self._world_size = store, address, rank, world_size
        self._left_worlds = left_worlds if left is None else left
        self.on_heartbeat: Callable[[Callable[[Operation], Any]], tuple[RunningCollective, ...]] = lambda perform: ()
        """Called at each heartbeat, with a function that performs one operation. It returns the running collectives."""
        self.pace, self.period = timing.pace(world_size), timing.heartbeat_period(world_size)
        self._queue = Queue()
        self._heartbeat_due = math.inf
        self._heartbeats = 0
        self._answered = 0.0, time.monotonic()  # answered_seconds at the last answered heartbeat, and its time
        self._activities: dict[int, str] = {}  # by thread
        self._reason = ""
        self._pending: dict[int, tuple[PendingConnect, ...]] = {}  # by thread
        self._tasks: list[Callable[[], None]] = []  # of ``insist``, which the store has not answered yet
        self._store: Any = None  # with this world's prefix; None before the first operation and after a failure
        self._name = ""  # of the world
        self._entered = False  # this process's key is in the store
        self.replaces_process = False  # another process had this rank before; known after the first operation
        self.same_rank = ""  # label of a process that has this rank too; known after the first operation
        self.until_end: dict[str, str] = {}  # by key: values that this process deletes when it ends
        self._server: tuple[str, int] | None = None  # numeric address of the store, once it has answered
        self._ended = False
        self._warned = False  # of an error of ``on_heartbeat``
        self._process = os.getpid()  # a forked child has no such thread
        self._operation_start = math.inf  # of an operation that the store has not answered
        # The server while torch's client connects to it, which takes seconds if the server ends meanwhile. Callers see
        # at once that its port is closed. The kernel closes it last, so this is common when the store is killed.
        self._opening: tuple[str, int] | None = None
        self.listener: Listener | None = None  # shows other ranks that this process lives
        self._asked: dict[object, tuple[float, bool]] = {}  # by listener: when it was last asked, and if it refused
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

    def answered_seconds(self) -> float:
        """Time in which the store answered this process, the clock of other ranks' silence.

        Each interval between two answered heartbeats counts for one period at most. So a pause of the store, of this
        process or of the whole machine adds one period, and nobody is taken for lost because this process read nothing.
        """
        seconds, last = self._answered
        return seconds + min(time.monotonic() - last, self.period)

    # -- called by other threads --------------------------------------------------------------------------------

    def run(self, *operations: Operation, seconds: float) -> list[Any]:
        """Perform operations in this order, and return the store's answers.

        Raises:
            WorldError: ``seconds`` passed without a further answer, or the store has failed.
        """
        return self.board.request(operations, lambda: self._ask(operations, seconds))

    def _ask(self, operations: Sequence[Operation], seconds: float) -> list[Any]:
        """Hand a batch to the thread, and wait for the answers."""
        start, waited, answered, batch = time.monotonic(), 0.0, 0, Batch(operations)
        if not self._is_running():
            raise WorldError(f"this process has left the world, so it cannot use the store at {self._address}.")
        try:
            self._queue.put(batch)
            while not batch.done.acquire(timeout=min(max(0.0, seconds - waited), timing.TIMING.thread_check)):
                if len(batch.answers) > answered:  # a slow store, which answers
                    start, answered = time.monotonic(), len(batch.answers)
                waited = time.monotonic() - start
                if not self._is_running():
                    raise WorldError(f"this process has left the world during an operation on {self._address}.")
                if (server := self._opening) and refuses(server):
                    raise self._store_error("connection refused")
                if waited >= seconds:
                    raise WorldError(
                        f"the store at {self._address} did not answer for {waited:.1f} s. {_AFTER_FAILURE}"
                    )
        finally:
            batch.cancelled = True  # after a timeout or Ctrl-C, the thread performs no more of them
        if batch.error is None:
            return batch.answers
        try:
            raise batch.error
        finally:
            del batch  # else the error and this frame keep each other alive

    def post(self, *operations: Operation) -> None:
        """Perform operations later, before the thread ends. Returns at once and never raises."""
        self.board.request(operations, lambda: self._queue.put(Batch(operations)))

    def insist(self, task: Callable[[Callable[..., list[Any]]], None], seconds: float) -> None:
        """Let the thread perform a task, and repeat it after each failure of the store, until it has been done once.

        Returns as soon as it is done, and after a timeout anyway.

        Args:
            task: performs operations with the function that it is given. A mismatch ends it.
            seconds: the timeout.
        """
        done = threading.Event()

        def attempt() -> None:
            with contextlib.suppress(MismatchError):
                task(lambda *operations: [*map(self._perform, operations)])
            self._tasks.remove(attempt)
            done.set()

        self._tasks.append(attempt)
        self.post()
        done.wait(seconds)

    def _is_running(self) -> bool:
        """True if the thread runs in this process.

        Up to Python 3.12, ``Thread.is_alive`` may return False for good after Ctrl-C inside it.
        """
        return not self._ended and os.getpid() == self._process

    def start_heartbeat(self) -> None:
        """Send the first heartbeat of this process now, and not a period after the first operation."""
        if not self._heartbeats:
            self._publish_soon()

    def set_pending(self, pending: tuple[PendingConnect, ...]) -> None:
        """Publish the groups that the calling thread waits for."""
        thread = threading.get_ident()
        if pending == self._pending.get(thread, ()):
            return
        if pending:
            self._pending[thread] = pending
        else:
            del self._pending[thread]
        self._publish_soon()

    def set_status(self, activity: str) -> None:
        """Publish the activity of this process; "" for none. Returns at once."""
        thread = threading.get_ident()
        if activity:
            self._activities[thread] = activity
        else:
            self._activities.pop(thread, None)
        self._publish_soon()

    def _publish_soon(self) -> None:
        self._heartbeat_due = 0.0
        self.post()

    def has_ended(self, status: RankStatus, seconds: float) -> bool:
        """True if the process that published a status has ended: its listener refuses a connection.

        A firewall of another host refuses too. So there a heartbeat must be missing as well. A listener is asked a few
        times in a second at most: it has room for 128 connections until the next heartbeat.

        Args:
            seconds: the time without a new heartbeat.
        """
        if not status.endpoint or self.listener is None:
            return False
        host = status.endpoint[0]
        # A rank that reaches the store over its loopback is on the store's host. Elsewhere that address means another.
        if is_loopback(host) != is_loopback(self.listener.host):
            return False
        if host != self.listener.host and seconds < _MISSED_PERIODS * self.period:
            return False
        asked_at, refused = self._asked.get(status.endpoint, (-math.inf, False))
        if time.monotonic() >= asked_at + timing.TIMING.ask_again:
            refused = refuses(status.endpoint)
            self._asked[status.endpoint] = time.monotonic(), refused
        return refused

    def store_hint(self) -> str:
        """Return a reason why ranks may not find each other on this store, with a fix; "" for none."""
        with contextlib.suppress(Exception):
            if not self._name.endswith(REPLACED) and self.run(_WORLD_NAME, seconds=1.0) == [self._name]:
                return ""
            return (
                f"\n\nThe store at {self._address} has served another world too. Ranks that were in it use other keys "
                "than ranks that were not. Give each world a separate store or prefix:\n\n"
                "  dist.init_process_group(..., store=dist.PrefixStore('attempt-2', store))"
            )
        return ""

    def close_listener(self) -> None:
        """Close the listener, or the copy of it in a forked child, which would keep the port open."""
        if self.listener is not None:
            self.listener.close()

    def stop(self, reason: str = "") -> None:
        """Let the thread publish the reason, leave the world and end.

        Waits for that for 5 s at most; without tasks, for half a second while the store does not answer. A thread that
        returns from the store's client while Python ends would abort the process.
        """
        self._reason = reason
        if self._name:
            self._left_worlds.add(self._name)
        self._queue.put(None)
        end = time.monotonic() + 5.0
        while self._thread.is_alive() and time.monotonic() < end:
            if not self._tasks and time.monotonic() - self._operation_start >= 0.5:
                break
            self._thread.join(0.02)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (batch := self._next()) is not None:
                self._perform_batch(batch)
                del batch  # else its error and all frames of it live until the next batch
            self._leave()
        finally:
            self._ended = True
            self.close_listener()
            self._torch_store = self._store = None  # a mesh that outlives the world would keep the connection open

    def _next(self) -> Batch | None:
        """The next batch; None at the end. Heartbeats are sent meanwhile."""
        while True:
            self._perform_tasks()
            self._publish_if_due()
            with contextlib.suppress(IndexError):
                return self._queue.take()
            self._queue.wait(self._heartbeat_due - time.monotonic())

    def _perform_tasks(self) -> None:
        for task in tuple(self._tasks):
            with contextlib.suppress(Exception):  # the next call repeats it
                task()

    def _perform_batch(self, batch: Batch) -> None:
        try:
            for operation in batch.operations:
                if batch.cancelled:
                    break
                batch.answers.append(self._perform(operation))
                self._publish_if_due()  # a long batch must not delay it
        except Exception as error:
            batch.error = error
        batch.done.release()

    def _publish_if_due(self) -> None:
        if self._heartbeat_due <= time.monotonic():
            self._heartbeat_due = time.monotonic() + self.period
            if self.same_rank:
                return  # the status is that of the other process
            with contextlib.suppress(Exception):
                if self._store is None:
                    self._perform(_WORLD_NAME)  # opens the listener, for the status
                if self.listener is not None:
                    self.listener.drain()
                self._perform(Raw("set", (status_key(self._rank), self._status().pack())))
                self._answered = self.answered_seconds(), time.monotonic()

    def _status(self) -> RankStatus:
        self._heartbeats += 1
        pending = tuple(wait for pending in tuple(self._pending.values()) for wait in pending)
        return RankStatus(
            self._rank,
            self._heartbeats,
            "; ".join(tuple(self._activities.values())),
            pending[: timing.LIMITS.statuses],
            () if self._reason else self._run_on_heartbeat(),
            self._reason,
            () if self.listener is None else (self.listener.host, self.listener.port),
            time.time(),
        )

    def _run_on_heartbeat(self) -> tuple[RunningCollective, ...]:
        """The running collectives. An error of ``on_heartbeat`` must not stop the heartbeats; the first is logged."""
        try:
            return self.on_heartbeat(self._perform)
        except WorldError:
            return ()
        except Exception:
            if not self._warned:
                self._warned = True
                warn_from_store_thread(
                    f"this rank could not look for stuck collectives and lost ranks: {traceback.format_exc()}"
                )
            return ()

    def _leave(self) -> None:
        """Publish the reason for the end. The last rank to leave deletes the keys of this world."""
        with contextlib.suppress(Exception):
            self._perform_tasks()
            if self._heartbeats and not self.same_rank:
                self._perform(Raw("set", (status_key(self._rank), self._status().pack())))
            for key, value in self.until_end.items():
                if self._perform(Read(key)) == value.encode():
                    self._perform(Delete((key,)))
            if self._name and self._store is not None and leave_world(self._torch_store, self._name):
                keys = [key(rank) for rank in range(self._world_size) for key in (status_key, process_key, meshes_key)]
                self.board.perform(self._store, Delete(tuple(keys)))

    def _perform(self, operation: Operation) -> Any:
        """Perform an operation. If that fails and it can be repeated, perform it once more on a new connection."""
        again = can_be_repeated(operation)
        while True:
            self._operation_start = time.monotonic()
            try:
                if self._store is None:
                    self._connect()
                if operation is _WORLD_NAME:
                    return current_world(self._torch_store)
                return self.board.perform(self._store, operation)
            except RuntimeError as error:
                if isinstance(error, PgmeshError):
                    raise
                self._store = None
                if not again:
                    raise self._store_error(str(error).splitlines()[0].rstrip(".")) from error
                again = False
            finally:
                self._operation_start = math.inf

    def _connect(self) -> None:
        """Open the connection, and enter the world."""
        store = underlying(self._torch_store)
        if isinstance(store, dist.TCPStore):
            try:  # torch's client would wait long for a server that is gone
                with self._reach(self._server or (store.host, store.port)) as connection:
                    host, port = self._opening = self._server = connection.getpeername()[:2]
                    if self.listener is None:
                        self.listener = Listener(connection.getsockname()[0])  # where the store's host can reach it
            except OSError as error:
                raise self._store_error(str(error)) from error
            try:
                limit = timedelta(seconds=timing.TIMING.late_answer)
                with ending_when_cut(port, timing.TIMING.store_silence):
                    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
            finally:
                self._opening = None
        self._name = self._name or enter_world(self._torch_store, self._left_worlds)
        prefixed = dist.PrefixStore(f"pgmesh.{self._name}", store)
        me = process_label()
        if not self._entered:
            before = prefixed.compare_set(process_key(self._rank), "", me).decode()
            if before != me and self._sends_heartbeats(prefixed):
                self.same_rank = before
            elif before != me:
                self.replaces_process = True
                prefixed.set(process_key(self._rank), me)
            self._entered = True
        elif not prefixed.check([process_key(self._rank)]):
            raise self._store_error("another store answers there now, without the keys of this world")
        self._store = prefixed
        if self._world_size > 1:
            self._heartbeat_due = min(self._heartbeat_due, time.monotonic() + self.period)

    def _sends_heartbeats(self, store: Any) -> bool:
        """True if the process that had this rank before still sends heartbeats. It may take two periods to know."""

        def status_of(rank: int) -> RankStatus | None:
            return RankStatus.unpack(rank, self.board.perform(store, Read(status_key(rank))))

        before = now = status_of(self._rank)
        if before is not None and self.has_ended(before, 0.0):
            return False
        ranks = {self._rank, *range(min(self._world_size, timing.LIMITS.statuses))}
        if any(status and status.exited for status in map(status_of, ranks)):
            return False  # ranks leave the world: the store serves another one
        for _ in range(round(2 * self.period / timing.TIMING.longest_pause)):  # a pause of the store adds no time
            if now != before:
                break
            time.sleep(timing.TIMING.longest_pause)
            now = status_of(self._rank)
        return now != before and now is not None and not now.exited

    def _reach(self, server: tuple[str, int]) -> socket.socket:
        """Connect to the server's port. If the network is cut later, try again until this process leaves the world."""
        while True:
            try:
                return socket.create_connection(server, 2.0)  # the kernel would try again at growing intervals
            except OSError as error:
                is_cut = isinstance(error, TimeoutError) or error.errno in _CUT
                if not is_cut or self._server is None or self._name in self._left_worlds:
                    raise
                time.sleep(0.2)

    def _store_error(self, reason: str) -> WorldError:
        return WorldError(f"the store at {self._address} failed: {reason}. {_AFTER_FAILURE}")


_WORLD_NAME = Raw("the name of the world", ())
"""Stands for reading the name of the world that is on the store now. That key lies outside the world's prefix."""
