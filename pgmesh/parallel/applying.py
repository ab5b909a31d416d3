"""Application of methods to a module, and the number of pieces into which they divide each parameter.

Each method applies the methods of lower levels by ``inner``, and then itself: to the whole module, or, inside a
pipeline, to each stage.

A norm counts each piece once, so it has to know how many ranks hold the same piece. DTensors say it. For all other
pieces the methods are known: stages of a pipeline, experts, and *plain shards*, which are recognized by their shapes.
Example: on ``pp=2, tp=2``, a method along tp replaces a weight of shape (4, 4) by one of shape (2, 4), in one of two
stages. So the weight has 2 plain shards, and each rank holds one of 2 x 2 different pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from pgmesh.parallel.base import Level, Method
from pgmesh.parallel.divisibility import format_sizes
from pgmesh.parallel.local_experts import expert_tensors, mark_shards

Place = tuple[nn.Module, str]
"""A module, and the name that a parameter or a buffer has there."""


class Application:
    """One application of methods to a module."""

    def __init__(self) -> None:
        self.running: list[Method] = []
        """The methods that are being applied, outermost first. After an error, the last one has raised it."""
        self._shards: dict[Place, int] = {}
        """Number of plain shards of each parameter and buffer; 1 if it is whole or a DTensor."""

    def run(self, methods: Sequence[Method], module: nn.Module) -> nn.Module:
        """Apply the last of the methods, which applies the others, and return the module to train.

        Args:
            methods: lowest level first.
            module: the module, or a stage of it.
        """
        if not methods:
            return module
        *lower_methods, method = methods
        before: dict[str, tuple[torch.Size, int]] = {}
        """The shape and the number of shards of each tensor, before this method is applied."""

        def inner(part: nn.Module) -> nn.Module:
            part = self.run(lower_methods, part)
            before.update((name, (shape, self._shards.get(place, 1))) for name, place, shape in places_in(part))
            return part

        self.running.append(method)
        applied = method.around(module, inner)
        if not isinstance(applied, nn.Module):
            raise TypeError(f"apply returned {applied!r}, not the module to train")
        self.running.pop()
        for name, place, shape in places_in(applied):
            if name in before:  # a wrapper, such as DDP, changes the name, and neither the place nor the shape
                old_shape, shards = before[name]
                if shape != old_shape and method.differs != "experts":  # LocalExperts knows its own shards
                    shards *= method.mesh.size(*method.average_axes)
                    mark_shards(place[0], format_sizes(method.mesh, method.average_axes), place[1])
                self._shards[place] = shards
        return applied

    def count_pieces(self, methods: Sequence[Method], applied: nn.Module) -> dict[str, int]:
        """The number of different pieces of each parameter, beyond those of DTensors, by name.

        Args:
            methods: the methods.
            applied: the module that ``run`` returned.
        """
        experts, pieces = expert_tensors(applied), dict[str, int]()
        for name, place, _ in places_in(applied):
            pieces[name] = self._shards.get(place, 1)
            for method in methods:
                if method.level is Level.PIPELINE or (method.differs == "experts" and name in experts):
                    pieces[name] *= method.mesh.size(*method.owns)
        return pieces


def places_in(module: nn.Module) -> Iterator[tuple[str, Place, torch.Size]]:
    """The name, the place and the shape of each parameter and buffer; of a DTensor, the shape of the whole."""
    for owner_name, owner in module.named_modules():
        for tensors in (owner.named_parameters(recurse=False), owner.named_buffers(recurse=False)):
            for name, tensor in tensors:
                yield f"{owner_name}.{name}".lstrip("."), (owner, name), tensor.shape


def release_new_groups(before: set[tuple[int, ...]], method: Method) -> None:
    """Release the groups inside a method's block whose ranks are not in ``before``."""
    mesh = method.mesh
    block = {*mesh.ranks(*{*method.owns, *method.average_axes})}
    for ranks in {group.ranks for group in mesh.held()} - before:
        if block.issuperset(ranks):
            mesh.release(ranks=ranks)
