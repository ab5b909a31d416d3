"""The collective verb ``connect``: members arrive, compare fingerprints, and run each group's first collective.

If ranks are missing, every member that arrived raises an error that names them and their last status. The steps are
those of ``rendezvous/protocol.py``; the store thread performs them.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

import torch
import torch.distributed as dist

from pgmesh import torch_private
from pgmesh._util.formatting import name_ranks
from pgmesh.errors import LifetimeError, MismatchError, MissingRanksError, PgmeshError, WorldError
from pgmesh.groups import building, teardown
from pgmesh.groups.backends import connects_in_background
from pgmesh.groups.cache import GroupCache, call_site
from pgmesh.groups.world import device_of
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.polling_store import PollingStore
from pgmesh.rendezvous.protocol import (
    MADE,
    CompareSet,
    ConnectAttempt,
    Decision,
    Fingerprint,
    Heartbeats,
    Participant,
    Pause,
    RankStatus,
    Raw,
    Read,
    Ready,
    SetStatus,
    Step,
    StoreProtocol,
    error_text,
    pauses,
    status_key,
)
from pgmesh.rendezvous.store_thread import is_single_threaded, process_label

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout

log = logging.getLogger("pgmesh")

_numbers = itertools.count(1)
"""Numbers for the calls of ``connect`` in this process."""

_LOCAL = (Pause, Ready, SetStatus)
"""Steps for the calling thread. The store thread performs all others."""


Spelling = Union["Axis", "tuple[Axis, ...]"]
"""Axes as in the call: "tp", or ("dp", "tp")."""


@dataclass(frozen=True)
class Connected:
    """Times and operations of one call of ``connect``. Times are seconds from the call.

    Args:
        met: by axes, as in the call ("tp", or ("dp", "tp")): the time until all members of the group had arrived.
        warm: by axes: the time until the group's first collective was done.
        operations: store operations of this rank, without those of the backends.
    """

    met: dict[Spelling, float] = field(default_factory=dict)
    warm: dict[Spelling, float] = field(default_factory=dict)
    operations: int = 0

    def __str__(self) -> str:
        labels = {axes: ", ".join(map(str, axes)) if isinstance(axes, tuple) else f"{axes}" for axes in self.warm}
        width = max(map(len, labels.values()), default=0)
        lines = [
            f"group {label:<{width}}  met {self.met[axes]:6.3f} s, warm {self.warm[axes]:6.3f} s"
            for axes, label in labels.items()
        ]
        return "\n".join([*lines, f"{self.operations} store operations"])


def connect(
    cache: GroupCache,
    layout: Layout,
    combinations: Sequence[tuple[Axis, ...]],
    seconds: float,
    *,
    progress: bool = False,
) -> Connected:
    """Connect this rank's groups along each combination of axes.

    Args:
        seconds: the timeout of the whole call.
        progress: show a progress bar on stderr.
    """
    start, site = time.monotonic(), call_site()
    failure: BaseException | None = None
    found: dict[str, building.GroupRecord] = {}
    spellings: dict[str, list[Spelling]] = {}
    cache.check()
    for axes in combinations:
        layout.size(*axes)  # raises for unknown axes, before anything is published
    if not cache.is_fake():
        cache.heartbeat_thread()
    with _publish_sigterm():
        not_created = list(combinations)
        try:
            _publish_delayed(cache, start + seconds)
            for axes in combinations:
                try:
                    cache.store_timeout = _remaining(start + seconds)
                    record = _usable_record(cache, layout, axes)
                except WorldError:
                    raise
                except Exception as error:  # the other members get the reason below
                    failure = failure or error
                    continue
                not_created.remove(axes)
                if record.fingerprint is not None and record.name not in cache.connected:
                    found[record.name] = record
                    spellings.setdefault(record.name, []).append(axes[0] if len(axes) == 1 else axes)
        except WorldError:
            raise  # the store has failed, so nothing can be published
        except BaseException as error:
            failure = error
        finally:
            cache.store_timeout = seconds
        if failure is None and not found:
            return Connected()
        with _progress_bar(len(found), progress) as advance:
            call = _Call(cache, site, start, seconds, found.values(), spellings, advance)
            if failure is None:
                return call.run()
            call.cancel(failure, [_new_attempt(cache, *cache.name_for(layout, axes)) for axes in not_created])
            raise failure


def _remaining(deadline: float) -> float:
    """Timeout of a store operation that begins before the deadline, in seconds."""
    return max(deadline - time.monotonic(), timing.TIMING.shortest_answer)


def _publish_delayed(cache: GroupCache, deadline: float) -> None:
    """Publish decisions that the store did not take in time."""
    for key, decision in list(cache.unpublished.items()):
        cache.store_timeout = _remaining(deadline)
        cache.ask(CompareSet(key, decision.pack()))
        del cache.unpublished[key]


def _usable_record(cache: GroupCache, layout: Layout, axes: tuple[Axis, ...]) -> building.GroupRecord:
    """The record of a group. The group is created again if another member has published that it failed."""
    record = cache.record_of(cache.group(layout, axes, "", {}))
    attempt = cache.connected.get(record.name)
    if attempt is not None and cache.ask(Read(attempt.broken_key)) is not None:
        cache.discard(record.group, "was cancelled by another member; ask its mesh for it anew.")
        record = cache.record_of(cache.group(layout, axes, "", {}))
    return record


class _Call:
    """One call of ``connect`` on one rank: its attempts, and the first collective of each connected group."""

    def __init__(
        self,
        cache: GroupCache,
        site: str,
        start: float,
        seconds: float,
        found: Iterable[building.GroupRecord],
        spellings: Mapping[str, Sequence[Spelling]],
        advance: Callable[[], None],
    ) -> None:
        self.cache, self.call_site, self.seconds, self.spellings, self.advance = (
            cache,
            site,
            seconds,
            spellings,
            advance,
        )
        self.store_thread = cache.heartbeat_thread()
        self.start, self.deadline = start, start + seconds
        self.records = {
            _new_attempt(cache, record.name, record.ranks, record.fingerprint, record.gloo): record
            for record in found
            if record.fingerprint is not None
        }
        self.attempts = list(self.records)
        self.collectives: list[_FirstCollective] = []
        self.met: dict[Spelling, float] = {}
        self.operations = 0
        self.interrupted = False  # an error or interrupt ends this call
        self.warnings: list[str] = []  # logged by the calling thread: a log handler may block, and delay heartbeats

    def _participant(self) -> Participant:
        return Participant(
            self.cache.rank,
            self.attempts,
            number=next(_numbers),
            call_site=self.call_site,
            process=process_label(),
            deadline=self.seconds,
            lost_after=self.store_thread.lost_after,
            skip_decided=self.cache.last_connect_failed,
            pace=self.store_thread.pace,
            single_threaded=is_single_threaded() and threading.current_thread() is threading.main_thread(),
            warn=self.warnings.append,
        )

    def cancel(self, error: BaseException, attempts: Sequence[ConnectAttempt]) -> None:
        """Publish that this rank cannot connect, also for groups that it did not create.

        Args:
            attempts: for the groups that were not created.
        """
        self.attempts += attempts
        self.interrupted = not isinstance(error, Exception)
        try:
            with contextlib.suppress(WorldError):  # the caller raises the first error
                self._drive(self._participant().cancel(error))
        finally:
            self._clean_up()

    def run(self) -> Connected:
        try:
            self._drive(self._connect())
            self._warm_up()
        except BaseException as error:
            self.interrupted = True
            with contextlib.suppress(WorldError):
                self._publish_interrupt(error)
            raise
        finally:
            self._clean_up()
        errors = [failure for each in self.attempts if each.decision and (failure := each.decision.error())]
        errors += [each.error for each in self.collectives if each.error]
        if errors:
            self.cache.last_connect_failed = True
            ranks_missing = any(isinstance(error, MissingRanksError) for error in errors)
            hint = self.store_thread.store_hint() if ranks_missing else ""
            text = "\n\n".join(dict.fromkeys(map(str, errors[:8])))
            raise type(errors[0])(f"{text}{hint}") from errors[0].__cause__
        self.cache.last_connect_failed = False
        return Connected(self.met, self.warm(), self.operations)

    def warm(self) -> dict[Spelling, float]:
        """By axes, the time until the first collective was done."""
        return {
            axes: each.done - self.start
            for each in self.collectives
            if each.done
            for axes in self.spellings[each.record.name]
        }

    def _connect(self) -> StoreProtocol[None]:
        """Register the mesh, and run all attempts."""
        participant = self._participant()
        try:
            if not self.cache.registered:
                yield from self.cache.register_mesh(listed=True)
        except MismatchError as error:
            yield from participant.cancel(error)
            raise
        yield from participant.connect()
        for collective in self.collectives:
            if collective.record.gloo is not None:
                yield from collective.record.gloo.publish_address()

    def _drive(self, steps: StoreProtocol[None]) -> None:
        """Run a protocol to its end: store operations in batches on the store thread, and the other steps here.

        Errors and interrupts are raised inside the protocol.
        """
        advance: Callable[[Any], Step | None] = steps.send
        answer: Any = None
        while True:
            try:
                step = advance(answer)
            except StopIteration:
                return
            try:
                while not isinstance(step, _LOCAL):
                    if step is None:
                        return
                    step = self.store_thread.run(self._batch(steps, step), self._timeout())
                advance, answer = steps.send, self._perform_local(step)
            except BaseException as error:
                self.interrupted = True
                if inspect.getgeneratorstate(steps) != inspect.GEN_SUSPENDED:  # its own error, or still in use
                    raise
                advance, answer = steps.throw, error

    def _batch(self, steps: StoreProtocol[None], step: Step) -> StoreProtocol[Step | None]:
        """Continue a protocol up to the next local step, for a limited time; None at its end.

        It runs in the store thread. If it is cancelled, the protocol itself stays intact.
        """
        deadline = time.monotonic() + (0.0 if self.interrupted else timing.TIMING.batch)
        while True:
            self._count_operation(step)
            try:
                advance, answer = steps.send, (yield step)
            except Exception as error:
                advance, answer = steps.throw, error
            try:
                step = advance(answer)
            except StopIteration:
                return None
            if isinstance(step, _LOCAL) or time.monotonic() >= deadline:
                return step

    def _perform_local(self, step: Step) -> Any:
        if isinstance(step, Pause):
            while self.warnings:
                log.warning("%s", self.warnings.pop(0))
            self._poll_collectives()
            time.sleep(step.seconds)
            return time.monotonic() - self.start
        if isinstance(step, Ready):
            return self._ready(step.attempt)
        return self._perform(step)

    def _perform(self, step: Step) -> Any:
        """Perform one store operation."""
        self._count_operation(step)
        try:
            return self.store_thread.ask(step, self._timeout())
        except BaseException:
            self.interrupted = True
            raise

    def _count_operation(self, step: Step) -> None:
        self.operations += not isinstance(step, Raw)  # raw operations are the backend's

    def _timeout(self) -> float:
        """Timeout of the next store operations, in seconds."""
        if self.interrupted:
            return timing.TIMING.interrupted_answer
        late = time.monotonic() >= self.deadline
        return timing.TIMING.late_answer if late else _remaining(self.deadline)

    def _ready(self, attempt: ConnectAttempt) -> None:
        record = self.records.get(attempt)
        if record is None:
            return
        if not torch_private.is_known(record.group):
            raise LifetimeError(f"{record.label} was released while it was being connected.")
        self.met.update(dict.fromkeys(self.spellings[record.name], time.monotonic() - self.start))
        if record.gloo is not None and attempt.decision is not None:
            record.gloo.set_addresses(attempt.decision.addresses)
        collective = _FirstCollective(record, attempt.broken_key, self.store_thread.lost_after)
        self.collectives.append(collective)
        # Gloo connects in a background thread. NCCL connects in this one, so it waits until all attempts are decided,
        # and then uses the same order on all ranks.
        if connects_in_background(record.group):
            collective.start()

    # -- the first collective -------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Run every first collective to its end."""
        for collective in sorted(self.collectives, key=lambda each: each.record.name):
            if not collective.has_started():
                collective.start()
        # The last member may have arrived at the deadline. This leaves time to detect ranks that were lost since.
        deadline = max(self.deadline, time.monotonic() + self.store_thread.lost_after + 1.0)
        inspection = time.monotonic() + timing.TIMING.inspection
        for pause in pauses():
            running = self._poll_collectives()
            if not running:
                break
            now = time.monotonic()
            if now >= inspection:
                for collective in running:
                    self._inspect(collective)
                period = timing.TIMING.inspection * self.store_thread.pace
                inspection = min(collective.next_inspection(now, period) for collective in running)
            for collective in running if now >= deadline else ():
                collective.fail(f"did not finish in time: the deadline was {self.seconds:g} s")
            time.sleep(pause)
        for collective in self.collectives:
            if collective.error is not None:
                self._publish_broken(collective)

    def _publish_interrupt(self, error: BaseException) -> None:
        """Publish that this rank stopped, for connected groups whose first collective is not done."""
        started = {collective.record.name for collective in self.collectives}
        for attempt, record in self.records.items():  # attempts may be decided before their collective has started
            if attempt.decision == MADE and record.name not in started:
                self.collectives.append(_FirstCollective(record, attempt.broken_key, self.store_thread.lost_after))
        for collective in self.collectives:
            if not collective.done and collective.error is None and not isinstance(error, WorldError):
                why = f"rank {self.cache.rank} stopped connecting at {self.call_site}: {error_text(error)}"
                collective.fail(f"was cancelled because {why}")
                self._publish_broken(collective)

    def _inspect(self, collective: _FirstCollective) -> None:
        """Read whether another member has failed, and the statuses of the members."""
        text = self._perform(Read(collective.broken_key))
        if text is not None:
            collective.error, collective.published = Decision.unpack(collective.broken_key, text).error(), True
            return
        others = [rank for rank in collective.record.ranks[: timing.LIMITS.statuses + 1] if rank != self.cache.rank]
        answers = [RankStatus.unpack(rank, self._perform(Read(status_key(rank)))) for rank in others]
        collective.inspect([answer for answer in answers if answer])

    def _publish_broken(self, collective: _FirstCollective) -> None:
        self._perform(CompareSet(collective.broken_key, collective.decision().pack()))
        collective.published = True

    def _poll_collectives(self) -> list[_FirstCollective]:
        """Poll the first collectives; return those that still run."""
        running = [collective for collective in self.collectives if collective.is_running()]
        for collective in running:
            if collective.poll():
                self.advance()
        return [collective for collective in running if collective.is_running()]

    def _clean_up(self) -> None:
        """Record the attempts in the cache, and discard groups that cannot be used."""
        cache, done = self.cache, {each.record.name for each in self.collectives if each.done}
        self.store_thread.clear_status()
        cache.operations += self.operations
        for attempt in self.attempts:
            name, _, number = attempt.name.rpartition("/attempt.")
            cache.attempt_counts[name] = max(cache.attempt_counts[name], int(number) + 1)
            cache.attempts_to_clean_up.setdefault(name, []).append(attempt)
            if name in done:
                cache.connected[name] = attempt
            if attempt.decision is not None and attempt.decision.kind == "mismatch":
                cache.keep_mismatch_keys(filter(None, (attempt.mismatch_key, attempt.mesh_mismatch_key)))
        for collective in self.collectives:
            if collective.error is not None or not collective.done:
                if not collective.published:
                    cache.unpublished[collective.broken_key] = collective.decision()
                collective.keep_until_done()
                cache.discard(collective.record.group, "could not be connected; ask its mesh for it anew.")
        cache.last_connect_failed |= len(done) < len(self.attempts)


class _FirstCollective:
    """A group's first collective: an all-reduce of one number, which allocates memory and whose sum is checked."""

    def __init__(self, record: building.GroupRecord, broken_key: str, lost_after: float) -> None:
        self.record, self.broken_key = record, broken_key
        self.error: PgmeshError | None = None
        self.published = False  # the error is in the store
        self.done = 0.0
        self._work: Any = None
        self._failure: Exception | None = None  # raised by torch
        self._failed_at = 0.0
        self._heartbeats = Heartbeats(lost_after)

    def start(self) -> None:
        self._ones = torch.ones(1, device=device_of(self.record.group))
        self._work = dist.all_reduce(self._ones, group=self.record.group, async_op=True)

    def has_started(self) -> bool:
        return self._work is not None

    def keep_until_done(self) -> None:
        """Keep the group alive while the collective hangs."""
        if self.has_started() and not self._work.is_completed():
            teardown.keep_until_done(self.record.group, self._work)

    def is_running(self) -> bool:
        return self.has_started() and not self.done and self.error is None

    def poll(self) -> bool:
        """Check for the end of the collective. True if it has just succeeded."""
        if self._failure is not None or not self._work.is_completed():
            return False
        try:
            self._work.wait()
            total = int(self._ones.item())
        except Exception as error:
            # Without its frames: they refer to this group, and the backend keeps the error.
            self._failure, self._failed_at = error.with_traceback(None), time.monotonic()
            store = self.record.gloo
            if store is not None and store.failure is not None:
                self.error = store.failure
            return False
        size = self.record.group.size()
        if total != size:
            self.error = MismatchError(
                f"{self.record.label} has {size} members, but the sum of one from each is {total}."
            )
            return False
        self.done = time.monotonic()
        return True

    def next_inspection(self, now: float, period: float) -> float:
        return self._heartbeats.next_inspection(now, period)

    def inspect(self, statuses: Sequence[RankStatus]) -> None:
        """Fail if a member is lost, or if torch reported an error a while ago and no member is lost."""
        now, lost = time.monotonic(), {}
        for last in statuses:
            self._heartbeats.update(last, now)
            if self._heartbeats.is_lost(last, now):
                silence = self._heartbeats.silence(last.rank, now)
                lost[last.rank] = (
                    f"\n  rank {last.rank} has sent no heartbeat for {silence:.0f} s; its last status: {last}"
                )
        if lost:
            self.error = MissingRanksError(
                f"{self.record.label}: {name_ranks(lost)} arrived, and then failed in the first collective."
                f"{''.join(lost.values())}"
            )
        elif self._failure is not None and now - self._failed_at >= self._heartbeats.lost_after + 1.0:
            self.fail(f"failed: {str(self._failure).splitlines()[0]}")

    def decision(self) -> Decision:
        """The decision for the other members of a group that failed."""
        self.fail("was cancelled")
        return Decision("mismatch" if isinstance(self.error, MismatchError) else "missing", str(self.error))

    def fail(self, reason: str) -> None:
        if self.error is None:
            members = name_ranks(self.record.ranks)
            self.error = MissingRanksError(
                f"{self.record.label}: its first collective {reason}. Its members are {members}."
            )
            self.error.__cause__ = self._failure


def _new_attempt(
    cache: GroupCache, name: str, ranks: Sequence[int], fingerprint: Fingerprint, store: PollingStore | None = None
) -> ConnectAttempt:
    with cache.lock:  # two threads that connect the same group use different attempts
        number = cache.attempt_counts[name]
        cache.attempt_counts[name] += 1
    address = store.address if store is not None and len(ranks) <= timing.LIMITS.shared_addresses else ""
    attempt = f"{name}/attempt.{number}"
    return ConnectAttempt(attempt, ranks, fingerprint, f"{name}/options/mismatch", cache.mismatch_key, address)


@contextlib.contextmanager
def _progress_bar(total: int, progress: bool) -> Iterator[Callable[[], None]]:
    """A progress bar over the groups. Without rich, it prints a line for each group."""
    if not progress:
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        count = itertools.count(1)
        yield lambda: print(f"pgmesh: connected {next(count)} of {total} groups", file=sys.stderr)
        return
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("connecting", total=total)
        yield lambda: bar.advance(task)


class Terminated(BaseException):
    """SIGTERM was received."""


@contextlib.contextmanager
def _publish_sigterm() -> Iterator[None]:
    """If SIGTERM has its default action, publish the reason to the other ranks before it ends this process."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not ours:
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise Terminated("by SIGTERM")

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
