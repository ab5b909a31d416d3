"""Shards that are plain tensors: a method replaced a parameter or a buffer by a part of it that is no DTensor.

A DTensor knows that it is a shard. A plain tensor does not, so its module keeps the number of shards, for norms, and
marks them in state dicts with their axes, for checkpoints and resharding, which refuse them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pgmesh._util.marks import SHARD_MARK

COUNTS = "pgmesh_shards"
"""Attribute of a module: the number of shards of each of its own parameters and buffers that has several, by name."""


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


def mark_new_shards(before: Mapping[str, torch.Size], module: nn.Module, count: int, axes: str) -> None:
    """Mark the parameters and buffers of which a method changed the shape. A DTensor has that of the whole.

    Args:
        before: the shapes by name, before the method was applied.
        module: what its ``apply`` returned.
        count: number of ranks along the axes.
        axes: the axes along which the method distributes weights, with sizes.
    """
    for name, owner, key, tensor in owned_tensors(module):
        if tensor.shape != before.get(name, tensor.shape):
            vars(owner).setdefault(COUNTS, {})[key] = count * count_shards(owner, key)
            mark_in_state_dicts(owner, axes, key)


def count_shards(owner: nn.Module, key: str) -> int:
    """The number of plain shards of a parameter or a buffer of a module."""
    counts: dict[str, int] = vars(owner).get(COUNTS, {})
    return counts.get(key, 1)


def mark_in_state_dicts(module: nn.Module, axes: str, key: str = "") -> None:
    """Mark plain shards in all later state dicts of a module, which are all that checkpoints and resharding see.

    Args:
        module: the module.
        axes: the axes along which ranks hold shards, with sizes.
        key: the name of a parameter or a buffer. Default: all parameters.
    """
    module.register_state_dict_post_hook(partial(_mark, axes, key))  # type: ignore[no-untyped-call]


def _mark(axes: str, key: str, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    keys = [key] if key else [each for each, _ in module.named_parameters(remove_duplicate=False)]
    for each in keys:
        if f"{prefix}{each}" in state:  # another hook may have removed it, and buffers need not be in it
            setattr(state[f"{prefix}{each}"], SHARD_MARK, axes)
