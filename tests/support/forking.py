"""Programs whose processes are forked from what they have imported, for ``run_programs``."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing.forkserver
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from unittest import mock

from pgmesh.launch.processes import PRELOAD, process_context


def fork_server() -> None:
    """Start this process's fork server as a fork of it, with all that is imported: a new one would need seconds."""

    def fork(_: str, words: list[str], kept: list[int]) -> int:
        if pid := os.fork():
            return pid
        server.__init__()  # its lock is held
        for low, high in itertools.pairwise([2, *sorted(kept), 4096]):
            os.closerange(low + 1, high)
        try:
            exec(words[-1])
        finally:
            os._exit(0)

    for name in PRELOAD:
        importlib.import_module(name)
    server = multiprocessing.forkserver._forkserver
    with mock.patch("multiprocessing.util.spawnv_passfds", fork):
        server.ensure_running()


def run_script(path: str, *words: str) -> None:
    """Run a file as Python does, with these arguments. Returns if it ends with a status of 0."""
    sys.argv[:] = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    main.__file__ = path
    try:
        exec(compile(Path(path).read_text("utf-8"), path, "exec"), vars(main))
    except SystemExit as end:
        if end.code:
            raise


def fork_python(command: list[str]) -> BaseProcess:
    """What ``subprocess.Popen`` does for a command that starts with Python, as far as waiting for its end."""
    process = process_context().Process(target=run_script, args=command[1:])
    process.start()
    process.wait = lambda: process.join() or process.exitcode
    return process


PYTHON = """
import runpy, sys
from tests.support.forking import fork_server, run_script
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
runpy.run_path(sys.argv[1], run_name="imported")
fork_server()
run_script(*sys.argv[1:])
"""
"""Runs a file with its arguments. The ranks that it starts are forked from what has imported the same."""

TORCHRUN = """
import sys
from torch.distributed import run
from tests.support.forking import fork_server, run_script
fork_server()
run.run_script_path = run_script
run.main(["--standalone", "--run-path", "--start-method", "forkserver", "--nproc-per-node", *sys.argv[1:]])
"""
"""torchrun, whose ranks are forked from its process. Arguments: the number of ranks, the script, and its own."""
