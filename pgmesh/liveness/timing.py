"""The heartbeats and limits of what ranks do through the store. Tests replace ``HEARTBEAT``: no code keeps a copy."""

from __future__ import annotations

from pgmesh.groups.world import pace

HEARTBEAT = 1.0
"""Seconds between two heartbeats in a world of up to ``FULL_RATE_RANKS`` ranks. In a larger one the interval grows in
proportion, so that the store receives no more heartbeats per second."""

MISSED_HEARTBEATS = 5
"""The number of heartbeats that a rank misses before it counts as lost, unless ``abort_when_lost`` was given more."""

MOST_STATUSES = 32
"""The number of ranks whose status one inspection reads, and that a status names as members of a group."""

MOST_NAMED = 8
"""The number of ranks that a message describes."""


def heartbeat_period(world_size: int) -> float:
    """Seconds between two heartbeats in a world of that size."""
    return HEARTBEAT * pace(world_size)
