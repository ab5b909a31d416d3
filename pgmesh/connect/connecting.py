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
from pgmesh.errors import LifetimeError, MissingRanksError, PgmeshError, WorldError
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
    """One call of ``connect`` on one rank: its rounds, and the first collective of each connected group."""

    def __init__(
        self, mesh: MeshGroups, layout: Layout, combinations: Sequence[tuple[Axis, ...]], seconds: float
    ) -> None:
        self.mesh, self.layout, self.combinations, self.seconds = mesh, layout, combinations, seconds
        self.call_site, self.state = call_site(), mesh.state_of(ConnectState)
        self.statuses = mesh.world.new_statuses()
        self.client = FirstCollectives(mesh.world.heartbeat_thread(), seconds, self.statuses, mesh.rank)
        self.groups: Table = {}  # those that this call connects
        self.rounds: dict[GroupRound, Group] = {}
        self.met: dict[GroupAxes, float] = {}

    def run(self) -> Connected:
        try:
            while True:
                found = self._find_groups()
                with self._connecting_alone(found, self.client.deadline):
                    groups = self._find_groups()  # another thread may have connected or released them meanwhile
                    if groups.keys() <= found.keys() and not self._discard_broken(groups):
                        return self._connect(groups)
        finally:
            self.state.operations += self.client.operations

    def _find_groups(self) -> Table:
        """Find or create the groups. If one cannot be created, publish the failure for it and for all others."""
        found: Table = {}
        for i, axes in enumerate(self.combinations):
            try:
                group = self.mesh.find(self.mesh.members(self.layout, axes), {})
            except BaseException as error:
                self._cancel(error, found, self.combinations[i:])
                raise
            if group.fingerprint is not None:
                found.setdefault(group, []).append(axes[0] if len(axes) == 1 else axes)
        return found

    @contextlib.contextmanager
    def _connecting_alone(self, groups: Iterable[Group], deadline: float) -> Iterator[None]:
        """Keep other threads of this process from connecting these groups.

        Raises:
            WorldError: another thread of this process has not finished before the deadline.
        """
        with contextlib.ExitStack() as stack:
            for group in sorted(groups, key=lambda each: each.path):
                if not group.connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    label = self.mesh.label
                    raise WorldError(f"{label}: another thread of this process still connects the same group.")
                stack.callback(group.connecting.release)
            yield

    def _discard_broken(self, groups: Iterable[Group]) -> bool:
        """Discard those connected groups whose ``broken`` key another member has set. True if there are any."""
        connected = {each: each.round for each in groups if each.state is State.CONNECTED and each.round}
        reads = [Read(each.broken_key) for each in connected.values()]
        answers = self.client.run(*reads) if reads else []
        broken = [group for group, answer in zip(connected, answers) if answer is not None]
        for group in broken:
            self.mesh.discard(group, "failed on another member; ask its mesh for it anew.")
        return bool(broken)

    def _new_round(self, group: Group) -> GroupRound:
        """The round of a group in this call. It continues after that of the call before."""
        assert group.fingerprint is not None
        store = group.gloo if len(group.ranks) <= timing.LIMITS.shared_addresses else None
        new = GroupRound(
            self.mesh.identity.store_key(self.mesh.world, group.path, self.client.timeout()),
            group.ranks,
            group.fingerprint,
            group.group_label,
            group.mesh_label,
            address="" if store is None else store.address,
        )
        if group.round is not None:
            new.continue_after(group.round)
        group.round, self.rounds[new] = new, group
        return new

    def _rounds_of(self, rounds: Sequence[GroupRound]) -> Rounds[GroupRound, Decision]:
        """Some rounds, which decide what this call decides. The first of them has registered the mesh."""
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

    def _cancel(self, error: BaseException, found: Iterable[Group], absent: Sequence[tuple[Axis, ...]]) -> None:
        """Decide that the rounds of this call failed, also those of groups that this rank has not created."""
        self.client.interrupted = not isinstance(error, Exception)
        with contextlib.suppress(PgmeshError):  # the caller raises the first error
            unmade = [self.mesh.find_unmade(self.mesh.members(self.layout, axes)) for axes in absent]
            for group in dict.fromkeys([*found, *unmade]):
                self._cancel_round(group, error)

    def _cancel_round(self, group: Group, error: BaseException) -> None:
        """Decide that the round of a group failed, unless it is connected or another thread connects it."""
        with contextlib.suppress(PgmeshError), self._connecting_alone([group], time.monotonic()):
            if group.fingerprint and group.state is not State.CONNECTED:
                self._rounds_of([self._new_round(group)]).cancel(error)

    def _connect(self, groups: Table) -> Connected:
        """Connect the groups that are not connected yet."""
        self.groups = {each: axes for each, axes in groups.items() if each.state is State.MADE}
        if not self.groups:
            return Connected(operations=self.client.operations)
        try:
            rounds = [*map(self._new_round, self.groups)]
            with self.mesh.lock:
                for group in self.groups:
                    group.connect()
            self._rounds_of(rounds).run()
            self.client.finish()
        except BaseException as error:
            self.client.interrupted = True
            with contextlib.suppress(WorldError):
                self._cancel_rest(error)
            raise
        finally:
            self._clean_up()
        self._raise_errors()
        warm = {axes: each.done - self.client.start for each in self.client.all for axes in self.groups[each.group]}
        return Connected(self.met, warm, self.client.operations)

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

    def _cancel_rest(self, error: BaseException) -> None:
        """Publish that this rank stopped: to undecided rounds, and to groups whose first collective is not done."""
        self._rounds_of([*self.rounds]).cancel(error)
        why = why_stopped(self.mesh.rank, self.call_site, error)
        self.client.cancel(why, {each: group for each, group in self.rounds.items() if each.is_made()})

    def _clean_up(self) -> None:
        """Record the connected groups, and discard groups that cannot be used."""
        done = {collective.group for collective in self.client.all if collective.done}
        for collective in self.client.all:
            if not collective.done:
                self.mesh.discard(collective.group, "could not be connected; ask its mesh for it anew.")
                collective.keep_until_done()
        for group in self.groups:
            with self.mesh.lock:
                group.end_connect(connected=group in done)
            if group.state is State.ENDED and not self.mesh.aborted:  # another thread released it meanwhile
                self.mesh.world.clean(Left(rounds=group.take_round()))
