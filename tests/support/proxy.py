"""A TCP proxy in front of a store, whose connections can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """A TCP proxy to a port of this machine, which has a port of its own."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, 0
        self.ends_of_connections: list[socket.socket] = []
        self.ends = False
        self.listen()

    def listen(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = self.listener.getsockname()[1]
        self.accepting = threading.Thread(target=self._accept, args=(self.listener,), daemon=True)
        self.accepting.start()

    def cut(self) -> None:
        """Cut all connections. New ones can be opened."""
        while self.ends_of_connections:
            with contextlib.suppress(OSError):
                self.ends_of_connections.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut all connections, and refuse others."""
        with contextlib.suppress(OSError):  # closed by end()
            self.listener.shutdown(socket.SHUT_RDWR)  # ends the wait in accept()
        self.accepting.join(10.0)  # which closes the listener
        self.cut()

    def end(self) -> None:
        """Cut all connections, accept one more, and then none: the kernel does so for a process that is killed."""
        self.ends = True
        self.cut()

    def _accept(self, listener: socket.socket) -> None:
        with listener, contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                if self.ends:
                    client.close()
                    return
                try:
                    server = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    client.close()
                    continue
                self.ends_of_connections += (client, server)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with source:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    sink.sendall(data)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)
