"""Attention over a sequence that is sharded over a group, by a ring (https://arxiv.org/abs/2310.01889).

Keys and values travel from rank to rank. Each rank merges the partial outputs by their log-sum-exp, so the result is
exact. The forward and the backward pass are operators of torch, since torch.compile cannot trace sends and receives.

It is a reference implementation: it computes scores in 32-bit floats by plain matrix products, without a flash
attention kernel. On CUDA torch has a ring with such kernels, ``context_parallel``. It works on the mesh's group, in the
place of ``ContextParallel``. The module has to call ``torch.nn.functional.scaled_dot_product_attention`` by this name,
since torch replaces no reference that was kept before. Only the cut of the buffers was tried here::

    from torch.distributed.tensor.experimental import context_parallel

    together = compose(mesh, DataParallel(mesh, "dp"), ContextParallel(mesh, "cp", attention=None))
    model, buffers = together.apply(model), [inputs, labels, positions]
    with context_parallel(mesh.device_mesh("cp"), buffers=buffers, buffer_seq_dims=[1, 1, 1]):
        loss_of(model(inputs, positions), labels).backward()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pgmesh import torch_private
from pgmesh.errors import ShapeError
from pgmesh.parallel.exchange import ring_shift

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed import ProcessGroup, Work

QUERY_BLOCK = 1024
"""Number of queries whose scores are in memory at a time."""


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: ProcessGroup,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    balanced: bool = True,
) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks of a group.

    Every rank of the group calls it, forward and backward, with parts of the same length. Scores and sums have at least
    32 bits. It is a reference implementation of plain matrix products, without a flash attention kernel: it runs on any
    device, and slower than torch's ``context_parallel`` on CUDA. Untested on GPUs.

    Args:
        q: this rank's queries, (..., heads, positions, width).
        k: this rank's keys; fewer heads with ``enable_gqa``.
        v: this rank's values.
        group: the group over which the sequence is sharded, in its order.
        is_causal: mask later positions.
        scale: factor of the scores. Default: 1 / sqrt(width).
        enable_gqa: grouped-query attention: each head of k and v serves several heads of q.
        balanced: rank i of n holds chunks i and 2n-1-i of 2n, so that all ranks have the same work under a causal mask.
            Otherwise rank i holds part i of n.

    Raises:
        ShapeError: queries and keys of different widths, or causal attention with different numbers of them.
    """
    if q.size(-1) != k.size(-1):
        raise ShapeError(f"queries and keys need the same width, not {q.size(-1)} and {k.size(-1)}.")
    if is_causal and q.size(-2) != k.size(-2):
        raise ShapeError(f"causal attention needs as many queries as keys, not {q.size(-2)} and {k.size(-2)}.")
    scale, keys_values = q.size(-1) ** -0.5 if scale is None else scale, torch.cat([k, v], -1)
    if enable_gqa:  # (..., heads of k, heads of q per head of k, positions, width); 1 in the second place of k and v
        q, keys_values = torch.unflatten(q, -3, (k.size(-3), -1)), keys_values.unsqueeze(-3)
    out: Tensor = ring_forward(q, keys_values, group.group_name, is_causal, scale, balanced)[0]
    return (out.flatten(-4, -3) if enable_gqa else out).to(q.dtype)


@torch.library.custom_op("pgmesh::ring_forward", mutates_args=())
def ring_forward(
    q: Tensor, keys_values: Tensor, group_name: str, causal: bool, scale: float, balanced: bool
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the sum of the exponentials of each query's scores, both of ``_acc_dtype``.

    A softmax over blocks of keys: with each block the log-sum grows, the output is scaled by exp(old - new), and
    exp(scores - new) @ values is added.
    """
    group, acc_dtype, width = torch_private.group_named(group_name), _acc_dtype(q), q.size(-1)
    out = q.new_zeros((*q.shape[:-1], keys_values.size(-1) - width), dtype=acc_dtype)
    log_sum = q.new_full((*q.shape[:-1], 1), -torch.inf, dtype=acc_dtype)
    with torch.autocast(q.device.type, enabled=False):
        for source, received in _circulate(keys_values, group):
            for rows, keys, mask in _blocks(group.rank(), source, q, keys_values, causal, balanced):
                key, value = received[..., keys, :].to(acc_dtype).tensor_split([width], -1)
                scores = _scores(q[..., rows, :].to(acc_dtype), key, scale, mask)
                old_log_sum = log_sum[..., rows, :]
                new_log_sum = torch.logaddexp(old_log_sum, scores.logsumexp(-1, keepdim=True))
                block_out = scores.sub_(new_log_sum).exp_() @ value
                out[..., rows, :].mul_((old_log_sum - new_log_sum).exp_()).add_(block_out)
                log_sum[..., rows, :] = new_log_sum
    return out, log_sum


@torch.library.custom_op("pgmesh::ring_backward", mutates_args=())
def ring_backward(
    gradient: Tensor,
    q: Tensor,
    keys_values: Tensor,
    out: Tensor,
    log_sum: Tensor,
    group_name: str,
    causal: bool,
    scale: float,
    balanced: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of queries, and of keys and values.

    The sum of the gradients of a rank's keys and values follows these around the ring: each rank adds its block's, and
    sends the sum on while it computes the next block.
    """
    group, acc_dtype, width = torch_private.group_named(group_name), out.dtype, q.size(-1)
    grad_q = q.new_zeros(q.shape, dtype=acc_dtype)
    grad_keys_values, grad_works = keys_values.new_zeros((), dtype=acc_dtype), list[Any]()
    with torch.autocast(q.device.type, enabled=False):
        delta = (gradient * out).sum(-1, keepdim=True)
        for source, received in _circulate(keys_values, group):
            grad_block = torch.zeros_like(received, dtype=acc_dtype)
            for rows, keys, mask in _blocks(group.rank(), source, q, keys_values, causal, balanced):
                query, grad_out = q[..., rows, :].to(acc_dtype), gradient[..., rows, :]
                key, value = received[..., keys, :].to(acc_dtype).tensor_split([width], -1)
                probabilities = _scores(query, key, scale, mask).sub_(log_sum[..., rows, :]).exp_()
                grad_scores = (grad_out @ value.mT).sub_(delta[..., rows, :]).mul_(probabilities).mul_(scale)
                grad_q[..., rows, :] += grad_scores @ key
                grad_both = torch.cat([grad_scores.mT @ query, probabilities.mT @ grad_out], -1)
                grad_block[..., keys, :] += grad_both.sum_to_size(grad_block[..., keys, :].shape)
            _wait(grad_works)  # for the previous ranks' sum for the same keys and values
            grad_block += grad_keys_values
            grad_keys_values, grad_works = ring_shift(grad_block, group, tag=1)
        _wait(grad_works)  # the last shift returns the sums to the rank of the keys and values
    return grad_q.to(q.dtype), grad_keys_values.to(keys_values.dtype)


@ring_forward.register_fake
def _(q: Tensor, keys_values: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    sizes, dtype = q.shape[:-1], _acc_dtype(q)
    width = keys_values.size(-1) - q.size(-1)
    return q.new_empty((*sizes, width), dtype=dtype), q.new_empty((*sizes, 1), dtype=dtype)


@ring_backward.register_fake
def _(gradient: Tensor, q: Tensor, keys_values: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), keys_values.new_empty(keys_values.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, keys_values, *ctx.settings = inputs
    ctx.save_for_backward(q, keys_values, *output)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*ring_backward(gradient, *ctx.saved_tensors, *ctx.settings), None, None, None, None)


ring_forward.register_autograd(_gradients, setup_context=_save_for_backward)


def _acc_dtype(q: Tensor) -> torch.dtype:
    """dtype of scores and sums: at least 32 bits."""
    return torch.promote_types(q.dtype, torch.float32)


def _circulate(tensor: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Index in the group, and tensor, of each rank, from this one backwards. The next one is received meanwhile."""
    n = group.size()
    for step in range(n):
        following, works = ring_shift(tensor, group) if step + 1 < n else (tensor, [])
        yield (group.rank() - step) % n, tensor
        _wait(works)
        tensor = following


def _wait(works: Iterable[Work]) -> None:
    for work in works:
        work.wait()


def _blocks(
    rank: int, source: int, q: Tensor, k: Tensor, causal: bool, balanced: bool
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Slices of queries and of keys from ``source`` to multiply, with a mask; at most QUERY_BLOCK queries each.

    What a causal mask leaves: of this rank's own keys, those up to each query; of earlier ranks, all keys, or the first
    chunk of two; for keys of later ranks, no queries, or those of the second chunk.
    """
    length, half = q.size(-2), k.size(-2) // 2
    start, keys, mask = 0, slice(0, k.size(-2)), None
    if causal and source != rank:
        if balanced:
            start, keys = (0, slice(0, half)) if source < rank else (half, keys)
        elif source > rank:
            return
    for first in range(start, length, QUERY_BLOCK):
        rows = slice(first, min(first + QUERY_BLOCK, length))
        if causal and source == rank:
            keys = slice(0, rows.stop)
            mask = torch.arange(rows.stop, device=q.device) > torch.arange(first, rows.stop, device=q.device)[:, None]
        yield rows, keys, mask


def _scores(query: Tensor, key: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    scores = (query @ key.mT).mul_(scale)
    return scores if mask is None else scores.masked_fill_(mask, -torch.inf)
