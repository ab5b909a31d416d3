"""Weights whose gradients another method sums than the one that replicates or shards the rest of a module."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

MARK = "pgmesh_apart"


def keep_apart(weights: Iterable[nn.Parameter]) -> None:
    """Have data and sharded data parallelism leave these weights alone."""
    for weight in weights:
        setattr(weight, MARK, True)


def kept_apart(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a module that are to be left alone, by name."""
    return {name: weight for name, weight in module.named_parameters() if hasattr(weight, MARK)}
