"""Where the ranks of the world are."""

from __future__ import annotations

from datetime import timedelta

from pgmesh.options import Timeout
from pgmesh.topology.host_mapping import Placement, map_hosts


def placement(*, timeout: Timeout = timedelta(seconds=30)) -> Placement:
    """On which host each rank of the world is: every rank calls it, and none assumes rank // 8.

    The ranks say it themselves, once in a world; a later call is answered from what is known.

    Args:
        timeout: how long to wait for the others: a timedelta or a number of seconds.

    Raises:
        MissingRanksError: some ranks did not call it in time.
        OptionsError: a timeout that is not more than 0.
        WorldError: torch.distributed is not initialised, or the world's store does not answer.

    Example: the ranks of the running mesh are in one process, on one host.

        >>> placement().hosts
        ((0, 1, 2, 3, 4, 5, 6, 7),)
    """
    return map_hosts(timeout=timeout)
