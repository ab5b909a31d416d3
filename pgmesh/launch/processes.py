"""How processes of this machine are started."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from pgmesh.errors import LaunchError

PRELOAD = ["torch"]  # imported once, by the server that ranks are forked from

NAME_PREFIX = "pgmesh "
"""How the names of processes begin that are started here."""

EXIT_UNGUARDED = 79
"""How a process ends that, as it imports the script which started it, comes to start processes too."""

AT_MODULE_LEVEL = '# at module level, above `if __name__ == "__main__":`'


def process_context() -> Any:
    """How processes are started: forked off a server that has torch imported, they start at once.

    Raises:
        LaunchError: this process imports the script of another that started it, or has no script to import.
    """
    me = multiprocessing.current_process()
    if getattr(me, "_inheriting", False):  # multiprocessing's own word for it, from 3.10 to 3.14
        if me.name.startswith(NAME_PREFIX):
            os._exit(EXIT_UNGUARDED)  # whoever started it says so, once
        raise unguarded_error(me.name)
    if path := _missing_script():
        raise LaunchError(
            f"this program was read from {path}, which other processes cannot import.\n\n"
            f"  python script.py   # write it to a file"
        )
    forks = "forkserver" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"  # not safe on macOS
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(PRELOAD)
    return context


def unguarded_error(who: str) -> LaunchError:
    """What is wrong with a script that starts processes as it is imported."""
    return LaunchError(
        f"{who} imports the script that started it, and that starts processes as it is imported.\n\n"
        '  if __name__ == "__main__":   # only where the script itself is run\n'
        "      launch.spawn(main, 4)    # so too launch.StoreProcess(), and whatever calls them"
    )


def script_path() -> str | None:
    """The file of the program; None where it was typed in, or given by ``python -c``."""
    return getattr(sys.modules["__main__"], "__file__", None)


def _missing_script() -> str | None:
    """What stands for the file of the program where there is none: other processes would look for it."""
    path, spec = script_path(), getattr(sys.modules["__main__"], "__spec__", None)
    return path if path is not None and spec is None and not os.path.exists(path) else None
