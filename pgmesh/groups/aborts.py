"""Aborts of meshes: one rank publishes its abort, and the others find it at their next heartbeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pgmesh.groups import background
from pgmesh.rendezvous.operations import Add, CompareSet, Raw, Read, Run
from pgmesh.rendezvous.records import Decision

ABORTS_KEY = "pgmesh/aborts"
"""Store key with the number of aborts of meshes in this world."""


def publish_abort(run: Run, key: str, text: str) -> str:
    """Publish that a mesh is aborted. All ranks of the world look for it at their next heartbeat.

    Args:
        run: performs operations on the store.
        key: store key under which the ranks of the mesh find it.
        text: the error message.

    Returns:
        The text of the rank that was first.
    """
    mine = Decision("aborted", text)
    first = Decision.unpack(key, run(CompareSet(key, mine.pack()))[0])
    if first.kind != "aborted":  # a mismatch, which ends no connected mesh: overwrite it
        run(Raw("set", (key, mine.pack())))
        first = mine
    run(Add(ABORTS_KEY))
    return first.text


class Aborts:
    """The aborts that this process has seen: how many there were, and the keys of its registered meshes then."""

    def __init__(self) -> None:
        self._seen: tuple[bytes | None, list[str]] = None, []

    def look(self, run: Run, meshes: Sequence[Any]) -> None:
        """End those meshes that another rank has aborted.

        Args:
            run: performs operations on the store.
            meshes: the registered meshes.
        """
        count, keys = run(Read(ABORTS_KEY))[0], [mesh.identity.key for mesh in meshes]
        if count is None or (count, keys) == self._seen:
            return
        for mesh in meshes:
            key = mesh.identity.refusal_key
            (text,) = run(Read(key))
            if text is not None and (refusal := Decision.unpack(key, text)).kind == "aborted":
                background.in_background(mesh.end_aborted, refusal.text)  # this thread sends heartbeats
        self._seen = count, keys  # only now: if the store fails, the next heartbeat looks again
