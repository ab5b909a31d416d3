"""``pgmesh check``: the preflight of a job, run by every rank under the job's launcher."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pgmesh._util.formatting import count_of
from pgmesh.cli import arguments
from pgmesh.cli.arguments import CommandLine, ParsedMesh, UsageError
from pgmesh.drawing import styled_text
from pgmesh.drawing.styled_text import Line
from pgmesh.errors import LaunchError, MismatchError, PgmeshError, WorldError
from pgmesh.launch.detect import detect_launcher
from pgmesh.layout import Axis, Layout
from pgmesh.planning import text_report
from pgmesh.planning.plan import layout_of
from pgmesh.topology.hosts import HostLevel, hosts_from_names, placement_faults

if TYPE_CHECKING:
    from pgmesh.preflight.results import Results
    from pgmesh.topology.host_mapping import Placement

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
    parser.add_argument(
        "--family",
        nargs="+",
        action="extend",
        default=[],
        metavar="AXES",
        help="combinations of axes to include: dp,cp",
    )
    parser.add_argument("--bytes", default=SIZES, metavar="SIZES", help=f"bytes of the all-reduces, such as {SIZES}")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed batches (5)")
    parser.add_argument("--backend", metavar="NAME", help="default: nccl if CUDA is available, else gloo")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="timeout for the other ranks at each stage (60)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, command_line: CommandLine) -> int:
    args.sizes += [word for word in args.family if "=" in word]
    args.family[:] = [word for word in args.family if word not in args.sizes]
    mesh = arguments.parse_mesh(args, command_line, fit=arguments.hosts_argument(args) != "")
    sizes = parse_bytes(args.bytes, command_line)
    if args.timeout <= 0 or args.repeats < 1:
        raise UsageError(
            "--timeout and --repeats have to be greater than 0.", (command_line.with_changes({}), "without them")
        )
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # torch's Gloo groups then connect at first use
    from pgmesh.preflight import preflight  # this imports torch

    try:
        with _progress_bar(_is_first()) as bar:
            bar.begin("waiting for the other ranks")
            preflight.join(args.backend, args.timeout)
        return _Check(args, command_line, mesh, sizes).run()
    except PgmeshError as error:  # this rank could not join the world
        _print_failure(error, args)
        return 1


def parse_bytes(text: str, command_line: CommandLine) -> tuple[int, ...]:
    """Sizes that are written ``8,64K,16M``."""
    sizes = []
    for word in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]*)([KMG]?)", word.strip().upper())
        if not match:
            raise UsageError(
                f"sizes are written {SIZES}, not {text!r}.", (command_line.with_changes({text: SIZES}), "for example")
            )
        sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return tuple(sizes)


def _is_first() -> bool:
    """True if this is rank 0, which prints. If launchers contradict each other, ``join`` raises the error."""
    with contextlib.suppress(LaunchError):
        return detect_launcher(os.environ).rank == 0
    return False


def _print_failure(error: Exception, args: argparse.Namespace) -> None:
    if args.json:
        data = {"format": 1, "status": "failed", "error": {"kind": type(error).__name__, "text": str(error)}}
        print(json.dumps(data, indent=2), flush=True)
    print(f"pgmesh check failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class _Check:
    """The check on one rank that has joined the world."""

    def __init__(
        self, args: argparse.Namespace, command_line: CommandLine, mesh: ParsedMesh, sizes: tuple[int, ...]
    ) -> None:
        from pgmesh.preflight.staged_barrier import StagedBarrier

        self.args, self.command_line, self.parsed, self.message_bytes = args, command_line, mesh, sizes
        self.barrier = StagedBarrier("pgmesh check", args.timeout, "Start every rank with the same command line.")
        self.lines: list[Line] = []  # the report of rank 0
        self.data: dict[str, Any] = {"format": 1, "status": "ok"}

    def run(self) -> int:
        """Run the check; return the exit status."""
        status = 0
        failure: UsageError | PgmeshError | None = None
        try:
            self._check()
        except UsageError as error:
            status, failure = 2, error
        except PgmeshError as error:
            status, failure = 1, error
        printed = self.barrier.rank == 0
        if printed:
            self._print_result(failure)
        with contextlib.suppress(WorldError):
            printed |= self.barrier.leave(LEAVE_TIMEOUT if status == 0 else FAILED_LEAVE_TIMEOUT)
        if failure is not None and not printed:  # rank 0 is lost, so each rank prints
            self._print_result(failure)
        return status

    def _check(self) -> None:
        from pgmesh.mesh import ProcessGroupMesh
        from pgmesh.preflight.preflight import Preflight, versions

        barrier = self.barrier
        barrier.stage("at the start")
        with _progress_bar(barrier.rank == 0) as bar:
            bar.begin(f"waiting for {count_of(barrier.size, 'rank')}")
            barrier.wait()
            same = "Install the same versions on every rank's host."
            barrier.stage("comparing versions", versions(), "version mismatch: the software", same)
            barrier.wait()
            barrier.stage("comparing command lines", self._shared_arguments())
            barrier.wait()
            sizes = self._filled_sizes()
            layout = layout_of(sizes)
            combinations = [arguments.parse_axes(text, layout, self.command_line) for text in self.args.family]
            unique: dict[frozenset[Axis], tuple[Axis, ...]] = {}
            for axes in [*((axis,) for axis in layout.axes), *combinations]:
                unique.setdefault(frozenset(axes), axes)
            families = [*unique.values()]
            hosts = self._check_hosts(layout)
            mesh = ProcessGroupMesh(barrier.size, name="check")
            view = mesh.view(sizes)
            try:
                check = Preflight(
                    barrier, view, families, hosts, self.message_bytes, self.args.repeats, bar.advance, mesh.close
                )
                bar.steps(check.step_count)
                measured = check.run()
                if measured is not None:
                    self._add_results(layout, view, families, measured)
            finally:
                mesh.close()

    def _shared_arguments(self) -> dict[str, Any]:
        """The arguments that have to be the same on all ranks."""
        args = self.args
        return {
            "sizes": text_report.format_sizes(self.parsed.sizes),
            "nodes": arguments.hosts_argument(args),
            "families": " ".join(args.family),
            "bytes": args.bytes,
            "repeats": args.repeats,
            "backend": args.backend,
        }

    def _filled_sizes(self) -> dict[Axis, int]:
        """The sizes, filled to the size of the world."""
        size = self.barrier.size
        world = (HostLevel("world", ((1, size),)),)
        return arguments.fill(
            self.parsed.sizes, world, arguments.hosts_argument(self.args), self.command_line, f"the world has {size:,}"
        )

    def _check_hosts(self, layout: Layout) -> list[str]:
        """The host name of each rank. Rank 0 compares the hosts with the plan."""
        from pgmesh.topology import host_mapping

        barrier, hosts = self.barrier, self.parsed.topology
        barrier.stage("comparing hosts")
        places = host_mapping.map_hosts(timeout=timedelta(seconds=barrier.seconds))
        names = _host_names(places)
        if barrier.rank == 0:
            actual = hosts_from_names(names)
            faults = placement_faults(hosts[0], names) if hosts else []
            if faults:
                planned = arguments.hosts_argument(self.args)
                message = _placement_message(faults, actual, self.command_line, planned)
                raise barrier.fail(MismatchError(message))
            where = f"{actual}" if actual else f"{len({*names})} hosts with ranks that are not consecutive"
            self.data["hosts"] = names
            self.data["planned"] = hosts[0].spell() if hosts else None
            ranks, sizes = count_of(barrier.size, "rank"), text_report.format_sizes(_box(layout))
            self._add_line("ok", f"{ranks} joined with the same arguments: {sizes}")
            if hosts:
                self._add_line("ok", f"ranks are on the planned hosts: {where}")
            else:
                self._add_line("--", f"ranks are on {where}; --nodes {actual.spell() if actual else '8x8'} checks it")
            local, cores = names.count(names[0]), os.cpu_count() or 1
            if local > cores:
                self._add_line("warn", f"{local} ranks share {cores} cores of {names[0]}: times are noisy")
        barrier.wait()
        return names

    def _add_results(self, layout: Layout, mesh: Any, families: list[tuple[Axis, ...]], measured: Results) -> None:
        """Add the results of a successful check to the report of rank 0."""
        from pgmesh.groups.world import device_of, world_options
        from pgmesh.preflight.results import format_bytes, summary, table

        group = mesh.group(*families[0])
        backend, device = world_options().backend, device_of(group).type
        count = sum(len(result.groups) for result in measured.by_axes)
        what = f"{count_of(count, 'group')} of {len(families)} famil{'ies' if len(families) > 1 else 'y'}"
        self._add_line("ok", f"{what} connected, in {measured.connect_seconds:.2f} s")
        self._add_line("ok", f"every sum is correct, of {', '.join(map(format_bytes, measured.sizes))}")
        width = styled_text.width_of(sys.stdout)
        self.lines += [[], *table(measured, width), [], *summary(measured, width)]
        self.lines[0:0] = [[(f"{count_of(len(layout), 'rank')} over {backend} on {device}", "bold")]]
        self.data |= {"ranks": len(layout), "axes": list(layout.axes), "shape": list(layout.shape)}
        self.data |= {"backend": backend, "device": device, **measured.data()}

    def _add_line(self, mark: str, message: str) -> None:
        width = styled_text.width_of(sys.stdout)
        self.lines += styled_text.marked(mark, message, width)

    def _print_result(self, failure: Exception | None) -> None:
        if isinstance(failure, UsageError):
            print(f"pgmesh check: {failure}", file=sys.stderr, flush=True)
        elif failure is not None:
            _print_failure(failure, self.args)
        elif self.args.json:
            print(json.dumps(self.data, indent=2), flush=True)
        else:
            styled_text.write(self.lines, sys.stdout)
            sys.stdout.flush()


def _host_names(places: Placement) -> list[str]:
    """The host name of each rank. Different hosts with the same name get their numbers appended."""
    names = [places.host_infos[ranks[0]].host for ranks in places.hosts]
    names = [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names)]
    return [names[places.host_of(rank)] for rank in sorted(places.host_infos)]


def _box(layout: Layout) -> dict[Axis, int]:
    return dict(zip(layout.axes, layout.shape))


def _placement_message(faults: list[str], actual: HostLevel | None, command_line: CommandLine, hosts: str) -> str:
    """The message about ranks that are not on the planned hosts, with the hosts that would match."""
    message = "ranks are not on the planned hosts:" + "".join(f"\n  {fault}" for fault in faults[:8])
    message += f"\n  and {len(faults) - 8} more" if len(faults) > 8 else ""
    if actual is None:
        fix = "configure the launcher to number them host by host."
        return f"{message}\n\nThe ranks of a host are not consecutive: {fix}"
    return f"{message}\n\n  {command_line.with_changes({hosts: actual.spell()})}   # matches the actual hosts"


@contextlib.contextmanager
def _progress_bar(is_shown: bool) -> Iterator[_ProgressBar]:
    """A progress bar on a terminal if rich is installed; else one that does nothing."""
    if not (is_shown and styled_text.is_coloured(sys.stderr)):
        yield _ProgressBar()
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield _ProgressBar(progress)


class _ProgressBar:
    """The steps of a progress bar of rich; without one, the methods do nothing."""

    def __init__(self, progress: Any = None) -> None:
        self.progress = progress
        self.task: Any = None

    def begin(self, doing: str) -> None:
        if self.progress is not None:
            self.task = self.progress.add_task(doing, total=None)
            self.progress.refresh()

    def steps(self, total: int) -> None:
        if self.progress is not None:
            self.progress.update(self.task, total=total)

    def advance(self, doing: str) -> None:
        """Complete a step and show the next one."""
        if self.progress is not None:
            self.progress.update(self.task, advance=1, description=doing, refresh=True)
