"""Application of methods to a module, and the number of different pieces of each parameter afterwards.

torch's functions, such as ``fully_shard``, are each applied by a method. This nests them, a pipeline around all others.
For ``[tensor, data, pipeline]``, ``Application.run`` makes these calls::

    pipeline.around(module, apply_lower)       cuts the module into stages; for each of this rank:
        apply_lower(stage)
            data.around(stage, apply_lower)
                apply_lower(stage)
                    tensor.around(stage, ...)  is tensor.apply(stage)
                data.apply(stage)              is DDP(stage)

Before and after each ``apply``, the tensors of the module are noted, to see which ones the method replaced by shards.

A gradient norm counts each piece of a parameter once, so ``count_pieces`` gives the number of different pieces. A
DTensor knows its own. Otherwise there are more than one in three cases:

- *Stages*: other stages of a pipeline hold other parameters under the same name.
- *Experts*: other ranks hold other experts under the same name.
- *Plain shards*: a method replaced a parameter by a smaller tensor, which is no DTensor. Example: on ``pp=2, tp=2``, a
  method along tp replaces a weight of shape (4, 4) by one of shape (2, 4), in one of two stages. The weight has 2 plain
  shards, and each rank holds one of 2 x 2 different pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from pgmesh.parallel.base import Level, Method
from pgmesh.parallel.divisibility import format_sizes
from pgmesh.parallel.local_experts import expert_tensors, mark_shards


class Place(NamedTuple):
    """The place of a parameter or a buffer. Wrappers, such as DDP, change its name in the module, but not its place."""

    owner: nn.Module
    name: str
    """The name in the owner."""


@dataclass(frozen=True)
class Found:
    """A parameter or a buffer at some time."""

    place: Place
    shape: torch.Size
    """Of a DTensor, the shape of the whole."""


class Application:
    """One application of methods to a module."""

    def __init__(self) -> None:
        self.running: list[Method] = []
        """The methods that are being applied, outermost first. After an error, the last one has raised it."""
        self._shards: dict[Place, int] = {}
        """Number of plain shards of each parameter and buffer."""

    def run(self, methods: Sequence[Method], module: nn.Module) -> nn.Module:
        """Apply the last of the methods around the others, and return the module to train.

        Args:
            methods: lowest level first.
            module: the module, or a stage of it.
        """
        if not methods:
            return module
        *lower_methods, method = methods
        before: dict[str, Found] = {}
        self.running.append(method)
        applied = method.around(module, partial(self._apply_lower, lower_methods, before))
        if not isinstance(applied, nn.Module):
            raise TypeError(f"apply returned {applied!r}, not the module to train")
        self.running.pop()
        for name, found in tensors_in_module(applied).items():
            if name in before:
                self._count_shards(method, before[name], found)
        return applied

    def _apply_lower(self, methods: Sequence[Method], before: dict[str, Found], part: nn.Module) -> nn.Module:
        """Apply the methods of lower levels to a part of the module, and add its tensors then to ``before``."""
        applied = self.run(methods, part)
        before.update(tensors_in_module(applied))
        return applied

    def _count_shards(self, method: Method, before: Found, after: Found) -> None:
        """Note the number of plain shards of a parameter or a buffer, of which a method changed the place or shape."""
        self._shards[after.place] = self._shards.get(before.place, 1)
        if after.shape != before.shape and method.differs != "experts":  # LocalExperts knows its own shards
            self._shards[after.place] *= method.mesh.size(*method.average_axes)
            mark_shards(after.place.owner, format_sizes(method.mesh, method.average_axes), after.place.name)

    def count_pieces(self, methods: Sequence[Method], applied: nn.Module) -> dict[str, int]:
        """The number of different pieces of each parameter, beyond those of DTensors, by name.

        Args:
            methods: the methods.
            applied: the module that ``run`` returned.
        """
        experts, pieces = expert_tensors(applied), dict[str, int]()
        for name, found in tensors_in_module(applied).items():
            pieces[name] = self._shards.get(found.place, 1)
            for method in methods:
                if method.level is Level.PIPELINE or (method.differs == "experts" and name in experts):
                    pieces[name] *= method.mesh.size(*method.owns)
        return pieces


def tensors_in_module(module: nn.Module) -> dict[str, Found]:
    """The parameters and buffers of a module, by name."""
    found: dict[str, Found] = {}
    for owner_name, owner in module.named_modules():
        for name, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
            found[f"{owner_name}.{name}".lstrip(".")] = Found(Place(owner, name), tensor.shape)
    return found


def release_new_groups(before: set[tuple[int, ...]], method: Method) -> None:
    """Release the groups inside a method's block whose ranks are not in ``before``."""
    mesh = method.mesh
    block = {*mesh.ranks(*{*method.owns, *method.average_axes})}
    for ranks in {group.ranks for group in mesh.held()} - before:
        if block.issuperset(ranks):
            mesh.release(ranks=ranks)
