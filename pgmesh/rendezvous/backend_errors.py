"""Errors that a backend keeps, without the frames that would keep the backend alive.

``PollingStore.wait`` runs inside a backend, and raises its errors through it. The backend, in C++, keeps the error that
ended a collective. So there would be a cycle that Python cannot collect:

    backend -> error -> its traceback -> the frames that called ``wait`` -> process group -> backend
"""

from __future__ import annotations

import weakref
from typing import Any

from pgmesh.errors import PgmeshError

_raised: weakref.WeakKeyDictionary[PgmeshError, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Errors that were raised inside a backend, each with the store that raised it."""


def without_frames(error: PgmeshError, hint: str = "") -> PgmeshError:
    """A copy of an error without its frames.

    Args:
        hint: text to append to the message.
    """
    copy = type(error)(f"{error}{hint}")
    copy.__cause__ = error.__cause__
    return copy


def raise_inside(error: PgmeshError | None, store: Any) -> None:
    """Raise the error of a store, if there is one, inside a backend.

    Call it outside any ``except`` block, or the error's context would be an error with frames. The caller must not
    give the error a name: its frame is part of the traceback, so the frame and the error would keep each other alive.
    """
    if error is None:
        return
    _raised[error] = weakref.ref(store)
    try:
        raise error
    finally:
        del error  # for the same reason


def clear_frames() -> None:
    """Clear the frames of the errors whose stores are closed. Each later close clears those raised since."""
    for reference in _raised.keyrefs():  # a copy: another thread may add an error
        error = reference()
        store = None if error is None else _raised[error]()
        if error is not None and (store is None or store.closed):
            error.__traceback__ = None
