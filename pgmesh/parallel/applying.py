"""Application of methods around one another, and the number of different pieces of each parameter afterwards.

For ``[tensor, data, pipeline]``, lowest level first, ``apply_methods`` makes these calls::

    pipeline.around(module, lower)             cuts the module into stages; for each of this rank:
        data.around(stage, lower)              is data.apply(prepare(tensor.apply(stage)))

A gradient norm counts each piece of a parameter once, so ``count_pieces`` gives the number of different pieces. A
DTensor knows its own. A plain tensor has more than one piece in two cases:

- *Stages*: other stages of a pipeline hold other parameters under the same name.
- *Experts* of a list: other ranks hold others.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from pgmesh._util.formatting import count_of
from pgmesh.errors import MethodError
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method
from pgmesh.parallel.comparing import gather_objects
from pgmesh.parallel.local_experts import LocalExperts, expert_modules
from pgmesh.parallel.names import plain_name
from pgmesh.parallel.owned_tensors import owned_tensors

Prepare = Callable[[nn.Module], nn.Module]
"""A program's own changes of a module, between the methods that change layers and those that shard."""


def apply_methods(
    running: list[object], methods: Sequence[Method], prepare: Prepare | None, module: nn.Module
) -> nn.Module:
    """Apply the last of the methods around the others, and return the module to train.

    Args:
        running: gets the methods that are being applied, outermost first. After an error, the last one has raised it.
        methods: lowest level first.
        prepare: called once the methods below ``Level.SHARD`` are applied.
        module: the module, or a stage of it.
    """
    if prepare and not (methods and methods[-1].level >= Level.SHARD):
        part = apply_methods(running, methods, None, module)
        running.append(f"before_sharding={getattr(prepare, '__name__', prepare)}")
        applied = call_prepare(prepare, part)
    elif methods:
        *lower_methods, method = methods
        running.append(method)
        applied = method.around(module, partial(apply_methods, running, lower_methods, prepare))
    else:
        return module
    running.pop()
    return applied


def call_prepare(prepare: Prepare, part: nn.Module) -> nn.Module:
    """Call a program's own function, which may wrap, compile and change modules, but not the parameters.

    Raises:
        MethodError: it returned no module, or one with other parameters.
    """
    before = shapes_of(part)
    prepared = prepare(part)
    if not isinstance(prepared, nn.Module):
        raise MethodError(
            f"it returned {prepared!r}, not the module.\n\n"
            "  def prepare(module):\n      ...\n      return module   # or a wrapper of it"
        )
    after = shapes_of(prepared)
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if changed:
        old, new = (shapes.get(changed[0], "not there") for shapes in (before, after))
        raise MethodError(
            f"it removed, added or reshaped {len(changed)} of {count_of(len(before), 'parameter')}, such as "
            f"{changed[0]!r}: {old} before, {new} after. apply has compared and sharded those of before.\n\n"
            "  model = together.apply(change(model))   # change parameters before apply"
        )
    return prepared


def shapes_of(module: nn.Module) -> dict[str, list[int]]:
    """The shapes of the parameters of a module, by their names in the whole model."""
    named = module.named_parameters(remove_duplicate=False)
    return {plain_name(module, name): [*weight.shape] for name, weight in named}


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
    found = gather_objects(mesh, ranks, (time.time_ns(), str(failure)) if failure else None)
    failed = [(*told, rank) for rank, told in found.items() if told]
    if not failed:
        return None
    _, text, first = min(failed)
    return failure if str(failure) == text else MethodError(f"on rank {first}, {text}")
