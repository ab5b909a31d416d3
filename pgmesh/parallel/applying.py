"""Application of methods around one another, and the number of different pieces of each parameter afterwards.

For ``[tensor, data, pipeline]``, lowest level first, ``apply_methods`` makes these calls::

    pipeline.around(module, lower)             cuts the module into stages; for each of this rank:
        data.around(stage, lower)              is data.apply(tensor.apply(stage))

A gradient norm counts each piece of a parameter once, so ``count_pieces`` gives the number of different pieces. A
DTensor knows its own. A plain tensor has more than one piece in three cases:

- *Stages*: other stages of a pipeline hold other parameters under the same name.
- *Experts*: other ranks hold other experts under the same name.
- *Plain shards* of ``plain_shards.py``. Example: on ``pp=2, tp=2``, a method along tp replaces a weight of shape (4, 4)
  by one of shape (2, 4), in one of two stages. Each rank holds one of 2 x 2 different pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method
from pgmesh.parallel.local_experts import expert_tensors
from pgmesh.parallel.plain_shards import count_shards, owned_tensors


def apply_methods(running: list[Method], methods: Sequence[Method], module: nn.Module) -> nn.Module:
    """Apply the last of the methods around the others, and return the module to train.

    Args:
        running: gets the methods that are being applied, outermost first. After an error, the last one has raised it.
        methods: lowest level first.
        module: the module, or a stage of it.
    """
    if not methods:
        return module
    *lower_methods, method = methods
    running.append(method)
    applied = method.around(module, partial(apply_methods, running, lower_methods))
    running.pop()
    return applied


def count_pieces(methods: Sequence[Method], applied: nn.Module) -> dict[str, int]:
    """The number of different pieces of each parameter and buffer, beyond those of DTensors, by name.

    Args:
        methods: the methods.
        applied: the module that ``apply_methods`` returned.
    """
    experts, pieces = expert_tensors(applied), dict[str, int]()
    for name, owner, key, _ in owned_tensors(applied):
        pieces[name] = count_shards(owner, key)
        for method in methods:
            if method.level is Level.PIPELINE or (method.differs == "experts" and name in experts):
                pieces[name] *= method.mesh.size(*method.owns)
    return pieces


def release_new_groups(before: set[tuple[int, ...]], mesh: ProcessGroupMesh) -> None:
    """Release the groups of a mesh whose ranks are not in ``before``."""
    for ranks in {group.ranks for group in mesh.held()} - before:
        mesh.release(ranks=ranks)
