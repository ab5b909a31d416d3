"""Stages of ``pgmesh check`` on one rank: join the world, connect all groups, measure them, collect the results.

All ranks run the same stages. An error on one rank ends the check on all ranks at the same stage, with the same text. A
WorldError is different: the store is lost, and each rank raises its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from pgmesh._util.formatting import format_ranks
from pgmesh.errors import LaunchError, MissingRanksError, PgmeshError
from pgmesh.groups.world import device_of
from pgmesh.launch import joining
from pgmesh.launch.detect import detect_launcher
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.preflight import results
from pgmesh.preflight.diagnosis import call_with_timeout, hosts_store, wait_for_store
from pgmesh.preflight.microbenchmarks import LARGE_MESSAGE, SMALL_MESSAGE, Microbenchmarks, link_rounds
from pgmesh.preflight.results import RankMeasurements, Results, axes_name
from pgmesh.preflight.staged_barrier import StagedBarrier


def versions() -> dict[str, str]:
    """The versions that must be the same on all ranks: of pgmesh, torch, and Python without the patch number."""
    return {
        "pgmesh": str(sys.modules["pgmesh"].__version__),
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
        is_host = hosts_store(os.environ, launcher)
        store = call_with_timeout(  # torch would wait for an answer without a timeout
            lambda: dist.TCPStore(host, port, is_master=is_host, timeout=timeout, wait_for_workers=False), seconds
        )
        if isinstance(store, Exception):
            text = f"something listens at {host}:{port}, but does not answer like torch's store: "
            text += f"{str(store).splitlines()[0]}\n\n  export MASTER_PORT=<the port of rank 0's store>"
            raise LaunchError(f"{problem}: {store if is_host else text}")
        if is_host:
            HOSTED_STORES.append(store)
            # Otherwise torch would make rank 0 wait for all ranks. torch 2.15 looks at the address too.
            os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    try:
        joining.join(backend, timeout=timeout)
    except PgmeshError:
        raise
    except RuntimeError as error:
        raise LaunchError(f"this rank cannot join: {str(error).splitlines()[0]}") from error


@dataclass
class Preflight:
    """The check of a mesh, on one rank.

    Args:
        barrier: the staged barrier of all ranks.
        mesh: the mesh to check. It is closed if a backend fails.
        combinations: the combinations of axes whose groups are checked.
        hosts: the host of each rank.
        sizes: sizes of the all-reduces in bytes.
        repeats: number of timed batches of each kind.
        on_step: called with the name of each step when it begins, and with the number of steps if it is known.
    """

    barrier: StagedBarrier
    mesh: ProcessGroupMesh
    combinations: Sequence[tuple[Axis, ...]]
    hosts: Sequence[str]
    sizes: Sequence[int]
    repeats: int
    on_step: Callable[..., None]

    def run(self) -> Results | None:
        """Connect and measure all groups. Returns the results of all ranks on rank 0, None on other ranks.

        Raises:
            MissingRanksError, MismatchError, CircleError: the check failed, with the same text on all ranks.
            WorldError: the store does not respond. Other ranks raise when their stage times out.
        """
        barrier, mesh = self.barrier, self.mesh
        measured = RankMeasurements(mesh.rank)
        with self._stage("connecting"):
            self.on_step("connecting", total=3 + len(self.combinations) * (len(self.sizes) + 1))
            start = time.monotonic()
            for axes in self.combinations:
                mesh.configure(*axes, timeout=barrier.seconds)
            mesh.connect(*self.combinations, timeout=barrier.seconds)
            measured.connect_seconds = time.monotonic() - start
        with self._stage("computing"):
            self.on_step("computing")
            device = device_of(mesh.group(*self.combinations[0]))
            benchmarks = Microbenchmarks(device, self.repeats, barrier.seconds)
            measured.compute_seconds = median(benchmarks.local_compute())
        for axes in self.combinations:
            with self._stage(f"measuring {axes_name(axes)}"):
                self._measure(axes, benchmarks, measured)
        with self._stage("collecting the results"):
            barrier.publish(f"measured/{mesh.rank}", json.dumps(vars(measured)))
        if barrier.rank > 0:
            return None
        texts = [barrier.read(f"measured/{rank}") for rank in range(barrier.size)]
        measurements = [RankMeasurements(**json.loads(text or "{}")) for text in texts]
        groups = {axes_name(axes): mesh.partition(*axes) for axes in self.combinations}
        return results.combine(measurements, self.sizes, groups, self.hosts)

    @contextlib.contextmanager
    def _stage(self, activity: str) -> Iterator[None]:
        """Run one stage between two barriers. A failure of the backend on one rank fails on all."""
        barrier = self.barrier
        with barrier.stage(activity):
            try:
                yield
            except PgmeshError:
                raise
            except RuntimeError as error:  # from a backend, possibly caused by the death of another rank
                self.mesh.close()  # so that ranks waiting for this one fail too
                lost = barrier.find_cause(self.mesh.layout.ranks(), f"{barrier.subject}, {activity}")
                raise lost or MissingRanksError(f"{activity} failed: {str(error).splitlines()[0]}") from error

    def _measure(self, axes: tuple[Axis, ...], benchmarks: Microbenchmarks, measured: RankMeasurements) -> None:
        """Check and measure the group of this rank along some axes."""
        mesh, name = self.mesh, axes_name(axes)
        group, ranks = mesh.group(*axes), mesh.ranks(*axes)
        label = f"group {name} (ranks {format_ranks(ranks)})"
        benchmarks.check_members(group, ranks, mesh.rank, self.barrier.size, label)
        times = measured.all_reduces[name] = []
        for size in self.sizes:
            self.on_step(f"{name}: {results.format_bytes(size)}")
            times.append(median(benchmarks.all_reduce(group, size)))
            benchmarks.check_sum(group, mesh.index(*axes), len(ranks), size, label)
        self.on_step(f"{name}: links")
        for pair in itertools.chain.from_iterable(link_rounds(ranks)):
            if mesh.rank in pair:
                (peer,) = {*pair} - {mesh.rank}
                seconds = [median(benchmarks.exchange(group, peer, size)) for size in (SMALL_MESSAGE, LARGE_MESSAGE)]
                measured.links.append((name, peer, seconds))
