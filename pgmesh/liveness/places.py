"""Where a thread of this process is, as its program would say it."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from types import FrameType

import torch
import torch.distributed as dist

from pgmesh.liveness.counters import label_of
from pgmesh.liveness.statuses import NOWHERE, Place

_CALLED = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))
"""The folders of torch and of pgmesh, whose functions a place names."""

_LIBRARY = os.path.dirname(os.__file__) + os.sep

_WRAPPERS = ("wrapper", "inner", "decorate_context", "_wrapped_call_impl", "_call_impl", "_fn", "compile_wrapper")
"""Functions of torch that only call the one that the program meant."""

_GROUP_NAMES = ("group", "pg", "process_group")
"""The names under which functions of torch have a group, in a variable or in an attribute of ``self``."""


class PlaceFinder:
    """Finds where a thread is. It keeps no frame of it: frames hold tensors."""

    def __init__(self) -> None:
        self.thread = threading.main_thread().ident
        self._last: object = None  # the place, and the progress
        self._since = 0.0

    def find(self, progress: object) -> Place:
        """The place of the thread now, and since when neither it nor the progress of the process has changed."""
        place, now = _place_of(self.thread), time.monotonic()
        if (place, progress) != self._last:
            self._last, self._since = (place, progress), now
        return place._replace(seconds=int(now - self._since))


def _place_of(thread: int | None) -> Place:
    innermost = sys._current_frames().get(thread or 0)  # no name for the dict: it has the frame of this function too
    if innermost is None:
        return NOWHERE
    stack = [frame for frame, _ in traceback.walk_stack(innermost)]
    at = min(range(len(stack)), key=lambda i: (_distance(stack[i]), i))
    inner = [frame for frame in stack[:at][::-1] if frame.f_code.co_filename.startswith(_CALLED)]
    meant = [frame for frame in inner if frame.f_code.co_name not in _WRAPPERS] or inner
    code = stack[at].f_code
    file = code.co_filename.rpartition(os.sep)[2].encode(errors="backslashreplace").decode()
    called = _name_of(meant[0]) if meant else ""
    group = next(filter(None, map(_group_in, inner)), "")
    return Place(f"{file}:{stack[at].f_lineno}", code.co_name, called, group)


def _distance(frame: FrameType) -> int:
    """0 for the program's own code, 1 for that of an installed package, 2 for torch, pgmesh and Python's library."""
    file = frame.f_code.co_filename
    if file.startswith(_CALLED):
        return 2
    if "site-packages" in file or "dist-packages" in file:
        return 1
    if file.startswith("<"):  # such as "<string>" of ``python -c``
        return 0 if frame.f_globals.get("__name__") == "__main__" else 2
    return 2 if file.startswith(_LIBRARY) else 0


def _name_of(frame: FrameType) -> str:
    """The name of a function, under the package that exports it: "torch.distributed.all_reduce"."""
    module, name = str(frame.f_globals.get("__name__")), getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
    package = module.rpartition(".")[0]
    exported = name.partition(".")[0] in vars(sys.modules.get(package, object))
    return f"{package if exported else module}.{name}".replace(".<locals>", "")


def _group_in(frame: FrameType) -> str:
    """The group that a function of torch.distributed has; "" for none."""
    if not str(frame.f_globals.get("__name__")).startswith(("torch.distributed", "torch.nn.parallel")):
        return ""
    variables = frame.f_locals
    attributes = getattr(variables.get("self"), "__dict__", {})
    found = [values.get(name) for values in (variables, attributes) for name in _GROUP_NAMES]
    if "group" in variables:
        found.append(dist.group.WORLD)  # which None stands for
    return next((label_of(each.group_name) for each in found if isinstance(each, dist.ProcessGroup)), "")
