"""What a process says of itself in the world's store: a word and a label of its own, and the keys of its rank."""

from __future__ import annotations

import os
import secrets
import socket

_TOKEN = secrets.token_hex(4)  # process numbers repeat, for example in containers


def process_id() -> str:
    """A short word that only this process has."""
    return f"{os.getpid()}/{_TOKEN}"


def process_label() -> str:
    """Description of this process. It reveals two processes that have the same rank."""
    return f"process {os.getpid()} on {socket.gethostname()}/{_TOKEN}"


def without_token(label: str) -> str:
    """A description of a process for messages."""
    return label.rpartition("/")[0]


def process_key(rank: int) -> str:
    """The store key of the description of the process that has this rank."""
    return f"pgmesh/process/{rank}"


def meshes_key(rank: int) -> str:
    """The store key of the numbers of the meshes that a rank has registered."""
    return f"pgmesh/meshes/{rank}"
