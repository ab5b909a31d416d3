"""The server of the world's ``TCPStore``, to which a process opens connections of its own."""

from __future__ import annotations

import errno
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from pgmesh._util.listeners import refuses
from pgmesh._util.sockets import ending_when_cut, open_connection
from pgmesh.rendezvous import timing

_CUT = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
"""Errors of a network that is cut."""


class Server:
    """The server of a ``TCPStore``.

    The store thread calls ``connect``. Any thread calls ``is_gone`` and sets ``leaving``.
    """

    def __init__(self) -> None:
        self.leaving = False  # this process leaves the world, and connects no more over a cut network
        self.here = ""  # this host's address in the last connection
        self._address: tuple[str, int] | None = None  # numeric, once the server has answered
        # The address while torch's client connects to it, which takes seconds if the server ends meanwhile. Callers
        # then ask the port themselves. A killed store closes its port last, so this is common.
        self._address_being_opened: tuple[str, int] | None = None

    def is_gone(self) -> bool:
        """True if the server's port is closed while this process connects to it."""
        return (address := self._address_being_opened) is not None and refuses(address)

    def connect(self, store: dist.TCPStore) -> dist.TCPStore:
        """Open another connection to the server of a store.

        If the network is cut after the first connection, it tries again until this process leaves the world.

        Raises:
            OSError: the server's port cannot be reached.
            RuntimeError: the server does not answer there.
        """
        # Torch's client would wait long for a server that is gone.
        with self._reach(self._address or (store.host, store.port)) as connection:
            self.here, self._address = connection.getsockname()[0], connection.getpeername()[:2]
        host, port = self._address_being_opened = self._address
        try:
            limit = timedelta(seconds=timing.TIMING.late_answer)
            with ending_when_cut(port, timing.TIMING.store_silence):
                return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        finally:
            self._address_being_opened = None

    def _reach(self, address: tuple[str, int]) -> socket.socket:
        while True:
            try:
                return open_connection(address, 2.0)  # the kernel would try again at growing intervals
            except OSError as error:
                is_cut = isinstance(error, TimeoutError) or error.errno in _CUT
                if not is_cut or self._address is None or self.leaving:
                    raise
                time.sleep(0.2)
