"""The numbers of this process's meshes in one world, by the prefix of their names, such as "pgmesh/train".

What they are for is in ``identity.py``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Operation, Raw, Read
from pgmesh.rendezvous.processes import meshes_key
from pgmesh.rendezvous.records import pack, unpack
from pgmesh.rendezvous.world_store import WorldStore


class MeshNumbers:
    """The local and the shared numbers of meshes.

    Args:
        rank: this process's rank.
        registering: held by the thread that finds and publishes the shared number of a mesh. The others wait for it.
        rejoined: the meshes, by prefix and shared number, that this process registered as those of its predecessor.
    """

    def __init__(self, rank: int) -> None:
        self.registering = threading.Lock()
        self.rejoined: set[tuple[str, int]] = set()
        self._rank = rank
        self._next_local: defaultdict[str, int] = defaultdict(int)
        self._offsets: dict[str, int] = {}  # a mesh's shared number minus its local number
        self._last_shared: dict[str, int] = {}  # of this rank's last mesh, in any process; the latest is at the end
        self._of_predecessor: dict[str, int] | None = None  # its last shared numbers; None until they are read

    def local(self, prefix: str, at_least: int, *, counts: bool) -> int:
        """The local number of a new mesh.

        Args:
            at_least: the number that an unpickled mesh has elsewhere.
            counts: the next mesh gets another number.
        """
        number = max(self._next_local[prefix], at_least)
        if counts:
            self._next_local[prefix] = number + 1
        return number

    def shared(
        self,
        prefix: str,
        local: int,
        others: Sequence[int],
        run: Callable[..., list[Any]],
        store: WorldStore,
        *,
        rejoin: bool,
    ) -> int:
        """The shared number of a mesh. The first mesh of a name fixes how much it differs from the local number.

        Args:
            others: the other ranks of the mesh.
            run: performs operations on the store.
            store: knows after an operation whether there was a predecessor.
            rejoin: the first mesh of a name that this process registers is the last one of its predecessor.
        """
        if self._of_predecessor is None:
            (text,) = run(Read(meshes_key(self._rank)))
            self._of_predecessor = _unpack(text) if store.replaces_process else {}
            self._last_shared.update(self._of_predecessor)  # for the process that replaces this one
        if prefix not in self._offsets:
            if rejoin:
                first = self._of_predecessor.get(prefix, local)
                self._offsets[prefix] = first - local
                if store.replaces_process:
                    self.rejoined.add((prefix, first))
            else:
                self._offsets[prefix] = self._after_predecessor(prefix, others, run)
        return self._offsets[prefix] + local

    def _after_predecessor(self, prefix: str, others: Sequence[int], run: Callable[..., list[Any]]) -> int:
        """The shared number after the last one of the predecessor; 0 without a predecessor.

        The others may have closed the mesh that the predecessor was in and created the next one, and more than once.
        """
        if not self._of_predecessor:
            return 0
        texts = run(*(Read(meshes_key(rank)) for rank in others[: timing.LIMITS.statuses])) if others else []
        last = self._of_predecessor.get(prefix, -1)
        return max([last + 1, *(_unpack(text).get(prefix, 0) for text in texts)])

    def publish(self, prefix: str, shared: int) -> Operation:
        """The store operation that publishes this rank's last shared numbers, among them this one."""
        self._last_shared[prefix] = max(shared, self._last_shared.pop(prefix, 0))  # at the end
        latest = [*self._last_shared.items()][-timing.LIMITS.published_names :]
        return Raw("set", (meshes_key(self._rank), pack(numbers=dict(latest))))


def _unpack(text: bytes | None) -> dict[str, int]:
    """The last shared numbers that a rank has published."""
    record = unpack(text or b"", numbers=dict) or {"numbers": {}}
    return {prefix: number for prefix, number in record["numbers"].items() if type(number) is int}
