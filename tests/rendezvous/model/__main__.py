"""Random programs and faults for a given time, and a table of the results."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.rendezvous.model.mutants import MUTANTS
from tests.rendezvous.model.programs import Program, at_once, orders_of_two_groups, random_programs
from tests.rendezvous.model.space import NO_FAULTS, Faults, Seen, Space


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rendezvous.model", description="Try the protocol behind connect()."
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=1_500_000, help="states of one space, about 0.5 GB for a million")
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}, {given.minutes:g} minutes", flush=True)
    end = time.perf_counter() + 60 * given.minutes
    chance = random.Random(given.seed)
    totals: defaultdict[str, Seen] = defaultdict(Seen)

    def add(kind: str, programs: Sequence[Program], faults: Faults, seen: Seen) -> None:
        totals[kind].add(seen)
        for broken in seen.broken:
            print(f"\n{kind}: {programs}, {faults}\n{broken}\n", flush=True)

    caught = sum(mutant.broken() is not None for mutant in MUTANTS)
    orders = orders_of_two_groups()
    chance.shuffle(orders)
    while time.perf_counter() < end:
        if orders:
            programs, faults = orders.pop(), Faults(deadlines=1)
            add("three ranks, two calls each", programs, faults, Space(programs, faults).explore(given.most))
        programs, faults = random_faults(chance)
        add("two or three ranks, and faults", programs, faults, Space(programs, faults).explore(given.most // 10))
        for ranks in (4, 5):
            for faults in (NO_FAULTS, Faults(crashes=1, deadlines=1, long_times=1, warns=True)):
                programs = random_programs(chance, ranks)
                add(f"{ranks} ranks, random walks", programs, faults, Space(programs, faults).walk(30, chance))
    for kind, seen in totals.items():
        print(f"{kind}: {seen}")
    laws = Counter(broken.law for seen in totals.values() for broken in seen.broken)
    print(f"mutants caught: {caught} of {len(MUTANTS)}; three-rank programs not reached: {len(orders)}")
    print(f"laws broken: {', '.join(f'{law} ({times})' for law, times in laws.items()) or 'none'}")
    return int(bool(laws) or caught < len(MUTANTS))


if __name__ == "__main__":
    sys.exit(main())
