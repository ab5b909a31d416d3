"""Attention over a sequence that is sharded over a group, by Ulysses (https://arxiv.org/abs/2309.14509).

All-to-alls exchange heads for positions, and back. Between them runs torch's attention, with its fused kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from pgmesh.parallel.exchange import all_to_all_stacked

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, **settings: Any) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks, with the heads sharded over the ranks.

    Every rank of the group calls it, forward and backward, with parts of the same length. Rank i of n holds part i, and
    computes its heads for all positions with torch's attention. Untested on GPUs.

    Args:
        q: as in ``ring_attention``, as are all others.
        k: this rank's keys.
        v: this rank's values.
        group: the group.
        settings: further arguments of torch's scaled_dot_product_attention.

    Raises:
        RuntimeError: the heads are not divisible by the number of ranks.
    """
    q, k, v = (_gather_positions(each, group) for each in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, **settings)
    by_rank = torch.unflatten(out, -2, (group.size(), -1)).movedim(-3, 0)  # (n, ..., heads / n, positions, width)
    return all_to_all_stacked(by_rank, group).movedim(0, -4).flatten(-4, -3)


def _gather_positions(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all from all heads of some positions to all positions of some heads."""
    by_heads = torch.unflatten(tensor, -3, (group.size(), -1)).movedim(-4, 0)
    return all_to_all_stacked(by_heads, group).movedim(0, -3).flatten(-3, -2)
