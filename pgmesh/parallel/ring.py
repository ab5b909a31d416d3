"""Attention over a sequence that is cut along a group: keys and values go round, or heads are exchanged for positions.

Ring attention: https://arxiv.org/abs/2310.01889. Ulysses: https://arxiv.org/abs/2309.14509. A ring passes keys and
values from rank to rank; each merges what it sees by the logarithm of its sum of exponentials, so the result is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from pgmesh.errors import ShapeError
from pgmesh.parallel.exchange import exchange, pass_on

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

ROWS = 1024
"""How many queries' scores are held in memory at a time."""


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
    """Attention of this rank's queries to the keys and values of every rank of a group.

    Every rank of the group calls it, forward and backward, with parts of one length. Scores and sums are kept in
    32 bits at least. Plain matrix products, so the same on every device; untested on GPUs.

    Args:
        q: this rank's queries, (..., heads, positions, width).
        k: this rank's keys; fewer heads with ``enable_gqa``.
        v: this rank's values.
        group: the ranks that share the sequence out, in its order.
        is_causal: no position sees later ones.
        scale: of the scores; 1 / sqrt(width) unless given.
        enable_gqa: each head of k and v serves as many heads of q as there are for it.
        balanced: rank i of n holds chunks i and 2n-1-i of 2n, so that all have as much to do where is_causal; if not,
            rank i holds part i of n.

    Raises:
        ShapeError: is_causal with other numbers of queries than keys, or an odd one where balanced.
    """
    if is_causal and q.size(-2) != k.size(-2):
        raise ShapeError(f"causal attention has as many queries as keys, not {q.size(-2)} and {k.size(-2)}.")
    if is_causal and balanced and q.size(-2) % 2:
        raise ShapeError(
            f"each rank holds two chunks of one length where the work is balanced, but it has {q.size(-2)} positions."
        )
    scale = q.size(-1) ** -0.5 if scale is None else scale
    # Heads of q that share a head of k stand along an axis of their own, along which k and v are broadcast.
    shared = torch.unflatten(q, -3, (k.size(-3), -1)) if enable_gqa else q.unsqueeze(-3)
    with torch.autocast(q.device.type, enabled=False):
        out: Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
            shared, k.unsqueeze(-3), v.unsqueeze(-3), group, is_causal, scale, balanced
        )
    return out.flatten(-4, -3) if enable_gqa else out.squeeze(-3)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, causal: bool, scale: float, balanced: bool
    ) -> Tensor:
        n, me, width = group.size(), group.rank(), k.size(-1)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:-1], v.size(-1)), dtype=wide)
        log_sum = q.new_full((*q.shape[:-1], 1), -torch.inf, dtype=wide)
        here = torch.cat([k, v], -1)
        for step in range(n):
            if step + 1 < n:
                later, works = pass_on(here, group)
            for rows, keys, mask in _blocks(me, (me - step) % n, q, k, causal, balanced):
                key, value = torch.split(here[..., keys, :].to(wide), [width, v.size(-1)], -1)
                scores = _scores(q[..., rows, :].to(wide), key, scale, mask)
                most = scores.logsumexp(-1, keepdim=True)
                before, after = log_sum[..., rows, :], torch.logaddexp(log_sum[..., rows, :], most)
                fresh = (scores - after).exp() @ value
                out[..., rows, :] = out[..., rows, :] * (before - after).exp() + fresh
                log_sum[..., rows, :] = after
            if step + 1 < n:
                for work in works:
                    work.wait()
                here = later
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.how = group, causal, scale, balanced
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        group, causal, scale, balanced = ctx.how
        n, me, width, wide = group.size(), group.rank(), k.size(-1), out.dtype
        gradient = gradient.to(wide)
        own = (gradient * out).sum(-1, keepdim=True)
        of_q = torch.zeros_like(q, dtype=wide)
        here = torch.cat([k, v], -1)
        coming, on_the_way = torch.zeros_like(here, dtype=wide), list[Any]()
        for step in range(n):
            if step + 1 < n:
                later, works = pass_on(here, group)
            of_here = torch.zeros_like(here, dtype=wide)
            for rows, keys, mask in _blocks(me, (me - step) % n, q, k, causal, balanced):
                query, given = q[..., rows, :].to(wide), gradient[..., rows, :]
                key, value = torch.split(here[..., keys, :].to(wide), [width, v.size(-1)], -1)
                shares = (_scores(query, key, scale, mask) - log_sum[..., rows, :]).exp()
                of_scores = shares * (given @ value.mT - own[..., rows, :]) * scale
                of_q[..., rows, :] += of_scores @ key
                both = torch.cat([of_scores.mT @ query, shares.mT @ given], -1)
                of_here[..., keys, :] += both.sum(-3, keepdim=True)
            for work in on_the_way:  # what the ranks before this one made of the same keys and values
                work.wait()
            coming = coming + of_here
            if n > 1:
                coming, on_the_way = pass_on(coming, group, tag=1)
            if step + 1 < n:
                for work in works:
                    work.wait()
                here = later
        for work in on_the_way:  # the last step on brings them home
            work.wait()
        of_k, of_v = torch.split(coming, [width, v.size(-1)], -1)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None, None, None


def _blocks(
    me: int, source: int, q: Tensor, k: Tensor, causal: bool, balanced: bool
) -> list[tuple[slice, slice, Tensor | None]]:
    """Which rows of mine meet which keys of a rank, with what they may not see; never many rows at once."""
    length, half = q.size(-2), k.size(-2) // 2
    start, keys = 0, slice(0, k.size(-2))
    if causal and source != me:
        if balanced:  # its first chunk is before both of mine, or all of it between them
            start, keys = (0, slice(0, half)) if source < me else (half, keys)
        elif source > me:
            return []
    blocks: list[tuple[slice, slice, Tensor | None]] = []
    for first in range(start, length, ROWS):
        rows = slice(first, min(first + ROWS, length))
        if causal and source == me:
            places = torch.arange(rows.start, rows.stop, device=q.device)
            blocks.append((rows, slice(0, rows.stop), torch.arange(rows.stop, device=q.device) > places[:, None]))
        else:
            blocks.append((rows, keys, None))
    return blocks


def _scores(query: Tensor, key: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    scores = query @ key.mT * scale
    return scores if mask is None else scores.masked_fill(mask, -torch.inf)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: ProcessGroup,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of this rank's queries to every rank's keys and values: each rank sees all positions of its heads.

    Every rank of the group calls it, forward and backward, with parts of one length; rank i of n holds part i of n. The
    attention itself is torch's. Untested on GPUs.

    Arguments are those of ``ring_attention``.

    Raises:
        ShapeError: the heads do not divide by the ranks.
    """
    n = group.size()
    q, k, v = (_positions_for_heads(each, n, group) for each in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    mine = torch.unflatten(out, -2, (n, -1)).movedim(-3, 0)  # (n, ..., heads / n, positions, width)
    return exchange(mine, [1] * n, [1] * n, group).movedim(0, -4).flatten(-4, -3)


def _positions_for_heads(tensor: Tensor, n: int, group: ProcessGroup) -> Tensor:
    """Every position of a share of the heads, for a share of the positions of every head."""
    by_heads = torch.unflatten(tensor, -3, (n, -1)).movedim(-4, 0)
    return exchange(by_heads, [1] * n, [1] * n, group).movedim(0, -3).flatten(-3, -2)
