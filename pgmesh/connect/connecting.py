"""The collective call ``connect``: members arrive, compare fingerprints, and run each group's first collective.

If ranks are missing, every member that arrived raises an error that names them and their last status. The round in
which they decide is in ``rendezvous/group_rounds.py``.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

from pgmesh._util.call_sites import call_site
from pgmesh.connect.first_collectives import FirstCollectives
from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError, WorldError
from pgmesh.groups.group import Group, Left, State
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.group_rounds import ConnectJudge, GroupRound, why_stopped
from pgmesh.rendezvous.operations import Read
from pgmesh.rendezvous.processes import process_label
from pgmesh.rendezvous.records import Decision
from pgmesh.rendezvous.rounds import Rounds

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout

log = logging.getLogger("pgmesh")

GroupAxes = Union["Axis", "tuple[Axis, ...]"]
"""Axes as in the call: "tp", or ("dp", "tp")."""

Table = dict[Group, "list[GroupAxes]"]
"""Groups, each with its axes."""


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
    for axes in combinations:
        layout.size(*axes)  # raises for unknown axes, before anything is published
    if mesh.is_fake():
        for axes in combinations:
            mesh.group(layout, axes, "", {})
        return Connected()
    return _Call(mesh, layout, combinations, seconds).run()


@dataclass
class ConnectState:
    """What a mesh remembers of its calls of ``connect``.

    Args:
        operations: their store operations.
        last_errors: those of the last failed call; a retry does not log them again.
    """

    operations: int = 0
    last_errors: set[str] = field(default_factory=set)


class _Call:
    """One call of ``connect`` on one rank: its rounds, and the first collective of each connected group.

    ``run`` locks the groups, arrives and waits, and runs the first collectives. The state of each group is "connecting"
    meanwhile. At the end, ``_clean_up`` makes it "connected", or "broken" if its collective is not done.
    """

    def __init__(
        self, mesh: MeshGroups, layout: Layout, combinations: Sequence[tuple[Axis, ...]], seconds: float
    ) -> None:
        self.mesh, self.layout, self.combinations, self.seconds = mesh, layout, combinations, seconds
        self.call_site, self.state = call_site(), mesh.state_of(ConnectState)
        self.statuses = mesh.world.new_statuses()
        self.client = FirstCollectives(mesh.world.heartbeat_thread(), seconds, self.statuses, mesh.rank)
        self.groups: Table = {}  # those that this call connects
        self.locks = contextlib.ExitStack()  # ``Group.connecting``, of connected groups too
        self.rounds: dict[GroupRound, Group] = {}  # empty until this rank arrives
        self.met: dict[GroupAxes, float] = {}

    def run(self) -> Connected:
        """Connect the groups. If that ends with an error of this rank, tell the other members."""
        with self.locks:
            try:
                self.groups = self._lock_groups()
                if self.groups:
                    self._connect()
            except BaseException as error:
                self._cancel(error)
                raise
            finally:
                self.state.operations += self.client.operations
                self._clean_up()
        self._raise_errors()
        warm = {axes: each.done - self.client.start for each in self.client.all for axes in self.groups[each.group]}
        return Connected(self.met, warm, self.client.operations)

    def _lock_groups(self) -> Table:
        """Keep other threads of this process from connecting the groups, and return those that are not connected.

        Raises:
            WorldError: another thread has not finished before the deadline.
        """
        while True:
            found = self._find_groups()
            for group in sorted(found, key=lambda each: each.path):
                if not self._lock(group, self.client.deadline - time.monotonic()):
                    label = self.mesh.label
                    raise WorldError(f"{label}: another thread of this process still connects the same group.")
            groups = self._find_groups()  # another thread may have connected or released them meanwhile
            if groups.keys() <= found.keys() and not self._discard_broken(groups):
                return {each: axes for each, axes in groups.items() if each.state is State.MADE}
            self.locks.close()

    def _find_groups(self) -> Table:
        """Find or create the groups, and return those that pgmesh connects."""
        found: Table = {}
        for axes in self.combinations:
            group = self.mesh.find(self.mesh.members(self.layout, axes), {})
            if group.fingerprint is not None:
                found.setdefault(group, []).append(axes[0] if len(axes) == 1 else axes)
        return found

    def _lock(self, group: Group, seconds: float) -> bool:
        """Keep other threads from connecting a group until this call ends. False if one still does after that time."""
        locked: bool = group.connecting.acquire(timeout=max(0.0, seconds))
        if locked:
            self.locks.callback(group.connecting.release)
        return locked

    def _discard_broken(self, groups: Iterable[Group]) -> bool:
        """Discard groups whose first collective failed. True if there are any.

        Another member has set their ``broken`` key, or a second interrupt ended an earlier call of this process, which
        had set it.
        """
        connected = {each: each.round for each in groups if each.state is State.CONNECTED and each.round}
        reads = [Read(each.broken_key) for each in connected.values()]
        answers = self.client.run(*reads) if reads else []
        broken = [group for group, answer in zip(connected, answers) if answer is not None]
        broken += [group for group in groups if group.state is State.CONNECTING]
        self.mesh.discard(broken, "failed on another member; ask its mesh for it anew.")
        return bool(broken)

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

    def _rounds_of(self, rounds: Sequence[GroupRound]) -> Rounds[GroupRound, Decision]:
        """These rounds, with the judge of this call. The mesh is registered: their keys begin with its key."""
        judge = ConnectJudge(
            self.mesh.rank,
            self.client,
            self.call_site,
            process_label(),
            self.seconds,
            self.statuses,
            self.mesh.identity.refusal_key,
            pace=self.client.thread.pace,
            warn=self._warn,
            ready=self._ready,
        )
        return Rounds(rounds, judge)

    def _warn(self, text: str) -> None:
        """Log a text, unless it repeats an error that this rank has raised."""
        if not any(text.endswith(error) for error in self.state.last_errors):
            log.warning("%s", text)

    def _connect(self) -> None:
        """Arrive, wait for the other members, and run the first collectives."""
        self.rounds = {self._new_round(group): group for group in self.groups}
        with self.mesh.lock:
            for group in self.groups:
                group.connect()
        self._rounds_of([*self.rounds]).run()
        self.client.finish()

    def _cancel(self, error: BaseException) -> None:
        """Tell the other members that this rank stopped.

        They wait for it in one of three ways, depending on how far it came:

            this rank           its rounds        what tells the others
            made groups         are not there     a new round for each group, decided as cancelled
            found a mismatch    are not there     the mismatch, which it has published
            waited in rounds    are undecided     these rounds, decided as cancelled
            ran collectives     are made          the ``broken`` key of each that is not done
        """
        self.client.end(error)
        if isinstance(error, MismatchError) and not self.rounds:
            return
        with contextlib.suppress(PgmeshError):  # the caller raises the first error
            rounds = self.rounds or map(self._new_round, self._unconnected())
            self._rounds_of([*rounds]).cancel(error)
            why = why_stopped(self.mesh.rank, self.call_site, error)
            self.client.cancel(why, {each: group for each, group in self.rounds.items() if each.is_made()})

    def _unconnected(self) -> Iterator[Group]:
        """The groups that are not connected, and that no other thread connects. Some may not have been made."""
        for axes in self.combinations:
            group = self.mesh.find_unmade(self.mesh.members(self.layout, axes))
            if group.fingerprint and self._lock(group, 0.0) and group.state is not State.CONNECTED:
                yield group

    def _raise_errors(self) -> None:
        errors = [failure for each in self.rounds if each.decision and (failure := each.decision.error())]
        errors += [each.error for each in self.client.all if each.error]
        self.state.last_errors = set(map(str, errors))
        if errors:
            ranks_missing = any(isinstance(error, MissingRanksError) for error in errors)
            hint = self.client.thread.store_hint() if ranks_missing else ""
            text = "\n\n".join([*dict.fromkeys(map(str, errors))][:8])
            raise type(errors[0])(f"{text}{hint}") from errors[0].__cause__

    def _ready(self, made: GroupRound) -> None:
        """Start the first collective of a group whose members have all arrived."""
        group = self.rounds[made]
        if not group.is_known():
            raise LifetimeError(f"{group.label} was released while it was being connected.")
        self.met.update(dict.fromkeys(self.groups[group], self.client.now()))
        if group.gloo is not None and made.decision is not None:
            group.gloo.set_addresses(made.decision.addresses)
        self.client.start_for(group, made)

    def _clean_up(self) -> None:
        """Record the connected groups, and discard groups that cannot be used."""
        unusable = [collective for collective in self.client.all if not collective.done]
        failed = {collective.group for collective in unusable}
        try:
            self.mesh.discard((each.group for each in unusable), "could not be connected; ask its mesh for it anew.")
        finally:
            for collective in unusable:
                collective.keep_until_done()
            with self.mesh.lock:
                done = {collective.group for collective in self.client.all} - failed
                for group in self.groups.keys() - failed:  # those were discarded, or the next call discards them
                    group.end_connect(connected=group in done)
        for group in self.groups:
            if group.state is State.ENDED and not self.mesh.aborted:  # another thread released it meanwhile
                self.mesh.world.clean(Left(rounds=group.take_round()))
