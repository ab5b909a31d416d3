"""The end of groups: unregister them, invalidate them, and shut their connections down.

It also replaces torch's error for a failed collective by one that names the ranks that have ended. Only ``groups/``
destroys process groups; the access to torch's tables is in ``torch_private.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pgmesh import torch_private
from pgmesh._util.formatting import name_ranks
from pgmesh.errors import LifetimeError, MissingRanksError, PgmeshError
from pgmesh.groups import connections
from pgmesh.groups.flight_recorder import busy_seconds
from pgmesh.groups.group import Group, find_group
from pgmesh.rendezvous.backend_errors import without_frames

_FREE_SECONDS = 0.1
"""The time after which aborted groups are freed."""

_EXIT_SECONDS = 2.0
"""The longest wait for the end of aborted groups when the process exits."""

_CONNECTION_ERROR = re.compile("connect|timeout|timed out|peer|nccl", re.IGNORECASE)
"""Words of the errors of Gloo and NCCL that a lost member may have caused. Other errors are mistakes of the caller."""


def explain(process_group: Any, error: BaseException) -> None:
    """Raise a better error for a failed collective, if there is one.

    It reads from the store, for half a second at most, whether a rank has published why the mesh cannot be used, and
    tries to connect to the members' listeners.
    """
    if isinstance(error, PgmeshError):
        # The work object keeps the error that ended it. Raised to the user, that error would refer to the user's
        # frames and so to the work: a reference cycle through C++ that Python cannot collect.
        raise without_frames(error.with_traceback(None))
    if process_group is not None and process_group in torch_private.destroyed:
        raise LifetimeError(torch_private.destroyed[process_group]) from error
    group = None if process_group is None else find_group(process_group.group_name)
    if group is not None and isinstance(error, RuntimeError) and _CONNECTION_ERROR.search(str(error)):
        refusal = next((found for store in group.stores.values() if (found := store.ask_for_refusal(0.5))), None)
        if refusal is not None and refusal.kind != "duplicate":
            if refusal.kind == "aborted":
                group.on_abort(refusal.text)
            raise refusal.error() or error from error
        dead = describe_dead(group)
        if not dead:  # the system may close the connections of a killed process before its listener
            time.sleep(0.05)
            dead = describe_dead(group)
        if text := "\n".join(filter(None, (dead, _recent_finding(group)))):
            raise MissingRanksError(text) from error


def _recent_finding(group: Group) -> str:
    """The reason why a collective of the group did not end, if it was found a moment ago."""
    recent_until, text = group.finding
    return text if time.monotonic() < recent_until else ""


torch_private.on_failure.append(explain)


def describe_dead(group: Group) -> str:
    """Message about the members of a Gloo group whose processes ended or destroyed the group; "" for none."""
    dead = connections.find_dead(group.endpoints())
    lines = [
        f"\n  rank {rank}: its listener at {host}:{port} refuses connections" for rank, (host, port) in dead.items()
    ]
    return f"{group.label}: {name_ranks(dead)} ended, or destroyed the group:{''.join(lines)}" if dead else ""


def destroy(groups: Iterable[Group], reason: str, *, abort: bool = False, at_exit: bool = False) -> None:
    """Unregister groups and end their backends. Later uses raise an error that names the group.

    Their connections are shut down too, so that blocked threads here and on the other members wake up.

    Args:
        reason: the reason in that error.
        abort: abort running collectives of NCCL.
        at_exit: the process ends.
    """
    free_finished()
    groups = list(groups)
    endpoints = [group.endpoints() for group in groups]
    known = [group.process_group for group in groups if group.is_known()]
    if abort:
        wake(groups)
    with torch_private.aborting_together(known) if abort else contextlib.nullcontext():
        for group in groups:
            _end(group, abort=abort or at_exit)
    for group in groups:  # a destroyed Gloo group would continue to work
        torch_private.invalidate(group.process_group, f"{group.label} {reason}")
    connections.shut_down(endpoints)
    process_groups = [group.take_process_group() for group in groups]
    if abort and groups:
        in_background(_free_later, process_groups)


def wake(groups: Iterable[Group]) -> None:
    """End this rank's waits for members that have not connected, in those groups that are in a collective.

    After a failed collective, Gloo would end the process when such a connection closes. So a group is left alone around
    the time at which Gloo itself gives up the wait.
    """
    busy = busy_seconds()
    for group in groups:
        if group.gloo is None or group.name not in busy or not group.is_known():
            continue
        if connections.waits_on(busy[group.name], group.gloo.timeout.total_seconds()):
            connections.wake(group.endpoints())


def _free_later(process_groups: list[Any]) -> None:
    """Free aborted groups in a thread of their own.

    The destructor of a Gloo group waits for its collectives, and Gloo does not wake each of them when its connections
    end.
    """
    _exiting.wait(_FREE_SECONDS)  # until the callers have dropped their references
    process_groups.clear()


_background: set[threading.Thread] = set()
_exiting = threading.Event()


def in_background(function: Callable[..., object], *args: Any) -> object:
    """Call a function that ends groups in a thread of its own, which ``finish_background`` waits for."""
    thread = threading.Thread(target=function, args=args, name="pgmesh-end", daemon=True)
    _background.difference_update([each for each in tuple(_background) if not each.is_alive()])
    try:
        thread.start()
    except RuntimeError:  # Python ends, and starts no threads
        return function(*args)
    _background.add(thread)
    return None


def finish_background() -> None:
    """Wait for these threads. C++ code that returns to Python while Python ends would abort the process."""
    _exiting.set()
    deadline = time.monotonic() + _EXIT_SECONDS
    while _background:
        _background.pop().join(max(0.0, deadline - time.monotonic()))


def wait_for_collectives() -> None:
    """Wait until other threads have returned from the collectives that the end of their groups ends.

    A thread that returns from C++ to Python while Python ends aborts the process.
    """
    deadline, me = time.monotonic() + _EXIT_SECONDS, threading.get_ident()
    while time.monotonic() < deadline:
        frames = [frame for thread, frame in sys._current_frames().items() if thread != me]
        if not any(frame.f_globals.get("__name__") == c10d.__name__ for frame in frames):
            return
        time.sleep(0.005)


def _end(group: Group, *, abort: bool) -> None:
    """Unregister a group, and end its backends."""
    if not group.is_known():
        return
    process_group: Any = group.process_group
    if group.created_by == "new_group":
        dist.destroy_process_group(process_group)
        return
    torch_private.unregister(process_group)
    with contextlib.suppress(RuntimeError):  # a third-party backend may raise it
        process_group.abort() if abort else process_group.shutdown()


def mark_destroyed(group: Group, reason: str) -> None:
    """Mark a group that torch destroys, remove its tag from torch's tables, and shut its connections down."""
    torch_private.destroyed[group.process_group] = f"{group.label} {reason}"
    torch_private.unregister_tag(group.process_group)
    connections.shut_down([group.endpoints()])
    group.take_process_group()


_kept: list[tuple[Any, connections.Endpoints, list[Any]]] = []  # process groups, their listeners, their collectives


def keep_until_done(process_group: Any, endpoints: connections.Endpoints, works: Iterable[Any]) -> None:
    """Keep a process group until collectives of it are over. Its destructor would wait for them, at exit too.

    Args:
        endpoints: its listeners.
    """
    if running := [work for work in works if not work.is_completed()]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
        _kept.append((process_group, endpoints, running))


def free_finished() -> None:
    """Free the kept process groups whose collectives are over."""
    for kept in [each for each in _kept if all(work.is_completed() for work in each[2])]:
        with contextlib.suppress(ValueError):  # another thread removed it
            _kept.remove(kept)
            connections.shut_down([kept[1]])  # a collective may have opened more connections
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(kept[0]))


def keep_all_groups() -> None:
    """Keep all groups alive in a forked child. Their destructors would wait for threads that do not exist."""
    for process_group in {*torch_private.all_groups(), *torch_private.destroyed}:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
