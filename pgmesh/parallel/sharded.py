"""Sharded data parallelism by torch's fully_shard (FSDP2): parameters, gradients and optimizer states are sharded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from pgmesh.errors import AxisError, MethodError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method, format_axes, merged_device_mesh
from pgmesh.parallel.blocks import Blocks
from pgmesh.parallel.gradients import local
from pgmesh.parallel.local_experts import expert_method, expert_modules, expert_tensors
from pgmesh.parallel.run_order import RunOrder, watch_order
from pgmesh.parallel.stage_cutting import is_stage

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardedDataParallel(Method):
    """Shards parameters, gradients and optimizer states along its axes, by torch's fully_shard.

    Several axes are merged into one. With ``replicate=`` (hybrid sharding) parameters are replicated along those axes
    and sharded along the others. This saves less memory, but all-gathers do not cross the replicated axes. Replicated
    along all axes, it is data parallelism for DTensors, which DDP does not support.

    The experts of each layer are sharded over the ranks that have the same ones: the replica axes of
    ``ExpertParallel``. An axis replicates them if its ranks replicate all other parameters.

    Args:
        mesh: the mesh.
        axes: axes along which ranks read different rows.
        replicate: the axes along which parameters are replicated. With ``compose``, parameters are sharded along the
            axes of context parallelism too, unless they are named here.
        layers: function from the module to the submodules that are all-gathered one at a time. Default: the elements of
            ModuleLists, ModuleDicts and Sequentials. All other parameters are gathered with the whole module, and so is
            a layer that shares a parameter with other modules.
        options: options of its groups, as in ``mesh.configure``.
        keywords: arguments of torch's fully_shard, such as ``reshard_after_forward=False``, ``offload_policy=`` or
            ``mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)``. Gradients are reduced in 32 bits, unless the
            policy has a ``reduce_dtype`` of fewer: torch would reduce them in ``param_dtype``.

    Source: https://docs.pytorch.org/docs/2.13/distributed.fsdp.fully_shard.html

    >>> from pgmesh.parallel import ShardedDataParallel
    >>> ShardedDataParallel(mesh, "dp").device_mesh().mesh_dim_names
    ('dp',)
    >>> ShardedDataParallel(mesh, "pp", "dp", replicate="pp").device_mesh().mesh_dim_names
    ('pp', 'dp')
    """

    differs = "rows"
    level = Level.SHARD

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axes: Axis,
        replicate: Axis | Iterable[Axis] = (),
        layers: Callable[[nn.Module], Iterable[nn.Module]] | None = None,
        options: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(mesh, *axes, options=options)
        replicated = (replicate,) if isinstance(replicate, (str, int)) else tuple(replicate)
        self.replicates = mesh.along(*replicated).axes if replicated else ()
        self.layers, self.keywords = layers or default_layers, _reducing_in_32_bits(keywords)
        self.configure(self.replicates, self.shards)

    @property
    def shards(self) -> tuple[Axis, ...]:
        """The axes along which parameters are sharded."""
        return tuple(axis for axis in self.average_axes if axis not in self.replicates)

    @property
    def _ignored(self) -> set[Any]:
        """The parameters that fully_shard is told to ignore."""
        return {*self.keywords.get("ignored_params", ())}

    def settle(self, readers: Blocks) -> None:
        """Average gradients over all ranks that read different tokens, and shard parameters over them.

        Raises:
            AxisError: ``replicate`` has an axis along which ranks read the same tokens.
        """
        super().settle(readers)
        self._check_replicates()
        self.configure(self.replicates, self.shards)

    def _check_replicates(self) -> None:
        if not set(self.replicates) <= set(self.average_axes):
            both = ", ".join(map(repr, self.mesh.along(*self.owns, *self.replicates).axes))
            own = ", ".join(map(repr, self.owns))
            averaged = [axis for axis in self.replicates if axis in self.average_axes]
            raise AxisError(
                f"ShardedDataParallel averages along {format_axes(self.average_axes)}, but replicate= has "
                f"{format_axes(self.replicates)}, and has to be part of these axes.\n\n"
                f"  ShardedDataParallel(mesh, {both}, replicate={[*self.replicates]!r})   # these axes split rows too\n"
                f"  ShardedDataParallel(mesh, {own}, replicate={averaged!r})   # these axes have another method"
            )

    def device_mesh(self) -> DeviceMesh:
        """torch's DeviceMesh for fully_shard: (shard,), or (replicate, shard) with ``replicate=``."""
        self._check_replicates()
        return _device_mesh(self.mesh, self.replicates, self.shards)

    def check(self, module: nn.Module) -> None:
        """Check the whole module.

        Raises:
            MethodError: one of ``ignored_params`` is trained.
        """
        ignored = self._ignored
        if trained := [name for name, each in module.named_parameters() if each in ignored and each.requires_grad]:
            raise MethodError(
                f"{trained[0]} is one of ignored_params, so no method would average its gradient.\n\n"
                f"  module.get_parameter({trained[0]!r}).requires_grad_(False)   # or leave it out of ignored_params"
            )

    def apply(self, module: nn.Module) -> nn.Module:
        """Shard the module in place, its experts and layers first, and return it."""
        for experts in expert_modules(module).values():
            self._shard_experts(experts)
        ignored = {*self._ignored, *expert_tensors(module).values()}
        keywords = {**self.keywords, "mesh": self.device_mesh(), "ignored_params": ignored}
        uses = _count_uses(module)
        for layer in dict.fromkeys(self.layers(module)):  # one may be in several lists
            if _count_uses(layer).items() <= uses.items():
                fully_shard(layer, **keywords)
        fully_shard(module, **keywords)
        sharded = [each for each in module.modules() if isinstance(each, FSDPModule)]
        reductions = gathers = RunOrder(self.mesh, self.mesh.ranks(*self.average_axes), len(sharded))
        if self.replicates and self.shards:  # replicas may evaluate on their own
            gathers = RunOrder(self.mesh, self.mesh.ranks(*self.shards), len(sharded))
        watch_order(gathers, reductions, module, ignored)
        if not is_stage(module):  # a pipeline shards weights again after each step
            module.register_forward_pre_hook(partial(_reshard, sharded), prepend=True)
            module.register_forward_hook(partial(_after_pass, sharded))
        return module

    def _shard_experts(self, experts: nn.Module) -> None:
        """Shard the experts of a layer over the ranks that have the same ones.

        fully_shard divides gradients by the number of these ranks. More ranks send tokens: those with other experts.
        ``set_gradient_divide_factor`` is not for Gloo, and in a mesh of one rank divides 64-bit gradients twice.
        """
        method = expert_method(experts)
        replicas = {*self.mesh.ranks(*self.replicates)} if self.replicates else set[int]()
        replicates = tuple(axis for axis in method.replica_axes if replicas.issuperset(method.mesh.ranks(axis)))
        shards = tuple(axis for axis in method.replica_axes if axis not in replicates)
        device_mesh = _device_mesh(method.mesh, replicates, shards)
        place = partial(_even_shard, device_mesh.size(-1))
        sharded = fully_shard(experts, **{"shard_placement_fn": place, **self.keywords, "mesh": device_mesh})
        factor = device_mesh.size() / method.mesh.size(*method.average_axes)

        def divide(reduced: Tensor) -> None:
            if reduced.is_cuda:  # the hook has another stream than the tensor: its memory must not be reused meanwhile
                reduced.record_stream(torch.cuda.current_stream())
            reduced.mul_(factor)

        sharded.set_all_reduce_hook(divide)

    @contextlib.contextmanager
    def accumulate(self, module: nn.Module, *, last: bool) -> Iterator[None]:
        """Context manager for gradient accumulation, as ``DataParallel.accumulate``: the last backward pass reduces.

        Until then each rank holds whole gradients, and ``grad`` is None.

        Args:
            module: the module that ``apply`` returned.
            last: True in the last pass.
        """
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(last)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)


def reshard(module: nn.Module) -> None:
    """Shard all parameters again. After a pass that failed or had no backward pass, torch leaves some whole, which are
    other parameters than those with gradients and optimizer states."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def _reshard(sharded: Iterable[FSDPModule], *_: object) -> None:
    """Forward pre-hook: shard what the last pass left whole, since an optimizer may have changed the shards."""
    for each in sharded:
        each.reshard()


def _after_pass(sharded: Iterable[FSDPModule], module: nn.Module, *_: object) -> None:
    """Forward hook: shard what torch leaves whole for a backward pass, if this looks like a pass without one."""
    if not (torch.is_grad_enabled() and module.training):
        _reshard(sharded)


def default_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Elements of the outermost ModuleLists, ModuleDicts and Sequentials that have parameters.

    A ModuleList or ModuleDict in another has no forward pass: its elements are layers too.
    """
    has_layers = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    for child in module.children():
        if not has_layers or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from default_layers(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _reducing_in_32_bits(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords with a ``reduce_dtype`` of 32 bits, if the policy has none and computes in fewer."""
    policy = keywords.get("mp_policy")
    if policy is None or policy.reduce_dtype or not policy.param_dtype or policy.param_dtype.itemsize >= 4:
        return {**keywords}
    return {**keywords, "mp_policy": dataclasses.replace(policy, reduce_dtype=torch.float32)}


def _count_uses(module: nn.Module) -> Counter[nn.Parameter]:
    """The number of submodules that have each parameter. fully_shard needs all of them in one call."""
    return Counter(weight for each in module.modules() for weight in each.parameters(recurse=False))


def _device_mesh(mesh: ProcessGroupMesh, replicates: tuple[Axis, ...], shards: tuple[Axis, ...]) -> DeviceMesh:
    """torch's DeviceMesh for fully_shard, which needs a dimension to shard along: of one rank without axes."""
    return merged_device_mesh(mesh, *([replicates] if replicates else []), shards)


def _even_shard(ranks: int, weight: nn.Parameter) -> Shard:
    """The first dimension of which the ranks get equal parts: they may be more than the experts of a weight."""
    even = (dimension for dimension, size in enumerate(local(weight).shape) if size % ranks == 0)
    return Shard(next(even, 0))
