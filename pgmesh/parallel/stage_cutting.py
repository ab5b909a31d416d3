"""Cutting a module into the stages of a pipeline, and finding what a stage lacks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

from torch import nn

REMOVED_MARK = "pgmesh_removed"
"""Attribute of a stage: the names of the modules of the whole module that it lacks."""


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

    deepcopy keeps what is in its memo: all but the modules on the path to a removed one, and methods and hooks that
    are bound to these. A closure or a ``partial`` over such a module still means the whole one.

    Args:
        module: the whole module.
        absent: names of the layers to replace by ``AbsentLayer``.
        dropped: names of the submodules to set to None.
        copied: names of submodules to copy with their parameters, since another stage of this rank has them too.
    """
    changed = (*absent, *dropped, *copied)
    modules = dict(module.named_modules(remove_duplicate=False))
    on_path = [sub for name, sub in modules.items() if not name or any(e.startswith(f"{name}.") for e in changed)]
    kept = [*module.modules(), *module.parameters(), *module.buffers()]
    own = vars(nn.Module())
    for sub in on_path:
        for name, value in vars(sub).items():  # such as groups; of torch's own attributes, the hooks in its dicts
            values = [value] if name not in own else [*value.values()] if isinstance(value, dict) else []
            kept += [each for each in values if not _is_bound(each, on_path)]
    memo: dict[int, Any] = {id(each): each for each in kept}
    for sub in on_path:
        memo.pop(id(sub), None)
    for sub in (modules[name] for name in copied):
        for each in (*sub.modules(), *sub.parameters(), *sub.buffers()):
            memo.pop(id(each), None)
    part = copy.deepcopy(module, memo)
    for name in (*absent, *dropped):  # by name, since one module may have several
        parent, _, child = name.rpartition(".")
        setattr(part.get_submodule(parent), child, AbsentLayer() if name in absent else None)
    gone = tuple(f"{name}." for name in (*absent, *dropped))
    setattr(part, REMOVED_MARK, [name for name in modules if f"{name}.".startswith(gone)])
    return part


def _is_bound(value: object, modules: Sequence[nn.Module]) -> bool:
    """Return True for a method of one of the modules, and for what torch binds to a module, such as a hook."""
    return hasattr(value, "with_module") or any(getattr(value, "__self__", None) is each for each in modules)


def attributes_with(module: nn.Module, value: object) -> list[tuple[str, nn.Module, str]]:
    """The submodules that have a value in an attribute: the name of each, the submodule, and its attribute."""
    found = [(name, each, vars(each)) for name, each in module.named_modules()]
    return [(name, each, key) for name, each, values in found for key in values if values[key] is value]


def is_stage(module: nn.Module) -> bool:
    """Return True if a module is one pipeline stage of a larger module."""
    return any(hasattr(each, REMOVED_MARK) for each in module.modules())


def match_modules(module: nn.Module, pattern: str) -> list[str]:
    """Names of the modules that match a dotted pattern with * as wildcard, without absent layers."""
    each = module.named_modules(remove_duplicate=False)
    return [name for name, found in each if matches(name, pattern) and not isinstance(found, AbsentLayer)]


def on_other_stage(module: nn.Module, pattern: str) -> bool:
    """Return True if a pattern matches a module that the cut removed, or that a user who cuts by hand set to None."""
    if any(matches(name, pattern) for name in getattr(module, REMOVED_MARK, ())):
        return True
    found: Any = module
    for part in pattern.split("."):
        found = getattr(found, part, ...)  # the Ellipsis has no such attribute
        if found is None:
            return True
    return False


def matches(name: str, pattern: str) -> bool:
    """Return True if a dotted name matches a pattern, part by part. Only "" matches "", the whole module."""
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch, parts, pattern_parts)) and bool(name) == bool(pattern)


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each tied parameter."""
    names: dict[int, list[str]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return [same for same in names.values() if len(same) > 1]
