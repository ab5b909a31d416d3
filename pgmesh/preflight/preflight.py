"""The check before an expensive job: all ranks come, stand where they are planned, connect, and measure.

Every rank calls ``preflight``; it is over for all of them in one way, at the same stage.
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
from pgmesh.preflight.diagnosis import hosts_store, in_time, wait_for_store
from pgmesh.preflight.microbenchmarks import LARGE, SMALL, Probe, rounds
from pgmesh.preflight.results import Measured, Record, name_of
from pgmesh.preflight.staged_barrier import StagedBarrier

Advance = Callable[[str], None]


def versions() -> dict[str, str]:
    """The versions that have to be the same on all ranks: pgmesh's, torch's, and Python's without its last number."""
    return {
        "pgmesh": str(importlib.import_module("pgmesh").__version__),
        "torch": str(torch.__version__),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


STORES: list[object] = []
"""The store that this process hosts, if it does. It lives as long as the process, whose threads use it to the end."""


def join(backend: str | None, seconds: float) -> None:
    """Join the world, and wait for no other rank: the roll call names those that do not come.

    Raises:
        LaunchError: this process cannot join. It says what ``pgmesh doctor`` says.
    """
    timeout = timedelta(seconds=seconds)
    if not dist.is_initialized() and ((found := detect_launcher(os.environ)).size > 1 or found.address is not None):
        (host, port), who = found.end_point(), f"rank {found.rank} of {found.size} cannot join"
        problem = wait_for_store(os.environ, found, seconds)
        if problem is not None:
            raise LaunchError(f"{who}: {problem.says}\n\n  {problem.mend}")
        if hosts_store(os.environ, found):
            try:
                STORES.append(dist.TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False))
            except dist.DistError as error:
                raise LaunchError(f"{who}: {error}") from error
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # else torch's rank 0 waits, and names nobody
        else:
            answer = in_time(lambda: dist.TCPStore(host, port, timeout=timeout, wait_for_workers=False), seconds)
            if isinstance(answer, Exception):  # torch's own join would wait for it without end
                raise LaunchError(
                    f"{who}: something listens at {host}:{port}, and does not answer as torch's store does: "
                    f"{str(answer).splitlines()[0]}\n\n  export MASTER_PORT=<the port of rank 0's store>"
                )
    try:
        launch.join(backend, timeout=timeout)
    except RuntimeError as error:
        if isinstance(error, PgmeshError):
            raise
        raise LaunchError(f"this rank cannot join: {str(error).splitlines()[0]}") from error


class Preflight:
    """One rank's part in a check of a mesh.

    Args:
        hall: where all ranks meet.
        mesh: what is checked.
        families: the axes of each family.
        hosts: the host of each rank.
        sizes: of the all-reduces, in bytes.
        repeats: how many batches of each kind are timed.
        advance: told of each step that begins.
        let_go: closes the mesh.
    """

    def __init__(
        self,
        hall: StagedBarrier,
        mesh: ProcessGroupMesh,
        families: Sequence[tuple[Axis, ...]],
        hosts: Sequence[str],
        sizes: Sequence[int],
        repeats: int,
        advance: Advance = lambda step: None,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        self.hall, self.mesh, self.families, self.hosts = hall, mesh, families, hosts
        self.sizes, self.repeats = sizes, repeats
        self.advance, self.let_go = advance, let_go
        self.seconds = timedelta(seconds=hall.seconds)
        self.record = Record(mesh.rank)

    @property
    def steps(self) -> int:
        """How often ``advance`` is called."""
        return 2 + len(self.families) * (len(self.sizes) + 1)

    def run(self) -> Measured | None:
        """Connect, measure, and put together what all ranks measured; only the first rank is given it.

        Raises:
            MissingRanksError, MismatchError, CircleError, WorldError: what is wrong, the same on all ranks.
        """
        self._stage("connecting", self._connect)
        self._stage("working alone", self._work_alone)
        for axes in self.families:
            self._stage(f"measuring {name_of(axes)}", functools.partial(self._measure, axes))
        hall = self.hall
        hall.stage("telling what was measured")
        hall.put(f"measured/{self.mesh.rank}", self.record.pack())
        hall.meet()
        return self._put_together() if hall.rank == 0 else None

    def _stage(self, doing: str, work: Callable[[], None]) -> None:
        """Work that ranks do with one another. What fails on one fails on all."""
        hall = self.hall
        hall.stage(doing)
        try:
            work()
        except WorldError:
            raise
        except PgmeshError as error:
            raise hall.give_up(error) from error
        except RuntimeError as error:  # a backend's: perhaps another rank's end was its reason
            self.let_go()  # so that those who wait for this rank learn of it
            says = str(error).splitlines()[0]
            lost = hall.lost(self.mesh.layout.ranks(), f"{hall.subject}, {doing}")
            raise hall.give_up(lost or MissingRanksError(f"{doing} failed: {says}")) from error
        hall.meet()

    def _connect(self) -> None:
        self.advance("connecting")
        start = time.monotonic()
        for axes in self.families:
            self.mesh.configure(*axes, timeout=self.seconds)
        self.mesh.connect(*self.families, timeout=self.seconds)
        self.record.connected = time.monotonic() - start
        self.probe = Probe(device_of(self._group(self.families[0])), self.repeats, self.hall.seconds)

    def _work_alone(self) -> None:
        self.advance("working alone")
        self.record.own = median(self.probe.own_work())

    def _measure(self, axes: tuple[Axis, ...]) -> None:
        mesh, name = self.mesh, name_of(axes)
        group, ranks, words = (
            self._group(axes),
            mesh.ranks(*axes),
            f"group {name} (ranks {format_ranks(mesh.ranks(*axes))})",
        )
        self.probe.check_members(group, ranks, mesh.rank, self.hall.size, words)
        times = self.record.times[name] = []
        for size in self.sizes:
            self.advance(f"{name}: {results.in_bytes(size)}")
            times.append(median(self.probe.all_reduce(group, size)))
            self.probe.check_sum(group, mesh.index(*axes), len(ranks), size, words)
        self.advance(f"{name}: links")
        links = self.record.links[name] = {}
        for together in rounds(ranks):
            for pair in together:
                if mesh.rank in pair:
                    (peer,) = {*pair} - {mesh.rank}
                    links[peer] = [median(self.probe.exchange(group, peer, size)) for size in (SMALL, LARGE)]

    def _group(self, axes: tuple[Axis, ...]) -> Any:
        return self.mesh.group(*axes)

    def _put_together(self) -> Measured:
        texts = [self.hall.look(f"measured/{rank}") for rank in range(self.hall.size)]
        records = [Record.unpack(text or "{}") for text in texts]
        blocks = {name_of(axes): list(self.mesh.partition(*axes)) for axes in self.families}
        return results.put_together(records, self.sizes, blocks, self.hosts)
