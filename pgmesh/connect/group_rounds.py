"""The rounds in which the members of groups connect.

A member that has read the arrivals of all members decides that the group is made; this is usually the last one to
arrive. A member decides that the attempt failed if it finds a reason: a different fingerprint, a lost member, an error
of its own, or its deadline. ``decisions.Decision`` has a table of the reasons, and of what a late rank does.

An attempt has two store keys besides those of every round:

    <group>/<number>/count      the number of arrivals
    <group>/<number>/broken     the reason, if the first collective failed on a member after the decision

When an attempt is made, its first member deletes the keys of the one before it, at which no member can arrive any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from pgmesh._util.formatting import format_ranks, format_seconds, name_ranks
from pgmesh.connect.decisions import Decision
from pgmesh.connect.rounds import Arrival, Judge, Round, undecided
from pgmesh.errors import MismatchError
from pgmesh.groups.naming import Fingerprint
from pgmesh.liveness import timing
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.operations import Add, Append, CompareSet, Delete, Operation, Read
from pgmesh.liveness.processes import own_process, without_token
from pgmesh.liveness.records import error_text
from pgmesh.liveness.statuses import Statuses

WARN_SECONDS = 2.0
"""The longest wait until a rank logs what it waits for. After a third of a shorter deadline it does so earlier."""


@dataclass(eq=False)
class GroupRound(Round[Decision]):
    """One rank's part in the round of a group.

    Args:
        ranks: the members.
        group: the group in messages, such as "group dp".
        mesh: its mesh in messages, such as "mesh 'actor'".
        fingerprint: the group's fingerprint on this rank; None if this rank only tells that it has stopped.
        missing: the members that had not arrived when the arrivals were last read.
        count_seen: the count of arrivals at that time; b"" before that.
        connected: name in torch of the last group that was connected.
    """

    ranks: Sequence[int]
    group: str
    mesh: str
    fingerprint: Fingerprint | None = None
    _: KW_ONLY
    missing: tuple[int, ...] = ()
    count_seen: bytes | None = b""
    connected: str = ""

    @property
    def label(self) -> str:
        subject = self.fingerprint.subject if self.fingerprint else f"{self.group} of {self.mesh}"
        return f"{subject} (ranks {format_ranks(tuple(self.ranks))})"

    @property
    def broken_key(self) -> str:
        """Store key under which a member publishes that the first collective failed after the decision."""
        return f"{self.name}/broken"

    def go_on(self) -> None:
        super().go_on()
        self.missing, self.count_seen = (), b""

    def is_made(self) -> bool:
        return self.decision is not None and self.decision.kind == "made"

    def keys_before(self) -> tuple[str, ...]:
        """The store keys of the attempt before."""
        return tuple(f"{self.key}/{self.number - 1}/{kind}" for kind in ("arrivals", "count", "decision", "broken"))


def following(ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """The other members after a rank, in a ring."""
    place = ranks.index(rank)
    return (*ranks[place + 1 :], *ranks[:place])


def why_stopped(rank: int, call_site: str, error: BaseException) -> str:
    """The reason for the other members, after an error of this rank."""
    return f"rank {rank} stopped connecting at {call_site}: {error_text(error)}"


@dataclass
class ConnectJudge(Judge[GroupRound, Decision]):
    """Decides whether the members of groups have all arrived, and are the same on all ranks.

    Args:
        rank: this rank.
        client: the store and the clock.
        call_site: the line of code that called.
        statuses: the statuses of the other ranks, which this call reads.
        process: description of this process. It reveals two processes that have the same rank.
        call: the call in messages.
        mesh: fingerprint of the mesh; None if the rounds belong to no mesh.
        mesh_key: prefix of the keys of all rounds of the mesh.
        skip_decided: arrive at the next attempt if the current one was decided before this rank arrived.
        warn: called with text for the log.
        ready: called with each group that is made.
        poll: called before each pause.
    """

    rank: int
    client: CallClient
    call_site: str
    statuses: Statuses
    process: str = field(default_factory=own_process)
    call: str = "connect"
    mesh: Fingerprint | None = None
    mesh_key: str = ""
    skip_decided: bool = True
    warn: Callable[[str], None] = field(default=lambda text: None)
    ready: Callable[[GroupRound], object] = field(default=lambda each: None)
    poll: Callable[[], object] = field(default=lambda: None)
    _meshes: dict[bytes, None] = field(default_factory=dict, init=False)  # the encoded fingerprints of the mesh so far
    _waits: dict[int, str] = field(default_factory=dict, init=False)  # by rank, what it has last waited for
    _mismatch: Decision | None = field(default=None, init=False)  # of the mesh
    _warns_at: float = field(init=False)  # when the log says what this rank waits for; inf once it has

    def __post_init__(self) -> None:
        self._warns_at = min(self.client.seconds / 3, WARN_SECONDS)

    # -- arriving -------------------------------------------------------------------------------------------------

    def arrival(self, each: GroupRound) -> tuple[Operation, Operation]:
        mesh, group = (mine.encoded.decode() if mine else "" for mine in (self.mesh, each.fingerprint))
        arrival = Arrival(self.rank, self.process, group, mesh)
        return Append(each.arrivals_key, arrival.pack()), Add(f"{each.name}/count")

    def arrived(self, answers: Sequence[tuple[GroupRound, Sequence[Any]]]) -> Iterator[tuple[GroupRound, Decision]]:
        return self.read_arrivals([each for each, (_, count) in answers if count >= len(each.ranks)])

    def learn(self, each: GroupRound, text: bytes) -> Decision:
        return Decision.unpack(text)

    def takes(self, each: GroupRound, decision: Decision, *, sent_before: bool) -> Decision | None:
        if decision.kind == "made":
            return decision if sent_before else self._made_by_another_process(each)
        if decision.kind in ("mismatch", "mesh") or not self.skip_decided:
            return decision
        self.warn(f"an earlier attempt to connect failed before rank {self.rank} arrived: {decision.text}")
        return None

    def decided(self, each: GroupRound) -> None:
        assert each.decision is not None
        if each.decision.kind == "mesh":  # no group of the mesh can be made, so this ends the call
            self._mismatch = each.decision
            raise MismatchError(each.decision.text)
        if each.is_made():
            if each.number and each.ranks[0] == self.rank:
                self.client.run(Delete(each.keys_before()))
            self.ready(each)

    def stopped(self, each: GroupRound, error: BaseException) -> Decision:
        why = f"{each.label} was cancelled because {why_stopped(self.rank, self.call_site, error)}"
        return self._mismatch or Decision.of(error, why)

    def _made_by_another_process(self, each: GroupRound) -> Decision:
        """The decision of this process alone, after an attempt that another process of its rank took part in."""
        (text,) = self.client.run(Read(each.arrivals_key))
        found = [arrival.process for arrival in Arrival.unpack_all(text) if arrival.rank == self.rank]
        both = self._two_processes(each, found[0] if found else "another process", self.process, self.rank)
        hint = "A process in the place of one that has ended needs a mesh with another name, or mesh.stand_by()."
        return Decision("duplicate", f"{both}\n\n{hint}")

    # -- the arrivals ---------------------------------------------------------------------------------------------

    def read_arrivals(self, rounds: Sequence[GroupRound]) -> Iterator[tuple[GroupRound, Decision]]:
        """Read the arrivals of some rounds, and decide on a mismatch or on success."""
        # All are read first, so that a mismatch of the mesh names the ranks in all of them.
        for each, arrivals in zip(rounds, self._read_arrivals_at([each.name for each in rounds])):
            decision = self.decision_from_arrivals(each, arrivals)
            if decision is not None:
                yield each, decision

    def _read_arrivals_at(self, names: Sequence[str]) -> list[list[Arrival]]:
        """Read the arrivals at some attempts, and note the fingerprints of the mesh."""
        found = [Arrival.unpack_all(text) for text in self.client.run(*(Read(f"{name}/arrivals") for name in names))]
        self._meshes |= {arrival.mesh.encode(): None for arrivals in found for arrival in arrivals}
        return found

    def decision_from_arrivals(self, each: GroupRound, arrivals: Sequence[Arrival]) -> Decision | None:
        """The decision that follows from the arrivals; None if members are missing."""
        members = dict[int, Arrival]()
        for arrival in arrivals:
            first = members.setdefault(arrival.rank, arrival)
            if first.process != arrival.process:
                return Decision("duplicate", self._two_processes(each, first.process, arrival.process, arrival.rank))
        each.missing = tuple(rank for rank in each.ranks if rank not in members)
        if mismatch := self._mesh_mismatch():
            return mismatch
        groups = [arrival.asks.encode() for arrival in members.values()]
        if each.fingerprint and (text := each.fingerprint.mismatch(groups)):
            return Decision("mismatch", text)
        return None if each.missing else Decision("made")

    def _mesh_mismatch(self) -> Decision | None:
        text = None if self.mesh is None else self.mesh.mismatch([*self._meshes])
        return None if text is None else Decision("mesh", text)

    def _two_processes(self, each: GroupRound, one: str, two: str, rank: int) -> str:
        return f"{each.label}: both {without_token(one)} and {without_token(two)} connect as rank {rank}."

    # -- looks ----------------------------------------------------------------------------------------------------

    def judge(self, rounds: Sequence[GroupRound], *, late: bool) -> Iterator[tuple[GroupRound, Decision]]:
        return self.give_up(rounds) if late else self.inspect(rounds)

    def inspect(self, rounds: Sequence[GroupRound]) -> Iterator[tuple[GroupRound, Decision]]:
        """Read the arrivals that are new, publish this rank's status, and look for members that were lost."""
        yield from self._read_news(rounds)
        self.client.set_pending(self.pending(rounds))
        self._read_statuses(undecided(rounds))
        yield from self._compare_elsewhere(undecided(rounds))
        self.statuses.find_lost(self.client.run, self._watched(undecided(rounds)))
        with_lost = [each for each in undecided(rounds) if self.statuses.lost(each.ranks)]
        yield from self.read_arrivals(with_lost)  # a rank that died between its arrival and the count has arrived
        for each in undecided(with_lost):
            if self.statuses.lost(each.ranks):
                yield each, Decision("missing", self._describe_missing(each))
        if self.client.now() >= self._warns_at and (waits := undecided(rounds)):
            self._warns_at = math.inf
            when = f" in {round(self.client.now(), 1):g} s so far, of {format_seconds(self.client.seconds)}"
            lines = [f"rank {self.rank} waits in {self.call}.", *(self._describe_missing(each, when) for each in waits)]
            self.warn("\n".join(lines))

    def _read_news(self, rounds: Sequence[GroupRound]) -> Iterator[tuple[GroupRound, Decision]]:
        """Read the arrivals where their count has changed."""
        counts = self.client.run(*(Read(f"{each.name}/count") for each in rounds))
        changed = [each for each, count in zip(rounds, counts) if count != each.count_seen]
        for each, count in zip(rounds, counts):
            each.count_seen = count
        yield from self.read_arrivals(changed)

    def _compare_elsewhere(self, rounds: Sequence[GroupRound]) -> Iterator[tuple[GroupRound, Decision]]:
        """Compare the mesh with that of missing ranks that wait in other groups of it.

        Ranks whose meshes have other shapes, or another order of the ranks, arrive at rounds of different groups.
        """
        if self.mesh is None:
            return
        missing = {rank for each in rounds for rank in each.missing[: timing.MOST_STATUSES]}
        statuses = [status for rank in missing if (status := self.statuses.record(rank).status)]
        names = sorted({name for status in statuses for name in status.pending if name.startswith(f"{self.mesh_key}/")})
        self._read_arrivals_at(names)
        if names and (mismatch := self._mesh_mismatch()):
            self.client.run(*(CompareSet(f"{name}/decision", mismatch.pack()) for name in names))
            for each in undecided(rounds):
                yield each, mismatch

    def give_up(self, rounds: Sequence[GroupRound]) -> Iterator[tuple[GroupRound, Decision]]:
        """Decide that all rounds failed at the deadline."""
        yield from self.read_arrivals(rounds)
        self._read_statuses(undecided(rounds))
        for each in undecided(rounds):
            yield each, Decision("missing", self._describe_missing(each, f" in {self.client.seconds:g} s"))

    def pending(self, rounds: Iterable[GroupRound]) -> dict[str, str]:
        """Descriptions of the groups that this rank waits for, by the prefix of the store keys of its attempt."""
        return {
            each.name: f"connecting {each.label} at {self.call_site}, waiting for {name_ranks(each.missing)}"
            for each in undecided(rounds)
        }

    # -- lost members ---------------------------------------------------------------------------------------------

    def _watched(self, rounds: Iterable[GroupRound]) -> list[int]:
        """The ranks whose listeners this rank asks: those after it in each group, up to one that has arrived.

        So each missing member is watched by one that waits for it, and each member that waits by another.
        """
        ranks: list[int] = []
        for each in rounds:
            if each.missing:
                after, missing = following(each.ranks, self.rank), {*each.missing}
                end = next((i for i, rank in enumerate(after) if rank not in missing), len(after))
                ranks += after[: end + 1]
        return [*dict.fromkeys(ranks)][: timing.MOST_STATUSES]

    def _read_statuses(self, rounds: Sequence[GroupRound]) -> None:
        """Read the statuses of missing ranks."""
        ranks = [*dict.fromkeys(rank for each in rounds for rank in each.missing)][: timing.MOST_STATUSES]
        self.statuses.read(self.client.run, ranks)
        found = {rank: self.statuses.record(rank).status for rank in ranks}
        self._waits |= {rank: str(status) for rank, status in found.items() if status is not None and status.pending}

    def _describe_missing(self, each: GroupRound, when: str = "") -> str:
        """Message about the missing ranks and the last status of each."""
        lost = self.statuses.lost(each.ranks)
        named = [*dict.fromkeys((*lost, *each.missing))][: timing.MOST_NAMED]
        lines = [f"\n  {self._describe(rank)}" for rank in named]
        arrived = [f", and rank {rank} was lost after it had arrived" for rank in lost if rank not in each.missing]
        missing = f"{each.label}: {name_ranks(each.missing)} did not arrive{when}{''.join(arrived)}."
        return f"{missing}{''.join(lines)}\n\nRank {self.rank} waited at {self.call_site}."

    def _describe(self, rank: int) -> str:
        """The last status of a rank. If it has given up meanwhile, as in a circle, also what it waited for."""
        text, waited = self.statuses.describe(rank), self._waits.get(rank, "")
        return text if waited in text else f"{text}; before: {waited}"
