"""The group cache of an unpickled mesh."""

from __future__ import annotations

import torch.distributed as dist

from pgmesh.errors import RankError
from pgmesh.groups import registry
from pgmesh.groups.cache import GroupCache
from pgmesh.groups.registry import current_registry
from pgmesh.layout import Layout


def find_cache(name: str | None, number: int, layout: Layout, call: str, rank: int) -> GroupCache:
    """The cache of an unpickled mesh: the one it was pickled from, if that is open here, or a new one.

    Outside any world the new cache is closed and has only the rank that pickled it.
    """
    if not dist.is_initialized() or current_registry().forked:
        return GroupCache(name, layout, call, outside=rank)
    world = current_registry().size
    ranks = layout.ranks_in_order()
    highest = max(ranks[0], ranks[-1]) if isinstance(ranks, range) else max(ranks)
    if highest >= world:
        raise RankError(f"{call} was unpickled with rank {highest}, but the world's ranks are 0 to {world - 1}.")
    with registry.registering:
        for cache in current_registry().open_caches():
            identity = cache.identity
            original = identity.number if identity.pickled_number is None else identity.pickled_number
            if (cache.name, original, cache.layout) == (name, number, layout):
                return cache  # type: ignore[no-any-return]
    return GroupCache(name, layout, call, pickled_number=number)
