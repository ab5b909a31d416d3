"""One process group: created by its members alone, without waiting for any of them.

The group is built directly, not split off the world's communicator. Its backend connects when it is first used.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh.groups.backends import _DIRECT, backends_of
from pgmesh.options import GroupOptions
from pgmesh.rendezvous.polling_store import PollingStore
from pgmesh.rendezvous.protocol import Fingerprint


@dataclass(eq=False)
class GroupRecord:
    """A group that was made here, with what it takes to let it go."""

    group: dist.ProcessGroup
    words: str  # "group dp, tp of mesh 'actor'"
    call_site: str  # where it was asked for
    stores: Mapping[str, PollingStore] = field(default_factory=dict)  # what its backends read through
    keys: list[str] = field(default_factory=list)  # what we wrote for it
    by: Literal["us", "torch", "others"] = "us"
    ranks: tuple[int, ...] = ()
    card: Fingerprint | None = None  # what this rank means by it, where there is anybody to meet

    @property
    def name(self) -> str:
        """What torch knows it by."""
        return str(self.group.group_name)

    @property
    def gloo(self) -> PollingStore | None:
        """What Gloo reads through, where it is among the backends."""
        return self.stores.get("gloo")

    def stop(self) -> list[str]:
        """Let nobody wait for the group any more, and say which keys were written for it."""
        for store in self.stores.values():
            store.close()
        return [*self.keys, *itertools.chain.from_iterable(store.written for store in self.stores.values())]


class _Places(Mapping[int, int]):
    """Each rank's place in a group, as torch asks for it. The table is made when one is first looked up."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    @functools.cached_property
    def _table(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self._ranks)}

    def __getitem__(self, rank: int) -> int:
        return self._table[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


def build(
    name: str,
    ranks: Sequence[int],
    me: int,
    options: GroupOptions,
    store: Any,
    stores: Mapping[str, Any],
    description: str,
) -> Any:
    """A process group of these ranks that torch.distributed knows as its own.

    Args:
        store: the world's, which torch hands out as the group's.
        stores: what each backend reads through.
    """
    rank, size, backends = ranks.index(me), len(ranks), backends_of(options.backend)
    built: dict[str, Any] = {}
    slots = []
    for device, kind, backend in backends.slots:
        if backend not in built:
            inner = dist.PrefixStore(f"{name}/{device.type}", stores[backend])
            built[backend] = _DIRECT[backend](inner, rank, size, name, options, ranks)
        slots.append((device, kind, built[backend]))
    prefixed = dist.PrefixStore(f"{name}/", store)
    group = torch_private.new_group_object(prefixed, rank, size, backends.default, slots)
    torch_private.register(group, name, description, options.backend, backends.config, prefixed, _Places(ranks))
    return group


def held() -> int:
    """How many groups this process holds beside the world's, torch's own among them."""
    return max(0, torch_private.count_groups() - 1)


def set_timeout(made: GroupRecord, timeout: timedelta) -> None:
    """Change how long the collectives of a group may wait, from the next one on."""
    if not backends_of(torch_private.backend_name(made.group)).dry:  # which never waits
        made.group.set_timeout(timeout)
        for store in made.stores.values():  # Gloo connects with the timeout that it was made with
            store.limit = timeout


gloo_stores: weakref.WeakKeyDictionary[Any, PollingStore | None] = weakref.WeakKeyDictionary()
"""The groups that were made here, each with the store that Gloo reads through."""
