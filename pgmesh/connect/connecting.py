"""The collective call ``connect``: members arrive, compare fingerprints, and run each group's first collective.

If ranks are missing, every member that arrived raises an error that names them and their last status. The round in
which they decide is in ``group_rounds.py``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Collection, Iterable

from pgmesh import torch_private
from pgmesh._util.formatting import call_site
from pgmesh.connect.decisions import Decision
from pgmesh.connect.first_collective import FirstCollectives, Progress
from pgmesh.connect.group_rounds import ConnectJudge, GroupRound, why_stopped
from pgmesh.connect.rounds import Rounds
from pgmesh.errors import PgmeshError, WorldError
from pgmesh.groups.group import Group, find_group
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.groups.naming import Members, encode_ranks
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.operations import Read

log = logging.getLogger("pgmesh")


def connect(mesh: MeshGroups, wanted: Collection[Members], seconds: float) -> None:
    """Connect this rank's groups.

    Args:
        wanted: the members of each.
        seconds: the timeout of the whole call.

    Raises:
        MissingRanksError: members did not arrive in time, were lost, or stopped; or a first collective failed.
        MismatchError: the members' meshes or options differ, or two processes have the same rank.
        LifetimeError: the mesh or a group has ended.
        WorldError: the store has failed.
    """
    mesh.check()
    several = [] if mesh.is_fake() else [members for members in wanted if len(members.ranks) > 1]
    if several:
        _Call(mesh, several, seconds).run()
    else:
        for members in wanted:
            mesh.find(members, {})


class Connections:
    """The rounds of a mesh's groups, by ranks and tag. A group that is made anew goes on with its round."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[tuple[int, ...], str], GroupRound] = {}
        self.threads: dict[GroupRound, int] = {}  # those that connect a group now

    def round_of(self, mesh: MeshGroups, members: Members) -> GroupRound:
        key = f"{mesh.key}/connect/{encode_ranks(members.ranks)}/{members.tag}"
        new = GroupRound(key, members.ranks, members.label, mesh.label)
        return self._rounds.setdefault((members.ranks, members.tag), new)


class _Call:
    """One call of ``connect`` on one rank. It ends in one of these ways for each group:

        this rank                          the group here   what the other members find in the store
        has done its first collective      connected        nothing
        has learned that the round failed  made             the decision, which it may have written
        has failed in the collective       replaced         the reason, under the ``broken`` key of the round
        stops while it waits in rounds     made             this round, decided as cancelled
        stops in first collectives         replaced         the ``broken`` key
        stops before it arrives            unchanged        a new round, decided as cancelled

    It *stops* with an error of its own or with an interrupt. A group that another thread releases meanwhile is ended.
    """

    def __init__(self, mesh: MeshGroups, wanted: Collection[Members], seconds: float) -> None:
        self.mesh, self.call_site = mesh, call_site()
        self.client = CallClient(mesh.world, seconds)
        self.statuses = self.client.liveness.new_statuses()
        self.collectives = FirstCollectives(mesh, self.client, self.statuses)
        connections = mesh.state_of(Connections)
        self.threads, self.thread = connections.threads, threading.get_ident()
        self.members = {connections.round_of(mesh, members): members for members in wanted}

    def run(self) -> None:
        """Connect the groups. If that ends with an error of this rank, tell the other members."""
        try:
            self._connect()
        except BaseException as error:
            self._cancel(error)
            raise
        finally:
            self._clean_up()
        self._raise_errors()

    def _connect(self) -> None:
        """Arrive, wait for the other members, and run the first collectives."""
        if not all(map(self._take, self.members)):
            raise WorldError(f"{self.mesh.label}: another thread of this process connects the same group.")
        groups = self._find_unconnected()
        if groups:
            for each, group in groups.items():
                self._begin(each)
                each.fingerprint = group.fingerprint
            self.collectives.add(groups)
            self._rounds_of(groups).run()
            self.collectives.finish()

    def _take(self, each: GroupRound) -> bool:
        """Keep other threads from connecting a group. False if one connects it already."""
        return self.threads.setdefault(each, self.thread) == self.thread

    def _find_unconnected(self) -> dict[GroupRound, Group]:
        """Find or make the groups, and return those that this call connects.

        A connected one whose first collective failed on another member is made anew.
        """
        found = {each: self.mesh.find(members, {}) for each, members in self.members.items()}
        connected = [each for each, group in found.items() if each.connected == group.name]
        answers = self.client.run(*(Read(each.broken_key) for each in connected))
        for each, broken in zip(connected, answers):
            if broken is not None:
                self.mesh.replace(found[each], each.number, "failed on another member; ask its mesh for it anew.")
                found[each] = self.mesh.find(self.members[each], {})
        return {each: group for each, group in found.items() if group.fingerprint and each.connected != group.name}

    def _begin(self, each: GroupRound) -> None:
        """Go on to the next attempt after that of the call before."""
        if each.decision is not None:
            each.go_on()

    def _rounds_of(self, rounds: Iterable[GroupRound]) -> Rounds[GroupRound, Decision]:
        """These rounds, with the judge of this call."""
        judge = ConnectJudge(
            self.mesh.rank,
            self.client,
            self.call_site,
            self.statuses,
            mesh=self.mesh.fingerprint,
            mesh_key=self.mesh.key,
            warn=functools.partial(log.warning, "%s"),
            ready=self.collectives.start,
            poll=self.collectives.poll,
        )
        return Rounds([*rounds], judge)

    def _cancel(self, error: BaseException) -> None:
        """Tell the other members that this rank stopped."""
        rounds = [*self.collectives.by_round]
        if not rounds:  # those at which it would have arrived
            rounds = [each for each in self.members if self._take(each) and find_group(each.connected) is None]
            for each in rounds:
                self._begin(each)
        with contextlib.suppress(PgmeshError):  # the caller raises the first error
            self._rounds_of(rounds).cancel(error)
            self.collectives.cancel(why_stopped(self.mesh.rank, self.call_site, error))

    def _clean_up(self) -> None:
        """Note the connected groups, and replace those that have failed in their first collective."""
        for each, collective in self.collectives.by_round.items():
            if collective.state is Progress.DONE:
                each.connected = collective.group.name
        for each, collective in self.collectives.by_round.items():
            if each.is_made() and collective.state is not Progress.DONE:
                torch_private.keep_for_ever(collective.ones)  # its backend may free it after the end of Python
                reason = "could not be connected; ask its mesh for it anew."
                self.mesh.replace(collective.group, each.number, reason)
        for each in filter(self._take, self.members):
            del self.threads[each]

    def _raise_errors(self) -> None:
        rounds = self.collectives.by_round
        errors = [failure for each in rounds if each.decision and (failure := each.decision.error())]
        errors += [each.error for each in rounds.values() if each.error]
        if errors:
            text = "\n\n".join([*dict.fromkeys(map(str, errors))][:8])
            raise type(errors[0])(text) from errors[0].__cause__
