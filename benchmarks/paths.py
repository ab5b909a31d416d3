"""What one call enters: files, calls and classes of pgmesh, counted on rank 0, in all threads.

    python -m benchmarks.paths

Four processes with Gloo: the first ``group`` of a mesh with its first collective, ``connect`` of all its axes, and a
``shrink`` after rank 3 has ended. The counts tell how much of the code a reader has to know for one verb. To count in
another checkout, run this file there: ``PYTHONPATH=CHECKOUT python benchmarks/paths.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import pgmesh
from pgmesh import ProcessGroupMesh, launch
from pgmesh.launch.spawning import LocalWorld, pack_call

HOME = str(Path(pgmesh.__file__).parent)


class Entered:
    """The code of pgmesh that was entered.

    Args:
        calls: the number of calls.
        files: the files.
        classes: the classes whose methods were called.
    """

    def __init__(self) -> None:
        self.calls, self.files, self.classes = 0, set[str](), set[str]()

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME) and code.co_name != "<module>":
            self.calls += 1
            self.files.add(code.co_filename)
            if "self" in code.co_varnames[:1]:
                self.classes.add(type(frame.f_locals["self"]).__name__)

    def __str__(self) -> str:
        return f"{len(self.files):3} files  {self.calls:4} calls  {len(self.classes):3} classes"


@contextlib.contextmanager
def entering() -> Iterator[Entered]:
    """Count what the block enters."""
    entered = Entered()
    threading.setprofile(entered.note)
    sys.setprofile(entered.note)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def call_each() -> dict[str, str]:
    """Call each verb once; return what it entered."""
    found = {}
    mesh = ProcessGroupMesh(dp=2, tp=2)
    with entering() as entered:
        dist.all_reduce(torch.ones(1), group=mesh.group("dp"))
    found["group, all_reduce"] = str(entered)
    with entering() as entered:
        mesh.connect()
    found["connect()"] = str(entered)
    dist.barrier()
    if mesh.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with entering() as entered:
        mesh.shrink("dp", timeout=60)
    found['shrink("dp")'] = str(entered)
    return found


def main() -> None:
    with launch.StoreProcess() as store, LocalWorld(4, "gloo", timedelta(seconds=60), store) as world:
        outcomes = world.gather([pack_call(call_each)] * 4, 60.0, grace=30.0)
    if outcomes[0].error:
        raise SystemExit(f"{outcomes[0].error}\n{outcomes[0].details}")
    for verb, text in outcomes[0].result.items():
        print(f"{verb:17} {text}")


if __name__ == "__main__":
    main()
