"""Detection of the launcher that started this process, from its environment variables.

    info = detect_launcher(os.environ)
    info.rank, info.size, info.local_rank, info.local_size, info.hosts, info.address, info.port
    info.line     the detected launcher and the reason, in one line
    info.read     the variables that were read, with their values

Launchers are often nested: srun starts torchrun or the daemons of mpirun, and all their variables are set. Only the
innermost launcher knows the rank of this process. The order is therefore:

1. torchrun, if TORCHELASTIC_RUN_ID is set, and ``launch.spawn``, if PGMESH_SPAWNED is set. No other launcher is read.
2. MPI: Open MPI, then MPICH and others with its variables. The first one is used.
3. Slurm, in a step of srun.
4. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, all set by hand.
5. No launcher: a world of 1.

Contradictions raise LaunchError, which lists the variables and the possible fixes. In cases 2 and 3, these must agree:
all detected MPI launchers, the variables of case 4 if they are set, and the enclosing Slurm step if there is one.

This file imports no torch, opens no file and uses no network.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pgmesh._util.formatting import format_calls, join_words
from pgmesh.errors import LaunchError
from pgmesh.launch.slurm import parse_hosts, parse_task_counts

Environ = Mapping[str, str]

PORTS = range(20_000, 30_000)
"""Ports that are derived from a job's number. They are below the ephemeral ports of Linux, which start at 32768."""

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets. torch's ``env://`` needs all but LOCAL_RANK; pgmesh needs that too."""

INNERMOST_MARKS = {"PGMESH_SPAWNED": "launch.spawn", "TORCHELASTIC_RUN_ID": "torchrun"}
"""Variables that mark the innermost launcher, and its name."""

FIRST_STEP_WITHOUT_TASKS = 0xFFFFFFF0
"""First of the step numbers that Slurm reserves for batch scripts and interactive shells."""

LOCALHOST = "127.0.0.1"
LAST_PORT = 65_535


@dataclass(frozen=True)
class Launcher:
    """The environment variables of one launcher.

    Several variables for one number must agree, as far as they are set. ``detect_launcher`` describes their use.
    """

    name: str
    marks: tuple[str, ...]  # it sets at least one of these on every rank
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    job: tuple[str, ...] = ()  # equal on all ranks of a job, and different in every other job
    advice: tuple[tuple[str, str], ...] = ()  # calls that correct wrong variables, with their reasons


TORCHRUN = Launcher(
    "torchrun",
    marks=TORCHRUN_VARIABLES,
    rank=("RANK",),
    size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_size=("LOCAL_WORLD_SIZE",),
)
"""torchrun, and the same variables set by hand."""

OPEN_MPI = Launcher(
    "Open MPI",
    marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    rank=("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
MPICH = Launcher(
    "MPICH",
    marks=("PMI_RANK", "MPI_LOCALRANKID", "PMIX_RANK", "PMI_SIZE"),
    rank=("PMI_RANK", "PMIX_RANK"),
    size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMIX_LOCAL_RANK", "PMI_LOCAL_RANK"),
    local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    job=("PALS_APID", "PMIX_NAMESPACE"),
)
"""Hydra: mpiexec of MPICH. Also Intel MPI, PALS of HPE Cray and others with PMI or PMIx (untested)."""

SLURM = Launcher(
    "Slurm",
    marks=("SLURM_STEP_ID", "SLURM_PROCID"),
    rank=("SLURM_PROCID",),
    size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    local_rank=("SLURM_LOCALID",),
    advice=(("srun python script.py", "in a new step, srun sets all of them again"),),
)
"""srun. The number of tasks on a host is in a list, which ``_read_step`` reads."""

MPI = (OPEN_MPI, MPICH)

LAUNCHERS = (TORCHRUN, *MPI, SLURM)
"""All launchers. ``detect_launcher`` has the order in which they are used."""

SET_BY_SRUN = ("PMI_RANK", "PMI_SIZE", "PMIX_RANK")
"""Variables of MPI that srun sets too, with ``--mpi=pmi2`` or ``--mpi=pmix``. In a step they mark no MPI launcher."""


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
        read: the variables that were read, with their values.
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

    def end_point(self) -> tuple[str, int]:
        """Host and port of the store, which rank 0 hosts.

        Raises:
            LaunchError: one of them is unknown.
        """
        if self.address is not None and self.port is not None:
            return self.address, self.port
        examples = ("host", "host='n1'", "MASTER_ADDR=n1"), ("port", "port=29500", "MASTER_PORT=29500")
        known = (self.address, self.port)
        unknown, arguments, variables = zip(*(each for each, value in zip(examples, known) if value is None))
        problem = f"{self.launcher} does not set the {' and the '.join(unknown)} of rank 0"
        if self.address is None and self.local_size is not None and self.local_size < self.size:
            problem += f"; it is not 127.0.0.1, since only {self.local_size} of {self.size} ranks are on this host"
        raise self.error(
            f"{problem}.",
            (f"launch.join({', '.join(arguments)})", "the same on every rank"),
            (f"export {' '.join(variables)}", "or in the environment of every rank"),
        )

    def error(self, problem: str, *ways: tuple[str, str]) -> LaunchError:
        """An error with the problem, the variables that were read, and suggested calls with their reasons."""
        return _error(problem, dict(self.read), *ways)


class EnvironmentReader:
    """Reads environment variables, checks them, and records the names and values for error messages.

    Args:
        environ: a mapping like ``os.environ``.
        advice: suggested calls for the end of every error, with their reasons.
    """

    def __init__(self, environ: Environ, advice: tuple[tuple[str, str], ...] = ()) -> None:
        self.environ = environ
        self.advice = advice
        self.values: dict[str, str | None] = {}

    def text(self, *names: str) -> str | None:
        """The value of the first of these variables that is set, or None."""
        for name in names:
            if (value := self.environ.get(name)) is not None:
                self.values[name] = value
                return value
        return None

    def integer(self, *names: str, at_least: int = 0, at_most: int | None = None) -> int | None:
        """The integer that all of these variables contain, as far as they are set; None if none is set.

        Raises:
            LaunchError: one of them is not an integer in the range, or two differ.
        """
        present = {name: self.environ[name] for name in names if name in self.environ}
        self.values |= present
        for name, value in present.items():
            if not (_is_number(value) and int(value) >= at_least and (at_most is None or int(value) <= at_most)):
                bounds = f"of {at_least} or more" if at_most is None else f"from {at_least} to {at_most}"
                raise self.error(f"{name} is {value!r}, which is not a whole number {bounds}.")
        if len({int(value) for value in present.values()}) > 1:
            values = " and ".join(f"{name} is {value}" for name, value in present.items())
            raise self.error(f"{values}: they should be the same.")
        return int(next(iter(present.values()))) if present else None

    def required(self, *names: str, at_least: int = 0) -> int:
        """The integer of these variables; LaunchError if none of them is set."""
        number = self.integer(*names, at_least=at_least)
        if number is None:
            self.values |= dict.fromkeys(names)
            raise self.error(f"{join_words(names)} {'is' if len(names) == 1 else 'are'} not set.")
        return number

    def check_below(self, name: str, rank: int | None, limit: str, size: int | None) -> None:
        """Raise LaunchError if a rank is not below its size. None is not checked."""
        if rank is not None and size is not None and rank >= size:
            raise self.error(f"{name} is {rank}, but {limit} is {size}, and ranks count from 0.")

    def check_equal(self, what: str, numbers: Mapping[str | None, int | None]) -> None:
        """Raise LaunchError if the numbers of two variables differ. None is not checked."""
        known = [(name, number) for name, number in numbers.items() if number is not None]
        for (name, number), (other_name, other) in itertools.pairwise(known):
            if number != other:
                raise self.error(f"the number of {what} is {number} in {name}, but {other} in {other_name}.")

    def error(self, problem: str, *ways: tuple[str, str]) -> LaunchError:
        """An error with the problem, the variables that were read, and suggested calls with their reasons."""
        return _error(problem, self.values, *ways, *self.advice)

    @property
    def read(self) -> tuple[tuple[str, str], ...]:
        """The variables that were read and are set, with their values."""
        return tuple((name, value) for name, value in self.values.items() if value is not None)


def _error(problem: str, values: Mapping[str, str | None], *ways: tuple[str, str]) -> LaunchError:
    width = max(map(len, values), default=0)
    read = [
        f"  {name:<{width}} = {'(not set)' if value is None else value or '(empty)'}" for name, value in values.items()
    ]
    return LaunchError("\n\n".join(filter(None, (problem, "\n".join(read), format_calls(ways)))))


# ---- the rank according to one launcher ----


def _read(launcher: Launcher, environ: Environ) -> LauncherInfo:
    """The rank of this process according to one launcher, and MASTER_ADDR and MASTER_PORT if they are set.

    Raises:
        LaunchError: variables of this launcher are missing, invalid or contradict each other.
    """
    reader = EnvironmentReader(environ, launcher.advice)
    if launcher is TORCHRUN:
        _check_complete(reader)
    rank, size = reader.required(*launcher.rank), reader.required(*launcher.size, at_least=1)
    local_rank, local_size = reader.integer(*launcher.local_rank), reader.integer(*launcher.local_size, at_least=1)
    size_name = next(name for name in launcher.size if name in environ)
    local_size_name = launcher.local_size[0] if launcher.local_size else "the number of tasks on this host"
    reader.check_below(launcher.rank[0], rank, size_name, size)
    if local_size is not None and local_size > size:
        problem = f"{local_size_name} is {local_size}, but {size_name} is {size}: a host cannot have more ranks."
        raise reader.error(problem)
    hosts: tuple[str, ...] = ()
    address, port = None, None
    if launcher is SLURM:
        hosts, local_size, address, port = _read_step(reader, rank, size, local_rank)
    elif job := reader.text(*launcher.job):
        port = PORTS[zlib.crc32(job.encode()) % len(PORTS)]
    reader.check_below(launcher.local_rank[0], local_rank, local_size_name, local_size)
    if local_size == size:
        address = LOCALHOST
    master_address = reader.text("MASTER_ADDR")
    if master_address == "":
        raise reader.error("MASTER_ADDR is empty.", ("export MASTER_ADDR=n1", "the host of rank 0"))
    address = master_address or address
    port = reader.integer("MASTER_PORT", at_least=1, at_most=LAST_PORT) or port
    name, why = launcher.name, f"{next(mark for mark in launcher.marks if mark in environ)} is set"
    if launcher is TORCHRUN:
        mark = next((mark for mark in INNERMOST_MARKS if reader.text(mark) is not None), "RANK")
        name, why = INNERMOST_MARKS.get(mark, "the environment"), f"{mark} is set"
    return LauncherInfo(name, why, rank, size, local_rank, local_size, hosts, address, port, reader.read)


def _check_complete(reader: EnvironmentReader) -> None:
    """Raise LaunchError unless all variables of torchrun are set and name a rank of a world."""
    values = {name: reader.environ.get(name) for name in TORCHRUN_VARIABLES}
    numbers = [value or "" for name, value in values.items() if name != "MASTER_ADDR"]
    if not (values["MASTER_ADDR"] and all(map(_is_number, numbers)) and int(numbers[0]) < int(numbers[1])):
        reader.values |= values
        present = " ".join(name for name, value in values.items() if value is not None)
        raise reader.error(
            "the environment does not name a rank of a world:",
            ("torchrun --nproc-per-node 8 script.py", "sets them all: a world of 8"),
            (f"unset {present}", "or none: a world of 1"),
        )


def _in_step(environ: Environ) -> bool:
    """True in a task of srun; False in a batch script or an interactive shell."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step is None or "SLURM_PROCID" not in environ:
        return False
    return not (_is_number(step) and int(step) >= FIRST_STEP_WITHOUT_TASKS)


def _read_step(
    reader: EnvironmentReader, rank: int, size: int, local_rank: int | None
) -> tuple[tuple[str, ...], int | None, str | None, int | None]:
    """Hosts of the step, number of tasks on this host, and address and port of rank 0. None is unknown.

    SLURM_GTIDS names the tasks of this host. A job that was submitted from within a step inherits the variables of that
    step, except SLURM_GTIDS.
    """
    listed = next((name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if reader.text(name)), None)
    counted = next((name for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if reader.text(name)), None)
    hosts = parse_hosts(reader.environ[listed], listed) if listed else ()
    counts = parse_task_counts(reader.environ[counted], counted) if counted else ()
    node, nodes = reader.integer("SLURM_NODEID"), reader.integer("SLURM_STEP_NUM_NODES", at_least=1)
    host_counts = {listed: len(hosts) or None, counted: len(counts) or None, "SLURM_STEP_NUM_NODES": nodes}
    reader.check_equal("hosts", host_counts)
    size_name = next(name for name in SLURM.size if name in reader.values)
    reader.check_equal("tasks", {counted: sum(counts) if counts else None, size_name: size})
    reader.check_below("SLURM_NODEID", node, "the number of hosts", len(counts or hosts) or None)
    local_size = counts[node] if counts and node is not None else size if len(hosts) == 1 else None
    if (text := reader.text("SLURM_GTIDS")) is not None:
        tasks = text.split(",")
        reader.check_equal("tasks on this host", {"SLURM_GTIDS": len(tasks), counted or listed: local_size})
        if str(rank) not in (tasks if local_rank is None else tasks[local_rank : local_rank + 1]):
            raise reader.error(f"SLURM_GTIDS is {text!r}: this task is not rank {rank} (SLURM_PROCID).")
    address = None
    if hosts and reader.text("SLURM_DISTRIBUTION") != "arbitrary" and (rank or not node):
        address = hosts[0]  # unknown to the other ranks if the distribution is arbitrary
    job, step = reader.integer("SLURM_JOB_ID", "SLURM_JOBID"), reader.integer("SLURM_STEP_ID", "SLURM_STEPID")
    port = None if job is None or step is None else PORTS[(101 * job + step) % len(PORTS)]
    return hosts, local_size, address, port


def _read_without_launcher(environ: Environ) -> LauncherInfo:
    """A world of one, for a process that was started directly.

    Raises:
        LaunchError: this process is the script or the shell of a Slurm job of several tasks.
    """
    reader = EnvironmentReader(environ)
    why = "none of their variables is set"
    if any(name in environ for name in ("SLURM_JOB_ID", "SLURM_JOBID", *SLURM.marks)):
        why = "this is the script of a Slurm job of one task"
        reader.text("SLURM_JOB_ID", "SLURM_JOBID")
        tasks, hosts = reader.integer("SLURM_NTASKS", "SLURM_NPROCS") or 1, reader.integer("SLURM_NNODES") or 1
        tasks = max(tasks, (reader.integer("SLURM_PROCID") or 0) + 1)
        if max(tasks, hosts) > 1:
            reader.values |= {name: environ.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_ID")}
            job_size = f"{tasks} tasks" if tasks > 1 else f"{hosts} hosts"
            raise reader.error(
                f"this Slurm job has {job_size}, but this process is its script or shell, not a task of srun:",
                ("srun python script.py", "one rank for each task"),
                ("srun --ntasks 1 python script.py", "a world of 1"),
            )
    if any(name in environ for name in TORCHRUN_VARIABLES):
        _check_complete(EnvironmentReader(environ))  # raises: only MASTER_ADDR or MASTER_PORT is set
    return LauncherInfo("no launcher", why, 0, 1, 0, 1, read=reader.read)


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
    rank 5 of 8, local rank 1: torchrun, because TORCHELASTIC_RUN_ID is set, in a step of Slurm
    """
    started = _started_by(environ)
    in_step = ", in a step of Slurm" * _in_step(environ)
    if any(mark in environ for mark in INNERMOST_MARKS) and any(name in environ for name in TORCHRUN_VARIABLES):
        info = _read(TORCHRUN, environ)
        return replace(info, why=info.why + in_step)
    if not started and any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _read(TORCHRUN, environ)
    if not started:
        return _read_without_launcher(environ)
    launcher, *others = started
    info = _read(launcher, environ)
    if launcher is SLURM:
        others = [*MPI]  # srun may set their variables too
    else:
        info = replace(info, why=info.why + in_step)
    for other in (*others, TORCHRUN):
        if other is SLURM:
            _check_enclosing_step(info, environ)
        else:
            info = _cross_check(info, other, environ)
    return info


def _started_by(environ: Environ) -> list[Launcher]:
    """The launchers of MPI whose marks are set, and Slurm in a step of srun, innermost first.

    A variable that several launchers set is a mark of the first one only; in a step, it may be srun's.
    """
    explained = {*SET_BY_SRUN} if _in_step(environ) else set()
    found = []
    for launcher in MPI:
        if any(mark in environ and mark not in explained for mark in launcher.marks):
            found.append(launcher)
            explained.update(launcher.rank, launcher.size)
    return [*found, SLURM] if _in_step(environ) else found


def _cross_check(info: LauncherInfo, other: Launcher, environ: Environ) -> LauncherInfo:
    """``info``, with the variables of another launcher that were compared, and its local rank if ``info`` has none.

    Raises:
        LaunchError: a variable of the other launcher contradicts ``info``.
    """
    reader, known = EnvironmentReader(environ), dict(info.read)
    fields = {
        field: [name for name in getattr(other, field) if name not in known]
        for field in ("rank", "size", "local_rank", "local_size")
    }
    numbers = {field: reader.integer(*names) for field, names in fields.items()}
    for field, number in numbers.items():
        expected = getattr(info, field)
        if None not in (number, expected) and number != expected:
            name = next(name for name in fields[field] if name in environ)
            unset = " ".join(name for name, _ in reader.read)
            reader.values |= known
            ways = SLURM.advice if info.launcher == SLURM.name else ()
            if other is TORCHRUN:
                ways = (("launch.from_torch()", "or the variables set by hand alone"),)
            problem = f"{info.launcher} says {name} should be {expected}, but it is {number}:"
            raise reader.error(problem, (f"unset {unset}", f"{info.launcher} alone"), *ways)
    local_rank = numbers["local_rank"] if info.local_rank is None else info.local_rank
    return replace(info, local_rank=local_rank, read=tuple((known | dict(reader.read)).items()))


def _check_enclosing_step(info: LauncherInfo, environ: Environ) -> None:
    """Raise LaunchError if the enclosing step of Slurm cannot be the step in which the daemons of MPI run.

    A step is accepted if its rank and size are those of MPI, or if it has at most one task on each host and at most as
    many tasks as MPI has ranks. Otherwise the variables of MPI, or those of Slurm, are left over from an earlier job.
    """
    reader = EnvironmentReader(environ)
    rank, tasks = reader.required("SLURM_PROCID"), reader.integer("SLURM_STEP_NUM_TASKS")
    local_rank, counted = reader.integer("SLURM_LOCALID"), reader.text("SLURM_STEP_TASKS_PER_NODE")
    most_on_a_host = max(parse_task_counts(counted, "SLURM_STEP_TASKS_PER_NODE")) if counted else 1
    crowded = bool(local_rank) or most_on_a_host > 1
    if (rank, tasks) != (info.rank, info.size) and (crowded or (tasks or 1) > info.size):
        reader.values |= dict(info.read)
        raise reader.error(
            f"{info.launcher} says rank {info.rank} of {info.size}, but in a step of Slurm this is task {rank} of "
            f"{tasks}, not a daemon of {info.launcher}, which runs one on each host.",
            ("launch.from_slurm()", f"Slurm alone, if the variables of {info.launcher} are from an earlier job"),
            ("unset SLURM_STEP_ID SLURM_STEPID", f"{info.launcher} alone"),
        )


def detect_one(launcher: Launcher, environ: Environ) -> LauncherInfo:
    """The rank of this process according to one launcher, without a comparison with others.

    MASTER_ADDR and MASTER_PORT are used if they are set.

    Raises:
        LaunchError: the launcher did not start this process, or its variables are missing or contradict each other.

    >>> detect_one(OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "1"}).rank
    0
    """
    is_set = any(mark in environ for mark in launcher.marks)
    if not is_set or (launcher is SLURM and not _in_step(environ)):
        raise _error(
            f"{launcher.name} did not start this process: none of its variables is set.",
            dict.fromkeys(launcher.marks),
            ("launch.join()", "detects the launcher"),
        )
    return _read(launcher, environ)


def with_address(info: LauncherInfo, host: str | None = None, port: int | None = None) -> LauncherInfo:
    """``info`` with another host and port of rank 0, as far as they are given.

    Raises:
        LaunchError: the host is not a name or an address, or the port not a port number.

    >>> with_address(detect_launcher({"PMI_RANK": "3", "PMI_SIZE": "4"}), "n1", 29500).end_point()
    ('n1', 29500)
    """
    if host is not None and not (isinstance(host, str) and host and not set(host) & set(" /@[]")):
        raise LaunchError(f"host is the name or the address of rank 0's host, such as host='n1', not {host!r}.")
    if port is not None and not (type(port) is int and 0 < port <= LAST_PORT):
        raise LaunchError(f"port is a whole number from 1 to {LAST_PORT}, such as port=29500, not {port!r}.")
    return replace(info, address=host or info.address, port=port or info.port)


def with_replica(
    info: LauncherInfo, replica: object, replicas: object, host: str | None, port: int | None
) -> LauncherInfo:
    """``info`` in the world that several launches of as many ranks form, over a store at this host and port.

    Raises:
        LaunchError: there is no such replica, the store is not given, or as ``with_address``.

    >>> info = detect_launcher({"PMI_RANK": "1", "PMI_SIZE": "2"})
    >>> print(with_replica(info, 2, 3, "n1", 29500).line)
    rank 5 of 6: MPICH, because PMI_RANK is set, as replica 2 of 3
    """
    if type(replicas) is not int or type(replica) is not int or not 0 <= replica < replicas:
        raise LaunchError(
            f"replica is {replica!r} and replicas is {replicas!r}, but these are a launch's number, from 0, and how "
            "many launches form the world.\n\n"
            "  launch.join(replica=0, replicas=3, host='n1', port=29500)   # in the first of three"
        )
    if host is None or port is None:  # the launcher's store ends with this replica
        raise LaunchError(
            f"host is {host!r} and port is {port!r}, but no launcher sets those of the store of all {replicas} "
            "replicas, which has to outlive each of them.\n\n"
            "  store = launch.StoreProcess(port=29500)   # in a process that starts the replicas\n"
            f"  launch.join(replica={replica}, replicas={replicas}, host='n1', port=29500)   # in the ranks of this one"
        )
    why = f"{info.why}, as replica {replica} of {replicas}"
    rank, size = replica * info.size + info.rank, replicas * info.size
    return with_address(replace(info, why=why, rank=rank, size=size, hosts=(), replica=replica), host, port)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20
