"""Random programs and faults for a given time, and a table of the results."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator, Sequence

from tests.rendezvous.model.mutants import MUTANTS
from tests.rendezvous.model.programs import Program, at_once, orders_of_two_groups, random_programs
from tests.rendezvous.model.space import ConnectSpace
from tests.support.model import command
from tests.support.model.space import NO_FAULTS, Faults


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


def trials(chance: random.Random, most: int) -> Iterator[command.Trial]:
    """Every order of two groups, and random programs in between."""
    orders = orders_of_two_groups()
    chance.shuffle(orders)
    deadline = Faults(deadlines=1)

    def explored(programs: Sequence[Program], faults: Faults, most: int) -> tuple[str, command.Exploration]:
        return f"{programs}, {faults}", lambda: ConnectSpace(programs, faults).explore(most)

    while True:
        if orders:
            yield "three ranks, two calls each", *explored(orders.pop(), deadline, most)
        yield "two or three ranks, and faults", *explored(*random_faults(chance), most // 10)
        for ranks in (4, 5):
            for faults in (NO_FAULTS, Faults(crashes=1, deadlines=1, long_times=1, warns=True)):
                programs = random_programs(chance, ranks)
                walk = functools.partial(ConnectSpace(programs, faults).walk, 30, chance)
                yield f"{ranks} ranks, random walks", f"{programs}, {faults}", walk


def main(arguments: Sequence[str] | None = None) -> int:
    what = "Try the protocol behind connect()."
    return command.run("tests.rendezvous.model", what, ConnectSpace, MUTANTS, trials, 1_500_000, arguments)


if __name__ == "__main__":
    sys.exit(main())
