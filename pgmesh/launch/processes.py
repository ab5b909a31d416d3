"""Start method of local processes, for ``spawn`` and ``StoreProcess``.

On Linux, processes are forked from a server that has imported torch, so that each starts in milliseconds. On macOS, and
where there is no fork server, each imports torch itself. Like every start method but ``fork``, this imports the main
script again, so the script needs an ``if __name__ == "__main__"`` guard.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from pgmesh.errors import LaunchError

PRELOAD = ["torch"]  # modules that the fork server imports once

NAME_PREFIX = "pgmesh "
"""Prefix of the names of all processes that are started here."""

EXIT_UNGUARDED = 79
"""Exit status of a process whose import of the main script would start processes again."""

AT_MODULE_LEVEL = '# at module level, above `if __name__ == "__main__":`'


def process_context() -> Any:
    """The multiprocessing context: a fork server that has imported torch, or ``spawn`` if that is unavailable.

    Raises:
        LaunchError: the main script lacks a guard, or cannot be imported by other processes.
    """
    me = multiprocessing.current_process()
    if getattr(me, "_inheriting", False):  # private to multiprocessing; True while it imports the main script
        if me.name.startswith(NAME_PREFIX):
            os._exit(EXIT_UNGUARDED)  # the parent raises the error, once for all its processes
        raise unguarded_error(me.name)
    if path := _missing_script():
        raise LaunchError(
            f"this program was read from {path}, which other processes cannot import.\n\n"
            f"  python script.py   # write it to a file"
        )
    forks = (
        "forkserver" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    )  # forking is unsafe on macOS
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(PRELOAD)
    return context


def unguarded_error(process: str) -> LaunchError:
    """An error for a main script that starts processes when it is imported."""
    return LaunchError(
        f"{process} imports the main script, and the script starts processes when it is imported.\n\n"
        '  if __name__ == "__main__":   # not executed on import\n'
        "      launch.spawn(main, 4)    # the same for launch.StoreProcess() and for functions that call these"
    )


def script_path() -> str | None:
    """Path of the main script; None in an interactive session or under ``python -c``."""
    return getattr(sys.modules["__main__"], "__file__", None)


def _missing_script() -> str | None:
    """Path of the main script if no such file exists, such as ``<stdin>``, so that other processes cannot import it."""
    path, spec = script_path(), getattr(sys.modules["__main__"], "__spec__", None)
    return path if path is not None and spec is None and not os.path.exists(path) else None
