"""On which host each rank is, as the ranks themselves say: nobody assumes rank // 8.

Each rank that is asked posts a line of its own, once in a world, and reads those of the others:

    pgmesh/seats          a line from each: its rank, its host's name and boot, its local rank
    pgmesh/seats/count    how many there are
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
from pgmesh.errors import LaunchError, MissingRanksError, PlaceError
from pgmesh.groups.backends import backends_of
from pgmesh.groups.cache import store_thread
from pgmesh.groups.world import world_options, world_rank_and_size
from pgmesh.launch.detect import detect_launcher
from pgmesh.layout import Axis, Layout
from pgmesh.options import Timeout, to_timedelta
from pgmesh.rendezvous import timing
from pgmesh.rendezvous.protocol import Add, Append, Read, pack, unpack
from pgmesh.topology.hosts import Level
from pgmesh.topology.locality import Locality, spread

HOSTS_KEY = "pgmesh/seats"

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""The same in all containers of a machine, and of no other machine."""


@dataclass(frozen=True)
class HostInfo:
    """Where one rank is, as it says itself."""

    host: str
    boot: str  # of the machine; "" where the system has no such number
    local_rank: int | None  # as its launcher says; None where that does not


@dataclass(frozen=True)
class Placement:
    """On which host each rank is.

    >>> seats = {rank: HostInfo("ab"[rank % 2], "", rank // 2) for rank in range(4)}
    >>> placed = Placement(seats)
    >>> placed.hosts, placed.host_of(3), placed.seats[3].host
    (((0, 2), (1, 3)), 1, 'b')
    >>> print(placed)
    2 hosts of 2: a holds ranks 0, 2; b holds ranks 1, 3
    """

    seats: Mapping[int, HostInfo]

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, by the lowest of them. All containers of a machine are one host."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self.seats):
            seat = self.seats[rank]
            found.setdefault(seat.boot or seat.host, []).append(rank)
        return tuple(map(tuple, found.values()))

    @cached_property
    def _host_of(self) -> dict[int, int]:
        return {rank: number for number, ranks in enumerate(self.hosts) for rank in ranks}

    def host_of(self, rank: int) -> int:
        """The number of a rank's host, in the order of ``hosts``.

        Raises:
            PlaceError: no such rank was placed.
        """
        try:
            return self._host_of[rank]
        except KeyError:
            raise PlaceError(f"rank {rank} was not placed; those are {format_ranks(sorted(self.seats))}.") from None

    def spread(self, layout: Layout, *axes: Axis) -> Locality:
        """How the groups along some axes of a layout lie on the hosts.

        Raises:
            AxisError: there is no such axis, or it is named twice.
            PlaceError: the layout has a rank that was not placed.
        """
        order = sorted(layout.ranks(), key=lambda rank: (self.host_of(rank), rank))
        sizes = [len(list(ranks)) for _, ranks in groupby(order, self.host_of)]
        level = Level("host", tuple((len(list(same)), size) for size, same in groupby(sizes)))
        position = {rank: i for i, rank in enumerate(order)}
        moved = tuple(position[rank] for rank in layout.ranks())
        straight = range(len(moved))
        box = dict(zip(layout.axes, layout.shape))
        return spread(Layout.of(box, straight if moved == tuple(straight) else moved), axes or layout.axes, level)

    def __str__(self) -> str:
        sizes = tuple((len(list(same)), size) for size, same in groupby(map(len, self.hosts)))
        names = [f"{self.seats[ranks[0]].host} holds {name_ranks(ranks)}" for ranks in self.hosts]
        more = f"; and {len(names) - 8} more" if len(names) > 8 else ""
        return f"{Level('host', sizes)}: {'; '.join(names[:8])}{more}"


class _WorldHosts:
    """What is known in one world of where its ranks are."""

    def __init__(self) -> None:
        self.posting = threading.Lock()
        self.posted = False
        self.known: dict[int, HostInfo] = {}


_worlds: weakref.WeakKeyDictionary[Any, _WorldHosts] = weakref.WeakKeyDictionary()


def place(ranks: Iterable[int] | None = None, *, timeout: Timeout) -> Placement:
    """Where these ranks are, each of which asks too; all of the world, unless given.

    In a dry world, which is this process alone, all are here.

    Raises:
        MissingRanksError: some did not ask in time.
        OptionsError: a timeout that is not more than 0.
        WorldError: there is no world, or its store does not answer.
    """
    seconds = to_timedelta(timeout).total_seconds()
    me, size = world_rank_and_size()
    wanted = range(size) if ranks is None else tuple(ranks)
    if size == 1 or backends_of(world_options().backend).fake:
        return Placement(dict.fromkeys(wanted, _own()))
    world: Any = dist.group.WORLD
    seats = _worlds.setdefault(world, _WorldHosts())
    if not all(rank in seats.known for rank in wanted):
        _exchange(seats, me, wanted, seconds)
    return Placement({rank: seats.known[rank] for rank in wanted})


def _exchange(seats: _WorldHosts, me: int, wanted: range | tuple[int, ...], seconds: float) -> None:
    end = time.monotonic() + seconds

    def ask(step: Any) -> Any:
        return store_thread().ask(step, max(end - time.monotonic(), 1.0))

    with seats.posting:
        if not seats.posted:
            own = _own()
            line = pack(rank=me, host=own.host, boot=own.boot, local=-1 if own.local_rank is None else own.local_rank)
            ask(Append(HOSTS_KEY, f"{line}\n"))
            ask(Add(f"{HOSTS_KEY}/count"))
            seats.posted = True
    pause, seen = timing.TIMING.first_pause, 0
    while True:
        count = int(ask(Read(f"{HOSTS_KEY}/count")) or 0)
        if count > seen and count >= len(wanted):
            seen = count
            seats.known |= _read(ask(Read(HOSTS_KEY)))
            if all(rank in seats.known for rank in wanted):
                return
        left = end - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, timing.TIMING.longest_pause)
    seats.known |= _read(ask(Read(HOSTS_KEY)))
    missing = [rank for rank in wanted if rank not in seats.known]
    if missing:
        raise MissingRanksError(
            f"{name_ranks(missing)} of {format_ranks(wanted)} did not say on which host they are, in "
            f"{seconds:g} s. Each of them has to ask too."
        )


def _read(lines: bytes | None) -> dict[int, HostInfo]:
    records = [unpack(line, rank=int, host=str, boot=str, local=int) for line in (lines or b"").splitlines()]
    return {
        record["rank"]: HostInfo(record["host"], record["boot"], None if record["local"] < 0 else record["local"])
        for record in records
        if record is not None
    }


def _own() -> HostInfo:
    """Where this process is."""
    try:
        boot = BOOT.read_text().strip()
    except OSError:
        boot = ""
    try:
        local_rank = detect_launcher(os.environ).local_rank
    except LaunchError:  # one launcher was named where several contradict each other
        local_rank = None
    return HostInfo(socket.gethostname(), boot, local_rank)
