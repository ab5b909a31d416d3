"""What a process holds, beside its program: the ledger of what faults and cycles leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os

from pgmesh import groups
from tests.support.torch_tables import table_sizes

CAN_COUNT = os.path.isdir("/proc/self/fd")
"""Whether this machine tells what a process holds."""

PF_EXITING = 4
"""Linux's flag of a thread that ends: in linux/sched.h, and in proc(5) for the field."""


def count_resources() -> dict[str, int]:
    """How many descriptors, threads, entries of torch's tables, and collectives that hang."""
    groups.sweep()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": count_threads(),
        "stranded": len(groups._stranded),
        **table_sizes(),
    }


def count_threads() -> int:
    """How many threads there are, but those that end: who was joined may stand in the list for a moment yet."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{thread}/stat") as file:
            flags = int(file.read().rpartition(")")[2].split()[6])
            count += not flags & PF_EXITING
    return count


def resident_kib() -> int:
    """KiB of memory that is in use: garbage is collected, and what malloc keeps for later is handed back."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
