"""Data parallelism by torch's DDP: parameters are replicated, ranks read different rows, gradients are averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pgmesh.errors import MethodError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Method
from pgmesh.parallel.exchange import broadcast_all
from pgmesh.parallel.local_experts import expert_tensors, named_tensors
from pgmesh.parallel.names import plain_name
from pgmesh.parallel.owned_tensors import Owned, owned_tensors
from pgmesh.parallel.stage_cutting import is_stage
from pgmesh.torch_private import exclude_from_ddp


class DataParallel(Method):
    """Replicates a module along its axes and averages gradients in the backward pass, by torch's DDP.

    The mean of the ranks' gradients is the gradient of the whole batch if ranks have the same number of rows.
    ``compose`` also averages along the axes of context parallelism.

    Args:
        mesh: the mesh.
        axes: axes along which ranks read different rows.
        options: options of the group, as in ``mesh.configure``.
        keywords: arguments of torch's DistributedDataParallel, such as ``bucket_cap_mb=50``.

    Source: https://docs.pytorch.org/docs/2.13/generated/torch.nn.parallel.DistributedDataParallel.html

    >>> from pgmesh.parallel import DataParallel
    >>> DataParallel(mesh, "dp", bucket_cap_mb=50)
    DataParallel along dp
    """

    differs = "rows"

    def __init__(
        self, mesh: ProcessGroupMesh, *axes: Axis, options: Mapping[str, Any] | None = None, **keywords: Any
    ) -> None:
        super().__init__(mesh, *axes, options=options)
        self.keywords = keywords

    def apply(self, module: nn.Module) -> nn.Module:
        """Wrap the module in DDP. Its parameters are broadcast from the first rank along the axes.

        DDP rejects a module without trainable parameters, such as a frozen stage of a pipeline. Such a module is
        returned without a wrapper.

        Parameters that are frozen now have to stay frozen: a training step in which one is not raises.

        Raises:
            MethodError: a parameter is a DTensor, which DDP does not support, or the module contains DDP already.
        """
        self._check_module(module)
        if experts := expert_tensors(module):  # DDP asks for either name if torch's checkpoint_wrapper is around all
            exclude_from_ddp(module, [*experts, *(plain_name(module, name) for name in experts)])
        weights = [each for each in owned_tensors(module) if isinstance(each.tensor, nn.Parameter)]
        kept = [(each, each.tensor.requires_grad) for each in weights if each.name not in experts]
        module.register_forward_pre_hook(partial(self._check_kept, kept))
        group = self.mesh.group(*self.average_axes)
        if not any(was_trained for _, was_trained in kept):
            if broadcasts_start(self):
                tensors = named_tensors(module)
                broadcast_all((each for name, each in tensors.items() if name not in experts), group)
            return module
        wrapped = DistributedDataParallel(module, process_group=group, **self.keywords)
        # The group must outlive DDP's reducer. A reducer that frees a Gloo group joins the group's threads while it
        # holds the GIL. A thread that needs the GIL then deadlocks with it.
        vars(wrapped)["pgmesh_group"] = group
        if not (is_stage(module) or self.keywords.get("static_graph")):
            OnePass(wrapped)
        return wrapped

    def _check_module(self, module: nn.Module) -> None:
        """Refuse DDP inside of DDP, and DTensors."""
        inside = [name for name, each in module.named_modules() if isinstance(each, DistributedDataParallel)]
        if inside:
            found = f"module.get_submodule({inside[0]!r}).module"
            raise MethodError(
                "torch's DDP is in the module already, and a second one would compute wrong gradients.\n\n"
                + (f"  module.set_submodule({inside[0]!r}, {found})" if inside[0] else "  module = module.module")
                + "   # before apply: without DDP. One DataParallel has all axes"
            )
        experts = expert_tensors(module)
        for name, weight in module.named_parameters():
            if isinstance(weight, DTensor) and name not in experts:
                is_sharded = any(isinstance(each, FSDPModule) for each in module.modules())
                sharded = weight.device_mesh.mesh_dim_names if is_sharded else None  # one method has these axes too
                axes = [axis for axis in self.mesh.axes if axis in self.owns or str(axis) in (sharded or ())]
                raise MethodError(
                    f"{name} is a DTensor, which torch's DDP does not support. fully_shard does.\n\n"
                    f"  {self._as_sharded(axes)}"
                )

    def _check_kept(self, kept: Iterable[tuple[Owned, bool]], module: nn.Module, _: Any) -> None:
        """Forward pre-hook: check that what is trained is what was trained in apply, which torch's DDP averages."""
        if not (module.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        for (name, owner, key, tensor), was_trained in kept:
            weight = vars(owner)["_parameters"].get(key)
            if weight is None or not weight.requires_grad or (weight is tensor and was_trained):
                continue
            if weight is not tensor:
                raise MethodError(
                    f"{name} was replaced after apply: ranks would not average its gradients, since torch's DDP "
                    "averages those of the parameters of then.\n\n"
                    "  model.load_state_dict(state)   # without assign=True, which replaces parameters\n"
                    f"  {self._as_sharded(self.owns)}"
                )
            raise MethodError(
                f"{name} was frozen in apply, and is trained now: ranks would not average its gradients, since "
                "torch's DDP averages those that were trained then. fully_shard averages it.\n\n"
                "  model.requires_grad_(True)   # before together.apply(model)\n"
                f"  {self._as_sharded(self.owns)}"
            )

    def _as_sharded(self, axes: Iterable[Axis]) -> str:
        """The call of the method that does the same by fully_shard."""
        names = ", ".join(map(repr, axes))
        call = f"ShardedDataParallel(mesh, {names}, replicate={[*self.average_axes]!r})"
        return f"{call}   # on a new module; mesh: the mesh, view or slice of DataParallel"

    def accumulate(self, module: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context manager for gradient accumulation: ranks average gradients only in the last backward pass.

        Divide each loss by the number of passes, so that the sum of the gradients is a mean.

        Args:
            module: the module that ``apply`` returned.
            last: True in the last pass.
        """
        if isinstance(module, DistributedDataParallel) and not last:
            return module.no_sync()
        return contextlib.nullcontext()


class OnePass:
    """Refuses a second backward pass of a forward pass: torch's DDP averages the gradients of the first one alone.

    Args:
        wrapped: the module. In ``no_sync`` it averages nothing, and may have any number of backward passes.
    """

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self._averages, self._averaged = False, set[str]()
        wrapped.register_forward_pre_hook(self._before_forward)
        for name, weight in wrapped.module.named_parameters():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(partial(self._after_gradient, name))

    def _before_forward(self, wrapped: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled():
            self._averages, self._averaged = bool(wrapped.require_backward_grad_sync), set()

    def _after_gradient(self, name: str, _: Tensor) -> None:
        if self._averages and name in self._averaged:
            raise MethodError(
                f"{name} gets a gradient in a second backward pass of one forward pass, or after two forward passes: "
                "torch's DDP averages the first one alone. fully_shard averages both.\n\n"
                "  (loss + other_loss).backward()   # one backward pass"
            )
        self._averaged.add(name)


def broadcasts_start(data: Method | None) -> bool:
    """Return True if a method is one whose ``apply`` gives all ranks the values of the first one."""
    return isinstance(data, DataParallel) and bool(data.keywords.get("init_sync", True))
