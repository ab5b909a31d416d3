"""The stages of a pipeline: copies of a module in which the layers of other stages are None.

torch cuts a traced graph, or runs stages that the program builds. Here the module's own ``forward`` runs on each stage,
and its loops over layers skip those of other stages (``stage_loops.py``). Other methods find here what a stage has and
what it lacks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from torch import nn

from pgmesh.parallel.names import plain_name

REMOVED_MARK = "pgmesh_removed"
"""Attribute of a stage: the names of the modules of the whole module that it lacks."""

# ---- cutting ----


def split_evenly(layers: int, stages: int) -> list[int]:
    """Number of layers of each stage; if they are not divisible, the first stages have one more.

    >>> split_evenly(6, 4)
    [2, 2, 1, 1]
    """
    each, more = divmod(layers, stages)
    return [each + (stage < more) for stage in range(stages)]


def ranges_of(counts: Iterable[int]) -> list[range]:
    """Layer indices of each stage, from their numbers.

    >>> ranges_of([2, 1])
    [range(0, 2), range(2, 3)]
    """
    return [range(a, b) for a, b in itertools.pairwise(itertools.accumulate(counts, initial=0))]


def copy_stage(module: nn.Module, absent: Sequence[str], copied: Sequence[str] = ()) -> nn.Module:
    """Copy of a module in which some submodules are None. It shares its parameters with the module.

    Only the parents of absent and copied submodules are copied, up to the root, since their attributes change. All
    else is shared: other modules, parameters, and attributes such as groups. Of ``model.blocks.2`` as the only absent
    one, copies are the root, ``model`` and ``model.blocks``.

    Args:
        module: the whole module.
        absent: names of the submodules that other stages have.
        copied: names of submodules to copy with their parameters, since another stage of this rank has them too.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    changed = [*absent, *copied]
    parents = [each for name, each in modules.items() if not name or any(c.startswith(f"{name}.") for c in changed)]
    copies = {id(each): copy.copy(each) for each in parents}
    for one in copies.values():
        _refer_to_copies(one, copies)
    stage: nn.Module = copies[id(module)]
    memo = dict[int, Any](copies)  # deepcopy takes from it what is in it, and copies the rest
    replaced = dict.fromkeys(absent) | {name: copy.deepcopy(modules[name], memo) for name in copied}
    for name, new in replaced.items():  # by name, since one module may have several
        parent, _, child = name.rpartition(".")
        setattr(stage.get_submodule(parent), child, new)
    prefixes = tuple(f"{name}." for name in absent)
    setattr(stage, REMOVED_MARK, [name for name in modules if f"{name}.".startswith(prefixes)])
    return stage


def _refer_to_copies(one: nn.Module, copies: Mapping[int, nn.Module]) -> None:
    """Let the attributes of a copied module, and the submodules and hooks in its tables, refer to other copies.

    A method of a copied module, such as a hook ``self._count``, is bound to the copy. A closure or a ``partial`` over
    such a module still means the whole one.

    Args:
        one: the copied module, which shares its tables with the original.
        copies: the copy of each module, by the id of the module.
    """
    tables = {name: copy.copy(vars(one)[name]) for name in vars(nn.Module())}  # other attributes stay shared
    vars(one).update(tables)
    for table in (vars(one), *(each for each in tables.values() if isinstance(each, dict))):
        for key, value in table.items():
            is_bound = id(getattr(value, "__self__", None)) in copies
            if id(value) in copies or is_bound or hasattr(value, "with_module"):  # torch's wrapper of a hook
                table[key] = copy.deepcopy(value, dict(copies))


# ---- what a module or a stage has ----


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
    """Names of the modules whose name without wrappers matches a dotted pattern with * as wildcard."""
    modules = module.named_modules(remove_duplicate=False)
    wrapped_last = {plain_name(module, name): name for name, _ in modules}  # a wrapper comes before what it wraps
    return [name for plain, name in wrapped_last.items() if matches(plain, pattern)]


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
