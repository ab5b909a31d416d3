"""Mean loss over ranks, norm of the gradients over ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm

from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.exchange import collective_device, on_served_device


def mean_over_ranks(loss: Tensor, tokens: Tensor | int, mesh: ProcessGroupMesh, ranks: Sequence[int]) -> Tensor:
    """The sum of the losses of ranks, divided by the sum of their tokens. Every one of them calls it.

    The gradient is that of this rank's loss, times the number of ranks: it is right once it is averaged over them.

    Args:
        loss: the sum of the losses of this rank's tokens.
        tokens: number of this rank's tokens.
        mesh: a mesh of the ranks.
        ranks: the ranks.
    """
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))  # a 16-bit float cannot count tokens
    sums = torch.stack([loss.detach(), torch.as_tensor(tokens).to(loss)])
    if len(ranks) > 1:
        group = mesh.group_of(ranks)
        with on_served_device(sums, group) as summed:
            dist.all_reduce(summed, group=group)
    own = loss * (len(ranks) / sums[1])
    return own + (sums[0] / sums[1] - own).detach()  # the value of all ranks with the gradient of own


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

    A piece that m ranks hold counts on each of them with a factor, so that all together count it once. The factor is
    ``(1 / m) ** (1 / norm_type)``. Example: a piece of norm 3 on two ranks counts as 3 / sqrt(2) on each, and
    sqrt(9 / 2 + 9 / 2) is 3.

    Args:
        pieces: pairs of a piece on this rank and a number n: the group holds n different pieces of this weight, each on
            1/n of its ranks.
        norm_type: order of the norm.
        group: the group.
    """
    tensors: dict[int, list[Tensor]] = {}
    for piece, different in pieces:
        if piece.numel():
            tensors.setdefault(different, []).append(piece)
    device = collective_device(group, next((each.device for each, *_ in tensors.values()), torch.device("cpu")))
    norms = [torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)]
    for different, these in tensors.items():
        factor = (different / group.size()) ** (1 / norm_type)
        norms.append(get_total_norm(these, norm_type).to(norms[0]) * factor)
    own = get_total_norm(norms, norm_type)
    of_ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_ranks, own, group=group)  # an all-reduce of maxima over Gloo may drop a NaN
    return get_total_norm(of_ranks, norm_type)


def scale_gradients(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place.

    The factor of a gradient of 16 bits has 32. torch's kernel for the CPU does not round it; GPUs are untested.
    """
    for gradient in map(local, gradients):
        gradient.mul_(factor.to(gradient.device, torch.promote_types(gradient.dtype, torch.float32)))
