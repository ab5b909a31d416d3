"""The numbers of this process's meshes in one world, by the prefix of their names, such as "pgmesh/train".

What they are for is in ``identity.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Operation, Raw, Read
from pgmesh.rendezvous.processes import meshes_key
from pgmesh.rendezvous.records import pack, unpack


class MeshNumbers:
    """The local and the shared numbers of meshes.

    Args:
        rank: this process's rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._next_local: defaultdict[str, int] = defaultdict(int)
        self._first_shared: dict[str, int] = {}  # of this process's first mesh
        self._last_shared: dict[str, int] = {}  # of this rank's last mesh, in any process; the latest is at the end
        self._of_predecessor: dict[str, int] | None = None  # its last shared numbers; None until they are read
        self._replaces_process = False

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

    def read_predecessor(self, run: Callable[..., list[Any]], *, replaces_process: Callable[[], bool]) -> None:
        """Read the last shared numbers of the process that had this rank before, once.

        Args:
            run: performs operations on the store.
            replaces_process: returns whether there was such a process. It is known after an operation.
        """
        if self._of_predecessor is None:
            (text,) = run(Read(meshes_key(self._rank)))
            self._replaces_process = replaces_process()
            self._of_predecessor = _unpack(text) if self._replaces_process else {}
            self._last_shared.update(self._of_predecessor)  # for the process that replaces this one

    def shared(self, prefix: str, local: int, others: Sequence[int], run: Callable[..., list[Any]]) -> int:
        """The shared number of a mesh.

        The others may have closed the mesh that the predecessor was in and created the next one, and more than once.

        Args:
            others: the other ranks of the mesh.
            run: performs operations on the store.
        """
        if prefix not in self._first_shared:
            first, before = 0, self._of_predecessor or {}
            if before:
                texts = run(*(Read(meshes_key(rank)) for rank in others[: timing.LIMITS.statuses])) if others else []
                first = max([before.get(prefix, -1) + 1, *(_unpack(text).get(prefix, 0) for text in texts)])
            self._first_shared[prefix] = first
        return self._first_shared[prefix] + local

    def rejoin(self, prefix: str) -> bool:
        """Let this process's first mesh of a name be the one that its predecessor was in. False if it is not."""
        if prefix in self._first_shared:
            return False
        self._first_shared[prefix] = (self._of_predecessor or {}).get(prefix, 0)
        return self._replaces_process

    def publish(self, prefix: str, shared: int) -> Operation:
        """The store operation that publishes this rank's last shared numbers, among them this one."""
        self._last_shared[prefix] = max(shared, self._last_shared.pop(prefix, 0))  # at the end
        latest = [*self._last_shared.items()][-timing.LIMITS.published_names :]
        return Raw("set", (meshes_key(self._rank), pack(numbers=dict(latest))))


def _unpack(text: bytes | None) -> dict[str, int]:
    """The last shared numbers that a rank has published."""
    record = unpack(text or b"", numbers=dict) or {"numbers": {}}
    return {prefix: number for prefix, number in record["numbers"].items() if type(number) is int}
