"""A job: processes that run one program, as under torchrun, with the outputs in files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from pgmesh.launch import StoreProcess
from pgmesh.launch.processes import process_context
from tests.support.programs import clean_env


class Job(NamedTuple):
    """The processes by rank, the port of their store, and the folder of their files."""

    processes: list[Any]
    port: int
    folder: Path

    def pid(self, rank: int) -> int:
        return int(self.processes[rank].pid)

    def output(self, rank: int) -> str:
        """Standard output and standard error of a rank so far."""
        return (self.folder / f"{rank}.out").read_text()


@contextlib.contextmanager
def running_job(program: str, size: int, folder: Path, **environ: str) -> Iterator[Job]:
    """Run a program as train.py on each rank, under the store prefix of torchrun's third attempt; kill it at the end.

    Args:
        folder: where the ranks run; their first argument.
        environ: environment variables.
    """
    with StoreProcess() as store:
        given = clean_env(**store.env, TORCHELASTIC_RESTART_COUNT="2", OMP_NUM_THREADS="1", **environ)
        given |= {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
        ranks = [{**given, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(size)]
        processes = [process_context().Process(target=_run, args=(program, f"{folder}", each)) for each in ranks]
        try:
            for process in processes:
                process.start()
            yield Job(processes, store.port, folder)
        finally:
            for process in processes:
                process.kill()


def _run(program: str, folder: str, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    dist.set_debug_level_from_env()  # torch was imported without it
    os.chdir(folder)
    file = os.open(f"{environ['RANK']}.out", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(file, number)
    sys.argv = ["train.py", folder]
    exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})
