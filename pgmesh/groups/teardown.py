"""The end of groups: unregister them, invalidate them, and shut their connections down.

Only ``groups/`` destroys process groups; the access to torch's tables is in ``torch_private.py``.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh.groups import background, connections, kept_groups, waking
from pgmesh.groups.flight_recorder import busy_since
from pgmesh.groups.group import Group

_FREE_SECONDS = 0.1
"""The time after which aborted groups are freed."""


def destroy(groups: Iterable[Group], *, abort: bool = False) -> None:
    """End the process groups of groups that have ended or broke. Later uses raise an error with the reason.

    Of adopted groups, only the reference is dropped. The others are ended in this order:

    1. Threads that wait for members to connect are woken.
    2. Their backends end, and torch forgets the groups.
    3. Later uses raise: a destroyed Gloo group would continue to work.
    4. Their connections are shut down, so that blocked threads here and on the other members wake up. Those here find
       the reason, by step 3.
    5. The references are dropped. That frees the groups: after an abort in another thread, since it may have to wait.

    Args:
        abort: abort running collectives of NCCL.
    """
    kept_groups.free_finished()
    groups = list(groups)
    ours = [group for group in groups if group.has_process_group and group.created_by != "adopted"]
    known = [group for group in ours if group.is_known()]
    wake(ours)
    together = torch_private.aborting_together(group.process_group for group in known)
    with together if abort else contextlib.nullcontext():
        for group in known:
            _end(group, abort=abort or background.exiting.is_set())
    for group in ours:
        with contextlib.suppress(RuntimeError):  # no descriptor is free: then it fails, but without the reason
            torch_private.invalidate(group.process_group, group.unusable)
    connections.shut_down(group.endpoints() for group in ours)
    process_groups = [group.take_process_group() for group in groups]
    if abort and ours:
        background.in_background(_free_later, process_groups)


def wake(groups: Iterable[Group]) -> None:
    """End this rank's waits for members that have not connected, in those groups that are in a collective.

    It may first wait for 0.3 s until that is safe. Groups for which it is not safe then are skipped: the timeout of
    Gloo ends their waits.
    """
    waiting = [group for group in groups if group.has_process_group and group.endpoints().places]
    for is_last in (False, True):
        entered, now = busy_since() if waiting else {}, time.monotonic()
        unsafe = {
            group: waking.unsafe_seconds(now - entered[group.name], group.timeout, group.first_timeout)
            for group in waiting
            if group.name in entered
        }
        seconds = max((each for each in unsafe.values() if each < math.inf), default=0.0)
        if is_last or not seconds:
            break
        time.sleep(seconds + 0.01)  # the clock of torch's record is another one
    waking.wake(group.endpoints() for group, seconds in unsafe.items() if not seconds)


def cut(groups: Sequence[Group]) -> None:
    """End all waits of groups: for members that have not connected, and for data of those that have."""
    wake(groups)
    connections.shut_down(group.endpoints() for group in groups)


def _free_later(process_groups: list[Any]) -> None:
    """Free aborted groups in a thread of their own.

    The destructor of a Gloo group waits for its collectives, and Gloo does not wake each of them when its connections
    end.
    """
    background.exiting.wait(_FREE_SECONDS)  # until the callers have dropped their references
    process_groups.clear()


def _end(group: Group, *, abort: bool) -> None:
    """End the backends of a group, and unregister it."""
    process_group: Any = group.process_group
    with contextlib.suppress(Exception):  # of a third-party backend: the groups after this one have to end too
        if group.created_by == "new_group":
            dist.destroy_process_group(process_group)
        else:
            process_group.abort() if abort else process_group.shutdown()
    torch_private.unregister(process_group)  # torch does not, after an error of the backend


def mark_destroyed(group: Group) -> None:
    """Mark a group that torch destroys, end its waits and its connections, and drop the process group."""
    wake([group])
    torch_private.destroyed[group.process_group] = group.unusable
    torch_private.unregister_tag(group.process_group)
    connections.shut_down([group.endpoints()])
    group.take_process_group()
