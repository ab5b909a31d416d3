"""``pgmesh check``: the preflight of a job, run by every rank under the job's launcher."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pgmesh._util.formatting import count_of
from pgmesh._util.suggestions import known_product, torchrun_command
from pgmesh.cli import arguments, output
from pgmesh.cli.arguments import UsageError, spell
from pgmesh.drawing import styled_text
from pgmesh.drawing.styled_text import Line
from pgmesh.errors import LaunchError, MismatchError, PgmeshError, WorldError
from pgmesh.launch.detect import detect_launcher
from pgmesh.layout import Axis
from pgmesh.planning.text_report import format_sizes, layout_of
from pgmesh.topology.hosts import HostLevel, Topology, hosts_from_names, placement_faults

if TYPE_CHECKING:
    from pgmesh.mesh import ProcessGroupMesh
    from pgmesh.preflight.results import Results

EXAMPLES = """\
examples, each run by every rank of the job:
  torchrun --nproc-per-node 8 -m pgmesh check pp=2 dp=2 tp=2
  srun python -m pgmesh check dp=2 tp=8 --nodes 2x8

Checks that all ranks join with the same arguments and are on the planned
hosts, that the groups of each axis connect, and that all-reduces give correct
sums. Then it times these all-reduces.
Rank 0 prints the result. The exit status is the same on every rank: 0, or 1 if
the check failed, or 2 if the command line is wrong."""

SIZES = "8,64K,16M"
LEAVE_TIMEOUT = 10.0
"""Seconds for all ranks to leave. Rank 0 prints first: a launcher may end the job with the first rank that fails."""

FAILED_LEAVE_TIMEOUT = 3.0
"""The same after a failed check, when some ranks may be lost."""


def add(parser: argparse.ArgumentParser) -> None:
    arguments.add_mesh(parser)
    arguments.add_combinations(parser)
    parser.add_argument("--bytes", default=SIZES, metavar="SIZES", help=f"bytes of the all-reduces, such as {SIZES}")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed batches (5)")
    parser.add_argument("--backend", metavar="NAME", help="default: nccl if CUDA is available, else gloo")
    text = "timeout for the other ranks at each stage (60)"
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help=text)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    arguments.sort_words(args)
    sizes, topology = arguments.parse_mesh(args, fit=arguments.hosts_argument(args) != "")
    parse_bytes(args)
    if args.timeout <= 0 or args.repeats < 1:
        args.timeout, args.repeats = args.parser.get_default("timeout"), args.parser.get_default("repeats")
        raise UsageError("--timeout and --repeats have to be greater than 0.", (spell(args), "without them"))
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # torch's Gloo groups then connect at first use
    from pgmesh.preflight import preflight  # this imports torch

    try:
        with _progress_bar(_is_first()) as show:
            show("waiting for the other ranks")
            preflight.join(args.backend, args.timeout)
        return _Check(args, sizes, topology).run()
    except PgmeshError as error:  # this rank could not join the world
        _print_failure(args, error)
        return 1


def parse_bytes(args: argparse.Namespace) -> tuple[int, ...]:
    """The sizes of ``--bytes``, which are written ``8,64K,16M``."""
    words = [re.fullmatch(r"([1-9][0-9]*)([KMG]?)", word.strip().upper()) for word in args.bytes.split(",")]
    sizes = tuple(int(word[1]) << 10 * " KMG".index(word[2] or " ") for word in words if word)
    if len(sizes) < len(words):
        better = spell(args, {args.bytes: SIZES})
        raise UsageError(f"sizes are written {SIZES}, not {args.bytes!r}.", (better, "for example"))
    return sizes


def _is_first() -> bool:
    """True if this is rank 0, which prints. If launchers contradict each other, ``join`` raises the error."""
    with contextlib.suppress(LaunchError):
        return detect_launcher(os.environ).rank == 0
    return False


def _print_failure(args: argparse.Namespace, failure: Exception) -> None:
    """Print the failure of the check, as text on standard error, and as JSON."""
    if isinstance(failure, UsageError):
        print(f"pgmesh check: {failure}", file=sys.stderr, flush=True)
        return
    kind = type(failure).__name__
    print(f"pgmesh check failed: {kind}: {failure}", file=sys.stderr, flush=True)
    if args.json:
        data = {"format": 1, "status": "failed", "error": {"kind": kind, "text": str(failure)}}
        print(json.dumps(data, indent=2), flush=True)


class _Check:
    """The check on one rank that has joined the world."""

    def __init__(self, args: argparse.Namespace, sizes: dict[Axis, int], topology: Topology) -> None:
        from pgmesh.preflight.staged_barrier import StagedBarrier

        self.args, self.sizes, self.topology = args, sizes, topology
        self.barrier = StagedBarrier("pgmesh check", args.timeout, "Start every rank with the same command line.")
        self.findings: list[tuple[str, str]] = []  # the marks and texts of the report of rank 0
        self.data: dict[str, Any] = {"format": 1, "status": "ok"}

    def run(self) -> int:
        """Run the check; return the exit status."""
        failure: Exception | None = None
        try:
            self._check()
        except (UsageError, PgmeshError) as error:
            failure = error
        printed = self.barrier.rank == 0
        if failure is None and printed:
            output.report(self.args, lambda: self.data, self._lines)
        elif failure is not None and printed:
            _print_failure(self.args, failure)
        with contextlib.suppress(WorldError):
            printed |= self.barrier.leave(LEAVE_TIMEOUT if failure is None else FAILED_LEAVE_TIMEOUT)
        if failure is not None and not printed:  # rank 0 is lost, so each rank prints
            _print_failure(self.args, failure)
        return 0 if failure is None else 2 if isinstance(failure, UsageError) else 1

    def _check(self) -> None:
        from pgmesh.mesh import ProcessGroupMesh
        from pgmesh.preflight.preflight import Preflight, versions

        barrier = self.barrier
        with _progress_bar(barrier.rank == 0) as show:
            show(f"waiting for {count_of(barrier.size, 'rank')}")
            with barrier.stage("at the start"):
                pass
            same = "Install the same versions on every rank's host."
            with barrier.stage("comparing versions", versions(), "version mismatch: the software", same):
                pass
            with barrier.stage("comparing command lines", self._shared_arguments()):
                pass
            self._fill_sizes()
            layout = layout_of(self.sizes)
            combinations = [arguments.parse_axes(self.args, text, layout) for text in self.args.combinations]
            families = {frozenset(axes): axes for axes in [*((axis,) for axis in layout.axes), *combinations]}
            hosts = self._check_hosts()
            with ProcessGroupMesh(self.sizes, name="check") as mesh:
                sizes, repeats = parse_bytes(self.args), self.args.repeats
                results = Preflight(barrier, mesh, [*families.values()], hosts, sizes, repeats, show).run()
                if results is not None:
                    self._add_results(mesh, results)

    def _shared_arguments(self) -> dict[str, Any]:
        """The arguments that have to be the same on all ranks."""
        args = self.args
        return {
            "sizes": format_sizes(self.sizes),
            "nodes": arguments.hosts_argument(args),
            "families": " ".join(args.combinations),
            **{name: getattr(args, name) for name in ("bytes", "repeats", "backend")},
        }

    def _fill_sizes(self) -> None:
        """Replace a size of -1 so that the sizes hold the world."""
        size, fixed, args = self.barrier.size, known_product(self.sizes), self.args
        other = [f"{torchrun_command(fixed)} -m {spell(self.args)}"] * (size == 1)  # only one rank was started
        if self.topology and self.topology[0].capacity != size:  # these hosts do not hold this world
            args = argparse.Namespace(**{**vars(args), "nodes": None, "domains": None})
        self.sizes = arguments.fill(args, self.sizes, size, f"the world has {size:,}", *other)

    def _check_hosts(self) -> list[str]:
        """The host name of each rank. Rank 0 compares the hosts with the plan."""
        from pgmesh.topology import host_mapping

        barrier, planned = self.barrier, self.topology[0] if self.topology else None
        with barrier.stage("comparing hosts"):
            placement = host_mapping.map_hosts(timeout=barrier.seconds)
            names = [placement.host_infos[ranks[0]].host for ranks in placement.hosts]
            names = [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names)]
            names = [names[placement.host_of(rank)] for rank in range(barrier.size)]
            actual = hosts_from_names(names)
            faults = placement_faults(planned, names) if planned and barrier.rank == 0 else []
            if faults:
                raise MismatchError(self._placement_message(faults, actual))
        self.data |= {"hosts": names, "planned": planned.spell() if planned else None}
        ranks, where = (
            count_of(barrier.size, "rank"),
            actual or f"{len({*names})} hosts with ranks that are not consecutive",
        )
        self.findings.append(("ok", f"{ranks} joined with the same arguments: {format_sizes(self.sizes)}"))
        if planned:
            self.findings.append(("ok", f"ranks are on the planned hosts: {where}"))
        else:
            fit = actual.spell() if actual else "8x8"
            self.findings.append(("--", f"ranks are on {where}; --nodes {fit} checks it"))
        local, cores = names.count(names[0]), os.cpu_count() or 1
        if local > cores:
            self.findings.append(("warn", f"{local} ranks share {cores} cores of {names[0]}: times are noisy"))
        return names

    def _placement_message(self, faults: list[str], actual: HostLevel | None) -> str:
        """The message about ranks that are not on the planned hosts, with the hosts that would match."""
        message = "ranks are not on the planned hosts:" + "".join(f"\n  {fault}" for fault in faults[:8])
        message += f"\n  and {len(faults) - 8} more" if len(faults) > 8 else ""
        if actual is None:
            fix = "configure the launcher to number them host by host."
            return f"{message}\n\nThe ranks of a host are not consecutive: {fix}"
        better = spell(self.args, {arguments.hosts_argument(self.args): actual.spell()})
        return f"{message}\n\n  {better}   # matches the actual hosts"

    def _add_results(self, mesh: ProcessGroupMesh, results: Results) -> None:
        """Add the results of a successful check to the report of rank 0."""
        from pgmesh.groups.world import device_of, world_options
        from pgmesh.preflight.results import format_bytes

        backend, device = world_options().backend, device_of(mesh.group(mesh.axes[0])).type
        families = f"{len(results['families'])} famil{'ies' if len(results['families']) > 1 else 'y'}"
        groups = count_of(sum(len(family["groups"]) for family in results["families"]), "group")
        self.findings.append(("ok", f"{groups} of {families} connected, in {results['connected_seconds']:.2f} s"))
        self.findings.append(("ok", f"every sum is correct, of {', '.join(map(format_bytes, results['bytes']))}"))
        self.data |= {"ranks": len(mesh), "axes": list(mesh.axes), "shape": list(mesh.shape)}
        self.data |= {"backend": backend, "device": device, **results}

    def _lines(self, width: int) -> list[Line]:
        """The report of a successful check."""
        from pgmesh.preflight.results import summary, table

        data = self.data
        lines: list[Line] = [
            [(f"{count_of(data['ranks'], 'rank')} over {data['backend']} on {data['device']}", "bold")]
        ]
        for mark, text in self.findings:
            lines += styled_text.marked(mark, text, width)
        return [*lines, [], *table(data, width), [], *summary(data, width)]


@contextlib.contextmanager
def _progress_bar(is_shown: bool) -> Iterator[Callable[..., None]]:
    """A function that shows the name of the next step, and a bar, on a terminal if rich is installed."""
    if not (is_shown and styled_text.is_coloured(sys.stderr)):
        yield lambda step, total=None: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda step, total=None: progress.update(task, description=step, total=total, advance=1, refresh=True)
