"""Collectives with gradients, used by the parallel methods.

Each docstring has the operation of the forward pass and that of the backward pass.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from pgmesh import torch_private
from pgmesh.groups.default_world import device_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


def collective_device(group: ProcessGroup, device: torch.device) -> torch.device:
    """Device for the tensors of a collective whose data is on ``device``, so that all ranks use the same backend.

    With one backend it is ``device`` if the backend serves it. Otherwise it is the accelerator that the group serves:
    under NCCL for weights on the CPU, and under ``cpu:gloo,cuda:nccl`` always.

    Args:
        group: the group.
        device: device of the data; the CPU for a rank without data.
    """
    accelerator, served = device_of(group), {each.type for each in torch_private.device_types(group)}
    backends = {each.rpartition(":")[2] for each in dist.get_backend_config(group).split(",")}
    return device if device.type == accelerator.type or (len(backends) == 1 and device.type in served) else accelerator


@contextlib.contextmanager
def on_served_device(tensor: Tensor, group: ProcessGroup) -> Iterator[Tensor]:
    """Yield the tensor for a collective: itself, or a copy, which is copied back at exit.

    The copy is on a device of the group, and contiguous: Gloo takes consecutive memory for the elements of any tensor.
    """
    moved = tensor.to(collective_device(group, tensor.device)).contiguous()
    yield moved
    if moved is not tensor:
        tensor.copy_(moved)


def broadcast_all(tensors: Iterable[Tensor], group: ProcessGroup, source: int = 0) -> None:
    """Broadcast the values of tensors from a rank of a group. Every rank has as many, of the same shapes."""
    for tensor in tensors:
        with on_served_device(tensor.detach(), group) as served:
            dist.broadcast(served, group=group, group_src=source)


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


def all_reduce_forward(part: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce (sum); the backward pass is the identity.

    For partial results whose sum all ranks use in the same way. Megatron: ``reduce_from_tensor_model_parallel_region``.
    """
    summed: Tensor = _AllReduce.apply(part, group)  # type: ignore[no-untyped-call]
    return summed


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        summed = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def wait_for(tensor: Tensor) -> Tensor:
    """The tensor, once the collective that computes it is done. Until then torch.compile would drop its gradient."""
    waited: Tensor = _Wait.apply(tensor) if hasattr(tensor, "trigger_wait") else tensor  # type: ignore[no-untyped-call]
    return waited


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        waited: Tensor = tensor.trigger_wait()
        return waited

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def to_lists(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Integers of several vectors of one device, as lists. It is one copy to the host, which waits for a GPU once."""
    numbers = iter(torch.cat([*tensors]).tolist())
    return [list(itertools.islice(numbers, each.numel())) for each in tensors]


def all_reduce_gradients(parameters: Sequence[Tensor], group: ProcessGroup | None, divisor: int) -> Sequence[Tensor]:
    """The identity on parameters; the backward pass divides their gradients and all-reduces them (sum).

    Gradients of one dtype are one flat tensor, so that a layer with many parameters has one all-reduce for each dtype.

    Args:
        parameters: the parameters.
        group: the group of ranks with the same parameters; None for parameters that no other rank has.
        divisor: number by which gradients are divided.
    """
    same: Sequence[Tensor] = _AllReduceGradients.apply(group, divisor, *parameters)  # type: ignore[no-untyped-call]
    return same


class _AllReduceGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | None, divisor: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = group, divisor
        return tuple(each.view_as(each) for each in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        group, divisor = ctx.arguments
        reduced = list(gradients)
        for dtype in dict.fromkeys(each.dtype for each in gradients):
            places = [i for i, each in enumerate(gradients) if each.dtype is dtype]
            flat = torch.cat([gradients[i].flatten() for i in places]).div_(divisor)
            if group is not None and group.size() > 1:
                dist.all_reduce(flat, group=group)
            for i, part in zip(places, torch.split(flat, [gradients[i].numel() for i in places])):
                reduced[i] = part.view_as(gradients[i])
        return None, None, *reduced


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
    received, sent = torch.empty_like(tensor, memory_format=torch.contiguous_format), tensor.contiguous()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=(rank + 1) % n),
            dist.P2POp(dist.irecv, received, group=group, tag=tag, group_peer=(rank - 1) % n),
        ]
    )
    return received, works
