"""The stages of a pipeline: copies of a module in which the layers of other stages are None.

torch cuts a traced graph, or runs stages that the program builds. Here the module's own ``forward`` runs on each stage,
and its loops over layers skip those of other stages (``stage_loops.py``). Other methods find here what a stage has and
what it lacks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

from torch import nn

REMOVED_MARK = "pgmesh_removed"
"""Attribute of a stage: the names of the modules of the whole module that it lacks."""

# ---- cutting ----


def partition_layers(layers: int, stages: int) -> list[range]:
    """Layer indices of each stage, split evenly; if they are not divisible, the first stages have one more.

    >>> partition_layers(6, 4)
    [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
    """
    each, more = divmod(layers, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def copy_stage(module: nn.Module, absent: Sequence[str], copied: Sequence[str] = ()) -> nn.Module:
    """Copy of a module in which some submodules are None. It shares its parameters with the module.

    Only the parents of absent and copied submodules are copied, up to the root, since their attributes change. All
    else is shared: other modules, parameters, and attributes such as groups, which cannot be copied. Of
    ``model.blocks.2`` as the only absent one, copies are the root, ``model`` and ``model.blocks``.

    Args:
        module: the whole module.
        absent: names of the submodules that other stages have.
        copied: names of submodules to copy with their parameters, since another stage of this rank has them too.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    changed = [f"{name}." for name in (*absent, *copied)]
    parents = [each for name, each in modules.items() if not name or any(c.startswith(f"{name}.") for c in changed)]
    not_shared = {id(each) for each in (*parents, *(part for name in copied for part in _parts(modules[name])))}
    attributes = (value for each in parents for value in _unbound_attributes(each, parents))
    memo: dict[int, Any] = {id(each): each for each in (*_parts(module), *attributes) if id(each) not in not_shared}
    stage = copy.deepcopy(module, memo)  # it takes from the memo what is in it, and copies the rest
    for name in absent:  # by name, since one module may have several
        parent, _, child = name.rpartition(".")
        setattr(stage.get_submodule(parent), child, None)
    prefixes = tuple(f"{name}." for name in absent)
    setattr(stage, REMOVED_MARK, [name for name in modules if f"{name}.".startswith(prefixes)])
    return stage


def _parts(module: nn.Module) -> list[object]:
    """All modules, parameters and buffers of a module."""
    return [*module.modules(), *module.parameters(), *module.buffers()]


def _unbound_attributes(module: nn.Module, parents: Sequence[nn.Module]) -> Iterator[object]:
    """Attributes and hooks of a module, without methods of a parent, such as a hook ``self._count``.

    Those have to be copied, so that they are bound to the copy. A closure or a ``partial`` over a parent still means
    that of the whole module.
    """
    torch_attributes = vars(nn.Module())
    values = list[object]()
    for name, value in vars(module).items():
        if name not in torch_attributes:
            values.append(value)
        elif isinstance(value, dict):  # of hooks
            values += value.values()
    for each in values:
        is_bound = any(getattr(each, "__self__", None) is parent for parent in parents)
        if not is_bound and not hasattr(each, "with_module"):  # torch's wrapper of a hook, which has its module
            yield each


# ---- what a module or a stage has ----


def attributes_with(module: nn.Module, value: object) -> list[tuple[str, nn.Module, str]]:
    """The submodules that have a value in an attribute: the name of each, the submodule, and its attribute."""
    return [
        (name, layer, attribute)
        for name, layer in module.named_modules()
        for attribute, each in vars(layer).items()
        if each is value
    ]


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each tied parameter."""
    names: dict[int, list[str]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def is_stage(module: nn.Module) -> bool:
    """Return True if a module is one pipeline stage of a larger module."""
    return any(hasattr(each, REMOVED_MARK) for each in module.modules())


def match_modules(module: nn.Module, pattern: str) -> list[str]:
    """Names of the modules that match a dotted pattern with * as wildcard."""
    return [name for name, _ in module.named_modules(remove_duplicate=False) if matches(name, pattern)]


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
