"""Shards of single experts: the linear layers of an expert are sharded, as in tensor parallelism, as plain tensors."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from torch import Tensor, nn

from pgmesh.errors import MethodError
from pgmesh.parallel.base import format_axes
from pgmesh.parallel.divisibility import divide_along_axes, format_sizes

if TYPE_CHECKING:
    from pgmesh.layout import Axis
    from pgmesh.mesh import ProcessGroupMesh

OUTPUTS, INPUTS = 0, 1
"""The dimensions of the weight of a linear layer."""


@dataclass(frozen=True)
class ExpertShards:
    """The layers of experts that are sharded, and the axes along which they are."""

    mesh: ProcessGroupMesh
    axes: tuple[Axis, ...]
    columns: tuple[str, ...]
    """Name patterns of the linear layers whose outputs are sharded."""
    rows: tuple[str, ...]
    """Name patterns of those whose inputs are sharded: each rank has a part of the sum that is the output."""

    def shard(self, name: str, expert: nn.Module) -> None:
        """Keep this rank's shard of each linear layer of an expert that matches a pattern, in place.

        Args:
            name: the name of the expert, for messages.
            expert: the expert.

        Raises:
            MethodError: a parameter is in none of these layers, or a layer in ``rows`` has a bias.
            ShapeError: a layer is not divisible.
        """
        whole = list[str]()
        for inner, layer in expert.named_modules():
            dimension = self._dimension(inner) if isinstance(layer, nn.Linear) else None
            sharded = () if dimension is None else ("weight", "bias")
            own = [key for key, _ in layer.named_parameters(recurse=False)]
            whole += [f"{inner}.{key}".lstrip(".") for key in own if key not in sharded]
            if isinstance(layer, nn.Linear) and dimension is not None:
                self._shard_linear(f"{name}.{inner}", layer, dimension)
        if whole:
            raise MethodError(
                f"{name} has parameters that are not sharded, {format_axes(sorted(whole))}: each of the "
                f"{self._ranks()} would get a part of their gradients. Name their layers in columns= or rows=, "
                "or move them out of the experts."
            )

    def _dimension(self, name: str) -> int | None:
        """The dimension of a layer's weight that is sharded; None if the layer matches no pattern."""
        if any(fnmatch(name, pattern) for pattern in self.columns):
            return OUTPUTS
        return INPUTS if any(fnmatch(name, pattern) for pattern in self.rows) else None

    def _shard_linear(self, name: str, layer: nn.Linear, dimension: int) -> None:
        """Keep this rank's shard of a layer along a dimension of its weight, in place."""
        size, what = layer.weight.size(dimension), ("outputs", "inputs")[dimension]
        part = divide_along_axes(size, f"{name}: {size} {what}", what, self.mesh, self.axes)
        start = self.mesh.index(*self.axes) * part
        layer.weight = _parameter(layer.weight, layer.weight.narrow(dimension, start, part))
        setattr(layer, ("out_features", "in_features")[dimension], part)
        if layer.bias is not None:
            if dimension == INPUTS:
                raise MethodError(
                    f"{name} has a bias, which all {self._ranks()} would add to the sum.\n\n"
                    "  nn.Linear(..., bias=False)   # for layers whose inputs are sharded"
                )
            layer.bias = _parameter(layer.bias, layer.bias.narrow(0, start, part))

    def _ranks(self) -> str:
        return f"{self.mesh.size(*self.axes)} ranks along {format_sizes(self.mesh, self.axes)}"


def _parameter(old: Tensor, part: Tensor) -> nn.Parameter:
    return nn.Parameter(part.detach().clone(), requires_grad=old.requires_grad)
