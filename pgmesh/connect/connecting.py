"""The collective call ``connect``: members arrive, compare fingerprints, and run each group's first collective.

If ranks are missing, every member that arrived raises an error that names them and their last status. The protocol is
in ``rendezvous/protocol.py``.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

from pgmesh import torch_private
from pgmesh._util.call_sites import call_site
from pgmesh.connect.first_collective import FirstCollective
from pgmesh.errors import LifetimeError, MissingRanksError, PgmeshError, WorldError
from pgmesh.groups import building
from pgmesh.groups.backends import connects_in_background
from pgmesh.groups.cache import GroupCache
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.client import CallClient
from pgmesh.rendezvous.operations import Read
from pgmesh.rendezvous.protocol import ConnectAttempt, Participant, pauses
from pgmesh.rendezvous.records import error_text
from pgmesh.rendezvous.store_thread import StoreThread, process_label

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout

log = logging.getLogger("pgmesh")

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


def connect(cache: GroupCache, layout: Layout, combinations: Sequence[tuple[Axis, ...]], seconds: float) -> Connected:
    """Connect this rank's groups along each combination of axes.

    Args:
        seconds: the timeout of the whole call.
    """
    cache.check()
    for axes in combinations:
        layout.size(*axes)  # raises for unknown axes, before anything is published
    if cache.is_fake():
        for axes in combinations:
            cache.group(layout, axes, "", {})
        return Connected()
    return _Call(cache, layout, combinations, seconds).run()


class _Client(CallClient):
    """The store and the clock of one call. Its pauses poll the first collectives.

    It does not refer to the call: the collectives hold groups, and a reference cycle would keep them until the next
    garbage collection.
    """

    def __init__(self, thread: StoreThread, seconds: float) -> None:
        super().__init__(thread, seconds)
        self.collectives: list[FirstCollective] = []

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.poll()
        super().sleep(seconds)

    def poll(self) -> list[FirstCollective]:
        """Poll the first collectives; return those that still run."""
        for collective in self.collectives:
            if collective.is_running():
                collective.poll()
        return [collective for collective in self.collectives if collective.is_running()]


class _Call:
    """One call of ``connect`` on one rank: its attempts, and the first collective of each connected group."""

    def __init__(
        self, cache: GroupCache, layout: Layout, combinations: Sequence[tuple[Axis, ...]], seconds: float
    ) -> None:
        self.cache, self.layout, self.combinations, self.seconds = cache, layout, combinations, seconds
        self.call_site = call_site()
        self.client = _Client(cache.registry.heartbeat_thread(), seconds)
        self.statuses = cache.registry.new_statuses()
        self.records: dict[str, building.GroupRecord] = {}  # by path, those to connect
        self.axes_of: dict[str, list[GroupAxes]] = {}  # by path
        self.attempts: dict[str, ConnectAttempt] = {}  # by path
        self.collectives = self.client.collectives
        self.met: dict[GroupAxes, float] = {}

    def run(self) -> Connected:
        try:
            self._find_groups()
            with self.cache.attempts.connecting(self.records, self.client.deadline):
                self._find_groups()  # another thread may have connected or released them meanwhile
                if self._discard_broken():
                    self._find_groups()
                of = self.cache.attempts.of
                self.records = {path: record for path, record in self.records.items() if not of(path).connected}
                return self._connect() if self.records else Connected()
        finally:
            self.cache.operations += self.client.operations

    def _find_groups(self) -> None:
        """Find or create the groups. If one cannot be created, publish the failure for it and for all others."""
        self.records, self.axes_of = {}, {}
        for i, axes in enumerate(self.combinations):
            try:
                record = self.cache.record(self.layout.block_of(self.cache.rank, *axes), "", {}, self.layout, axes)
            except BaseException as error:
                self._cancel(error, self.combinations[i:])
                raise
            if record.fingerprint is not None:
                self.records[record.path] = record
                self.axes_of.setdefault(record.path, []).append(axes[0] if len(axes) == 1 else axes)

    def _discard_broken(self) -> bool:
        """Discard those connected groups whose ``broken`` key another member has set. True if there are any."""
        connected = {path: made for path in self.records if (made := self.cache.attempts.of(path).connected)}
        answers = self.client.run(*(Read(f"{each.name}/broken") for each in connected.values())) if connected else []
        broken = [path for path, answer in zip(connected, answers) if answer is not None]
        for path in broken:
            reason = "was cancelled by another member; ask its mesh for it anew."
            self.cache.discard(self.records[path], connected[path].number, reason)
        return bool(broken)

    def _attempt(self, record: building.GroupRecord) -> ConnectAttempt:
        """The next attempt to connect a group."""
        assert record.fingerprint is not None
        store = record.gloo if len(record.ranks) <= timing.LIMITS.shared_addresses else None
        attempt = ConnectAttempt(
            self.cache.store_key(record.path, self.client.timeout()),
            record.ranks,
            record.fingerprint,
            record.group_label,
            record.mesh_label,
            address="" if store is None else store.address,
        )
        state = self.cache.attempts.of(record.path)
        if state.attempt is not None:
            attempt.continue_after(state.attempt)
        self.attempts[record.path] = state.attempt = attempt
        return attempt

    def _participant(self, attempts: Sequence[ConnectAttempt], ready: Callable[[ConnectAttempt], None]) -> Participant:
        thread = self.client.thread
        return Participant(
            self.cache.rank,
            attempts,
            self.client,
            call_site=self.call_site,
            process=process_label(),
            deadline=self.seconds,
            statuses=self.statuses,
            mesh_mismatch_key=self.cache.identity.refusal_key,
            pace=thread.pace,
            warn=self._warn,
            ready=ready,
        )

    def _warn(self, text: str) -> None:
        """Log a text, unless it repeats an error that this rank has raised."""
        if not any(text.endswith(error) for error in self.cache.last_errors):
            log.warning("%s", text)

    def _cancel(self, error: BaseException, absent: Sequence[tuple[Axis, ...]]) -> None:
        """Decide that the attempts of this call failed, also those of groups that this rank has not created."""
        self.client.interrupted = not isinstance(error, Exception)
        # The caller raises the first error. Where another thread connects one of the groups, nothing is published.
        with contextlib.suppress(PgmeshError), self.cache.attempts.connecting(self.records, time.monotonic()):
            placeholders = [self.cache.placeholder(self.layout, axes) for axes in absent]
            records = [*self.records.values(), *(each for each in placeholders if len(each.ranks) > 1)]
            attempts = [self._attempt(each) for each in records]
            self._participant(attempts, ready=lambda attempt: None).cancel(error)

    def _connect(self) -> Connected:
        try:
            attempts = [self._attempt(record) for record in self.records.values()]
            self._participant(attempts, ready=self._ready).connect()
            self._warm_up()
        except BaseException as error:
            self.client.interrupted = True
            with contextlib.suppress(WorldError):
                self._publish_failed_call(error)
            raise
        finally:
            self._clean_up()
        self._raise_errors()
        warm = {
            axes: each.done - self.client.start for each in self.collectives for axes in self.axes_of[each.record.path]
        }
        return Connected(self.met, warm, self.client.operations)

    def _raise_errors(self) -> None:
        errors = [failure for each in self.attempts.values() if each.decision and (failure := each.decision.error())]
        errors += [each.error for each in self.collectives if each.error]
        self.cache.last_errors = set(map(str, errors))
        if errors:
            ranks_missing = any(isinstance(error, MissingRanksError) for error in errors)
            hint = self.client.thread.store_hint() if ranks_missing else ""
            text = "\n\n".join(dict.fromkeys(map(str, errors[:8])))
            raise type(errors[0])(f"{text}{hint}") from errors[0].__cause__

    def _ready(self, attempt: ConnectAttempt) -> None:
        """Start the first collective of a group whose members have all arrived."""
        path = next(path for path, each in self.attempts.items() if each is attempt)
        record = self.records[path]
        if not torch_private.is_known(record.group):
            raise LifetimeError(f"{record.label} was released while it was being connected.")
        self.met.update(dict.fromkeys(self.axes_of[path], self.client.now()))
        if record.gloo is not None and attempt.decision is not None:
            record.gloo.set_addresses(attempt.decision.addresses)
        collective = self._collective(record, attempt)
        self.collectives.append(collective)
        # Gloo connects in a background thread. NCCL connects in this one, so it waits until all attempts are decided,
        # and then uses the same order on all ranks.
        if connects_in_background(record.group):
            collective.start()

    def _collective(self, record: building.GroupRecord, attempt: ConnectAttempt) -> FirstCollective:
        return FirstCollective(record, f"{attempt.name}/broken", self.statuses)

    # -- the first collectives --------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Run every first collective to its end."""
        thread = self.client.thread
        for collective in sorted(self.collectives, key=lambda each: each.record.name):
            collective.start()
        # The last member may have arrived at the deadline. This leaves time to detect ranks that were lost since.
        deadline = max(self.client.deadline, time.monotonic() + thread.lost_after + 1.0)
        inspection = time.monotonic() + timing.TIMING.inspection
        for pause in pauses():
            running = self.client.poll()
            if not running:
                break
            now = time.monotonic()
            if now >= inspection:
                inspection = now + timing.TIMING.inspection * thread.pace
                self._inspect(running)
            if now >= deadline:
                for collective in self.client.poll():
                    collective.fail(f"did not finish in time: the deadline was {self.seconds:g} s")
            time.sleep(pause)
        self._publish_failures()

    def _inspect(self, running: Sequence[FirstCollective]) -> None:
        """Read whether another member failed, and the statuses of the members."""
        members = {rank for each in running for rank in each.record.ranks[: timing.LIMITS.statuses + 1]}
        self.statuses.read(self.client.run, members - {self.cache.rank})
        following = {rank for each in running for rank in each.following(timing.LIMITS.asking)}
        self.statuses.find_ended(self.client.run, following, all_of_them=True)
        broken = dict(zip(running, self.client.run(*(Read(each.broken_key) for each in running))))
        for collective in self.client.poll():  # again, since a member whose collective is done may have left
            collective.inspect(broken[collective])

    def _publish_failures(self) -> None:
        operations = [step for collective in self.collectives for step in collective.publish_failure()]
        if operations:
            self.client.run(*operations)

    def _publish_failed_call(self, error: BaseException) -> None:
        """Publish that this rank stopped, for connected groups whose first collective is not done."""
        started = {collective.record.path for collective in self.collectives}
        for path, attempt in self.attempts.items():
            if attempt.is_made() and path not in started:
                self.collectives.append(self._collective(self.records[path], attempt))
        for collective in self.collectives:
            if not collective.done:
                why = f"rank {self.cache.rank} stopped connecting at {self.call_site}: {error_text(error)}"
                collective.fail(f"was cancelled because {why}")
        self._publish_failures()

    def _clean_up(self) -> None:
        """Record the connected groups in the cache, and discard groups that cannot be used."""
        done = {each.record.path for each in self.collectives if each.done and not each.error}
        for path, attempt in self.attempts.items():
            state = self.cache.attempts.of(path)
            if state.attempt is not attempt:  # another thread released the group meanwhile
                self.cache.registry.clean_store(attempt.leave)
            elif path in done:
                state.connected = attempt
        for collective in self.collectives:
            if collective.error is not None or not collective.done:
                number = self.attempts[collective.record.path].number
                self.cache.discard(collective.record, number, "could not be connected; ask its mesh for it anew.")
                collective.keep_until_done()
