"""Benchmarks of pgmesh and its peers, with targets.

    python -m benchmarks                    # everything: under six minutes
    python -m benchmarks --quick            # fewer ranks, fewer repetitions: under 40 seconds
    python -m benchmarks --only hits blocks # some parts
    python -m benchmarks --json FILE        # append the run to FILE, a list of runs
    python -m benchmarks --plot FILE        # draw cost against the size of the world, as SVG

Every target is a ratio of medians from the same run, a count, or a limit. Absolute times depend on this machine.
Targets that are not met are listed below the tables; the exit status is 0 all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.report import Figure

PARTS = ("hits", "one rank", "blocks", "ranks", "store", "start", "elastic", "plan", "training", "resharding")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 processes and fewer repetitions")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="how many gloo processes (8 16 32 64; or 16)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append this run to the list of runs in FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw cost against the size of the world there")
    args = parser.parse_args()

    import torch

    from benchmarks import report
    from benchmarks.sides import absent

    start = time.monotonic()
    print(f"\npgmesh and its peers: torch {torch.__version__}, Python {platform.python_version()}\n", flush=True)
    for side, reason in absent().items():
        print(f"{side} is left out: {reason}. `make bench` installs it into an environment of its own.\n")
    results: dict[str, list[Figure]] = {}
    for part, figures in parts(args.quick, args.ranks or ([16] if args.quick else [8, 16, 32, 64])):
        if part in args.only:
            found = figures()
            results.setdefault(part, []).extend(found)
            print(report.table(part, found), end="\n\n", flush=True)
            print(f"{part}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    figures_of_all = [figure for figures in results.values() for figure in figures]
    print(report.summary(figures_of_all))
    if args.json:
        run = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "quick": args.quick,
            "seconds": round(time.monotonic() - start, 1),
            "figures": {part: [figure.record() for figure in figures] for part, figures in results.items()},
        }
        before = json.loads(args.json.read_text()) if args.json.exists() else []
        args.json.write_text(json.dumps([*before, run], indent=1) + "\n")
    if args.plot:
        from benchmarks import plot

        args.plot.write_text(plot.drawing([figure.record() for figure in figures_of_all]))


def parts(quick: bool, ranks: list[int]) -> list[tuple[str, Callable[[], list[Figure]]]]:
    """The parts of the benchmark, in order."""
    from benchmarks import blocks, elastic, hits, many_ranks, one_rank, planning, resharding, starting, stores, training

    def of(n: int) -> list[Figure]:
        return many_ranks.figures(n, 2 if quick else 4)

    return [
        ("hits", lambda: hits.figures(9 if quick else 21)),
        ("one rank", lambda: one_rank.figures(1, (1_024, 65_536), 1.0) if quick else one_rank.figures(4)),
        ("blocks", lambda: blocks.figures(1 if quick else 5)),
        *(("ranks", partial(of, n)) for n in ranks),
        ("store", lambda: stores.figures([4] if quick else [4, 8, 16], 0.3 if quick else 1.0)),
        ("start", lambda: starting.figures(1 if quick else 5, max(ranks))),
        ("elastic", lambda: elastic.figures(1 if quick else 3)),
        ("plan", lambda: planning.figures(5 if quick else 9)),
        ("training", lambda: training.figures(3, ["dp4"]) if quick else training.figures(10)),
        *([] if quick else [("resharding", lambda: resharding.figures(5))]),
    ]


if __name__ == "__main__":
    main()
