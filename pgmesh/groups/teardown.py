"""The end of groups: unregister them, invalidate them, and shut their connections down.

It also replaces torch's error for a failed collective by one that names the ranks that have ended. Only ``groups/``
destroys process groups; the access to torch's tables is in ``torch_private.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh._util.formatting import name_ranks
from pgmesh.errors import LifetimeError, MissingRanksError, PgmeshError
from pgmesh.groups import connections
from pgmesh.groups.building import GroupRecord, gloo_stores
from pgmesh.rendezvous.polling_store import PollingStore, without_frames


def explain(group: Any, error: BaseException) -> bool:
    """Raise a better error for a failed collective, if there is one. Otherwise return True for errors of pgmesh.

    It asks the members' listeners, never the store.
    """
    if isinstance(error, PgmeshError):
        # The work object keeps the error that ended it. Raised to the user, that error would refer to the user's
        # frames and so to the work: a reference cycle through C++ that Python cannot collect.
        raise without_frames(error.with_traceback(None))
    if group is not None and group in torch_private.destroyed:
        raise LifetimeError(torch_private.destroyed[group]) from error
    store = None if group is None else gloo_stores.get(group)
    if store is not None and isinstance(error, RuntimeError) and (text := describe_dead(store)):
        raise MissingRanksError(text) from error
    return False


torch_private.on_failure.append(explain)


def describe_dead(store: PollingStore) -> str:
    """Message about the members of a Gloo group whose processes have ended; "" for none."""
    dead = connections.find_dead(connections.endpoints_of(store))
    lines = [f"\n  rank {rank}: its listener at {host}:{port} refuses" for rank, (host, port) in dead.items()]
    return f"{store.label}: {name_ranks(dead)} ended:{''.join(lines)} connections" if dead else ""


def destroy(ended: Iterable[GroupRecord], reason: str, *, abort: bool = False, at_exit: bool = False) -> None:
    """Unregister groups and end their backends. Later uses raise an error that names the group.

    Their connections are shut down too, so that blocked threads here and on the other members wake up.

    Args:
        reason: the reason in that error.
        abort: abort running collectives of NCCL.
        at_exit: the process ends and closes its connections itself.
    """
    ended = list(ended)
    endpoints = [record.endpoints() for record in ended]
    for record in ended:
        group: Any = record.group
        if torch_private.is_known(group):
            if record.created_by == "torch":
                dist.destroy_process_group(group)
            else:
                torch_private.unregister(group)
                with contextlib.suppress(RuntimeError):  # of a backend that cannot be shut down
                    group.abort() if abort or at_exit else group.shutdown()
        invalidate(record, reason)
    if not at_exit:
        connections.shut_down(endpoints)


def invalidate(record: GroupRecord, reason: str) -> None:
    """Make later uses of a group raise an error that names it. A destroyed Gloo group would continue to work."""
    torch_private.invalidate(record.group, f"{record.label} {reason}")


def mark_destroyed(record: GroupRecord, reason: str) -> None:
    """Mark a group that torch destroys, and remove its tag from torch's tables."""
    torch_private.destroyed[record.group] = f"{record.label} {reason}"
    torch_private.unregister_tag(record.group)


def keep(thing: Any) -> None:
    """Keep a group alive for good: its destructor would wait for a collective that hangs."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def keep_all_groups() -> None:
    """Keep all groups of torch alive in a forked child. Their destructors would wait for threads that do not exist."""
    for group in torch_private.all_groups():
        keep(group)
