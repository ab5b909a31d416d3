"""Small programs for ranks to run, and the protocol that they run under."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from pgmesh.rendezvous import protocol as real

MOST_TRIES = 9
"""Upper limit of the calls of one rank with retries."""

Group = tuple[int, ...]
Call = tuple[Group, ...]


@dataclass(frozen=True)
class Program:
    """The program of one rank.

    Args:
        calls: the calls of connect, each with its groups, one after another.
        after: the action after a failed call: "stop", "next" (the next call), or "retry" (its groups that were not
            made, until they are).
        otherwise: calls that replace the rest after a failed call.
        variant: a field of the fingerprints of its groups.
        lasting: groups that are made have a first collective, and are not connected again once it is done.
    """

    calls: tuple[Call, ...]
    after: str = "stop"
    otherwise: tuple[Call, ...] = ()
    variant: int = 0
    lasting: bool = False


class Release(tuple[Group, ...]):
    """A release of these groups, in place of a call of connect."""


class Collective(NamedTuple):
    """The first collective of a group. It may succeed on one member and fail on another."""

    name: str


def spell(group: Group) -> str:
    return "g" + "-".join(map(str, group))


class Interruption(BaseException):
    """Ctrl-C, as the protocol sees it."""


@dataclass(frozen=True)
class Protocol:
    """The protocol under test, or a mutant of it.

    Args:
        live: fields of attempts and participants that a mutant still uses after a pause.
        numbered: a retry is another attempt under another name.
        sound: decisions and arrivals never change, so that reads of them need not be tried in every order.
    """

    name: str = "pgmesh"
    attempt: type[real.ConnectAttempt] = real.ConnectAttempt
    participant: type[real.Participant] = real.Participant
    live: tuple[str, ...] = ()
    numbered: bool = True
    sound: bool = True
    generations: type[real.Generations] = real.Generations


REAL = Protocol()


# -- programs to try --------------------------------------------------------------------------------------------------


def one_after_another(*groups: Group, **more: Any) -> Program:
    """A call for each group."""
    return Program(tuple((group,) for group in groups), **more)


def at_once(*groups: Group, **more: Any) -> Program:
    """One call for all."""
    return Program((groups,), **more)


PAIRS_AND_TRIPLE: tuple[Group, ...] = ((0, 1), (0, 2), (1, 2), (0, 1, 2))


def two_each() -> list[tuple[Program, ...]]:
    """Three ranks, each of which connects two of its three groups one after another: 216 programs."""
    ways = [itertools.permutations([g for g in PAIRS_AND_TRIPLE if r in g], 2) for r in range(3)]
    return [tuple(one_after_another(*way) for way in choice) for choice in itertools.product(*ways)]


def up_to_two_each() -> list[tuple[Program, ...]]:
    """Three ranks, each of which connects up to two of its groups, also one twice: 2197 programs."""
    ways = []
    for rank in range(3):
        mine = [group for group in PAIRS_AND_TRIPLE if rank in group]
        ways.append([way for many in range(3) for way in itertools.product(mine, repeat=many)])
    return [tuple(one_after_another(*way) for way in choice) for choice in itertools.product(*ways)]


def but_for_names(programs: list[tuple[Program, ...]]) -> list[tuple[tuple[Program, ...], int]]:
    """One for all that differ only in the numbers of their ranks, and their number."""

    def renamed(programs: tuple[Program, ...], order: tuple[int, ...]) -> tuple[Program, ...]:
        new = {
            order[rank]: Program(tuple(tuple(tuple(sorted(order[r] for r in g)) for g in call) for call in p.calls))
            for rank, p in enumerate(programs)
        }
        return tuple(new[rank] for rank in range(len(programs)))

    def first(programs: tuple[Program, ...]) -> tuple[Program, ...]:
        orders = itertools.permutations(range(len(programs)))
        return min((renamed(programs, order) for order in orders), key=lambda each: [p.calls for p in each])

    return list(Counter(map(first, programs)).items())


def drawn(chance: random.Random, ranks: int, **more: Any) -> tuple[Program, ...]:
    """Random programs: groups that all members connect, in orders that may differ."""
    many = chance.randint(2, ranks + 1)
    groups = {tuple(sorted(chance.sample(range(ranks), chance.randint(2, min(3, ranks))))) for _ in range(many)}
    common = sorted(groups, key=lambda _: chance.random())
    programs = []
    for rank in range(ranks):
        mine = [group for group in common if rank in group]
        if chance.random() < 0.4:
            chance.shuffle(mine)
        if mine and chance.random() < 0.1:
            mine.pop()
        calls: list[Call] = []
        while mine:
            many = chance.choice((1, 1, 2))
            calls.append(tuple(mine[:many]))
            mine = mine[many:]
        programs.append(Program(tuple(calls), **more))
    return tuple(programs)
