"""Counts of the resources that a process holds: descriptors, threads, memory and entries of torch's tables."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time

from pgmesh.groups import teardown
from tests.support.faults import wait_until
from tests.support.torch_tables import table_sizes

CAN_COUNT = os.path.isdir("/proc/self/fd")
"""True if this machine has /proc, which the counts are read from."""

PF_EXITING = 4
"""Flag of a thread that is exiting, from linux/sched.h; the field is described in proc(5)."""


def count_resources() -> dict[str, int]:
    """Numbers of unfinished collectives, descriptors, threads and entries of torch's tables.

    It waits for the threads that free the groups of aborted meshes.
    """
    teardown.free_finished()
    for thread in threading.enumerate():
        if thread.name == "pgmesh-end":
            thread.join(30.0)
    return {
        "unfinished": len(teardown._kept),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": count_threads(),
        **table_sizes(),
    }


def settled_resources() -> dict[str, int]:
    """The counts once two in a row agree: Gloo ends threads and connections in threads of its own."""
    counts = [count_resources()]

    def agree() -> bool:
        time.sleep(0.02)
        counts.append(count_resources())
        return counts[-1] == counts[-2]

    wait_until(agree, "constant numbers of resources")
    return counts[-1]


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
