"""Norm of the gradients of a parallel model over ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from pgmesh import torch_private
from pgmesh.parallel.exchange import collective_device


def local(tensor: Tensor) -> Tensor:
    """Local tensor of a DTensor; any other tensor unchanged. The memory is shared.

    Args:
        tensor: a parameter or a gradient, which may be sharded.

    >>> from pgmesh.parallel import local
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> local(torch.ones(4)).shape, local(distribute_tensor(torch.ones(4), mesh.device_mesh("tp"), [Shard(0)])).shape
    (torch.Size([4]), torch.Size([2]))
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shard(gradient: Tensor) -> tuple[Tensor, int]:
    """This rank's shard of a gradient, and the number of shards. A partial gradient is summed before."""
    if not isinstance(gradient, DTensor):
        return gradient.detach(), 1
    placements = [Replicate() if each.is_partial() else each for each in gradient.placements]
    sizes = zip(gradient.device_mesh.shape, placements)
    shards = math.prod(size for size, placement in sizes if not placement.is_replicate())
    return gradient.redistribute(placements=placements).to_local().detach(), shards


def norm_of_pieces(pieces: Iterable[tuple[Tensor, int]], norm_type: float, group: ProcessGroup) -> Tensor:
    """Norm of a vector that lies in pieces on the ranks of a group. Every rank of the group calls it.

    Args:
        pieces: pairs of a piece on this rank and a number n: the group holds n different pieces of this weight, each on
            1/n of its ranks.
        norm_type: order of the norm.
        group: the group.
    """
    by_kind: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}
    for piece, different in pieces:
        if piece.numel():
            by_kind.setdefault((piece.device, piece.dtype, different), []).append(piece)
    device = collective_device(group, next((device for device, *_ in by_kind), torch.device("cpu")))
    total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    for (_, dtype, different), tensors in by_kind.items():
        norms = torch_private.foreach_norm(tensors, norm_type, torch.promote_types(dtype, total.dtype))
        sizes = torch.stack(list(norms)).to(total)
        if math.isinf(norm_type):
            total = torch.maximum(total, sizes.max())
        else:
            total = total + (sizes**norm_type).sum() * different / group.size()
    dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
    return total if math.isinf(norm_type) else total ** (1 / norm_type)


def scale_gradients(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in map(local, gradients):
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), tensors in by_kind.items():  # 16-bit floats would round the factor
        torch_private.foreach_multiply(tensors, factor.to(device, torch.promote_types(dtype, torch.float32)))
