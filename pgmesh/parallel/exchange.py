"""Rows sent between the ranks of a group, so that gradients find the way back."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


def all_to_all_rows(
    rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: ProcessGroup
) -> Tensor:
    """The rows that the ranks of a group send here, in the order of the group; gradients go back the same way.

    Every rank of the group calls it, forward and backward.

    Args:
        rows: what to send, cut along the first dimension: the first rank's rows first.
        send: how many rows go to each rank.
        receive: how many come from each.
    """
    if group.size() == 1:
        return rows
    received: Tensor = _AllToAllRows.apply(rows, list(send_counts), list(receive_counts), group)  # type: ignore[no-untyped-call]
    return received


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send_counts: list[int], receive_counts: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.back = receive_counts, send_counts, group
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receive_counts, send_counts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAllRows.apply(gradients[0], *ctx.back), None, None, None  # type: ignore[no-untyped-call]


def all_gather_stacked(part: Tensor, group: ProcessGroup) -> Tensor:
    """The equal parts that the ranks of a group hold, stacked along a new first dimension, on every rank.

    The gradient of a part is the sum of what all ranks made of it.
    """
    n = group.size()
    return all_to_all_rows(part.expand(n, *part.shape), [1] * n, [1] * n, group)


def ring_shift(tensor: Tensor, group: ProcessGroup, tag: int = 0) -> tuple[Tensor, list[dist.Work]]:
    """What the rank before this one in the ring of a group passes on; it is there once the works were waited for.

    Sending and receiving are one batch, so that no rank waits for another to begin. ``tensor`` stays as it is
    until then.
    """
    me, n = group.rank(), group.size()
    coming, going = torch.empty_like(tensor), tensor.contiguous()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, going, group=group, tag=tag, group_peer=(me + 1) % n),
            dist.P2POp(dist.irecv, coming, group=group, tag=tag, group_peer=(me - 1) % n),
        ]
    )
    return coming, works


def send_tensors(tensors: Sequence[Tensor], rank: int, group: ProcessGroup, device: torch.device) -> None:
    """Send tensors of any shapes and types to a rank of the world that calls ``receive_tensors``.

    Each message is a batch of its own, as in torch's pipelines: so NCCL connects the whole group at the first one.
    """
    file = io.BytesIO()
    torch.save([tensor.detach().clone() for tensor in tensors], file)  # copies: a part of a tensor is saved whole
    content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(device)
    _send_or_receive(dist.isend, torch.tensor([content.numel()], device=device), rank, group)
    _send_or_receive(dist.isend, content, rank, group)


def receive_tensors(rank: int, group: ProcessGroup, device: torch.device) -> tuple[Tensor, ...]:
    """What a rank of the world sends with ``send_tensors``, on this device."""
    size = _send_or_receive(dist.irecv, torch.empty(1, dtype=torch.int64, device=device), rank, group)
    content = _send_or_receive(dist.irecv, torch.empty(int(size), dtype=torch.uint8, device=device), rank, group)
    file = bytearray(len(content))
    torch.frombuffer(file, dtype=torch.uint8).copy_(content)
    return tuple(torch.load(io.BytesIO(file), map_location=device, weights_only=True))


def _send_or_receive(operation: Callable[..., Any], tensor: Tensor, rank: int, group: ProcessGroup) -> Tensor:
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, rank, group)]):
        work.wait()
    return tensor


def all_reduce_forward(part: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the parts that the ranks of a group hold, which all go on with alike: its gradient is every part's."""
    summed: Tensor = part if group.size() == 1 else _AllReduceForward.apply(part, group)  # type: ignore[no-untyped-call]
    return summed


class _AllReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        summed = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def all_reduce_backward(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """A tensor that every rank of a group holds, of which each makes a part: its gradient is the sum of theirs."""
    same: Tensor = tensor if group.size() == 1 else _AllReduceBackward.apply(tensor, group)  # type: ignore[no-untyped-call]
    return same


class _AllReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllReduceForward.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]
