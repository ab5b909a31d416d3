"""The unique name of a world on its store. All keys of that world begin with it.

A store may serve several worlds, one after another. The first rank of a world that asks sets its name, and the last
rank that leaves deletes it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from typing import Any

from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import ABSENT

WORLD_KEY = "pgmesh.world"
"""The key that holds the name of the world on this store."""

REPLACED = "+"
"""Last character of the name of a world that replaced an earlier one whose name was still on the store."""

OVER = "over"
"""Value of ``WORLD_KEY`` while the last rank of a world deletes it. Other ranks wait for up to ``world_end``."""

left_worlds: set[str] = set()
"""The names of the worlds that this process has left."""


def current_world(store: Any) -> str:
    """The name of the world that is on the store now."""
    return str(store.compare_set(WORLD_KEY, ABSENT, ABSENT).decode())


def enter_world(store: Any, left_worlds: Collection[str]) -> str:
    """Return the unique name of the world on a store. The first rank that calls sets it.

    On an unused store, all ranks get one name. On a used store, processes that were in its earlier worlds agree on a
    new name. A new process gets that name only if it calls after one of them, or after all ranks of those worlds have
    left.

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
    while (now := current_world(store)) == OVER and time.monotonic() < deadline:
        time.sleep(0.005)  # the last rank looks whether another one has entered
    # Otherwise all ranks of that world have left meanwhile.
    return str(name) if now == name else enter_world(store, left_worlds)


def leave_world(store: Any, name: str) -> bool:
    """Leave a world. The last rank to leave deletes the world's name and gets True."""
    entered, left = f"{WORLD_KEY}.{name}.entered", f"{WORLD_KEY}.{name}.left"
    count = str(store.add(left, 1))
    if store.compare_set(entered, ABSENT, ABSENT).decode() != count:  # a read; add(entered, 0) would create it
        return False
    over = store.compare_set(WORLD_KEY, name, OVER).decode() == OVER
    if over and store.compare_set(entered, ABSENT, ABSENT).decode() != count:  # a rank has just entered
        store.compare_set(WORLD_KEY, OVER, name)
        return False
    for key in (entered, left, *([WORLD_KEY] if over else [])):
        store.delete_key(key)
    return True
