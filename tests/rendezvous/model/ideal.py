"""What would happen if nothing failed: there is only one way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.rendezvous.model.programs import Group, Program


@dataclass(frozen=True)
class Ideal:
    """How programs end if nothing fails: there is only one way.

    Args:
        made: the meetings to which all members come.
        waits: by rank that waits for ever, and meeting: who never comes.
    """

    made: frozenset[tuple[Group, int]]
    waits: dict[int, dict[tuple[Group, int], frozenset[int]]]

    @classmethod
    def of(cls, programs: Sequence[Program]) -> Ideal:
        at = [0] * len(programs)
        came: set[tuple[int, Group, int]] = set()
        attempts: list[Counter[Group]] = [Counter() for _ in programs]
        made: set[tuple[Group, int]] = set()
        before = None
        while before != (before := (len(came), len(made), *at)):
            for rank, program in enumerate(programs):
                if at[rank] == len(program.calls):
                    continue
                now = [(group, attempts[rank][group]) for group in program.calls[at[rank]]]
                came |= {(rank, *meeting) for meeting in now}
                made |= {(g, n) for g, n in now if all((member, g, n) in came for member in g)}
                if made.issuperset(now):
                    at[rank] += 1
                    attempts[rank].update(group for group, _ in now)
        waits = {
            rank: {
                (group, attempts[rank][group]): missing
                for group in program.calls[at[rank]]
                if (missing := frozenset(r for r in group if (r, group, attempts[rank][group]) not in came))
            }
            for rank, program in enumerate(programs)
            if at[rank] < len(program.calls)
        }
        return cls(frozenset(made), waits)

    def has_circle(self) -> bool:
        return on_circle({rank: frozenset().union(*meetings.values()) for rank, meetings in self.waits.items()})


def on_circle(waits: dict[int, frozenset[int]]) -> bool:
    """Whether some ranks wait for each other."""
    left = dict(waits)
    while leaving := [rank for rank, others in left.items() if not others & left.keys()]:
        for rank in leaving:
            del left[rank]
    return bool(left)
