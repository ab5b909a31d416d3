"""``pgmesh check``: the preflight of a job, run by every rank under the job's launcher."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from pgmesh._util.formatting import count_of, format_sizes
from pgmesh.cli import arguments, output
from pgmesh.cli.arguments import USAGE_ERRORS, Sizes, UsageError
from pgmesh.drawing import styled_text
from pgmesh.errors import LaunchError, PgmeshError
from pgmesh.launch.detect import detect_launcher
from pgmesh.preflight.diagnosis import torch_findings
from pgmesh.topology.hosts import Topology

if TYPE_CHECKING:
    from pgmesh.preflight.results import CheckResults
    from pgmesh.preflight.stages import Stages

EXAMPLES = """\
examples, each run by every rank of the job:
  torchrun --nproc-per-node 8 -m pgmesh check pp=2 dp=2 tp=2
  srun python -m pgmesh check dp=2 tp=8 --nodes 2x8

Rank 0 prints the result. The exit status is the same on every rank: 0, or 1 if
the check failed, or 2 if the command line is wrong."""

LEAVE_TIMEOUT = 5.0
"""Seconds for all ranks to leave. Rank 0 prints first: a launcher may end the job with the first rank that fails."""


def add(parser: argparse.ArgumentParser) -> None:
    arguments.add_mesh(parser)
    arguments.add_combinations(parser)
    text = "bytes of the all-reduces (8,64K,16M)"
    parser.add_argument("--bytes", type=byte_sizes, default=byte_sizes("8,64K,16M"), metavar="SIZES", help=text)
    parser.add_argument("--repeats", type=repeats, default=5, metavar="N", help="timed batches, at least 1 (5)")
    parser.add_argument("--backend", metavar="NAME", help="default: nccl if CUDA is available, else gloo")
    arguments.add_timeout(parser, 60.0, "timeout for the other ranks at each stage")
    arguments.add_json(parser)


def byte_sizes(text: str) -> list[int]:
    """The type of ``--bytes``.

    >>> byte_sizes("8,64K")
    [8, 65536]
    """
    words = [re.fullmatch(r"([1-9][0-9]*)([KMG]?)", word) for word in text.split(",")]
    if None in words:
        raise argparse.ArgumentTypeError(f"sizes are written 8,64K,16M, not {text!r}")
    sizes = [int(word[1]) << 10 * " KMG".index(word[2] or " ") for word in words if word]
    if any(size % 4 for size in sizes):  # of 32-bit values
        raise argparse.ArgumentTypeError(f"sizes are multiples of 4, not {text!r}")
    return sizes


def repeats(text: str) -> int:
    """The type of ``--repeats``."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"at least 1 batch is timed, not {text}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    sizes, topology = arguments.parse_mesh(args)
    torch = next(torch_findings(importlib.import_module))
    if torch.mark == "bad":
        print(f"pgmesh check: {torch.text}\n\n  {torch.fix}", file=sys.stderr)
        return 1
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # torch's Gloo groups then connect at first use
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch would log each attempt to reach the store
    from pgmesh.preflight import preflight, stages  # these import torch

    show, task, results = _step_printer(), None, None
    failure: UsageError | PgmeshError | None = None
    try:
        show("waiting for the other ranks")
        preflight.join(args.backend, args.timeout)
        hint = "Start every rank with the same software and the same command line."
        task = stages.Stages("pgmesh check", args.timeout, hint)
        show(f"waiting for {count_of(task.size, 'rank')}")
        results = _check(args, sizes, topology, task, show)
    except (UsageError, PgmeshError) as error:
        failure = error
    if task is None or task.rank == 0:
        _print(args, results, failure)
    is_printed = task is None or task.leave(LEAVE_TIMEOUT)
    if failure is not None and not is_printed:  # rank 0 is lost, so each rank prints
        _print(args, results, failure)
    return 0 if failure is None else 2 if isinstance(failure, USAGE_ERRORS) else 1


def _check(
    args: argparse.Namespace, sizes: Sizes, topology: Topology, task: Stages, show: Callable[[str], None]
) -> CheckResults | None:
    """Run the check. Returns the results on rank 0, None on other ranks."""
    from pgmesh.mesh import ProcessGroupMesh
    from pgmesh.preflight import preflight

    names = ("nodes", "domains", "combinations", "bytes", "repeats", "backend")
    shared = {**preflight.versions(), "sizes": format_sizes(sizes), **{name: getattr(args, name) for name in names}}
    with task.stage("at the start", {**shared, "ranks": task.size}):
        pass
    world = f"the world has {task.size:,}" if task.size > 1 else "without a launcher the world has 1"
    sizes = arguments.fill(sizes, task.size, world)
    layout = arguments.layout_of(sizes)
    axes = [*((axis,) for axis in layout.axes), *(arguments.parse_axes(text, layout) for text in args.combinations)]
    combinations = {frozenset(each): each for each in axes}.values()
    planned = topology[0] if topology else None
    with ProcessGroupMesh(sizes, name="check") as mesh:
        return preflight.Preflight(task, mesh, [*combinations], planned, args.bytes, args.repeats, show).run()


def _print(args: argparse.Namespace, results: CheckResults | None, failure: Exception | None) -> None:
    """Print the results, or the failure on standard error."""
    if results is not None:
        from pgmesh.preflight import report

        data = {"format": 1, "status": "ok", **asdict(results)}
        output.report(args, lambda: data, lambda width: report.report(results, width))
    elif isinstance(failure, USAGE_ERRORS):
        print(f"pgmesh check: {failure}", file=sys.stderr, flush=True)
    else:
        print(f"pgmesh check failed: {type(failure).__name__}: {failure}", file=sys.stderr, flush=True)


def _step_printer() -> Callable[[str], None]:
    """A function that prints the current step, on the terminal of rank 0."""
    with contextlib.suppress(LaunchError):  # joining raises it too
        if styled_text.is_terminal(sys.stderr) and detect_launcher(os.environ).rank == 0:
            return lambda step: print(f"pgmesh check: {step}", file=sys.stderr)
    return lambda step: None
