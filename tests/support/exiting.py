"""Ranks that end as interpreters do. Those of ``worlds.py`` end without functions of ``atexit`` and destructors of C++.

``python -m tests.support.exiting`` imports torch once, and forks all ranks before anything is started.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from pgmesh import launch
from tests.support.message_assertions import without_gloo_lines, without_hostname_warnings
from tests.support.programs import clean_env
from tests.support.worlds import STARVED

DEADLINE = 240.0 if STARVED else 45.0  # seconds, for one world; a passive side of a pair waits for five timeouts


class Ended(NamedTuple):
    """The exit status of a rank, -SIGABRT if it hung, and its standard output and standard error."""

    status: int
    out: str
    err: str


def run_to_exit(
    folder: Path,
    worlds: dict[str, tuple[Any, ...]],
    *,
    at_once: int = 100,
    seconds: float = DEADLINE,
    join: bool = True,
) -> dict[str, list[Ended]]:
    """Run worlds, and return how their ranks ended.

    Args:
        folder: for the outputs. The ranks run in it.
        worlds: by name, a function at module level, the number of ranks that call it, and its arguments.
        at_once: the number of worlds that run at the same time.
        seconds: no world begins later.
        join: whether the ranks have joined their world when they call the function; if not, the worlds share a store.
    """
    number = len(worlds) if join else 1
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(number)]
    given = [
        (name, fn.__module__, fn.__name__, size, store.port, args)
        for store, (name, (fn, size, *args)) in zip(itertools.cycle(stores), worlds.items())
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.exiting", *map(str, (at_once, seconds, int(join)))],
        input=json.dumps(given),
        cwd=folder,
        env=clean_env(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1"),
        capture_output=True,
        text=True,
        timeout=seconds + 2 * DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout.splitlines()[-1])

    def ended(name: str) -> Ended:
        out, err = ((folder / f"{name}.{kind}").read_text() for kind in ("out", "err"))
        return Ended(statuses[name], without_gloo_lines(out), without_hostname_warnings(err))

    sizes = {name: size for name, (_, size, *_) in worlds.items() if f"{name}.0" in statuses}
    return {name: [ended(f"{name}.{rank}") for rank in range(size)] for name, size in sizes.items()}


class World(NamedTuple):
    name: str
    module: str
    fn: str
    size: int
    port: int
    args: list[Any]


def be(world: World, rank: int, join: bool) -> None:
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{world.size}")
    os.environ.update(MASTER_PORT=f"{world.port}", TORCHELASTIC_USE_AGENT_STORE="True")
    for descriptor, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{world.name}.{rank}.{kind}", os.O_WRONLY | os.O_CREAT), descriptor)
    faulthandler.enable()
    if join:
        launch.join("gloo")
    getattr(sys.modules[world.module], world.fn)(*world.args)
    sys.exit(0)


def main(at_once: int, seconds: float, join: bool) -> None:
    waiting = [World(*each) for each in json.load(sys.stdin)]
    for world in waiting:
        importlib.import_module(world.module)
    gc.collect()
    gc.freeze()  # what was imported is not looked through at each end
    end = time.monotonic() + seconds
    running = dict[int, tuple[str, int]]()  # by process, its world and rank
    late, statuses = dict[int, float](), dict[str, int]()
    while running or (waiting and time.monotonic() < end):
        while waiting and len({name for name, _ in running.values()}) < at_once and time.monotonic() < end:
            world = waiting.pop(0)
            for rank in range(world.size):
                pid = os.fork()
                if pid == 0:
                    be(world, rank, join)
                running[pid], late[pid] = (world.name, rank), time.monotonic() + DEADLINE
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            name, rank = running.pop(pid)
            statuses[f"{name}.{rank}"] = os.waitstatus_to_exitcode(status)
            continue
        time.sleep(0.005)
        for pid in running:
            if time.monotonic() > late[pid]:
                late[pid] += 5.0
                os.kill(pid, signal.SIGABRT)  # which has it say where it stands
    print(json.dumps(statuses))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "1")
