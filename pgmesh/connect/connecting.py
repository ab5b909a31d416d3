"""The collective call ``connect``: members arrive, compare fingerprints, and run each group's first collective.

If ranks are missing, every member that arrived raises an error that names them and their last status. The round in
which they decide is in ``group_rounds.py``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

from pgmesh._util.formatting import call_site
from pgmesh.connect.decisions import Decision
from pgmesh.connect.first_collective import FirstCollective, FirstCollectives
from pgmesh.connect.group_rounds import ConnectJudge, GroupRound, why_stopped
from pgmesh.connect.rounds import Rounds
from pgmesh.errors import PgmeshError, WorldError
from pgmesh.groups.group import Group, find_group
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.groups.naming import Fingerprint, Members, encode_ranks
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.operations import Read

if TYPE_CHECKING:
    from pgmesh.layout import Axis

log = logging.getLogger("pgmesh")

_NAMES_HINT = (
    "The ranks have released or destroyed groups of these ranks a different number of times. Release them on all ranks."
)

GroupAxes = Union["Axis", "tuple[Axis, ...]"]
"""Axes as in the call: "tp", or ("dp", "tp")."""


@dataclass(frozen=True)
class Connected:
    """Times and operations of one call of ``connect``. Times are seconds from the call.

    Args:
        met: by axes, as in the call ("tp", or ("dp", "tp")): the time until all members of the group had arrived.
        warm: by axes: the time until the group's first collective was done.
        operations: store operations of this rank, without those of the backends.
    """

    met: dict[GroupAxes, float] = field(default_factory=dict)
    warm: dict[GroupAxes, float] = field(default_factory=dict)
    operations: int = 0

    def __str__(self) -> str:
        labels = {axes: ", ".join(map(str, axes)) if isinstance(axes, tuple) else f"{axes}" for axes in self.warm}
        width = max(map(len, labels.values()), default=0)
        lines = [
            f"group {label:<{width}}  met {self.met[axes]:6.3f} s, warm {self.warm[axes]:6.3f} s"
            for axes, label in labels.items()
        ]
        return "\n".join([*lines, f"{self.operations} store operations"])


def connect(mesh: MeshGroups, wanted: Mapping[GroupAxes, Members], seconds: float) -> Connected:
    """Connect this rank's groups.

    Args:
        wanted: the members of each, by axes as in the call.
        seconds: the timeout of the whole call.

    Raises:
        MissingRanksError: members did not arrive in time, were lost, or stopped; or a first collective failed.
        MismatchError: the members' meshes or options differ, or two processes have the same rank.
        LifetimeError: the mesh or a group has ended.
        WorldError: the store has failed.
    """
    mesh.check()
    if mesh.is_fake() or all(len(members.ranks) == 1 for members in wanted.values()):
        for members in wanted.values():
            mesh.find(members, {})
        return Connected()
    return _Call(mesh, wanted, seconds).run()


class Connection:
    """What ``connect`` keeps about the groups of some ranks with a tag: there is another one after each release."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held by the thread that connects them
        self.round: GroupRound | None = None  # the last one
        self.connected = ""  # name in torch of the last group that was connected


class Connections:
    """The connections of a mesh, by ranks and tag."""

    def __init__(self) -> None:
        self._all: dict[tuple[tuple[int, ...], str], Connection] = {}

    def of(self, members: Members) -> Connection:
        return self._all.setdefault((members.ranks, members.tag), Connection())


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

    def __init__(self, mesh: MeshGroups, wanted: Mapping[GroupAxes, Members], seconds: float) -> None:
        self.mesh, self.call_site = mesh, call_site()
        self.client = CallClient(mesh.world, seconds)
        self.statuses = self.client.liveness.new_statuses()
        self.collectives = FirstCollectives(mesh, self.client, self.statuses)
        self.locks = contextlib.ExitStack()
        connections = mesh.state_of(Connections)
        self.by_axes = {axes: connections.of(members) for axes, members in wanted.items() if len(members.ranks) > 1}
        self.members = {self.by_axes[axes]: members for axes, members in wanted.items() if axes in self.by_axes}

    def run(self) -> Connected:
        """Connect the groups. If that ends with an error of this rank, tell the other members."""
        with self.locks:
            try:
                self._connect()
            except BaseException as error:
                self._cancel(error)
                raise
            finally:
                self._clean_up()
        self._raise_errors()
        done = {axes: each for axes, connection in self.by_axes.items() if (each := self._begun(connection))}
        return Connected(
            {axes: each.met - self.client.start for axes, each in done.items()},
            {axes: each.done - self.client.start for axes, each in done.items()},
            self.client.operations,
        )

    def _begun(self, connection: Connection) -> FirstCollective | None:
        """The first collective of a group whose members have all arrived in this call."""
        each = connection.round
        return self.collectives.by_round.get(each) if each is not None and each.is_made() else None

    def _connect(self) -> None:
        """Arrive, wait for the other members, and run the first collectives."""
        for connection, _ in sorted(self.members.items(), key=lambda item: item[1][:2]):
            if not self._lock(connection, self.client.deadline - time.monotonic()):
                raise WorldError(f"{self.mesh.label}: another thread of this process still connects the same group.")
        groups = self._find_unconnected()
        if groups:
            self.collectives.add({self._round_of(connection, group): group for connection, group in groups.items()})
            self._rounds_of(self.collectives.by_round).run()
            self.collectives.finish()

    def _lock(self, connection: Connection, seconds: float) -> bool:
        """Keep other threads from connecting some ranks. False if one still does after that time."""
        self.locks.callback(_release, connection.lock)  # first: an interrupt may end the next line with the lock taken
        return connection.lock.acquire(timeout=max(0.0, seconds))

    def _find_unconnected(self) -> dict[Connection, Group]:
        """Find or make the groups, and return those that this call connects."""
        found = {connection: self.mesh.find(members, {}) for connection, members in self.members.items()}
        for connection in self._find_broken(found):
            assert connection.round is not None
            reason = "failed on another member; ask its mesh for it anew."
            self.mesh.replace(found[connection], connection.round.number, reason)
            found[connection] = self.mesh.find(self.members[connection], {})
        return {each: group for each, group in found.items() if group.fingerprint and each.connected != group.name}

    def _find_broken(self, found: Mapping[Connection, Group]) -> list[Connection]:
        """The connected ones whose first collective failed on another member."""
        rounds = {each: each.round for each, group in found.items() if each.round and each.connected == group.name}
        answers = self.client.run(*(Read(each.broken_key) for each in rounds.values()))
        return [connection for connection, answer in zip(rounds, answers) if answer is not None]

    def _round_of(self, connection: Connection, group: Group | None = None) -> GroupRound:
        """The round of this call. It continues after that of the call before.

        Args:
            group: the group; None if this rank only tells that it has stopped.
        """
        each, members, rank = connection.round, self.members[connection], self.mesh.rank
        if each is None:
            key = f"{self.mesh.key}/connect/{encode_ranks(members.ranks)}/{members.tag}"
            each = connection.round = GroupRound(key, members.ranks, members.label, self.mesh.label)
        elif each.decision is not None:
            each.go_on()
        if group is not None and group.fingerprint is not None:
            options = Fingerprint(rank, group.options.given, group.fingerprint.subject, group.fingerprint.hint)
            each.fingerprints = options, Fingerprint(rank, {"name in torch": group.name}, group.label, _NAMES_HINT)
        return each

    def _rounds_of(self, rounds: Iterable[GroupRound]) -> Rounds[GroupRound, Decision]:
        """These rounds, with the judge of this call."""
        judge = ConnectJudge(
            self.mesh.rank,
            self.client,
            self.call_site,
            self.client.seconds,
            self.statuses,
            mesh=self.mesh.fingerprint,
            mesh_key=self.mesh.key,
            pace=self.client.liveness.pace,
            warn=functools.partial(log.warning, "%s"),
            ready=self.collectives.start,
        )
        return Rounds([*rounds], judge)

    def _cancel(self, error: BaseException) -> None:
        """Tell the other members that this rank stopped."""
        rounds = self.collectives.by_round
        with contextlib.suppress(PgmeshError):  # the caller raises the first error
            if rounds:
                self._rounds_of(rounds).cancel(error)  # those that an interrupt has left undecided
                self.collectives.cancel(why_stopped(self.mesh.rank, self.call_site, error))
            else:
                self._rounds_of(map(self._round_of, self._not_arrived())).cancel(error)

    def _not_arrived(self) -> Iterator[Connection]:
        """The connections at which this rank would have arrived: not connected, and no other thread connects them."""
        for connection in self.members:
            if self._lock(connection, 0.0) and find_group(connection.connected) is None:
                yield connection

    def _clean_up(self) -> None:
        """Note the connected groups, and replace those that have failed in their first collective."""
        begun = {connection: each for connection in self.members if (each := self._begun(connection))}
        for connection, each in begun.items():
            if each.done:
                connection.connected = each.group.name
        for each in begun.values():
            if not each.done:
                each.keep_while_running()
                self.mesh.replace(each.group, each.round.number, "could not be connected; ask its mesh for it anew.")

    def _raise_errors(self) -> None:
        rounds = self.collectives.by_round
        errors = [failure for each in rounds if each.decision and (failure := each.decision.error())]
        errors += [each.error for each in rounds.values() if each.error]
        if errors:
            text = "\n\n".join([*dict.fromkeys(map(str, errors))][:8])
            raise type(errors[0])(text) from errors[0].__cause__


def _release(lock: threading.RLock) -> None:
    """Release a lock, unless this thread has not got it."""
    with contextlib.suppress(RuntimeError):
        lock.release()
