"""How processes of this machine are started."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

PRELOAD = ["__main__", "torch"]  # imported once, by the server that ranks are forked from


def context() -> Any:
    """How processes are started: forked off a server that has torch imported, they start at once."""
    forks = "forkserver" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"  # not safe on macOS
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(PRELOAD)
    return context
