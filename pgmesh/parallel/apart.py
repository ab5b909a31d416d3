"""What a method finds in a module that is another's: weights that are left alone, and what another stage has."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn

MARK = "pgmesh_apart"


def keep_apart(weights: Iterable[nn.Parameter], cut: str = "") -> None:
    """Have data and sharded data parallelism leave these weights alone: who calls it sums their gradients.

    Args:
        cut: the axes along which ranks hold parts of them, where they are no DTensors, which say so themselves.
    """
    for weight in weights:
        setattr(weight, MARK, cut)


def kept_apart(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a module that are to be left alone, by name."""
    return {name: weight for name, weight in module.named_parameters() if hasattr(weight, MARK)}


def is_elsewhere(module: nn.Module | None) -> bool:
    """Whether another stage of a pipeline has this module: here it is None, or what stands in for it."""
    pipeline = sys.modules.get("pgmesh.parallel.pipeline")
    return module is None or (pipeline is not None and isinstance(module, pipeline.Elsewhere))


def is_part(module: nn.Module) -> bool:
    """Whether other stages of a pipeline have some of a module."""
    return any(is_elsewhere(child) for each in module.modules() for child in each._modules.values())
