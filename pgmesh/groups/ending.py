"""The end of process groups: torch forgets them, and they are freed once the last reference to them goes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh.groups.connecting import clear_frames
from pgmesh.groups.group import Group
from pgmesh.groups.world import World

Abort = Callable[[Sequence[Group]], object]
"""Ends the backends of groups at once."""

DRAIN_SECONDS = 5.0
"""The longest wait for the backends of groups that have ended."""


def destroy(world: World, groups: Iterable[Group], *, by_torch: bool = False, seconds: float = DRAIN_SECONDS) -> None:
    """End the process groups of groups that have ended.

    They end in the order of their names, as torch does it: ending a communicator may wait for the other members.

    Args:
        seconds: the longest wait for the operations of all.
        by_torch: torch's own destroy ends them, and removes them from its tables.
    """
    clear_frames()
    deadline = time.monotonic() + seconds
    ended = [_end(world, group, deadline, by_torch) for group in sorted(groups, key=lambda each: each.name)]
    if world.exits or not ended:
        return
    # If a connection has half a message, Gloo's destructor never returns.
    thread = threading.Thread(target=ended.clear, daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 0.0))


def _end(world: World, group: Group, deadline: float, by_torch: bool) -> object:
    """End one group. What is returned keeps its process group alive."""
    is_known, gloo, process_group = group.is_known(), group.gloo, group.take_process_group()
    if group.created_by != "adopted":
        leave(world, group, gloo, process_group, deadline)
        if is_known and not by_torch:
            with contextlib.suppress(Exception):  # of a third-party backend: the groups after this one have to end too
                if group.created_by == "new_group":
                    dist.destroy_process_group(process_group)
                else:
                    process_group.shutdown()
        if not by_torch:
            torch_private.unregister(process_group)  # torch does not, after an error of the backend
        torch_private.destroyed[process_group] = group.unusable
    return process_group, gloo


def abort(world: World, groups: Iterable[Group], end_backends: Abort) -> None:
    """End the process groups of groups that have ended, without waiting for their operations.

    They are kept for ever: their destructors would wait.
    """
    ours = sorted((group for group in groups if group.created_by != "adopted"), key=lambda each: each.name)
    end_backends(ours)
    for group in ours:
        process_group = group.take_process_group()
        torch_private.keep_for_ever(process_group)
        torch_private.destroyed[process_group] = group.unusable
        torch_private.unregister(process_group)
        if group.store is not None:
            world.connector.remove(group.store)


def leave(world: World, group: Group, gloo: Sequence[Any], process_group: Any, deadline: float) -> None:
    """End the search for the members of a group that has ended.

    Afterwards its backends have done what was begun, and no thread of them is inside Python: one that comes back there
    after Python has finalised ends the process. If that takes too long, or this process ends, the process group is kept
    for ever.
    """
    store = group.store
    if store is None:
        return
    world.connector.remove(store)
    complete = store.complete_at is not None
    # When the world ends, its keys end with it. But the members of an incomplete group look whether this one has left.
    if not world.ended or (world.has_server and not complete):
        with contextlib.suppress(Exception):  # the store has failed
            store.leave()
    if not torch_private.drain(gloo, deadline) or world.exits:
        torch_private.keep_for_ever(process_group)
