"""What the decisions of ``shrink`` and ``stand_by`` have in common: the round, and who is lost.

The ranks of a mesh decide in a round, as described in ``connect/rounds.py``. A mesh is replaced once; until then its
ranks may try several times. If an attempt has failed before a rank arrives, the rank goes on to the next one, or raises
the error if the arguments differed. If it has succeeded, the mesh was replaced without this rank.

Members that call ``shrink`` decide who is lost (``shrink_judge.py``). Ranks that stand by arrive too, and leave that to
them (``stand_by_judge.py``).

Arrivals are deleted once a rank knows the decision. That stays in the store as long as the world, for ranks that were
taken for lost and come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pgmesh.connect.rounds import Judge
from pgmesh.elastic.records import Arrival, MeshRound, Outcome
from pgmesh.elastic.state import Generation
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.operations import Append, Delete, Read
from pgmesh.liveness.processes import process_id
from pgmesh.liveness.records import error_text


@dataclass
class SurvivorJudge(Judge[MeshRound, Outcome]):
    """One rank's part in the decision on a mesh's survivors. Subclasses decide for a member and for a spare.

    Args:
        label: the mesh in messages.
        generation: the mesh.
        rank: this rank.
        client: the store and the clock.
        process: a word that no other process of this rank has.
        lost_after: seconds without a heartbeat after which a rank is lost; None for the default.
        came_late: the mesh was replaced before this call.
    """

    label: str
    generation: Generation
    rank: int
    client: CallClient
    process: str = field(default_factory=process_id)
    lost_after: float | None = None
    came_late: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.deadline, self.pace = self.client.seconds, self.client.liveness.pace
        self.statuses = self.client.liveness.statuses

    call = ""
    """The call of ``shrink`` with its arguments, as text; "" for a rank that stands by."""

    def missed(self, outcome: Outcome) -> bool:
        """True on a rank that stands by, if it came too late or another process of its rank was counted."""
        return False

    def goes_on_after(self, outcome: Outcome) -> bool:
        """True if this rank goes on to the next attempt after an error; otherwise its call ends."""
        raise NotImplementedError

    def look(self, each: MeshRound, *, late: bool) -> Outcome | None:
        """The decision that follows from the arrivals and the statuses; None if a rank is waited for.

        Args:
            late: the deadline has passed, so a decision is due.
        """
        raise NotImplementedError

    def arrivals(self, each: MeshRound) -> dict[int, Arrival]:
        """By rank, the arrival of its last process."""
        (text,) = self.client.run(Read(each.arrivals_key))
        return {line.rank: line for line in map(Arrival.unpack, (text or b"").splitlines()) if line is not None}

    def find_lost(self, ranks: Sequence[int], *, all_ended: bool = False) -> dict[int, str]:
        """The ranks that are lost, each with the reason: by their statuses, or by the listeners of the others.

        Args:
            all_ended: ask all listeners, for a message; otherwise stop at the first process that still runs.
        """
        statuses, run = self.statuses, self.client.run
        statuses.read(run, ranks)
        statuses.find_ended(run, ranks, self.lost_after, all_of_them=all_ended)
        return statuses.lost(ranks, self.lost_after)

    def failure(self, problem: str, error: str) -> Outcome:
        """The decision that the attempt failed."""
        return Outcome(failed=f"{self.label}: {problem}", error=error)

    # -- the round ------------------------------------------------------------------------------------------------

    def arrival(self, each: MeshRound) -> tuple[Append]:
        arrival = Arrival(self.rank, self.process, self.call)
        return (Append(each.arrivals_key, f"{arrival.pack()}\n"),)

    def learn(self, each: MeshRound, text: bytes) -> Outcome:
        self.client.run(Delete((each.arrivals_key,)))  # which are not needed any more
        return Outcome.unpack(each.decision_key, text)

    def takes(self, each: MeshRound, outcome: Outcome, *, sent_before: bool) -> Outcome | None:
        self.came_late = not outcome.failed
        # Of a mismatch, this rank may be the one whose arguments differ.
        return outcome if self.came_late or (outcome.error == "mismatch" and self.call) else None

    def tries_again(self, each: MeshRound) -> bool:
        outcome = each.decision
        return outcome is not None and bool(outcome.failed) and self.goes_on_after(outcome)

    def stopped(self, each: MeshRound, error: BaseException) -> Outcome:
        return Outcome(failed=f"rank {self.rank} stopped: {error_text(error)}", error="stopped")

    def judge(self, rounds: Sequence[MeshRound], *, late: bool) -> Iterator[tuple[MeshRound, Outcome]]:
        for each in rounds:
            outcome = self.look(each, late=late)
            if outcome is not None:
                yield each, outcome
