"""Application of methods around one another, and the number of different pieces of each parameter afterwards.

For ``[tensor, data, pipeline]``, lowest level first, ``apply_methods`` makes these calls::

    pipeline.around(module, lower)             cuts the module into stages; for each of this rank:
        data.around(stage, lower)              is data.apply(tensor.apply(stage))

A gradient norm counts each piece of a parameter once, so ``count_pieces`` gives the number of different pieces. A
DTensor knows its own. A plain tensor has more than one piece in two cases:

- *Stages*: other stages of a pipeline hold other parameters under the same name.
- *Experts* of a list: other ranks hold others.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from functools import partial

from torch import nn

from pgmesh._util.samples import digest
from pgmesh.errors import MethodError
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method
from pgmesh.parallel.comparing import gather_numbers, gather_objects
from pgmesh.parallel.local_experts import LocalExperts, expert_modules
from pgmesh.parallel.owned_tensors import owned_tensors


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


Pieces = weakref.WeakKeyDictionary[nn.Module, dict[str, int]]
"""For each submodule, the number of different pieces of each of its own parameters and buffers."""


def count_pieces(methods: Sequence[Method], applied: nn.Module) -> Pieces:
    """The number of different pieces of each parameter and buffer, beyond those of DTensors.

    They are found by submodule, since wrappers of modules change the names of parameters.

    Args:
        methods: the methods.
        applied: the module that ``apply_methods`` returned.
    """
    experts, pieces = expert_modules(applied).values(), Pieces()
    named = {weight for each in experts if isinstance(each, LocalExperts) for weight in each.parameters()}
    for _, owner, key, tensor in owned_tensors(applied):
        count = 1
        for method in methods:
            if method.level is Level.PIPELINE or (method.differs == "experts" and tensor in named):
                count *= method.mesh.size(*method.owns)
        pieces.setdefault(owner, {})[key] = count
    return pieces


def release_new_groups(before: set[tuple[int, ...]], mesh: ProcessGroupMesh) -> None:
    """Release the groups of a mesh whose ranks are not in ``before``."""
    for ranks in {group.ranks for group in mesh.held()} - before:
        mesh.release(ranks=ranks)


def raise_on_all(
    failure: MethodError | None, before: set[tuple[int, ...]], mesh: ProcessGroupMesh, ranks: Sequence[int]
) -> None:
    """Release new groups and raise an error on all ranks, if one of them has one: the first. Each of them calls it.

    A rank that failed releases its groups before the comparison, but for those of all ranks, which it needs.

    Args:
        failure: the error of this rank.
        before: the ranks of the groups that existed before.
        mesh: the mesh.
        ranks: the ranks that have to agree.

    Raises:
        MethodError: a rank failed.
    """
    if failure is not None:
        release_new_groups(before | {tuple(ranks)}, mesh)
    try:
        failure = first_failure(failure, mesh, ranks)
    except (RuntimeError, TimeoutError) as error:
        failure = failure or MethodError(f"another rank failed in apply: {error}")
    if failure is not None:
        release_new_groups(before, mesh)
        raise failure


def first_failure(failure: MethodError | None, mesh: ProcessGroupMesh, ranks: Sequence[int]) -> MethodError | None:
    """The error of the rank that failed first, on each rank: its own if it has the same."""
    text = str(failure or "")
    found = gather_numbers(mesh, ranks, [time.time_ns() if failure else 0, digest(text)])
    failed = {when: rank for rank, (when, _) in found.items() if when}
    if not failed or len({each for _, each in found.values()}) == 1:
        return failure
    first = failed[min(failed)]
    told = gather_objects(mesh, ranks, text)[first]
    return failure if text == told else MethodError(f"on rank {first}, {told}")
