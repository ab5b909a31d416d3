"""Parameters of a parallel model over all ranks: broadcast, gradient norm and gradient clipping.

The norm counts each shard once, however many ranks hold a replica of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from pgmesh import torch_private
from pgmesh._util.marks import OWNED_MARK
from pgmesh.errors import AxisError, MethodError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import format_axes
from pgmesh.parallel.exchange import collective_device, on_served_device
from pgmesh.parallel.ownership import owned_parameters


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Local tensor of a DTensor; any other tensor unchanged. The memory is shared.

    Args:
        tensor: a parameter or a gradient, which may be sharded.

    >>> from pgmesh.parallel import local
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> local(torch.ones(4)).shape, local(distribute_tensor(torch.ones(4), mesh.device_mesh("tp"), [Shard(0)])).shape
    (torch.Size([4]), torch.Size([2]))
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def broadcast(module: nn.Module, mesh: ProcessGroupMesh, *axes: Axis) -> None:
    """Broadcast parameters and buffers from the first rank along these axes.

    Every rank of the mesh calls it. Parameters may be sharded along other axes: then each shard is broadcast.

    Args:
        module: a module with the same shapes on every rank along the axes.
        mesh: the mesh.
        axes: the axes; without axes, the whole mesh.

    Raises:
        MethodError: a parameter is sharded along one of these axes, or is an expert.

    >>> from pgmesh.parallel import weights
    >>> weights.broadcast(torch.nn.Linear(2, 2), mesh, "dp", "tp")
    """
    if owned := [*owned_parameters(module)]:
        raise MethodError(
            f"ranks hold different experts, {', '.join(owned[:3])}: broadcast before ExpertParallel is applied."
        )
    group, ranks = mesh.group(*axes), mesh.ranks(*(axes or mesh.axes))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, DTensor):
            for i, placement in enumerate(tensor.placements):
                sharded = set(dist.get_process_group_ranks(tensor.device_mesh.get_group(i)))
                if not placement.is_replicate() and len(sharded.intersection(ranks)) > 1:
                    names = tensor.device_mesh.mesh_dim_names or (str(i),)
                    raise MethodError(
                        f"{name} is sharded along {names[i]}, so ranks hold different shards of it: broadcast it along "
                        f"other axes, or before it is sharded."
                    )
        with on_served_device(local(tensor).detach(), group) as sent:
            dist.broadcast(sent, ranks[0], group=group)


class Held:
    """Parameters and the axes along which ranks hold different ones, for ``norm`` and ``clip``.

    A DTensor has its sharding in its placements. A plain tensor is taken for replicated along all axes except ``axes``:
    pass the axis of pipeline stages and those of experts there.

    Args:
        weights: a module, or parameters. For a pipeline, pass the ``Pipeline``: only then are tied parameters
            counted once.
        mesh: the mesh, or the view of it on which the parameters are distributed.
        axes: the axes along which ranks hold different parameters.

    Raises:
        AxisError: there is no such axis, or there are experts among the parameters and no axis.

    >>> from pgmesh.parallel.weights import Held
    >>> Held(torch.nn.Linear(2, 2), mesh, "pp")
    2 weights that differ along pp
    """

    def __init__(self, weights: nn.Module | Iterable[nn.Parameter], mesh: ProcessGroupMesh, *axes: Axis) -> None:
        copies: list[nn.Parameter] = getattr(weights, "copies", list)()  # a Pipeline's tied duplicates; otherwise none
        self._copies = {id(weight) for weight in copies}
        self.weights = list(weights.parameters() if isinstance(weights, nn.Module) else weights)
        self.mesh, self.axes = mesh, mesh.along(*axes).axes if axes else ()
        if not axes and any(hasattr(weight, OWNED_MARK) for weight in self.weights):
            raise AxisError(
                "there are experts among these parameters, so ranks hold different ones, but no axis was given.\n\n"
                "  Held(weights, mesh, 'ep')   # the experts alone, on the mesh or view of ExpertParallel"
            )

    def shares(self) -> Iterator[tuple[torch.Tensor, int]]:
        """For each gradient: this rank's shard, and the number ``n`` of different shards over all ranks.

        Each shard is on ``mesh.size() / n`` ranks. So ``norm`` weights it by ``n / mesh.size()``, and the sum over all
        ranks counts it once.
        """
        for weight in self.weights:
            gradient = weight.grad
            if gradient is None or id(weight) in self._copies:
                continue
            axes, parts = self.axes, 1
            if isinstance(gradient, DTensor):  # sum partial gradients first
                placements = [Replicate() if each.is_partial() else each for each in gradient.placements]
                gradient = gradient.redistribute(placements=placements)
                # axes inside the DTensor's device mesh are already described by its placements
                described = set(gradient.device_mesh.mesh.flatten().tolist())
                axes = tuple(axis for axis in axes if not described.issuperset(self.mesh.ranks(axis)))
                sizes = zip(gradient.device_mesh.shape, placements)
                parts = math.prod(size for size, placement in sizes if not placement.is_replicate())
                gradient = gradient.to_local()
            yield gradient.detach(), parts * (self.mesh.size(*axes) if axes else 1)

    def __repr__(self) -> str:
        along = f"differ along {format_axes(self.axes)}" if self.axes else "are the same on every rank"
        return f"{len(self.weights)} weights that {along}"


def norm(*held: Held, order: float = 2.0) -> torch.Tensor:
    """Norm of all gradients over all ranks. Each shard is counted once, however many ranks hold a replica of it.

    Every rank of the mesh calls it, and gets the same value.

    Args:
        held: one ``Held`` for each combination of mesh or view and axes, such as ``Held(dense, mesh, "pp")`` and
            ``Held(experts, view, "pp", "ep")``.
        order: order of the norm, such as 2.0, 1.0 or ``math.inf``.

    Raises:
        AxisError: the meshes have different ranks.

    >>> from pgmesh.parallel.weights import Held, norm
    >>> layer = torch.nn.Linear(3, 1, bias=False)
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> norm(Held(layer, mesh))                   # the fake world of this example sums nothing: sqrt(3 / 8)
    tensor(0.6124, dtype=torch.float64)
    """
    if not held or any(set(each.mesh.ranks()) != set(held[0].mesh.ranks()) for each in held):
        raise AxisError("norm and clip take parameters on one mesh and its views, such as Held(model, mesh, 'pp').")
    group, mesh = held[0].mesh.group(), held[0].mesh
    data_device = next((weight.device for each in held for weight in each.weights), torch.device("cpu"))
    device = collective_device(group, data_device)
    total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    shards: dict[tuple[torch.device, torch.dtype, int], list[torch.Tensor]] = {}
    for shard, different_shards in (pair for each in held for pair in each.shares() if pair[0].numel()):
        shards.setdefault((shard.device, shard.dtype, different_shards), []).append(shard)
    for (_, dtype, different_shards), tensors in shards.items():
        norms = torch_private.foreach_norm(tensors, order, torch.promote_types(dtype, total.dtype))
        sizes = torch.stack(list(norms)).to(total)
        if math.isinf(order):
            total = torch.maximum(total, sizes.max())
        else:
            total = total + (sizes**order).sum() * different_shards / mesh.size()
    dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group=group)
    return total if math.isinf(order) else total ** (1 / order)


def clip(limit: float, *held: Held, order: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their norm is at most ``limit``, as ``clip_grad_norm_`` does on one rank.

    Every rank of the mesh calls it.

    Args:
        limit: the maximum norm.
        held: as for ``norm``.
        order: order of the norm.

    Returns:
        The norm before scaling.

    >>> from pgmesh.parallel.weights import Held, clip
    >>> layer = torch.nn.Linear(3, 1, bias=False)
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> clip(0.1, Held(layer, mesh)) > 0.1
    tensor(True)
    """
    before = norm(*held, order=order)
    scale = torch.clamp(limit / (before + 1e-6), max=1.0)
    unique = {id(weight): weight.grad for each in held for weight in each.weights}
    gradients: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in (local(gradient) for gradient in unique.values() if gradient is not None):
        gradients.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for tensors in gradients.values():
        torch_private.foreach_multiply(tensors, scale.to(tensors[0]))
    return before
