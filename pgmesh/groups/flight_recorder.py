"""The collectives that this process is in, from torch's flight recorder."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from pgmesh import torch_private
from pgmesh.groups.group import find_group
from pgmesh.rendezvous.statuses import RunningCollective


class FlightRecorder:
    """Finds the collectives that this process has entered and that do not end.

    It asks torch's recorder only if there may be one. torch 2.13 reads its record without a lock, and the process may
    crash if another thread makes a group, or enters its first collective, just then (FlightRecorderDetail.hpp:98, 170).

    A group is stuck if it has entered nothing since the last call, and the record has a collective of it that is not
    done. If no group is busy, torch is not asked again until one is used.
    """

    def __init__(self) -> None:
        # Names of groups, each with the number of operations that it had entered:
        self._before: set[tuple[str, int]] = set()  # at the last call
        self._idle: set[tuple[str, int]] = set()  # when torch was asked last and no group was in a collective

    def stuck(self) -> tuple[RunningCollective, ...]:
        """The collectives of the groups that have entered nothing since the last call."""
        entered = {*torch_private.operations_entered().items()}
        paused = {(name, count) for name, count in entered & self._before if count}
        self._before = entered
        if paused <= self._idle:
            return ()
        busy, names = _busy_groups(), {name for name, _ in paused}
        if not busy:
            self._idle = paused
        return tuple(each for each in _running_in(busy) if each.name in names)


def running() -> tuple[RunningCollective, ...]:
    """All running collectives of this process, the first one of each group."""
    return _running_in(_busy_groups())


def _running_in(busy: Collection[str]) -> tuple[RunningCollective, ...]:
    """The first running collective of each of these groups."""
    found = []
    for name, entry in _unfinished(busy, p2p=False).items():
        group = find_group(name)
        label = f"torch's group {name}" if group is None else group.label
        operation, number = str(entry["profiling_name"]).rpartition(":")[2], int(entry["collective_seq_id"])
        found.append(RunningCollective(name, label, operation, number, int(_seconds_since(entry))))
    return tuple(found)


def busy_since() -> dict[str, float]:
    """The groups with an operation that is not done, by name in torch, each with the time when it was entered."""
    entries = _unfinished(_busy_groups(), p2p=True)
    return {name: time.monotonic() - _seconds_since(entry) for name, entry in entries.items()}


def _seconds_since(entry: dict[str, Any]) -> float:
    """Seconds since an operation was entered."""
    return float(time.time() - entry["time_created_ns"] / 1e9)


def _unfinished(busy: Collection[str], *, p2p: bool) -> dict[str, dict[str, Any]]:
    """By name in torch: the first operation of each of these groups that is not done.

    Args:
        p2p: it may be a ``send`` or ``recv``.
    """
    found: dict[str, dict[str, Any]] = {}
    for entry in torch_private.flight_record(entries=True).get("entries", ()) if busy else ():
        if str(entry["pg_id"]) in busy and not entry["retired"] and (p2p or not entry["is_p2p"]):
            found.setdefault(str(entry["process_group"][0]), entry)
    return found


def _busy_groups() -> set[str]:
    """The groups that have entered a collective after their last completed one, by torch's number of the group."""
    status = torch_private.flight_record(entries=False).get("pg_status", {})
    return {
        str(number)
        for number, group in status.items()
        if int(group["last_enqueued_collective"]) > int(group["last_completed_collective"])
    }
