"""A better error for a failed collective: which ranks have ended, or why a rank ended the mesh."""

from __future__ import annotations

import re
import time
from typing import Any

from pgmesh import torch_private
from pgmesh._util.formatting import name_ranks
from pgmesh.errors import LifetimeError, MissingRanksError, PgmeshError
from pgmesh.groups import connections
from pgmesh.groups.group import Group, find_group
from pgmesh.groups.world import all_meshes
from pgmesh.rendezvous.backend_errors import without_frames

_CONNECTION_ERROR = re.compile("connect|timeout|timed out|peer|nccl", re.IGNORECASE)
"""Words of the errors of Gloo and NCCL that a lost member may have caused. Other errors are mistakes of the caller."""


def explain(process_group: Any, error: BaseException) -> None:
    """Raise a better error for a failed collective, if there is one.

    It may wait for the store, and for hosts that do not answer: see ``_raise_refusal`` and ``_raise_loss``.
    """
    if isinstance(error, PgmeshError):
        # The work object keeps the error that ended it. Raised to the user, that error would refer to the user's
        # frames and so to the work: a reference cycle through C++ that Python cannot collect.
        raise without_frames(error.with_traceback(None))
    if process_group is None:
        return
    if process_group in torch_private.destroyed:
        raise LifetimeError(torch_private.destroyed[process_group]) from error
    group = find_group(process_group.group_name)
    if group is not None and isinstance(error, RuntimeError) and _CONNECTION_ERROR.search(str(error)):
        _raise_refusal(group, error)
        _raise_loss(group, error)


def _raise_refusal(group: Group, error: RuntimeError) -> None:
    """Raise the mismatch or the abort that a rank has published. An abort ends the meshes with this group here too.

    The store of each backend is asked for half a second, or for ``Timing.late_answer`` more while the world's store
    answers slowly.
    """
    refusal = next((found for store in group.stores.values() if (found := store.find_refusal(0.5))), None)
    if refusal is None or refusal.kind == "duplicate":
        return
    if refusal.kind == "aborted":
        for mesh in all_meshes():
            if group in mesh.made():
                mesh.end_aborted(refusal.text)
    raise refusal.error() or error from error


def _raise_loss(group: Group, error: RuntimeError) -> None:
    """Raise an error that names the members that have ended, or that kept the collective from its end until now.

    It takes 5 s at most, if hosts do not answer: the members' listeners are asked twice, each time for up to 2.5 s.
    """
    dead = describe_dead(group)
    if not dead:  # the system may close the connections of a killed process before its listener
        time.sleep(0.05)
        dead = describe_dead(group)
    if text := "\n".join(filter(None, (dead, _recent_finding(group)))):
        raise MissingRanksError(text) from error


def _recent_finding(group: Group) -> str:
    """The reason why a collective of the group did not end, if it was found a moment ago."""
    recent_until, text = group.finding
    return text if time.monotonic() < recent_until else ""


torch_private.on_failure.append(explain)


def describe_dead(group: Group) -> str:
    """Message about the members of a Gloo group whose processes ended or destroyed the group; "" for none."""
    dead = connections.find_dead(group.endpoints())
    lines = [
        f"\n  rank {rank}: its listener at {host}:{port} refuses connections" for rank, (host, port) in dead.items()
    ]
    return f"{group.label}: {name_ranks(dead)} ended, or destroyed the group:{''.join(lines)}" if dead else ""
