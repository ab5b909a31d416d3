"""All processes together: the laws of the agreement on lost ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from pgmesh.connect.rounds import Arrival
from pgmesh.elastic.records import Outcome
from pgmesh.layout import Layout
from pgmesh.liveness.operations import Append, CompareSet, Delete, Read, Set
from pgmesh.liveness.records import pack
from pgmesh.liveness.statuses import RankStatus, status_key
from tests.elastic.model.processes import Code, Ended, Memory, Program, Shrink, Standing, Start, plain
from tests.support.model.processes import Process, Sleep
from tests.support.model.space import CRASH, NO_FAULTS, NO_WAIT, RETRY, Faults, Space, State, Violation
from tests.support.model.stores import Content, Stores, decision_in, rank_of

ALL_ARRIVED = "success means that all arrived"
TRUE_LOST = "a rank that is called lost is"
CAUSE = "a failure has a cause"
NOT_IN = "no mesh with a rank taken for lost"
ONE_SUCCESSOR = "one successor"


@functools.lru_cache
def without_text(decision: bytes) -> bytes:
    return plain(Outcome.unpack(decision)).encode()


def in_order(lines: list[bytes]) -> list[bytes]:
    """The last of equal arrivals, by rank."""
    return sorted((line for i, line in enumerate(lines) if line not in lines[i + 1 :]), key=rank_of)


@functools.lru_cache(maxsize=100_000)
def last_lines(arrivals: bytes) -> dict[int, Arrival]:
    """The arrival of each rank's last process."""
    return {arrival.rank: arrival for arrival in Arrival.unpack_all(arrivals)}


class ShrinkSpace(Space):
    """Everything that can happen to some programs under the agreement.

    Args:
        layout: the layout of the first mesh.
        before: the decision on the mesh that replaced it before the programs begin; None for none.
    """

    uninterrupted = (Start,)

    def __init__(
        self,
        programs: Sequence[Program],
        faults: Faults = NO_FAULTS,
        code: Code | None = None,
        *,
        layout: Layout | None = None,
        before: Outcome | None = None,
    ) -> None:
        super().__init__(programs, faults, Stores(without_text, in_order))
        self.layout = layout or Layout(dp=len({each.rank for each in programs}))
        self.processes = [
            Process(
                functools.partial(Shrink, code or Code(), i, program),
                functools.partial(Standing, program.rank),
                Memory(program.calls, program.layout or self.layout, program.generation),
            )
            for i, program in enumerate(programs)
        ]
        first = {each.rank: i for i, each in reversed([*enumerate(programs)]) if each.replaces is None}
        values = {status_key(rank): _status(i) for rank, i in first.items()}
        if before is not None:
            key = "pgmesh/m/shrink/0/decision"
            values |= {key: plain(before).encode(), f"{key}.counted": pack(processes=[]).encode()}
        content = self.stores.content(values, 0)
        self.start = State(tuple(each.start for each in self.processes), content, faults.left())

    # -- what can happen next -------------------------------------------------------------------------------------

    def is_settled(self, i: int, state: State) -> bool:
        """True for a process that reads a value that never changes, or is at an attempt that has been decided."""
        node, content = state.nodes[i], state.content
        if node.step is None or isinstance(node.step, Start):
            return False
        if isinstance(node.step, Ended):
            return state.nodes[node.step.process].dead or not state.affords(CRASH)
        if isinstance(node.step, Sleep):
            return f"{node.attempt}/decision" in content.values
        if isinstance(node.step, (Read, CompareSet, Append)):
            name, _, key = node.step.key.rpartition("/")
            if key in ("decision", "arrivals"):
                return f"{name}/decision" in content.values
            return content.beats == self.faults.long_times and all(each.replaces is None for each in self.programs)
        return isinstance(node.step, Delete)

    def rank_of(self, i: int) -> int:
        rank: int = self.programs[i].rank
        return rank

    def sends_heartbeats(self, i: int, state: State) -> bool:
        """The status of its rank is its own, not that of another process."""
        node = state.nodes[i]
        return not node.dead and _publisher(state.content.values[status_key(self.rank_of(i))]) == i

    def fact(self, i: int, state: State) -> bool | None:
        """Whether the process that the next step is about has ended. Only then, another one takes its place."""
        step = state.nodes[i].step
        if isinstance(step, Start):
            before = self.programs[i].replaces
            return True if state.nodes[before].dead or before in state.silent else None
        return isinstance(step, Ended) and state.nodes[step.process].dead

    def answer(self, i: int, node: Any, content: Content, fact: bool) -> tuple[Any, Content]:
        step, rank = node.step, self.rank_of(i)
        if isinstance(step, Start):
            values = {**content.values, status_key(rank): _status(i, content.beats)}
            return None, self.stores.content(values, content.beats)
        if isinstance(step, Ended):
            return fact and self.faults.listeners, content
        answer, new = self.stores.perform(step, content)
        if isinstance(step, Read) and "/status/" in step.key:
            answer = content.beats, answer
        if isinstance(step, (CompareSet, Set)) and new is not content:
            key, _ = decision_in(step)  # with the processes that it counts: the last ones that the process has read
            counted = [[line.rank, line.process] for line in last_lines(node.looked).values()]
            new = self.stores.content({**new.values, f"{key}.counted": pack(processes=counted).encode()}, new.beats)
        return answer, new

    # -- laws -----------------------------------------------------------------------------------------------------

    def check_step(self, state: State, i: int, new: State, text: str) -> None:
        before, node = state.nodes[i], new.nodes[i]
        for key in node.left - before.left:
            value = new.content.values.get(key)
            over = value is not None and Outcome.unpack(value).error == "over"
            if before.request is not None and over and not before.interrupted:
                raise Violation(CAUSE, f"process {i} ends its call since no member is left, and is one", text)
        for result in node.results[len(before.results) :]:
            self._check_result(new, i, result, text)

    def check_decision(self, state: State, i: int, key: str, value: bytes, text: str) -> None:
        node, outcome = state.nodes[i], Outcome.unpack(value)
        arrivals = last_lines(state.content.values.get(key.replace("/decision", "/arrivals"), b""))
        text = f"{text}: {value.decode()}"
        if outcome.failed:
            calls = {line.asks for line in arrivals.values()} - {""}
            causes = {
                "mismatch": len(calls) > 1,
                "stopped": node.interrupted or node.late,
                "over": node.request is None and self._all_lost(state, node),
                "missing": (node.late and node.request is not None) or self._too_many_lost(state, node),
            }
            if not causes[outcome.error]:
                raise Violation(CAUSE, f"process {i} ends the attempt of all without a cause", text)
            return
        looked = last_lines(node.looked)
        layout = Layout.of(dict(zip(self.layout.axes, (len(node.layout),))), node.layout)
        after = outcome.successor(layout)
        if len({line.asks for line in looked.values()} - {""}) > 1:
            raise Violation(ALL_ARRIVED, "the ranks passed different arguments", text)
        for rank in after.ranks():
            if rank not in arrivals:
                raise Violation(ALL_ARRIVED, f"rank {rank} is in the new mesh, and never arrived", text)
            if rank not in looked:
                raise Violation(ALL_ARRIVED, f"rank {rank} is in the new mesh, and process {i} has not read so", text)
            process = int(looked[rank].process.split()[1])
            if key in state.nodes[process].left:
                raise Violation(ALL_ARRIVED, f"process {process} is in the new mesh, and had left", text)
        for rank in outcome.lost:
            member = self._member(state, node.mesh, rank)
            if not state.nodes[member].dead and member not in state.silent:
                raise Violation(TRUE_LOST, f"rank {rank} is called lost without a fault", text)
            newest = _publisher(state.content.values[status_key(rank)])
            if rank in looked and looked[rank].asks and not state.nodes[member].dead and newest == member:
                raise Violation(TRUE_LOST, f"rank {rank} is called lost, has arrived, and lives", text)

    def _too_many_lost(self, state: State, node: Standing) -> bool:
        """True if each index of the only axis, or a rank without a spare and an axis, may be lost."""
        dead = [j for j, each in enumerate(state.nodes) if each.dead or j in state.silent]
        return any(self.programs[j].rank in node.layout for j in dead)

    def _all_lost(self, state: State, node: Standing) -> bool:
        """True if all other members of the mesh of a process are dead, were silent, or stand by too."""
        others = {rank: self._member(state, node.mesh, rank) for rank in node.layout if rank != node.rank}
        arrivals = last_lines(state.content.values.get(f"{node.attempt}/arrivals", b""))
        return all(
            state.nodes[j].dead or j in state.silent or self._is_new(arrivals, rank) for rank, j in others.items()
        )

    def _member(self, state: State, mesh: str, rank: int) -> int:
        for node in state.nodes:
            for result in node.results:
                if following(result.mesh) == mesh:
                    counted = json.loads(state.content.values[f"{result.attempt}.counted"])
                    return int(dict(counted["processes"])[rank].split()[1])
        return self._processes_of(rank)[0]

    def _check_result(self, state: State, i: int, result: Any, text: str) -> None:
        """Check the laws for a mesh that a process was given."""
        for j, node in enumerate(state.nodes):
            for other in node.results:
                if other.mesh == result.mesh and (other.attempt, other.ranks) != (result.attempt, result.ranks):
                    raise Violation(ONE_SUCCESSOR, f"{result} on process {i}, and {other} on process {j}", text)
        rank = self.programs[i].rank
        if rank in result.ranks:
            counted = json.loads(state.content.values[f"{result.attempt}.counted"])
            if dict(counted["processes"]).get(rank) != f"process {i}":
                raise Violation(NOT_IN, f"process {i} is in {result}, which counted {counted['processes']}", text)

    # -- from here on, processes take turns -----------------------------------------------------------------------

    def needs_time(self, state: State) -> bool:
        return bool(self.faults.silences) or not self.faults.listeners

    def check_end(self, state: State) -> tuple[str, State]:
        for i, node in enumerate(state.nodes):
            if isinstance(node.step, Sleep):
                self._check_wait(i, state)
        return "", state

    def _check_wait(self, i: int, state: State) -> None:
        """Check that a process that would wait until its deadline has a reason."""
        node, values = state.nodes[i], state.content.values
        where = f"process {i} waits in {node.attempt} until its deadline"
        if f"{node.attempt}/decision" in values:
            raise Violation(NO_WAIT, f"{where}, though it is decided")
        for j, other in enumerate(state.nodes):
            if isinstance(other.step, Sleep) and other.mesh == node.mesh and other.number != node.number:
                raise Violation(RETRY, f"{where}, and process {j} in {other.attempt}")
        counted = any(following(each.mesh) == node.mesh for other in state.nodes for each in other.results)
        new = node.request is None and node.rank in node.layout
        if counted and new and self._member(state, node.mesh, node.rank) == i:
            raise Violation(ALL_ARRIVED, f"{where}, and others have a mesh with it")
        if node.request is None:
            others = [rank for rank in node.layout if rank != node.rank]
            if not any(self._lives(state, rank) for rank in others):
                raise Violation(NO_WAIT, f"{where}, though no member is left")
            return
        arrivals = last_lines(values.get(f"{node.attempt}/arrivals", b""))
        if len({line.asks for line in arrivals.values() if line.asks}) > 1:
            raise Violation(NO_WAIT, f"{where}, though the arguments differ")
        spares = node.request.spares
        absent = [rank for rank in dict.fromkeys((*node.layout, *spares)) if rank not in arrivals]
        alive = {rank: [j for j in self._processes_of(rank) if lives(state.nodes[j])] for rank in absent}
        lost = [rank for rank in node.layout if (rank in absent and not alive[rank]) or self._is_new(arrivals, rank)]
        ready = [rank for rank in spares if rank in arrivals and (rank not in node.layout or rank in lost)]
        waits_for = [rank for rank in node.layout if rank in absent and alive[rank]]
        if len(ready) < len(lost):
            waits_for += [rank for rank in spares if rank in absent and (alive[rank] or rank in node.layout)]
        if lost and node.request.axis is None:  # there is no mesh without spares, so dead ones may be started again
            waits_for += [rank for rank in spares if not self._lives(state, rank)]
        if not waits_for:
            raise Violation(NO_WAIT, f"{where}, though all arrived; {ready} for {lost}")
        for rank in waits_for:
            for j in alive.get(rank, ()):
                if isinstance(state.nodes[j].step, Sleep):
                    raise Violation(RETRY, f"{where} for rank {rank}, which waits in {state.nodes[j].attempt}")

    def _is_new(self, arrivals: dict[int, Arrival], rank: int) -> bool:
        return rank in arrivals and not arrivals[rank].asks

    def _lives(self, state: State, rank: int) -> bool:
        return any(lives(state.nodes[j]) for j in self._processes_of(rank))

    def _processes_of(self, rank: int) -> list[int]:
        return [i for i, program in enumerate(self.programs) if program.rank == rank]


def _status(process: int, beats: int = 0) -> bytes:
    record = RankStatus(endpoint=("listener", process), sent=float(beats), process=f"process {process}")
    return record.pack().encode()


@functools.lru_cache
def _publisher(status: bytes) -> int:
    record = RankStatus.unpack(status)
    assert record is not None
    return record.endpoint[1] if record.endpoint else -1


def lives(node: Standing) -> bool:
    """True if a process has begun and not died."""
    return not node.dead and not isinstance(node.step, Start)


def following(mesh: str) -> str:
    """The key of the mesh that replaces a mesh."""
    first, _, number = mesh.partition("#")
    return f"{first}#{int(number or 0) + 1}"
