"""The rounds in which the members of groups connect.

A member that has read the arrivals of all members decides that the group is made; this is usually the last one to
arrive. A member decides that the attempt failed if it finds a reason: a different fingerprint, a lost member, an error
of its own, or its deadline. A rank that arrives later logs that failure and arrives at the next attempt, as it does
after one that was made without it. A mismatch is permanent, so that rank raises it. ``records.Decision`` has a table
of the decisions.

An attempt has three store keys besides those of every round:

    <group>/<number>/count      the number of arrivals, and of members that failed before they arrived
    <group>/<number>/broken     the reason, if the first collective failed on a member after the decision
    <group>/<number>/left       the number of those that have released the group. The last one deletes the keys

So each member leaves an attempt as often as it was counted there (``counted_at``). If one cannot, as after its death,
the keys stay.

A group has one more:

    <group>/mismatch            a mismatch that the store of a backend found
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from pgmesh._util.formatting import format_ranks, name_ranks
from pgmesh.errors import MismatchError
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.circles import Circle, circle_text, search_circle
from pgmesh.rendezvous.operations import Add, Append, CompareSet, Delete, Operation, Read, Run
from pgmesh.rendezvous.records import Decision, Fingerprint, error_text, pack, quoted, unpack
from pgmesh.rendezvous.rounds import Client, Judge, Round, run_each, undecided
from pgmesh.rendezvous.statuses import PendingConnect, Statuses


@dataclass(eq=False)
class GroupRound(Round[Decision]):
    """One rank's part in the round of a group.

    Args:
        ranks: the members.
        fingerprint: the group's fingerprint on this rank.
        group: the group in messages, such as "group dp".
        mesh: its mesh in messages, such as "mesh 'actor'".
        address: this rank's address, for the arrivals; "" for none.
        missing: the members that had not arrived when the arrivals were last read.
        count_seen: the count of arrivals at that time; b"" before that, None if others have deleted it.
    """

    ranks: Sequence[int]
    fingerprint: Fingerprint
    group: str
    mesh: str
    _: KW_ONLY
    address: str = ""
    missing: tuple[int, ...] = ()
    count_seen: bytes | None = b""

    @property
    def label(self) -> str:
        return f"{self.fingerprint.subject} (ranks {format_ranks(tuple(self.ranks))})"

    @property
    def mismatch_key(self) -> str:
        """Store key under which the store of a backend publishes a mismatch."""
        return f"{self.key}/mismatch"

    @property
    def broken_key(self) -> str:
        """Store key under which a member publishes that the first collective failed after the decision."""
        return f"{self.name}/broken"

    def continue_after(self, before: GroupRound) -> None:
        """Begin where an earlier call ended: at its last attempt if that is undecided, otherwise at the next one."""
        self.number, self.has_sent, self.counted_at = before.number, before.has_sent, before.counted_at
        if before.decision is not None:
            self.go_on()

    def is_made(self) -> bool:
        return self.decision is not None and self.decision.kind == "made"

    def leave(self, run: Run) -> None:
        """Release the keys of all attempts. The last of the members that are counted at one deletes its keys."""
        names = [f"{self.key}/{number}" for number in self.counted_at]
        answers = run_each(run, ((Add(f"{name}/left"), Read(f"{name}/count")) for name in names))
        numbers = [each for each, (left, count) in zip(self.counted_at, answers) if left >= int(count or b"0")]
        run(*(Delete(self._keys_of(number)) for number in numbers))

    def store_keys(self) -> list[str]:
        """The store keys of all attempts at which this rank was counted."""
        return [key for number in {*self.counted_at} for key in self._keys_of(number)]

    def _keys_of(self, number: int) -> tuple[str, ...]:
        return tuple(f"{self.key}/{number}/{key}" for key in ("arrivals", "count", "decision", "broken", "left"))


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
        process: description of this process. It reveals two processes that have the same rank.
        deadline: seconds from the start of the call.
        statuses: the statuses of the other ranks, which this call reads.
        refusal_key: store key under which a rank publishes a mismatch of the mesh, or that it aborted the mesh; "" for
            none.
        skip_decided: arrive at the next attempt if the current one was decided before this rank arrived.
        pace: factor of all pauses, and of the time between two looks.
        warn: called with text for the log.
        ready: called with each group that is made.
    """

    rank: int
    client: Client
    call_site: str
    process: str
    deadline: float
    statuses: Statuses
    refusal_key: str = ""
    skip_decided: bool = True
    pace: float = 1.0
    warn: Callable[[str], None] = field(default=lambda text: None)
    ready: Callable[[GroupRound], None] = field(default=lambda each: None)

    # -- arriving -------------------------------------------------------------------------------------------------

    def arrival(self, each: GroupRound) -> tuple[Operation, Operation]:
        arrival = pack(
            rank=self.rank,
            call_site=self.call_site,
            process=self.process,
            fingerprint=each.fingerprint.encoded.decode(),
            address=each.address,
        )
        return Append(each.arrivals_key, f"{arrival}\n"), Add(f"{each.name}/count")

    def arrived(self, answers: Mapping[GroupRound, Sequence[Any]]) -> Iterator[tuple[GroupRound, Decision]]:
        return self.read_arrivals([each for each, (_, count) in answers.items() if count >= len(each.ranks)])

    def learn(self, each: GroupRound, text: bytes) -> Decision:
        return Decision.unpack(each.decision_key, text)

    def skips(self, each: GroupRound, decision: Decision, *, sent_before: bool) -> bool:
        if decision.is_permanent or not self.skip_decided or (sent_before and decision.kind == "made"):
            return False
        if text := decision.text:
            self.warn(f"an earlier attempt to connect failed before rank {self.rank} arrived: {text}")
        return True

    def decided(self, each: GroupRound) -> None:
        if each.is_made():
            self.ready(each)

    def stopped(self, each: GroupRound, error: BaseException) -> Decision:
        why = why_stopped(self.rank, self.call_site, error)
        return Decision.of(error, f"{each.label} was cancelled because {why}")

    def stays_out(self, each: GroupRound) -> None:
        self.client.run(Add(f"{each.name}/count"))  # the last of the ranks that are counted deletes the keys
        each.counted_at.append(each.number)

    def refused(self, text: bytes) -> BaseException:
        return Decision.unpack(self.refusal_key, text).error() or MismatchError("")

    # -- the arrivals ---------------------------------------------------------------------------------------------

    def read_arrivals(self, rounds: Sequence[GroupRound]) -> Iterator[tuple[GroupRound, Decision]]:
        """Read the arrivals of some rounds, and decide on a mismatch or on success."""
        texts = self.client.run(*(Read(each.arrivals_key) for each in rounds))
        for each, text in zip(rounds, texts):
            decision = self.decision_from_arrivals(each, text or b"")
            if decision is not None:
                yield each, decision

    def decision_from_arrivals(self, each: GroupRound, text: bytes) -> Decision | None:
        """The decision that follows from the arrivals; None if members are missing."""
        records: dict[int, dict[str, Any]] = {}
        members = {*each.ranks}
        for line in text.splitlines():
            record = unpack(line, rank=int, call_site=str, process=str, fingerprint=str, address=str)
            if record is None or record["rank"] not in members or not record["address"].isascii():
                foreign = f"the store's key {each.arrivals_key} holds {quoted(line)}, which no member wrote."
                return Decision("mismatch", f"{each.label}: {foreign}")
            first = records.setdefault(record["rank"], record)
            if first["process"] != record["process"]:
                both = f"both {first['process']} and {record['process']} connect as rank {record['rank']}"
                return Decision("duplicate", f"{each.label}: {both}.")
        each.missing = tuple(rank for rank in each.ranks if rank not in records)
        seen = [record["fingerprint"].encode() for record in records.values()]
        mismatch = each.fingerprint.mismatch(seen, each.arrivals_key)
        if mismatch is not None:
            return Decision("mismatch", mismatch)
        if each.missing:
            return None
        addresses = tuple(records[rank]["address"] for rank in each.ranks)
        all_fit = all(addresses) and sum(map(len, addresses)) < timing.LIMITS.record_chars // 8
        return Decision("made", addresses=addresses if all_fit else ())

    # -- looks ----------------------------------------------------------------------------------------------------

    def judge(self, rounds: Sequence[GroupRound], *, late: bool) -> Iterator[tuple[GroupRound, Decision]]:
        return self.give_up(rounds) if late else self.inspect(rounds)

    def inspect(self, rounds: Sequence[GroupRound]) -> Iterator[tuple[GroupRound, Decision]]:
        """Read the arrivals that are new, publish this rank's status, and look for members that were lost."""
        yield from self._read_news(rounds)
        self.client.set_pending(self.pending(rounds))
        self._read_statuses(undecided(rounds))
        self.statuses.find_ended(self.client.run, self._to_ask(undecided(rounds)), all_of_them=True)
        with_lost = [each for each in undecided(rounds) if self._lost(each)]
        yield from self.read_arrivals(with_lost)  # a rank that died between its arrival and the count has arrived
        for each in undecided(with_lost):
            if self._lost(each):
                yield each, Decision("missing", self._describe_missing(each))

    def _read_news(self, rounds: Sequence[GroupRound]) -> Iterator[tuple[GroupRound, Decision]]:
        """Read whether a backend has found a mismatch, and the arrivals where their count has changed."""
        answers = run_each(self.client.run, ([Read(each.mismatch_key), Read(f"{each.name}/count")] for each in rounds))
        changed = []
        for each, (mismatch, count) in zip(rounds, answers):
            if mismatch is not None:
                yield each, Decision.unpack(each.mismatch_key, mismatch)
            elif count != each.count_seen:
                each.count_seen = count
                changed.append(each)
        yield from self.read_arrivals(changed)

    def give_up(self, rounds: Sequence[GroupRound]) -> Iterator[tuple[GroupRound, Decision]]:
        """Decide that all rounds failed at the deadline."""
        yield from self.read_arrivals(rounds)
        self._read_statuses(undecided(rounds))
        circle = self.find_circle(rounds)
        if circle:  # rounds of other groups in the circle too, so that all ranks fail and can try again
            # In the order of the circle: a rank fails after the attempt that waits for it, so it cannot arrive there.
            text = Decision("circle", circle_text(circle)).pack()
            self.client.run(*(CompareSet(f"{wait.name}/decision", text) for _, wait in circle))
        for each in undecided(rounds):
            yield each, Decision("missing", self._describe_missing(each, f" in {self.deadline:g} s"))

    def period(self) -> float:
        return self.statuses.next_inspection(timing.TIMING.inspection * self.pace)

    def waits_for(self, rounds: Sequence[GroupRound]) -> str:
        when = f" in {round(self.client.now(), 1):g} s so far"
        texts = [self._describe_missing(each, when) for each in rounds]
        if circle := self.find_circle(rounds):
            texts.append(circle_text(circle))
        return "\n".join(texts)

    def find_circle(self, rounds: Sequence[GroupRound]) -> Circle:
        """Ranks that wait for each other, this one among them; empty if there are none."""
        return search_circle(self.client.run, self.statuses, self.rank, self.pending(rounds))

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
        self.statuses.read(self.client.run, [*watched][: timing.LIMITS.statuses])

    def _lost(self, each: GroupRound) -> dict[int, str]:
        """The watched members that are lost, each with the reason."""
        return self.statuses.lost(self._watched(each))

    def _describe_missing(self, each: GroupRound, when: str = "") -> str:
        """Message about the missing ranks and the last status of each."""
        lost = self._lost(each)
        named = [*dict.fromkeys((*lost, *each.missing))][: timing.LIMITS.named]
        lines = [f"\n  {self.statuses.describe(rank)}" for rank in named]
        arrived = [f", and rank {rank} was lost after it had arrived" for rank in lost if rank not in each.missing]
        missing = f"{each.label}: {name_ranks(each.missing)} did not arrive{when}{''.join(arrived)}."
        return f"{missing}{''.join(lines)}\n\nRank {self.rank} waited at {self.call_site}."
