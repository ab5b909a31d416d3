"""A job: processes that run one program, as under torchrun, with the outputs in files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pgmesh.launch import StoreProcess
from pgmesh.launch.processes import process_context
from tests.support.programs import clean_env, run_program


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
        folder: for their outputs; their first argument.
        environ: environment variables.
    """
    with StoreProcess() as store:
        given = clean_env(**store.env, TORCHELASTIC_RESTART_COUNT="2", OMP_NUM_THREADS="1", **environ)
        given |= {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
        processes: list[Any] = []
        try:
            for rank in range(size):
                own, out = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}, f"{folder}/{rank}.out"
                args = program, [f"{folder}"], given | own, out, out, "train.py"
                processes.append(process_context().Process(target=run_program, args=args))
                processes[-1].start()
            yield Job(processes, store.port, folder)
        finally:
            for process in processes:
                process.kill()
