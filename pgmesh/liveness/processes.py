"""The names of a process.

process_id()      4711/3f2a90bc                     in records of ``shrink``, which name up to thousands
process_label()   process 4711 on host7/3f2a90bc    in arrivals
without_token     process 4711 on host7             in messages
"""

from __future__ import annotations

import os
import secrets
import socket

HOST = socket.gethostname()  # once: a host may get another name while the process runs
_TOKEN = secrets.token_hex(4)  # process numbers repeat, for example in containers


def process_id() -> str:
    """A short word that only this process has."""
    return f"{os.getpid()}/{_TOKEN}"


def process_label() -> str:
    """Description of this process, the same while it lives. It reveals two processes that have the same rank."""
    return f"process {os.getpid()} on {HOST}/{_TOKEN}"


def without_token(label: str) -> str:
    """The label of a process, for messages."""
    return label.rpartition("/")[0]
