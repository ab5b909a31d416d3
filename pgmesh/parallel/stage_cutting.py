"""Cutting a module into the stages of a pipeline."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
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
