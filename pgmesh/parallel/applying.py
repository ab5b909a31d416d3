"""Application of methods to a module, and the shards that they leave as plain tensors.

Each method applies the methods of lower levels by ``inner``, and then itself: to the whole module, or, inside a
pipeline, to each stage.

torch knows shards that are DTensors. Other shards are known here by their shapes. Example: a method along ``tp=2``
replaces a weight of shape (4, 4) by one of shape (2, 4). So this weight has 2 shards, and each rank along tp has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pgmesh._util.marks import SHARD_MARK
from pgmesh.parallel.base import Method
from pgmesh.parallel.divisibility import format_sizes

Place = tuple[nn.Module, str]
"""A module, and the name that a parameter or a buffer has there."""


class Application:
    """One application of methods to a module."""

    def __init__(self) -> None:
        self.running: list[Method] = []
        """The methods that are being applied, outermost first. After an error, the last one has raised it."""
        self.shards: dict[Place, int] = {}
        """Number of shards of each parameter and buffer, 1 if it is whole or a DTensor."""

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

        def inner(part: nn.Module) -> nn.Module:
            part = self.run(lower_methods, part)
            before.update((name, (shape, self.shards.get(place, 1))) for name, place, shape in places_in(part))
            return part

        self.running.append(method)
        applied = method.around(module, inner)
        if not isinstance(applied, nn.Module):
            raise TypeError(f"apply returned {applied!r}, not the module to train")
        self.running.pop()
        for name, place, shape in places_in(applied):
            if name in before:  # a wrapper, such as DDP, changes the name, and neither the place nor the shape
                old_shape, shards = before[name]
                self.shards[place] = shards if shape == old_shape else shards * self._mark_shard(method, place)
        return applied

    def _mark_shard(self, method: Method, place: Place) -> int:
        """Mark a shard of a method in all later state dicts, and return the number of its shards.

        ``LocalExperts`` knows its own shards.
        """
        if method.differs == "experts":
            return 1
        module, name = place
        axes = method.average_axes
        hook = partial(_mark_in_state_dict, name, format_sizes(method.mesh, axes))
        module.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
        return method.mesh.size(*axes)


def _mark_in_state_dict(name: str, axes: str, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    if f"{prefix}{name}" in state:  # another hook may have removed it, and buffers need not be in it
        setattr(state[f"{prefix}{name}"], SHARD_MARK, axes)


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
