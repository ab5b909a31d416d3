"""The name of a process in records, such as "process 4711 on host7/3f2a90bc". Messages leave the end out."""

from __future__ import annotations

import os
import secrets
import socket

HOST = socket.gethostname()  # once: a host may get another name while the process runs
_TOKEN = secrets.token_hex(4)  # process numbers repeat, for example in containers


def own_process() -> str:
    """The name of this process, the same while it lives. No other process has it."""
    return f"process {os.getpid()} on {HOST}/{_TOKEN}"


def without_token(process: str) -> str:
    """The name of a process, for messages."""
    return process.rpartition("/")[0]
