"""Ranks that end as interpreters do. Those of ``worlds.py`` end without functions of ``atexit`` and destructors of C++.

``python -m tests.support.exiting`` imports torch once, and forks all ranks before anything is started.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from pgmesh import launch
from tests.support.message_assertions import without_gloo_lines, without_hostname_warnings
from tests.support.programs import clean_env

DEADLINE = 90.0  # seconds


class Ended(NamedTuple):
    """The exit status of a rank, -SIGABRT if it hung, and its standard output and standard error."""

    status: int
    out: str
    err: str


def run_to_exit(folder: Path, worlds: dict[str, tuple[Any, ...]]) -> dict[str, list[Ended]]:
    """Run worlds at the same time, and return how their ranks ended.

    Args:
        folder: for the outputs. The ranks run in it.
        worlds: by name, a function at module level, the number of ranks that call it, and its arguments.
    """
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in worlds]
    given = [
        (name, fn.__module__, fn.__name__, size, store.port, args)
        for store, (name, (fn, size, *args)) in zip(stores, worlds.items())
    ]
    command = [sys.executable, "-m", "tests.support.exiting", json.dumps(given)]
    environ = clean_env(OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=2 * DEADLINE)
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout.splitlines()[-1])

    def ended(name: str) -> Ended:
        out, err = ((folder / f"{name}.{kind}").read_text() for kind in ("out", "err"))
        return Ended(statuses[name], without_gloo_lines(out), without_hostname_warnings(err))

    return {name: [ended(f"{name}.{rank}") for rank in range(size)] for name, (_, size, *_) in worlds.items()}


def be(fn: Callable[..., Any], name: str, rank: int, size: int, port: int, args: list[Any]) -> None:
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{size}", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=f"{port}", TORCHELASTIC_USE_AGENT_STORE="True")
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{rank}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    faulthandler.enable()
    launch.join("gloo")
    fn(*args)


def main(given: str) -> None:
    worlds = json.loads(given)
    functions = [getattr(importlib.import_module(module), fn) for _, module, fn, *_ in worlds]
    names: dict[int, str] = {}
    gc.freeze()  # what was imported is not looked through at each end
    for fn, (name, _, _, size, port, args) in zip(functions, worlds):
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                be(fn, name, rank, size, port, args)
                sys.exit(0)
            names[pid] = f"{name}.{rank}"
    statuses, end = dict[str, int](), time.monotonic() + DEADLINE
    while names:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[names.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() < end:
            time.sleep(0.01)
        else:
            end += 5.0
            for late in names:
                os.kill(late, signal.SIGABRT)  # which has it say where it stands
    print(json.dumps(statuses))


if __name__ == "__main__":
    main(sys.argv[1])
