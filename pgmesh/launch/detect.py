"""Detection of the launcher that started this process, from its environment variables.

    info = detect_launcher(os.environ)
    info.rank, info.size, info.local_rank, info.local_size, info.hosts, info.address, info.port
    info.line     the detected launcher and the reason, in one line
    info.read     the variables of this launcher that are set, with their values

``LAUNCHERS`` is the table of launchers and their variables, in the order in which they are looked for. Launchers are
often nested: srun starts torchrun or the daemons of mpirun, and all their variables are set. Only the innermost
launcher knows the rank of this process, so the table begins with those that run inside others. Variables of
another launcher that name another rank or size raise LaunchError, which lists the variables of both.

This file imports no torch, opens no file and uses no network.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pgmesh._util.formatting import format_calls, join_words
from pgmesh.errors import LaunchError
from pgmesh.launch.slurm import parse_hosts, parse_task_counts

Environ = Mapping[str, str]

PORTS = range(20_000, 30_000)
"""Ports that are derived from a job's number. They are below the ephemeral ports of Linux, which start at 32768."""

FIRST_STEP_WITHOUT_TASKS = 0xFFFFFFF0
"""First of the step numbers that Slurm reserves for batch scripts and interactive shells."""

LOCALHOST = "127.0.0.1"
LAST_PORT = 65_535
MAX_NUMBER = 0xFFFFFFFF


@dataclass(frozen=True)
class Launcher:
    """The environment variables of one launcher. Several variables for one number must agree, if they are set."""

    name: str
    command: str  # a command that starts ranks, for errors
    marks: tuple[str, ...]  # it sets at least one of these on every rank
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    job: tuple[str, ...] = ()  # equal on all ranks of a job, and different in every other job
    more: tuple[str, ...] = ("MASTER_ADDR", "MASTER_PORT")  # other variables that are read

    @property
    def numbers(self) -> tuple[str, ...]:
        """The variables that place a rank."""
        return (*self.rank, *self.size, *self.local_rank, *self.local_size)

    def values(self, environ: Environ) -> dict[str, str]:
        """All variables of this launcher that are set, with their values."""
        names = (*self.numbers, *self.marks, *self.job, *self.more)
        return {name: environ[name] for name in dict.fromkeys(names) if name in environ}


BY_HAND = Launcher(
    "the environment",
    command="torchrun --nproc-per-node 8 script.py",
    marks=("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    rank=("RANK",),
    size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_size=("LOCAL_WORLD_SIZE",),
)
"""The variables of torchrun, set by hand."""

OPEN_MPI = Launcher(
    "Open MPI",
    command="mpirun -n 8 python script.py",
    marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    rank=("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
MPICH = Launcher(
    "MPICH",
    command="mpiexec -n 8 python script.py",
    marks=("PMI_RANK", "MPI_LOCALRANKID", "PMIX_RANK", "PMI_SIZE"),
    rank=("PMI_RANK", "PMIX_RANK"),
    size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMIX_LOCAL_RANK", "PMI_LOCAL_RANK"),
    local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    job=("PALS_APID", "PMIX_NAMESPACE"),
)
"""Hydra: mpiexec of MPICH. Also Intel MPI, PALS of HPE Cray and others with PMI or PMIx (untested)."""

SET_BY_SRUN = ("PMI_RANK", "PMI_SIZE", "PMIX_RANK")
"""Variables of MPI that srun sets too, with ``--mpi=pmi2`` or ``--mpi=pmix``. In a step they mark no MPI launcher."""

HOST_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
TASK_COUNTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")
STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")
SLURM = Launcher(
    "Slurm",
    command="srun python script.py",
    marks=("SLURM_STEP_ID", "SLURM_PROCID"),  # both: see ``_in_step``
    rank=("SLURM_PROCID",),
    size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    local_rank=("SLURM_LOCALID",),
    more=(
        *(*HOST_LISTS, *TASK_COUNTS, "SLURM_NODEID", "SLURM_GTIDS", "SLURM_DISTRIBUTION", "SLURM_NNODES"),
        *(*JOB_ID, *STEP_ID, "MASTER_ADDR", "MASTER_PORT"),
    ),
)
"""srun. The number of tasks on a host is in a list, which ``_read_step`` reads."""

LAUNCHERS = (
    replace(BY_HAND, name="launch.spawn", marks=("PGMESH_SPAWNED",)),
    replace(BY_HAND, name="torchrun", marks=("TORCHELASTIC_RUN_ID",)),
    OPEN_MPI,
    MPICH,
    SLURM,
    BY_HAND,
)
"""All launchers. The first one that is detected started this process."""

INNERMOST = LAUNCHERS[:2]
"""Launchers that always set all their variables, so that no other launcher is read."""


@dataclass(frozen=True)
class LauncherInfo:
    """The detected launcher, and the rank of this process according to it.

    Args:
        launcher: its name.
        why: the reason why it was detected.
        rank: rank of this process in the world.
        size: number of ranks of the world.
        local_rank: index of this process among the ranks on its host; None if unknown.
        local_size: number of ranks on this host; None if unknown.
        hosts: names of all hosts, in the launcher's order; empty if unknown.
        address: name or address of rank 0's host; None if unknown.
        port: port of the store on that host; None if unknown.
        read: the variables of the launcher that are set, with their values.
        replica: number of this launch if several form the world, whose store is at ``address`` and ``port``.

    >>> info = detect_launcher({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    >>> info.rank, info.size, info.local_rank, info.local_size, info.hosts, info.address
    (3, 4, 1, 2, (), None)
    >>> print(info.line)
    rank 3 of 4, local rank 1 of 2: MPICH, because PMI_RANK is set
    """

    launcher: str
    why: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    hosts: tuple[str, ...] = ()
    address: str | None = None
    port: int | None = None
    read: tuple[tuple[str, str], ...] = ()
    replica: int | None = None

    @property
    def line(self) -> str:
        """The ranks, the launcher and the reason, in one line."""
        local = "" if self.local_rank is None else f", local rank {self.local_rank}"
        local += "" if self.local_size is None else f" of {self.local_size}"
        return f"rank {self.rank} of {self.size}{local}: {self.launcher}, because {self.why}"

    @property
    def needs_store(self) -> bool:
        """False for a world of one, unless its store has a host and a port."""
        return self.size > 1 or (self.address is not None and self.port is not None)

    def end_point(self) -> tuple[str, int]:
        """Host and port of the store, which rank 0 hosts.

        Raises:
            LaunchError: one of them is unknown.
        """
        if self.address is not None and self.port is not None:
            return self.address, self.port
        unknown = [word for word, value in (("host", self.address), ("port", self.port)) if value is None]
        raise self.error(
            f"{self.launcher} does not set the {' and the '.join(unknown)} of rank 0.",
            ("launch.join(host='n1', port=29500)", "the same on every rank"),
            ("export MASTER_ADDR=n1 MASTER_PORT=29500", "or in the environment of every rank"),
        )

    def error(self, problem: str, *ways: tuple[str, str]) -> LaunchError:
        """An error with the problem, the variables that were read, and suggested calls with their reasons."""
        return _error(problem, dict(self.read), *ways)


def _error(problem: str, values: Environ, *ways: tuple[str, str]) -> LaunchError:
    """An error with the problem, variables with their values, and suggested calls with their reasons."""
    width = max(map(len, values), default=0)
    lines = "\n".join(f"  {name:<{width}} = {value}" for name, value in values.items())
    return LaunchError("\n\n".join(filter(None, (problem, lines, format_calls(ways)))))


# ---- the rank according to one launcher ----


class _Variables:
    """The variables of one launcher that are set."""

    def __init__(self, launcher: Launcher, environ: Environ) -> None:
        self.launcher, self.values = launcher, launcher.values(environ)

    def number(self, names: tuple[str, ...], least: int = 0, most: int = MAX_NUMBER) -> int | None:
        """The number that all of these variables hold, as far as they are set; None if none is set.

        Raises:
            LaunchError: one of them is no whole number in the range, or two differ.
        """
        texts = {name: self.values[name] for name in names if name in self.values}
        numbers = {int(text) if re.fullmatch("[0-9]{1,19}", text) else -1 for text in texts.values()}
        if len(numbers) > 1 or not all(least <= number <= most for number in numbers):
            raise self.error(f"{join_words(texts)} must hold one whole number from {least} to {most}.")
        return numbers.pop() if numbers else None

    def parsed(self, names: tuple[str, ...], parse: Callable[[str, str], tuple[Any, ...]]) -> tuple[Any, ...]:
        """The parsed value of the first of these variables that is set; empty if none is."""
        name = next((name for name in names if self.values.get(name)), None)
        return () if name is None else parse(self.values[name], name)

    def error(self, problem: str, *ways: tuple[str, str]) -> LaunchError:
        """An error with the problem, all variables of the launcher that are set, and a command that sets them."""
        return _error(problem, self.values, (self.launcher.command, "sets all of them"), *ways)


def _read(launcher: Launcher, environ: Environ) -> LauncherInfo:
    """The rank of this process according to one launcher, and MASTER_ADDR and MASTER_PORT if they are set.

    Raises:
        LaunchError: variables of this launcher are missing, invalid or contradict each other.
    """
    variables = _Variables(launcher, environ)
    rank, size = variables.number(launcher.rank), variables.number(launcher.size, least=1)
    if rank is None or size is None:
        missing = launcher.rank if rank is None else launcher.size
        none = (f"unset {' '.join(variables.values)}", "or none: a world of 1")
        raise variables.error(f"{join_words(missing, 'or')} is not set, so the rank of this process is unknown.", none)
    info = LauncherInfo(
        launcher=launcher.name,
        why=f"{next(mark for mark in launcher.marks if mark in environ)} is set",
        rank=rank,
        size=size,
        local_rank=variables.number(launcher.local_rank),
        local_size=variables.number(launcher.local_size, least=1),
        read=tuple(variables.values.items()),
    )
    if launcher is SLURM:
        info = _read_step(info, variables)
    elif job := next((variables.values[name] for name in launcher.job if name in variables.values), None):
        info = replace(info, port=PORTS[zlib.crc32(job.encode()) % len(PORTS)])
    if rank >= size or (info.local_size or 1) > size or (info.local_rank or 0) >= (info.local_size or size):
        raise variables.error(f"variables of {launcher.name} contradict each other; ranks count from 0.")
    address = LOCALHOST if info.local_size == size else info.address
    port = variables.number(("MASTER_PORT",), least=1, most=LAST_PORT)
    return with_address(replace(info, address=address), variables.values.get("MASTER_ADDR"), port)


def _read_step(info: LauncherInfo, variables: _Variables) -> LauncherInfo:
    """``info`` with the hosts of a step of Slurm, the tasks on this host, and host and port of rank 0, if known.

    SLURM_GTIDS names the tasks of this host. A job that was submitted from within a step inherits the variables of that
    step, except SLURM_GTIDS.
    """
    hosts, counts = variables.parsed(HOST_LISTS, parse_hosts), variables.parsed(TASK_COUNTS, parse_task_counts)
    node, gtids = variables.number(("SLURM_NODEID",)), variables.values.get("SLURM_GTIDS")
    local_size = info.size if len(hosts) == 1 else None
    if node is not None and node < len(counts):
        local_size = counts[node]
    tasks = gtids.split(",") if gtids else []
    mine = tasks if info.local_rank is None else tasks[info.local_rank : info.local_rank + 1]
    contradictions = {
        "the lists of hosts and of tasks have different lengths": hosts and counts and len(hosts) != len(counts),
        "the tasks of all hosts are not the tasks of the step": counts and sum(counts) != info.size,
        "the lists do not have the host of this process": (node or 0) >= (len(counts or hosts) or MAX_NUMBER),
        "SLURM_GTIDS has another number of tasks": tasks and local_size not in (None, len(tasks)),
        "SLURM_GTIDS does not have this process": tasks and str(info.rank) not in mine,
    }
    if problems := [problem for problem, is_found in contradictions.items() if is_found]:
        raise variables.error(f"variables of this step of Slurm contradict each other: {'; '.join(problems)}.")
    address = None
    if hosts and variables.values.get("SLURM_DISTRIBUTION") != "arbitrary" and (info.rank or not node):
        address = hosts[0]  # unknown to the other ranks if the distribution is arbitrary
    job, step = variables.number(JOB_ID), variables.number(STEP_ID)
    port = None if job is None or step is None else PORTS[(101 * job + step) % len(PORTS)]
    return replace(info, hosts=hosts, local_size=local_size, address=address, port=port)


def _in_step(environ: Environ) -> bool:
    """True in a task of srun; False in a batch script or an interactive shell."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step is None or "SLURM_PROCID" not in environ:
        return False
    return not (step.isdecimal() and int(step) >= FIRST_STEP_WITHOUT_TASKS)


def _read_without_launcher(environ: Environ) -> LauncherInfo:
    """A world of one, for a process that was started directly.

    Raises:
        LaunchError: this process is the script or the shell of a Slurm job of several tasks.
    """
    job = _Variables(SLURM, environ)
    tasks, hosts = job.number(SLURM.size) or 1, job.number(("SLURM_NNODES",)) or 1
    if max(tasks, hosts, 1 + (job.number(SLURM.rank) or 0)) > 1:
        raise _error(
            "this Slurm job has several tasks or hosts, but this process is its script or shell, not a task of srun:",
            job.values,
            (SLURM.command, "one rank for each task"),
            ("srun --ntasks 1 python script.py", "a world of 1"),
        )
    why = "this is the script of a Slurm job of one task" if job.values else "none of their variables is set"
    return LauncherInfo("no launcher", why, 0, 1, 0, 1, read=tuple(job.values.items()))


# ---- detection ----


def detect_launcher(environ: Environ) -> LauncherInfo:
    """Rank, size, host and port of this process, according to the innermost launcher. Needs no torch.

    Args:
        environ: the environment variables, such as ``os.environ``.

    Raises:
        LaunchError: variables are missing or contradict each other. The message lists them with their values.

    A process that torchrun started inside a Slurm job belongs to torchrun:

    >>> slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    >>> torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    >>> print(detect_launcher(slurm | torchrun | {"TORCHELASTIC_RUN_ID": "none"}).line)
    rank 5 of 8, local rank 1: torchrun, because TORCHELASTIC_RUN_ID is set
    """
    found = [launcher for launcher in LAUNCHERS if _is_detected(launcher, environ)]
    if not found:
        return _read_without_launcher(environ)
    first, *others = found
    info = _read(first, environ)
    if first in INNERMOST:
        return info
    if first is SLURM:
        others = [MPICH, BY_HAND]  # srun may set variables of MPICH too
    for other in others:
        info = _compare(info, first, other, environ)
    return info


def _is_detected(launcher: Launcher, environ: Environ) -> bool:
    """True if a launcher has set its variables. In a step, those of MPI may be srun's."""
    in_step = _in_step(environ)
    if launcher is SLURM:
        return in_step
    return any(mark in environ and not (in_step and mark in SET_BY_SRUN) for mark in launcher.marks)


def _compare(info: LauncherInfo, first: Launcher, other: Launcher, environ: Environ) -> LauncherInfo:
    """``info`` of the first launcher, with the local rank of another one if it has none.

    Raises:
        LaunchError: the variables of the other launcher name another rank or size.
    """
    variables = _Variables(other, environ)
    if other is SLURM and _is_step_of_daemons(info, variables):
        return info
    theirs = {}
    for field in ("rank", "size", "local_rank", "local_size"):
        names = tuple(name for name in getattr(other, field) if name not in first.numbers)
        number, known = variables.number(names), getattr(info, field)
        theirs[field] = number
        if None not in (number, known) and number != known:
            values = first.values(environ) | variables.values
            ways = [_unset(other, first, environ), _unset(first, other, environ)]
            raise _error(f"{first.name} and {other.name} disagree about this process:", values, *ways)
    return replace(info, local_rank=theirs["local_rank"]) if info.local_rank is None else info


def _unset(dropped: Launcher, kept: Launcher, environ: Environ) -> tuple[str, str]:
    """The command that removes the variables of one launcher, and its reason: the other one."""
    names = [name for name in dropped.numbers if name in environ and name not in kept.numbers]
    return f"unset {' '.join(names)}", f"{kept.name} alone"


def _is_step_of_daemons(info: LauncherInfo, step: _Variables) -> bool:
    """True if a step of Slurm can be that in which the daemons of MPI run, one on each host."""
    counts = step.parsed(TASK_COUNTS[:1], parse_task_counts)
    tasks = step.number(SLURM.size[:1]) or 1
    return not step.number(SLURM.local_rank) and max(counts, default=1) == 1 and tasks <= info.size


def detect_one(launcher: Launcher, environ: Environ) -> LauncherInfo:
    """The rank of this process according to one launcher, without a comparison with others.

    MASTER_ADDR and MASTER_PORT are used if they are set.

    Raises:
        LaunchError: the launcher did not start this process, or its variables are missing or contradict each other.

    >>> detect_one(OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "1"}).rank
    0
    """
    if not _is_detected(launcher, environ):
        program = launcher.command.partition(" ")[0]
        detect = ("launch.join()", "detects the launcher")
        raise _error(f"{program} did not start this process.", launcher.values(environ), detect)
    return _read(launcher, environ)


def with_address(info: LauncherInfo, host: str | None = None, port: int | None = None) -> LauncherInfo:
    """``info`` with another host and port of rank 0, as far as they are given.

    Raises:
        LaunchError: the port is not a port number.

    >>> with_address(detect_launcher({"PMI_RANK": "3", "PMI_SIZE": "4"}), "n1", 29500).end_point()
    ('n1', 29500)
    """
    if port is not None and not (type(port) is int and 0 < port <= LAST_PORT):
        raise LaunchError(f"port is a whole number from 1 to {LAST_PORT}, such as port=29500, not {port!r}.")
    return replace(info, address=host or info.address, port=port or info.port)


def with_replica(info: LauncherInfo, replica: Any, replicas: Any, host: str | None, port: int | None) -> LauncherInfo:
    """``info`` in the world that several launches of as many ranks form, over a store at this host and port.

    Raises:
        LaunchError: there is no such replica, the store is not given, or as ``with_address``.

    >>> info = detect_launcher({"PMI_RANK": "1", "PMI_SIZE": "2"})
    >>> print(with_replica(info, 2, 3, "n1", 29500).line)
    rank 5 of 6: MPICH, because PMI_RANK is set, as replica 2 of 3
    """
    is_replica = type(replicas) is int and type(replica) is int and 0 <= replica < replicas
    if not is_replica or host is None or port is None:  # the launcher's store ends with this replica
        raise LaunchError(
            f"replica is {replica!r}, replicas is {replicas!r}, host is {host!r} and port is {port!r}. A replica is a "
            "launch's number, from 0; host and port are those of the store of all replicas, which no launcher sets.\n\n"
            "  store = launch.StoreProcess(port=29500)   # in a process that starts the replicas\n"
            "  launch.join(replica=0, replicas=3, host='n1', port=29500)   # in the ranks of the first of three"
        )
    why = f"{info.why}, as replica {replica} of {replicas}"
    rank, size = replica * info.size + info.rank, replicas * info.size
    return with_address(replace(info, why=why, rank=rank, size=size, hosts=(), replica=replica), host, port)
