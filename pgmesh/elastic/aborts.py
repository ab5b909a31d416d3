"""Aborts of meshes: one rank publishes its abort, and the others find it at their next heartbeat.

A rank that aborts a mesh, and each that finds an abort of its mesh, ends its groups. That shuts down their connections,
so members that wait for this rank raise at once, before their heartbeat. Backends of Gloo cannot be freed then: a
collective that waits for something else goes on until its timeout. So ``groups/`` keeps the groups for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pgmesh import torch_private
from pgmesh.elastic import sockets
from pgmesh.elastic.state import ElasticState, Generation, generation_of
from pgmesh.elastic.watching import watched_rank
from pgmesh.errors import LifetimeError, PgmeshError
from pgmesh.groups.backends import backends_of
from pgmesh.groups.group import Group
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.groups.world import World
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.liveness import liveness_of
from pgmesh.liveness.operations import CompareSet, Read, Run

_EXIT_SECONDS = 2.0
"""The longest wait at the end of the world for threads that end meshes."""


class AbortReason(str):
    """Why a mesh was aborted, to follow its name."""


class Aborts:
    """The aborts that this process has seen in a world. It looks for them at each heartbeat.

    Args:
        world: the world.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        liveness_of(world).look = self._look

    def _look(self, run: Run) -> None:
        """End the meshes of this process that another rank has aborted, and abort those that have lost a rank."""
        meshes = self._world.open_meshes()
        for mesh, text in zip(meshes, run(*(Read(aborted_key(generation_of(mesh))) for mesh in meshes))):
            if text is not None:
                self._in_thread(end_aborted, mesh, text.decode(errors="replace"))
        watched = {mesh: rank for mesh in meshes if (rank := watched_rank(mesh, run)) is not None}
        lost = liveness_of(self._world).statuses.find_lost(run, {*watched.values()})
        for mesh, rank in watched.items():
            if rank in lost:
                self._in_thread(abort, mesh, lost[rank])

    def _in_thread(self, end: Callable[..., object], *arguments: Any) -> None:
        """End a mesh in a thread of its own: the liveness thread has to go on with its heartbeats."""
        thread = threading.Thread(target=end, args=arguments, name="pgmesh-abort", daemon=True)
        self._world.on_end.append(lambda: thread.join(_EXIT_SECONDS))
        thread.start()


def join_aborts(world: World) -> None:
    """Let this process find the aborts of other ranks from now on, unless the world has no others."""
    if not world.ended and not backends_of(world.options.backend).fake:
        world.state_of(Aborts)


def aborted_key(generation: Generation) -> str:
    """The store key of the reason why a mesh was aborted."""
    return f"{generation.key}/aborted"


def abort(mesh: MeshGroups, why: str, where: str = "") -> None:
    """End all groups of a mesh without waiting for their collectives, and publish why. Other ranks do it too then.

    Args:
        why: the reason, for messages.
        where: the line of code that called; "" for a thread of ours.
    """
    if mesh.ended is not None:
        return
    text = f"{mesh.label} was aborted by rank {mesh.rank}{f' at {where}' if where else ''}: {why}"
    if not mesh.is_fake():
        with contextlib.suppress(PgmeshError):  # of the store
            (first,) = CallClient(mesh.world, 0.0).run(CompareSet(aborted_key(generation_of(mesh)), text))
            text = first.decode(errors="replace")  # of the rank that was first
    end_aborted(mesh, text)


def end_aborted(mesh: MeshGroups, text: str) -> None:
    """End all groups of a mesh that was aborted or replaced, and the internal meshes that serve it.

    Args:
        text: the error message of the mesh.
    """
    mesh.end(AbortReason(text.removeprefix(f"{mesh.label} ")), abort=end_backends)
    for internal in tuple(mesh.state_of(ElasticState).dependents):
        abort(internal, text)


def end_backends(groups: Sequence[Group]) -> None:
    """End the backends of groups, so that blocked collectives raise."""
    sockets.shut_down(group.store for group in groups if group.store is not None)
    process_groups = [group.process_group for group in groups]
    with torch_private.aborting_together(process_groups):
        for each in process_groups:
            with contextlib.suppress(RuntimeError):  # of a third-party backend
                each.abort()


def is_aborted(mesh: MeshGroups) -> bool:
    """True if a mesh has ended by an abort, so that it can be replaced."""
    return isinstance(mesh.ended, AbortReason)


def check_replaceable(mesh: MeshGroups) -> None:
    """Raise LifetimeError if the mesh was closed. One that was aborted can be replaced."""
    if mesh.ended is not None and not is_aborted(mesh):
        raise LifetimeError(f"{mesh.label} {mesh.ended} It cannot be replaced.")


def abort_with(mesh: MeshGroups, internal: MeshGroups) -> None:
    """Abort an internal mesh when the mesh that it serves is aborted.

    Raises:
        LifetimeError: it was aborted.
    """
    mesh.state_of(ElasticState).dependents.add(internal)
    if is_aborted(mesh):
        mesh.check()
