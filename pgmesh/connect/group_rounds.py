"""The rounds in which the members of groups connect.

A member that has read the arrivals of all members decides that the group is made; this is usually the last one to
arrive. A member decides that the attempt failed if it finds a reason: a different fingerprint, a lost member, an error
of its own, or its deadline. ``decisions.Decision`` has a table of the reasons, and of what a late rank does.

An attempt has two store keys besides those of every round:

    <group>/<number>/count      the number of arrivals
    <group>/<number>/broken     the reason, if the first collective failed on a member after the decision

When an attempt is made, its members delete the keys of the attempts before it: all members have arrived at a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from pgmesh._util.formatting import format_ranks, name_ranks
from pgmesh.connect.decisions import Arrival, Arrivals, Decision
from pgmesh.connect.rounds import Client, Judge, Round, undecided
from pgmesh.errors import MismatchError
from pgmesh.groups.naming import Fingerprint
from pgmesh.liveness import timing
from pgmesh.liveness.operations import Add, Append, CompareSet, Delete, Operation, Read
from pgmesh.liveness.processes import process_label, without_token
from pgmesh.liveness.records import error_text, quoted
from pgmesh.liveness.statuses import PendingConnect, Statuses


@dataclass(eq=False)
class GroupRound(Round[Decision]):
    """One rank's part in the round of a group.

    Args:
        ranks: the members.
        group: the group in messages, such as "group dp".
        mesh: its mesh in messages, such as "mesh 'actor'".
        fingerprints: the group's fingerprints on this rank. The first that differs is reported.
        missing: the members that had not arrived when the arrivals were last read.
        count_seen: the count of arrivals at that time; b"" before that.
        oldest: number of the oldest attempt that may have store keys.
        made_without: the attempt was made before this process arrived.
    """

    ranks: Sequence[int]
    group: str
    mesh: str
    fingerprints: Sequence[Fingerprint] = ()
    _: KW_ONLY
    missing: tuple[int, ...] = ()
    count_seen: bytes | None = b""
    oldest: int = 0
    made_without: bool = False

    @property
    def label(self) -> str:
        subject = self.fingerprints[0].subject if self.fingerprints else f"{self.group} of {self.mesh}"
        return f"{subject} (ranks {format_ranks(tuple(self.ranks))})"

    @property
    def broken_key(self) -> str:
        """Store key under which a member publishes that the first collective failed after the decision."""
        return f"{self.name}/broken"

    def go_on(self) -> None:
        super().go_on()
        self.missing, self.count_seen, self.made_without = (), b"", False

    def is_made(self) -> bool:
        return self.decision is not None and self.decision.kind == "made"

    def keys_before(self) -> tuple[str, ...]:
        """The store keys of earlier attempts."""
        kinds = ("arrivals", "count", "decision", "broken")
        return tuple(f"{self.key}/{number}/{kind}" for number in range(self.oldest, self.number) for kind in kinds)


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
        deadline: seconds from the start of the call.
        statuses: the statuses of the other ranks, which this call reads.
        process: description of this process. It reveals two processes that have the same rank.
        mesh: fingerprint of the mesh; None if the rounds belong to no mesh.
        mesh_key: prefix of the keys of all rounds of the mesh.
        skip_decided: arrive at the next attempt if the current one was decided before this rank arrived.
        pace: factor of all pauses, and of the time between two looks.
        warn: called with text for the log.
        ready: called with each group that is made.
    """

    rank: int
    client: Client
    call_site: str
    deadline: float
    statuses: Statuses
    process: str = field(default_factory=process_label)
    mesh: Fingerprint | None = None
    mesh_key: str = ""
    skip_decided: bool = True
    pace: float = 1.0
    warn: Callable[[str], None] = field(default=lambda text: None)
    ready: Callable[[GroupRound], None] = field(default=lambda each: None)
    _meshes: dict[bytes, None] = field(default_factory=dict, init=False)  # the encoded fingerprints of the mesh so far
    _looked: set[tuple[int, str]] = field(default_factory=set, init=False)  # ranks and where they wait, that were read
    _waits: dict[int, str] = field(default_factory=dict, init=False)  # by rank, what it has last waited for
    _mismatch: Decision | None = field(default=None, init=False)  # of the mesh

    # -- arriving -------------------------------------------------------------------------------------------------

    def arrival(self, each: GroupRound) -> tuple[Operation, Operation]:
        mesh = "" if self.mesh is None else self.mesh.encoded.decode()
        arrival = Arrival(self.rank, self.process, mesh, tuple(mine.encoded.decode() for mine in each.fingerprints))
        return Append(each.arrivals_key, f"{arrival.pack()}\n"), Add(f"{each.name}/count")

    def arrived(self, answers: Mapping[GroupRound, Sequence[Any]]) -> Iterator[tuple[GroupRound, Decision]]:
        return self.read_arrivals([each for each, (_, count) in answers.items() if count >= len(each.ranks)])

    def learn(self, each: GroupRound, text: bytes) -> Decision:
        return Decision.unpack(each.decision_key, text)

    def skips(self, each: GroupRound, decision: Decision, *, sent_before: bool) -> bool:
        if decision.kind == "made":
            each.made_without = not sent_before
            return False
        if decision.holds_for_late_ranks or not self.skip_decided:
            return False
        self.warn(f"an earlier attempt to connect failed before rank {self.rank} arrived: {decision.text}")
        return True

    def decided(self, each: GroupRound) -> None:
        assert each.decision is not None
        if each.decision.kind == "mesh":  # no group of the mesh can be made, so this ends the call
            self._mismatch = each.decision
            raise MismatchError(each.decision.text)
        if each.made_without:
            each.decision = self._made_by_another_process(each)
        elif each.is_made():
            if keys := each.keys_before():
                self.client.run(Delete(keys))
            each.oldest = each.number
            self.ready(each)

    def stopped(self, each: GroupRound, error: BaseException) -> Decision:
        why = f"{each.label} was cancelled because {why_stopped(self.rank, self.call_site, error)}"
        return self._mismatch or Decision.of(error, why)

    def _made_by_another_process(self, each: GroupRound) -> Decision:
        """The decision of this process alone, after an attempt that another process of its rank took part in."""
        (text,) = self.client.run(Read(each.arrivals_key))
        found = [arrival.process for arrival in Arrivals(text).all if arrival and arrival.rank == self.rank]
        both = self._two_processes(each, found[0] if found else "another process", self.process, self.rank)
        hint = "A process in the place of one that has ended needs a mesh with another name, or mesh.stand_by()."
        return Decision("duplicate", f"{both}\n\n{hint}")

    # -- the arrivals ---------------------------------------------------------------------------------------------

    def read_arrivals(self, rounds: Sequence[GroupRound]) -> Iterator[tuple[GroupRound, Decision]]:
        """Read the arrivals of some rounds, and decide on a mismatch or on success."""
        # All are read first, so that a mismatch of the mesh names the ranks in all of them.
        for each, arrivals in [*zip(rounds, self._read_arrivals_at([each.name for each in rounds]))]:
            decision = self.decision_from_arrivals(each, arrivals)
            if decision is not None:
                yield each, decision

    def _read_arrivals_at(self, names: Sequence[str]) -> list[Arrivals]:
        """Read the arrivals at some attempts, and note the fingerprints of the mesh."""
        found = [Arrivals(text) for text in self.client.run(*(Read(f"{name}/arrivals") for name in names))]
        arrived = (arrival for arrivals in found for arrival in arrivals.all if arrival is not None)
        self._meshes |= {arrival.mesh.encode(): None for arrival in arrived}
        return found

    def decision_from_arrivals(self, each: GroupRound, arrivals: Arrivals) -> Decision | None:
        """The decision that follows from the arrivals; None if members are missing."""
        members, ranks = dict[int, Arrival](), {*each.ranks}
        for line, arrival in zip(arrivals.lines, arrivals.all):
            if arrival is None or arrival.rank not in ranks or len(arrival.group) != len(each.fingerprints):
                foreign = f"the store's key {each.arrivals_key} holds {quoted(line)}, which no member wrote."
                return Decision("mismatch", f"{each.label}: {foreign}")
            first = members.setdefault(arrival.rank, arrival)
            if first.process != arrival.process:
                return Decision("duplicate", self._two_processes(each, first.process, arrival.process, arrival.rank))
        each.missing = tuple(rank for rank in each.ranks if rank not in members)
        if mismatch := self._mesh_mismatch():
            return mismatch
        for i, mine in enumerate(each.fingerprints):
            text = mine.mismatch([arrival.group[i].encode() for arrival in members.values()], each.arrivals_key)
            if text is not None:
                return Decision("mismatch", text)
        return None if each.missing else Decision("made")

    def _mesh_mismatch(self) -> Decision | None:
        text = None if self.mesh is None else self.mesh.mismatch([*self._meshes], self.mesh_key)
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
        self.statuses.find_ended(self.client.run, self._to_ask(undecided(rounds)), all_of_them=True)
        with_lost = [each for each in undecided(rounds) if self._lost(each)]
        yield from self.read_arrivals(with_lost)  # a rank that died between its arrival and the count has arrived
        for each in undecided(with_lost):
            if self._lost(each):
                yield each, Decision("missing", self._describe_missing(each))

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
        missing = {rank for each in rounds for rank in each.missing[: timing.LIMITS.statuses]}
        waiting = {rank: status.pending for rank in missing if (status := self.statuses.record(rank).status)}
        waits = {(rank, wait.name) for rank, pending in waiting.items() for wait in pending} - self._looked
        self._looked |= waits
        names = sorted({name for _, name in waits if name.startswith(f"{self.mesh_key}/")})
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
            yield each, Decision("missing", self._describe_missing(each, f" in {self.deadline:g} s"))

    def period(self) -> float:
        return self.statuses.next_inspection(timing.TIMING.inspection * self.pace)

    def waits_for(self, rounds: Sequence[GroupRound]) -> str:
        when = f" in {round(self.client.now(), 1):g} s so far"
        return "\n".join(
            [f"rank {self.rank} waits in connect.", *(self._describe_missing(each, when) for each in rounds)]
        )

    def pending(self, rounds: Iterable[GroupRound]) -> tuple[PendingConnect, ...]:
        return tuple(
            PendingConnect(
                each.name,
                each.group,
                each.mesh,
                format_ranks(tuple(each.ranks)),
                self.call_site,
                each.missing[: timing.LIMITS.statuses],
            )
            for each in undecided(rounds)
        )

    # -- lost members ---------------------------------------------------------------------------------------------

    # A member watches those that have not arrived, and the next one after it that has. So each member that waits is
    # watched by another, and the first of several lost ones in a row is noticed.

    def _watched(self, each: GroupRound) -> list[int]:
        """The members of a group that this rank watches: the next one that has arrived, and the missing ones."""
        if not each.missing:
            return []
        place, missing = each.ranks.index(self.rank), {*each.missing}
        following = (*each.ranks[place + 1 :], *each.ranks[:place])
        return [*[rank for rank in following if rank not in missing][:1], *each.missing]

    def _to_ask(self, rounds: Iterable[GroupRound]) -> list[int]:
        """The ranks whose listeners this rank asks: none unless it is among the first members that have arrived."""
        ranks: list[int] = []
        for each in rounds:
            before = {*each.ranks[: each.ranks.index(self.rank)]} - {*each.missing}
            ranks += self._watched(each) if len(before) < timing.LIMITS.asking else ()
        return [*dict.fromkeys(ranks)][: timing.LIMITS.statuses]

    def _read_statuses(self, rounds: Iterable[GroupRound]) -> None:
        """Read the statuses of the ranks that this one watches."""
        watched = dict.fromkeys(rank for each in rounds for rank in self._watched(each))
        ranks = [*watched][: timing.LIMITS.statuses]
        self.statuses.read(self.client.run, ranks)
        found = {rank: self.statuses.record(rank).status for rank in ranks}
        self._waits |= {rank: str(status) for rank, status in found.items() if status is not None and status.pending}

    def _lost(self, each: GroupRound) -> dict[int, str]:
        """The watched members that are lost, each with the reason."""
        return self.statuses.lost(self._watched(each))

    def _describe_missing(self, each: GroupRound, when: str = "") -> str:
        """Message about the missing ranks and the last status of each."""
        lost = self._lost(each)
        named = [*dict.fromkeys((*lost, *each.missing))][: timing.LIMITS.named]
        lines = [f"\n  {self._describe(rank)}" for rank in named]
        arrived = [f", and rank {rank} was lost after it had arrived" for rank in lost if rank not in each.missing]
        missing = f"{each.label}: {name_ranks(each.missing)} did not arrive{when}{''.join(arrived)}."
        return f"{missing}{''.join(lines)}\n\nRank {self.rank} waited at {self.call_site}."

    def _describe(self, rank: int) -> str:
        """The last status of a rank. If it has given up meanwhile, as in a circle, also what it waited for."""
        text, waited = self.statuses.describe(rank), self._waits.get(rank, "")
        return text if waited in text else f"{text}; before: {waited}"
