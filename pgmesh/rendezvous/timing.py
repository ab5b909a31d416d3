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
        ask_again: the time until a rank asks the listener of another one again.
        heartbeat: the interval of heartbeats in a world of up to ``Limits.full_rate_ranks`` ranks. In a larger world
            it grows in proportion, so that the store receives no more heartbeats per second.
        missed_heartbeats: the number of heartbeats that a rank misses before it counts as lost.
        thread_check: the interval at which a waiting caller checks that the store thread is alive.
        world_end: the time after which a rank that was about to delete the name of its world counts as dead.
        warn_in_collective: the wait in a collective until the rank logs the members that did not reach it.
        status_after: the wait in a group's first collective until the rank publishes its status.
        report_missing: the time beyond a deadline for finding out which ranks are missing.
        store_silence: the time without any packet of the store's host until the connection to it is opened again.
        late_answer: the timeout of a store operation that begins after the deadline of ``connect``, and of opening a
            connection to the store.
        interrupted_answer: the timeout for the final status message of an interrupted rank.
        insist: the time for which the store thread repeats a task that fails. Afterwards the store counts as ended.
        shortest_answer: the shortest timeout of a store operation that begins before the deadline.
        report_answer: the timeout of ``mesh.report``.
    """

    first_pause: float = 0.002
    longest_pause: float = 0.05
    first_inspection: float = 0.025
    inspection: float = 0.2
    ask_again: float = 0.3
    warn_in_connect: float = 2.0
    heartbeat: float = 1.0
    missed_heartbeats: float = 5.0
    thread_check: float = 0.5
    world_end: float = 1.0
    warn_in_collective: float = 10.0
    status_after: float = 1.0
    report_missing: float = 1.0
    store_silence: float = 5.0
    late_answer: float = 5.0
    interrupted_answer: float = 0.2
    insist: float = 60.0
    shortest_answer: float = 0.5
    report_answer: float = 1.0


TIMING = Timing()


class Limits(NamedTuple):
    """Sizes and counts that bound the load on the store.

    Args:
        record_chars: the longest record, in characters. A longer value was not written by pgmesh.
        statuses: the number of missing ranks whose status one inspection reads, the number of members of a group that
            are watched in a collective, and the number of ranks that a status reports as missing. A longer circle of
            waiting ranks is not stated.
        named: the number of missing ranks whose status a message has.
        asking: the number of members of a group that ask the listeners of missing ones, which have little room.
        shared_addresses: the largest group whose members publish their addresses in the arrivals. Each member
            receives all addresses with the decision.
        published_names: the number of meshes that a process publishes for a process that replaces it, the last ones.
        full_rate_ranks: the largest world in which heartbeats have the interval ``Timing.heartbeat``.
    """

    record_chars: int = 1 << 18
    statuses: int = 32
    named: int = 8
    asking: int = 8
    shared_addresses: int = 64
    published_names: int = 256
    full_rate_ranks: int = 1024


LIMITS = Limits()


def pace(world_size: int) -> float:
    """The factor by which heartbeats, pauses and inspections are slower in a large world; 1 in others."""
    return max(1.0, world_size / LIMITS.full_rate_ranks)


def heartbeat_period(world_size: int) -> float:
    """Seconds between two heartbeats in a world of that size."""
    return TIMING.heartbeat * pace(world_size)
