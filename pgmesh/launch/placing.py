"""The host of each rank of the world."""

from __future__ import annotations

from datetime import timedelta

from pgmesh.options import Timeout
from pgmesh.topology.host_mapping import Placement, map_hosts


def placement(*, timeout: Timeout = timedelta(seconds=30)) -> Placement:
    """The host of each rank of the world, as published by the ranks themselves. Every rank must call it.

    The ranks exchange it once; later calls return the same result without communication.

    Args:
        timeout: limit for the exchange, as a timedelta or a number of seconds.

    Raises:
        MissingRanksError: some ranks did not call it in time.
        OptionsError: the timeout is not positive.
        WorldError: torch.distributed is not initialized, or the store of the world does not answer.

    Example: all ranks of the running mesh are on one host.

        >>> placement().hosts
        ((0, 1, 2, 3, 4, 5, 6, 7),)
    """
    return map_hosts(timeout=timeout)
