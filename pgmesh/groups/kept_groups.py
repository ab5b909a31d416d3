"""Process groups that are kept after they have ended, since their destructors would wait.

    kept                                    for what the destructor waits for     freed by
    a group whose first collective failed   collectives that Gloo does not end    the next end of groups after they are
    a group of an interrupted ``reshard``   the same                              over (``teardown.destroy``)
    all groups of a forked child            threads that do not exist there       nothing

Until then, the reference count of each is too high by one. So Python does not free it at exit either.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

from pgmesh import torch_private
from pgmesh.groups import connections


class _Kept(NamedTuple):
    process_group: Any
    endpoints: connections.Endpoints
    works: list[Any]  # its collectives that had not ended


_kept: list[_Kept] = []


def keep_until_done(process_group: Any, endpoints: connections.Endpoints, works: Iterable[Any]) -> None:
    """Keep a process group until collectives of it are over, if they are not.

    Args:
        endpoints: its listeners.
    """
    if running := [work for work in works if not work.is_completed()]:
        _keep(process_group)
        _kept.append(_Kept(process_group, endpoints, running))


def free_finished() -> None:
    """Free the kept process groups whose collectives are over."""
    for kept in [each for each in _kept if all(work.is_completed() for work in each.works)]:
        with contextlib.suppress(ValueError):  # another thread removed it
            _kept.remove(kept)
            connections.shut_down([kept.endpoints])  # a collective may have opened more connections
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(kept.process_group))


def keep_all_groups() -> None:
    """Keep all groups for ever, in a forked child."""
    for process_group in {*torch_private.all_groups(), *torch_private.destroyed}:
        _keep(process_group)


def _keep(process_group: Any) -> None:
    """Keep a process group, also when Python exits and clears ``_kept``."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
