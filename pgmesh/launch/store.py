"""A world's store in a process of its own."""

from __future__ import annotations

import contextlib
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from pgmesh.errors import LaunchError
from pgmesh.launch.processes import EXIT_UNGUARDED, NAME_PREFIX, process_context, unguarded_error


class StoreProcess:
    """A world's store in a process of its own, so that the end of no rank takes it away.

    torchrun without a rendezvous of its own, srun and mpirun have rank 0 host it: then no group can be connected any
    more once rank 0 has died. Start this one first, beside the ranks, and give them what ``env`` says.

    Args:
        port: any free one if 0.
        host: the name by which the ranks reach this machine.

    Raises:
        LaunchError: it did not start, because the port is taken, say; or the call is not under
            `if __name__ == "__main__":`.

    >>> with StoreProcess() as store:
    ...     sorted(store.env)
    ['MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_USE_AGENT_STORE']
    """

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        processes: Any = process_context()
        ready_receiver, ready_sender = processes.Pipe(duplex=False)
        stop_receiver, self._stop_sender = processes.Pipe(duplex=False)
        self.process: BaseProcess = processes.Process(
            target=_run_store, args=(port, ready_sender, stop_receiver), daemon=True, name=f"{NAME_PREFIX}store"
        )
        with ready_sender, stop_receiver, ready_receiver:
            self.process.start()
            ready_sender.close()
            try:
                answer = ready_receiver.recv() if ready_receiver.poll(60.0) else "it did not start in 60 s"
            except EOFError:
                answer = "it died as it started"
        if not isinstance(answer, int):
            self.close()
            if self.process.exitcode == EXIT_UNGUARDED:
                raise unguarded_error("the store")
            raise LaunchError(f"no store at port {port}: {answer}")
        self.host, self.port = host, answer

    @property
    def env(self) -> dict[str, str]:
        """The variables by which ranks find it."""
        return {
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank hosts it
        }

    def close(self) -> None:
        """End it."""
        self._stop_sender.close()
        self.process.join(1.0)
        self.process.kill()
        self.process.join(2.0)

    def __enter__(self) -> StoreProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_store(port: int, ready_sender: Connection, stop_receiver: Connection) -> None:
    """Host a store until the process that asked for it lets go, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except Exception as error:
        ready_sender.send(str(error).splitlines()[0])
        return
    ready_sender.send(store.port)
    with contextlib.suppress(EOFError, OSError):
        stop_receiver.recv()
