"""The line of code of the user that called pgmesh, for messages."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from types import FrameType

from pgmesh._util.formatting import format_call

_SKIPPED = (os.path.dirname(os.path.dirname(__file__)) + os.sep, contextlib.__file__)


def call_site() -> str:
    """File and line of the innermost frame outside this package and its ``with`` blocks: the call of the user."""
    _, frame = _frames()
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"


def corrected_call(wrong: object, right: Sequence[object]) -> str:
    """The user's call of a method of a mesh or a layout, with other arguments in the place of one.

    If it was another call, a call of ``group``.
    """
    entry, _ = _frames()
    code, local = entry.f_code, entry.f_locals
    given = [local[name] for name in code.co_varnames[1 : code.co_argcount]]
    several = local.get("axes", ())
    it = {"ProcessGroupMesh": "mesh", "Layout": "layout"}.get(type(local.get("self")).__name__)
    if it and any(each is wrong for each in given):  # it takes one axis there
        return format_call(f"{it}.{code.co_name}", {}, *(right[0] if each is wrong else each for each in given))
    if it and code.co_name[0] != "_" and any(each is wrong for each in several):
        return format_call(f"{it}.{code.co_name}", {}, *given, *right, **local.get("options", {}))
    return format_call("mesh.group", {}, *right)


def _frames() -> tuple[FrameType, FrameType]:
    """The outermost of the innermost frames inside this package, and the one that called it: the user's."""
    entry = frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        entry, frame = frame, frame.f_back
    return entry, frame
