"""The store of a world in a separate process, which survives the death of any rank."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch.distributed as dist

from pgmesh.errors import LaunchError
from pgmesh.launch.launcher import parse_port
from pgmesh.launch.processes import GUARD, process_context, wait_for_parent


class StoreProcess:
    """The store of a world in a separate process, which survives the death of any rank.

    Under srun and mpirun, rank 0 hosts the store, and no group can be connected after its death. Start a StoreProcess
    before the ranks, and add ``env`` to their environment variables. Under torchrun, the agent hosts the store.

    Args:
        port: the port to listen on; 0 is any free port.
        host: the name or address under which the ranks reach this host.

    Raises:
        LaunchError: the port is not a port number, or the store did not start, for instance because the port is
            taken; or the main script lacks the guard `if __name__ == "__main__":`.

    >>> with StoreProcess() as store:
    ...     sorted(store.env)
    ['MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_USE_AGENT_STORE']
    """

    host: str
    """The name or address under which the ranks reach this host."""
    port: int
    """The port on which the store listens."""
    process: BaseProcess
    """The process of the store: ``store.process.join()`` waits until it ends."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        port = parse_port(port, least=0)
        processes = process_context()
        receiver, sender = processes.Pipe(duplex=False)
        self.process = processes.Process(target=_run_store, args=(port, sender), daemon=True)
        self.process.start()
        sender.close()
        try:
            answer = receiver.recv()
        except EOFError:
            answer = f"its process ended while it started.\n\n{GUARD}"
        if not isinstance(answer, int):
            self.close()
            raise LaunchError(f"no store at port {port}: {answer}")
        self.host, self.port = host, answer

    @property
    def env(self) -> dict[str, str]:
        """Environment variables with which ranks connect to this store."""
        return {
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # for torch: no rank hosts the store
        }

    def close(self) -> None:
        """Stop the process."""
        self.process.kill()
        self.process.join()

    def __enter__(self) -> StoreProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_store(port: int, sender: Connection) -> None:
    """Host a store until the parent ends, or kills this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # torch's server listens on all interfaces; the address is for the client in this process
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except Exception as error:
        sender.send(str(error).splitlines()[0])
        return
    sender.send(store.port)
    wait_for_parent()
