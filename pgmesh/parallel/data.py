"""Data parallelism: every rank has all the weights and its own rows, and gradients are averaged. torch's DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sized
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from pgmesh.errors import MethodError, ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Method, format_axes
from pgmesh.parallel.divisibility import format_sizes
from pgmesh.parallel.input_checks import RowCheck
from pgmesh.parallel.ownership import owned_parameters
from pgmesh.torch_private import exclude_from_ddp


class DataParallel(Method):
    """Replicates a module along its axes and averages gradients in the backward pass, by torch's DDP.

    The mean of ranks' gradients is that of the batch where ranks read equally many rows: so it is checked, before each
    forward pass in training that gradients are averaged after.

    Args:
        mesh: the mesh.
        axes: along which ranks read different rows.
        over: the axes to average over, where they are more: ``over=("dp", "cp")`` with context parallelism along cp.
        uneven: whether ranks may read unequal numbers of rows, since the program weighs its losses itself.
        options: what the group is made with, as in ``mesh.configure``.
        keywords: for torch's DistributedDataParallel, such as ``bucket_cap_mb=50``.

    Source: https://docs.pytorch.org/docs/2.13/generated/torch.nn.parallel.DistributedDataParallel.html

    >>> from pgmesh.parallel import DataParallel
    >>> data = DataParallel(mesh, "dp")
    >>> data, data.size, data.index
    (DataParallel along dp, 2, 0)
    """

    splits_batch = True

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axes: Axis,
        over: Iterable[Axis] | None = None,
        uneven: bool = False,
        options: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(mesh, *axes, over=over, options=options)
        self.uneven, self.keywords = uneven, keywords

    def apply(self, module: nn.Module) -> nn.Module:
        """DDP around the module, whose weights become those of the first rank along the axes.

        DDP refuses a module without trainable weights, such as a frozen stage of a pipeline. That module is returned
        unchanged.

        Raises:
            MethodError: a weight is a DTensor, which DDP does not take, or DDP is inside the module already.
        """
        owned, axes = [*owned_parameters(module)], ", ".join(map(repr, self.owns))
        for each in module.modules():
            if isinstance(each, DistributedDataParallel):  # an outer one breaks the sums of an inner one
                raise MethodError(
                    f"torch's DDP is in the module already, and a second one along {format_axes(self.reduces)} "
                    "would leave "
                    "wrong gradients. One method averages along all axes.\n\n"
                    f"  DataParallel(mesh, {', '.join(map(repr, (*vars(each).get('pgmesh_axes', ()), *self.owns)))})"
                )
        for name, weight in module.named_parameters():
            if isinstance(weight, DTensor) and name not in owned:
                over = f", over={self.reduces!r}" * (self.reduces != self.owns) + ", uneven=True" * self.uneven
                sharded = any(isinstance(each, FSDPModule) for each in module.modules())
                raise MethodError(
                    f"{name} is cut already, as a DTensor, which torch's DDP does not take; fully_shard does, also "
                    f"with weights that stay whole along {format_axes(self.reduces)}.\n\n"
                    f"  ShardedDataParallel(mesh, {'..., ' * sharded}{axes}{over}, replicate={[*self.reduces]!r})"
                    f"{'   # in place of both' * sharded}"
                )
        if owned:
            exclude_from_ddp(module, owned)
        group, wrapped = self.mesh.group(*self.reduces), module
        if self._has_trainable(module):
            wrapped = DistributedDataParallel(module, process_group=group, **self.keywords)
            # After its reducer, so as to go after it. A reducer that is the last to let go of a Gloo group waits for
            # the group's threads with Python's lock in its hands, which one of them may need: both then wait for ever.
            vars(wrapped)["pgmesh_group"], vars(wrapped)["pgmesh_axes"] = group, self.reduces
        elif self.keywords.get("init_sync", True):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if name not in owned:
                    dist.broadcast(tensor.detach(), self.mesh.ranks(*self.reduces)[0], group=group)
        if not self.uneven:
            RowCheck(self, wrapped)
        return wrapped

    def sampler(self, dataset: Dataset[Any], **keywords: Any) -> DistributedSampler[Any]:
        """torch's sampler of this rank's share of a data set; ranks that read the same rows get the same ones.

        Args:
            dataset: with a length.
            keywords: for DistributedSampler. ``drop_last=True`` leaves out what cannot be shared out evenly,
                and ``drop_last=False`` repeats the first rows.

        Raises:
            ShapeError: the rows cannot be shared out evenly, and ``drop_last`` is not given.

        >>> from pgmesh.parallel import DataParallel
        >>> list(DataParallel(mesh, "dp").sampler(range(6), shuffle=False))
        [0, 2, 4]
        """
        return distributed_sampler(self, dataset, **keywords)

    def accumulate(self, module: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around one of several backward passes whose gradients add up: ranks average them in the last alone.

        Divide each loss by how many there are, so that their sum is a mean.

        Args:
            module: what ``apply`` gave.
            last: whether this is the last one.

        Raises:
            MethodError: the module is another.
        """
        if isinstance(module, DistributedDataParallel):
            return contextlib.nullcontext() if last else module.no_sync()
        if self._has_trainable(module):
            raise MethodError(f"{self} accumulates in what its apply() gave, not in a {type(module).__name__}.")
        return contextlib.nullcontext()

    def _has_trainable(self, module: nn.Module) -> bool:
        """Whether a module has gradients to average."""
        return next(self.weights(module), None) is not None


def distributed_sampler(method: Method, dataset: Any, **keywords: Any) -> DistributedSampler[Any]:
    """torch's sampler with a method's share, of rows that divide."""
    count = len(dataset) if isinstance(dataset, Sized) else 0
    if count % method.size and "drop_last" not in keywords:
        low = count // method.size
        raise ShapeError(
            f"a data set of {count} rows cannot be shared out evenly along {format_sizes(method.mesh, method.owns)}: "
            f"{count} is not divisible by {method.size}.\n\n"
            f"  sampler(dataset, drop_last=True)   # {low} rows for each, {count % method.size} left out\n"
            f"  sampler(dataset, drop_last=False)   # {low + 1} rows for each, the first ones twice"
        )
    return DistributedSampler(dataset, num_replicas=method.size, rank=method.index, **keywords)
