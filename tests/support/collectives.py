"""Collectives of torch by name, each called with a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES: dict[str, Callable[[dist.ProcessGroup], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(4), group=group),
    "all_reduce, async": lambda group: dist.all_reduce(torch.ones(4), group=group, async_op=True).wait(),
    "barrier": lambda group: dist.barrier(group=group),
    "broadcast": lambda group: dist.broadcast(torch.ones(4), group_src=0, group=group),
    "all_gather": lambda group: dist.all_gather(
        [torch.zeros(4) for _ in range(group.size())], torch.ones(4), group=group
    ),
    "all_to_all": lambda group: dist.all_to_all_single(
        torch.zeros(group.size()), torch.ones(group.size()), group=group
    ),
    "all_gather_object": lambda group: dist.all_gather_object([None] * group.size(), "object", group=group),
    "reduce_scatter": lambda group: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(group.size()), group=group),
    "send": lambda group: dist.send(torch.ones(1), group_dst=1 - group.rank(), group=group),
    "recv": lambda group: dist.recv(torch.ones(1), group_src=1 - group.rank(), group=group),
}
"""``send`` and ``recv`` are for groups of two."""
