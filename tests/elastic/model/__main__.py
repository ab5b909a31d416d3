"""Random programs and faults for a given time, and a table of the results."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.elastic.model.mutants import MUTANTS
from tests.elastic.model.programs import random_programs
from tests.elastic.model.space import Space
from tests.rendezvous.model.space import Seen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.elastic.model", description="Try the agreement behind shrink() and stand_by()."
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=100_000, help="states of one space")
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}, {given.minutes:g} minutes", flush=True)
    end = time.perf_counter() + 60 * given.minutes
    chance = random.Random(given.seed)
    totals: defaultdict[str, Seen] = defaultdict(Seen)
    caught = sum(mutant.broken() is not None for mutant in MUTANTS)
    while time.perf_counter() < end:
        programs, faults, more = random_programs(chance)
        seen = Space(programs, faults, **more).explore(given.most)
        totals["every interleaving"].add(seen)
        if seen.cut_short:
            walked = Space(programs, faults, **more).walk(100, chance)
            totals["random walks"].add(walked)
            seen.add(walked)
        for broken in seen.broken:
            print(f"\n{programs}, {faults}\n{broken}\n", flush=True)
    for kind, seen in totals.items():
        print(f"{kind}: {seen.programs} programs, {seen.states} states, {seen.cut_short} cut short")
    laws = Counter(broken.law for seen in totals.values() for broken in seen.broken)
    print(f"mutants caught: {caught} of {len(MUTANTS)}")
    print(f"laws broken: {', '.join(f'{law} ({times})' for law, times in laws.items()) or 'none'}")
    return int(bool(laws) or caught < len(MUTANTS))


if __name__ == "__main__":
    sys.exit(main())
