"""``Placed``: a tensor as a part of a whole, where there is no DTensor."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from pgmesh._util.formatting import count_of, name_ranks
from pgmesh.errors import ShapeError
from pgmesh.layout import Layout
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.resharding.plan import layout_of
from pgmesh.resharding.sharding import Box, Placements, Region, Sharding, intersect, size_of


class Placed:
    """A tensor that is this rank's part of a whole. It stands in the place of a DTensor in source and target.

    It needs no DeviceMesh, so it works in worlds beside torch's default one too. The parts of all ranks of ``mesh``
    have to cover the whole. Ranks may hold the same part; otherwise the parts must not overlap.

    Args:
        tensor: the part, with any strides: also a view of a larger tensor. A target is written through it.
        shape: shape of the whole.
        mesh: the mesh, slice or Layout of all ranks that hold parts of the whole.
        placements: DTensor placements, one for each axis, or by axis: ``{"tp": 0}`` shards dimension 0 along axis tp.
        offsets: in place of ``placements``: in each dimension, the index in the whole at which the part starts.

    Raises:
        AxisError: there is no such axis.
        ShapeError: the part does not fit into the whole, or there are placements and offsets.

    Queries and keys in one parameter. Rank 1 of 2 has the second half of the queries, and all keys:

    >>> fused, mesh = torch.zeros(6, 8), Layout(tp=2)
    >>> queries = Placed(fused.narrow(0, 0, 4), (8, 8), mesh, {"tp": 0})
    >>> keys = Placed(fused.narrow(0, 4, 2), (2, 8), mesh, offsets=(0, 0))
    >>> queries.sharding.region_of(1), keys.sharding.region_of(1)
    ((((4, 8),), ((0, 8),)), (((0, 2),), ((0, 8),)))
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        shape: Sequence[int],
        mesh: ProcessGroupMesh | Layout,
        placements: Placements = None,
        *,
        offsets: Sequence[int] | None = None,
    ) -> None:
        if isinstance(tensor, DTensor):
            raise ShapeError("Placed takes a local tensor, not a DTensor.\n\n  Placed(tensor.to_local(), ...)")
        if offsets is not None and placements is not None:
            raise ShapeError("a part has placements or offsets, not both.")
        self.tensor, self.shape, self.dtype, self.mesh = tensor, tuple(shape), tensor.dtype, mesh
        self.placements = placements if offsets is None else Box.at(offsets, tensor.shape, shape)
        self.sharding = Sharding(self.shape, layout_of(mesh), self.placements)
        """The region of each rank; with offsets, of this rank alone."""

    def to_local(self) -> torch.Tensor:
        """The part, as ``DTensor.to_local``."""
        return self.tensor


def fault_of_boxes(shape: Sequence[int], ranks_of: Mapping[Region | None, Sequence[int]]) -> str:
    """A description of boxes of one tensor that overlap, or do not cover the whole; "" if they are right.

    Args:
        ranks_of: the ranks that hold each box; None without boxes.
    """
    boxes = tuple(box for box in ranks_of if box is not None and size_of(box))
    if None in ranks_of:
        return ""
    if pair := _overlapping(boxes):
        return f"{' and '.join(f'{text_of(box)} on {name_ranks(sorted(ranks_of[box]))}' for box in pair)} overlap"
    missing = math.prod(shape) - sum(map(size_of, boxes))
    return f"{count_of(missing, 'element')} are in no part" if missing > 0 else ""


@functools.lru_cache  # layers of a model have the same boxes
def _overlapping(boxes: tuple[Region, ...]) -> tuple[Region, Region] | None:
    """The first two boxes that overlap."""
    return next((pair for pair in itertools.combinations(boxes, 2) if do_overlap(*pair)), None)


def do_overlap(one: Region, other: Region) -> bool:
    """Return True if two regions have an element in common."""
    return all(map(intersect, one, other))


def text_of(box: Region) -> str:
    """A box in messages, as it is written to index a tensor."""
    return f"[{', '.join(f'{start}:{stop}' for intervals in box for start, stop in intervals or [(0, 0)])}]"


def find_shared_memory(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Pairs of strided tensors that have elements in common in memory, at least one of each group of such tensors.

    >>> x = torch.zeros(4, 4)
    >>> find_shared_memory({"left": x[:, :2], "right": x[:, 2:], "last": x.T[3:]})
    ['last and right']
    """
    names, runs = [*tensors], [torch.empty(0, 3, dtype=torch.int64)]
    for owner, tensor in enumerate(tensors.values()):
        starts, length = _runs(tensor)
        runs.append(torch.stack([starts, starts + length, torch.full_like(starts, owner)], 1))
    rows = torch.cat(runs)
    rows = rows[rows[:, 0].argsort()]
    shared = rows[1:, 0] < rows[:-1, 1]
    pairs = zip(rows[:-1, 2][shared].tolist(), rows[1:, 2][shared].tolist())
    return sorted({" and ".join(sorted((names[one], names[other]))) for one, other in pairs})


def _runs(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The addresses of a tensor's runs of consecutive bytes, and their length."""
    starts, length = torch.tensor([tensor.data_ptr()])[: tensor.numel()], tensor.itemsize
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        step = stride * tensor.itemsize
        if step == length and len(starts) == 1:
            length *= size
        else:
            starts = (starts[:, None] + step * torch.arange(size)).flatten()
    return starts, length
