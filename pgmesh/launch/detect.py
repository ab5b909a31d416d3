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

import zlib
from dataclasses import replace
from typing import Any

from pgmesh._util.formatting import join_words
from pgmesh._util.validation import number_between
from pgmesh.errors import LaunchError
from pgmesh.launch.launcher import (
    LAST_PORT,
    PORTS,
    Environ,
    Launcher,
    LauncherInfo,
    Variables,
    launch_error,
    parse_port,
)
from pgmesh.launch.slurm import SLURM, is_in_step, is_step_of_daemons, read_step

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
    if launcher is SLURM:
        return is_in_step(environ)
    return any(mark in environ and not (mark in SET_BY_SRUN and is_in_step(environ)) for mark in launcher.marks)


def _compare(info: LauncherInfo, first: Launcher, other: Launcher, environ: Environ) -> LauncherInfo:
    """``info`` of the first launcher, with the local rank of another one if it has none.

    Raises:
        LaunchError: the variables of the other launcher name another rank or size.
    """
    variables = Variables(other, environ)
    if other is SLURM and is_step_of_daemons(variables, info.size):
        return info
    theirs: dict[str, int | None] = {}
    for field in ("rank", "size", "local_rank", "local_size"):
        names = [name for name in getattr(other, field) if name not in first.numbers]
        theirs[field] = variables.number(names)
        if theirs[field] not in (None, getattr(info, field)) and getattr(info, field) is not None:
            raise _disagreement(first, other, environ)
    return replace(info, local_rank=theirs["local_rank"]) if info.local_rank is None else info


def _disagreement(first: Launcher, other: Launcher, environ: Environ) -> LaunchError:
    """The error for two launchers that disagree. It suggests to remove the variables of either one."""
    ways = []
    for dropped, kept in ((other, first), (first, other)):
        names = [name for name in dropped.numbers if name in environ and name not in kept.numbers]
        ways.append((f"unset {' '.join(names)}", f"{kept.name} alone"))
    values = first.values(environ) | other.values(environ)
    return launch_error(f"{first.name} and {other.name} disagree about this process:", values, *ways)


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
        raise launch_error(f"{program} did not start this process.", launcher.values(environ), detect)
    return _read(launcher, environ)


# ---- the rank according to one launcher ----


def _read(launcher: Launcher, environ: Environ) -> LauncherInfo:
    """The rank of this process according to one launcher, and MASTER_ADDR and MASTER_PORT if they are set.

    Raises:
        LaunchError: variables of this launcher are missing, invalid or contradict each other.
    """
    variables = Variables(launcher, environ)
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
        info = read_step(info, variables)
    elif job := next((variables.values[name] for name in launcher.job if name in variables.values), None):
        info = replace(info, port=PORTS[zlib.crc32(job.encode()) % len(PORTS)])
    if rank >= size or (info.local_size or 1) > size or (info.local_rank or 0) >= (info.local_size or size):
        raise variables.error(f"variables of {launcher.name} contradict each other; ranks count from 0.")
    address = "127.0.0.1" if info.local_size == size else info.address
    port = variables.number(("MASTER_PORT",), least=1, most=LAST_PORT)
    return with_address(replace(info, address=address), variables.values.get("MASTER_ADDR"), port)


def _read_without_launcher(environ: Environ) -> LauncherInfo:
    """A world of one, for a process that was started directly.

    Raises:
        LaunchError: this process is the script or the shell of a Slurm job of several tasks.
    """
    job = Variables(SLURM, environ)
    tasks, hosts = job.number(SLURM.size) or 1, job.number(("SLURM_NNODES",)) or 1
    if max(tasks, hosts, 1 + (job.number(SLURM.rank) or 0)) > 1:
        raise launch_error(
            "this Slurm job has several tasks or hosts, but this process is its script or shell, not a task of srun:",
            job.values,
            (SLURM.command, "one rank for each task"),
            ("srun --ntasks 1 python script.py", "a world of 1"),
        )
    why = "this is the script of a Slurm job of one task" if job.values else "no launcher's variables are set"
    return LauncherInfo("no launcher", why, 0, 1, 0, 1, read=tuple(job.values.items()))


# ---- the store ----


def with_address(info: LauncherInfo, host: str | None = None, port: int | None = None) -> LauncherInfo:
    """``info`` with another host and port of rank 0, as far as they are given.

    Raises:
        LaunchError: the port is not a port number.

    >>> with_address(detect_launcher({"PMI_RANK": "3", "PMI_SIZE": "4"}), "n1", 29500).end_point()
    ('n1', 29500)
    """
    address = host.strip("[]") if host else info.address  # the brackets of an IPv6 address are those of a URL
    return replace(info, address=address, port=info.port if port is None else parse_port(port))


def with_replica(info: LauncherInfo, replica: Any, replicas: Any, host: str | None, port: int | None) -> LauncherInfo:
    """``info`` in the world that several launches of as many ranks form, over a store at this host and port.

    Raises:
        LaunchError: there is no such replica, the store is not given, or as ``with_address``.

    >>> info = detect_launcher({"PMI_RANK": "1", "PMI_SIZE": "2"})
    >>> print(with_replica(info, 2, 3, "n1", 29500).line)
    rank 5 of 6: MPICH, because PMI_RANK is set, as replica 2 of 3
    """
    count = number_between(replicas, 1) or 0
    number = number_between(replica, 0, count - 1)
    if number is None or host is None or port is None:  # the launcher's store ends with this replica
        raise LaunchError(
            f"replica is {replica!r}, replicas is {replicas!r}, host is {host!r} and port is {port!r}. A replica is a "
            "launch's number, from 0; host and port are those of the store of all replicas, which no launcher sets.\n\n"
            "  store = launch.StoreProcess(port=29500)   # in a process that starts the replicas\n"
            "  launch.join(replica=0, replicas=3, host='n1', port=29500)   # in the ranks of the first of three"
        )
    why = f"{info.why}, as replica {number} of {count}"
    rank, size = number * info.size + info.rank, count * info.size
    return with_address(replace(info, why=why, rank=rank, size=size, hosts=(), replica=number), host, port)
