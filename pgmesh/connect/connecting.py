"""The collective call ``connect``: members arrive, compare fingerprints, and run each group's first collective.

If ranks are missing, every member that arrived raises an error that names them and their last status. The round in
which they decide is in ``rendezvous/group_rounds.py``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgmesh._util.call_sites import call_site
from pgmesh.connect.first_collectives import FirstCollectives
from pgmesh.connect.locking import GroupAxes, GroupLocks, Table, Wanted, lock_groups
from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError
from pgmesh.groups.group import Group, Left, State
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.client import CallClient
from pgmesh.rendezvous.group_rounds import ConnectJudge, GroupRound, why_stopped
from pgmesh.rendezvous.processes import process_label
from pgmesh.rendezvous.records import Decision
from pgmesh.rendezvous.rounds import Rounds

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout

log = logging.getLogger("pgmesh")


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


def connect(mesh: MeshGroups, layout: Layout, combinations: Sequence[tuple[Axis, ...]], seconds: float) -> Connected:
    """Connect this rank's groups along each combination of axes.

    Args:
        seconds: the timeout of the whole call.
    """
    mesh.check()
    wanted = {axes[0] if len(axes) == 1 else axes: mesh.members(layout, axes) for axes in combinations}
    if mesh.is_fake():
        for members in wanted.values():
            mesh.find(members, {})
        return Connected()
    return _Call(mesh, wanted, seconds).run()


@dataclass
class ConnectState:
    """What a mesh remembers of its calls of ``connect``.

    Args:
        operations: their store operations.
    """

    operations: int = 0


class _Call:
    """One call of ``connect`` on one rank. It ends in one of these ways for each group:

        this rank                          the group here   what the other members find in the store
        has done its first collective      connected        nothing
        has learned that the round failed  made             the decision, which it may have written
        has failed in the collective       broken           the reason, under the ``broken`` key of the round
        stops while it waits in rounds     made             this round, decided as cancelled
        stops in first collectives         broken           the ``broken`` key
        stops before it arrives            unchanged        a new round, decided as cancelled
        finds a mismatch of the mesh       unchanged        the mismatch

    It *stops* with an error of its own or with an interrupt. A group that another thread releases meanwhile is ended.
    """

    def __init__(self, mesh: MeshGroups, wanted: Wanted, seconds: float) -> None:
        self.mesh, self.wanted = mesh, wanted
        self.call_site = call_site()
        self.statuses = mesh.world.new_statuses()
        self.client = CallClient(mesh.world.heartbeat_thread(), seconds)
        self.collectives = FirstCollectives(self.client, self.statuses, mesh.rank)
        self.groups: Table = {}  # those that this call connects
        self.locks = GroupLocks()  # of connected groups too

    def run(self) -> Connected:
        """Connect the groups. If that ends with an error of this rank, tell the other members."""
        with self.locks:
            try:
                self.groups = lock_groups(self.mesh, self.wanted, self.client, self.locks)
                if self.groups:
                    self._connect()
            except BaseException as error:
                self._cancel(error)
                raise
            finally:
                self.mesh.state_of(ConnectState).operations += self.client.operations
                self._clean_up()
        self._raise_errors()
        done = {axes: each for each in self.collectives.of_made for axes in self.groups[each.group]}
        return Connected(
            {axes: each.met - self.client.start for axes, each in done.items()},
            {axes: each.done - self.client.start for axes, each in done.items()},
            self.client.operations,
        )

    def _connect(self) -> None:
        """Arrive, wait for the other members, and run the first collectives."""
        self.collectives.add({self._new_round(group): group for group in self.groups})
        with self.mesh.lock:
            for group in self.groups:
                group.connect()
        self._rounds_of(self.collectives.by_round).run()
        self.collectives.finish()

    def _new_round(self, group: Group) -> GroupRound:
        """The round of a group in this call. It continues after that of the call before."""
        assert group.fingerprint is not None
        store = group.gloo if len(group.ranks) <= timing.LIMITS.shared_addresses else None
        new = GroupRound(
            self.mesh.world.registration.store_key(self.mesh.identity, group.path, self.client.timeout()),
            group.ranks,
            group.fingerprint,
            group.group_label,
            group.mesh_label,
            address="" if store is None else store.address,
        )
        if group.round is not None:
            new.continue_after(group.round)
        group.round = new
        return new

    def _rounds_of(self, rounds: Iterable[GroupRound]) -> Rounds[GroupRound, Decision]:
        """These rounds, with the judge of this call. The mesh is registered: their keys begin with its key."""
        judge = ConnectJudge(
            self.mesh.rank,
            self.client,
            self.call_site,
            process_label(),
            self.client.seconds,
            self.statuses,
            self.mesh.identity.refusal_key,
            pace=self.client.thread.pace,
            warn=functools.partial(log.warning, "%s"),
            ready=self._ready,
        )
        return Rounds([*rounds], judge)

    def _cancel(self, error: BaseException) -> None:
        """Tell the other members that this rank stopped."""
        self.client.end(error)
        rounds = self.collectives.by_round
        with contextlib.suppress(PgmeshError):  # the caller raises the first error
            if rounds:
                self._rounds_of(rounds).cancel(error)  # those that an interrupt has left undecided
                self.collectives.cancel(why_stopped(self.mesh.rank, self.call_site, error))
            elif not isinstance(error, MismatchError):  # a mismatch of the mesh is published
                self._rounds_of(map(self._new_round, self._unconnected())).cancel(error)

    def _unconnected(self) -> Iterator[Group]:
        """The groups at which this rank would have arrived: not connected, and no other thread connects them.

        Some may not have been made. The call holds their locks from now on.
        """
        for members in self.wanted.values():
            group = self.mesh.find_unmade(members)
            if group.fingerprint and self.locks.take(group, 0.0) and group.state is not State.CONNECTED:
                yield group

    def _raise_errors(self) -> None:
        rounds = self.collectives.by_round
        errors = [failure for each in rounds if each.decision and (failure := each.decision.error())]
        errors += [each.error for each in rounds.values() if each.error]
        if errors:
            ranks_missing = any(isinstance(error, MissingRanksError) for error in errors)
            hint = self.client.thread.store_hint() if ranks_missing else ""
            text = "\n\n".join([*dict.fromkeys(map(str, errors))][:8])
            raise type(errors[0])(f"{text}{hint}") from errors[0].__cause__

    def _ready(self, made: GroupRound) -> None:
        """Start the first collective of a group whose members have all arrived."""
        group = self.collectives.by_round[made].group
        if not group.is_known():
            raise LifetimeError(f"{group.label} was released while it was being connected.")
        if group.gloo is not None and made.decision is not None:
            group.gloo.set_addresses(made.decision.addresses)
        self.collectives.start(made)

    def _clean_up(self) -> None:
        """Leave the state "connecting".

            the group               its first collective    is afterwards
            was not made            was not begun           made, to be connected by a later call
            was made                ended well              connected
            was made                did not                 broken: its process group is discarded
            was released by another thread                  ended: its round is released

        If a second interrupt ends this, groups stay in that state. The next call discards them.
        """
        unusable = {each.group: each for each in self.collectives.of_made if not each.done}
        connected = {each.group for each in self.collectives.of_made if each.done}
        try:
            self.mesh.discard(unusable, "could not be connected; ask its mesh for it anew.")
        finally:
            for collective in unusable.values():
                collective.keep_until_done()
            with self.mesh.lock:
                for group in self.groups.keys() - unusable.keys():
                    group.end_connect(connected=group in connected)
        for group in self.groups:
            if group.state is State.ENDED and not self.mesh.aborted:  # another thread released it meanwhile
                self.mesh.world.clean(Left(rounds=group.take_round()))
