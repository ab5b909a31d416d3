"""The attempts to connect a mesh's groups on this rank, by the path of the group.

A path identifies a group in its mesh. If the group breaks, ``GroupCache`` creates another one of the same path, and the
numbers of its attempts go on. If the group is released or destroyed, the next one has another path.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pgmesh.errors import WorldError
from pgmesh.groups.identity import MeshIdentity
from pgmesh.groups.registry import Registry
from pgmesh.rendezvous.protocol import ConnectAttempt


@dataclass(eq=False)
class PathState:
    """The state of one path.

    Args:
        attempt: the last attempt, which knows the numbers of those before it; None before the first.
        connected: the attempt that connected the present group; None if it is not connected.
        broken: the number of the attempt that connected the last broken group. It is in the name of the present one.
        lock: held by the thread that connects the group.
    """

    attempt: ConnectAttempt | None = None
    connected: ConnectAttempt | None = None
    broken: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Attempts:
    """The states of a mesh's paths.

    Args:
        registry: gives access to the store.
        identity: the mesh.
    """

    def __init__(self, registry: Registry, identity: MeshIdentity) -> None:
        self._registry, self._identity = registry, identity
        self._states: dict[str, PathState] = {}

    def of(self, path: str) -> PathState:
        """The state of a path."""
        return self._states.setdefault(path, PathState())  # atomic: the caller may hold no lock

    @contextlib.contextmanager
    def connecting(self, paths: Iterable[str], deadline: float) -> Iterator[None]:
        """Let one thread at a time connect each of these groups.

        Raises:
            WorldError: another thread of this process has not finished before the deadline.
        """
        with contextlib.ExitStack() as stack:
            for path in sorted(set(paths)):
                lock = self.of(path).lock
                if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    label = self._identity.label
                    raise WorldError(f"{label}: another thread of this process still connects the same group.")
                stack.callback(lock.release)
            yield

    def forget(self, path: str) -> list[ConnectAttempt]:
        """Forget a path that no later group will have; return the attempt whose store keys are to be released."""
        state = self._states.pop(path, None)
        if state is None or state.attempt is None or state.attempt.decision is None:
            return []  # a running connect leaves an undecided one itself
        return [state.attempt]

    def forget_all(self) -> list[ConnectAttempt]:
        """Forget all paths, also of groups that were never created."""
        return [attempt for path in list(self._states) for attempt in self.forget(path)]

    def take_keys(self) -> list[str]:
        """Forget all paths; return the store keys of their attempts, which no other rank uses any more."""
        states, self._states = self._states, {}
        return [key for state in states.values() if state.attempt is not None for key in state.attempt.store_keys()]
