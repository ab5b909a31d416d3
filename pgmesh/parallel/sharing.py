"""This rank's part of a batch: its rows and, where sequences are cut, its positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from pgmesh.errors import ShapeError
from pgmesh.parallel.divisibility import divide_evenly
from pgmesh.parallel.nests import map_tensors, tensors_in


class CutsSequences(Protocol):
    """A method that cuts sequences, such as ``ContextParallel``."""

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's positions of a tensor, its second dimension."""
        ...


def part_of_batch(batch: Any, rank: int, num_replicas: int, axes: str, cutting: Sequence[CutsSequences]) -> Any:
    """This rank's part of a nest of tensors, as ``Composition.share`` returns it.

    Args:
        batch: the whole batch.
        rank: index of this rank's part of the rows.
        num_replicas: number of parts of the rows.
        axes: the axes of the parts, with sizes, for errors.
        cutting: the methods that cut positions.
    """

    def part_of(tensor: Tensor) -> Tensor:
        if tensor.ndim:
            each = divide_evenly(len(tensor), f"a batch of {len(tensor)} rows", "rows", num_replicas, axes)
            tensor = tensor.narrow(0, rank * each, each)
        if tensor.ndim > 1:
            for method in cutting:
                tensor = method.cut(tensor)
        return tensor

    tensors = [*tensors_in(batch)]
    rows = max((each.size(0) for each in tensors if each.ndim > 1), default=0)
    call = f"positions = positions.expand({rows}, -1)   # position ids: one row for each row of the batch"
    _check_equal_sizes(tensors, 0, "rows", call)
    if cutting:
        call = "tensor.chunk(together.num_replicas)[together.rank]   # of a tensor without positions: its rows"
        _check_equal_sizes(tensors, 1, "positions", call)
    return map_tensors(part_of, batch)


def _check_equal_sizes(tensors: Sequence[Tensor], dimension: int, unit: str, call: str) -> None:
    """Check that all tensors that have a dimension have the same size of it."""
    sizes = [*dict.fromkeys(each.size(dimension) for each in tensors if each.ndim > dimension)]
    if len(sizes) > 1:
        counts = " and ".join(map(str, sizes))
        raise ShapeError(f"the tensors of this batch have {counts} {unit}, dimension {dimension}.\n\n  {call}")
