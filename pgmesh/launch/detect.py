"""Which launcher started this process, from the environment alone. No torch, no network, no files but PBS_NODEFILE.

    found = believe(os.environ)
    found.rank, found.size, found.local_rank, found.local_size, found.hosts, found.address, found.port
    found.line     which launcher was believed, and why, in a line
    found.read     the variables that were read, with their values

Launchers stand inside each other: Slurm starts mpirun's daemons, or torchrun, and their variables are there too. The
innermost one knows this process: torchrun, then MPI, then Slurm. What the others say has to fit, or it is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from pgmesh._util.formatting import format_calls
from pgmesh.errors import LaunchError
from pgmesh.launch import pbs
from pgmesh.launch.slurm import parse_hosts, parse_task_counts

Environ = Mapping[str, str]

PORTS = range(20_000, 30_000)
"""Where ports that are derived from a job's number lie: below those that Linux hands out by itself."""

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a process needs that is started as torchrun starts them."""

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

INNERMOST_MARKS = {"PGMESH_SPAWNED": "launch.spawn", "TORCHELASTIC_RUN_ID": "torchrun"}
"""Set by whoever starts the process itself, whatever that one was started by."""

FIRST_STEP_WITHOUT_TASKS = 0xFFFFFFF0
"""From here on Slurm's step numbers mean a batch script or an interactive shell, and no step of srun."""

LOCALHOST = "127.0.0.1"
LAST_PORT = 65_535


@dataclass(frozen=True)
class LauncherInfo:
    """What a launcher says of this process.

    >>> found = detect_launcher({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    >>> found.rank, found.size, found.local_rank, found.local_size, found.hosts, found.address
    (3, 4, 1, 2, (), None)
    >>> print(found.line)
    rank 3 of 4, local rank 1 of 2: MPICH, because PMI_RANK is set
    """

    launcher: str
    why: str
    rank: int
    size: int
    local_rank: int | None = None  # None where nothing says it
    local_size: int | None = None
    hosts: tuple[str, ...] = ()  # in the launcher's order; () where it does not name them
    address: str | None = None  # where rank 0 can be reached; None where nothing says it
    port: int | None = None
    read: tuple[tuple[str, str], ...] = ()

    @property
    def line(self) -> str:
        """What was believed and why, in a line."""
        local = "" if self.local_rank is None else f", local rank {self.local_rank}"
        local += "" if self.local_size is None else f" of {self.local_size}"
        return f"rank {self.rank} of {self.size}{local}: {self.launcher}, because {self.why}"

    def end_point(self) -> tuple[str, int]:
        """The host and the port at which the others find rank 0.

        Raises:
            LaunchError: nothing tells them.
        """
        if self.address is not None and self.port is not None:
            return self.address, self.port
        given = {"host": self.address, "port": self.port}
        unknown = [name for name, value in given.items() if value is None]
        examples = {"host": "'n1'", "port": "29500"}, {"host": "MASTER_ADDR=n1", "port": "MASTER_PORT=29500"}
        call, export = ([example[name] for name in unknown] for example in examples)
        apart = self.address is None and self.local_size is not None and self.local_size < self.size
        raise self.error(
            f"{self.launcher} does not tell by which {' and '.join(unknown)} the others find rank 0"
            + f"; it is not 127.0.0.1, since only {self.local_size} of {self.size} ranks are on this host." * apart
            + "." * (not apart),
            (f"launch.join({', '.join(map('='.join, zip(unknown, call)))})", "the same on every rank"),
            (f"export {' '.join(export)}", "or in the environment of every rank"),
        )

    def error(self, problem: str, *ways: tuple[str, str]) -> LaunchError:
        """What is wrong, what was read, and the calls that would be right."""
        return _error(problem, dict(self.read), *ways)


class EnvironmentReader:
    """The environment, with a list of what was read in it."""

    def __init__(self, environ: Environ) -> None:
        self.environ = environ
        self.values: dict[str, str | None] = {}

    def text(self, *names: str) -> str | None:
        """The first of these that is set; the others are alternatives."""
        for name in names:
            if (value := self.environ.get(name)) is not None:
                self.values[name] = value
                return value
        return None

    def integer(self, *names: str, at_least: int = 0, at_most: int | None = None) -> int | None:
        """What these say, as far as they are set: all of them the same whole number.

        Raises:
            LaunchError: one says no number, or two differ.
        """
        said = {name: self.environ[name] for name in names if name in self.environ}
        self.values |= said
        for name, value in said.items():
            if not (_is_number(value) and int(value) >= at_least and (at_most is None or int(value) <= at_most)):
                right = f"of {at_least} or more" if at_most is None else f"from {at_least} to {at_most}"
                raise self.error(f"{name} is {value!r}, which is no whole number {right}.")
        if len({int(value) for value in said.values()}) > 1:
            differ = " and ".join(f"{name} is {value}" for name, value in said.items())
            raise self.error(f"{differ}: they should be the same.")
        return int(next(iter(said.values()))) if said else None

    def required(self, *names: str, at_least: int = 0) -> int:
        """The same, where one of them has to be set."""
        number = self.integer(*names, at_least=at_least)
        if number is None:
            self.values |= dict.fromkeys(names)
            *most, last = names
            raise self.error(f"{', '.join(most)} and {last} are not set." if most else f"{last} is not set.")
        return number

    def check_below(self, name: str, rank: int | None, limit: str, size: int | None) -> None:
        """See that a rank is below its size, where both are known."""
        if rank is not None and size is not None and rank >= size:
            raise self.error(f"{name} is {rank}, but {limit} is {size}, and ranks count from 0.")

    def check_host_size(self, local: str, local_size: int | None, name: str, size: int) -> None:
        """See that no host has more ranks than there are."""
        if local_size is not None and local_size > size:
            raise self.error(f"{local} is {local_size}, but {name} is {size}: no host has more ranks than there are.")

    def error(self, problem: str, *ways: tuple[str, str]) -> LaunchError:
        """What is wrong, what was read, and the calls that would be right."""
        return _error(problem, self.values, *ways)

    @property
    def read(self) -> tuple[tuple[str, str], ...]:
        """What was read and is set."""
        return tuple((name, value) for name, value in self.values.items() if value is not None)


def _error(problem: str, values: Mapping[str, str | None], *ways: tuple[str, str]) -> LaunchError:
    width = max(map(len, values), default=0)
    read = [
        f"  {name:<{width}} = {'(not set)' if value is None else value or '(empty)'}" for name, value in values.items()
    ]
    return LaunchError("\n\n".join(part for part in (problem, "\n".join(read), format_calls(ways)) if part))


# ---- one class a launcher ----


class Launcher:
    """A launcher, by the variables that it sets."""

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()  # one of them is set where it started the process

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo | None:
        """What it says of this process; None where it did not start it.

        Raises:
            LaunchError: some of its variables are missing, are no numbers or contradict each other.
        """
        raise NotImplementedError


class Torchrun(Launcher):
    """torchrun; and whoever sets the same variables by hand, as torch's ``env://`` wants them."""

    name = "torchrun"
    marks = TORCHRUN_VARIABLES

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo | None:
        """What RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT say."""
        there = [name for name in TORCHRUN_VARIABLES if name in environ]
        if not there:
            return None
        reader = EnvironmentReader(environ)
        numbers = [environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")]
        complete = environ.get("MASTER_ADDR") and all(map(_is_number, numbers))
        if not complete or int(environ["RANK"]) >= int(environ["WORLD_SIZE"]):
            reader.values |= {name: environ.get(name) for name in TORCHRUN_VARIABLES}
            raise reader.error(
                "the environment names no rank of a world:",
                ("torchrun --nproc-per-node 8 script.py", "sets them all: a world of 8"),
                (f"unset {' '.join(there)}", "or none: a world of 1"),
            )
        rank, size = reader.required("RANK"), reader.required("WORLD_SIZE", at_least=1)
        local_rank, local_size = reader.required("LOCAL_RANK"), reader.integer("LOCAL_WORLD_SIZE", at_least=1)
        reader.check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
        reader.check_host_size("LOCAL_WORLD_SIZE", local_size, "WORLD_SIZE", size)
        host, hosts = reader.integer("GROUP_RANK"), reader.integer("GROUP_WORLD_SIZE", at_least=1)
        reader.check_below("GROUP_RANK", host, "GROUP_WORLD_SIZE", hosts)
        address, port = reader.text("MASTER_ADDR"), reader.integer("MASTER_PORT", at_least=1, at_most=LAST_PORT)
        mark = next((mark for mark in INNERMOST_MARKS if reader.text(mark) is not None), None)
        launcher = INNERMOST_MARKS[mark] if mark else "the environment"
        why = f"{mark or 'RANK'} is set"
        return LauncherInfo(launcher, why, rank, size, local_rank, local_size, (), address, port, reader.read)


class MPI(Launcher):
    """A launcher of MPI, by the names that it has for the same four numbers."""

    rank: ClassVar[tuple[str, ...]]  # any of these, and all that are set agree
    size: ClassVar[tuple[str, ...]]
    local_rank: ClassVar[tuple[str, ...]]
    local_size: ClassVar[tuple[str, ...]]
    job: ClassVar[tuple[str, ...]] = ()  # the first that is set is the same on every rank of a job, and of no other

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo | None:
        """What its variables say. Rank 0 is at 127.0.0.1 where all ranks are on one host, else nobody knows."""
        reader = EnvironmentReader(environ)
        mark = next((name for name in cls.marks if name in environ), None)
        if mark is None:
            return None
        rank, size = reader.required(*cls.rank), reader.required(*cls.size, at_least=1)
        local_rank, local_size = reader.integer(*cls.local_rank), reader.integer(*cls.local_size, at_least=1)
        reader.check_below(cls.rank[0], rank, cls.size[0], size)
        reader.check_below(cls.local_rank[0], local_rank, cls.local_size[0], local_size)
        reader.check_host_size(cls.local_size[0], local_size, cls.size[0], size)
        hosts = cls._hosts(reader, size, local_size)
        address, job = LOCALHOST if local_size == size else hosts[0] if hosts else None, reader.text(*cls.job)
        port = PORTS[zlib.crc32(job.encode()) % len(PORTS)] if job else None
        return LauncherInfo(
            cls.name, f"{mark} is set", rank, size, local_rank, local_size, hosts, address, port, reader.read
        )

    @classmethod
    def _hosts(cls, reader: EnvironmentReader, size: int, local_size: int | None) -> tuple[str, ...]:
        """The hosts, where the launcher names them, rank 0's first."""
        return ()


class OpenMPI(MPI):
    """Open MPI's mpirun, and those who set the same variables."""

    name = "Open MPI"
    marks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    rank = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")
    size = ("OMPI_COMM_WORLD_SIZE",)
    local_rank = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_size = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    job = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


class MVAPICH(MPI):
    """MVAPICH's launchers. Untested."""

    name = "MVAPICH"
    marks = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")
    rank = ("MV2_COMM_WORLD_RANK",)
    size = ("MV2_COMM_WORLD_SIZE",)
    local_rank = ("MV2_COMM_WORLD_LOCAL_RANK",)
    local_size = ("MV2_COMM_WORLD_LOCAL_SIZE",)


class MPIOnPBS(MPI):
    """A launcher that runs ranks on the hosts of a PBS job, from the first on."""

    @classmethod
    def _hosts(cls, reader: EnvironmentReader, size: int, local_size: int | None) -> tuple[str, ...]:
        """The hosts of PBS_NODEFILE: none where it is not set, or PBS left the file on the job's first host alone."""
        path = reader.text("PBS_NODEFILE")
        hosts = pbs.read_node_file(path) if path else ()
        if len(hosts) == 1 and local_size is not None and local_size < size:
            raise reader.error(
                f"PBS_NODEFILE names one host, {hosts[0]}, but only {local_size} of {size} ranks are on this one.",
                ("unset PBS_NODEFILE", "and give launch.join(host=...) where rank 0 is"),
            )
        return hosts


class PALS(MPIOnPBS):
    """HPE Cray's PALS. Untested."""

    name = "PALS"
    marks = ("PALS_LOCAL_RANKID", "PALS_RANKID", "PALS_APID")
    rank = ("PMI_RANK", "PMIX_RANK", "PALS_RANKID")
    size = ("PMI_SIZE",)
    local_rank = ("PALS_LOCAL_RANKID", "PMIX_LOCAL_RANK", "PMI_LOCAL_RANK")
    local_size = ("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE")
    job = ("PALS_APID",)


class MPICH(MPI):
    """Hydra, the mpiexec of MPICH, and of Intel MPI (untested)."""

    name = "MPICH"
    marks = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
    rank = ("PMI_RANK",)
    size = ("PMI_SIZE",)
    local_rank = ("MPI_LOCALRANKID",)
    local_size = ("MPI_LOCALNRANKS",)

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo | None:
        """What its variables say; but srun sets PMI_RANK too, and PMIx PMI_SIZE."""
        if "MPI_LOCALRANKID" in environ:
            return super().detect(environ)
        others = Slurm.step_variable(environ) is not None or ("PMIX_RANK" in environ and "PMI_RANK" not in environ)
        return None if others else super().detect(environ)


class PMIx(MPIOnPBS):
    """Any other launcher that speaks PMIx. Untested."""

    name = "PMIx"
    marks = ("PMIX_RANK",)
    rank = ("PMIX_RANK",)
    size = ("PMI_SIZE",)
    local_rank = ("PMIX_LOCAL_RANK", "PMI_LOCAL_RANK")
    local_size = ("PMI_LOCAL_SIZE",)
    job = ("PMIX_NAMESPACE",)

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo | None:
        """What its variables say; but srun, and others that are known by their own names, set PMIX_RANK too."""
        known = (*OpenMPI.marks, *MVAPICH.marks, *PALS.marks, "PMI_RANK", "MPI_LOCALRANKID")
        others = Slurm.step_variable(environ) is not None or any(name in environ for name in known)
        return None if others else super().detect(environ)


class Slurm(Launcher):
    """Slurm's srun."""

    name = "Slurm"
    marks = ("SLURM_STEP_ID", "SLURM_PROCID")

    @staticmethod
    def step_variable(environ: Environ) -> str | None:
        """The variable that names the step of srun that this process is in; None in a batch script or a shell."""
        name = next((name for name in ("SLURM_STEP_ID", "SLURM_STEPID") if name in environ), None)
        if name is None or "SLURM_PROCID" not in environ:
            return None
        return None if _is_number(environ[name]) and int(environ[name]) >= FIRST_STEP_WITHOUT_TASKS else name

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo | None:
        """What srun says. Rank 0 is on the step's first host; its port is made of the job's and the step's number."""
        mark = cls.step_variable(environ)
        if mark is None:
            return None
        reader = EnvironmentReader(environ)
        rank = reader.required("SLURM_PROCID")
        size = reader.required("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", at_least=1)
        reader.check_below("SLURM_PROCID", rank, "the number of tasks", size)
        if "MPI_LOCALRANKID" not in environ:  # these, then, are srun's own
            for name, number in (("PMI_RANK", rank), ("PMIX_RANK", rank), ("PMI_SIZE", size)):
                if (said := reader.integer(name)) not in (None, number):
                    raise reader.error(f"srun says rank {rank} of {size}, but {name} is {said}.", cls.NEW_STEP)
        local_rank = reader.integer("SLURM_LOCALID")
        hosts, local_size, node = cls._hosts(reader, size, local_rank)
        cls._check_tasks_of_host(reader, rank, local_rank, local_size)
        address, port = None, cls._derived_port(reader)
        if len(hosts) == 1:
            address = LOCALHOST
        elif hosts and reader.text("SLURM_DISTRIBUTION") != "arbitrary" and (rank or not node):
            address = hosts[0]  # where an arbitrary distribution puts rank 0, other ranks cannot tell
        why = f"{mark} is set"
        return LauncherInfo(cls.name, why, rank, size, local_rank, local_size, hosts, address, port, reader.read)

    NEW_STEP = ("srun python script.py", "in a step of its own, srun sets them all anew")

    @classmethod
    def _hosts(
        cls, reader: EnvironmentReader, size: int, local_rank: int | None
    ) -> tuple[tuple[str, ...], int | None, int | None]:
        """The step's hosts, how many tasks are on this one, and which of them it is."""
        listed = next((name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if reader.text(name)), None)
        counted = next(
            (name for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if reader.text(name)), None
        )
        hosts = parse_hosts(reader.environ[listed], listed) if listed else ()
        counts = parse_task_counts(reader.environ[counted], counted) if counted else ()
        node, nodes = reader.integer("SLURM_NODEID"), reader.integer("SLURM_STEP_NUM_NODES", at_least=1)
        for name, number in ((listed, len(hosts)), (counted, len(counts))):
            if name and nodes not in (None, number):
                raise reader.error(f"{name} has {number} hosts, but SLURM_STEP_NUM_NODES is {nodes}.", cls.NEW_STEP)
        if hosts and counts and len(hosts) != len(counts):
            raise reader.error(f"{listed} has {len(hosts)} hosts, but {counted} has {len(counts)}.", cls.NEW_STEP)
        if counts and sum(counts) != size:
            raise reader.error(f"{counted} makes {sum(counts)} tasks, but there are {size}.", cls.NEW_STEP)
        reader.check_below("SLURM_NODEID", node, "the number of hosts", len(counts or hosts) or None)
        local_size = counts[node] if counts and node is not None else size if len(hosts) == 1 else None
        reader.check_below("SLURM_LOCALID", local_rank, "the number of tasks on this host", local_size)
        return hosts, local_size, node

    @classmethod
    def _check_tasks_of_host(
        cls, reader: EnvironmentReader, rank: int, local_rank: int | None, local_size: int | None
    ) -> None:
        """Hold the tasks of this host against the rest: a job that a step submitted still has that step's variables."""
        if (text := reader.text("SLURM_GTIDS")) is None:
            return
        tasks = text.split(",")
        if not all(map(_is_number, tasks)):
            raise reader.error(f"SLURM_GTIDS is {text!r}, which is no list of tasks.", cls.NEW_STEP)
        if local_size not in (None, len(tasks)):
            here = f"{len(tasks)} task{'s' * (len(tasks) > 1)}"
            raise reader.error(f"SLURM_GTIDS names {here} on this host, but the step has {local_size}.", cls.NEW_STEP)
        if local_rank is not None and (local_rank >= len(tasks) or int(tasks[local_rank]) != rank):
            raise reader.error(
                f"by SLURM_GTIDS, local rank {local_rank} is not rank {rank} (SLURM_PROCID).", cls.NEW_STEP
            )

    @staticmethod
    def _derived_port(reader: EnvironmentReader) -> int | None:
        """Jobs and steps that run at once on a host have numbers near each other, and so ports of their own."""
        job, step = reader.integer("SLURM_JOB_ID", "SLURM_JOBID"), reader.integer("SLURM_STEP_ID", "SLURM_STEPID")
        return None if job is None or step is None else PORTS[(101 * job + step) % len(PORTS)]


class NoLauncher(Launcher):
    """No launcher: one process, started by hand."""

    name = "no launcher"

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo:
        """A world of one.

        Raises:
            LaunchError: this is the script or the shell of a Slurm job of several tasks, and none of them.
        """
        reader = EnvironmentReader(environ)
        if not any(name in environ for name in ("SLURM_JOB_ID", "SLURM_JOBID", *Slurm.marks)):
            return LauncherInfo(cls.name, "none of their variables is set", 0, 1, 0, 1)
        reader.text("SLURM_JOB_ID", "SLURM_JOBID")
        tasks, hosts = reader.integer("SLURM_NTASKS", "SLURM_NPROCS") or 1, reader.integer("SLURM_NNODES") or 1
        tasks = max(tasks, (reader.integer("SLURM_PROCID") or 0) + 1)
        if max(tasks, hosts) > 1:
            many = f"{tasks} tasks" if tasks > 1 else f"{hosts} hosts"
            reader.values |= {name: environ.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_ID")}
            raise reader.error(
                f"this Slurm job has {many}, and this process is its script or shell, and no task that srun started:",
                ("srun python script.py", "one rank for each task"),
                ("srun --ntasks 1 python script.py", "a world of 1"),
            )
        return LauncherInfo(
            "no launcher", "this is the script of a Slurm job of one task", 0, 1, 0, 1, read=reader.read
        )


LAUNCHERS: tuple[type[Launcher], ...] = (Torchrun, OpenMPI, MVAPICH, PALS, MPICH, PMIx, Slurm, NoLauncher)
"""The innermost first."""


# ---- which of them is believed ----


def detect_launcher(environ: Environ) -> LauncherInfo:
    """What the innermost launcher says of this process, held against every other variable that is there.

    Args:
        environ: as ``os.environ`` is.

    Raises:
        LaunchError: variables are missing or contradict each other; it names them, with their values.

    A process that torchrun started inside a Slurm job is torchrun's:

    >>> slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    >>> torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    >>> print(detect_launcher(slurm | torchrun | {"TORCHELASTIC_RUN_ID": "none"}).line)
    rank 5 of 8, local rank 1: torchrun, because TORCHELASTIC_RUN_ID is set, in a step of Slurm
    """
    inside = ", in a step of Slurm" * (Slurm.step_variable(environ) is not None)
    marked = any(mark in environ for mark in INNERMOST_MARKS)
    if marked and (found := Torchrun.detect(environ)):
        return replace(found, why=found.why + inside)
    if mpi := [said for each in LAUNCHERS if issubclass(each, MPI) and (said := each.detect(environ))]:
        for other in mpi[1:]:
            _check_same_rank(mpi[0], other)
        _check_enclosing_step(mpi[0], environ)
        return _with_rank_variables(replace(mpi[0], why=mpi[0].why + inside), environ)
    if found := Slurm.detect(environ):
        return _with_rank_variables(found, environ)
    if any(name in environ for name in RANK_VARIABLES) and (found := Torchrun.detect(environ)):
        return found
    found = NoLauncher.detect(environ)
    Torchrun.detect(environ)  # MASTER_ADDR or MASTER_PORT alone names no rank
    return found


def _check_same_rank(found: LauncherInfo, other: LauncherInfo) -> None:
    """See that two launchers, both of which may have started this process, say the same."""
    for what in ("rank", "size", "local_rank", "local_size"):
        a, b = getattr(found, what), getattr(other, what)
        if None not in (a, b) and a != b:
            raise _error(
                f"{found.launcher} says rank {found.rank} of {found.size}, and {other.launcher} rank {other.rank} of "
                f"{other.size}; their {what.replace('_', ' ')}s are {a} and {b}:",
                dict([*found.read, *other.read]),
                (f"unset {' '.join(name for name, _ in other.read)}", f"{found.launcher} alone"),
            )


def _check_enclosing_step(found: LauncherInfo, environ: Environ) -> None:
    """See that a step of Slurm around MPI can be that of its daemons: one on each host, none without a rank."""
    if Slurm.step_variable(environ) is None:
        return
    reader = EnvironmentReader(environ)
    rank, tasks = reader.required("SLURM_PROCID"), reader.integer("SLURM_STEP_NUM_TASKS")
    local_rank, counted = reader.integer("SLURM_LOCALID"), reader.text("SLURM_STEP_TASKS_PER_NODE")
    crowded = bool(local_rank) or (
        counted is not None and max(parse_task_counts(counted, "SLURM_STEP_TASKS_PER_NODE")) > 1
    )
    if (rank, tasks) != (found.rank, found.size) and (crowded or (tasks or 1) > found.size):
        reader.values |= dict(found.read)
        raise reader.error(
            f"{found.launcher} says rank {found.rank} of {found.size}, but in a step of Slurm this is task {rank} of "
            f"{tasks}, and no daemon of {found.launcher}: those are one on each host.",
            ("launch.from_slurm()", f"Slurm alone, if {found.launcher}'s variables are of an earlier job"),
            ("unset SLURM_STEP_ID SLURM_STEPID", f"{found.launcher} alone"),
        )


def _with_rank_variables(found: LauncherInfo, environ: Environ) -> LauncherInfo:
    """The same with MASTER_ADDR and MASTER_PORT, if they are set; RANK and the like have to fit."""
    reader = EnvironmentReader(environ)
    said = {name: reader.integer(name) for name in RANK_VARIABLES}
    for (name, number), by in zip(said.items(), (found.rank, found.size, found.local_rank, found.local_size)):
        if None not in (number, by) and number != by:
            reader.values |= dict(found.read)
            raise reader.error(
                f"{found.launcher} says {name} should be {by}, but it is {number}:",
                (f"unset {' '.join(name for name in RANK_VARIABLES if name in environ)}", f"{found.launcher} alone"),
                ("launch.from_torch()", "or what was set by hand alone"),
            )
    if found.local_rank is None:
        found = replace(found, local_rank=said["LOCAL_RANK"])
    return _with_master_address(replace(found, read=(*found.read, *reader.read)), environ)


def _with_master_address(found: LauncherInfo, environ: Environ) -> LauncherInfo:
    """The same with MASTER_ADDR and MASTER_PORT, if they are set."""
    reader = EnvironmentReader(environ)
    address, port = reader.text("MASTER_ADDR"), reader.integer("MASTER_PORT", at_least=1, at_most=LAST_PORT)
    if address == "":
        raise reader.error("MASTER_ADDR is empty.", ("export MASTER_ADDR=n1", "the host of rank 0"))
    return replace(found, address=address or found.address, port=port or found.port, read=(*found.read, *reader.read))


def detect_one(launcher: type[Launcher], environ: Environ) -> LauncherInfo:
    """What one launcher says of this process, whatever others do; MASTER_ADDR and MASTER_PORT count all the same.

    Raises:
        LaunchError: it did not start this process, or its variables are missing or contradict each other.

    >>> detect_one(OpenMPI, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "1"}).rank
    0
    """
    found = launcher.detect(environ)
    if found is None:
        raise _error(
            f"{launcher.name} did not start this process: none of its variables is set.",
            dict.fromkeys(launcher.marks),
            ("launch.join()", "by whichever launcher did"),
        )
    return _with_master_address(found, environ)


def with_address(found: LauncherInfo, host: str | None = None, port: int | None = None) -> LauncherInfo:
    """The same where rank 0 is found at this host and port, as far as they are given.

    Raises:
        LaunchError: the one is no name, or the other no number of a port.

    >>> with_address(detect_launcher({"PMI_RANK": "3", "PMI_SIZE": "4"}), "n1", 29500).end_point()
    ('n1', 29500)
    """
    if host is not None and not (isinstance(host, str) and host and not set(host) & set(" /@[]")):
        raise LaunchError(f"host is the name or the address of rank 0's host, such as host='n1', not {host!r}.")
    if port is not None and not (type(port) is int and 0 < port <= LAST_PORT):
        raise LaunchError(f"port is a whole number from 1 to {LAST_PORT}, such as port=29500, not {port!r}.")
    return replace(found, address=host or found.address, port=port or found.port)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20
