"""Comparisons of ranks: of the initial weights when methods are applied, and of the inputs of the first training step.

Ranks exchange a few integers. A difference is an error on every rank of the exchange.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


def ranks_by_value(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """The ranks that have each value, from the value of each rank."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


# ---- weights ----


@dataclass(frozen=True)
class Description:
    """What ranks compare of a parameter or buffer."""

    kind: str
    """Shape, dtype and ``requires_grad``."""
    value: int
    """Digest of samples of its values; 0 if they are not compared on this rank."""


MISSING = Description("is missing", 0)


def compare_weights(
    mesh: ProcessGroupMesh,
    ranks: Sequence[int],
    tensors: Mapping[str, Tensor],
    broadcast: Collection[str] = (),
    receives: bool = False,
) -> None:
    """Compare names, shapes, dtypes, ``requires_grad`` and samples of the values of parameters and buffers.

    Ranks first exchange two digests each, and their descriptions only if some digests differ. Example: on
    ``dp=2, tp=2``, DDP broadcasts along dp. So the values of ranks 0 and 1 are compared, which send them, and those of
    ranks 2 and 3 are not.

    Args:
        mesh: the mesh.
        ranks: the ranks that compare, with this one, in mesh order.
        tensors: the parameters and buffers by name.
        broadcast: names of the tensors that DDP overwrites where ``receives`` is True.
        receives: True if this rank gets them.

    Raises:
        MethodError: some differ.
    """
    described = {
        name: Description(
            f"{tuple(each.shape)} {each.dtype} {each.requires_grad}",
            0 if receives and name in broadcast else digest(sample(each)),
        )
        for name, each in tensors.items()
    }
    of_senders = [each.value for name, each in described.items() if name in broadcast]
    of_all = [(name, each.kind, None if name in broadcast else each.value) for name, each in described.items()]
    digests = [digest(of_all), 0 if receives else digest(of_senders)]
    per_rank = gather_numbers(mesh, ranks, digests).values()
    if all(len({*numbers} - {0}) == 1 for numbers in zip(*per_rank)):
        return
    gathered = [described] * len(ranks)
    dist.all_gather_object(gathered, described, group=exchange_group(mesh, ranks))
    raise_first_difference(dict(zip(ranks, gathered)))


def raise_first_difference(per_rank: Mapping[int, Mapping[str, Description]]) -> None:
    """Raise the error of the first tensor that differs.

    Args:
        per_rank: for each rank, the descriptions by name.
    """
    for name in dict.fromkeys(itertools.chain(*per_rank.values())):
        described = {rank: each.get(name, MISSING) for rank, each in per_rank.items()}
        first_value = next((each.value for each in described.values() if each.value), 0)
        holders = ranks_by_value(
            {
                rank: each.kind if each.value in (0, first_value) else f"{each.kind}, other values"
                for rank, each in described.items()
            }
        )
        if len(holders) > 1:
            found = [f"{text} on {name_ranks(ranks)}" for text, ranks in holders.items()]
            raise MethodError(
                f"ranks start with different weights, of which the first is {name}: {'; '.join(found[:4])}.\n\n"
                "  torch.manual_seed(0)   # on all ranks, before the module is built\n"
                "  together.broadcast(module)   # before apply: the values of the first rank; together = compose(...)"
            )


# ---- inputs ----


class Batch(NamedTuple):
    """What ranks compare of a batch: its rows, the first dimension; its positions, the second; tokens; and values."""

    rows: int
    positions: int
    tokens: int
    values: int
    """Digest of samples of whole numbers; 0 for others, which ranks may have computed with other rounding."""


def compared_fields(method: Method) -> tuple[str, ...]:
    """The fields of ``Batch`` that have to be equal on all ranks along the axes of a method."""
    if method.differs == "experts":
        return ("tokens",)
    if method.differs == "rows" or method.level is Level.PIPELINE:
        return ("rows",)
    return ("rows", "positions", "values") if method.differs == "weights" else ("rows", "positions")


def compare_inputs(
    mesh: ProcessGroupMesh, ranks: Sequence[int], methods: Iterable[Method], equal_parts: bool, inputs: object
) -> None:
    """Compare a batch along the axes of each method, in all blocks, also in those without this rank.

    Args:
        mesh: the mesh.
        ranks: the ranks that compare, with this one, in mesh order.
        methods: the methods of a composition.
        equal_parts: True if ranks that read different rows need the same number of them.
        inputs: the batch, a nest of mappings, lists, tuples and dataclasses.

    Raises:
        ShapeError: some differ; the same on every rank.
    """
    per_rank = {rank: Batch(*each) for rank, each in gather_numbers(mesh, ranks, describe_batch(inputs)).items()}
    for method in methods:
        depends_on_parts = method.differs in ("rows", "experts")
        if depends_on_parts and not equal_parts:
            continue
        axes = method.mesh.along(*{*method.owns, *method.average_axes}).axes
        blocks = [block for block in method.mesh.partition(*axes) if block[0] in per_rank]
        for unit, block in itertools.product(compared_fields(method), blocks):
            holders = ranks_by_value({rank: getattr(per_rank[rank], unit) for rank in block})
            if len(holders) > 1:
                along = f"on each rank along {format_sizes(method.mesh, axes)}"
                raise (
                    _unequal_values(method, along, holders)
                    if unit == "values"
                    else _unequal_numbers(method, along, holders, unit, weighs=depends_on_parts)
                )


def _unequal_values(method: Method, along: str, holders: Mapping[Any, Sequence[int]]) -> ShapeError:
    texts = [name_ranks(ranks) for ranks in holders.values()]
    return ShapeError(
        f"{type(method).__name__} needs the same inputs {along}, but those of {' and of '.join(texts[:4])} differ.\n\n"
        "  DistributedSampler(dataset, num_replicas=together.num_replicas, rank=together.rank)\n"
        "  together.share(batch)   # of a batch that all ranks have; together = compose(...)"
    )


def _unequal_numbers(
    method: Method, along: str, holders: Mapping[Any, Sequence[int]], unit: str, *, weighs: bool
) -> ShapeError:
    """The error for unequal numbers of a unit.

    Args:
        weighs: the loss of ``mean`` would weigh them.
    """
    texts = [f"{number} on {name_ranks(ranks)}" for number, ranks in holders.items()]
    weighted = "\n  compose(..., equal_parts=False)   # with the loss of together.mean(loss_sum, tokens)"
    return ShapeError(
        f"{type(method).__name__} needs the same number of {unit} {along}, but there are "
        f"{'; '.join([*texts[:4], *(['...'] if texts[4:] else [])])}.\n\n"
        "  together.share(batch)   # equal parts; together = compose(...)" + weighted * weighs
    )


def describe_batch(inputs: object) -> Batch:
    """Describe the first tensor in a nest. A token is a whole number, or a vector of other numbers."""
    first = next((each for each in tensors_in(inputs) if each.ndim and not each.is_nested), None)
    if first is None:
        return Batch(0, 0, 0, 0)
    is_whole = not (first.is_floating_point() or first.is_complex())
    tokens = first.numel() if is_whole or first.ndim == 1 else first.shape[:-1].numel()
    values = digest(sample(first)) if is_whole else 0
    return Batch(first.size(0), first.size(1) if first.ndim > 1 else 0, tokens, values)
