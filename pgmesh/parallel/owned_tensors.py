"""The parameters and buffers of a module, each with the submodule that has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pgmesh.errors import MethodError


class Owned(NamedTuple):
    """A parameter or a buffer, and the submodule that has it."""

    name: str
    """The name in the whole module."""
    owner: nn.Module
    key: str
    """The name in the owner."""
    tensor: Tensor


def owned_tensors(module: nn.Module) -> Iterator[Owned]:
    """The parameters and buffers of a module."""
    for prefix, owner in module.named_modules():
        for key, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
            yield Owned(f"{prefix}.{key}".lstrip("."), owner, key, tensor)


def check_shapes(before: Mapping[str, torch.Size], module: nn.Module) -> None:
    """Check that a method changed the shape of no parameter or buffer. A DTensor has that of the whole.

    Args:
        before: the shapes by name, before the method was applied.
        module: what its ``apply`` returned.

    Raises:
        MethodError: it did.
    """
    for name, _, _, tensor in owned_tensors(module):
        if (shape := before.get(name, tensor.shape)) != tensor.shape:
            raise MethodError(
                f"apply replaced {name}, of shape {tuple(shape)}, by a plain tensor of shape {tuple(tensor.shape)}. "
                "A shard has to be a DTensor, of which norms and checkpoints know what part of the weight it is.\n\n"
                "  DTensor.from_local(shard, self.mesh.device_mesh(*self.owns), [Shard(0)])"
            )
