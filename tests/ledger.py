"""What a process holds, beside its program: the ledger of what faults and cycles leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os

from pgmesh import groups
from tests.torch_seam import tables

COUNTED = os.path.isdir("/proc/self/fd")
"""Whether this machine tells what a process holds."""


def held() -> dict[str, int]:
    """How many descriptors, threads, entries of torch's tables, and collectives that hang."""
    groups.sweep()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "stranded": len(groups._stranded),
        **tables(),
    }


def resident() -> int:
    """KiB of memory that is in use: garbage is collected, and what malloc keeps for later is handed back."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
