"""Processes of the ranks of one world, over a store that outlives them. A rank may get several, one after the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from pgmesh import launch
from pgmesh.launch import StoreProcess
from pgmesh.launch.processes import process_context
from tests.support.faults import WAIT_TIMEOUT, beat_fast


def join_world(rank: int, port: int, replicas: int, timeout: float = WAIT_TIMEOUT) -> None:
    """Join the world of these processes, with fast heartbeats. The process does not outlive its test."""
    signal.alarm(int(4 * WAIT_TIMEOUT))
    beat_fast()
    launch.join("gloo", timeout=timeout, replica=rank, replicas=replicas, host="127.0.0.1", port=port)


class RankProcesses:
    """Starts processes, and kills all of them at the end of its block.

    Args:
        fn: called in each process with its rank, the port of the store, the folder, and the number of the process.
        folder: for flags.
    """

    def __init__(self, fn: Callable[[int, int, Path, int], None], folder: Path) -> None:
        self._fn, self._folder, self._store = fn, folder, StoreProcess()
        self._context = process_context()
        self.newest: dict[int, Any] = {}
        """By rank, its last process."""
        self.all: list[Any] = []
        """All processes, in the order of their starts."""

    @property
    def store_pid(self) -> int:
        """The process of the store."""
        assert self._store.process.pid is not None
        return self._store.process.pid

    def start(self, rank: int, number: int) -> None:
        """Start a process of a rank. Its processes are numbered from 0."""
        process = self._context.Process(target=self._fn, args=(rank, self._store.port, self._folder, number))
        process.start()
        self.newest[rank] = process
        self.all.append(process)

    def signal(self, number: int, *but: int) -> None:
        """Send a signal to the last process of each rank, without some ranks."""
        for rank, process in self.newest.items():
            if rank not in but:
                os.kill(process.pid, number)

    def join(self, seconds: float) -> None:
        """Wait until all processes have ended."""
        for process in self.all:
            process.join(seconds)

    def __enter__(self) -> RankProcesses:
        self._store.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.all:
            process.kill()
        self._store.__exit__(kind, error, traceback)
