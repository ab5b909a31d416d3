"""Cutting a module into the stages of a pipeline."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from pgmesh.parallel.ownership import ABSENT_MARK, AbsentLayer


def partition_layers(layers: int, stages: int) -> list[range]:
    """Layer indices of each stage, split evenly; if they are not divisible, the first stages have one more.

    >>> partition_layers(6, 4)
    [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
    """
    each, more = divmod(layers, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def copy_stage(
    module: nn.Module, layers: str, absent: Iterable[nn.Module], dropped: Sequence[str], copied: Iterable[str]
) -> nn.Module:
    """Copy of a module without some of its layers and submodules. It shares its parameters with the module.

    It is a deepcopy whose memo has all but the ancestors of the removed modules, so that only these are copied.

    Args:
        module: the whole module.
        layers: name of the container of layers.
        absent: the layers to replace by ``AbsentLayer``.
        dropped: names of the submodules to set to None.
        copied: names of submodules to copy with their parameters, since another stage of this rank has them too.
    """
    changed = (layers, *dropped, *copied)
    ancestors = [
        sub
        for name, sub in module.named_modules(remove_duplicate=False)
        if name == layers or any(each.startswith(f"{name}." if name else "") for each in changed)
    ]
    memo: dict[int, Any] = {id(each): each for each in (*module.modules(), *module.parameters(), *module.buffers())}
    for sub in ancestors:  # copied, except for attributes such as groups
        memo.pop(id(sub), None)
        memo.update((id(what), what) for name, what in vars(sub).items() if not name.startswith("_"))
    for sub in (sub for name in copied for sub in module.get_submodule(name).modules()):
        for each in (sub, *sub.parameters(recurse=False), *sub.buffers(recurse=False)):
            memo.pop(id(each), None)
    memo.update((id(layer), AbsentLayer()) for layer in absent)
    part = copy.deepcopy(module, memo)
    for name in dropped:
        parent, _, child = name.rpartition(".")
        setattr(part.get_submodule(parent), child, None)
    setattr(part, ABSENT_MARK, tuple(dropped))
    return part
