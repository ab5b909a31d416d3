"""The command of a model checker: random programs for a given time, and a table of the results."""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from tests.support.model.space import Mutant, Seen, Space

Exploration = Callable[[], Seen]

Trial = tuple[str, str, Exploration]
"""A kind of program, the programs and faults as text, and the exploration."""


def run(
    module: str,
    what: str,
    space: Callable[..., Space],
    mutants: Sequence[Mutant],
    trials: Callable[[random.Random, int], Iterator[Trial]],
    most: int,
    arguments: Sequence[str] | None,
) -> int:
    """Run the command; return its exit status, which is 1 if a law was broken or a mutant was not caught.

    Args:
        module: the name of the command's module.
        what: its description.
        space: makes the space of a mutant.
        trials: draws programs without end, with the states of one space at most.
        most: the default of these states.
        arguments: of the command line; None for those of this process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=what)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=most, help="states of one space, about 0.5 GB for a million")
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}, {given.minutes:g} minutes", flush=True)
    end = time.perf_counter() + 60 * given.minutes
    totals: defaultdict[str, Seen] = defaultdict(Seen)
    caught = sum(mutant.broken(space) is not None for mutant in mutants)
    for kind, programs, explore in trials(random.Random(given.seed), given.most):
        if time.perf_counter() >= end:
            break
        seen = explore()
        totals[kind].add(seen)
        for broken in seen.broken:
            print(f"\n{kind}: {programs}\n{broken}\n", flush=True)
    for kind, seen in totals.items():
        print(f"{kind}: {seen.programs} programs, {seen.states} states, {seen.cut_short} cut short")
    laws = Counter(broken.law for seen in totals.values() for broken in seen.broken)
    print(f"mutants caught: {caught} of {len(mutants)}")
    print(f"laws broken: {', '.join(f'{law} ({times})' for law, times in laws.items()) or 'none'}")
    return int(bool(laws) or caught < len(mutants))
