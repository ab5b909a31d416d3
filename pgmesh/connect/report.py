"""Reports for finding the cause of a hang: the groups of this process, and the last status of every other rank.

The statuses are read from the store through the store thread.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgmesh import torch_private
from pgmesh._util.formatting import count_of, format_ranks, name_ranks
from pgmesh._util.listeners import ANSWER_SECONDS
from pgmesh.connect.connecting import ConnectState
from pgmesh.errors import WorldError
from pgmesh.groups import flight_recorder
from pgmesh.groups.watch import did_not_report
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.statuses import RankStatus, RunningCollective, Statuses

if TYPE_CHECKING:
    from pgmesh.groups.group import Group
    from pgmesh.groups.mesh_groups import MeshGroups


@dataclass(frozen=True)
class Held:
    """One group of this rank.

    Args:
        label: the group in messages, such as "group dp, tp of mesh 'actor'".
        name: its name in torch.
        ranks: its members in group order.
        options: the options it was created with.
        generation: how many times groups of its ranks were released before.
        call_site: the line of code that first asked for it.
        used: True if it has been in a collective; None if its backend does not report that.
    """

    label: str
    name: str
    ranks: tuple[int, ...]
    options: str
    generation: int
    call_site: str
    used: bool | None

    def __str__(self) -> str:
        used = {True: "used", False: "not used", None: "created"}[self.used]
        again = f", after {count_of(self.generation, 'release')}" if self.generation else ""
        return f"{self.label}: ranks {format_ranks(self.ranks)}; {used}, at {self.call_site}{again}; {self.options}"


@dataclass(frozen=True)
class Report:
    """The groups of a mesh on this rank, and the last status of the other ranks. ``str`` gives a text report.

    Args:
        mesh: the call that created the mesh.
        rank: this process's rank.
        held: this rank's groups.
        others: by rank, its last status; no entry for a rank without a status.
        trouble: the reason for missing statuses; "" for none.
        running: the collectives that this rank is in, each with the members that have entered it.
    """

    mesh: str
    rank: int
    held: tuple[Held, ...]
    others: dict[int, str]
    trouble: str = ""
    running: tuple[str, ...] = ()

    def __str__(self) -> str:
        end = ":" if self.held else ""
        lines = [f"rank {self.rank} of {self.mesh} holds {count_of(len(self.held), 'group')}{end}"]
        lines += [f"  {held}" for held in self.held]
        lines += self.running
        ranks_by_status: dict[str, list[int]] = {}
        for rank, status in self.others.items():
            ranks_by_status.setdefault(status, []).append(rank)
        lines += ["last status of the other ranks:"]
        lines += [f"  {name_ranks(ranks, 32)}: {status}" for status, ranks in ranks_by_status.items()]
        if self.trouble or not self.others:
            lines.append(f"  {self.trouble or 'none'}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Stats:
    """Counts of a mesh, its views and its slices on this rank.

    Args:
        groups: number of their groups.
        communicators: number of groups of this process, of all meshes.
        operations: store operations of finished calls of ``connect``, and of the backends.
        making: seconds spent creating groups.
        waiting: seconds spent waiting for members in first collectives.
    """

    groups: int
    communicators: int
    operations: int
    making: float
    waiting: float


def held(mesh: MeshGroups) -> tuple[Held, ...]:
    """The groups of this rank."""
    return tuple(map(_describe_group, mesh.made()))


def _describe_group(group: Group) -> Held:
    used = any(store.used for store in group.stores.values()) if group.stores else None
    options = repr(group.options.but({"timeout": group.new_timeout}))
    return Held(group.label, group.name, group.ranks, options, group.releases, group.call_site, used)


def report(mesh: MeshGroups) -> Report:
    """The groups of this rank, its running collectives, and the last status of the others.

    Each answer of the store has a second.
    """
    statuses = Statuses(math.inf, time.monotonic)
    running: tuple[RunningCollective, ...] = ()
    trouble = ""
    if mesh.ended is not None:
        trouble = f"not available: the mesh {mesh.ended}"
    elif not mesh.is_fake():
        trouble = _read_statuses(mesh, statuses)
        running = flight_recorder.running()
    lines = tuple(_describe_running(mesh, each, statuses) for each in running)
    deadline = time.monotonic() + ANSWER_SECONDS
    others = {
        rank: text if (status := statuses.record(rank).status) is None else _describe_status(mesh, status, deadline)
        for rank in mesh.layout.ranks()
        if (text := statuses.record(rank).text) is not None
    }
    return Report(mesh.identity.call, mesh.rank, held(mesh), others, trouble, lines)


def _describe_status(mesh: MeshGroups, status: RankStatus, deadline: float) -> str:
    """The status of a rank; also the time of its last heartbeat, if the rank has ended or that is long ago.

    Args:
        deadline: no listener is asked after that time.
    """
    thread, age = mesh.world.store_thread(), time.time() - status.sent
    ended = (
        age >= thread.store.period
        and not status.exited
        and time.monotonic() < deadline
        and thread.store.listeners.has_ended(status, age)
    )
    if not (ended or status.exited or age >= thread.lost_after):
        return str(status)
    where, at = ":".join(map(str, status.endpoint)), time.strftime("%H:%M:%S UTC", time.gmtime(status.sent))
    end = f"it has ended: its listener at {where} refuses connections; " if ended else ""
    return f"{end}its last heartbeat was at {at} by its clock, {age:.0f} s ago by this one; its last status: {status}"


def _read_statuses(mesh: MeshGroups, statuses: Statuses) -> str:
    """Read the statuses of the other ranks; return the reason for missing ones."""
    ranks = [rank for rank in mesh.layout.ranks() if rank != mesh.rank]
    deadline = time.monotonic() + timing.TIMING.report_answer
    for start in range(0, len(ranks), timing.LIMITS.statuses):
        some, left = ranks[start : start + timing.LIMITS.statuses], deadline - time.monotonic()
        if start and left < 0.2:
            return f"and {len(ranks) - start} more ranks, too many to read in a second"
        try:
            statuses.read(functools.partial(mesh.world.heartbeat_thread().run, seconds=left), some)
        except WorldError as error:
            return str(error)
    return ""


def _describe_running(mesh: MeshGroups, mine: RunningCollective, statuses: Statuses) -> str:
    """A collective that this rank is in, with the members that have entered it according to their last status."""
    members = next((group.ranks for group in mesh.made() if group.name == mine.name), ())
    entered = [rank for rank in mesh.layout.ranks() if statuses.has_entered(rank, mine)]
    entered += {mesh.rank}.intersection(members)
    absent = [rank for rank in members if rank != mesh.rank and did_not_report(statuses, rank, mine)]
    also = f"; entered by {name_ranks(sorted(entered))}" if entered else ""
    missing = f"; {name_ranks(absent)} did not report it" if absent else ""
    return f"this rank is {mine}{also}{missing}"


def stats(mesh: MeshGroups) -> Stats:
    """Counts of the mesh on this rank."""
    groups = mesh.made()
    stores = [store for group in groups for store in group.stores.values()]
    return Stats(
        len(groups),
        max(0, len(torch_private.all_groups()) - 1),  # without the world's
        sum(store.operations for store in stores) + mesh.state_of(ConnectState).operations,
        mesh.creation_seconds,
        sum(store.waited for store in stores),
    )
