"""The end of a group: destroy it, invalidate it, or keep it until a hanging collective is over.

It also replaces torch's error for a failed collective by one that names the missing ranks. Only ``groups/`` destroys
process groups; the access to torch's tables is in ``torch_private.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import weakref
from typing import Any

import torch.distributed as dist

from pgmesh import torch_private
from pgmesh.errors import MissingRanksError, PgmeshError
from pgmesh.groups.building import GroupRecord, gloo_stores
from pgmesh.rendezvous import polling_store


def explain(group: Any, error: BaseException) -> bool:
    """Raise a better error for a failed collective, if there is one. Otherwise return True for errors of pgmesh."""
    store = None if group is None else gloo_stores.get(group)
    failure = None if store is None else store.failure
    if isinstance(error, PgmeshError):
        if failure is not None and str(error) == str(failure):
            # The work object keeps the error that ended it. Raised to the user, that error would refer to the user's
            # frames and so to the work: a reference cycle through C++ that Python cannot collect.
            raise polling_store.without_frames(error.with_traceback(None))
        return True
    if store is not None and isinstance(error, RuntimeError):
        if failure is not None:
            raise polling_store.without_frames(failure) from error
        missing = store.missing() if re.search("time(d )?out", str(error), re.IGNORECASE) else None
        if missing:
            raise MissingRanksError(f"{missing}\nOr they reached it, and have released the group since.") from error
    return False


torch_private.on_failure.append(explain)


def destroy(record: GroupRecord, reason: str, *, abort: bool = False) -> None:
    """Remove a group from torch's tables and end its backend. Later uses raise an error that names the group."""
    group: Any = record.group
    torch_private.destroyed[group] = f"{record.label} {reason}"
    if record.created_by == "torch":
        dist.destroy_process_group(group)
    else:
        torch_private.unregister(group)
        with contextlib.suppress(RuntimeError):  # of a backend that cannot be shut down
            group.abort() if abort else group.shutdown()
    fail_collectives(group)


def invalidate(record: GroupRecord, reason: str) -> None:
    """Make later uses of a group that torch destroyed raise an error that names it."""
    torch_private.destroyed[record.group] = f"{record.label} {reason}"
    fail_collectives(record.group)


_kept: list[tuple[Any, Any]] = []


def keep_until_done(group: Any, work: Any) -> None:
    """Keep a group until its hanging collective is over. Its destructor would wait for that, at exit too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _kept.append((group, work))


def _is_unreferenced(error: weakref.ref[PgmeshError]) -> bool:
    """True if an error of a backend was raised to the user and only the failed work still refers to it.

    A work refers to its error, and the error to the frames that it passed, among them those that hold the work. Python
    cannot collect this cycle, but can count references: the caller of this function holds one, and the work another.
    The tracebacks show that the second one is the work's. The work holds the traceback with which the error reached it,
    so that one has one reference more than those after it.
    """
    if sys.getrefcount(error()) != 2:
        return False
    count_groups = [*map(sys.getrefcount, _tracebacks(error()))]
    return count_groups[:1] == [4] and {*count_groups[1:]} == {3}


def _tracebacks(error: BaseException | None) -> list[Any]:
    """The tracebacks of an error from the backend on; empty if it was not raised to the user."""
    found, each = [], error and error.__traceback__
    while each:
        found.append(each)
        each = each.tb_next
    ours = [i for i, traceback in enumerate(found) if traceback.tb_frame.f_code.co_filename == polling_store.__file__]
    return found[ours[0] :] if ours and ours[0] else []


def _drop_frames(error: BaseException | None) -> None:
    if error is not None:
        error.__traceback__ = None


def free_finished() -> None:
    """Free kept groups whose collective is over, and the frames of errors that are no longer referred to."""
    for error in list(polling_store.backend_errors):
        if _is_unreferenced(error):
            _drop_frames(error())
    for kept in [each for each in _kept if each[1].is_completed()]:
        with contextlib.suppress(ValueError):  # another thread removed it
            _kept.remove(kept)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(kept[0]))


def fail_collectives(group: Any) -> None:
    """Make all collectives of a group raise an error. A destroyed Gloo group would continue to work."""
    torch_private.replace_backends(group, torch_private.fake_backend(group.rank(), group.size(), fail=True))


def mark_destroyed(group: Any, label: str) -> None:
    """Mark a group that torch destroyed, and remove its tag from torch's tables."""
    torch_private.destroyed[group] = label
    torch_private.unregister_tag(group)


def keep_all_groups() -> None:
    """Keep all groups of torch alive in a forked child. Their destructors would wait for threads that do not exist."""
    for group in torch_private.all_groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
