"""What a program of pgmesh adds to its process: threads, ports, signal handlers, files under /proc, names of torch.

``python -m tests.support.footprint PORT`` forks two ranks over the store at this port, and each writes what it has
found to a file as JSON. This module imports nothing of pgmesh, and torch is complete before pgmesh is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
import torch.distributed.tensor

SIZE = 2  # ranks
DEADLINE = 60.0  # seconds
Found = dict[str, Any]

opened: list[str] = []
"""The files and folders under /proc that this process has opened, unless ``unwatched``."""
_watching = True


def watch_files() -> None:
    """Record from now on what Python opens."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if (
            _watching
            and event in ("open", "os.listdir", "os.scandir")
            and isinstance(args[0], (str, bytes, os.PathLike))
        ):
            path = os.fsdecode(args[0])
            if path.startswith("/proc"):
                opened.append(path)

    sys.addaudithook(hook)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Record nothing during the block."""
    global _watching
    _watching = False
    try:
        yield
    finally:
        _watching = True


def names_of_torch() -> dict[str, Any]:
    """The values of all names in torch's modules and classes."""
    found: dict[str, Any] = {}
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"]:
        for name, value in list(vars(module).items()):
            found[f"{module.__name__}.{name}"] = value
            if issubclass(type(value), type) and value.__module__ == module.__name__:
                found |= {f"{module.__name__}.{name}.{each}": what for each, what in vars(value).items()}
    return found


def changed_names(before: dict[str, Any]) -> list[str]:
    """The names of torch that have another value than before, or are new, in the modules and classes of before.

    Submodules that were loaded since are no change. Annotations are made when they are first read.
    """
    places, absent = {name.rpartition(".")[0] for name in before}, object()
    return sorted(
        name
        for name, value in names_of_torch().items()
        if before.get(name, absent) is not value
        and name.rpartition(".")[0] in places
        and not name.endswith(".__annotations__")
        and not isinstance(value, ModuleType)
    )


def names_from_pgmesh() -> list[str]:
    """The names of torch whose value is a function, a class or an object of pgmesh."""

    def is_ours(value: Any) -> bool:
        what = value.fget if type(value) is property else value
        home = what.__module__ if type(what) in (type, FunctionType) else type(what).__module__
        return str(home).partition(".")[0] == "pgmesh"

    return sorted(name for name, value in names_of_torch().items() if is_ours(value))


def signal_handlers() -> dict[str, str]:
    """The handler of each signal, and the mask of those that the process catches, also in C++."""
    with unwatched():
        caught = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return {str(each): repr(signal.getsignal(each)) for each in signal.valid_signals()} | {caught: str(wakeup)}


def listening_ports() -> list[int]:
    """The ports at which this process listens."""
    with unwatched():
        mine = set()
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        text = "".join(Path(f"/proc/self/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    rows = [line.split() for line in text.splitlines()]
    listening = "0A"  # linux/tcp_states.h
    return sorted(int(row[1][-4:], 16) for row in rows if row[3] == listening and f"socket:[{row[9]}]" in mine)


def threads_of_pgmesh() -> list[str]:
    """Of each other thread that was begun by pgmesh: the function that it began with."""
    found = []
    for thread, frame in sys._current_frames().items():
        names = [f"{each.f_globals['__name__']}.{each.f_code.co_name}" for each, _ in traceback.walk_stack(frame)]
        ours = [name for name in names if name.startswith("pgmesh.")]
        if thread != threading.get_ident() and ours:
            found.append(ours[-1])
    return found


def counts() -> dict[str, int]:
    """Numbers of threads, also of C++, descriptors and ports, once they do not change for a while."""

    def now() -> dict[str, int]:
        with unwatched():
            threads, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        return {"threads": threads, "descriptors": descriptors, "ports": len(listening_ports())}

    last, since, end = now(), time.monotonic(), time.monotonic() + DEADLINE
    while time.monotonic() < min(since + 0.3, end):
        time.sleep(0.01)
        if (found := now()) != last:
            last, since = found, time.monotonic()
    return last


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def sum_over(group: Any, size: int) -> None:
    """All-reduce 2**rank, and compare it with the members."""
    mask = torch.tensor([2 ** dist.get_rank()])
    dist.all_reduce(mask, group=group)
    assert mask.item() == 2**size - 1


def trace_of_process() -> Found:
    """What must not change before a verb of a layer is called."""
    return {
        "threads of pgmesh": threads_of_pgmesh(),
        "signal handlers": signal_handlers(),
        "opened": [*opened],
        "from pgmesh": names_from_pgmesh(),
    }


def run_rank(rank: int, size: int, port: int) -> Found:
    """Make and use groups in a new process. The first rank waits for the last one, which is late."""
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{size}", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=f"{port}", TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1")
    watch_files()
    names, handlers = names_of_torch(), signal_handlers()

    from pgmesh import ProcessGroupMesh, launch

    found: Found = {"changed by the import": changed_names(names), "handlers before": handlers}
    launch.join("gloo", timeout=DEADLINE)
    dist.barrier()
    # Of two groups each: the first one of a kind may bring what later ones share.
    found["of torch"] = [grown(lambda: sum_over(dist.new_group([*range(size)]), size)) for _ in range(2)]
    mesh = ProcessGroupMesh(size, name="actor")
    if rank > 0:
        dist.barrier()  # the first rank has made its group
    before = counts() if rank == 0 else {}
    first = mesh.group()
    if rank == 0:
        wait_until(threads_of_pgmesh, "the thread")
        found["while a member is missing"] = {**trace_of_process(), **difference(before, counts())}
        dist.barrier()
    sum_over(first, size)
    wait_until(lambda: not threads_of_pgmesh(), "the end of the thread")
    found["once connected"] = {**trace_of_process(), **(difference(before, counts()) if rank == 0 else {})}

    def second() -> None:
        sum_over(mesh.group(tag="second"), size)
        wait_until(lambda: not threads_of_pgmesh(), "the end of the thread")

    found["of a mesh"] = [grown(second)]
    use_other_verbs(mesh, size)
    wait_until(lambda: not threads_of_pgmesh(), "the end of the thread")
    found["after other verbs"] = trace_of_process()
    dist.barrier()
    mesh.connect(timeout=DEADLINE)
    found["after connect"] = trace_of_process()
    return found


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {what: after[what] - number for what, number in before.items()}


def grown(act: Callable[[], object]) -> dict[str, int]:
    """What the process has more after a call on all ranks."""
    before = counts()
    dist.barrier()
    act()
    dist.barrier()
    return difference(before, counts())


def use_other_verbs(mesh: Any, size: int) -> None:
    """The verbs of a mesh that make, change and end groups."""
    for part in (mesh.view(dp=1, tp=size), mesh.view(dp=1, tp=size).at(dp=0)):
        sum_over(part.group("tp"), size)
    sum_over(mesh.group_of(range(size)), size)
    mesh.configure(0, tag="configured", timeout=DEADLINE)
    sum_over(mesh.group(0, tag="configured"), size)
    mesh.set_timeout(timeout=DEADLINE)
    sum_over(mesh.device_mesh().get_group(), size)
    mesh.release()
    sum_over(mesh.group(), size)
    mesh.held()
    mesh.group(0, tag="again")
    dist.barrier()


def main(port: int, size: int) -> None:
    children = set()
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(2 * DEADLINE))
            Path(f"{rank}.json").write_text(json.dumps(run_rank(rank, size, port)))
            sys.exit(0)
        children.add(pid)
    while children:
        pid, status = os.wait()
        children.discard(pid)
        for other in children if status else ():
            os.kill(other, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), SIZE)
