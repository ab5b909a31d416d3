"""The table for ``pgmesh report``: it reads the store of a job from any process, which joins no world."""

from __future__ import annotations

import re
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pgmesh._util.formatting import count_of
from pgmesh._util.timeouts import call_with_timeout
from pgmesh.errors import WorldError
from pgmesh.liveness import timing
from pgmesh.liveness.listeners import Listener
from pgmesh.liveness.operations import Operation, Read, perform
from pgmesh.liveness.statuses import STATUS_KEYS, RankStatus, Statuses
from pgmesh.report.table import Report, make_report


def report_at(host: str, port: int, seconds: float) -> Report:
    """The place of each rank of the newest world on a store.

    Raises:
        WorldError: no store answers there within so many seconds, or no rank has a status in it.
    """
    try:  # the client of a store that is stopped does not return, and cannot be interrupted
        return call_with_timeout(lambda: _read(host, port, seconds), seconds)
    except TimeoutError:
        text = f"{host}:{port} is open, but no store of torch.distributed answered in {seconds:g} s."
        raise WorldError(text) from None


def _read(host: str, port: int, seconds: float) -> Report:
    where = f"{host}:{port}"
    store = _connect(host, port, seconds)
    worlds = _find_worlds(store, where)
    prefix, newest = max(worlds.items(), key=lambda item: max(status.sent for status in item[1]))
    size = max(status.world_size for status in newest)
    title = f"the world at {where}: {count_of(size, 'rank')}"
    if len(worlds) > 1:
        title += f" (the newest of {len(worlds)} worlds there, under {prefix})"
    client = dist.PrefixStore(prefix, store) if prefix else store

    def run(*operations: Operation) -> list[Any]:
        return [perform(client, each) for each in operations]

    period = timing.heartbeat_period(size)
    listener = Listener()
    listener.open(where)  # which shows on which host this process is
    statuses = Statuses(timing.MISSED_HEARTBEATS * period, time.monotonic, listener.has_ended)
    report = make_report(title, statuses, run, range(size), period)
    listener.close()
    return report


def _connect(host: str, port: int, seconds: float) -> dist.TCPStore:
    """A client of the store. A port that refuses is asked before: torch's client would try again and again."""
    try:
        socket.create_connection((host, port), seconds).close()
        return dist.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    except (OSError, RuntimeError, UnicodeError) as error:
        reason = str(error).partition("\n")[0]
        raise WorldError(
            f"no store of torch.distributed answers at {host}:{port}: {reason}\n\nUnder torchrun its "
            "address is MASTER_ADDR and MASTER_PORT in the environment of a rank. Otherwise launch.join logs it, at "
            "level INFO."
        ) from error


def _find_worlds(store: dist.TCPStore, where: str) -> dict[str, list[RankStatus]]:
    """By the prefix of their keys: the worlds whose ranks have statuses in a store, as of torchrun's attempts."""
    if not hasattr(store, "list_keys"):
        raise WorldError(
            "torch 2.9 cannot list the keys of a store. Use a later one here, or call mesh.report() in the job."
        )
    worlds: dict[str, list[RankStatus]] = {}
    for key in store.list_keys():
        found = re.fullmatch(rf"(?:(.*)/)?{STATUS_KEYS}[0-9]+", key)
        status = RankStatus.unpack(perform(store, Read(key))) if found else None
        if found and status:
            worlds.setdefault(found[1] or "", []).append(status)
    if not worlds:
        raise WorldError(
            f"no rank has a status in the store at {where}.\n\nA rank publishes one from its first connect, report or "
            "abort_when_lost on, or from pgmesh.launch.join on with PGMESH_REPORT=1 in its environment."
        )
    return worlds
