"""This process's connection to the world's store, and its part in the world.

The connection is opened by the first operation, and opened again after it broke. To a ``TCPStore``, it is a connection
of pgmesh's own. Other stores are used through torch's object. A call into either may block, so only the store thread
performs operations.

How an operation reaches the store:

    perform                an operation of a caller
      _with_connection     opens the connection if there is none; after a failure there is none. Then once more, if the
                           operation can be repeated
        _connect           the first time, enters the world and claims this process's rank, which needs operations too
        _perform_on        the operation itself

``world_name.py`` uses torch's object for every store. A wait inside torch may hold it for long, so
``served_another_world`` reads the name of the world in a further thread.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pgmesh._util.listeners import refuses
from pgmesh._util.sockets import ending_when_cut
from pgmesh.errors import PgmeshError, WorldError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.listeners import Listeners
from pgmesh.rendezvous.operations import ABSENT, Board, Delete, Operation, can_be_repeated
from pgmesh.rendezvous.processes import Claim, claim_rank, meshes_key, process_key
from pgmesh.rendezvous.statuses import Statuses, status_key
from pgmesh.rendezvous.world_name import REPLACED, Entry, entered_worlds, leave_world, name_on

AFTER_FAILURE = "Connected groups continue to work. No group can be connected without the store."

_CUT = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
"""Errors of a network that is cut."""


def underlying(store: Any) -> Any:
    """The store inside any ``PrefixStore`` wrappers."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


class AnswerClock:
    """When the store answered this process. The store thread calls ``ask``, ``answer`` and ``end``; any thread reads.

    Args:
        period: seconds between two heartbeats of any rank.
    """

    def __init__(self, period: float) -> None:
        self._period = period
        self._asked = math.inf  # the start of the operation that runs; inf if none does
        self._answered = 0.0, time.monotonic()  # ``answered_seconds`` at the last answer, and its time

    def ask(self) -> None:
        """Begin an operation."""
        self._asked = time.monotonic()

    def answer(self) -> None:
        """End the operation with an answer."""
        self._answered = self.answered_seconds(), time.monotonic()
        self.end()

    def end(self) -> None:
        """End the operation, if it runs."""
        self._asked = math.inf

    @property
    def silent_seconds(self) -> float:
        """For how long the store has not answered the operation that runs; 0.0 or less if none runs."""
        return time.monotonic() - self._asked

    def seconds_without_answer(self, start: float) -> float:
        """Seconds since the store's last answer to this process, or since a later start."""
        return time.monotonic() - max(start, self._answered[1])

    def answered_seconds(self) -> float:
        """Time in which the store answered this process, the clock of other ranks' silence.

        Each interval between two answers counts for one heartbeat period at most. So a pause of the store, of this
        process or of the whole machine adds at most one period, and makes nobody seem lost.
        """
        seconds, last = self._answered
        return seconds + min(time.monotonic() - last, self._period)


class WorldStore:
    """The store of one world, as one rank reaches it.

    The store thread writes every field, except ``leaves``.

    Args:
        store: the world's store.
        address: the store's host and port, for messages.
        rank: this process's rank in the world.
        world_size: the number of ranks.
        entered: the names of the worlds that this process has been in. The name of this world is added.
    """

    board = Board()

    def __init__(self, store: Any, address: str, rank: int, world_size: int, entered: set[str] | None = None) -> None:
        self._torch_store, self.address, self.rank, self.world_size = store, address, rank, world_size
        self._entry = Entry(entered_worlds if entered is None else entered)
        self.period = timing.heartbeat_period(world_size)  # of every rank
        self._connection: Any = None  # with the world's key prefix; None before the first operation and after a failure
        self._name = ""  # of the world
        self.claim, self._has_claimed = Claim(), False  # the claim is complete after the first operation
        self.leaves = False  # this process leaves the world, and connects no more over a cut network
        self._server: tuple[str, int] | None = None  # numeric address of the store, once it has answered
        # The server while torch's client connects to it, which takes seconds if the server ends meanwhile. Callers then
        # ask the port themselves. A killed store closes its port last, so this is common.
        self._opening: tuple[str, int] | None = None
        self.clock = AnswerClock(self.period)
        self.listeners = Listeners(self.period)

    # -- called by any thread -------------------------------------------------------------------------------------

    def is_gone(self) -> bool:
        """True if the server's port is closed while this process connects to it."""
        return (server := self._opening) is not None and refuses(server)

    def error(self, reason: str) -> WorldError:
        return WorldError(f"the store at {self.address} failed: {reason}. {AFTER_FAILURE}")

    def served_another_world(self) -> bool:
        """True if another world was on the store before this one, or is there now; False if that is not known.

        The name is read in a thread of its own, with a timeout, since a wait inside torch may hold its client for long.
        """
        if not self._name:
            return False
        if self._name.endswith(REPLACED):
            return True
        names = [self._name]

        def read() -> None:
            with contextlib.suppress(RuntimeError, AttributeError):  # the store failed, or was closed meanwhile
                names[0] = name_on(self._torch_store)

        thread = threading.Thread(target=read, name="pgmesh-world-name", daemon=True)
        thread.start()
        thread.join(1.0)
        return names[0] not in (self._name, ABSENT)

    # -- called by the store thread -------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if a connection is open: no operation has failed since it was opened."""
        return self._connection is not None

    def perform(self, operation: Operation) -> Any:
        """Perform an operation. If that fails and it can be repeated, perform it once more on a new connection."""
        (answer,) = self._with_connection(
            lambda: self._perform_on(self._connection, operation), again=can_be_repeated(operation)
        )
        return answer

    def _perform_on(self, connection: Any, *operations: Operation) -> list[Any]:
        answers = []
        for operation in operations:
            self.clock.ask()
            answers.append(self.board.perform(connection, operation))
            self.clock.answer()
        return answers

    def open(self) -> None:
        """Open the connection and the listener, unless that is done. The first time claims this process's rank."""
        self._with_connection(lambda: None, again=True)

    def _with_connection(self, perform: Callable[[], Any], *, again: bool) -> Any:
        """Call a function that uses the connection, which is opened if necessary.

        Args:
            again: after a failure, call it once more on a new connection.
        """
        while True:
            self.clock.ask()
            try:
                if self._connection is None:
                    self._connection = self._connect()
                return perform()
            except (RuntimeError, OSError) as error:
                if isinstance(error, PgmeshError):
                    raise
                self._connection = None
                if not again:
                    reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
                    raise self.error(reason) from error
                again = False
            finally:
                self.clock.end()

    def _connect(self) -> Any:
        """Open a connection. The first time, enter the world and claim this process's rank."""
        store = underlying(self._torch_store)
        if isinstance(store, dist.TCPStore):
            store = self._connect_tcp(store)
        if not self._name:
            self._name = self._entry.enter(self._torch_store)
        connection = dist.PrefixStore(f"pgmesh.{self._name}", store)
        if not self._has_claimed:
            statuses = Statuses(2 * self.period, self.clock.answered_seconds, self.listeners.has_ended)
            run = functools.partial(self._perform_on, connection)
            claim_rank(run, self.rank, self.world_size, statuses, self.claim)
            self._has_claimed = True
        elif not connection.check([process_key(self.rank)]):
            raise self.error("another store answers there now, without the keys of this world")
        return connection

    def _connect_tcp(self, store: Any) -> Any:
        """Open another connection to the server of a store, and the listener at this end of it."""
        try:  # torch's client would wait long for a server that is gone
            with self._reach(self._server or (store.host, store.port)) as connection:
                here, self._server = connection.getsockname()[0], connection.getpeername()[:2]
        except OSError as error:
            raise self.error(str(error)) from error
        self.listeners.open(here)  # where the store's host can reach it
        host, port = self._opening = self._server
        try:
            limit = timedelta(seconds=timing.TIMING.late_answer)
            with ending_when_cut(port, timing.TIMING.store_silence):
                return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        finally:
            self._opening = None

    def _reach(self, server: tuple[str, int]) -> socket.socket:
        """Connect to the server's port. If the network is cut later, try again until this process leaves the world."""
        while True:
            try:
                return socket.create_connection(server, 2.0)  # the kernel would try again at growing intervals
            except OSError as error:
                is_cut = isinstance(error, TimeoutError) or error.errno in _CUT
                if not is_cut or self._server is None or self.leaves:
                    raise
                time.sleep(0.2)

    def leave(self) -> None:
        """Leave the world. The last rank to leave deletes the keys of its ranks."""
        if self._connection is None:
            return
        if self._with_connection(lambda: leave_world(self._torch_store, self._name), again=False):
            keys = [key(rank) for rank in range(self.world_size) for key in (status_key, process_key, meshes_key)]
            self.perform(Delete(tuple(keys)))

    def close(self) -> None:
        """Close the connection and the listener. A mesh that outlives the world would keep them open."""
        self.listeners.close()
        self._torch_store = self._connection = None
