"""Stages of ``pgmesh check`` on one rank: join the world, connect all groups, measure them, collect the results.

All ranks run the same stages. An error on one rank ends the check on all ranks at the same stage, with the same text. A
WorldError is different: the store is lost, and each rank raises its own.
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pgmesh import launch
from pgmesh._util.formatting import format_ranks
from pgmesh.errors import LaunchError, MissingRanksError, PgmeshError, WorldError
from pgmesh.groups.world import device_of
from pgmesh.launch.detect import detect_launcher
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.preflight import results
from pgmesh.preflight.diagnosis import call_with_timeout, hosts_store, wait_for_store
from pgmesh.preflight.microbenchmarks import WORKLOAD, Microbenchmarks, link_rounds
from pgmesh.preflight.results import RankMeasurements, Results, axes_name
from pgmesh.preflight.staged_barrier import StagedBarrier

OnStep = Callable[[str], None]


def versions() -> dict[str, str]:
    """The versions that must be the same on all ranks: of pgmesh, torch, and Python without the patch number."""
    return {
        "pgmesh": str(importlib.import_module("pgmesh").__version__),
        "torch": str(torch.__version__),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


HOSTED_STORES: list[object] = []
"""The store that this process hosts, if it does. It must live as long as the process, since threads use it."""


def join(backend: str | None, seconds: float) -> None:
    """Join the world. It waits for the store of rank 0 only, so that the first barrier can name missing ranks.

    Args:
        backend: name of the backend, as in ``launch.join``.
        seconds: timeout for the store.

    Raises:
        LaunchError: this process cannot join. The text is that of ``pgmesh doctor``.
    """
    timeout = timedelta(seconds=seconds)
    launcher = None if dist.is_initialized() else detect_launcher(os.environ)
    if launcher is not None and (launcher.size > 1 or launcher.address is not None):
        (host, port), problem = launcher.end_point(), f"rank {launcher.rank} of {launcher.size} cannot join"
        finding = wait_for_store(os.environ, launcher, seconds)
        if finding is not None:
            raise LaunchError(f"{problem}: {finding.text}\n\n  {finding.fix}")
        if hosts_store(os.environ, launcher):
            try:
                HOSTED_STORES.append(dist.TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False))
            except dist.DistError as error:
                raise LaunchError(f"{problem}: {error}") from error
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # otherwise torch makes rank 0 wait for all ranks
        else:
            client = call_with_timeout(
                lambda: dist.TCPStore(host, port, timeout=timeout, wait_for_workers=False), seconds
            )
            if isinstance(client, Exception):  # torch would wait for an answer without a timeout
                raise LaunchError(
                    f"{problem}: something listens at {host}:{port}, but does not answer like torch's store: "
                    f"{str(client).splitlines()[0]}\n\n  export MASTER_PORT=<the port of rank 0's store>"
                )
    try:
        launch.join(backend, timeout=timeout)
    except RuntimeError as error:
        if isinstance(error, PgmeshError):
            raise
        raise LaunchError(f"this rank cannot join: {str(error).splitlines()[0]}") from error


class Preflight:
    """The check of a mesh, on one rank.

    Args:
        barrier: the staged barrier of all ranks.
        mesh: the mesh to check.
        combinations: the combinations of axes whose groups are checked.
        hosts: the host of each rank.
        sizes: sizes of the all-reduces in bytes.
        repeats: number of timed batches of each kind.
        on_step: called with the name of each step when it begins.
        close_mesh: closes the mesh.
    """

    def __init__(
        self,
        barrier: StagedBarrier,
        mesh: ProcessGroupMesh,
        combinations: Sequence[tuple[Axis, ...]],
        hosts: Sequence[str],
        sizes: Sequence[int],
        repeats: int,
        on_step: OnStep = lambda step: None,
        close_mesh: Callable[[], None] = lambda: None,
    ) -> None:
        self.barrier, self.mesh, self.combinations, self.hosts = barrier, mesh, combinations, hosts
        self.sizes, self.repeats = sizes, repeats
        self.on_step, self.close_mesh = on_step, close_mesh
        self.seconds = timedelta(seconds=barrier.seconds)
        self.measurements = RankMeasurements(mesh.rank)

    @property
    def step_count(self) -> int:
        """Number of calls of ``on_step``."""
        return 2 + len(self.combinations) * (len(self.sizes) + 1)

    def run(self) -> Results | None:
        """Connect and measure all groups. Returns the results of all ranks on rank 0, None on other ranks.

        Raises:
            MissingRanksError, MismatchError, CircleError: the check failed, with the same text on all ranks.
            WorldError: the store does not respond. Other ranks raise when their stage times out.
        """
        self._stage("connecting", self._connect)
        self._stage("computing", self._measure_compute)
        for axes in self.combinations:
            self._stage(f"measuring {axes_name(axes)}", functools.partial(self._measure, axes))
        barrier = self.barrier
        barrier.stage("collecting the results")
        barrier.publish(f"measured/{self.mesh.rank}", self.measurements.to_json())
        barrier.wait()
        return self._combine() if barrier.rank == 0 else None

    def _stage(self, doing: str, work: Callable[[], None]) -> None:
        """Run one stage between two barriers. A failure on one rank fails on all."""
        barrier = self.barrier
        barrier.stage(doing)
        try:
            work()
        except WorldError:
            raise
        except PgmeshError as error:
            raise barrier.fail(error) from error
        except RuntimeError as error:  # from a backend, possibly caused by the death of another rank
            self.close_mesh()  # so that ranks waiting for this one fail too
            text = str(error).splitlines()[0]
            lost = barrier.find_cause(self.mesh.layout.ranks(), f"{barrier.subject}, {doing}")
            raise barrier.fail(lost or MissingRanksError(f"{doing} failed: {text}")) from error
        barrier.wait()

    def _connect(self) -> None:
        self.on_step("connecting")
        start = time.monotonic()
        for axes in self.combinations:
            self.mesh.configure(*axes, timeout=self.seconds)
        self.mesh.connect(*self.combinations, timeout=self.seconds)
        self.measurements.connect_seconds = time.monotonic() - start
        device = device_of(self._group(self.combinations[0]))
        self.benchmarks = Microbenchmarks(device, self.repeats, self.barrier.seconds)

    def _measure_compute(self) -> None:
        self.on_step("computing")
        self.measurements.compute_seconds = median(self.benchmarks.local_compute())

    def _measure(self, axes: tuple[Axis, ...]) -> None:
        mesh, name = self.mesh, axes_name(axes)
        group, ranks = self._group(axes), mesh.ranks(*axes)
        label = f"group {name} (ranks {format_ranks(ranks)})"
        self.benchmarks.check_members(group, ranks, mesh.rank, self.barrier.size, label)
        times = self.measurements.all_reduces[name] = []
        for size in self.sizes:
            self.on_step(f"{name}: {results.format_bytes(size)}")
            times.append(median(self.benchmarks.all_reduce(group, size)))
            self.benchmarks.check_sum(group, mesh.index(*axes), len(ranks), size, label)
        self.on_step(f"{name}: links")
        links = self.measurements.links[name] = {}
        for pairs in link_rounds(ranks):
            for pair in pairs:
                if mesh.rank in pair:
                    (peer,) = {*pair} - {mesh.rank}
                    sizes = (WORKLOAD.small_message, WORKLOAD.large_message)
                    links[peer] = [median(self.benchmarks.exchange(group, peer, size)) for size in sizes]

    def _group(self, axes: tuple[Axis, ...]) -> Any:
        return self.mesh.group(*axes)

    def _combine(self) -> Results:
        texts = [self.barrier.read(f"measured/{rank}") for rank in range(self.barrier.size)]
        measurements = [RankMeasurements.from_json(text or "{}") for text in texts]
        groups = {axes_name(axes): list(self.mesh.partition(*axes)) for axes in self.combinations}
        return results.combine(measurements, self.sizes, groups, self.hosts)
