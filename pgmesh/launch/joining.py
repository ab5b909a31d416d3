"""Have torch.distributed initialised as the launcher says."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist

from pgmesh._util.formatting import format_calls
from pgmesh.errors import LaunchError
from pgmesh.launch.detect import LauncherInfo, OpenMPI, Slurm, Torchrun, detect_launcher, detect_one, with_address
from pgmesh.options import Timeout, to_timedelta

log = logging.getLogger("pgmesh")


def join(
    backend: str | None = None,
    *,
    timeout: Timeout | None = None,
    host: str | None = None,
    port: int | None = None,
) -> None:
    """Have torch.distributed initialised, however this process was started.

    Under torchrun, srun or an MPI launcher that is the launcher's world; started by hand, a world of one. One that is
    there already stays. A line in the log, of level INFO, says which launcher was believed and why.

    Args:
        backend: as torch names it; by default "nccl", on the device of the local rank, where there is CUDA, else
            "gloo".
        timeout: how long to wait for the other ranks, here and in each collective of the default group: a timedelta
            or a number of seconds; by default what torch allows the backend.
        host: by which name or address the others reach rank 0. By default MASTER_ADDR, else what the launcher tells:
            the first host of srun's step, or this one where all ranks are on it.
        port: one that is free there, where rank 0 hosts the world's store. By default MASTER_PORT, else one that is
            made of the number of Slurm's or Open MPI's job, from 20000 to 29999.

    Raises:
        LaunchError: the launchers' variables are incomplete or contradict each other, nothing tells where rank 0 is,
            the local rank names no device, a timeout is not more than 0, or the world cannot be reached.

    Example: a script that calls join() is started in any of these ways.

        python script.py                          # a world of 1
        torchrun --nproc-per-node 8 script.py     # a world of 8
        srun -n 8 python script.py
        mpirun -n 8 python script.py
    """
    if not dist.is_initialized():
        _initialize(with_address(detect_launcher(os.environ), host, port), backend, timeout)


def from_torch(backend: str | None = None, *, timeout: Timeout | None = None) -> None:
    """The same, by the variables of torchrun alone: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.

    Raises:
        LaunchError: they are incomplete or contradict each other, or the world cannot be reached.
    """
    if not dist.is_initialized():
        _initialize(detect_one(Torchrun, os.environ), backend, timeout)


def from_slurm(
    host: str | None = None, port: int | None = None, *, backend: str | None = None, timeout: Timeout | None = None
) -> None:
    """The same, by Slurm's variables alone: this process is a task of srun.

    Args:
        host: as in ``join``; by default MASTER_ADDR, else the first host of the step.
        port: as in ``join``; by default MASTER_PORT, else one made of the numbers of the job and the step.
        backend: as in ``join``.
        timeout: as in ``join``.

    Raises:
        LaunchError: srun did not start this process, its variables contradict each other, or the world cannot be
            reached.
    """
    if not dist.is_initialized():
        _initialize(with_address(detect_one(Slurm, os.environ), host, port), backend, timeout)


def from_openmpi(
    host: str | None = None, port: int | None = None, *, backend: str | None = None, timeout: Timeout | None = None
) -> None:
    """The same, by Open MPI's variables alone: this process was started by mpirun.

    Args:
        host: as in ``join``; has to be given where ranks are on several hosts.
        port: as in ``join``; by default MASTER_PORT, else one made of the number of the job.
        backend: as in ``join``.
        timeout: as in ``join``.

    Raises:
        LaunchError: mpirun did not start this process, its variables contradict each other, or the world cannot be
            reached.
    """
    if not dist.is_initialized():
        _initialize(with_address(detect_one(OpenMPI, os.environ), host, port), backend, timeout)


def _initialize(info: LauncherInfo, backend: str | None, timeout: Timeout | None) -> None:
    limit = None if timeout is None else to_timedelta(timeout, LaunchError)
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if info.size == 1 and info.address is None:
        log.info("joins as %s", info.line)
        _set_device(info, backend)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        return
    host, port = info.end_point()
    log.info("joins as %s; rank 0 is at %s:%d", info.line, host, port)
    _set_device(info, backend)
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{f'[{host}]' if ':' in host else host}:{port}",
            rank=info.rank,
            world_size=info.size,
            timeout=limit,
        )
    except dist.DistError as error:
        where = f"rank {info.rank} of {info.size} could not join at {host}:{port}"
        raise LaunchError(f"{where}: {error}") from error


def _set_device(info: LauncherInfo, backend: str) -> None:
    """Use the device of the local rank. What srun's binding of devices makes of it is untested."""
    if "nccl" not in backend:
        return
    seen, local_rank = torch.cuda.device_count(), info.local_rank
    if local_rank is None:
        raise info.error(
            f"{info.launcher} does not say which rank of its host this is, nor which of {seen} CUDA devices it has.",
            ('join("gloo")', "ranks that need none"),
            ("export LOCAL_RANK=...", "or the number of this one's"),
        )
    if seen == 1 and info.launcher == Slurm.name:
        local_rank = 0  # Slurm binds one to each task
    if local_rank >= seen:
        name = "LOCAL_RANK" if "LOCAL_RANK" in dict(info.read) else "the local rank"
        ways = [(f"torchrun --nproc-per-node {seen} script.py", "a rank for each device")] * (seen > 0)
        ways.append(('join("gloo")', "or ranks that need none" if seen else "ranks that need none"))
        raise LaunchError(f"{name} is {local_rank}, but this process sees {seen} CUDA devices.\n\n{format_calls(ways)}")
    torch.cuda.set_device(local_rank)
