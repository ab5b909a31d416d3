"""This process's connection to the world's store, and its part in the world.

The connection is opened by the first operation, and opened again after it broke. To a ``TCPStore``, it is a connection
of pgmesh's own. Other stores are used through torch's object. A call into either may block, so only the store thread
performs operations.

How an operation reaches the store:

    perform         performs an operation; twice if it fails and can be repeated
      open          returns the connection. If there is none, as after a failure, it tries twice to open one: so four
                    times for an operation that can be repeated
        _connect    reaches the server. The first time, enters the world and claims this process's rank

``world_name.py`` uses torch's object for every store. A wait inside torch may hold it for long, so
``served_another_world`` reads the name of the world in a further thread.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from pgmesh.errors import PgmeshError, WorldError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.answer_clock import AnswerClock
from pgmesh.rendezvous.listeners import Listeners
from pgmesh.rendezvous.operations import ABSENT, Board, Delete, Operation, Raw, can_be_repeated
from pgmesh.rendezvous.processes import Claim, claim_rank, meshes_key, process_key
from pgmesh.rendezvous.server import Server
from pgmesh.rendezvous.statuses import Statuses, status_key
from pgmesh.rendezvous.world_name import REPLACED, Entry, entered_worlds, leave_world, name_on

AFTER_FAILURE = "Connected groups continue to work. No group can be connected without the store."


def underlying(store: Any) -> Any:
    """The store inside any ``PrefixStore`` wrappers."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


class WorldStore:
    """The store of one world, as one rank reaches it.

    The store thread writes every field, but for ``server.leaving``.

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
        self.server = Server()  # of a ``TCPStore``
        self.clock = AnswerClock(self.period)
        self.listeners = Listeners(self.period)

    # -- called by any thread -------------------------------------------------------------------------------------

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
        (answer,) = self._attempt(
            lambda: self._perform_on(self.open(), operation), attempts=2 if can_be_repeated(operation) else 1
        )
        return answer

    def _perform_on(self, connection: Any, *operations: Operation) -> list[Any]:
        return [self.clock.ask(self.board.perform, connection, operation) for operation in operations]

    def open(self) -> Any:
        """Return the connection. If there is none, open one, and the listener, in two attempts."""
        if self._connection is None:
            self._connection = self._attempt(self._connect, attempts=2)
        return self._connection

    def _attempt(self, function: Callable[[], Any], attempts: int) -> Any:
        """Call a function until it succeeds. A failure of the store closes the connection."""
        while True:
            try:
                return function()
            except PgmeshError:
                raise
            except (RuntimeError, OSError) as error:
                self._connection = None
                attempts -= 1
                if not attempts:
                    reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
                    raise self.error(reason) from error

    def _connect(self) -> Any:
        """Reach the server. The first time, enter the world and claim this process's rank; later, check the world."""
        store = underlying(self._torch_store)
        if isinstance(store, dist.TCPStore):
            try:
                store = self.clock.ask(self.server.connect, store)
            except OSError as error:  # another attempt would fail too
                raise self.error(str(error)) from error
            self.listeners.open(self.server.here)  # where the store's host can reach it
        if not self._name:
            self._name = self.clock.ask(self._entry.enter, self._torch_store)
        connection = dist.PrefixStore(f"pgmesh.{self._name}", store)
        if not self._has_claimed:
            statuses = Statuses(2 * self.period, self.clock.answered_seconds, self.listeners.has_ended)
            run = functools.partial(self._perform_on, connection)
            claim_rank(run, self.rank, self.world_size, statuses, self.claim)
            self._has_claimed = True
        elif not self.clock.ask(connection.check, [process_key(self.rank)]):
            raise self.error("another store answers there now, without the keys of this world")
        return connection

    def leave(self) -> None:
        """Leave the world. The last rank to leave deletes its keys."""
        if self._connection is None:
            return
        if self._attempt(lambda: self.clock.ask(leave_world, self._torch_store, self._name), attempts=1):
            for key in self._keys():
                self.perform(Delete((key,)))  # one by one: ``stop`` waits half a second for each answer

    def _keys(self) -> list[str]:
        """The keys of the world. If the store cannot list them, as with torch 2.9, those that each rank has."""
        try:
            return list(self.perform(Raw("list_keys", ())))
        except (WorldError, AttributeError):
            return [key(rank) for rank in range(self.world_size) for key in (status_key, process_key, meshes_key)]

    def close(self) -> None:
        """Close the connection and the listener. A mesh that outlives the world would keep them open."""
        self.listeners.close()
        self._torch_store = self._connection = None
