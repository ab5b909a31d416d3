"""The common part of the decisions of ``shrink`` and ``stand_by``: the round, and who is lost.

The ranks of a mesh decide in a round, as described in ``connect/rounds.py``. A mesh is replaced once; until then its
ranks may try several times. If an attempt has failed before a rank arrives, the rank goes on to the next one, or raises
the error if the arguments differed. If it has succeeded, the mesh was replaced without this rank.

Members that call ``shrink`` decide who is lost (``shrink_judge.py``). Ranks that stand by arrive too, and leave that to
them (``stand_by_judge.py``).

The decision stays in the store as long as the world, for ranks that were taken for lost and come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pgmesh.connect.rounds import Arrival, Judge
from pgmesh.elastic.aborts import check_replaceable
from pgmesh.elastic.records import MeshRound, Outcome
from pgmesh.elastic.state import Generation
from pgmesh.groups.mesh_groups import MeshGroups
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.operations import Append, Read
from pgmesh.liveness.processes import own_process
from pgmesh.liveness.records import error_text


@dataclass
class SurvivorJudge(Judge[MeshRound, Outcome]):
    """One rank's part in the decision on a mesh's survivors. Subclasses decide for a member and for a spare.

    Args:
        mesh: the mesh of this rank.
        generation: its generation, or a later one.
        client: the store and the clock.
        process: the name of this process.
        came_late: the mesh was replaced before this call.
    """

    mesh: MeshGroups
    generation: Generation
    client: CallClient
    process: str = field(default_factory=own_process)
    came_late: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.rank, self.statuses = self.mesh.rank, self.client.liveness.statuses

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
        return {arrival.rank: arrival for arrival in Arrival.unpack_all(text)}

    def failure(self, problem: str, error: str) -> Outcome:
        """The decision that the attempt failed."""
        return Outcome(failed=f"{self.mesh.label}: {problem}", error=error)

    # -- the round ------------------------------------------------------------------------------------------------

    def arrival(self, each: MeshRound) -> tuple[Append]:
        return (Append(each.arrivals_key, Arrival(self.rank, self.process, self.call).pack()),)

    def learn(self, each: MeshRound, text: bytes) -> Outcome:
        return Outcome.unpack(text)

    def takes(self, each: MeshRound, outcome: Outcome, *, sent_before: bool) -> Outcome | None:
        self.came_late = not outcome.failed
        # Of a mismatch, this rank may be the one whose arguments differ.
        return outcome if self.came_late or (outcome.error == "mismatch" and self.call) else None

    def poll(self) -> None:
        check_replaceable(self.mesh)

    def stopped(self, each: MeshRound, error: BaseException) -> Outcome:
        return Outcome(failed=f"rank {self.rank} stopped: {error_text(error)}", error="stopped")

    def judge(self, rounds: Sequence[MeshRound], *, late: bool) -> Iterator[tuple[MeshRound, Outcome]]:
        for each in rounds:
            outcome = self.look(each, late=late)
            if outcome is not None:
                yield each, outcome
