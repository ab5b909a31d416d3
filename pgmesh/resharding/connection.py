"""The connection of all ranks of two layouts: a group of an internal mesh, and their meetings in the store.

the Connection of a rank   what happens                               so
is new                     ``connect`` meets the other ranks          all have the same one, or raise
is connected               ``meet`` at each call; a rank is absent    all raise, and may call again
communicates               it fails on a rank, or takes too long      that rank aborts it
has ended                  it was aborted                             each call raises; ``connect`` finds the next one
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from pgmesh._util.formatting import call_site
from pgmesh.connect.group_rounds import ConnectJudge, GroupRound, following
from pgmesh.connect.rounds import INSPECTION, Rounds
from pgmesh.elastic.aborts import abort, aborted_key
from pgmesh.elastic.state import generation_of
from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.groups.naming import Fingerprint
from pgmesh.groups.world import World
from pgmesh.layout import Layout
from pgmesh.liveness import timing
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.operations import Read
from pgmesh.mesh import ProcessGroupMesh, abort_with

log = logging.getLogger("pgmesh")

HINT = (
    "Nothing was moved. Create a new Resharder, and call the Resharders of the same meshes in the same order on all "
    "ranks."
)


class Meeting(GroupRound):
    """The arrivals of all ranks at a call."""

    @property
    def label(self) -> str:
        return self.fingerprint.subject if self.fingerprint else self.mesh


class Connection:
    """The group of all ranks of two layouts, and their meetings.

    Its calls take ``label``, the transfer in messages: other transfers may have the same connection.

    Args:
        name: name of the internal mesh.
        ranks: its ranks.
        world: their world.
    """

    def __init__(self, name: str, ranks: Sequence[int], world: World) -> None:
        self.mesh = MeshGroups(name, Layout(len(ranks), ranks=ranks), world)
        self.first, self.calls = (
            Meeting(f"{self.mesh.key}/{kind}", ranks, "group", self.mesh.label) for kind in ("first", "calls")
        )
        """The first meeting, by which a new process of a rank is found, and those of later calls."""
        self.failure = ""
        """Why this rank aborts it."""

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.group(self.mesh.layout, self.mesh.layout.axes, "", {})

    def meet(self, meeting: Meeting, call: str, client: CallClient, label: str, **arguments: object) -> None:
        """Wait until all ranks have come to a meeting. All of them get the same result.

        Args:
            call: what this rank calls.
            arguments: those of the call that all ranks give alike.
            client: the store, and the clock with the deadline.

        Raises:
            LifetimeError: the connection was aborted.
            MismatchError: a rank makes another call, or is another process than before.
            MissingRanksError: a rank did not come.
        """
        if meeting.decision is not None:
            meeting.go_on()
        rank = self.mesh.rank
        meeting.fingerprint = Fingerprint(rank, {"call": call, **arguments}, label, HINT)
        statuses, warn = client.liveness.new_statuses(), functools.partial(log.warning, "%s")
        poll = functools.partial(self.check, label)
        poll()
        Rounds([meeting], ConnectJudge(rank, client, call_site(), statuses, call=call, warn=warn, poll=poll)).run()
        error = meeting.decision and meeting.decision.error()
        if error:
            raise error

    # -- its end ----------------------------------------------------------------------------------------------------

    def has_ended(self) -> bool:
        """True if it was aborted, here or on another rank. If Ctrl-C has interrupted that, do it now."""
        if self.failure:
            abort(self.mesh, self.failure, call_site())
        return self.mesh.ended is not None

    def check(self, label: str) -> None:
        """Raise LifetimeError if it was aborted, here or on another rank."""
        if self.mesh.ended:
            raise LifetimeError(self.why_ended(label))

    def why_ended(self, label: str) -> str:
        """The beginning of a message."""
        return f"{label} {str(self.mesh.ended).rstrip('.')}"

    def explain(self, error: Exception, client: CallClient, label: str) -> PgmeshError:
        """The error after a failure: it names the ranks that are lost, or has the first reason.

        Args:
            client: the store and the clock, which starts now.
        """
        statuses, run = client.liveness.statuses, client.run
        others = following(self.mesh.layout.ranks(), self.mesh.rank)[: timing.MOST_STATUSES]
        statuses.read(run, others)
        first = {rank: statuses.record(rank).since for rank in others}
        while True:
            if lost := statuses.find_lost(run, others):
                return MissingRanksError("\n  ".join([f"{label} failed:", *lost.values()]))
            waits = any(statuses.record(rank).since == first[rank] for rank in others)  # for heartbeats
            if not waits or isinstance(error, LifetimeError) or client.now() > statuses.lost_after + 1.0:
                break
            time.sleep(INSPECTION)
        where = [statuses.describe(rank) for rank in others[: timing.MOST_NAMED]]
        return LifetimeError("\n  ".join([f"{self.why_ended(label)}.", *where]))


class Connections:
    """The newest connection of this process in a world, by its layouts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._newest: dict[str, tuple[int, Connection]] = {}

    def find(self, sides: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> Connection:
        """The first connection of two layouts that no rank has aborted."""
        name = f"resharding {hashlib.sha256(repr(sides).encode()).hexdigest()[:16]}"
        number, connection = self._newest.get(name, (-1, None))
        while connection is None or connection.has_ended():
            number += 1
            connection = Connection(f"{name} {number}", ranks, self._world)
            (aborted,) = CallClient(self._world, 0.0).run(Read(aborted_key(generation_of(connection.mesh))))
            if aborted is not None:
                connection.mesh.end("was aborted before")
        self._newest[name] = number, connection
        return connection


def connect(
    sides: Sequence[tuple[int, ...]],
    ranks: Sequence[int],
    client: CallClient,
    meshes: Iterable[ProcessGroupMesh],
    label: str,
) -> Connection:
    """Find the connection of two layouts, and meet its ranks once. If it ended on any of them, take the next one.

    Args:
        sides: the ranks of each layout.
        ranks: those of both.
        client: the store, and the clock with the deadline.
        meshes: if one of them is aborted, so is the connection.

    Raises:
        LifetimeError: one of the meshes was aborted, so no other connection can help.
        MissingRanksError: a rank did not come.
    """
    while True:
        connection = client.world.state_of(Connections).find(sides, ranks)
        for mesh in meshes:
            abort_with(mesh, connection.mesh)
        try:
            if not connection.first.is_made():
                connection.meet(connection.first, "the first call", client, label)
            return connection
        except LifetimeError:  # another rank has aborted it
            continue
        except MismatchError:  # another process of this rank has made it
            if client.now() >= client.seconds:
                raise
            abort(connection.mesh, "a new process is one of its ranks")
