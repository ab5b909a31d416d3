"""The pauses, timeouts and limits of what ranks do through the store, as two constants that tests can replace.

Code reads ``timing.TIMING.x`` at call time and keeps no copy. This file imports nothing of pgmesh.
"""

from __future__ import annotations

from typing import NamedTuple


class Timing(NamedTuple):
    """Pauses and timeouts in seconds.

    Args:
        first_pause: the first pause between two reads of the store. Each pause is 1.5 times the one before.
        longest_pause: the upper limit of these pauses.
        first_inspection: the wait until a rank first reads the arrivals and statuses of the missing ranks. A mismatch
            is found after this wait, and the others read it within one ``longest_pause``, so within 0.1 s.
        inspection: the interval between two such inspections.
        warn_in_connect: the longest wait in ``connect`` until a rank logs what it waits for. After a third of a shorter
            deadline it does so earlier.
        heartbeat: the interval of heartbeats in a world of up to ``Limits.full_rate_ranks`` ranks. In a larger world
            it grows in proportion, so that the store receives no more heartbeats per second.
        missed_heartbeats: the number of heartbeats that a rank misses before it counts as lost.
        answer: the timeout for one connection to the listener of another process.
    """

    first_pause: float = 0.002
    longest_pause: float = 0.05
    first_inspection: float = 0.025
    inspection: float = 0.2
    warn_in_connect: float = 2.0
    heartbeat: float = 1.0
    missed_heartbeats: float = 5.0
    answer: float = 0.5


TIMING = Timing()


class Limits(NamedTuple):
    """Sizes and counts that bound the load on the store.

    Args:
        record_chars: the longest record, in characters. A longer value was not written by pgmesh.
        statuses: the number of missing ranks whose status one inspection reads, and the number of ranks that a status
            reports as missing, or as members of a group.
        named: the number of missing ranks whose status a message has.
        asking: the number of members of a group that ask the listeners of missing ones, which have little room.
        counters: the number of groups whose operations a status counts.
        full_rate_ranks: the largest world in which heartbeats have the interval ``Timing.heartbeat``.
    """

    record_chars: int = 1 << 18
    statuses: int = 32
    named: int = 8
    asking: int = 8
    counters: int = 64
    full_rate_ranks: int = 1024


LIMITS = Limits()


def pace(world_size: int) -> float:
    """The factor by which heartbeats, pauses and inspections are slower in a large world; 1 in others."""
    return max(1.0, world_size / LIMITS.full_rate_ranks)


def heartbeat_period(world_size: int) -> float:
    """Seconds between two heartbeats in a world of that size."""
    return TIMING.heartbeat * pace(world_size)
