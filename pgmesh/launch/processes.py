"""Start method of local processes, for ``spawn`` and ``StoreProcess``.

On Linux, processes are forked from a server that has imported torch, so that each starts in milliseconds. On macOS, and
where there is no fork server, each imports torch itself. Like every start method but ``fork``, this imports the main
script again, so the script needs an ``if __name__ == "__main__"`` guard. Without it, Python ends the new process with
an error.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

PRELOAD = ["torch"]  # modules that the fork server imports once

GUARD = """\
  if __name__ == "__main__":   # in a file; not executed when other processes import it
      launch.spawn(main, 4)    # the same for launch.StoreProcess() and for functions that call these"""
"""The end of an error about a process that ended while it started."""


def process_context() -> Any:
    """The multiprocessing context: a fork server that has imported torch, or ``spawn`` if that is unavailable."""
    if sys.platform == "darwin" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")  # forking is unsafe on macOS
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def wait_for_parent() -> None:
    """Return when the parent process has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
