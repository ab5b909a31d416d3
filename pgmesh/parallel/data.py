"""Data parallelism by torch's DDP: parameters are replicated, ranks read different rows, gradients are averaged."""

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

from pgmesh.errors import MethodError, OptionsError, ShapeError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Check, Method, format_axes
from pgmesh.parallel.divisibility import format_sizes
from pgmesh.parallel.exchange import on_served_device
from pgmesh.parallel.input_checks import Comparison, add_comparison
from pgmesh.parallel.ownership import owned_parameters
from pgmesh.torch_private import exclude_from_ddp


class DataParallel(Method):
    """Replicates a module along its axes and averages gradients in the backward pass, by torch's DDP.

    The mean of the ranks' gradients is the gradient of the whole batch if ranks have the same number of rows. The
    numbers are compared before the forward pass; with ``accumulate``, in the last pass, over all passes of a step.

    Args:
        mesh: the mesh.
        axes: axes along which ranks read different rows.
        over: axes along which gradients are averaged. With context parallelism along cp: ``over=("dp", "cp")``.
        check: as in ``Method``. With "never", ranks may have unequal numbers of rows; the program then has to weight
            its losses.
        options: options of the group, as in ``mesh.configure``.
        keywords: arguments of torch's DistributedDataParallel, such as ``bucket_cap_mb=50``.

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
        check: Check = "first",
        options: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(mesh, *axes, over=over, options=options, check=check)
        reject_uneven(self, keywords)
        self.keywords = keywords

    def apply(self, module: nn.Module) -> nn.Module:
        """Wrap the module in DDP. Its parameters are broadcast from the first rank along the axes.

        DDP rejects a module without trainable parameters, such as a frozen stage of a pipeline. Such a module is
        returned without a wrapper.

        Raises:
            MethodError: a parameter is a DTensor, which DDP does not support, or the module contains DDP already.
        """
        owned, axes = [*owned_parameters(module)], ", ".join(map(repr, self.owns))
        for each in module.modules():
            if isinstance(each, DistributedDataParallel):  # nested DDP averages wrongly
                raise MethodError(
                    f"torch's DDP is in the module already: a second one along {format_axes(self.reduces)} would "
                    "compute wrong gradients. Use one method for all axes.\n\n"
                    f"  DataParallel(mesh, {', '.join(map(repr, (*vars(each).get('pgmesh_axes', ()), *self.owns)))})"
                )
        for name, weight in module.named_parameters():
            if isinstance(weight, DTensor) and name not in owned:
                over = f", over={self.reduces!r}" * (self.reduces != self.owns) + f", check={self.check!r}" * (
                    self.check != "first"
                )
                sharded = any(isinstance(each, FSDPModule) for each in module.modules())
                raise MethodError(
                    f"{name} is a DTensor, which torch's DDP does not support. fully_shard does, also with parameters "
                    f"that are replicated along {format_axes(self.reduces)}.\n\n"
                    f"  ShardedDataParallel(mesh, {'..., ' * sharded}{axes}{over}, replicate={[*self.reduces]!r})"
                    f"{'   # instead of both' * sharded}"
                )
        if owned:
            exclude_from_ddp(module, owned)
        group, wrapped = self.mesh.group(*self.reduces), module
        if self._has_trainable(module):
            wrapped = DistributedDataParallel(module, process_group=group, **self.keywords)
            # Set after DDP's reducer, so that it is freed after it. A reducer that frees a Gloo group joins the group's
            # threads while it holds the GIL. A thread that needs the GIL then deadlocks with it.
            vars(wrapped)["pgmesh_group"], vars(wrapped)["pgmesh_axes"] = group, self.reduces
        elif self.keywords.get("init_sync", True):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if name not in owned:
                    with on_served_device(tensor.detach(), group) as served:
                        dist.broadcast(served, self.mesh.ranks(*self.reduces)[0], group=group)
        add_comparison(wrapped, compare_rows(self), inner=module)
        return wrapped

    def sampler(self, dataset: Dataset[Any], **keywords: Any) -> DistributedSampler[Any]:
        """torch's DistributedSampler with this rank's part of a data set. Ranks with the same index get the same rows.

        Args:
            dataset: a data set with a length.
            keywords: arguments of DistributedSampler. ``drop_last=True`` drops the rows that remain after an even
                split, and ``drop_last=False`` repeats the first rows.

        Raises:
            ShapeError: the rows cannot be split evenly, and ``drop_last`` is not given.

        >>> from pgmesh.parallel import DataParallel
        >>> list(DataParallel(mesh, "dp").sampler(range(6), shuffle=False))
        [0, 2, 4]
        """
        return distributed_sampler(self, dataset, **keywords)

    def accumulate(self, module: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context manager for gradient accumulation: ranks average gradients only in the last backward pass.

        Divide each loss by the number of passes, so that the sum of the gradients is a mean.

        Args:
            module: the module that ``apply`` returned.
            last: True in the last pass.

        Raises:
            MethodError: ``apply`` did not return this module.
        """
        if isinstance(module, DistributedDataParallel):
            return contextlib.nullcontext() if last else module.no_sync()
        if self._has_trainable(module):
            raise MethodError(
                f"{self} accumulates gradients in the module that apply() returned, not in a {type(module).__name__}."
            )
        return contextlib.nullcontext()

    def _has_trainable(self, module: nn.Module) -> bool:
        """Return True if a module has gradients to average."""
        return next(self.weights(module), None) is not None


def compare_rows(method: Method) -> Comparison:
    """Comparison of rows of a method that averages gradients: the mean is that of the batch if they are equal."""
    fix = f"{type(method).__name__}(..., check='never')   # if the program weights its losses itself"
    return Comparison(method, method.reduces, ("rows",), fix, per_step=True)


def reject_uneven(method: Method, keywords: Mapping[str, Any]) -> None:
    """Raise an OptionsError if the keywords have ``uneven``, which ``check`` replaced."""
    if "uneven" in keywords:
        check = "'never'" if keywords["uneven"] else "'always'"
        raise OptionsError(
            f"{type(method).__name__} has no uneven=; check= says when the rows of ranks are compared.\n\n"
            f"  {type(method).__name__}(..., check={check})"
        )


def distributed_sampler(method: Method, dataset: Any, **keywords: Any) -> DistributedSampler[Any]:
    """torch's DistributedSampler with a method's ``size`` and ``index``. See ``DataParallel.sampler``."""
    count = len(dataset) if isinstance(dataset, Sized) else 0
    if count % method.size and "drop_last" not in keywords:
        low = count // method.size
        raise ShapeError(
            f"a data set of {count} rows cannot be split evenly along {format_sizes(method.mesh, method.owns)}: "
            f"{count} is not divisible by {method.size}.\n\n"
            f"  sampler(dataset, drop_last=True)   # {low} rows for each, {count % method.size} dropped\n"
            f"  sampler(dataset, drop_last=False)   # {low + 1} rows for each, the first ones repeated"
        )
    return DistributedSampler(dataset, num_replicas=method.size, rank=method.index, **keywords)
