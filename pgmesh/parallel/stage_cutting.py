"""Cutting a module into the stages of a pipeline, and finding what a stage lacks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

from torch import nn

ABSENT_MARK = "pgmesh_absent"
"""Attribute of a stage: the names of the modules that it lacks."""


class AbsentLayer(nn.Module):
    """Placeholder of a layer that another pipeline stage has. It returns its first input."""

    def forward(self, x: Any, *more: Any, **keywords: Any) -> Any:
        return x


def partition_layers(layers: int, stages: int) -> list[range]:
    """Layer indices of each stage, split evenly; if they are not divisible, the first stages have one more.

    >>> partition_layers(6, 4)
    [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
    """
    each, more = divmod(layers, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def copy_stage(module: nn.Module, absent: Sequence[str], dropped: Sequence[str], copied: Sequence[str]) -> nn.Module:
    """Copy of a module without some of its layers and submodules. It shares its parameters with the module.

    deepcopy keeps what is in its memo. So only modules on the path to a removed module are copied.

    Args:
        module: the whole module.
        absent: names of the layers to replace by ``AbsentLayer``.
        dropped: names of the submodules to set to None.
        copied: names of submodules to copy with their parameters, since another stage of this rank has them too.
    """
    changed = (*absent, *dropped, *copied)
    ancestors = [
        sub
        for name, sub in module.named_modules(remove_duplicate=False)
        if not name or any(each.startswith(f"{name}.") for each in changed)
    ]
    own = vars(nn.Module())
    attributes = [value for sub in ancestors for name, value in vars(sub).items() if name not in own]  # such as groups
    kept = (*module.modules(), *module.parameters(), *module.buffers(), *attributes)
    memo: dict[int, Any] = {id(each): each for each in kept}
    for sub in ancestors:
        memo.pop(id(sub), None)
    for sub in (module.get_submodule(name) for name in copied):
        for each in (*sub.modules(), *sub.parameters(), *sub.buffers()):
            memo.pop(id(each), None)
    part = copy.deepcopy(module, memo)
    for name in (*absent, *dropped):  # by name, since one module may have several
        parent, _, child = name.rpartition(".")
        setattr(part.get_submodule(parent), child, AbsentLayer() if name in absent else None)
    setattr(part, ABSENT_MARK, tuple(dropped))
    return part


def is_stage(module: nn.Module) -> bool:
    """Return True if a module is one pipeline stage of a larger module."""
    return any(isinstance(each, AbsentLayer) or hasattr(each, ABSENT_MARK) for each in module.modules())


def match_modules(module: nn.Module, pattern: str) -> list[str]:
    """Names of the modules that match a dotted pattern with * as wildcard, without absent layers."""
    each = module.named_modules(remove_duplicate=False)
    return [name for name, found in each if matches(name, pattern) and not isinstance(found, AbsentLayer)]


def on_other_stage(module: nn.Module, pattern: str) -> bool:
    """Return True if a pattern matches an absent module or one inside it: here it is None or a placeholder."""
    absent = [name for name, each in module.named_modules() if isinstance(each, AbsentLayer)]
    absent += getattr(module, ABSENT_MARK, ())
    parts = pattern.split(".")
    if any(matches(name, ".".join(parts[: name.count(".") + 1])) for name in absent):
        return True
    found: Any = module
    for part in parts:  # a user who cuts stages by hand sets modules to None
        found = getattr(found, part, module)
        if found is None or found is module:
            return found is None
    return False


def matches(name: str, pattern: str) -> bool:
    """Return True if a dotted name matches a pattern, part by part."""
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch, parts, pattern_parts))


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each tied parameter."""
    names: dict[int, list[str]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return [same for same in names.values() if len(same) > 1]
