"""Counts of the resources that a process holds: descriptors, threads, memory and entries of torch's tables."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable, Sequence

from tests.support.faults import WAIT_TIMEOUT
from tests.support.torch_tables import c10d, table_sizes

CAN_COUNT = os.path.isdir("/proc/self/fd")
"""True if this machine has /proc, which the counts are read from."""

PF_EXITING = 4
"""Flag of a thread that is exiting, from linux/sched.h; the field is described in proc(5)."""


def count_resources() -> dict[str, int]:
    """Numbers of descriptors, threads and entries of torch's tables."""
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": count_threads(), **table_sizes()}


def count_with_keys() -> dict[str, int]:
    """The resources of this process, and the number of keys in the store, but for those of ``connect``."""
    store = c10d._get_default_store()
    keys = store.list_keys() if hasattr(store, "list_keys") else []  # torch 2.9 cannot list keys
    return {**count_resources(), "keys": sum("/connect/" not in str(key) for key in keys)}


def growth(
    earlier: Sequence[dict[str, int]],
    count: Callable[[], dict[str, int]] = count_resources,
    timeout: float | None = None,
) -> dict[str, int]:
    """What ``count`` finds more than the lowest earlier count, once it does not fall to it within the timeout.

    Gloo ends threads and connections in threads of its own, so that a count may still fall; a leak never does.
    """
    lowest = {what: min(each[what] for each in earlier) for what in earlier[0]}

    def more() -> dict[str, int]:
        now = count()
        return {what: now[what] - number for what, number in lowest.items() if now[what] > number}

    end = time.monotonic() + (WAIT_TIMEOUT if timeout is None else timeout)
    while (found := more()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def count_threads() -> int:
    """Number of threads, without those that are exiting: a joined thread may be listed for a moment."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{thread}/stat") as file:
            flags = int(file.read().rpartition(")")[2].split()[6])
            count += not flags & PF_EXITING
    return count


def resident_kib() -> int:
    """Resident memory in KiB, after garbage collection and after malloc returned its free memory."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
