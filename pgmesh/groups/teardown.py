"""The end of groups: unregister them, invalidate them, and shut their connections down.

Only ``groups/`` destroys process groups; the access to torch's tables is in ``torch_private.py``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh.groups import background, connections, kept_groups
from pgmesh.groups.flight_recorder import busy_seconds
from pgmesh.groups.group import Group

_FREE_SECONDS = 0.1
"""The time after which aborted groups are freed."""


def destroy(groups: Iterable[Group], *, abort: bool = False) -> None:
    """Unregister groups that have ended or broke, and end their backends. Later uses raise an error with the reason.

    Their connections are shut down too, so that blocked threads here and on the other members wake up. Adopted groups
    are not destroyed.

    Args:
        abort: abort running collectives of NCCL.
    """
    kept_groups.free_finished()
    groups = list(groups)
    ours = [group for group in groups if group.has_process_group and group.created_by != "adopted"]
    endpoints = [group.endpoints() for group in ours]
    known = [group.process_group for group in ours if group.is_known()]
    wake(ours)  # while torch knows them, and in which of them a thread waits
    with torch_private.aborting_together(known) if abort else contextlib.nullcontext():
        for group in ours:
            _end(group, abort=abort or background.exiting.is_set())
    for group in ours:  # a destroyed Gloo group would continue to work
        with contextlib.suppress(RuntimeError):  # no descriptor is free: then it fails, but without the reason
            torch_private.invalidate(group.process_group, group.unusable)
    connections.shut_down(endpoints)  # only now, so that a thread that wakes up finds the reason
    process_groups = [group.take_process_group() for group in groups]
    if abort and ours:
        background.in_background(_free_later, process_groups)


def wake(groups: Iterable[Group]) -> None:
    """End this rank's waits for members that have not connected, in those groups that are in a collective.

    Once Gloo has given a collective up, such a connection would end the process. So groups are skipped around the times
    at which it does.
    """
    waiting = [group for group in groups if group.gloo is not None and group.gloo.used and group.is_known()]
    busy, start = busy_seconds() if waiting else {}, time.monotonic()
    for group in waiting:
        if group.name in busy and group.gloo is not None:
            seconds = busy[group.name] + time.monotonic() - start
            if connections.is_safe_to_wake(seconds, group.gloo.timeout.total_seconds()):
                connections.wake(group.endpoints())


def _free_later(process_groups: list[Any]) -> None:
    """Free aborted groups in a thread of their own.

    The destructor of a Gloo group waits for its collectives, and Gloo does not wake each of them when its connections
    end.
    """
    background.exiting.wait(_FREE_SECONDS)  # until the callers have dropped their references
    process_groups.clear()


def _end(group: Group, *, abort: bool) -> None:
    """Unregister a group, and end its backends."""
    if not group.is_known():
        return
    process_group: Any = group.process_group
    with contextlib.suppress(Exception):  # of a third-party backend: the groups after this one have to end too
        if group.created_by == "new_group":
            dist.destroy_process_group(process_group)
        else:
            process_group.abort() if abort else process_group.shutdown()
    torch_private.unregister(process_group)  # torch does not, after an error of the backend


def mark_destroyed(group: Group) -> None:
    """Mark a group that torch destroys, shut its connections down, and drop the process group."""
    torch_private.destroyed[group.process_group] = group.unusable
    torch_private.unregister_tag(group.process_group)
    connections.shut_down([group.endpoints()])
    group.take_process_group()
