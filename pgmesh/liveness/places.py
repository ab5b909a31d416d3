"""The activity of a rank as its program describes it: where its thread is, and the operations entered in each group."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from pgmesh import torch_private
from pgmesh.groups.group import find_group
from pgmesh.liveness import timing
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
    line = f"{os.path.basename(code.co_filename)}:{stack[at].f_lineno}"
    called = _name_of(meant[0]) if meant else ""
    return Place(line, code.co_name, called, next(filter(None, map(_group_in, inner)), ""))


def _distance(frame: FrameType) -> int:
    """0 for the program's own code, 1 for that of an installed package, 2 for torch, pgmesh and Python's library."""
    file, is_main = frame.f_code.co_filename, frame.f_globals.get("__name__") == "__main__"
    if file.startswith(_CALLED) or (file.startswith("<") and not is_main):  # "<string>" is ``python -c``
        return 2
    if "site-packages" in file or "dist-packages" in file:
        return 1
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
    groups = [each for each in found if isinstance(each, dist.ProcessGroup)]
    if not groups and "group" in variables and dist.group.WORLD is not None:  # which None stands for
        groups = [dist.group.WORLD]
    return next((_label_of(each.group_name) for each in groups if torch_private.is_known(each)), "")


def _label_of(name: str) -> str:
    """A group in messages, from its name in torch."""
    group, default = find_group(name), dist.group.WORLD
    is_default = default is not None and default.group_name == name
    return group.label if group else "the default group" if is_default else f"torch's group {name}"


# -- operations -------------------------------------------------------------------------------------------------------


MOST_COUNTERS = 64
"""The number of groups whose operations a status counts."""


class GroupCounter(NamedTuple):
    """The number of operations that a rank has entered in a group.

    Args:
        name: the group's name in torch, the same on all members.
        label: the group in messages.
        ranks: its first members; none if pgmesh does not know them.
        operations: their number.
    """

    name: str
    label: str
    ranks: Sequence[int]
    operations: int


def counters_key(rank: int) -> str:
    """The store key of the counters of a rank. Only reports read it, as it may be long."""
    return f"pgmesh/counters/{rank}"


def own_counters(world: str = "") -> list[GroupCounter]:
    """The counters of this process in a world; those of its newest groups, if it has many.

    Args:
        world: name of a world beside torch's default one.
    """
    found, start = [], f"{torch_private.BESIDE}{world}/" if world else ""
    entered = torch_private.operations_entered().items()
    here = [each for each in entered if each[0].startswith(start or torch_private.BESIDE) == bool(world)]
    for name, operations in here[-MOST_COUNTERS:]:
        group = find_group(name)
        ranks = group.ranks[: timing.MOST_STATUSES] if group else ()
        ours = group.store.own_operations if group and group.store else 0
        found.append(GroupCounter(name, _label_of(name), ranks, operations - ours))
    return found


def unpack_counters(text: bytes | None) -> list[GroupCounter]:
    """Decode ``pack(counters=...)``; none without a text."""
    return [GroupCounter(*each) for each in json.loads(text)["counters"]] if text else []
