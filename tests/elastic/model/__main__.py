"""Random programs and faults for a given time, and a table of the results."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator, Sequence

from tests.elastic.model.mutants import MUTANTS
from tests.elastic.model.programs import random_programs
from tests.elastic.model.space import ShrinkSpace
from tests.support.model import command


def trials(chance: random.Random, most: int) -> Iterator[command.Trial]:
    """Random programs, each explored; and random walks through the spaces that are too large."""
    while True:
        programs, faults, more = random_programs(chance)
        space, text = ShrinkSpace(programs, faults, **more), f"{programs}, {faults}"
        yield "every interleaving", text, functools.partial(space.explore, most)
        if space.out.cut_short:
            walk = functools.partial(ShrinkSpace(programs, faults, **more).walk, 100, chance)
            yield "random walks", text, walk


def main(arguments: Sequence[str] | None = None) -> int:
    what = "Try the agreement behind shrink() and stand_by()."
    return command.run("tests.elastic.model", what, ShrinkSpace, MUTANTS, trials, 100_000, arguments)


if __name__ == "__main__":
    sys.exit(main())
