"""Detection of the launcher that started this process, from its environment variables.

    info = detect_launcher(os.environ)
    info.rank, info.size, info.local_rank, info.local_size, info.hosts, info.address, info.port
    info.line     the detected launcher and the reason, in one line
    info.read     the variables that were read, with their values

Launchers are often nested: srun starts torchrun or the daemons of mpirun, and all their variables are set. Only the
innermost launcher knows the rank of this process. The order is therefore:

1. torchrun, if TORCHELASTIC_RUN_ID is set, and ``launch.spawn``, if PGMESH_SPAWNED is set. No other launcher is read.
2. MPI: Open MPI, MVAPICH, PALS, MPICH, any other PMIx launcher. The first one is used.
3. Slurm, in a step of srun.
4. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, all set by hand.
5. No launcher: a world of 1.

Contradictions raise LaunchError, which lists the variables and the possible fixes. In cases 2 and 3, these must agree:
all detected MPI launchers, the variables of case 4 if they are set, and the enclosing Slurm step if there is one.

This file imports no torch and uses no network. The only file that it reads is the one that PBS_NODEFILE names.
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
"""Ports that are derived from a job's number. They are below the ephemeral ports of Linux, which start at 32768."""

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets. torch's ``env://`` needs all but LOCAL_RANK; pgmesh needs that too."""

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""The variables of torchrun that may also be set by hand under another launcher."""

INNERMOST_MARKS = {"PGMESH_SPAWNED": "launch.spawn", "TORCHELASTIC_RUN_ID": "torchrun"}
"""Variables that mark the innermost launcher, and its name."""

FIRST_STEP_WITHOUT_TASKS = 0xFFFFFFF0
"""First of the step numbers that Slurm reserves for batch scripts and interactive shells."""

LOCALHOST = "127.0.0.1"
LAST_PORT = 65_535


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
        known = {"host": self.address, "port": self.port}
        unknown = [name for name, value in known.items() if value is None]
        examples = {"host": "'n1'", "port": "29500"}, {"host": "MASTER_ADDR=n1", "port": "MASTER_PORT=29500"}
        call, export = ([example[name] for name in unknown] for example in examples)
        problem = f"{self.launcher} does not set the {' and the '.join(unknown)} of rank 0"
        if self.address is None and self.local_size is not None and self.local_size < self.size:
            problem += f"; it is not 127.0.0.1, since only {self.local_size} of {self.size} ranks are on this host"
        raise self.error(
            f"{problem}.",
            (f"launch.join({', '.join(map('='.join, zip(unknown, call)))})", "the same on every rank"),
            (f"export {' '.join(export)}", "or in the environment of every rank"),
        )

    def error(self, problem: str, *ways: tuple[str, str]) -> LaunchError:
        """An error with the problem, the variables that were read, and suggested calls with their reasons."""
        return _error(problem, dict(self.read), *ways)


class EnvironmentReader:
    """Reads environment variables, checks them, and records the names and values for error messages.

    Args:
        environ: a mapping like ``os.environ``.
    """

    def __init__(self, environ: Environ) -> None:
        self.environ = environ
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
            *most, last = names
            raise self.error(f"{', '.join(most)} and {last} are not set." if most else f"{last} is not set.")
        return number

    def check_below(self, name: str, rank: int | None, limit: str, size: int | None) -> None:
        """Raise LaunchError if a rank is not below its size. None is not checked."""
        if rank is not None and size is not None and rank >= size:
            raise self.error(f"{name} is {rank}, but {limit} is {size}, and ranks count from 0.")

    def check_host_size(self, local: str, local_size: int | None, name: str, size: int) -> None:
        """Raise LaunchError if a host has more ranks than the world. None is not checked."""
        if local_size is not None and local_size > size:
            raise self.error(f"{local} is {local_size}, but {name} is {size}: a host cannot have more ranks.")

    def error(self, problem: str, *ways: tuple[str, str]) -> LaunchError:
        """An error with the problem, the variables that were read, and suggested calls with their reasons."""
        return _error(problem, self.values, *ways)

    @property
    def read(self) -> tuple[tuple[str, str], ...]:
        """The variables that were read and are set, with their values."""
        return tuple((name, value) for name, value in self.values.items() if value is not None)


def _error(problem: str, values: Mapping[str, str | None], *ways: tuple[str, str]) -> LaunchError:
    width = max(map(len, values), default=0)
    read = [
        f"  {name:<{width}} = {'(not set)' if value is None else value or '(empty)'}" for name, value in values.items()
    ]
    return LaunchError("\n\n".join(part for part in (problem, "\n".join(read), format_calls(ways)) if part))


# ---- one class for each launcher ----


class Launcher:
    """Base class of the launchers.

    ``marks`` are the variables by which a launcher is recognised: it sets at least one of them on every rank.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo | None:
        """The rank of this process according to this launcher; None if the launcher did not start it.

        Raises:
            LaunchError: variables of this launcher are missing, invalid or contradict each other.
        """
        raise NotImplementedError


class Torchrun(Launcher):
    """torchrun, and the same five variables set by hand."""

    name = "torchrun"
    marks = TORCHRUN_VARIABLES

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo | None:
        """The rank according to RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; None if none is set."""
        present = [name for name in TORCHRUN_VARIABLES if name in environ]
        if not present:
            return None
        reader = EnvironmentReader(environ)
        numbers = [environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")]
        complete = environ.get("MASTER_ADDR") and all(map(_is_number, numbers))
        if not complete or int(environ["RANK"]) >= int(environ["WORLD_SIZE"]):
            reader.values |= {name: environ.get(name) for name in TORCHRUN_VARIABLES}
            raise reader.error(
                "the environment does not name a rank of a world:",
                ("torchrun --nproc-per-node 8 script.py", "sets them all: a world of 8"),
                (f"unset {' '.join(present)}", "or none: a world of 1"),
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
    """Base class of the launchers of MPI, which differ in the names of their variables.

    ``rank``, ``size``, ``local_rank`` and ``local_size`` name variables for the same number; all that are set must
    agree. ``job`` names variables that identify the job: equal on all its ranks, and different in every other job.
    """

    rank: ClassVar[tuple[str, ...]]
    size: ClassVar[tuple[str, ...]]
    local_rank: ClassVar[tuple[str, ...]]
    local_size: ClassVar[tuple[str, ...]]
    job: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo | None:
        """The rank according to this launcher. The address of rank 0 is 127.0.0.1 if all ranks are on one host."""
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
        """Names of the hosts, rank 0's first; empty if the launcher does not name them."""
        return ()


class OpenMPI(MPI):
    """mpirun of Open MPI, and other launchers that set the same variables."""

    name = "Open MPI"
    marks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    rank = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")
    size = ("OMPI_COMM_WORLD_SIZE",)
    local_rank = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_size = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    job = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


class MVAPICH(MPI):
    """Launchers of MVAPICH. Untested."""

    name = "MVAPICH"
    marks = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")
    rank = ("MV2_COMM_WORLD_RANK",)
    size = ("MV2_COMM_WORLD_SIZE",)
    local_rank = ("MV2_COMM_WORLD_LOCAL_RANK",)
    local_size = ("MV2_COMM_WORLD_LOCAL_SIZE",)


class MPIOnPBS(MPI):
    """Base class of the launchers that place ranks on the hosts of a PBS job, starting with the first host."""

    @classmethod
    def _hosts(cls, reader: EnvironmentReader, size: int, local_size: int | None) -> tuple[str, ...]:
        """The hosts in the file that PBS_NODEFILE names. Empty if it is not set, or if this host lacks the file.

        PBS writes the file on the first host of a job only.
        """
        path = reader.text("PBS_NODEFILE")
        hosts = pbs.read_node_file(path) if path else ()
        if len(hosts) == 1 and local_size is not None and local_size < size:
            raise reader.error(
                f"PBS_NODEFILE names one host, {hosts[0]}, but only {local_size} of {size} ranks are on this one.",
                ("unset PBS_NODEFILE", "and pass rank 0's host to launch.join(host=...)"),
            )
        return hosts


class PALS(MPIOnPBS):
    """PALS of HPE Cray. Untested."""

    name = "PALS"
    marks = ("PALS_LOCAL_RANKID", "PALS_RANKID", "PALS_APID")
    rank = ("PMI_RANK", "PMIX_RANK", "PALS_RANKID")
    size = ("PMI_SIZE",)
    local_rank = ("PALS_LOCAL_RANKID", "PMIX_LOCAL_RANK", "PMI_LOCAL_RANK")
    local_size = ("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE")
    job = ("PALS_APID",)


class MPICH(MPI):
    """Hydra: mpiexec of MPICH, and of Intel MPI (untested)."""

    name = "MPICH"
    marks = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
    rank = ("PMI_RANK",)
    size = ("PMI_SIZE",)
    local_rank = ("MPI_LOCALRANKID",)
    local_size = ("MPI_LOCALNRANKS",)

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo | None:
        """The rank according to Hydra; None if srun set PMI_RANK, or a PMIx launcher PMI_SIZE."""
        if "MPI_LOCALRANKID" in environ:
            return super().detect(environ)
        others = Slurm.step_variable(environ) is not None or ("PMIX_RANK" in environ and "PMI_RANK" not in environ)
        return None if others else super().detect(environ)


class PMIx(MPIOnPBS):
    """Any other launcher that implements PMIx. Untested."""

    name = "PMIx"
    marks = ("PMIX_RANK",)
    rank = ("PMIX_RANK",)
    size = ("PMI_SIZE",)
    local_rank = ("PMIX_LOCAL_RANK", "PMI_LOCAL_RANK")
    local_size = ("PMI_LOCAL_SIZE",)
    job = ("PMIX_NAMESPACE",)

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo | None:
        """The rank according to PMIx; None if srun or one of the launchers above set PMIX_RANK."""
        known = (*OpenMPI.marks, *MVAPICH.marks, *PALS.marks, "PMI_RANK", "MPI_LOCALRANKID")
        others = Slurm.step_variable(environ) is not None or any(name in environ for name in known)
        return None if others else super().detect(environ)


class Slurm(Launcher):
    """srun of Slurm."""

    name = "Slurm"
    marks = ("SLURM_STEP_ID", "SLURM_PROCID")

    @staticmethod
    def step_variable(environ: Environ) -> str | None:
        """The variable that names this process's step of srun; None in a batch script or an interactive shell."""
        name = next((name for name in ("SLURM_STEP_ID", "SLURM_STEPID") if name in environ), None)
        if name is None or "SLURM_PROCID" not in environ:
            return None
        return None if _is_number(environ[name]) and int(environ[name]) >= FIRST_STEP_WITHOUT_TASKS else name

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo | None:
        """The rank according to srun. Rank 0 is on the first host of the step; its port depends on job and step."""
        mark = cls.step_variable(environ)
        if mark is None:
            return None
        reader = EnvironmentReader(environ)
        rank = reader.required("SLURM_PROCID")
        size = reader.required("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", at_least=1)
        reader.check_below("SLURM_PROCID", rank, "the number of tasks", size)
        if "MPI_LOCALRANKID" not in environ:  # otherwise these variables are Hydra's
            for name, number in (("PMI_RANK", rank), ("PMIX_RANK", rank), ("PMI_SIZE", size)):
                if (value := reader.integer(name)) not in (None, number):
                    raise reader.error(f"srun says rank {rank} of {size}, but {name} is {value}.", cls.NEW_STEP)
        local_rank = reader.integer("SLURM_LOCALID")
        hosts, local_size, node = cls._hosts(reader, size, local_rank)
        cls._check_tasks_of_host(reader, rank, local_rank, local_size)
        address, port = None, cls._derived_port(reader)
        if len(hosts) == 1:
            address = LOCALHOST
        elif hosts and reader.text("SLURM_DISTRIBUTION") != "arbitrary" and (rank or not node):
            address = hosts[0]  # unknown to the other ranks if the distribution is arbitrary
        why = f"{mark} is set"
        return LauncherInfo(cls.name, why, rank, size, local_rank, local_size, hosts, address, port, reader.read)

    NEW_STEP = ("srun python script.py", "in a new step, srun sets all of them again")

    @classmethod
    def _hosts(
        cls, reader: EnvironmentReader, size: int, local_rank: int | None
    ) -> tuple[tuple[str, ...], int | None, int | None]:
        """Hosts of the step, number of tasks on this host, and index of this host. Each is checked with the others."""
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
        """Compare SLURM_GTIDS, the tasks of this host, with the other variables.

        A job that was submitted from within a step inherits the variables of that step, except SLURM_GTIDS.
        """
        if (text := reader.text("SLURM_GTIDS")) is None:
            return
        tasks = text.split(",")
        if not all(map(_is_number, tasks)):
            raise reader.error(f"SLURM_GTIDS is {text!r}, which is not a list of tasks.", cls.NEW_STEP)
        if local_size not in (None, len(tasks)):
            here = f"{len(tasks)} task{'s' * (len(tasks) > 1)}"
            raise reader.error(f"SLURM_GTIDS names {here} on this host, but the step has {local_size}.", cls.NEW_STEP)
        if local_rank is not None and (local_rank >= len(tasks) or int(tasks[local_rank]) != rank):
            raise reader.error(
                f"by SLURM_GTIDS, local rank {local_rank} is not rank {rank} (SLURM_PROCID).", cls.NEW_STEP
            )

    @staticmethod
    def _derived_port(reader: EnvironmentReader) -> int | None:
        """A port from the job ID and the step ID. Two jobs on one host rarely share it; MASTER_PORT overrides it."""
        job, step = reader.integer("SLURM_JOB_ID", "SLURM_JOBID"), reader.integer("SLURM_STEP_ID", "SLURM_STEPID")
        return None if job is None or step is None else PORTS[(101 * job + step) % len(PORTS)]


class NoLauncher(Launcher):
    """No launcher: one process that was started directly."""

    name = "no launcher"

    @classmethod
    def detect(cls, environ: Environ) -> LauncherInfo:
        """A world of one.

        Raises:
            LaunchError: this process is the script or the shell of a Slurm job of several tasks.
        """
        reader = EnvironmentReader(environ)
        if not any(name in environ for name in ("SLURM_JOB_ID", "SLURM_JOBID", *Slurm.marks)):
            return LauncherInfo(cls.name, "none of their variables is set", 0, 1, 0, 1)
        reader.text("SLURM_JOB_ID", "SLURM_JOBID")
        tasks, hosts = reader.integer("SLURM_NTASKS", "SLURM_NPROCS") or 1, reader.integer("SLURM_NNODES") or 1
        tasks = max(tasks, (reader.integer("SLURM_PROCID") or 0) + 1)
        if max(tasks, hosts) > 1:
            job_size = f"{tasks} tasks" if tasks > 1 else f"{hosts} hosts"
            reader.values |= {name: environ.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_ID")}
            raise reader.error(
                f"this Slurm job has {job_size}, but this process is its script or shell, not a task of srun:",
                ("srun python script.py", "one rank for each task"),
                ("srun --ntasks 1 python script.py", "a world of 1"),
            )
        return LauncherInfo(
            "no launcher", "this is the script of a Slurm job of one task", 0, 1, 0, 1, read=reader.read
        )


LAUNCHERS: tuple[type[Launcher], ...] = (Torchrun, OpenMPI, MVAPICH, PALS, MPICH, PMIx, Slurm, NoLauncher)
"""All launchers. ``detect_launcher`` has the order in which they are used."""


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
    nested_in_slurm = ", in a step of Slurm" * (Slurm.step_variable(environ) is not None)
    marked = any(mark in environ for mark in INNERMOST_MARKS)
    if marked and (info := Torchrun.detect(environ)):
        return replace(info, why=info.why + nested_in_slurm)
    if mpi := [info for each in LAUNCHERS if issubclass(each, MPI) and (info := each.detect(environ))]:
        for other in mpi[1:]:
            _check_same_rank(mpi[0], other)
        _check_enclosing_step(mpi[0], environ)
        return _with_rank_variables(replace(mpi[0], why=mpi[0].why + nested_in_slurm), environ)
    if info := Slurm.detect(environ):
        return _with_rank_variables(info, environ)
    if any(name in environ for name in RANK_VARIABLES) and (info := Torchrun.detect(environ)):
        return info
    info = NoLauncher.detect(environ)
    Torchrun.detect(environ)  # raises if MASTER_ADDR or MASTER_PORT is set without RANK
    return info


def _check_same_rank(info: LauncherInfo, other: LauncherInfo) -> None:
    """Raise LaunchError if two launchers disagree on a rank or a size."""
    for field in ("rank", "size", "local_rank", "local_size"):
        a, b = getattr(info, field), getattr(other, field)
        if None not in (a, b) and a != b:
            raise _error(
                f"{info.launcher} says rank {info.rank} of {info.size}, and {other.launcher} rank {other.rank} of "
                f"{other.size}; their {field.replace('_', ' ')}s are {a} and {b}:",
                dict([*info.read, *other.read]),
                (f"unset {' '.join(name for name, _ in other.read)}", f"{info.launcher} alone"),
            )


def _check_enclosing_step(info: LauncherInfo, environ: Environ) -> None:
    """Raise LaunchError if the enclosing step of Slurm cannot be the step in which the daemons of MPI run.

    A step is accepted if its rank and size are those of MPI, or if it has at most one task on each host and at most as
    many tasks as MPI has ranks. Otherwise the variables of MPI, or those of Slurm, are left over from an earlier job.
    """
    if Slurm.step_variable(environ) is None:
        return
    reader = EnvironmentReader(environ)
    rank, tasks = reader.required("SLURM_PROCID"), reader.integer("SLURM_STEP_NUM_TASKS")
    local_rank, counted = reader.integer("SLURM_LOCALID"), reader.text("SLURM_STEP_TASKS_PER_NODE")
    crowded = bool(local_rank) or (
        counted is not None and max(parse_task_counts(counted, "SLURM_STEP_TASKS_PER_NODE")) > 1
    )
    if (rank, tasks) != (info.rank, info.size) and (crowded or (tasks or 1) > info.size):
        reader.values |= dict(info.read)
        raise reader.error(
            f"{info.launcher} says rank {info.rank} of {info.size}, but in a step of Slurm this is task {rank} of "
            f"{tasks}, not a daemon of {info.launcher}, which runs one on each host.",
            ("launch.from_slurm()", f"Slurm alone, if the variables of {info.launcher} are from an earlier job"),
            ("unset SLURM_STEP_ID SLURM_STEPID", f"{info.launcher} alone"),
        )


def _with_rank_variables(info: LauncherInfo, environ: Environ) -> LauncherInfo:
    """``info`` with MASTER_ADDR and MASTER_PORT, and with LOCAL_RANK if the launcher does not set a local rank.

    Raises:
        LaunchError: RANK, WORLD_SIZE, LOCAL_RANK or LOCAL_WORLD_SIZE contradicts the launcher.
    """
    reader = EnvironmentReader(environ)
    numbers = {name: reader.integer(name) for name in RANK_VARIABLES}
    detected = (info.rank, info.size, info.local_rank, info.local_size)
    for (name, number), expected in zip(numbers.items(), detected):
        if None not in (number, expected) and number != expected:
            reader.values |= dict(info.read)
            raise reader.error(
                f"{info.launcher} says {name} should be {expected}, but it is {number}:",
                (f"unset {' '.join(name for name in RANK_VARIABLES if name in environ)}", f"{info.launcher} alone"),
                ("launch.from_torch()", "or the variables set by hand alone"),
            )
    if info.local_rank is None:
        info = replace(info, local_rank=numbers["LOCAL_RANK"])
    return _with_master_address(replace(info, read=(*info.read, *reader.read)), environ)


def _with_master_address(info: LauncherInfo, environ: Environ) -> LauncherInfo:
    """``info`` with the address and the port of MASTER_ADDR and MASTER_PORT, as far as they are set."""
    reader = EnvironmentReader(environ)
    address, port = reader.text("MASTER_ADDR"), reader.integer("MASTER_PORT", at_least=1, at_most=LAST_PORT)
    if address == "":
        raise reader.error("MASTER_ADDR is empty.", ("export MASTER_ADDR=n1", "the host of rank 0"))
    return replace(info, address=address or info.address, port=port or info.port, read=(*info.read, *reader.read))


def detect_one(launcher: type[Launcher], environ: Environ) -> LauncherInfo:
    """The rank of this process according to one launcher, without a comparison with others.

    MASTER_ADDR and MASTER_PORT are used if they are set.

    Raises:
        LaunchError: the launcher did not start this process, or its variables are missing or contradict each other.

    >>> detect_one(OpenMPI, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "1"}).rank
    0
    """
    info = launcher.detect(environ)
    if info is None:
        raise _error(
            f"{launcher.name} did not start this process: none of its variables is set.",
            dict.fromkeys(launcher.marks),
            ("launch.join()", "detects the launcher"),
        )
    return _with_master_address(info, environ)


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


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20
