"""What a parallel model needs over all its ranks: one start, and the true norm of its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from pgmesh.errors import AxisError, MethodError
from pgmesh.layout import Axis
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import format_axes
from pgmesh.parallel.ownership import OWNED_MARK, owned_parameters


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory: the local tensor of a DTensor, any other tensor as it is.

    Args:
        tensor: a weight or a gradient, which sharding or tensor parallelism may have cut.

    >>> from pgmesh.parallel import local
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> local(torch.ones(4)).shape, local(distribute_tensor(torch.ones(4), mesh.device_mesh("tp"), [Shard(0)])).shape
    (torch.Size([4]), torch.Size([2]))
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def broadcast(module: nn.Module, mesh: ProcessGroupMesh, *axes: Axis) -> None:
    """Give every rank along these axes the weights and buffers of the first one.

    Every rank of the mesh calls it. Weights that are cut along other axes may be given too, each part to its likes.

    Args:
        module: of one shape on every rank along the axes.
        mesh: the mesh.
        axes: along which ranks shall start alike; none for the whole mesh.

    Raises:
        MethodError: a weight is cut along these axes, so that ranks mean to hold different parts of it; or some are
            experts, which a method keeps apart.

    >>> from pgmesh.parallel import weights
    >>> weights.broadcast(torch.nn.Linear(2, 2), mesh, "dp", "tp")
    """
    if apart := [*owned_parameters(module)]:
        raise MethodError(
            f"ranks mean to hold different weights {format_axes(apart[:3])}, which another method keeps apart: "
            "broadcast "
            "before that method is applied."
        )
    group, ranks = mesh.group(*axes), mesh.ranks(*(axes or mesh.axes))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, DTensor):
            for i, placement in enumerate(tensor.placements):
                cut = set(dist.get_process_group_ranks(tensor.device_mesh.get_group(i)))
                if not placement.is_replicate() and len(cut.intersection(ranks)) > 1:
                    names = tensor.device_mesh.mesh_dim_names or (str(i),)
                    raise MethodError(
                        f"{name} is cut along {names[i]}, whose ranks mean to hold different parts of it: broadcast "
                        f"along axes that it is whole along, or before it is cut."
                    )
        dist.broadcast(local(tensor).detach(), ranks[0], group=group)


class Held:
    """Weights as they lie on a mesh, for ``norm`` and ``clip``.

    What is cut as a DTensor says so itself. Plain tensors are whole, the same on every rank, but for the axes named
    here, along which ranks hold different ones: stages of a pipeline, experts.

    Args:
        weights: a module, or parameters. What a pipeline's first stage has too is counted once.
        mesh: the mesh, or the view of it that these weights are arranged on.
        axes: along which ranks hold different weights.

    Raises:
        AxisError: there is no such axis, or weights are kept apart and none is named.

    >>> from pgmesh.parallel.weights import Held
    >>> Held(torch.nn.Linear(2, 2), mesh, "pp")
    2 weights that differ along pp
    """

    def __init__(self, weights: nn.Module | Iterable[nn.Parameter], mesh: ProcessGroupMesh, *axes: Axis) -> None:
        copies: list[nn.Parameter] = getattr(weights, "copies", list)()
        self.weights = list(weights.parameters() if isinstance(weights, nn.Module) else weights)
        self._copies = {id(weight) for weight in copies}
        self.mesh, self.axes = mesh, mesh.along(*axes).axes if axes else ()
        if not axes and any(hasattr(weight, OWNED_MARK) for weight in self.weights):
            raise AxisError(
                "ranks hold different ones of these weights, which a method keeps apart, but no axis is named along "
                "which they do.\n\n"
                "  Held(weights, mesh, 'ep')   # those of an expert view, by themselves"
            )

    def shares(self) -> Iterator[tuple[torch.Tensor, int]]:
        """This rank's part of each gradient, and how many parts that ranks hold, all told, are different ones."""
        for weight in self.weights:
            gradient = weight.grad
            if gradient is None or id(weight) in self._copies:
                continue
            axes = self.axes
            parts = 1
            if isinstance(gradient, DTensor):
                whole = [Replicate() if each.is_partial() else each for each in gradient.placements]
                if whole != list(gradient.placements):
                    gradient = gradient.redistribute(placements=whole)
                device_mesh = gradient.device_mesh
                known = set(device_mesh.mesh.flatten().tolist())
                axes = tuple(axis for axis in axes if not known.issuperset(self.mesh.ranks(axis)))
                parts = math.prod(
                    size for size, each in zip(device_mesh.shape, gradient.placements) if not each.is_replicate()
                )
                gradient = gradient.to_local()
            yield gradient.detach(), parts * (self.mesh.size(*axes) if axes else 1)

    def __repr__(self) -> str:
        along = f"differ along {', '.join(map(str, self.axes))}" if self.axes else "are the same on every rank"
        return f"{len(self.weights)} weights that {along}"


def norm(*held: Held, order: float = 2.0) -> torch.Tensor:
    """The norm of all gradients as if they lay in one process: each part counted once, wherever it lies how often.

    Every rank of the mesh calls it; the answer is the same on all.

    Args:
        held: the weights, those of each kind with the mesh and the axes that they differ along.
        order: of the norm, such as 2.0, 1.0 or ``math.inf``.

    Raises:
        AxisError: the weights are on meshes of different ranks.

    >>> from pgmesh.parallel.weights import Held, norm
    >>> layer = torch.nn.Linear(3, 1, bias=False)
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> norm(Held(layer, mesh))                         # in a dry world nothing is summed: an eighth of three
    tensor(0.6124, dtype=torch.float64)
    """
    if not held or any(set(each.mesh.ranks()) != set(held[0].mesh.ranks()) for each in held):
        raise AxisError("norm and clip are given weights on one mesh and views of it, such as Held(model, mesh, 'pp').")
    mesh = held[0].mesh
    device = next((weight.device for each in held for weight in each.weights), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    for each in held:
        for part, different in each.shares():
            size = torch.linalg.vector_norm(part, order).to(total)
            total = torch.maximum(total, size) if math.isinf(order) else total + size**order * different / mesh.size()
    dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group=mesh.group())
    return total if math.isinf(order) else total ** (1 / order)


def clip(limit: float, *held: Held, order: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their norm is at most the limit, as torch's clip_grad_norm_ does in one process.

    Args:
        limit: the greatest norm to let stand.
        held: as for ``norm``.
        order: of the norm.

    Returns:
        The norm before.

    >>> from pgmesh.parallel.weights import Held, clip
    >>> layer = torch.nn.Linear(3, 1, bias=False)
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> clip(0.1, Held(layer, mesh)) > 0.1
    tensor(True)
    """
    found = norm(*held, order=order)
    scale = torch.clamp(limit / (found + 1e-6), max=1.0)
    done = set[int]()
    for weight in (weight for each in held for weight in each.weights):
        if weight.grad is not None and id(weight) not in done:
            gradient = local(weight.grad)
            gradient.mul_(scale.to(gradient))
            done.add(id(weight))
    return found
