"""The host mapping: the host of each rank, as the ranks report it. It is never derived from the rank's number.

Each rank publishes one line in the world's store, once per world, and reads the lines of the others:

    pgmesh/hosts          one line per rank: its rank, its host's name and boot id
    pgmesh/hosts/count    the number of lines
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from pgmesh._util.formatting import as_range, format_ranks, name_ranks
from pgmesh.connect.rounds import pauses
from pgmesh.errors import MissingRanksError
from pgmesh.groups.backends import backends_of
from pgmesh.groups.world import World, current_world
from pgmesh.layout import Axis, Layout
from pgmesh.liveness.client import CallClient
from pgmesh.liveness.operations import Add, Append, Read
from pgmesh.liveness.records import pack
from pgmesh.options import Timeout, to_timedelta
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

    @property
    def identity(self) -> str:
        """The same text on all ranks of the host, also in its containers."""
        return self.boot or self.host


@dataclass(frozen=True)
class Placement:
    """The host of each rank.

    >>> placed = Placement({rank: HostInfo("ab"[rank % 2], "") for rank in range(4)})
    >>> placed.hosts, placed.host_of[3], placed.host_infos[3].host
    (((0, 2), (1, 3)), 1, 'b')
    """

    host_infos: Mapping[int, HostInfo]

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, ordered by the lowest rank. All containers of a host count as one."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self.host_infos):
            found.setdefault(self.host_infos[rank].identity, []).append(rank)
        return tuple(map(tuple, found.values()))

    @cached_property
    def host_of(self) -> dict[int, int]:
        """The index of each rank's host in ``hosts``."""
        return {rank: number for number, ranks in enumerate(self.hosts) for rank in ranks}

    def locality(self, layout: Layout, *axes: Axis) -> Locality:
        """The locality of the groups along some axes of a layout; without axes, of the whole layout.

        Raises:
            AxisError: there is no such axis, or it is named twice.
        """
        order = sorted(layout.ranks(), key=lambda rank: (self.host_of[rank], rank))
        sizes = [len(list(ranks)) for _, ranks in groupby(order, self.host_of.get)]
        level = HostLevel("host", tuple((len(list(same)), size) for size, same in groupby(sizes)))
        position = {rank: i for i, rank in enumerate(order)}
        moved = tuple(position[rank] for rank in layout.ranks())
        by_host = Layout.of(dict(zip(layout.axes, layout.shape)), as_range(moved) or moved)
        return locality_of(by_host, axes or layout.axes, level)


class KnownHosts:
    """The host infos that this process has read or published in a world, by rank."""

    def __init__(self, world: World) -> None:
        self.by_rank: dict[int, HostInfo] = {}


def map_hosts(ranks: Iterable[int] | None = None, *, timeout: Timeout, world: World | None = None) -> Placement:
    """The hosts of these ranks, or of all ranks of the world. Each of the ranks has to call it.

    In a world of one rank, or with the fake backend, all ranks are on this host and nothing is published.

    Args:
        ranks: ranks of the world; all of them if None.
        timeout: the timeout for the other ranks, a timedelta or a number of seconds.
        world: the world. Default: torch's default one.

    Raises:
        MissingRanksError: some ranks did not call it in time.
        OptionsError: the timeout is not positive.
        WorldError: there is no world, or its store does not answer.
    """
    seconds, world = to_timedelta(timeout).total_seconds(), world or current_world()
    wanted = range(world.size) if ranks is None else tuple(ranks)
    if world.size == 1 or backends_of(world.options.backend).fake:
        return Placement(dict.fromkeys(wanted, this_host()))
    known = world.state_of(KnownHosts).by_rank
    if not known.keys() >= {*wanted}:
        _exchange(known, world, wanted, seconds)
    return Placement({rank: known[rank] for rank in wanted})


def _exchange(known: dict[int, HostInfo], world: World, wanted: range | tuple[int, ...], seconds: float) -> None:
    """Publish this rank's line, then poll the store until the lines of all wanted ranks are read."""
    client, me = CallClient(world, seconds), world.rank
    if me not in known:
        mine = this_host()
        client.run(Append(HOSTS_KEY, f"{pack(rank=me, host=mine.host, boot=mine.boot)}\n"), Add(f"{HOSTS_KEY}/count"))
        known[me] = mine
    pause, seen, is_late = pauses(client.pace), 0, False
    while missing := [rank for rank in wanted if rank not in known]:
        if is_late:
            raise MissingRanksError(
                f"{name_ranks(missing)} of {format_ranks(wanted)} did not report their hosts within {seconds:g} s. "
                "Each of them has to call mesh.hosts() or mesh.locality() too."
            )
        client.sleep(next(pause))
        is_late = client.now() >= seconds
        count = int(client.run(Read(f"{HOSTS_KEY}/count"))[0] or 0)
        if is_late or count >= max(len(wanted), seen + 1):  # enough lines, and more than at the last read
            seen = count
            known.update(_parse_lines(client.run(Read(HOSTS_KEY))[0]))


def _parse_lines(lines: bytes | None) -> dict[int, HostInfo]:
    records = [json.loads(line) for line in (lines or b"").splitlines()]
    return {record["rank"]: HostInfo(record["host"], record["boot"]) for record in records}


def this_host() -> HostInfo:
    """The host info of this process."""
    try:
        boot = BOOT.read_text().strip()
    except OSError:
        boot = ""
    return HostInfo(socket.gethostname(), boot)
