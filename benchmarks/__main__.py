"""pgmesh beside torch's DeviceMesh: what is asked for, and what this machine gives.

    python -m benchmarks            # everything: a minute or two
    python -m benchmarks --quick    # fewer ranks, fewer repetitions: half a minute

Every figure is a ratio of two medians that were taken in turn in this one run, or a count: times are told to show what
a ratio is made of, and say nothing beyond this machine and this moment. Nothing here fails: a figure that is not met
is said to be so, below the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.report import Figure

ASKED_AT = 64
"""The figures for many processes are asked for at this many."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 processes and fewer repetitions")
    parser.add_argument("--ranks", type=int, help=f"how many gloo processes ({ASKED_AT}; 16 if quick)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    asked = parser.parse_args()
    ranks = asked.ranks or (16 if asked.quick else ASKED_AT)

    import torch

    from benchmarks import hits, many_processes, one_rank, report

    figures = [
        *_told("asking again", hits.figures, 5 if asked.quick else 9),
        *_told("one rank of a huge world", one_rank.figures, 3 if asked.quick else 5),
        *_told(
            f"{ranks} processes", many_processes.figures, ranks, 5 if asked.quick else 11, binding=ranks == ASKED_AT
        ),
    ]
    print(f"\npgmesh beside DeviceMesh of torch {torch.__version__}, Python {platform.python_version()}\n")
    print(report.table(figures))
    if ranks != ASKED_AT:
        print(f"(8x to make and 1.8x to make and use are asked for at {ASKED_AT} processes, so not here)")
    if asked.json:
        asked.json.write_text(json.dumps([figure.record() for figure in figures], indent=1) + "\n")


def _told(what: str, figures: Callable[..., list[Figure]], *args: Any, **options: Any) -> list[Figure]:
    print(f"{what} ...", file=sys.stderr, flush=True)
    return figures(*args, **options)


if __name__ == "__main__":
    main()
