"""The outcome of programs without faults, which is unique."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.rendezvous.model.programs import Group, Program


@dataclass(frozen=True)
class Ideal:
    """The outcome of programs without faults, which is unique.

    Args:
        made: the attempts at which all members arrive.
        waits: by rank that waits forever, and attempt: the missing members.
    """

    made: frozenset[tuple[Group, int]]
    waits: dict[int, dict[tuple[Group, int], frozenset[int]]]

    @classmethod
    def of(cls, programs: Sequence[Program]) -> Ideal:
        at = [0] * len(programs)
        arrived: set[tuple[int, Group, int]] = set()
        counts: list[Counter[Group]] = [Counter() for _ in programs]
        made: set[tuple[Group, int]] = set()
        before = None
        while before != (before := (len(arrived), len(made), *at)):
            for rank, program in enumerate(programs):
                if at[rank] == len(program.calls):
                    continue
                now = [(group, counts[rank][group]) for group in program.calls[at[rank]]]
                arrived |= {(rank, *attempt) for attempt in now}
                made |= {(g, n) for g, n in now if all((member, g, n) in arrived for member in g)}
                if made.issuperset(now):
                    at[rank] += 1
                    counts[rank].update(group for group, _ in now)
        waits = {
            rank: {
                (group, counts[rank][group]): missing
                for group in program.calls[at[rank]]
                if (missing := frozenset(r for r in group if (r, group, counts[rank][group]) not in arrived))
            }
            for rank, program in enumerate(programs)
            if at[rank] < len(program.calls)
        }
        return cls(frozenset(made), waits)

    def has_circle(self) -> bool:
        return on_circle({rank: frozenset().union(*attempts.values()) for rank, attempts in self.waits.items()})


def on_circle(waits: dict[int, frozenset[int]]) -> bool:
    """True if some ranks wait for each other."""
    left = dict(waits)
    while leaving := [rank for rank, others in left.items() if not others & left.keys()]:
        for rank in leaving:
            del left[rank]
    return bool(left)
