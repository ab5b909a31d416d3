"""Application of methods to a module, and the number of different pieces of each parameter afterwards.

torch's functions, such as ``fully_shard``, are each applied by a method. This nests them: a pipeline around all others.

A gradient norm counts each piece of a parameter once, so it needs the number of different pieces. A DTensor knows its
own. Otherwise there are more than one in three cases:

- *Stages*: other stages of a pipeline hold other parameters under the same name.
- *Experts*: other ranks hold other experts under the same name.
- *Plain shards*: a method replaced a parameter by a smaller tensor, which is no DTensor. Example: on ``pp=2, tp=2``, a
  method along tp replaces a weight of shape (4, 4) by one of shape (2, 4), in one of two stages. The weight has 2 plain
  shards, and each rank holds one of 2 x 2 different pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pgmesh.parallel.base import Level, Method
from pgmesh.parallel.divisibility import format_sizes
from pgmesh.parallel.local_experts import expert_tensors, mark_shards

Place = tuple[nn.Module, str]
"""A module, and the name that a parameter or a buffer has there. Wrappers, such as DDP, do not change it."""


class Application:
    """One application of methods to a module."""

    def __init__(self) -> None:
        self.running: list[Method] = []
        """The methods that are being applied, outermost first. After an error, the last one has raised it."""
        self._shards: dict[Place, int] = {}
        """Number of plain shards of each parameter and buffer."""

    def run(self, methods: Sequence[Method], module: nn.Module) -> nn.Module:
        """Apply the last of the methods, which applies the others, and return the module to train.

        Args:
            methods: lowest level first.
            module: the module, or a stage of it.
        """
        if not methods:
            return module
        *lower_methods, method = methods
        before: dict[str, tuple[Place, torch.Size]] = {}

        def inner(part: nn.Module) -> nn.Module:
            part = self.run(lower_methods, part)
            before.update(tensors_in_module(part))
            return part

        self.running.append(method)
        applied = method.around(module, inner)
        if not isinstance(applied, nn.Module):
            raise TypeError(f"apply returned {applied!r}, not the module to train")
        self.running.pop()
        for name, (place, shape) in tensors_in_module(applied).items():
            if name in before:
                self._count_shards(method, *before[name], place, shape)
        return applied

    def _count_shards(
        self, method: Method, old_place: Place, old_shape: torch.Size, place: Place, shape: torch.Size
    ) -> None:
        """Note that a method changed the place or the shape of a parameter or a buffer."""
        self._shards[place] = self._shards.get(old_place, 1)
        if shape != old_shape and method.differs != "experts":  # LocalExperts knows its own shards
            self._shards[place] *= method.mesh.size(*method.average_axes)
            owner, name = place
            mark_shards(owner, format_sizes(method.mesh, method.average_axes), name)

    def count_pieces(self, methods: Sequence[Method], applied: nn.Module) -> dict[str, int]:
        """The number of different pieces of each parameter, beyond those of DTensors, by name.

        Args:
            methods: the methods.
            applied: the module that ``run`` returned.
        """
        experts, pieces = expert_tensors(applied), dict[str, int]()
        for name, (place, _) in tensors_in_module(applied).items():
            pieces[name] = self._shards.get(place, 1)
            for method in methods:
                if method.level is Level.PIPELINE or (method.differs == "experts" and name in experts):
                    pieces[name] *= method.mesh.size(*method.owns)
        return pieces


def tensors_in_module(module: nn.Module) -> dict[str, tuple[Place, torch.Size]]:
    """The place and the shape of each parameter and buffer, by name; of a DTensor, the shape of the whole."""
    found: dict[str, tuple[Place, torch.Size]] = {}
    for owner_name, owner in module.named_modules():
        own = (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
        found |= {f"{owner_name}.{name}".lstrip("."): ((owner, name), tensor.shape) for name, tensor in own}
    return found


def release_new_groups(before: set[tuple[int, ...]], method: Method) -> None:
    """Release the groups inside a method's block whose ranks are not in ``before``."""
    mesh = method.mesh
    block = {*mesh.ranks(*{*method.owns, *method.average_axes})}
    for ranks in {group.ranks for group in mesh.held()} - before:
        if block.issuperset(ranks):
            mesh.release(ranks=ranks)
