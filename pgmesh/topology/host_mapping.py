"""The host mapping: the host of each rank, as the ranks report it. It is never derived from the rank's number.

Each rank publishes one line in the world's store, once per world, and reads the lines of the others:

    pgmesh/hosts          one line per rank: its rank, its host's name and boot id, its local rank
    pgmesh/hosts/count    the number of lines
"""

from __future__ import annotations

import os
import socket
import threading
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
from pgmesh.errors import LaunchError, MissingRanksError, RankError
from pgmesh.groups.backends import backends_of
from pgmesh.groups.registry import store_thread
from pgmesh.groups.world import world_options, world_rank_and_size
from pgmesh.launch.detect import detect_launcher
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
    local_rank: int | None  # from the launcher; None if it sets none


@dataclass(frozen=True)
class Placement:
    """The result of ``pgmesh.launch.placement``: the host of each rank.

    >>> host_infos = {rank: HostInfo("ab"[rank % 2], "", rank // 2) for rank in range(4)}
    >>> placed = Placement(host_infos)
    >>> placed.hosts, placed.host_of(3), placed.host_infos[3].host
    (((0, 2), (1, 3)), 1, 'b')
    >>> print(placed)
    2 hosts of 2: a holds ranks 0, 2; b holds ranks 1, 3
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
        """The index of a rank's host in ``hosts``.

        Raises:
            RankError: the host of this rank is not known.
        """
        try:
            return self._host_of[rank]
        except KeyError:
            known = name_ranks(sorted(self.host_infos))
            raise RankError(f"the host of rank {rank} is unknown; this placement has {known}.") from None

    def locality(self, layout: Layout, *axes: Axis) -> Locality:
        """The locality of the groups along some axes of a layout; without axes, of the whole layout.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            RankError: the host of a rank of the layout is not known.
        """
        order = sorted(layout.ranks(), key=lambda rank: (self.host_of(rank), rank))
        sizes = [len(list(ranks)) for _, ranks in groupby(order, self.host_of)]
        level = HostLevel("host", tuple((len(list(same)), size) for size, same in groupby(sizes)))
        position = {rank: i for i, rank in enumerate(order)}
        moved = tuple(position[rank] for rank in layout.ranks())
        straight = range(len(moved))
        box = dict(zip(layout.axes, layout.shape))
        return locality_of(Layout.of(box, straight if moved == tuple(straight) else moved), axes or layout.axes, level)

    def __str__(self) -> str:
        sizes = tuple((len(list(same)), size) for size, same in groupby(map(len, self.hosts)))
        names = [f"{self.host_infos[ranks[0]].host} holds {name_ranks(ranks)}" for ranks in self.hosts]
        more = f"; and {len(names) - 8} more" if len(names) > 8 else ""
        return f"{HostLevel('host', sizes)}: {'; '.join(names[:8])}{more}"


class _WorldHosts:
    """The host infos that this process has read in one world."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.published = False
        self.known: dict[int, HostInfo] = {}


_worlds: weakref.WeakKeyDictionary[Any, _WorldHosts] = weakref.WeakKeyDictionary()


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
    hosts = _worlds.setdefault(world, _WorldHosts())
    if not all(rank in hosts.known for rank in wanted):
        _exchange(hosts, me, wanted, seconds)
    return Placement({rank: hosts.known[rank] for rank in wanted})


def _exchange(hosts: _WorldHosts, me: int, wanted: range | tuple[int, ...], seconds: float) -> None:
    """Publish this rank's line, then poll the store until the lines of all wanted ranks are read."""
    deadline = time.monotonic() + seconds

    def run(*operations: Operation) -> list[Any]:
        return store_thread().run(*operations, seconds=max(deadline - time.monotonic(), 1.0))

    with hosts.lock:
        if not hosts.published:
            mine = _this_host()
            line = pack(
                rank=me, host=mine.host, boot=mine.boot, local=-1 if mine.local_rank is None else mine.local_rank
            )
            run(Append(HOSTS_KEY, f"{line}\n"), Add(f"{HOSTS_KEY}/count"))
            hosts.published = True
    pause, seen = timing.TIMING.first_pause, 0
    while True:
        count = int(run(Read(f"{HOSTS_KEY}/count"))[0] or 0)
        left = deadline - time.monotonic()
        if left <= 0 or (count > seen and count >= len(wanted)):
            seen = count
            hosts.known |= _parse_lines(run(Read(HOSTS_KEY))[0])
            missing = [rank for rank in wanted if rank not in hosts.known]
            if not missing:
                return
            if left <= 0:
                raise MissingRanksError(
                    f"{name_ranks(missing)} of {format_ranks(wanted)} did not report their hosts within "
                    f"{seconds:g} s. Each of them has to call launch.placement() or mesh.locality() too."
                )
        time.sleep(min(pause, max(left, 0.0)))
        pause = min(pause * 1.5, timing.TIMING.longest_pause)


def _parse_lines(lines: bytes | None) -> dict[int, HostInfo]:
    records = [unpack(line, rank=int, host=str, boot=str, local=int) for line in (lines or b"").splitlines()]
    return {
        record["rank"]: HostInfo(record["host"], record["boot"], None if record["local"] < 0 else record["local"])
        for record in records
        if record is not None
    }


def _this_host() -> HostInfo:
    """The host info of this process."""
    try:
        boot = BOOT.read_text().strip()
    except OSError:
        boot = ""
    try:
        local_rank = detect_launcher(os.environ).local_rank
    except LaunchError:  # launchers contradict each other; the local rank is then unknown
        local_rank = None
    return HostInfo(socket.gethostname(), boot, local_rank)
