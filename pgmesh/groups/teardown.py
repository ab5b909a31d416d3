"""The end of a group: destroyed, invalidated, kept until its collective is over, or freed."""

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
    """Raise what is known of a collective that failed, in place of what torch says; whether the error is ours."""
    store = None if group is None else gloo_stores.get(group)
    failure = None if store is None else store.failure
    if isinstance(error, PgmeshError):
        if failure is not None and str(error) == str(failure):
            # The collective keeps the error that ended it. Were that raised to the user, it would keep the user's
            # frames and this collective's, and so the collective itself: a circle that Python cannot see.
            raise polling_store.without_frames(error.with_traceback(None))
        return True
    if store is not None and isinstance(error, RuntimeError):
        if failure is not None:
            raise polling_store.without_frames(failure) from error
        missing = store.missing() if re.search("time(d )?out", str(error), re.IGNORECASE) else None
        if missing:
            raise MissingRanksError(f"{missing}\nOr they came, and let go of it since.") from error
    return False


torch_private.on_failure.append(explain)


def destroy(made: GroupRecord, reason: str, *, abort: bool = False) -> None:
    """Take a group out of torch's tables, end its backend, and have it name itself to whoever still uses it."""
    group: Any = made.group
    torch_private.destroyed[group] = f"{made.words} {reason}"
    if made.by == "torch":
        dist.destroy_process_group(group)
    else:
        torch_private.unregister(group)
        with contextlib.suppress(RuntimeError):  # a backend that cannot be ended has nothing to end
            group.abort() if abort else group.shutdown()
    disarm(group)


def invalidate(made: GroupRecord, reason: str) -> None:
    """Have a group that torch destroyed name itself, and answer no more, to whoever still uses it."""
    torch_private.destroyed[made.group] = f"{made.words} {reason}"
    disarm(made.group)


_stranded: list[tuple[Any, Any]] = []


def keep_until_done(group: Any, work: Any) -> None:
    """Keep a group until a collective that hangs in it is over: to destroy it would wait for that, at exit too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _stranded.append((group, work))


def _is_forgotten(error: weakref.ref[PgmeshError]) -> bool:
    """Whether an error of a backend was raised to the user, and is held by nobody but the work that failed with it.

    A work keeps its error, and the error what it passed on its way to the user: the frames there, among them those that
    hold the work. That is a circle which Python cannot see. It can count: who asks holds the error, and one more does.
    That this is the work is told by the traceback with which the error came to it: the work holds that one, beside who
    asks, the list here and the traceback before it; those after it are held by one less.
    """
    if sys.getrefcount(error()) != 2:
        return False
    held = [*map(sys.getrefcount, _tracebacks(error()))]
    return held[:1] == [4] and {*held[1:]} == {3}


def _tracebacks(error: BaseException | None) -> list[Any]:
    """Where an error was before it came to the user; nothing if it never did."""
    found, each = [], error and error.__traceback__
    while each:
        found.append(each)
        each = each.tb_next
    ours = [i for i, place in enumerate(found) if place.tb_frame.f_code.co_filename == polling_store.__file__]
    return found[ours[0] :] if ours and ours[0] else []


def _let_frames_go(error: BaseException | None) -> None:
    if error is not None:
        error.__traceback__ = None


def free_finished() -> None:
    """Let go of what was stranded and is over, and of what failed and is forgotten."""
    for error in list(polling_store.raised):
        if _is_forgotten(error):
            _let_frames_go(error())
    for stranded in [each for each in _stranded if each[1].is_completed()]:
        with contextlib.suppress(ValueError):  # another thread was here
            _stranded.remove(stranded)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(stranded[0]))


def disarm(group: Any) -> None:
    """Have a group answer every collective with an error: a destroyed Gloo group would go on working."""
    torch_private.replace_backends(group, torch_private.fake_backend(group.rank(), group.size(), fail=True))


def mark_destroyed(group: Any, words: str) -> None:
    """A group that ended without us: have it name itself, and leave nothing of ours in torch's tables."""
    torch_private.destroyed[group] = words
    torch_private.unregister_tag(group)


def keep_from_destructors() -> None:
    """In a forked child: no group of torch's may be destroyed, since it would wait for threads that are not there."""
    for group in torch_private.all_groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
