"""The protocol by which the members of a group connect.

It is straight-line code in the caller's thread over a ``Client``: the store, a clock and a pause. So the same code runs
on the world's store and under a model checker that tries every interleaving, crash and timeout.

A *connect attempt* is one round in which the members of a group connect. It has a number, and these store keys:

    <group>/<number>/arrivals   a record of each member that arrived: its rank, process, line of code, fingerprint and
                                address
    <group>/<number>/count      the number of arrivals
    <group>/<number>/decision   the outcome, the same for all members. The first rank to write it decides, and it
                                never changes
    <group>/<number>/broken     the reason, if the first collective failed on a member after the decision
    <group>/<number>/left       the number of members that have released the group. The last one deletes these keys
    <group>/mismatch            a mismatch that the store of a backend found

Attempts are numbered from 0. In one batch, a rank reads the decision of an attempt and arrives at it. If the attempt
was already decided, the rank goes on to the next one.

A member that has read the arrivals of all members decides that the group is made; this is usually the last one to
arrive. A member decides that the attempt failed if it finds a reason: a different fingerprint, a lost member, an error
of its own, or its deadline. A rank that arrives later logs that failure and arrives at the next attempt. A mismatch is
permanent, so that rank raises it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pgmesh._util.formatting import format_ranks, name_ranks
from pgmesh.errors import MismatchError, WorldError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Add, Append, CompareSet, Delete, Operation, Read
from pgmesh.rendezvous.records import Decision, Fingerprint, decode_fingerprint, error_text, pack, quoted, unpack
from pgmesh.rendezvous.statuses import Circle, PendingConnect, Statuses, circle_text, find_circle


def pauses(pace: float = 1.0, first: float = 0.0) -> Iterator[float]:
    """Pauses between reads of the store, in seconds: each is 1.5 times the one before, up to a limit.

    Args:
        pace: factor of the limit; greater than 1 in a large world.
        first: shortest first pause.

    >>> [round(pause, 4) for pause, _ in zip(pauses(), range(10))]
    [0.002, 0.003, 0.0045, 0.0068, 0.0101, 0.0152, 0.0228, 0.0342, 0.05, 0.05]
    """
    longest = timing.TIMING.longest_pause * pace
    pause = min(max(first, timing.TIMING.first_pause), longest)
    while True:
        yield pause
        pause = min(pause * 1.5, longest)


@dataclass
class Waiting:
    """When a waiting rank acts next, in seconds of its call.

    Args:
        inspection: the next inspection.
        warning: the log of what it waits for; inf once that is written.
    """

    inspection: float
    warning: float

    def warns(self, now: float) -> bool:
        """True once, when it is time to log what the rank waits for."""
        due = now >= self.warning
        self.warning = math.inf if due else self.warning
        return due


# -- publish or compare -----------------------------------------------------------------------------------------------


def register_mesh(key: str, fingerprint: Fingerprint) -> tuple[Operation, Operation]:
    """The operations that publish the fingerprint of a mesh. Each rank performs them once for each mesh."""
    encoded = fingerprint.encoded.decode()
    return Append(f"{key}/fingerprints", f"{encoded}\n"), CompareSet(key, encoded)


def check_mesh(run: Callable[..., list[Any]], key: str, fingerprint: Fingerprint, first: bytes) -> None:
    """Compare the fingerprint of a mesh with the first one that was published.

    Args:
        run: performs operations on the store.
        first: the answer to the last operation of ``register_mesh``.

    Raises:
        MismatchError: they differ. It is also published under ``<key>/mismatch`` for the ranks that wait.
    """
    if fingerprint.mismatch([first]) is not None:
        (seen,) = run(Read(f"{key}/fingerprints"))
        where = key if decode_fingerprint(first) is None else f"{key}/fingerprints"
        mismatch = fingerprint.mismatch([first, *(seen or b"").splitlines()], where)
        _raise_mismatch(run, f"{key}/mismatch", mismatch or "")


def check_published(
    run: Callable[..., list[Any]], mismatch_key: str, fingerprint: Fingerprint, seen: bytes, where: str
) -> None:
    """Compare a fingerprint with an encoded one.

    Args:
        run: performs operations on the store.
        mismatch_key: store key for the mismatch.
        where: store key that ``seen`` was read from.

    Raises:
        MismatchError: they differ. It is also published for the ranks that wait.
    """
    if mismatch := fingerprint.mismatch([seen], where):
        _raise_mismatch(run, mismatch_key, mismatch)


def _raise_mismatch(run: Callable[..., list[Any]], key: str, mismatch: str) -> None:
    """Publish a mismatch for the ranks that wait, and raise the one that was published first."""
    (text,) = run(CompareSet(key, Decision("mismatch", mismatch).pack()))
    raise MismatchError(Decision.unpack(key, text).text)


class Client(Protocol):
    """The store and the clock of one call."""

    def run(self, *operations: Operation) -> list[Any]:
        """Perform operations on the store in this order, and return its answers."""

    def now(self) -> float:
        """Seconds since the start of the call."""

    def sleep(self, seconds: float) -> None:
        """Wait."""

    def set_pending(self, pending: tuple[PendingConnect, ...]) -> None:
        """Publish the groups that this rank waits for."""


# -- connect attempts -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ConnectAttempt:
    """The attempts of one rank to connect one group: the current one, and those that were decided before.

    Args:
        key: prefix of the group's store keys.
        ranks: the members.
        fingerprint: the group's fingerprint on this rank.
        group: the group in messages, such as "group dp".
        mesh: its mesh in messages, such as "mesh 'actor'".
        number: number of the attempt. A rank begins at the lowest one whose decision it does not know.
        address: this rank's address, for the arrivals; "" for none.
        arrived_at: the numbers of the attempts that this rank arrived at.
        sent_to: the same, with those whose arrival the store did not answer.
        decision: the outcome, once it is known.
        missing: the members that had not arrived when the arrivals were last read.
        count_seen: the count of arrivals at that time.
    """

    key: str
    ranks: Sequence[int]
    fingerprint: Fingerprint
    group: str
    mesh: str
    number: int = 0
    address: str = ""
    arrived_at: list[int] = field(default_factory=list)
    sent_to: set[int] = field(default_factory=set)
    decision: Decision | None = None
    missing: tuple[int, ...] = ()
    count_seen: bytes | None = b""

    @property
    def label(self) -> str:
        return f"{self.fingerprint.subject} (ranks {format_ranks(tuple(self.ranks))})"

    @property
    def name(self) -> str:
        """Prefix of the store keys of the current attempt."""
        return f"{self.key}/{self.number}"

    @property
    def decision_key(self) -> str:
        return f"{self.name}/decision"

    @property
    def mismatch_key(self) -> str:
        """Store key under which the store of a backend publishes a mismatch."""
        return f"{self.key}/mismatch"

    def continue_after(self, before: ConnectAttempt) -> None:
        """Begin where an earlier call ended: at its last attempt if that is undecided, otherwise at the next one."""
        self.number = before.number if before.decision is None else before.number + 1
        self.arrived_at, self.sent_to = before.arrived_at, before.sent_to

    def is_made(self) -> bool:
        return self.decision is not None and self.decision.kind == "made"

    def leave(self, run: Callable[..., list[Any]]) -> None:
        """Release the keys of all attempts. The last of the members that arrived at one deletes its keys."""
        for number in self.arrived_at:  # twice, if an error of the store made this rank arrive again
            left, arrived = run(Add(f"{self.key}/{number}/left"), Read(f"{self.key}/{number}/count"))
            if left >= int(arrived or b"0"):
                run(Delete(self._keys_of(number)))

    def store_keys(self) -> list[str]:
        """The store keys of all attempts that this rank arrived at."""
        return [key for number in {*self.arrived_at} for key in self._keys_of(number)]

    def _keys_of(self, number: int) -> tuple[str, ...]:
        return tuple(f"{self.key}/{number}/{key}" for key in ("arrivals", "count", "decision", "broken", "left"))


@dataclass
class Participant:
    """One rank's call of ``connect``: all its attempts at once.

    Args:
        rank: this rank.
        attempts: one for each group, all of one mesh.
        client: the store and the clock.
        call_site: the line of code that called.
        process: description of this process. It reveals two processes that have the same rank.
        deadline: seconds from the start of the call.
        statuses: the statuses of the other ranks, which this call reads.
        mesh_mismatch_key: store key under which a rank publishes a mismatch of the mesh, or that it aborted the mesh;
            "" for none.
        skip_decided: arrive at the next attempt if the current one was decided before this rank arrived.
        pace: factor of all pauses, to spare the store in a large world.
        warn: called with text for the log.
        ready: called with each attempt that succeeded.
        waiting: when this rank acts next.
        circle: the ranks that wait for each other, this one among them, as they were last found; empty for none.
    """

    rank: int
    attempts: Sequence[ConnectAttempt]
    client: Client
    call_site: str
    process: str
    deadline: float
    statuses: Statuses
    mesh_mismatch_key: str = ""
    skip_decided: bool = True
    pace: float = 1.0
    warn: Callable[[str], None] = field(default=lambda text: None)
    ready: Callable[[ConnectAttempt], None] = field(default=lambda attempt: None)
    waiting: Waiting = field(init=False)
    circle: Circle = field(default=(), init=False)

    def connect(self) -> None:
        """Arrive at every attempt and wait for its decision.

        Raises:
            MismatchError: another rank has a different mesh.
            LifetimeError: another rank has aborted the mesh.
            WorldError: the store has failed.
        """
        try:
            self._arrive()
            self._wait_for_decisions()
        except WorldError:
            raise
        except BaseException as error:
            with contextlib.suppress(WorldError):
                self.cancel(error)
            raise
        finally:
            self.client.set_pending(())

    def cancel(self, error: BaseException) -> None:
        """Decide that all undecided attempts failed because of an error on this rank."""
        why = f"rank {self.rank} stopped connecting at {self.call_site}: {error_text(error)}"
        for attempt in self._undecided():
            self._decide(attempt, Decision.of(error, f"{attempt.label} was cancelled because {why}"))

    def _run_each(self, batches: Iterable[Sequence[Operation]]) -> list[list[Any]]:
        """Perform several lists of operations at once; return the answers to each list."""
        batches = list(batches)
        answers = iter(self.client.run(*itertools.chain(*batches)) if batches else ())
        return [[next(answers) for _ in batch] for batch in batches]

    def _undecided(self) -> list[ConnectAttempt]:
        return [attempt for attempt in self.attempts if attempt.decision is None]

    # -- arriving -------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        """Arrive at the first attempt without a decision, for each group."""
        arriving = list(self.attempts)
        full = []
        while arriving:
            sent_before = [attempt.number in attempt.sent_to for attempt in arriving]
            for attempt in arriving:
                attempt.sent_to.add(attempt.number)
            answers = self._run_each(map(self._arrival, arriving))
            again = []
            for attempt, arrived_again, (earlier, _, count) in zip(arriving, sent_before, answers):
                attempt.arrived_at.append(attempt.number)
                decision = None if earlier is None else Decision.unpack(attempt.decision_key, earlier)
                if decision is None:
                    if count >= len(attempt.ranks):
                        full.append(attempt)
                elif decision.is_permanent or not self.skip_decided or (arrived_again and decision.kind == "made"):
                    self._take(attempt, decision)
                else:
                    if text := decision.text:
                        self.warn(f"an earlier attempt to connect failed before rank {self.rank} arrived: {text}")
                    attempt.number += 1
                    again.append(attempt)
            arriving = again
        self._read_arrivals(full)

    def _arrival(self, attempt: ConnectAttempt) -> tuple[Operation, Operation, Operation]:
        fingerprint = attempt.fingerprint.encoded.decode()
        arrival = pack(
            rank=self.rank,
            call_site=self.call_site,
            process=self.process,
            fingerprint=fingerprint,
            address=attempt.address,
        )
        name = attempt.name
        return Read(f"{name}/decision"), Append(f"{name}/arrivals", f"{arrival}\n"), Add(f"{name}/count")

    def _read_arrivals(self, attempts: Iterable[ConnectAttempt]) -> None:
        """Read the arrivals of some attempts, and decide on a mismatch or on success."""
        attempts = list(attempts)
        texts = self.client.run(*(Read(f"{attempt.name}/arrivals") for attempt in attempts)) if attempts else []
        for attempt, text in zip(attempts, texts):
            decision = self._decision_from_arrivals(attempt, text or b"")
            if decision is not None:
                self._decide(attempt, decision)

    def _decision_from_arrivals(self, attempt: ConnectAttempt, text: bytes) -> Decision | None:
        """The decision that follows from the arrivals; None if members are missing."""
        key = f"{attempt.name}/arrivals"
        records: dict[int, dict[str, Any]] = {}
        members = {*attempt.ranks}
        for line in text.splitlines():
            record = unpack(line, rank=int, call_site=str, process=str, fingerprint=str, address=str)
            if record is None or record["rank"] not in members or not record["address"].isascii():
                foreign = f"{attempt.label}: the store's key {key} holds {quoted(line)}, which no member wrote."
                return Decision("mismatch", foreign)
            first = records.setdefault(record["rank"], record)
            if first["process"] != record["process"]:
                both = f"both {first['process']} and {record['process']} connect as rank {record['rank']}"
                return Decision("duplicate", f"{attempt.label}: {both}.")
        attempt.missing = tuple(rank for rank in attempt.ranks if rank not in records)
        mismatch = attempt.fingerprint.mismatch([each["fingerprint"].encode() for each in records.values()], key)
        if mismatch is not None:
            return Decision("mismatch", mismatch)
        if attempt.missing:
            return None
        addresses = tuple(records[rank]["address"] for rank in attempt.ranks)
        all_fit = all(addresses) and sum(map(len, addresses)) < timing.LIMITS.record_chars // 8
        return Decision("made", addresses=addresses if all_fit else ())

    def _decide(self, attempt: ConnectAttempt, decision: Decision) -> None:
        """Publish a decision, or take the one that is already there."""
        (text,) = self.client.run(CompareSet(attempt.decision_key, decision.pack()))
        self._take(attempt, Decision.unpack(attempt.decision_key, text))

    def _take(self, attempt: ConnectAttempt, decision: Decision) -> None:
        attempt.decision = decision
        if attempt.is_made():
            self.ready(attempt)

    # -- waiting --------------------------------------------------------------------------------------------------

    def _wait_for_decisions(self) -> None:
        now = self.client.now()
        slow = min(now, timing.TIMING.longest_start_delay)  # on a slow store, early inspections would make it slower
        first = now + max(timing.TIMING.first_inspection * self.pace, slow)
        self.waiting = Waiting(first, min(self.deadline / 3, timing.TIMING.stragglers))
        for pause in pauses(self.pace, now / 4):
            self._look()
            if not self._undecided():
                return
            self.client.sleep(min(pause, max(0.0, self.deadline - self.client.now())))

    def _look(self) -> None:
        """Read the decisions, and inspect or give up if it is time."""
        self._read_decisions()
        now = self.client.now()
        if not self._undecided():
            return
        if now >= self.deadline:
            self._give_up()
        elif now >= self.waiting.inspection:
            self._inspect()
            period = self.statuses.next_inspection(timing.TIMING.inspection * self.pace)
            self.waiting.inspection = self.client.now() + period
            if self._undecided() and self.waiting.warns(now):
                self._warn(now)

    def _read_decisions(self) -> None:
        """Read the decisions, and whether a rank has a different mesh or has aborted this one."""
        undecided = self._undecided()
        if not undecided:
            return
        keys = [attempt.decision_key for attempt in undecided] + [self.mesh_mismatch_key] * bool(self.mesh_mismatch_key)
        texts = self.client.run(*map(Read, keys))
        for attempt, text in zip(undecided, texts):
            if text is not None:
                self._take(attempt, Decision.unpack(attempt.decision_key, text))
        if self.mesh_mismatch_key and texts[-1] is not None:
            raise Decision.unpack(self.mesh_mismatch_key, texts[-1]).error() or MismatchError("")

    def _inspect(self) -> None:
        """Read the arrivals that are new, publish this rank's status, and look for members that were lost."""
        undecided = self._undecided()
        answers = self._run_each([Read(each.mismatch_key), Read(f"{each.name}/count")] for each in undecided)
        changed = []
        for attempt, (mismatch, count) in zip(undecided, answers):
            if mismatch is not None:
                self._decide(attempt, Decision.unpack(attempt.mismatch_key, mismatch))
            elif count != attempt.count_seen:
                attempt.count_seen = count
                changed.append(attempt)
        self._read_arrivals(changed)
        self.client.set_pending(self._pending())
        self._read_statuses()
        self.statuses.find_ended(self.client.run, self._to_ask(), all_of_them=True)
        with_lost = [attempt for attempt in self._undecided() if self.statuses.lost(self._watched(attempt))]
        self._read_arrivals(with_lost)  # a rank that died between its arrival and the count has arrived
        for attempt in with_lost:
            if attempt.decision is None and self.statuses.lost(self._watched(attempt)):
                self._decide(attempt, Decision("missing", self._describe_missing(attempt)))

    def _pending(self) -> tuple[PendingConnect, ...]:
        return tuple(
            PendingConnect(
                attempt.name,
                attempt.group,
                attempt.mesh,
                format_ranks(tuple(attempt.ranks)),
                self.call_site,
                attempt.missing[: timing.LIMITS.statuses],
            )
            for attempt in self._undecided()
        )

    def _watched(self, attempt: ConnectAttempt) -> list[int]:
        """The next member after this rank that has arrived, which may have been lost since, and the missing ones.

        Each member that waits watches one other, so the first of several lost ones in a row is noticed.
        """
        place, missing = attempt.ranks.index(self.rank), {*attempt.missing}
        others = (*attempt.ranks[place + 1 :], *attempt.ranks[:place])
        return [*[rank for rank in others if missing and rank not in missing][:1], *attempt.missing]

    def _to_ask(self) -> list[int]:
        """The ranks whose listeners this rank asks. The first members that have arrived ask for all others."""
        ranks: list[int] = []
        for attempt in self._undecided():
            before = {*attempt.ranks[: attempt.ranks.index(self.rank)]} - {*attempt.missing}
            ranks += self._watched(attempt) if len(before) < timing.LIMITS.asking else ()
        return [*dict.fromkeys(ranks)][: timing.LIMITS.statuses]

    def _read_statuses(self, others: Iterable[int] = ()) -> None:
        """Read the statuses of the ranks that this one watches, or of others."""
        watched = dict.fromkeys(rank for attempt in self._undecided() for rank in self._watched(attempt))
        ranks = [rank for rank in others or watched if rank != self.rank][: timing.LIMITS.statuses]
        self.statuses.read(self.client.run, ranks)

    def _warn(self, now: float) -> None:
        when = f" in {now:.0f} s so far"
        texts = [self._describe_missing(attempt, when) for attempt in self._undecided()]
        self.circle = self._find_circle()
        if self.circle:
            texts.append(circle_text(self.circle))
        self.warn("\n".join(texts))

    def _give_up(self) -> None:
        """Decide that all undecided attempts failed at the deadline."""
        self._read_arrivals(self._undecided())
        self._read_statuses()
        self.circle = self._find_circle()
        if self.circle:  # attempts of other groups in the circle too, so that all ranks fail and can try again
            # In the order of the circle: a rank fails after the attempt that waits for it, so it cannot arrive there.
            text = Decision("circle", circle_text(self.circle)).pack()
            self.client.run(*(CompareSet(f"{wait.name}/decision", text) for _, wait in self.circle))
        for attempt in self._undecided():
            self._decide(attempt, Decision("missing", self._describe_missing(attempt, f" in {self.deadline:g} s")))

    def _find_circle(self) -> Circle:
        """Ranks that wait for each other, this one among them; empty if there are none."""
        pending = {self.rank: self._pending()}
        for _ in range(timing.LIMITS.statuses):
            waits = [wait for each in pending.values() for wait in each]
            unread = {rank for wait in waits for rank in wait.missing} - {*pending}
            if not unread or find_circle(self.rank, pending):
                break
            self._read_statuses(sorted(unread))
            pending |= {rank: status.pending if (status := self.statuses.get(rank)) else () for rank in unread}
        circle = find_circle(self.rank, pending)
        return circle if self._is_closed(circle) else ()

    def _is_closed(self, circle: Circle) -> bool:
        """True if each rank of a circle still waits for the next one."""
        # Statuses are read one after another, so a rank may have gone on meanwhile.
        answers = self._run_each([Read(f"{wait.name}/{key}") for key in ("decision", "arrivals")] for _, wait in circle)
        for i, (decision, arrivals) in enumerate(answers):
            following = circle[(i + 1) % len(circle)][0]
            arrived = {(unpack(line, rank=int) or {}).get("rank") for line in (arrivals or b"").splitlines()}
            if decision is not None or following in arrived:
                return False
        return True

    def _describe_missing(self, attempt: ConnectAttempt, when: str = "") -> str:
        """Message about the missing ranks and the last status of each."""
        lost = self.statuses.lost(self._watched(attempt))
        lines = [f"\n  {self.statuses.describe(rank)}" for rank in [*dict.fromkeys((*lost, *attempt.missing))][:8]]
        arrived = [f", and rank {rank} was lost after it had arrived" for rank in lost if rank not in attempt.missing]
        missing = f"{attempt.label}: {name_ranks(attempt.missing)} did not arrive{when}{''.join(arrived)}."
        return f"{missing}{''.join(lines)}\n\nRank {self.rank} waited at {self.call_site}."
