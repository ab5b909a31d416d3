"""Initialization of torch.distributed with the rank, the size and the address that the launcher sets."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pgmesh import torch_private
from pgmesh._util.validation import is_name, number_between
from pgmesh.errors import LaunchError, WorldError
from pgmesh.groups import world as worlds
from pgmesh.launch.detect import BY_HAND, OPEN_MPI, detect_launcher, detect_one, with_address, with_replica
from pgmesh.launch.launcher import LauncherInfo
from pgmesh.launch.slurm import SLURM
from pgmesh.options import GroupOptions, Timeout, to_timedelta

log = logging.getLogger("pgmesh")


class World:
    """Result of ``join``, ``fake_world`` and ``open_world``. In a ``with`` statement, the end of the block closes it.

    A world that another call initialized is kept.
    """

    def __init__(self, own: bool, core: worlds.World | None = None) -> None:
        self.rank, self.size = (core.rank, core.size) if core else (dist.get_rank(), dist.get_world_size())
        self.name = core.name if core else ""
        self._core = core
        self._world: Any = dist.group.WORLD if own else None

    @property
    def core(self) -> worlds.World:
        """The state of pgmesh about this process in the world."""
        return self._core or worlds.current_world()

    def close(self) -> None:
        """Leave this world, and end its groups."""
        if self.name:
            self.core.close()
        elif dist.is_initialized() and dist.group.WORLD is self._world:
            dist.destroy_process_group()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(
    backend: str | None = None,
    *,
    timeout: Timeout | None = None,
    host: str | None = None,
    port: int | None = None,
    replica: int | None = None,
    replicas: int | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> World:
    """Initialize torch.distributed under any launcher: torchrun, srun, mpirun or none.

    Without a launcher, the world has one rank; with ``rank``, ``size``, ``host`` and ``port``, as in actors of Ray, no
    launcher is looked for. If torch.distributed is already initialized, nothing changes. The detected launcher and the
    reason are logged at level INFO. The call by itself initializes the world until the process ends;
    ``with launch.join():`` destroys it at the end of the block, unless it was there before.

    With ``replica`` and ``replicas``, several launches of n ranks each form one world, one for each replica group. A
    launcher that ends all its ranks when one fails then ends one replica, and can start it anew. Rank r of replica i
    is rank i * n + r of the world. Without a launcher, n is 1. The store is at ``host`` and ``port``, in a process
    that outlives the ranks, such as a StoreProcess. So that a new rank does not wait for the others as it joins,
    TORCH_GLOO_LAZY_INIT is 1 meanwhile: torch's default group on Gloo then connects at its first use.

    With PGMESH_REPORT=1 in its environment, each rank publishes from here on where it is, for ``pgmesh report``.

    Args:
        backend: name of the backend, as in torch. Default: "nccl" if CUDA is available, on the device of the local
            rank; otherwise "gloo".
        timeout: limit for this call and for each collective of the default group, as a timedelta or a number of
            seconds. torch may look for the store for almost twice as long. Default: torch's for the backend.
        host: name or address of rank 0's host. Default: MASTER_ADDR; if not set, 127.0.0.1 if all ranks are on one
            host, or the first host of srun's step.
        port: a free port on that host, for the store of the world, which rank 0 hosts. Default: MASTER_PORT; if not
            set, a port from 20000 to 29999 that depends on the number of the job (Slurm, Open MPI, PALS, PMIx).
        replica: number of this launch among the ``replicas``, from 0. ``host`` and ``port`` are those of the store.
        replicas: number of launches that form the world. All have the same number of ranks.
        rank: this process's rank, in place of a launcher's. With several devices, LOCAL_RANK is this one's number.
        size: number of ranks.

    Raises:
        LaunchError: the launcher's variables are incomplete or contradict each other, or the host or the port of rank
            0 or of the store is unknown. Also if no device has the local rank's number, the timeout is not positive,
            there is no such replica, or joining fails.
        WorldError: launches of replicas have different numbers of ranks.

    Example: a script that calls join() can be started in any of these ways.

        python script.py                          # a world of 1
        torchrun --nproc-per-node 8 script.py     # a world of 8
        srun -n 8 python script.py
        mpirun -n 8 python script.py
    """
    if rank is not None or size is not None:
        if replica is not None or replicas is not None:
            raise LaunchError(
                f"rank is {rank!r}, size is {size!r}, replica is {replica!r} and replicas is {replicas!r}: a launcher "
                "gives the rank in a replica.\n\n"
                "  launch.join(rank=0, size=4, host='n1', port=29500)   # rank 0 of all ranks, without a launcher"
            )
        return _initialize(
            lambda: _by_hand(rank, size, host, port, "launch.join(", needs_address=size != 1), backend, timeout
        )
    if dist.is_initialized() or (replica is None and replicas is None):
        return _initialize(lambda: with_address(detect_launcher(os.environ), host, port), backend, timeout)
    environ = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    detected = detect_launcher(environ)
    given = os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "")
    os.environ["TORCH_GLOO_LAZY_INIT"] = given or "1"  # else torch's default group would wait for all other ranks
    try:
        return _initialize(lambda: with_replica(detected, replica, replicas, host, port), backend, timeout)
    finally:
        if not given:  # lazy groups of ``new_group`` may wait for each other at their first use
            del os.environ["TORCH_GLOO_LAZY_INIT"]


def open_world(
    name: str,
    *,
    rank: int,
    size: int,
    host: str | None = None,
    port: int | None = None,
    store: dist.Store | None = None,
    backend: str | None = None,
    timeout: Timeout | None = None,
) -> World:
    """A world of its own, beside torch's default one or without one: ``ProcessGroupMesh(world=...)`` has its ranks.

    For processes that have different default worlds, such as a trainer and an inference engine. Groups, ``connect``,
    ``report``, ``shrink`` and errors speak of this world's ranks. It ends by ``close``, and not when torch's default
    world does. Several may share a store.

    Args:
        name: identifies the world, the same on every rank. Keys in the store and names of groups begin with it.
        rank: this process's rank in this world, from 0.
        size: number of ranks.
        host: name or address of the host of rank 0, which hosts the store.
        port: a free port there.
        store: a store of torch that all ranks reach, in place of ``host`` and ``port``.
        backend: as in ``join``.
        timeout: limit for this call and default limit of each collective. Default: torch's for the backend.

    Raises:
        LaunchError: the arguments are incomplete, or the store does not answer.
        NameTakenError: this process is in a world of this name, or has closed one on this store, whose keys stay.
        WorldError: another rank has entered the world with another size.

    >>> with open_world("sync", rank=0, size=1, store=dist.HashStore(), backend="gloo") as sync:
    ...     ProcessGroupMesh(1, world=sync).group().size()
    1
    """
    if not is_name(name):
        raise LaunchError(f"a world's name is a printable string without '/', such as 'sync', not {name!r}.")
    backend = backend or _default_backend()
    limit = torch_private.default_timeout(backend) if timeout is None else to_timedelta(timeout, LaunchError)
    info = _by_hand(rank, size, host, port, f"launch.open_world({name!r}, ", needs_address=store is None)
    if store is None:
        is_host = info.rank == 0
        try:
            store = dist.TCPStore(*info.end_point(), info.size, is_host, limit, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            raise LaunchError(f"rank {rank} of {size} could not enter world {name!r}: {error}") from error
    core = worlds.open_world(name, store, info.rank, info.size, GroupOptions(backend=backend, timeout=limit))
    _publish_status(core)
    return World(own=True, core=core)


def _by_hand(
    rank: Any, size: Any, host: str | None, port: int | None, call: str, *, needs_address: bool
) -> LauncherInfo:
    """This place in a world, without a launcher.

    Raises:
        LaunchError: it is incomplete.
    """
    count = number_between(size, 1) or 0
    number = number_between(rank, 0, count - 1)
    if number is None or (needs_address and (host is None or port is None)):
        raise LaunchError(
            f"rank is {rank!r}, size is {size!r}, host is {host!r} and port is {port!r}: they go together.\n\n"
            f"  {call}rank=0, size=4, host='n1', port=29500)   # rank 0 of 4, on host n1"
        )
    variables = {"RANK": f"{number}", "WORLD_SIZE": f"{count}", "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
    return with_address(detect_one(BY_HAND, variables), host, port)


def from_torch(backend: str | None = None, *, timeout: Timeout | None = None) -> World:
    """Initialize torch.distributed from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT alone.

    Args:
        backend: as in ``join``.
        timeout: as in ``join``.

    Raises:
        LaunchError: the variables are incomplete or contradict each other, or joining fails.
    """
    return _initialize(lambda: detect_one(BY_HAND, os.environ), backend, timeout)


def from_slurm(
    host: str | None = None, port: int | None = None, *, backend: str | None = None, timeout: Timeout | None = None
) -> World:
    """Initialize torch.distributed from the variables of Slurm alone, in a task of srun.

    Args:
        host: as in ``join``. Default: MASTER_ADDR; if not set, the first host of the step.
        port: as in ``join``. Default: MASTER_PORT; if not set, a port that depends on the numbers of job and step.
        backend: as in ``join``.
        timeout: as in ``join``.

    Raises:
        LaunchError: srun did not start this process, its variables contradict each other, or joining fails.
    """
    return _initialize(lambda: with_address(detect_one(SLURM, os.environ), host, port), backend, timeout)


def from_openmpi(
    host: str | None = None, port: int | None = None, *, backend: str | None = None, timeout: Timeout | None = None
) -> World:
    """Initialize torch.distributed from the variables of Open MPI alone, in a process that mpirun started.

    Args:
        host: as in ``join``. Required if the ranks are on several hosts and MASTER_ADDR is not set.
        port: as in ``join``. Default: MASTER_PORT; if not set, a port that depends on the number of the job.
        backend: as in ``join``.
        timeout: as in ``join``.

    Raises:
        LaunchError: mpirun did not start this process, its variables contradict each other, or joining fails.
    """
    return _initialize(lambda: with_address(detect_one(OPEN_MPI, os.environ), host, port), backend, timeout)


def _initialize(detect: Callable[[], LauncherInfo], backend: str | None, timeout: Timeout | None) -> World:
    """Choose the backend and the device, and call ``init_process_group``; nothing if there is a world already."""
    if dist.is_initialized():
        _publish_status()
        return World(own=False)
    info = detect()
    limit = None if timeout is None else to_timedelta(timeout, LaunchError)
    backend = backend or _default_backend()
    _set_device(info, backend)
    if unknown := [name for name in backend.split(",") if not dist.is_backend_available(name.rpartition(":")[2])]:
        raise LaunchError(f"torch has no backend {unknown[0]!r} here.")
    where = ""
    if info.needs_store:
        where = "{}:{}".format(*info.end_point())
        hosted = "rank 0" if info.replica is None else "the store"
        log.info("joins as %s; %s is at %s", info.line, hosted, where)
    else:
        log.info("joins as %s", info.line)
    try:
        store = _store_keywords(info, limit)
        dist.init_process_group(backend, rank=info.rank, world_size=info.size, timeout=limit, **store)
    except (RuntimeError, ValueError) as error:  # ValueError: no host can have this name
        problem = f"rank {info.rank} of {info.size} could not join{where and f' at {where}'}: {error}"
        fix = "Check the host and its interfaces with: pgmesh doctor"
        if isinstance(error, dist.DistError):
            started = f"all {info.size} ranks have" if info.replica is None else "the store has"
            fix = f"Check that {started} started, with this host and port."
        raise LaunchError(f"{problem}\n\n{fix}") from error
    if info.replica is not None:  # the launches may have different numbers of ranks
        try:
            worlds.current_world().check_size()
        except WorldError:
            dist.destroy_process_group()
            raise
    _publish_status()
    return World(own=True)


def _default_backend() -> str:
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def _publish_status(world: worlds.World | None = None) -> None:
    """Publish where this rank is, for ``pgmesh report``, if PGMESH_REPORT=1 asks for that."""
    if os.environ.get("PGMESH_REPORT") == "1":
        from pgmesh.liveness.liveness import liveness_of  # here: joining needs no thread

        liveness_of(world or worlds.current_world())


def _store_keywords(info: LauncherInfo, limit: timedelta | None) -> dict[str, Any]:
    """The keywords by which ``init_process_group`` gets the store."""
    if not info.needs_store:
        return {"store": dist.HashStore()}
    host, port = info.end_point()
    is_ours = info.replica is None  # rank 0 hosts it, unless torchrun's agent or a StoreProcess does, at its own port
    is_elsewhere = os.environ.get("MASTER_PORT") != str(port)
    if is_ours and not (is_elsewhere and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
        return {"init_method": f"tcp://{f'[{host}]' if ':' in host else host}:{port}"}
    # torch would let rank 0 host a replicas' store, and no rank one that is elsewhere than the agent's. Some versions
    # add torchrun's number of restarts to the keys.
    seconds = limit or timedelta(minutes=5)  # torch's default
    is_host = is_ours and info.rank == 0
    return {"store": dist.TCPStore(host, port, info.size, is_host, seconds, wait_for_workers=is_ours)}


def _set_device(info: LauncherInfo, backend: str) -> None:
    """Select the CUDA device of the local rank, if the backend uses NCCL. Untested with devices that srun binds."""
    if "nccl" not in backend.lower():
        return
    device_count, local_rank = torch.cuda.device_count(), info.local_rank
    if device_count == 0:
        raise info.error("this process sees no CUDA device.", ('launch.join("gloo")', "ranks without a device"))
    if local_rank is None:
        raise info.error(
            f"{info.launcher} sets no local rank, so it is unknown which of {device_count} CUDA devices it uses.",
            ('launch.join("gloo")', "ranks without a device"),
            (f"export LOCAL_RANK={info.rank % device_count}", "or the number of this rank's device"),
        )
    if device_count == 1 and info.launcher == SLURM.name:
        local_rank = 0  # Slurm can make only one device visible to each task
    if local_rank >= device_count:
        raise info.error(
            f"the local rank is {local_rank}, but this process sees {device_count} CUDA devices.",
            (f"torchrun --nproc-per-node {device_count} script.py", "a rank for each device"),
            ('launch.join("gloo")', "or ranks without a device"),
        )
    torch.cuda.set_device(local_rank)
