"""Sharded data parallelism: weights, gradients and optimizer are cut along the axes. torch's fully_shard, FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset, DistributedSampler

from pgmesh.errors import AxisError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method, format_axes
from pgmesh.parallel.data import distributed_sampler
from pgmesh.parallel.input_checks import RowCheck
from pgmesh.parallel.ownership import owned_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardedDataParallel(Method):
    """Cuts weights, gradients and the optimizer's state along its axes, by torch's fully_shard.

    Along one axis or over several, which are then one longer one. With ``replicate=``, weights are whole along that
    axis and cut along the others (hybrid sharding): less memory saved, and gathers stay along the others. Whole along
    all of them, it is data parallelism for weights that tensor parallelism has cut, which DDP does not take.

    Args:
        mesh: the mesh.
        axes: along which ranks read different rows.
        over: the axes to cut and to average over, where they are more: ``over=("dp", "cp")`` with context
            parallelism along cp.
        replicate: those of ``over`` along which weights are whole.
        layers: the modules that are gathered one at a time, given the whole module; those in its ModuleLists,
            ModuleDicts and Sequentials unless given. What is in none of them is gathered with the whole.
        uneven: whether ranks may read unequal numbers of rows, as in ``DataParallel``.
        options: what its groups are made with, as in ``mesh.configure``.
        keywords: for torch's fully_shard, such as ``mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)``,
            ``reshard_after_forward=False`` or ``offload_policy=``.

    Source: https://docs.pytorch.org/docs/2.13/distributed.fsdp.fully_shard.html

    >>> from pgmesh.parallel import ShardedDataParallel
    >>> ShardedDataParallel(mesh, "dp").device_mesh().mesh_dim_names
    ('dp',)
    >>> ShardedDataParallel(mesh, "pp", "dp", replicate="pp").device_mesh().mesh_dim_names
    ('pp', 'dp')
    >>> ShardedDataParallel(mesh, "dp", over=("dp", "tp")).device_mesh().mesh_dim_names
    ('dp_tp',)
    """

    level: ClassVar[Level] = Level.SHARD
    splits_batch = True

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        *axes: Axis,
        over: Iterable[Axis] | None = None,
        replicate: Axis | Iterable[Axis] = (),
        layers: Callable[[nn.Module], Iterable[nn.Module]] | None = None,
        uneven: bool = False,
        options: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(mesh, *axes, over=over, options=options)
        whole = (replicate,) if isinstance(replicate, (str, int)) else tuple(replicate)
        self.replicates = mesh.along(*whole).axes if whole else ()
        self.shards = tuple(axis for axis in self.reduces if axis not in self.replicates)
        if not set(self.replicates) <= set(self.reduces):
            both = mesh.along(*self.owns, *self.replicates).axes
            raise AxisError(
                f"ShardedDataParallel over {format_axes(self.reduces)} keeps weights whole along some of these "
                "axes, but "
                f"replicate= names {format_axes(self.replicates)}.\n\n"
                f"  {type(self).__name__}(mesh, {', '.join(map(repr, both))}, replicate={whole!r})"
            )
        self.configure(options, self.replicates, self.shards)
        self.layers, self.uneven, self.keywords = layers or default_layers, uneven, keywords

    def device_mesh(self) -> DeviceMesh:
        """torch's DeviceMesh for fully_shard: along the axes that cut, or those that replicate and then those.

        Raises:
            AxisError: the axes do not stand so in the mesh.
        """
        mesh, names = self.mesh, list[Axis]()
        for axes in (_nontrivial(mesh, self.replicates), _nontrivial(mesh, self.shards)):
            if len(axes) > 1:
                mesh = _merge_axes(mesh, axes)
            names += ["_".join(map(str, axes))] if len(axes) > 1 else axes
        if not self.shards:  # fully_shard wants an axis to cut along: one of a single rank
            mesh = mesh.view({**{str(axis): mesh.size(axis) for axis in mesh.axes}, "_one": 1})
            names.append("_one")
        device_mesh = mesh.device_mesh(*names)
        if device_mesh.mesh_dim_names != tuple(map(str, names)):
            sizes = ", ".join(f"{axis}={self.mesh.size(axis)}" for axis in (*self.replicates, *self.shards))
            raise AxisError(
                f"{self} keeps weights whole along {format_axes(self.replicates)}, which has to stand outside "
                f"{format_axes(self.shards)}, but in the mesh it stands inside: {format_axes(self.mesh.axes)}.\n\n"
                f"  ProcessGroupMesh(..., {sizes})   # the last axis varies fastest"
            )
        return device_mesh

    def apply(self, module: nn.Module) -> nn.Module:
        """The same module, sharded in place, its layers first."""
        device_mesh, owned = self.device_mesh(), {*owned_parameters(module).values()}
        keywords = {**self.keywords, "ignored_params": {*self.keywords.get("ignored_params", ()), *owned}}
        for layer in self.layers(module):
            fully_shard(layer, mesh=device_mesh, **keywords)
        fully_shard(module, mesh=device_mesh, **keywords)
        if not self.uneven:
            RowCheck(self, module)
        return module

    def sampler(self, dataset: Dataset[Any], **keywords: Any) -> DistributedSampler[Any]:
        """torch's sampler of this rank's share of a data set, as ``DataParallel.sampler``."""
        return distributed_sampler(self, dataset, **keywords)


def default_layers(module: nn.Module) -> Iterator[nn.Module]:
    """What stands in the outermost lists of a module and has weights."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            yield from (layer for layer in child.children() if next(layer.parameters(), None) is not None)
        else:
            yield from default_layers(child)


def _nontrivial(mesh: ProcessGroupMesh, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Those of more than one rank; of several short ones, one."""
    return tuple(axis for axis in axes if mesh.size(axis) > 1) or axes[:1]


def _merge_axes(mesh: ProcessGroupMesh, axes: tuple[Axis, ...]) -> ProcessGroupMesh:
    """The mesh read with one long axis in place of several that follow one another."""
    nontrivial = [axis for axis in mesh.axes if mesh.size(axis) > 1]
    start = nontrivial.index(axes[0])
    if tuple(nontrivial[start : start + len(axes)]) != axes:
        between = [axis for axis in nontrivial[start : nontrivial.index(axes[-1])] if axis not in axes]
        raise AxisError(
            f"ShardedDataParallel cuts weights along {format_axes(axes)} as along one axis, so they follow one "
            "another in "
            f"the mesh, but {format_axes(between)} stands between: {format_axes(mesh.axes)}.\n\n"
            f"  ProcessGroupMesh(..., {', '.join(f'{axis}={mesh.size(axis)}' for axis in axes)})\n"
            f"  ShardedDataParallel(..., replicate={axes[0]!r})   # or cut them along {format_axes(axes[1:])} alone"
        )
    sizes: dict[str, int] = {}
    for axis in mesh.axes:
        if axis == axes[0]:
            sizes["_".join(map(str, axes))] = math.prod(map(mesh.size, axes))
        elif axis not in axes:
            sizes[str(axis)] = mesh.size(axis)
    return mesh.view(sizes)
