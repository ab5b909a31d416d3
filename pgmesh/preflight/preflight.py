"""Stages of ``pgmesh check`` on one rank: join the world, connect all groups, measure them, collect the results.

All ranks run the same stages. An error on one rank ends the check on all ranks at the same stage, with the same text. A
WorldError is different: the store is lost, and each rank raises its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pgmesh._util.formatting import format_ranks
from pgmesh._util.timeouts import call_with_timeout
from pgmesh.errors import LaunchError, MismatchError, MissingRanksError, PgmeshError
from pgmesh.groups.default_world import device_of, world_options
from pgmesh.launch import joining
from pgmesh.launch.detect import detect_launcher
from pgmesh.launch.launcher import LauncherInfo
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.preflight import results
from pgmesh.preflight.diagnosis import explain_store, hosts_store
from pgmesh.preflight.microbenchmarks import LARGE_MESSAGE, SMALL_MESSAGE, Microbenchmarks, ring_links
from pgmesh.preflight.results import CheckResults, RankMeasurements
from pgmesh.preflight.stages import Stages
from pgmesh.topology import host_mapping
from pgmesh.topology.hosts import HostLevel, hosts_from_names, placement_faults


def versions() -> dict[str, str]:
    """The versions that must be the same on all ranks: of pgmesh, torch, and Python without the patch number."""
    return {
        "pgmesh": str(sys.modules["pgmesh"].__version__),
        "torch": str(torch.__version__),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


# -- joining ----------------------------------------------------------------------------------------------------------


def join(backend: str | None, seconds: float) -> None:
    """Join the world. It waits for the store of rank 0 only, so that the first stage can name missing ranks.

    Args:
        backend: name of the backend, as in ``launch.join``.
        seconds: timeout for the store.

    Raises:
        LaunchError: this process cannot join. The text is that of ``pgmesh doctor``.
    """
    if not dist.is_initialized() and (launcher := detect_launcher(os.environ)).needs_store:
        _open_store(launcher, seconds)
    try:
        joining.join(backend, timeout=seconds)
    except PgmeshError:
        raise
    except RuntimeError as error:
        raise LaunchError(f"this rank cannot join: {str(error).splitlines()[0]}") from error


def _open_store(launcher: LauncherInfo, seconds: float) -> None:
    """Open the world's store as soon as rank 0 listens, and host it if this process has to."""
    (host, port), is_host = launcher.end_point(), hosts_store(os.environ, launcher)
    timeout = timedelta(seconds=seconds)
    try:
        store = call_with_timeout(  # torch would wait for the answer of another server without a timeout
            lambda: dist.TCPStore(host, port, is_master=is_host, timeout=timeout, wait_for_workers=False), seconds
        )
    except (OSError, RuntimeError) as error:
        reason = explain_store(os.environ, launcher, seconds, error)
        raise LaunchError(f"rank {launcher.rank} of {launcher.size} cannot join: {reason}") from error
    if is_host:
        HOSTED_STORES.append(store)
        # Otherwise torch would make rank 0 wait for all ranks. torch 2.15 looks at the address too.
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": host, "MASTER_PORT": str(port)}


HOSTED_STORES: list[object] = []
"""The store that this process hosts, if it does. It must live as long as the process, since threads use it."""


# -- the check --------------------------------------------------------------------------------------------------------


@dataclass
class Preflight:
    """The check of a mesh, on one rank.

    Args:
        task: its stages, of all ranks.
        mesh: the mesh to check. It is closed if a backend fails.
        combinations: the combinations of axes whose groups are checked.
        planned: the planned hosts, if they were given.
        sizes: sizes of the all-reduces in bytes.
        repeats: number of timed batches of each kind.
        on_step: called with the name of each step when it begins.
    """

    task: Stages
    mesh: ProcessGroupMesh
    combinations: Sequence[tuple[Axis, ...]]
    planned: HostLevel | None
    sizes: Sequence[int]
    repeats: int
    on_step: Callable[[str], None]

    def run(self) -> CheckResults | None:
        """Connect and measure all groups. Returns the results of all ranks on rank 0, None on other ranks.

        Raises:
            MissingRanksError, MismatchError: the check failed, with the same text on all ranks.
            WorldError: the store does not respond. Other ranks raise when their stage times out.
        """
        task, mesh = self.task, self.mesh
        measured = RankMeasurements(mesh.rank)
        hosts = self._compare_hosts()
        with self._stage("connecting"):
            start = time.monotonic()
            for axes in self.combinations:
                mesh.configure(*axes, timeout=task.seconds)
            mesh.connect(*self.combinations, timeout=task.seconds)
            measured.connect_seconds = time.monotonic() - start
        device = device_of(mesh.group(mesh.axes[0]))
        with self._stage("computing"):
            benchmarks = Microbenchmarks(device, self.repeats, task.seconds)
            measured.compute_seconds = benchmarks.local_compute()
        for axes in self.combinations:
            with self._stage(f"measuring {results.label_of(axes)}"):
                self._measure(axes, benchmarks, measured)
        with self._stage("collecting the results"):
            task.publish(f"measured/{mesh.rank}", json.dumps(vars(measured)))
        return self._collect(hosts, device) if task.rank == 0 else None

    def _collect(self, hosts: list[str], device: torch.device) -> CheckResults:
        """The results of all ranks."""
        task, mesh = self.task, self.mesh
        texts = [task.read(f"measured/{rank}") for rank in range(task.size)]
        measurements = [RankMeasurements(**json.loads(text or "{}")) for text in texts]
        links = results.link_results(measurements, hosts)
        groups = {results.label_of(axes): mesh.partition(*axes) for axes in self.combinations}
        return CheckResults(
            axes=mesh.axes,
            shape=mesh.shape,
            backend=str(world_options().backend),
            device=device.type,
            hosts=hosts,
            planned=self.planned.spell() if self.planned else None,
            bytes=list(self.sizes),
            connect_seconds=max(each.connect_seconds for each in measurements),
            combinations=results.combination_results(measurements, self.sizes, groups),
            links=links,
            ranks=results.rank_results(measurements, links),
        )

    @contextlib.contextmanager
    def _stage(self, activity: str) -> Iterator[None]:
        """Run an activity, then wait twice for all ranks.

        First until it has ended everywhere; then until each has said whether its backend failed.
        """
        self.on_step(activity)
        failure: RuntimeError | None = None
        with self.task.stage(activity):  # if a rank has died, this names it
            try:
                yield
            except PgmeshError:
                raise
            except RuntimeError as error:
                self.mesh.close()  # so that ranks waiting for this one fail too
                failure = error
        with self.task.stage(f"after {activity}"):
            if failure is not None:
                raise MissingRanksError(f"{activity} failed: {str(failure).splitlines()[0]}") from failure

    def _compare_hosts(self) -> list[str]:
        """The name of each rank's host. Hosts of the same name are numbered."""
        with self._stage("comparing hosts"):
            placement = host_mapping.map_hosts(timeout=self.task.seconds)
            names = [placement.host_infos[ranks[0]].host for ranks in placement.hosts]
            names = [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names)]
            hosts = [names[placement.host_of[rank]] for rank in range(self.task.size)]
            if faults := placement_faults(self.planned, hosts) if self.planned else []:
                actual = hosts_from_names(hosts)
                fix = "The ranks of a host are not consecutive: configure the launcher to number them host by host."
                fix = f"The actual hosts are --nodes {actual.spell()}." if actual else fix
                text = "\n  ".join(["ranks are not on the planned hosts:", *faults[:8]])
                raise MismatchError(f"{text}\n\n{fix}")
        return hosts

    def _measure(self, axes: tuple[Axis, ...], benchmarks: Microbenchmarks, measured: RankMeasurements) -> None:
        """Check and measure the group of this rank along some axes."""
        mesh, name = self.mesh, results.label_of(axes)
        group, ranks = mesh.group(*axes), mesh.ranks(*axes)
        measured.all_reduce_seconds[name] = []
        for size in self.sizes:
            measured.all_reduce_seconds[name].append(benchmarks.all_reduce(group, size))
            benchmarks.check_sum(group, ranks, mesh.rank, size, f"group {name} (ranks {format_ranks(ranks)})")
        measured.link_seconds[name] = {}
        for pair in ring_links(ranks):
            if mesh.rank in pair:
                (peer,) = {*pair} - {mesh.rank}
                seconds = [benchmarks.exchange(group, peer, size) for size in (SMALL_MESSAGE, LARGE_MESSAGE)]
                measured.link_seconds[name][str(peer)] = seconds
