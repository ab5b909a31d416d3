"""Small programs for ranks to run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.support.model.space import Faults

Group = tuple[int, ...]
Call = tuple[Group, ...]


@dataclass(frozen=True)
class Program:
    """The program of one rank.

    Args:
        calls: the calls of connect, each with its groups, one after another.
        after: the action after a failed or interrupted call: "stop", "next" (the next call), or "retry" (its groups
            that were not made, until they are).
        otherwise: calls that replace the rest after a failed call.
        variant: a field of the fingerprints of its groups.
    """

    calls: tuple[Call, ...]
    after: str = "stop"
    otherwise: tuple[Call, ...] = ()
    variant: int = 0

    def retries(self) -> bool:
        return self.after == "retry" or bool(self.otherwise)


def one_after_another(*groups: Group, **more: Any) -> Program:
    """A call for each group."""
    return Program(tuple((group,) for group in groups), **more)


def at_once(*groups: Group, **more: Any) -> Program:
    """One call for all."""
    return Program((groups,), **more)


PAIRS_AND_TRIPLE: tuple[Group, ...] = ((0, 1), (0, 2), (1, 2), (0, 1, 2))


def random_programs(chance: random.Random, ranks: int, retries_at_once: bool = False) -> tuple[Program, ...]:
    """Random programs: groups that all members connect, in orders that may differ.

    Args:
        retries_at_once: after a failure, all groups of a rank are connected in one call.
    """
    many = chance.randint(2, ranks + 1)
    groups = {tuple(sorted(chance.sample(range(ranks), chance.randint(2, min(3, ranks))))) for _ in range(many)}
    common = sorted(groups, key=lambda _: chance.random())
    programs = []
    for rank in range(ranks):
        mine = [group for group in common if rank in group]
        otherwise: tuple[Call, ...] = (tuple(mine),) if mine and retries_at_once else ()
        if chance.random() < 0.4:
            chance.shuffle(mine)
        calls: list[Call] = []
        while mine:
            many = chance.choice((1, 1, 2))
            calls.append(tuple(mine[:many]))
            mine = mine[many:]
        programs.append(Program(tuple(calls), otherwise=otherwise))
    return tuple(programs)


def random_faults(chance: random.Random) -> tuple[tuple[Program, ...], Faults]:
    """Programs of two or three ranks, and faults."""
    ranks = chance.choice((2, 2, 3))
    everybody = tuple(range(ranks))
    retries = (at_once(everybody, after="retry"),) * ranks
    kind = chance.randrange(6)
    if kind == 0:  # one dies, and the others go on without it
        lost = chance.randrange(ranks)
        left = tuple(rank for rank in everybody if rank != lost)
        otherwise = ((left,),) if len(left) > 1 else ()
        programs = [at_once(everybody, otherwise=otherwise if rank != lost else ()) for rank in everybody]
        return tuple(programs), Faults(crashes=1, long_times=chance.randint(0, 1), mortal=frozenset([lost]))
    if kind == 1:
        return retries, Faults(deadlines=chance.randint(1, 2), interrupts=chance.randint(0, 1))
    if kind == 2:  # circles, and then one call
        return random_programs(chance, ranks, retries_at_once=True), Faults(deadlines=1)
    faults = (Faults(crashes=1), Faults(interrupts=1), Faults(silences=1, long_times=2, warns=True))[kind - 3]
    return random_programs(chance, ranks), faults
