"""What ends every wait of a group before its deadline: an abort of the mesh, or a mismatch that a rank has found."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pgmesh.rendezvous.operations import Read, Run
from pgmesh.rendezvous.records import Decision


class RefusalKeys(NamedTuple):
    """The store keys under which a rank publishes a refusal."""

    group: str  # a mismatch of the group
    mesh: str  # a mismatch or an abort of the mesh


class Refusals:
    """The refusals of one group.

    Args:
        keys: returns their store keys, once the mesh is registered.
    """

    def __init__(self, keys: Callable[[], RefusalKeys]) -> None:
        self.keys = keys
        self.known: Decision | None = None  # the one that has ended a wait of this rank

    def read(self, run: Run) -> Decision | None:
        """The refusal that holds; None for none. An abort holds before a mismatch, since it ends the mesh.

        Args:
            run: performs operations on the store.
        """
        keys = self.keys()
        published = [Decision.unpack(key, text) for key, text in zip(keys, run(*map(Read, keys))) if text is not None]
        found = [*filter(None, [self.known]), *published]
        return max(found, key=lambda refusal: refusal.kind == "aborted", default=None)

    def check(self, run: Run) -> None:
        """Raise the error of the refusal that holds, if there is one."""
        refusal = self.read(run)
        if refusal is not None and (error := refusal.error()):
            self.known = refusal
            raise error
