"""Comparisons of ranks: of the initial weights when methods are applied, and of the inputs of the first training step.

Ranks exchange a few integers. A difference is an error on every rank of the exchange.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from pgmesh._util.formatting import name_ranks
from pgmesh.errors import MethodError, ShapeError
from pgmesh.mesh import ProcessGroupMesh
from pgmesh.parallel.base import Level, Method
from pgmesh.parallel.divisibility import format_sizes
from pgmesh.parallel.nests import tensors_in

SAMPLES = 64
"""Number of values of a tensor that are compared at most, evenly spaced."""
UNITS = ("rows", "positions", "tokens")
"""What ``count_inputs`` counts."""


def exchange_group(mesh: ProcessGroupMesh, ranks: Sequence[int]) -> ProcessGroup:
    """The Gloo group of some ranks of a mesh, for CPU tensors wherever the model is.

    So ranks do not wait for kernels on a GPU, and ranks without weights use the same group. Untested on GPUs.
    """
    options = {} if dist.get_backend() == "fake" else {"backend": "gloo"}
    return mesh.group_of(ranks, **options)


def gather_numbers(mesh: ProcessGroupMesh, ranks: Sequence[int], numbers: Iterable[int]) -> dict[int, list[int]]:
    """All-gather of integers over some ranks, in mesh order, each of which calls it with equally many."""
    own = torch.tensor([*numbers], dtype=torch.int64, device="cpu")
    gathered = [own.clone() for _ in ranks]
    if len(ranks) > 1:
        dist.all_gather(gathered, own, group=exchange_group(mesh, ranks))
    return {rank: each.tolist() for rank, each in zip(ranks, gathered)}


def digest(value: object) -> int:
    """Positive integer of 62 bits that differs for values with different texts."""
    return 1 + (int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 2)


def sample(tensor: Tensor) -> list[Any]:
    """Evenly spaced values of a tensor; [] without values of its own: of a meta tensor, or of a shard."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local() if all(each.is_replicate() for each in tensor.placements) else tensor.to("meta")
    if tensor.is_meta:
        return []
    flat = tensor.detach().reshape(-1)
    values: list[Any] = flat[:: max(1, -(-flat.numel() // SAMPLES))].tolist()
    return values


# ---- weights ----


def compare_weights(
    mesh: ProcessGroupMesh,
    ranks: Sequence[int],
    tensors: Mapping[str, Tensor],
    broadcast: Container[str] = (),
    receives: bool = False,
) -> None:
    """Compare names, shapes, dtypes, ``requires_grad`` and samples of the values of parameters and buffers.

    Args:
        mesh: the mesh.
        ranks: the ranks that compare, with this one, in mesh order.
        tensors: the parameters and buffers by name.
        broadcast: names of the tensors that DDP overwrites where ``receives`` is True.
        receives: True if this rank gets them.

    Raises:
        MethodError: some differ.
    """
    kinds = {name: f"{tuple(each.shape)} {each.dtype} {each.requires_grad}" for name, each in tensors.items()}
    values = {name: 0 if receives and name in broadcast else digest(sample(each)) for name, each in tensors.items()}
    own = [digest(kinds), *(digest([values[n] for n in tensors if (n in broadcast) is kind]) for kind in (False, True))]
    if receives:
        own[2] = 0
    per_rank = gather_numbers(mesh, ranks, own).values()
    if all(len({*numbers} - {0}) <= 1 for numbers in zip(*per_rank)):
        return
    described = [{name: (kinds[name], values[name]) for name in tensors}] * len(ranks)
    dist.all_gather_object(described, described[0], group=exchange_group(mesh, ranks))
    for name in dict.fromkeys(name for each in described for name in each):
        holders: dict[str, list[int]] = {}
        first_value = next((each[name][1] for each in described if name in each and each[name][1]), 0)
        for rank, each in zip(ranks, described):
            kind, value = each.get(name, ("is missing", first_value))
            kind += ", other values" if value not in (0, first_value) else ""
            holders.setdefault(kind, []).append(rank)
        if len(holders) > 1:
            found = "; ".join(f"{kind} on {name_ranks(these)}" for kind, these in [*holders.items()][:4])
            raise MethodError(
                f"ranks start with different weights, of which the first is {name}: {found}.\n\n"
                "  torch.manual_seed(0)   # on all ranks, before the module is built\n"
                "  together.broadcast(module)   # before apply: the values of the first rank; together = compose(...)"
            )


# ---- inputs ----


def compared_units(method: Method) -> tuple[str, ...]:
    """What all ranks along the axes of a method need the same number of, as in ``UNITS``."""
    if method.differs == "experts":
        return ("tokens",)
    return ("rows",) if method.differs == "rows" or method.level is Level.PIPELINE else ("rows", "positions")


def compare_inputs(
    mesh: ProcessGroupMesh, ranks: Sequence[int], methods: Iterable[Method], equal_parts: bool, inputs: object
) -> None:
    """Compare the numbers of rows, positions and tokens of a batch, in all blocks, also in those without this rank.

    Args:
        mesh: the mesh.
        ranks: the ranks that compare, with this one, in mesh order.
        methods: the methods of a composition.
        equal_parts: True if ranks that read different rows need the same number of them.
        inputs: the batch, a nest of mappings, lists, tuples and dataclasses.

    Raises:
        ShapeError: some differ; the same on every rank.
    """
    per_rank = gather_numbers(mesh, ranks, count_inputs(inputs))
    for method in methods:
        depends_on_parts = method.differs in ("rows", "experts")
        if depends_on_parts and not equal_parts:
            continue
        axes = method.mesh.along(*{*method.owns, *method.average_axes}).axes
        blocks = [block for block in method.mesh.partition(*axes) if block[0] in per_rank]
        for unit, block in itertools.product(compared_units(method), blocks):
            holders: dict[int, list[int]] = {}
            for rank in block:
                holders.setdefault(per_rank[rank][UNITS.index(unit)], []).append(rank)
            if len(holders) > 1:
                counts = [f"{n} on {name_ranks(these)}" for n, these in holders.items()]
                weighted = "\n  compose(..., equal_parts=False)   # with the loss of together.mean(loss_sum, tokens)"
                raise ShapeError(
                    f"{type(method).__name__} needs the same number of {unit} on each rank along "
                    f"{format_sizes(method.mesh, axes)}, but there are "
                    f"{'; '.join([*counts[:4], *(['...'] if counts[4:] else [])])}.\n\n"
                    "  together.share(batch)   # equal parts; together = compose(...)"
                    + (weighted if depends_on_parts else "")
                )


def count_inputs(inputs: object) -> tuple[int, int, int]:
    """Number of rows, positions and tokens of the first tensor in a nest of mappings, lists, tuples and dataclasses.

    Rows are its first dimension and positions its second. A token is a whole number, or a vector of other numbers.
    """
    first = next((each for each in tensors_in(inputs) if each.ndim and not each.is_nested), None)
    if first is None:
        return 0, 0, 0
    is_vectors = first.ndim > 1 and (first.is_floating_point() or first.is_complex())
    tokens = first.shape[:-1].numel() if is_vectors else first.numel()
    return first.size(0), first.size(1) if first.ndim > 1 else 0, tokens
