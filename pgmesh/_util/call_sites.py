"""The line of code of the user that called pgmesh, for messages."""

from __future__ import annotations

import os
import sys

_PACKAGE_DIR = os.path.dirname(os.path.dirname(__file__)) + os.sep


def call_site() -> str:
    """File and line of the innermost frame outside this package: the call of the user."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"
