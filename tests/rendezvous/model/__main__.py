"""Random programs and faults for a given time, and a table of the results."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.rendezvous.model.mutants import MUTANTS, caught
from tests.rendezvous.model.programs import Program, Release, at_once, but_for_names, drawn, up_to_two_each
from tests.rendezvous.model.space import (
    NO_FAULTS,
    Broken,
    Checker,
    Faults,
    Seen,
)


def random_faults(chance: random.Random) -> tuple[tuple[Program, ...], Faults]:
    """Programs of two or three ranks, and a fault."""
    ranks = chance.choice((2, 2, 3))
    kind = chance.randrange(6)
    everybody = tuple(range(ranks))
    if kind == 0:  # one dies, and the others go on without it
        lost = chance.randrange(ranks)
        left = tuple(rank for rank in everybody if rank != lost)
        otherwise = ((left,),) if len(left) > 1 else ()
        programs = [at_once(everybody, otherwise=otherwise if rank != lost else ()) for rank in everybody]
        return tuple(programs), Faults(crashes=1, long_times=chance.randint(0, 1), mortal=frozenset([lost]))
    if kind == 1:
        return drawn(chance, ranks), Faults(crashes=1)
    if kind == 2:  # a deadline comes, and all try again
        return tuple(at_once(everybody, after="retry") for _ in everybody), Faults(deadlines=chance.randint(1, 2))
    if kind == 3:
        return drawn(chance, ranks), Faults(interrupts=1)
    if kind == 4:  # first collectives are lost on some, and all release the group and connect it again
        calls = ((everybody,), Release((everybody,))) * chance.randint(1, 2)
        return (Program((*calls, (everybody,)), after="next", lasting=True),) * ranks, Faults(losses=2)
    return drawn(chance, ranks), Faults(silences=1, long_times=2)


@dataclass
class Table:
    """The results by kind of program."""

    rows: dict[str, tuple[Seen, float]] = field(default_factory=dict)

    def add(self, row: str, seen: Seen, seconds: float) -> None:
        total, so_far = self.rows.setdefault(row, (Seen(), 0.0))
        total.add(seen)
        self.rows[row] = (total, so_far + seconds)

    @property
    def broken(self) -> list[Broken]:
        return [each for seen, _ in self.rows.values() for each in seen.broken]

    def __str__(self) -> str:
        heads = ("", "programs", "cut short", "states", "crashes", "circles", "false", "missed", "broken", "seconds")
        lines = [heads]
        for row, (seen, seconds) in self.rows.items():
            numbers = (seen.programs, seen.cut_short, seen.states, seen.crashes, seen.circles, seen.false_circles)
            last = (seen.missed_circles, len(seen.broken))
            lines.append((row, *(f"{number:,}" for number in (*numbers, *last)), f"{seconds:.1f}"))
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *(word.rjust(width) for word, width in zip(line[1:], widths[1:]))])
            for line in lines
        )


def try_all(table: Table, row: str, programs: Sequence[Program], faults: Faults = NO_FAULTS, **more: Any) -> Seen:
    """Explore programs, or take random walks through them, and add the results to the table."""
    start = time.perf_counter()
    checker = Checker()
    seen = checker.wander(programs, faults, **more) if "walks" in more else checker.explore(programs, faults, **more)
    table.add(row, seen, time.perf_counter() - start)
    for broken in seen.broken[:1]:
        if len(broken.trace) > 60:  # of a random walk, so not the shortest
            broken = broken._replace(trace=("...", *broken.trace[-60:]))
        print(f"\n{row}: {programs}, {faults}\n{broken}\n", flush=True)
    return seen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rendezvous.model", description="Try the protocol behind connect()."
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=1_500_000, help="states of one space, about 0.5 GB for a million")
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}, {given.minutes:g} minutes", flush=True)
    decision = time.perf_counter() + 60 * given.minutes
    chance, table = random.Random(given.seed), Table()
    known = [mutant for mutant in MUTANTS if caught(mutant)]
    every = but_for_names(up_to_two_each())
    chance.shuffle(every)
    while time.perf_counter() < decision:
        if every:
            programs, same = every.pop()
            seen = try_all(table, "three ranks, up to two calls each", programs, most=given.most)
            table.add("the same, but for names", Seen(programs=same, circles=same * seen.circles), 0.0)
        programs, faults = random_faults(chance)
        try_all(table, "two or three ranks, and faults", programs, faults, most=given.most // 10)
        for ranks in (4, 5):
            programs = drawn(chance, ranks)
            try_all(table, f"{ranks} ranks, random", programs, walks=30, chance=chance)
            faults = Faults(crashes=1, deadlines=1, long_times=1)
            try_all(table, f"{ranks} ranks, random, and faults", programs, faults, walks=30, chance=chance)
    print(table)
    laws = Counter(broken.law for broken in table.broken)
    print(f"mutants caught: {len(known)} of {len(MUTANTS)}; three-rank programs not reached: {len(every)}")
    print(f"laws broken: {', '.join(f'{law} ({times})' for law, times in laws.items()) or 'none'}")
    return int(bool(laws) or len(known) < len(MUTANTS))


if __name__ == "__main__":
    sys.exit(main())
