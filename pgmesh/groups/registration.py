"""The numbers of a world's meshes, and their registration in its store: the comparison of their fingerprints.

What the numbers are for is in ``identity.py``.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable

from pgmesh.errors import MismatchError
from pgmesh.groups.identity import MeshIdentity
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.comparing import check_mesh, register_mesh
from pgmesh.rendezvous.operations import CompareSet, Operation, Raw, Read, Run
from pgmesh.rendezvous.processes import Claim, meshes_key, process_label, without_token
from pgmesh.rendezvous.records import Decision, pack, unpack
from pgmesh.rendezvous.store_thread import StoreThread


class Registration:
    """The numbers of the meshes of this process in one world, and which of them are registered.

    Args:
        rank: this process's rank.
        store_thread: returns the store thread.
    """

    def __init__(self, rank: int, store_thread: Callable[[], StoreThread]) -> None:
        self._rank, self._store_thread = rank, store_thread
        self._lock = threading.Lock()  # held by the thread that registers a mesh; the others wait for it
        self._rejoined = set[str]()  # the meshes that the predecessor was in, such as "pgmesh/train.0/"
        # By the prefix of the names of meshes, such as "pgmesh/train":
        self._next: defaultdict[str, int] = defaultdict(int)  # the next local number
        self._offsets: dict[str, int] = {}  # the shared minus the local number of each mesh of the name
        self._published: dict[str, int] = {}  # the last shared number that any process of this rank has published

    def count(self, identity: MeshIdentity, *, is_used: bool = True) -> None:
        """Give a mesh its local number, unless it has one for good. The caller holds ``world.registering``.

        Args:
            is_used: reserve the number. That of an unpickled mesh is reserved at its first use, so that ranks that load
                a mesh without using it stay in step with those that load none.
        """
        if identity.counted:
            return
        identity.number = max(self._next[identity.prefix], identity.pickled_number or 0)
        if is_used:
            identity.counted = True
            self._next[identity.prefix] = identity.number + 1

    def store_key(self, identity: MeshIdentity, path: str, seconds: float) -> str:
        """Prefix of the store keys of a group. The first call registers the mesh.

        Raises:
            MismatchError: another rank has a different mesh of this name.
            WorldError: the store does not answer, or has not answered another thread that registers a mesh.
        """
        if not identity.registered:  # a backend asks for a key with each value that it reads
            self.register(identity, functools.partial(self._store_thread().run, seconds=seconds), seconds=seconds)
        return f"{identity.key}/{path}"

    def register(self, identity: MeshIdentity, run: Run, *, rejoin: bool = False, seconds: float = 0.0) -> None:
        """Find the shared number, publish the fingerprint, and compare it with the first one; once per mesh.

        Args:
            run: performs operations on the store.
            rejoin: in a process that replaces another one, this is the last mesh of the name that its predecessor was
                in. By default it is a later one.
            seconds: the longest wait for another thread that registers a mesh. The store thread must not wait.

        Raises:
            MismatchError: the fingerprints differ, or another process with this rank sends heartbeats.
            WorldError: the store does not answer, or has not answered another thread that registers a mesh.
        """
        if identity.registered:
            return
        thread = self._store_thread()
        if not self._lock.acquire(timeout=seconds):
            raise thread.store.error(f"no answer for {seconds:g} s")
        try:
            if not identity.registered:
                self._register(identity, thread, run, rejoin=rejoin)
        finally:
            self._lock.release()

    def _register(self, identity: MeshIdentity, thread: StoreThread, run: Run, *, rejoin: bool) -> None:
        self._set_shared_number(identity, thread.store.claim, run, rejoin=rejoin)
        if thread.store.claim.same_rank:
            _refuse(identity, thread, run)
        *_, first_seen = run(self._publish(identity), *register_mesh(identity.key, identity.fingerprint))
        check_mesh(run, identity.key, identity.fingerprint, first_seen)
        identity.registered = True

    def _set_shared_number(self, identity: MeshIdentity, claim: Claim, run: Run, *, rejoin: bool) -> None:
        if not self._offsets:  # no mesh was registered before
            (text,) = run(Read(meshes_key(self._rank)))  # the first operation, which completes the claim
            self._published = _unpack(text) if claim.replaces_process else {}
        if identity.prefix not in self._offsets:
            shared = self._find_shared_number(identity, run, rejoin) if claim.replaces_process else identity.number
            self._offsets[identity.prefix] = shared - identity.number
            self._rejoined |= {identity.group_name("")} if rejoin and claim.replaces_process else set()
        identity.rejoined = identity.group_name("") in self._rejoined  # also a second object with this number
        identity.shared_number = identity.number + self._offsets[identity.prefix]

    def _find_shared_number(self, identity: MeshIdentity, run: Run, rejoin: bool) -> int:
        """The shared number of the first mesh of a name that a replacement process registers.

        the mesh                                        its shared number
        rejoins                                         the last one of the predecessor
        rejoins, but the predecessor published none     the last one of the other ranks, or else the local number
        does not rejoin                                 the last one of the predecessor + 1 + the local number; that
                                                        of the other ranks if it is higher: they may have created
                                                        several
        """
        last = self._published.get(identity.prefix)
        if rejoin and last is not None:
            return last
        others = self._of_others(identity, run)
        if rejoin:
            return max(others, default=identity.number)
        return max([identity.number if last is None else last + 1 + identity.number, *others])

    def _of_others(self, identity: MeshIdentity, run: Run) -> list[int]:
        """The last shared numbers of this name that other ranks of the mesh have published."""
        others = [rank for rank in identity.layout.ranks_in_order() if rank != self._rank][: timing.LIMITS.statuses]
        published = map(_unpack, run(*(Read(meshes_key(rank)) for rank in others)) if others else ())
        return [numbers[identity.prefix] for numbers in published if identity.prefix in numbers]

    def _publish(self, identity: MeshIdentity) -> Operation:
        """The store operation that publishes this rank's last shared numbers, among them that of this mesh."""
        last = self._published.pop(identity.prefix, 0)
        self._published[identity.prefix] = max(identity.shared_number or 0, last)  # at the end: the oldest are cut off
        latest = [*self._published.items()][-timing.LIMITS.published_names :]
        return Raw("set", (meshes_key(self._rank), pack(numbers=dict(latest))))


def _refuse(identity: MeshIdentity, thread: StoreThread, run: Run) -> None:
    """Publish, until this process ends, that another process has this rank too, and raise that error."""
    both = " and ".join(map(without_token, (thread.store.claim.same_rank, process_label())))
    text = f"{identity.label}: both {both} connect as rank {identity.rank}. Start each rank once."
    thread.until_end[identity.refusal_key] = Decision("duplicate", text).pack()
    run(CompareSet(identity.refusal_key, thread.until_end[identity.refusal_key]))
    raise MismatchError(text)


def _unpack(text: bytes | None) -> dict[str, int]:
    """The last shared numbers that a rank has published."""
    record = unpack(text or b"", numbers=dict) or {"numbers": {}}
    return {prefix: number for prefix, number in record["numbers"].items() if type(number) is int}
