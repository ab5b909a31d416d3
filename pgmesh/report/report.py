"""``mesh.report()`` and ``mesh.held()``: where each rank of a mesh is, and the groups of this rank."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from pgmesh._util.formatting import count_of
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.liveness.client import CallClient
from pgmesh.report.table import Report as Report, make_report


@dataclass(frozen=True)
class Held:
    """One group of this rank.

    Args:
        label: the group in messages, such as "group dp, tp of mesh 'actor'".
        ranks: its members in group order.
        call_site: the line of code that first asked for it.
    """

    label: str
    ranks: tuple[int, ...]
    call_site: str


def held(mesh: MeshGroups) -> tuple[Held, ...]:
    """The groups of this rank."""
    return tuple(Held(group.label, group.ranks, group.call_site) for group in mesh.made())


def report(mesh: MeshGroups, thread: threading.Thread | None = None) -> Report:
    """The place of each rank of a mesh.

    Args:
        thread: the thread of this process that other ranks see from now on; None for the one that they see now.

    Raises:
        LifetimeError: the mesh has ended.
        WorldError: the store has failed.
    """
    mesh.check()
    ranks = mesh.layout.ranks()
    title = f"{mesh.label}: {count_of(len(ranks), 'rank')}"
    if mesh.is_fake():
        return Report(f"{title} of a fake world, which have no processes", {})
    client = CallClient(mesh.world, 0.0)
    liveness = client.liveness
    if thread is not None:
        liveness.places.thread = thread.ident
    return make_report(title, liveness.statuses, client.run, ranks, liveness.period)
