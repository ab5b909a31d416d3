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

        a group that has entered        is said to be stuck
        an operation since the last     no
        none, and is in the record      yes, in its first collective there
        none, and is not                no; if no group is busy, torch is not asked again until one is used
    """

    def __init__(self) -> None:
        self._entered: dict[str, int] = {}  # by name of a group: how many operations it had entered at the last call
        self._idle: dict[str, int] = {}  # by name of a group: the number when no group was in a collective last

    def stuck(self) -> tuple[RunningCollective, ...]:
        """The collectives of the groups that have entered nothing since the last call."""
        entered, before = torch_private.operations_entered(), self._entered
        self._entered = entered
        paused = {name for name, count in entered.items() if count == before.get(name) and count}
        if all(entered[name] == self._idle.get(name) for name in paused):
            return ()
        busy = _busy_groups()
        if not busy:
            self._idle = {name: entered[name] for name in paused}
        return tuple(each for each in _running_in(busy) if each.name in paused)


def running() -> tuple[RunningCollective, ...]:
    """All running collectives of this process, the first one of each group."""
    return _running_in(_busy_groups())


def _running_in(groups: Collection[str]) -> tuple[RunningCollective, ...]:
    """The first running collective of each of these groups. A ``send`` or ``recv`` is none."""
    found: dict[str, RunningCollective] = {}
    for entry in _unfinished(groups):
        if not entry["is_p2p"]:
            found.setdefault(str(entry["pg_id"]), _describe(entry))
    return tuple(found.values())


def _describe(entry: dict[str, Any]) -> RunningCollective:
    name = str(entry["process_group"][0])
    group = find_group(name)
    label = f"torch's group {name}" if group is None else group.label
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    return RunningCollective(name, label, operation, int(entry["collective_seq_id"]), int(_seconds_since(entry)))


def _seconds_since(entry: dict[str, Any]) -> float:
    """Seconds since a collective was entered."""
    return float(time.time() - entry["time_created_ns"] / 1e9)


def busy_seconds() -> dict[str, float]:
    """The groups with a collective that is not done, by name in torch, each with the seconds since it was entered."""
    found: dict[str, float] = {}
    for entry in _unfinished(_busy_groups()):
        found.setdefault(str(entry["process_group"][0]), _seconds_since(entry))
    return found


def _unfinished(groups: Collection[str]) -> list[dict[str, Any]]:
    """The entries of collectives of these groups that are not done, the first ones first."""
    entries = torch_private.flight_record(entries=True).get("entries", ()) if groups else ()
    return [entry for entry in entries if str(entry["pg_id"]) in groups and not entry["retired"]]


def _busy_groups() -> set[str]:
    """The groups that have entered a collective after their last completed one, by torch's number of the group."""
    status = torch_private.flight_record(entries=False).get("pg_status", {})
    return {
        str(number)
        for number, group in status.items()
        if int(group["last_enqueued_collective"]) > int(group["last_completed_collective"])
    }
