"""The order in which ranks run sharded modules: it has to be the same on all ranks that average gradients.

``fully_shard`` gathers the weights of a module before it runs, and reduces its gradients behind it. torch matches these
collectives of ranks by their order alone. If ranks run other modules (the head of another task, a layer that one rank
drops, an expert without tokens), a module computes with the weights of another one, or the process ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from pgmesh import torch_private
from pgmesh._util.formatting import name_ranks
from pgmesh._util.samples import digest
from pgmesh.errors import MethodError
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.comparing import are_equal, gather_objects, ranks_by_value

FIRST, EVERY = 8, 128
"""For each module: the number of the first collectives, all compared, and that between later comparisons."""


class RunOrder:
    """Compares which collectives of sharded modules the ranks enter: each of the first, later many at a time.

    Args:
        mesh: the mesh.
        ranks: the ranks that have to enter the same ones.
        modules: number of sharded modules.
    """

    def __init__(self, mesh: ProcessGroupMesh, ranks: Sequence[int], modules: int) -> None:
        self._mesh, self._ranks, self._modules = mesh, ranks, modules
        self._entered = 0
        self._since_last: list[str] = []
        """What this rank did since the last comparison."""

    def note(self, event: str, *_: Any) -> None:
        """Remember what this rank does, for the next comparison."""
        self._since_last.append(event)

    def enter(self, collective: str) -> None:
        """Compare what the ranks do, before a collective.

        Raises:
            MethodError: other ranks enter others; the same on every rank.
        """
        self.note(collective)
        self._entered += 1
        if self._entered <= FIRST * self._modules or self._entered % (EVERY * self._modules) == 0:
            done, self._since_last = self._since_last, []
            if not are_equal(self._mesh, self._ranks, digest(done)):
                raise self._error(done)

    def _error(self, done: list[str]) -> MethodError:
        gathered = gather_objects(self._mesh, self._ranks, done).values()
        first = next(each for each in itertools.zip_longest(*gathered, fillvalue="nothing") if len({*each}) > 1)
        holders = ranks_by_value(dict(zip(self._ranks, first)))
        found = "; ".join(f"{what} on {name_ranks(ranks)}" for what, ranks in [*holders.items()][:4])
        return MethodError(
            f"ranks ran other sharded modules: {found}. fully_shard matches the collectives of ranks by their order "
            "alone, so one module would compute with the weights or gradients of another.\n\n"
            "  y = y + 0 * other(x).sum()   # every rank runs every module, in the same order"
        )


def watch_order(gathers: RunOrder, reductions: RunOrder, module: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Let ranks compare the order in which they run the sharded modules of a module, forward and backward.

    Args:
        gathers: of the ranks that hold the shards of a weight.
        reductions: of the ranks that average gradients.
        module: the module that ``fully_shard`` was called for.
        ignored: the parameters that it did not shard.
    """
    for name, each in module.named_modules():
        if isinstance(each, FSDPModule):
            of = f"of {name or 'the whole module'}"
            gather, reduce = torch_private.noting_collectives(
                partial(gathers.enter, f"the weights {of}"), partial(reductions.enter, f"the gradients {of}")
            )
            each.set_custom_all_gather(gather)
            each.set_custom_reduce_scatter(reduce)
    names = {name for name, weight in module.named_parameters() if weight not in ignored}

    def before_first_pass(module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled():  # now the weights have values, if they were on the meta device
            hook.remove()
            for name, weight in module.named_parameters():
                if weight.requires_grad and name in names:  # torch reduces those with gradients as one tensor
                    note = partial(reductions.note, f"the gradient of {name}")
                    weight.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    hook = module.register_forward_pre_hook(before_first_pass, prepend=True)
