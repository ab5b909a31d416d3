"""Circles: ranks that wait for each other in ``connect``, found from their statuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pgmesh._util.formatting import format_ranks
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Read, Run
from pgmesh.rendezvous.records import unpack
from pgmesh.rendezvous.rounds import run_each
from pgmesh.rendezvous.statuses import PendingConnect, Statuses

Circle = Sequence[tuple[int, PendingConnect]]
"""Ranks that wait for each other. Each has a pending group in which the next rank is missing; the first follows the
last."""


def find_circle(rank: int, pending: Mapping[int, Sequence[PendingConnect]]) -> Circle:
    """A shortest path from a rank back to itself, along the ranks that wait for each other; empty if there is none.

    Args:
        pending: the groups that each rank waits for.
    """
    paths: list[list[tuple[int, PendingConnect]]] = [[(rank, wait)] for wait in pending.get(rank, ())]
    seen: set[int] = set()
    for path in paths:  # grows below
        for missing in path[-1][1].missing:
            if missing == rank:
                return path
            if missing not in seen:
                seen.add(missing)
                paths += [[*path, (missing, wait)] for wait in pending.get(missing, ())]
    return []


def circle_text(circle: Circle) -> str:
    """Message about ranks that wait for each other. It begins at the lowest rank."""
    first = min(range(len(circle)), key=lambda i: circle[i][0])
    circle = [*circle[first:], *circle[:first]]
    lines = [
        f"\n  rank {rank} connects {wait.label} at {wait.call_site}, and waits for rank {waited_for}"
        for (rank, wait), (waited_for, _) in zip(circle, [*circle[1:], circle[0]])
    ]
    waits = {wait.name: wait for _, wait in circle}.values()
    meshes = {wait.mesh: rank for rank, wait in reversed(circle)}
    hint = "Connect the groups in one call on every rank, as in mesh.connect('dp', 'tp'), or in the same order."
    if len({(wait.group, wait.ranks) for wait in waits}) == 1 and len(meshes) > 1:
        each = ", ".join(f"{mesh} on rank {rank}" for mesh, rank in sorted(meshes.items()))
        hint = f"These are different meshes: {each}. Create the mesh with the same name on every rank."
    elif len({wait.label for wait in waits}) < len(waits):
        hint = (
            "These are different groups with the same label: the ranks have created, closed or released them a "
            "different number of times. Create and close the same meshes in the same order on every rank."
        )
    return f"ranks {format_ranks([rank for rank, _ in circle])} wait for each other:{''.join(lines)}\n\n{hint}"


def search_circle(run: Run, statuses: Statuses, rank: int, waits: Sequence[PendingConnect]) -> Circle:
    """Ranks that wait for each other, this one among them; empty if there are none.

    Args:
        run: performs operations on the store.
        statuses: those of the other ranks; read as far as needed.
        rank: this rank.
        waits: the groups that it waits for.
    """
    pending = {rank: tuple(waits)}
    for _ in range(timing.LIMITS.statuses):
        unread = {each for waiting in pending.values() for wait in waiting for each in wait.missing} - {*pending}
        if not unread or find_circle(rank, pending):
            break
        some = sorted(unread)[: timing.LIMITS.statuses]
        statuses.read(run, some)
        pending |= {each: status.pending if (status := statuses.record(each).status) else () for each in some}
    circle = find_circle(rank, pending)
    return circle if _is_closed(run, circle) else ()


def _is_closed(run: Run, circle: Circle) -> bool:
    """True if each rank of a circle still waits for the next one."""
    # Statuses are read one after another, so a rank may have gone on meanwhile.
    reads = ([Read(f"{wait.name}/decision"), Read(f"{wait.name}/arrivals")] for _, wait in circle)
    for (decision, arrivals), (following, _) in zip(run_each(run, reads), [*circle[1:], *circle[:1]]):
        arrived = {(unpack(line, rank=int) or {}).get("rank") for line in (arrivals or b"").splitlines()}
        if decision is not None or following in arrived:
            return False
    return True
