"""Collectives with gradients, and point-to-point transfers, used by the parallel methods.

Each docstring has the operation of the forward pass and that of the backward pass.
"""

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
    """All-to-all of rows; the backward pass is the all-to-all in the opposite direction.

    Every rank of the group calls it, forward and backward.

    Args:
        rows: rows to send, (sum of send_counts, ...), sorted by destination in group order.
        send_counts: number of rows for each rank.
        receive_counts: number of rows from each rank.
        group: the group.

    Returns:
        The received rows, (sum of receive_counts, ...), sorted by source in group order.
    """
    if group.size() == 1:
        return rows
    arguments = rows, list(send_counts), list(receive_counts), group
    received: Tensor = _AllToAllRows.apply(*arguments)  # type: ignore[no-untyped-call]
    return received


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
        ctx.backward_arguments = receive, send, group
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows: Tensor = _AllToAllRows.apply(gradients[0], *ctx.backward_arguments)  # type: ignore[no-untyped-call]
        return rows, None, None, None


def all_to_all_stacked(parts: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all of equal parts, stacked along the first dimension; the backward pass is the same for gradients."""
    counts = [1] * group.size()
    return all_to_all_rows(parts, counts, counts, group)


def all_gather_stacked(part: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather of equal parts, stacked along a new first dimension; gradients are reduce-scattered (sum)."""
    return all_to_all_stacked(part.expand(group.size(), *part.shape), group)


def all_reduce_forward(part: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce (sum); the backward pass is the identity.

    For partial results whose sum all ranks use in the same way. Megatron: ``reduce_from_tensor_model_parallel_region``.
    """
    summed: Tensor = _AllReduce.apply(part, group, True)  # type: ignore[no-untyped-call]
    return summed


def all_reduce_backward(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The identity; the backward pass is an all-reduce (sum).

    For a replicated input of which each rank uses a part. Megatron: ``copy_to_tensor_model_parallel_region``.
    """
    same: Tensor = _AllReduce.apply(tensor, group, False)  # type: ignore[no-untyped-call]
    return same


class _AllReduce(torch.autograd.Function):
    """All-reduce in one direction, and the identity in the other."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, is_forward: bool) -> Tensor:
        ctx.backward_arguments = group, not is_forward
        if not is_forward or group.size() == 1:
            return tensor.view_as(tensor)
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _AllReduce.apply(gradients[0], *ctx.backward_arguments), None, None  # type: ignore[no-untyped-call]


def ring_shift(tensor: Tensor, group: ProcessGroup, tag: int = 0) -> tuple[Tensor, list[dist.Work]]:
    """Start to send a tensor to the next rank of the group, and to receive one from the previous rank. No gradient.

    Both are one batch, so that no rank waits for another to start. Do not change ``tensor`` before the works are done.
    In a group of one rank, the received tensor is ``tensor``.

    Returns:
        The received tensor, valid after ``wait()`` of all works, and the works.
    """
    rank, n = group.rank(), group.size()
    if n == 1:
        return tensor, []
    received, sent = torch.empty_like(tensor), tensor.contiguous()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=(rank + 1) % n),
            dist.P2POp(dist.irecv, received, group=group, tag=tag, group_peer=(rank - 1) % n),
        ]
    )
    return received, works


def send_tensors(tensors: Sequence[Tensor], rank: int, group: ProcessGroup, device: torch.device) -> None:
    """Send tensors of any shapes and dtypes to a rank of the world, which calls ``receive_tensors``. No gradient.

    Each message is a batch, as in torch's pipelines, so that NCCL connects the whole group with the first one.
    """
    file = io.BytesIO()
    torch.save([tensor.detach().clone() for tensor in tensors], file)  # clone: of a view, save writes the whole storage
    content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(device)
    _send_or_receive(dist.isend, torch.tensor([content.numel()], device=device), rank, group)
    _send_or_receive(dist.isend, content, rank, group)


def receive_tensors(rank: int, group: ProcessGroup, device: torch.device) -> tuple[Tensor, ...]:
    """Receive the tensors that a rank of the world sends with ``send_tensors``, on this device."""
    size = _send_or_receive(dist.irecv, torch.empty(1, dtype=torch.int64, device=device), rank, group)
    content = _send_or_receive(dist.irecv, torch.empty(int(size), dtype=torch.uint8, device=device), rank, group)
    file = bytearray(len(content))
    torch.frombuffer(file, dtype=torch.uint8).copy_(content)
    return tuple(torch.load(io.BytesIO(file), map_location=device, weights_only=True))


def _send_or_receive(operation: Callable[..., Any], tensor: Tensor, rank: int, group: ProcessGroup) -> Tensor:
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, rank, group)]):
        work.wait()
    return tensor
