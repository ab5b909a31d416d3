"""The line of code of the user that called pgmesh, for messages."""

from __future__ import annotations

import contextlib
import os
import sys

_SKIPPED = (os.path.dirname(os.path.dirname(__file__)) + os.sep, contextlib.__file__)


def call_site() -> str:
    """File and line of the innermost frame outside this package and its ``with`` blocks: the call of the user."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    file = frame.f_code.co_filename.rpartition(os.sep)[2]
    return f"{file.encode(errors='backslashreplace').decode()}:{frame.f_lineno}"  # a file name may be no UTF-8
