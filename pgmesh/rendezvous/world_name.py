"""The unique name of a world on its store. All keys of that world begin with it.

A store may serve several worlds, one after another. ``WORLD_KEY`` has one of these values:

- none: no world is on the store. The first rank that enters sets a name.
- a name: the ranks of that world enter. Two counters beside it say how many have entered, and how many have left.
- a name that ends in ``REPLACED``: the world before it left its name behind.
- ``OVER``: the last rank to leave a world is about to delete its name. Ranks that enter wait for that.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
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


def name_on(store: Any) -> str:
    """The name of the world that is on the store now; ``ABSENT`` without one."""
    return _value(store, WORLD_KEY)


def enter_world(store: Any, entered: Collection[str]) -> str:
    """Return the unique name of the world on a store. The first rank that calls sets it.

    On an unused store, all ranks get one name. A process that was in an earlier world of the store never takes that
    world's name: it sets a new one, or takes the one that is there. A new process takes the name that it finds, even
    an old one while ranks of that world have not left.

    Args:
        store: the world's store, with the prefix of the world.
        entered: the names of the worlds that this process is or was in.
    """
    while True:
        deadline = time.monotonic() + timing.TIMING.world_end
        name = _find_or_set_name(store, entered, deadline)
        store.add(f"{WORLD_KEY}.{name}.entered", 1)
        if _wait_while_over(lambda: name_on(store), deadline) == name:
            return name
        # All ranks of that world have left meanwhile.


def _find_or_set_name(store: Any, entered: Collection[str], deadline: float) -> str:
    """The name on the store; a new one if there is none, if this process is or was in the world of that name, or if
    the rank that was deleting it has died.
    """
    new = secrets.token_hex(4)
    while True:
        name = _wait_while_over(lambda: str(store.compare_set(WORLD_KEY, "", new).decode()), deadline)
        if name != OVER and name not in entered:
            return name
        if store.compare_set(WORLD_KEY, name, new + REPLACED).decode() == new + REPLACED:
            return new + REPLACED
        # Another rank was faster, or the key was deleted.


def _wait_while_over(read: Callable[[], str], deadline: float) -> str:
    """Read the value of ``WORLD_KEY`` until it is not ``OVER``, or until the deadline."""
    while (name := read()) == OVER and time.monotonic() < deadline:
        time.sleep(0.005)
    return name


def leave_world(store: Any, name: str) -> bool:
    """Leave a world. The last rank to leave deletes the world's name and gets True."""
    entered, left = f"{WORLD_KEY}.{name}.entered", f"{WORLD_KEY}.{name}.left"
    count = str(store.add(left, 1))
    if _value(store, entered) != count:
        return False
    replaced_after = time.monotonic() + timing.TIMING.world_end  # others take this rank for dead, and replace ``OVER``
    over = store.compare_set(WORLD_KEY, name, OVER).decode() == OVER
    if over and _value(store, entered) != count:  # a rank has just entered
        store.compare_set(WORLD_KEY, OVER, name)
        return False
    for key in (entered, left):
        store.delete_key(key)
    if over and time.monotonic() < replaced_after:  # later, the key may have the name of the next world
        store.delete_key(WORLD_KEY)
    return True
