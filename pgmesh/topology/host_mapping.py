"""The host mapping: the host of each rank, as the ranks report it. It is never derived from the rank's number.

Each rank publishes one line in the world's store, once per world, and reads the lines of the others:

    pgmesh/hosts          one line per rank: its rank, its host's name and boot id
    pgmesh/hosts/count    the number of lines
"""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pgmesh._util.formatting import format_ranks, name_ranks
from pgmesh.errors import MissingRanksError
from pgmesh.groups.backends import backends_of
from pgmesh.groups.registry import store_thread
from pgmesh.groups.world import world_options, world_rank_and_size
from pgmesh.layout import Axis, Layout
from pgmesh.options import Timeout, to_timedelta
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.operations import Add, Append, Operation, Read
from pgmesh.rendezvous.records import pack, unpack
from pgmesh.topology.hosts import HostLevel
from pgmesh.topology.locality import Locality, locality_of

HOSTS_KEY = "pgmesh/hosts"

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""The kernel's boot id: equal in all containers of a host, different on every other host."""


@dataclass(frozen=True)
class HostInfo:
    """The host of one rank, as the rank reports it."""

    host: str
    boot: str  # the boot id of the host; "" if the system has none


@dataclass(frozen=True)
class Placement:
    """The host of each rank.

    >>> placed = Placement({rank: HostInfo("ab"[rank % 2], "") for rank in range(4)})
    >>> placed.hosts, placed.host_of(3), placed.host_infos[3].host
    (((0, 2), (1, 3)), 1, 'b')
    """

    host_infos: Mapping[int, HostInfo]

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, ordered by the lowest rank. All containers of a host count as one."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self.host_infos):
            info = self.host_infos[rank]
            found.setdefault(info.boot or info.host, []).append(rank)
        return tuple(map(tuple, found.values()))

    @cached_property
    def _host_of(self) -> dict[int, int]:
        return {rank: number for number, ranks in enumerate(self.hosts) for rank in ranks}

    def host_of(self, rank: int) -> int:
        """The index of a rank's host in ``hosts``."""
        return self._host_of[rank]

    def locality(self, layout: Layout, *axes: Axis) -> Locality:
        """The locality of the groups along some axes of a layout; without axes, of the whole layout.

        Raises:
            AxisError: there is no such axis, or it is named twice.
        """
        order = sorted(layout.ranks(), key=lambda rank: (self.host_of(rank), rank))
        sizes = [len(list(ranks)) for _, ranks in groupby(order, self.host_of)]
        level = HostLevel("host", tuple((len(list(same)), size) for size, same in groupby(sizes)))
        position = {rank: i for i, rank in enumerate(order)}
        moved = tuple(position[rank] for rank in layout.ranks())
        straight = range(len(moved))
        box = dict(zip(layout.axes, layout.shape))
        return locality_of(Layout.of(box, straight if moved == tuple(straight) else moved), axes or layout.axes, level)


_worlds: weakref.WeakKeyDictionary[Any, dict[int, HostInfo]] = weakref.WeakKeyDictionary()
"""The host infos that this process has read or published in each world."""


def map_hosts(ranks: Iterable[int] | None = None, *, timeout: Timeout) -> Placement:
    """The hosts of these ranks, or of all ranks of the world. Each of the ranks has to call it.

    In a world of one rank, or with the fake backend, all ranks are on this host and nothing is published.

    Args:
        ranks: ranks of the world; all of them if None.
        timeout: the timeout for the other ranks, a timedelta or a number of seconds.

    Raises:
        MissingRanksError: some ranks did not call it in time.
        OptionsError: the timeout is not positive.
        WorldError: there is no world, or its store does not answer.
    """
    seconds = to_timedelta(timeout).total_seconds()
    me, size = world_rank_and_size()
    wanted = range(size) if ranks is None else tuple(ranks)
    if size == 1 or backends_of(world_options().backend).fake:
        return Placement(dict.fromkeys(wanted, _this_host()))
    world: Any = dist.group.WORLD
    known = _worlds.setdefault(world, {})
    if not known.keys() >= {*wanted}:
        _exchange(known, me, wanted, seconds)
    return Placement({rank: known[rank] for rank in wanted})


def _exchange(known: dict[int, HostInfo], me: int, wanted: range | tuple[int, ...], seconds: float) -> None:
    """Publish this rank's line, then poll the store until the lines of all wanted ranks are read."""
    deadline = time.monotonic() + seconds

    def run(*operations: Operation) -> list[Any]:
        return store_thread().run(*operations, seconds=max(deadline - time.monotonic(), 1.0))

    if me not in known:
        mine = _this_host()
        run(Append(HOSTS_KEY, f"{pack(rank=me, host=mine.host, boot=mine.boot)}\n"), Add(f"{HOSTS_KEY}/count"))
        known[me] = mine
    pause, seen = timing.TIMING.first_pause, 0
    while True:
        count = int(run(Read(f"{HOSTS_KEY}/count"))[0] or 0)
        left = deadline - time.monotonic()
        if left <= 0 or count >= max(len(wanted), seen + 1):  # enough lines, and more than at the last read
            seen = count
            known.update(_parse_lines(run(Read(HOSTS_KEY))[0]))
        missing = [rank for rank in wanted if rank not in known]
        if not missing:
            return
        if left <= 0:
            raise MissingRanksError(
                f"{name_ranks(missing)} of {format_ranks(wanted)} did not report their hosts within {seconds:g} s. "
                "Each of them has to call mesh.hosts() or mesh.locality() too."
            )
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, timing.TIMING.longest_pause)


def _parse_lines(lines: bytes | None) -> dict[int, HostInfo]:
    records = [unpack(line, rank=int, host=str, boot=str) for line in (lines or b"").splitlines()]
    return {record["rank"]: HostInfo(record["host"], record["boot"]) for record in records if record is not None}


def _this_host() -> HostInfo:
    """The host info of this process."""
    try:
        boot = BOOT.read_text().strip()
    except OSError:
        boot = ""
    return HostInfo(socket.gethostname(), boot)
