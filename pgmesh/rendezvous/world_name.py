"""The unique name of a world on its store.

The keys of this file have the prefix of the ``PrefixStore`` that torch and the user have put around the world's store.
So two such prefixes give two worlds. All other keys begin with "pgmesh.<name>" instead, outside that prefix: names are
unique.

A store may serve several worlds, one after another. Two counters say how many ranks have entered the world of a name,
and how many have left it. If both are equal, the last rank has left. ``WORLD_KEY`` has one of these values:

    value       what it means               a rank that enters              the last rank that leaves
    none        no world is on the store    sets a name                     -
    a name      the world of that name      counts itself, reads it again   sets ``OVER``, reads the count again
    ``OVER``    that world is ended         waits; after ``world_end`` it   puts the name back if the count has grown,
                by its last rank            sets a new name + ``REPLACED``  else deletes the key, before ``world_end``

A rank that reads another name after it has counted itself takes the count back, and enters the next world. A last rank
that pauses in ``OVER`` for longer than ``world_end`` does not delete the key: it may have the name of the next world.
The tests in ``tests/faults/test_world_identity.py`` let one rank act between any two operations of another.
"""

from __future__ import annotations

import math
import secrets
import time
from typing import Any

from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import ABSENT

WORLD_KEY = "pgmesh.world"
"""The key that holds the name of the world on this store."""

REPLACED = "+"
"""Last character of the name of a world that replaced an earlier one whose name was still on the store."""

OVER = "over"
"""Value of ``WORLD_KEY`` while the last rank of a world deletes it. Ranks that enter wait for up to ``world_end``."""

entered_worlds: set[str] = set()
"""The names of the worlds that this process is or was in. It enters none of them a second time."""


def _value(store: Any, key: str) -> str:
    """The value of a key; ``ABSENT`` without one. ``add(key, 0)`` would create a counter."""
    return str(store.compare_set(key, ABSENT, ABSENT).decode())


def _entered_key(name: str) -> str:
    """The counter of the ranks that have entered a world."""
    return f"{WORLD_KEY}.{name}.entered"


def _left_key(name: str) -> str:
    """The counter of the ranks that have left a world."""
    return f"{WORLD_KEY}.{name}.left"


def name_on(store: Any) -> str:
    """The name of the world that is on the store now; ``ABSENT`` without one."""
    return _value(store, WORLD_KEY)


class Entry:
    """The entry of this process into the world on a store. If ``enter`` fails, the next call continues it.

    Args:
        entered: the names of the worlds that this process is or was in. The name of this world is added.
    """

    def __init__(self, entered: set[str]) -> None:
        self._entered = entered
        self._counted_in = ""  # the world that this process has counted itself in, not confirmed yet; "" for none

    def enter(self, store: Any) -> str:
        """Return the unique name of the world. The first rank that calls sets it.

        On an unused store, all ranks get one name. A process that was in an earlier world of the store never takes
        that world's name: it sets a new one, or takes the one that is there. A new process takes the name that it
        finds, also that of a world whose ranks were killed and have never left it.

        Args:
            store: the world's store, with its store prefix.
        """
        while True:
            name = self._counted_in = self._counted_in or self._count(store)
            if _compare_set_name(store, ABSENT, ABSENT) == name:
                self._entered.add(name)
                return name
            self._counted_in = ""
            if store.add(_entered_key(name), -1) <= 0:  # all ranks of that world have left meanwhile
                store.delete_key(_entered_key(name))

    def _count(self, store: Any) -> str:
        """Count this process in the world that is on the store, and return its name.

        If the answer is lost, the next call counts it again, and the name stays on the store. With a count that is too
        low, the name would be deleted too early.
        """
        while True:
            new = secrets.token_hex(4)
            name = _compare_set_name(store, "", new)
            if name != OVER and name not in self._entered:
                store.add(_entered_key(name), 1)
                return name
            # After ``OVER``, the rank that was deleting the name has died. If another rank is faster, its name stays.
            store.compare_set(WORLD_KEY, name, new + REPLACED)


def _compare_set_name(store: Any, before: str, new: str) -> str:
    """``compare_set`` of ``WORLD_KEY``, once its value is not ``OVER``, or has been for ``world_end``."""
    deadline = math.inf
    while (name := str(store.compare_set(WORLD_KEY, before, new).decode())) == OVER and time.monotonic() < deadline:
        deadline = min(deadline, time.monotonic() + timing.TIMING.world_end)
        time.sleep(0.005)
    return name


def leave_world(store: Any, name: str) -> bool:
    """Leave a world. The last rank to leave deletes the world's name and gets True.

    It deletes the name only if it has read after it set ``OVER`` that as many ranks have left as have entered.
    """
    count = str(store.add(_left_key(name), 1))
    if _value(store, _entered_key(name)) != count:
        return False
    in_time = time.monotonic() + timing.TIMING.world_end / 2
    over = store.compare_set(WORLD_KEY, name, OVER).decode() == OVER  # else another world has its name there
    # Before ``OVER``, a rank may have entered: it has counted itself. After that, ranks wait.
    if over and _value(store, _entered_key(name)) != count:
        store.compare_set(WORLD_KEY, OVER, name)
        return False
    store.delete_key(_entered_key(name))
    store.delete_key(_left_key(name))
    # After ``world_end``, others take this rank for dead and replace ``OVER`` by the name of the next world. The store
    # has half of that time to delete the key.
    if over and time.monotonic() < in_time:
        store.delete_key(WORLD_KEY)
    return True
